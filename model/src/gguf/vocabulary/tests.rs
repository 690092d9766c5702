//! Tokenizers in GGUF files, against the `tokenizer.json` that they were made from.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use proptest::prelude::*;
use proptest::test_runner::Config;
use serde_json::{Value as Json, json};

use super::super::tests::{bytes, read};
use crate::{Chat, Message, Tokenizer};

/// Texts that tokenizers differ on.
const HARD: [&str; 16] = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\tand\ttabs ",
    "line\nline\r\n\r\n  line\n",
    "1234567890 3.14159 1,000,000 ٣٤",
    "I'm, you're, WE'LL, it'S don't",
    "naïve café — “quoted” … e\u{301}",
    "日本語のテキスト 中文 한국어",
    "emoji 😀👩‍👩‍👧 \u{200d}\u{feff}",
    "fn main() { println!(\"{}\", a[0] + b_1); }",
    "<|begin_of_text|>hi<|eot_id|> <|not_one|>",
    "\u{0}\u{1}\u{7f}\u{80}\u{ffff}",
    "ΑΒΓ абв ßẞ ǅ ǆ",
    "https://example.org/?q=a%20b&c=d#e",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden/llama3-rope-bf16")
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn list<'a>(kind: u32, items: impl Iterator<Item = Vec<u8>> + 'a) -> Vec<u8> {
    let items: Vec<_> = items.collect();
    let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
    [head, items.concat()].concat()
}

/// A GGUF file with 512 rows of embedding and these values.
fn file(mut values: Vec<(String, u32, Vec<u8>)>) -> Vec<u8> {
    values.push(("general.architecture".to_owned(), 8, text("llama")));
    let numbers = [
        ("embedding_length", 64_u32),
        ("block_count", 1),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("feed_forward_length", 128),
        ("context_length", 128),
    ];
    let number =
        |(key, value): (&str, u32)| (format!("llama.{key}"), 4, value.to_le_bytes().into());
    values.extend(numbers.map(number));
    let model = crate::Model::random(crate::Shape { vocab: 512, ..crate::Shape::default() }, 1);
    let mut head = [b"GGUF".to_vec(), 3_u32.to_le_bytes().to_vec()].concat();
    head.extend((model.graph.tensors.len() as u64).to_le_bytes());
    head.extend((values.len() as u64).to_le_bytes());
    for (key, kind, value) in values {
        head.extend([text(&key), kind.to_le_bytes().to_vec(), value].concat());
    }
    let mut data = Vec::new();
    for (i, tensor) in model.graph.tensors.iter().enumerate() {
        head.extend(text(&super::super::import::file_name(&tensor.name)));
        head.extend((tensor.shape.len() as u32).to_le_bytes());
        for side in tensor.shape.iter().rev() {
            head.extend(u64::from(*side).to_le_bytes());
        }
        head.extend(30_u32.to_le_bytes());
        head.extend((data.len() as u64).to_le_bytes());
        data.extend(model.weights.bytes(ir::TensorId(i as u32)));
        data.resize(data.len().next_multiple_of(32), 0);
    }
    head.resize(head.len().next_multiple_of(32), 0);
    [head, data].concat()
}

