//! Model folders: safetensors, their index, configurations, tokenizers, chat templates.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use ir::TensorId;
use model::{Chat, Message, Tokenizer};

use super::guard::within;
use super::{file, in_scratch, write};

const GOLDEN: &str = "corpus/golden/llama-tied-f32";
const CHATTY: &str = "corpus/golden/llama3-rope-bf16";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The first bytes of `/etc/passwd`.
const ROOT: &str = "root:";

/// Most bytes of data after a framed header.
const DATA_MAX: u64 = 1 << 20;

/// A folder in the scratch folder that each thread prepares once.
fn folder(scratch: &Path, name: &str, prepare: impl FnOnce(&Path)) -> std::path::PathBuf {
    let dir = scratch.join(name);
    if !dir.is_dir() {
        std::fs::create_dir(&dir).expect("a folder within the scratch folder");
        prepare(&dir);
    }
    dir
}

/// Imports a folder; if that succeeds, reads every byte, and checks that the bytes come from inside the folder.
fn import(dir: &Path) {
    let Ok(model) = model::import(dir) else { return };
    for index in 0..model.graph.tensors.len() {
        let id = TensorId(index as u32);
        let bytes = model.weights.bytes(id);
        std::hint::black_box(bytes.iter().fold(0_u8, |all, byte| all ^ byte));
        // A dequantised tensor is in no file.
        let Some(range) = model.weights.file_range(id) else { continue };
        assert_eq!(range.path.parent(), Some(dir), "a file outside the folder was read");
        assert_eq!(range.bytes, bytes.len() as u64);
    }
}

/// The JSON header of a safetensors file.
fn header_of(bytes: &[u8]) -> &[u8] {
    let length = u64::from_le_bytes(*bytes.first_chunk().expect("a valid file has a length"));
    &bytes[8..8 + length as usize]
}

/// `R` and a whole file, or `H` and a header, which gets its length and, within limits, the data that it describes.
pub(super) fn safetensors(input: &[u8]) {
    let Some((&form, rest)) = input.split_first() else { return };
    let bytes = if form == b'H' { framed(rest) } else { rest.to_vec() };
    in_scratch(|scratch| {
        let dir = folder(scratch, "safetensors", |dir| {
            write(&dir.join("config.json"), &file(&format!("{GOLDEN}/config.json")));
        });
        write(&dir.join(SINGLE), &bytes);
        import(&dir);
    });
}

fn framed(header: &[u8]) -> Vec<u8> {
    let ends = serde_json::from_slice::<serde_json::Value>(header).ok().and_then(|header| {
        let end = |tensor: &serde_json::Value| tensor.get("data_offsets")?.get(1)?.as_u64();
        header.as_object()?.values().filter_map(end).max()
    });
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes.resize(bytes.len() + ends.unwrap_or(0).min(DATA_MAX) as usize, 0);
    bytes
}

pub(super) fn safetensors_seeds() -> Vec<Vec<u8>> {
    let whole = file(&format!("{GOLDEN}/{SINGLE}"));
    let small = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
    let raw = framed(small);
    vec![
        [b"H", header_of(&whole)].concat(),
        [&b"H"[..], &small[..]].concat(),
        [&b"R"[..], &raw[..]].concat(),
    ]
}

/// An index beside two shards of a valid model, and a valid file outside the folder.
pub(super) fn index(input: &[u8]) {
    in_scratch(|scratch| {
        let dir = folder(scratch, "index", |dir| {
            write(&dir.join("config.json"), &file(&format!("{GOLDEN}/config.json")));
            let whole = file(&format!("{GOLDEN}/{SINGLE}"));
            write(&dir.join("a.safetensors"), &whole);
            write(
                &dir.join("b.safetensors"),
                &framed(br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#),
            );
            write(&scratch.join("outside.safetensors"), &whole);
        });
        write(&dir.join(INDEX), input);
        import(&dir);
    });
}

pub(super) fn index_seeds() -> Vec<Vec<u8>> {
    let whole = file(&format!("{GOLDEN}/{SINGLE}"));
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(header_of(&whole)).expect("the golden header is JSON");
    let of = |shard: &str| {
        let names = header.keys().filter(|name| *name != "__metadata__");
        let map: serde_json::Map<_, _> =
            names.map(|name| (name.clone(), serde_json::Value::from(shard))).collect();
        serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map})
            .to_string()
            .into_bytes()
    };
    vec![of("a.safetensors"), of("../outside.safetensors"), of("b.safetensors")]
}