/// What a file says about its tokenizer.
#[derive(Clone, Default)]
struct Said {
    model: &'static str,
    pre: Option<&'static str>,
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<String>,
    scores: Vec<f32>,
    template: Option<String>,
    flags: Vec<(&'static str, bool)>,
    ids: Vec<(&'static str, u32)>,
}

impl Said {
    fn file(&self) -> Vec<u8> {
        let texts = |list: &[String]| self::list(8, list.iter().map(|item| text(item)));
        let mut values = vec![
            ("ggml.model".to_owned(), 8, text(self.model)),
            ("ggml.tokens".to_owned(), 9, texts(&self.tokens)),
        ];
        let kinds = self.kinds.iter().map(|kind| kind.to_le_bytes().to_vec());
        values.push(("ggml.token_type".to_owned(), 9, list(5, kinds)));
        values.extend(self.pre.map(|pre| ("ggml.pre".to_owned(), 8, text(pre))));
        if !self.merges.is_empty() {
            values.push(("ggml.merges".to_owned(), 9, texts(&self.merges)));
        }
        if !self.scores.is_empty() {
            let scores = self.scores.iter().map(|score| score.to_le_bytes().to_vec());
            values.push(("ggml.scores".to_owned(), 9, list(6, scores)));
        }
        values.extend(self.template.iter().map(|it| ("chat_template".to_owned(), 8, text(it))));
        for (name, flag) in &self.flags {
            values.push((format!("ggml.{name}"), 7, vec![u8::from(*flag)]));
        }
        for (name, id) in &self.ids {
            values.push((format!("ggml.{name}_token_id"), 4, id.to_le_bytes().to_vec()));
        }
        let named = |(key, kind, value)| (format!("tokenizer.{key}"), kind, value);
        file(values.into_iter().map(named).collect())
    }

    fn tokenizer(&self) -> Tokenizer {
        let model = read(&self.file()).unwrap_or_else(|error| panic!("{error}"));
        assert!(model.notes.iter().all(|note| !note.contains("tokenizer")), "{:?}", model.notes);
        reopened(&self.file()).expect("no error").expect("a tokenizer")
    }
}

fn reopened(file: &[u8]) -> Result<Option<Tokenizer>, String> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file).expect("a file");
    let model = crate::import(&path).map_err(|error| error.to_string())?;
    let found = model.tokenizer();
    found.map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))
}

fn original() -> Json {
    let bytes = std::fs::read(folder().join("tokenizer.json")).expect("a file");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// The golden tokenizer as a GGUF file says it.
fn golden() -> Said {
    let json = original();
    let vocabulary = json["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens = vec![String::new(); vocabulary.len()];
    for (token, id) in vocabulary {
        tokens[id.as_u64().expect("an id") as usize].clone_from(token);
    }
    let mut kinds = vec![1; tokens.len()];
    for added in json["added_tokens"].as_array().expect("a list") {
        kinds[added["id"].as_u64().expect("an id") as usize] = 3;
    }
    let merges = json["model"]["merges"].as_array().expect("merges").iter().map(|pair| {
        let part = |i: usize| pair[i].as_str().expect("a token");
        format!("{} {}", part(0), part(1))
    });
    let template = std::fs::read_to_string(folder().join("chat_template.jinja")).expect("a file");
    let (model, pre) = ("gpt2", Some("gpt-2"));
    let (merges, template) = (merges.collect(), Some(template));
    let ids = vec![("bos", 0), ("eos", 1)];
    Said { model, pre, tokens, kinds, merges, template, ids, ..Said::default() }
}

/// The golden tokenizer with other steps, as a `tokenizer.json` has them.
fn changed(fields: &Json, whole: bool) -> Tokenizer {
    let mut json = original();
    for (field, value) in fields.as_object().expect("an object") {
        json[field] = value.clone();
    }
    json["model"]["ignore_merges"] = json!(whole);
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).expect("a file");
    Tokenizer::load(dir.path(), 512).expect("a tokenizer")
}

fn same(one: &Tokenizer, other: &Tokenizer, name: &str) {
    for text in HARD {
        for special in [false, true] {
            let ids = one.encode(text, special).expect("ids");
            assert_eq!(ids, other.encode(text, special).expect("ids"), "{name} {text:?}");
            for skip in [false, true] {
                let text = one.decode(&ids, skip).expect("text");
                assert_eq!(text, other.decode(&ids, skip).expect("text"), "{name}");
            }
        }
    }
}

#[test]
fn a_tokenizer_gives_the_ids_of_the_one_that_it_was_made_from() {
    let (from_file, from_folder) = (golden().tokenizer(), changed(&json!({}), false));
    same(&from_file, &from_folder, "gpt-2");
    let lengths = HARD.map(|text| from_file.encode(text, true).expect("ids").len());
    assert!(lengths.iter().sum::<usize>() > 300, "{lengths:?}");
}

/// The steps in the files of Llama 3, Qwen 2 and SmolLM2.
#[test]
fn rules_are_those_of_the_models_that_they_are_named_for() {
    let level = |own: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": own});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let steps =
        |first: Json, own: bool| json!({"type": "Sequence", "pretokenizers": [first, level(own)]});
    let words = |digits: &str| {
        format!(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        )
    };
    let begin = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}},
    });
    let llama = json!({"pre_tokenizer": steps(split(&words("\\p{N}{1,3}")), false), "post_processor": begin});
    let qwen = json!({"pre_tokenizer": steps(split(&words("\\p{N}")), false), "normalizer": {"type": "NFC"}});
    let digits = json!({"type": "Digits", "individual_digits": true});
    let smol = json!({"pre_tokenizer": steps(digits, true)});
    for (pre, fields, whole) in
        [("llama-bpe", llama, true), ("qwen2", qwen, false), ("smollm", smol, false)]
    {
        let said = Said { pre: Some(pre), ..golden() };
        same(&said.tokenizer(), &changed(&fields, whole), pre);
    }
}

#[test]
fn a_file_says_what_is_put_around_a_text() {
    let ids = |pre, flags: &[_]| {
        let said = Said { pre: Some(pre), flags: flags.to_vec(), ..golden() };
        said.tokenizer().encode("a", true).expect("ids")
    };
    let plain = ids("gpt-2", &[]);
    assert_eq!(ids("llama-bpe", &[]), [&[0][..], &plain].concat());
    assert_eq!(ids("llama-bpe", &[("add_bos_token", false)]), plain);
    let both = [("add_bos_token", true), ("add_eos_token", true)];
    assert_eq!(ids("qwen2", &both), [&[0][..], &plain, &[1]].concat());
}

#[test]
fn the_chat_template_of_a_file_is_rendered() {
    let messages = [Message::new("user", "hi")];
    let chat =
        Chat { messages: &messages, add_generation_prompt: true, extra: None, now: UNIX_EPOCH };
    let from_folder = Tokenizer::load(&folder(), 512).expect("a tokenizer");
    let from_file = golden().tokenizer();
    assert_eq!(
        from_file.chat(&chat).expect("a prompt"),
        from_folder.chat(&chat).expect("a prompt")
    );
    let named = Said { template: Some("{{ bos_token }}{{ eos_token }}".into()), ..golden() };
    assert_eq!(named.tokenizer().chat(&chat).expect("a prompt"), "<|begin_of_text|><|eot_id|>");
    assert!(!Said { template: None, ..golden() }.tokenizer().has_chat_template());
}

/// Tokens of a small SentencePiece model; the score of a longer token decides what is joined first.
fn sentence_piece() -> Said {
    let mut tokens: Vec<(String, i32, f32)> =
        vec![("<unk>".into(), 2, 0.0), ("<s>".into(), 3, 0.0), ("</s>".into(), 3, 0.0)];
    tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 6, 0.0)));
    let pieces =
        ["he", "ll", "\u{2581}he", "llo", "ell", "\u{2581}hello", "\u{2581}", "h", "e", "l", "o"];
    tokens.extend((0..).zip(pieces).map(|(i, piece)| (piece.into(), 1, -(i as f32))));
    Said {
        model: "llama",
        tokens: tokens.iter().map(|token| token.0.clone()).collect(),
        kinds: tokens.iter().map(|token| token.1).collect(),
        scores: tokens.iter().map(|token| token.2).collect(),
        ids: vec![("bos", 1), ("eos", 2), ("unknown", 0)],
        ..Said::default()
    }
}

#[test]
fn scores_of_sentence_piece_decide_what_is_joined() {
    let said = sentence_piece();
    let tokenizer = said.tokenizer();
    let names = |text: &str| -> Vec<String> {
        let ids = tokenizer.encode(text, true).expect("ids");
        ids.into_iter().map(|id| said.tokens[id as usize].clone()).collect()
    };
    assert_eq!(names("hello"), ["<s>", "\u{2581}hello"]);
    // `he` and `ll` are joined before `ell`.
    assert_eq!(names("ehell"), ["<s>", "\u{2581}", "e", "he", "ll"]);
    assert_eq!(names("eello ho"), ["<s>", "\u{2581}", "e", "e", "llo", "\u{2581}", "h", "o"]);
    // What is no token is written in bytes.
    assert_eq!(names("é"), ["<s>", "\u{2581}", "<0xC3>", "<0xA9>"]);
    let ids = tokenizer.encode("hello é</s>o", false).expect("ids");
    assert!(ids.contains(&2));
    assert_eq!(tokenizer.decode(&ids[..4], true).expect("text"), "hello é");
    let bare = Said { flags: vec![("add_space_prefix", false), ("add_bos_token", false)], ..said };
    let ids = bare.tokenizer().encode("he", true).expect("ids");
    assert_eq!(ids, [259]);
}