/// A configuration beside valid weights.
pub(super) fn config(input: &[u8]) {
    in_scratch(|scratch| {
        let dir = folder(scratch, "config", |dir| {
            write(&dir.join(SINGLE), &file(&format!("{GOLDEN}/{SINGLE}")));
        });
        write(&dir.join("config.json"), input);
        import(&dir);
    });
}

pub(super) fn config_seeds() -> Vec<Vec<u8>> {
    let folders = ["corpus/golden", "corpus/families"]
        .map(|parent| std::fs::read_dir(crate::root().join(parent)).expect("a folder of models"));
    let configs = folders.into_iter().flatten().map(|entry| entry.expect("an entry").path());
    let mut configs: Vec<_> =
        configs.filter_map(|folder| std::fs::read(folder.join("config.json")).ok()).collect();
    configs.sort();
    configs
}

/// A model for each kind of configuration. New ones go to the end: inputs that were found name them by number.
const QUANTISED: [&str; 12] = [
    "gptq-desc-act-g128-llama",
    "ct-w4a16-asym-g128-qwen2",
    "ct-nvfp4-llama",
    "fp8-block-llama",
    "awq-g128-qwen2",
    "ct-int8-llama",
    "bnb-nf4-llama",
    "ct-fp8-static-qwen3",
    "gptq-asym-g128-qwen2",
    "ct-w4a16-g32-qwen3",
    "mxfp4-gpt-oss",
    "fp8-block-qwen3-moe",
];

/// A digit that selects a quantised model, then its configuration if the next byte is `C`, or else the header of its
/// tensors.
pub(super) fn quantised(input: &[u8]) {
    let &[which, form, ref rest @ ..] = input else { return };
    let name = QUANTISED[usize::from(which) % QUANTISED.len()];
    let golden = |file: &str| self::file(&format!("corpus/quantised/{name}/{file}"));
    in_scratch(|scratch| {
        let dir = folder(scratch, name, |_| {});
        let whole = golden(SINGLE);
        if form == b'C' {
            write(&dir.join("config.json"), rest);
            write(&dir.join(SINGLE), &whole);
        } else {
            let data = &whole[8 + header_of(&whole).len()..];
            let length = (rest.len() as u64).to_le_bytes();
            write(&dir.join("config.json"), &golden("config.json"));
            write(&dir.join(SINGLE), &[&length[..], rest, data].concat());
        }
        import(&dir);
    });
}

pub(super) fn quantised_seeds() -> Vec<Vec<u8>> {
    let each = |(which, name): (u8, &str)| {
        let golden = |file: &str| self::file(&format!("corpus/quantised/{name}/{file}"));
        let whole = golden(SINGLE);
        let config = [&[which, b'C'][..], &golden("config.json")].concat();
        [config, [&[which, b'H'][..], header_of(&whole)].concat()]
    };
    (b'0'..).zip(QUANTISED).flat_map(each).collect()
}

const GGUF: [&str; 3] = ["gguf-q4_0-llama", "gguf-q4_k_m-qwen3", "gguf-q6_k-llama"];

/// Bytes of such a file in front of most of its data.
const GGUF_HEAD: usize = 2304;

fn gguf_file(which: usize) -> Vec<u8> {
    file(&format!("corpus/quantised/{}/model.gguf", GGUF[which % GGUF.len()]))
}

/// A GGUF file: `R` and the whole file, or a digit that selects a valid file, and what is in front of its data.
pub(super) fn gguf(input: &[u8]) {
    let Some((&form, rest)) = input.split_first() else { return };
    let mut bytes = rest.to_vec();
    if form != b'R' {
        bytes.extend(&gguf_file(form.wrapping_sub(b'0').into())[GGUF_HEAD..]);
    }
    in_scratch(|scratch| {
        let dir = folder(scratch, "gguf", |_| {});
        write(&dir.join("model.gguf"), &bytes);
        let Ok(model) = model::import(&dir.join("model.gguf")) else { return };
        for index in 0..model.graph.tensors.len() {
            let bytes = model.weights.bytes(TensorId(index as u32));
            std::hint::black_box(bytes.iter().fold(0_u8, |all, byte| all ^ byte));
        }
    });
}