#[test]
fn tokenizers_that_are_not_read_are_named() {
    let cases = [
        (
            Said { model: "bert", ..golden() },
            "tokenizer.ggml.model is \"bert\"; supported: gpt2, llama",
        ),
        (
            Said { pre: Some("tekken"), ..golden() },
            "tokenizer.ggml.pre is \"tekken\"; supported: gpt-2, llama-bpe, llama3, llama-v3, qwen2, deepseek-r1-qwen, smollm",
        ),
        (Said { pre: None, ..golden() }, "tokenizer.ggml.pre is missing; supported: gpt-2"),
        (Said { model: "none", ..golden() }, "the file has none"),
    ];
    for (said, why) in cases {
        let model = read(&said.file()).expect("a model");
        let note = &model.notes[1];
        assert!(note.contains(why) && note.ends_with("give token ids"), "{note}");
        assert!(reopened(&said.file()).expect("no error").is_none());
    }
    assert!(
        read(&bytes("gguf-q8_0-llama")).expect("a model").notes[1].contains("the file has none")
    );
}

#[test]
fn tables_that_contradict_each_other_are_refused() {
    let refused = |change: &dyn Fn(&mut Said)| {
        let mut said = golden();
        change(&mut said);
        reopened(&said.file()).expect_err("a refusal")
    };
    let text = refused(&|said| said.tokens[300] = said.tokens[299].clone());
    assert!(
        text.starts_with("FILE: tokenizer.ggml.tokens has \"") && text.contains("at 299 and 300"),
        "{text}"
    );
    let text = refused(&|said| said.merges[7] = "no_such token".into());
    let reason = "tokenizer.ggml.merges has \"no_such token\" at 7; expected two tokens";
    assert_eq!(text, format!("FILE: {reason}"));
    let text = refused(&|said| said.kinds.truncate(511));
    assert_eq!(text, "FILE: tokenizer.ggml.token_type is missing or no list of 512 finite numbers");
    let text = refused(&|said| said.merges.clear());
    assert_eq!(text, "FILE: tokenizer.ggml.merges is missing or no list of texts in UTF-8");
    let text = refused(&|said| said.template = Some("{% if".into()));
    assert!(text.starts_with("FILE: the chat template does not compile"), "{text}");
    let text = refused(&|said| said.tokens.truncate(0));
    assert!(text.starts_with("FILE: tokenizer.ggml.token_type"), "{text}");
    let mut said = sentence_piece();
    said.scores[5] = f32::NAN;
    let text = reopened(&said.file()).expect_err("a refusal");
    assert_eq!(text, "FILE: tokenizer.ggml.scores is missing or no list of 270 finite numbers");
    let mut said = golden();
    said.ids[0].1 = 512;
    said.flags.push(("add_bos_token", true));
    let text = reopened(&said.file()).expect_err("a refusal");
    assert!(text.contains("bos_token_id"), "{text}");
    let mut said = golden();
    said.tokens.push("beyond".into());
    said.kinds.push(1);
    let text = reopened(&said.file()).expect_err("a refusal");
    assert!(text.contains("gives token \"beyond\" id 512"), "{text}");
}

#[test]
fn damaged_tokenizers_give_an_error_or_a_tokenizer() {
    for whole in [golden().file(), sentence_piece().file()] {
        let end = whole.len() - 100_000;
        let edits = proptest::collection::vec((24..end, any::<u8>()), 1..6);
        let config = Config { cases: 40, failure_persistence: None, ..Config::default() };
        proptest!(config, |(edits in edits)| {
            let mut file = whole.clone();
            for (at, byte) in edits {
                file[at] = byte;
            }
            if let Ok(Some(tokenizer)) = reopened(&file) {
                for text in HARD {
                    let _ = tokenizer.encode(text, true);
                }
            }
        });
    }
}