pub(super) fn gguf_seeds() -> Vec<Vec<u8>> {
    let empty = [&b"RGGUF"[..], &3_u32.to_le_bytes(), &[0; 16]].concat();
    let head = |which: usize| [&[b'0' + which as u8], &gguf_file(which)[..GGUF_HEAD]].concat();
    (0..GGUF.len()).map(head).chain([empty]).collect()
}

/// A tokenizer without a template: loads it and encodes a few texts.
pub(super) fn tokenizer(input: &[u8]) {
    in_scratch(|scratch| {
        let dir = folder(scratch, "tokenizer", |_| {});
        write(&dir.join("tokenizer.json"), input);
        let Ok(tokenizer) = Tokenizer::load(&dir, 512) else { return };
        for text in
            ["", "hello world", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "\u{e9}\u{1f600}\0 x\r\n"]
        {
            let Ok(ids) = tokenizer.encode(text, true) else { continue };
            let _ = tokenizer.decode(&ids, false);
            let mut stream = tokenizer.stream(true);
            for id in ids.into_iter().take(64) {
                let _ = stream.push(id);
            }
        }
        let _ = tokenizer.decode(&[0, 255, 511, u32::MAX], true);
    });
}

pub(super) fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let small = br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":3,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"Lowercase"},"pre_tokenizer":{"type":"Split","pattern":{"Regex":"\\s+"},"behavior":"Isolated","invert":false},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":"<s>","ids":[3],"tokens":["<s>"]}}},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#;
    vec![small.to_vec(), file(&format!("{CHATTY}/tokenizer.json"))]
}

/// Memory limit of a template in the processes of `amk`.
const TEMPLATE_MEMORY: usize = 128 << 20;
const TEMPLATE_TIME: Duration = Duration::from_secs(10);

/// A template: compiles it, and renders a chat.
pub(super) fn chat_template(input: &[u8]) {
    in_scratch(|scratch| {
        let dir = folder(scratch, "chat", |dir| {
            // A small tokenizer: it is read for every template.
            write(&dir.join("tokenizer.json"), &tokenizer_seeds()[0]);
            let config = "tokenizer_config.json";
            write(&dir.join(config), &file(&format!("{CHATTY}/{config}")));
        });
        write(&dir.join("chat_template.jinja"), input);
        let render = move || {
            let tokenizer = Tokenizer::load(&dir, 512).ok()?;
            let message = |role: &str, content: &str| Message::new(role, content);
            let messages = [message("system", "be brief"), message("user", "hi")];
            let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
            let chat = Chat { messages: &messages, add_generation_prompt: true, extra: None, now };
            tokenizer.chat(&chat).ok()
        };
        // A template that runs away or makes the engine fail has no prompt.
        if let Ok(Some(prompt)) = within(TEMPLATE_MEMORY, TEMPLATE_TIME, render) {
            // The first word of the file that the dictionary names, unless the template contains it itself.
            let said = input.windows(ROOT.len()).any(|word| word == ROOT.as_bytes());
            assert!(said || !prompt.contains(ROOT), "a template read a file");
        }
    });
}

pub(super) fn chat_template_seeds() -> Vec<Vec<u8>> {
    let long = "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if m['role'] == 'system' %}<<{{ m.content | trim }}>>{% elif loop.last %}{{ m.content.split('x')[-1].strip() ~ eos_token }}{% else %}{{ m|tojson(indent=2) }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{% macro f(a) %}{{ a[::-1] }}{% endmacro %}{{ f('abc') }}{{ strftime_now('%d %b %Y') }}{% if add_generation_prompt %}{% generation %}go{% endgeneration %}{% endif %}";
    vec![file(&format!("{CHATTY}/chat_template.jinja")), long.as_bytes().to_vec()]
}
