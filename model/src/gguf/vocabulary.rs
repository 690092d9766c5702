//! The tokenizer of a GGUF file, as the `tokenizer.json` that means the same.
//!
//! A file has the tokens with their types, the merges or scores, and the name of the rule that splits a text into words.
//! Those names and rules are llama.cpp's; what they do is defined by the `tokenizer.json` of the models they are named for.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, json};

use super::{Header, Value};
use crate::error::quoted;

/// Splits of Llama 3: up to three digits together.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Splits of Qwen 2 and 3: each digit alone.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The mark of a space in SentencePiece.
const SPACE: &str = "\u{2581}";

/// A rule named by `tokenizer.ggml.pre`.
struct Rule {
    names: &'static [&'static str],
    /// The pattern of a word; `None` for GPT-2's, which the library has.
    words: Option<&'static str>,
    /// Whether each digit is a word of its own, before the pattern is applied.
    digits: bool,
    /// Whether text is normalised to NFC.
    nfc: bool,
    /// Whether a word that is a token is taken whole.
    whole: bool,
    /// Whether a text begins with the bos token unless `add_bos_token` says otherwise.
    begins: bool,
}

const GPT2: Rule =
    Rule { names: &["gpt-2"], words: None, digits: false, nfc: false, whole: false, begins: false };
const RULES: [Rule; 4] = [
    GPT2,
    Rule {
        names: &["llama-bpe", "llama3", "llama-v3"],
        words: Some(LLAMA3),
        whole: true,
        begins: true,
        ..GPT2
    },
    Rule { names: &["qwen2", "deepseek-r1-qwen"], words: Some(QWEN2), nfc: true, ..GPT2 },
    Rule { names: &["smollm"], digits: true, ..GPT2 },
];

/// Types of tokens: `tokenizer.ggml.token_type`.
const NORMAL: f32 = 1.0;
const UNKNOWN: f32 = 2.0;
const CONTROL: f32 = 3.0;
const USER_DEFINED: f32 = 4.0;

/// A tokenizer in a file.
pub(super) struct Vocabulary<'a> {
    /// The contents of a `tokenizer.json`.
    pub(super) json: Vec<u8>,
    /// The source of the chat template.
    pub(super) template: Option<&'a str>,
    /// The special tokens that templates name.
    pub(super) special: BTreeMap<String, String>,
}

/// The kind of tokenizer.
enum Kind {
    /// Byte-level BPE.
    Bpe(&'static Rule),
    /// SentencePiece's BPE: merges follow from scores.
    SentencePiece,
}

fn text<'a>(header: &Header<'a>, key: &str) -> Option<&'a str> {
    match header.values.get(key) {
        Some(&Value::Text(text)) => Some(text),
        _ => None,
    }
}

/// `None` if the file has no tokenizer; an error for one that is not read.
fn kind(header: &Header<'_>) -> Result<Option<Kind>, String> {
    let is = |key: &str| text(header, key).map_or_else(|| "missing".to_owned(), quoted);
    match text(header, "tokenizer.ggml.model") {
        None | Some("none" | "no_vocab") => Ok(None),
        Some("llama") => Ok(Some(Kind::SentencePiece)),
        Some("gpt2") => {
            let key = "tokenizer.ggml.pre";
            let name = text(header, key).unwrap_or_default();
            let rule = RULES.iter().find(|rule| rule.names.contains(&name));
            let names = RULES.map(|rule| rule.names.join(", ")).join(", ");
            rule.map(|rule| Some(Kind::Bpe(rule)))
                .ok_or_else(|| format!("{key} is {}; supported: {names}", is(key)))
        }
        Some(_) => {
            let key = "tokenizer.ggml.model";
            Err(format!("{key} is {}; supported: gpt2, llama", is(key)))
        }
    }
}

/// Why text cannot be used with this file; `None` if its tokenizer is read.
pub(super) fn note(header: &Header<'_>) -> Option<String> {
    let why = match kind(header) {
        Ok(Some(_)) => return None,
        Ok(None) => "the file has none".to_owned(),
        Err(why) => why,
    };
    Some(format!("the tokenizer of this GGUF file is not read ({why}): give token ids"))
}

impl<'a> Vocabulary<'a> {
    /// Reads a file's tokenizer; `None` if it has none, or one that is not read.
    pub(super) fn read(header: &Header<'a>) -> Result<Option<Self>, String> {
        let Ok(Some(kind)) = kind(header) else { return Ok(None) };
        let tokens = Tokens::read(header)?;
        let (begins, model) = match &kind {
            Kind::Bpe(rule) => (rule.begins, tokens.bpe(header, rule)?),
            Kind::SentencePiece => (true, tokens.sentence_piece(header)?),
        };
        let json = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": tokens.added(),
            "normalizer": normalizer(header, &kind),
            "pre_tokenizer": pre_tokenizer(&kind),
            "post_processor": tokens.frame(header, begins)?,
            "decoder": decoder(&kind),
            "model": model,
        });
        Ok(Some(Self {
            json: json.to_string().into_bytes(),
            template: text(header, "tokenizer.chat_template"),
            special: tokens.special(header)?,
        }))
    }
}

/// The tokens of a file by id.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    kinds: Vec<f32>,
    ids: HashMap<&'a str, usize>,
}

impl<'a> Tokens<'a> {
    fn read(header: &Header<'a>) -> Result<Self, String> {
        let texts = texts(header, "tokens")?;
        let kinds = match header.values.get("tokenizer.ggml.token_type") {
            None => vec![NORMAL; texts.len()],
            Some(_) => numbers(header, "token_type", texts.len())?,
        };
        let mut ids = HashMap::new();
        for (id, token) in texts.iter().enumerate() {
            if let Some(first) = ids.insert(*token, id) {
                let token = quoted(token);
                return Err(format!(
                    "tokenizer.ggml.tokens has {token} twice, at {first} and {id}"
                ));
            }
        }
        Ok(Self { texts, kinds, ids })
    }

    /// Tokens that are found in a text before it is split: they need not be special.
    fn added(&self) -> Vec<serde_json::Value> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        let added = all.filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
        added
            .map(|(id, (text, kind))| {
                json!({
                    "id": id,
                    "content": text,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": *kind != USER_DEFINED,
                })
            })
            .collect()
    }

    fn vocabulary(&self) -> Map<String, serde_json::Value> {
        self.texts.iter().enumerate().map(|(id, text)| ((*text).to_owned(), json!(id))).collect()
    }

    fn bpe(&self, header: &Header<'_>, rule: &Rule) -> Result<serde_json::Value, String> {
        let mut merges = Vec::new();
        for (i, merge) in texts(header, "merges")?.into_iter().enumerate() {
            let known = |part: &str| self.ids.contains_key(part);
            match merge.split_once(' ') {
                Some((left, right)) if known(left) && known(right) => merges.push([left, right]),
                _ => {
                    let merge = quoted(merge);
                    return Err(format!(
                        "tokenizer.ggml.merges has {merge} at {i}; expected two tokens"
                    ));
                }
            }
        }
        Ok(json!({
            "type": "BPE",
            "ignore_merges": rule.whole,
            "vocab": self.vocabulary(),
            "merges": merges,
        }))
    }

    /// The merges are those of two tokens that give a third, the one with the highest score first, as transformers
    /// derives them from a SentencePiece model.
    fn sentence_piece(&self, header: &Header<'_>) -> Result<serde_json::Value, String> {
        let scores = numbers(header, "scores", self.texts.len())?;
        let mut merges = Vec::new();
        for ((text, score), _) in
            self.texts.iter().zip(scores).zip(&self.kinds).filter(|(_, kind)| **kind == NORMAL)
        {
            let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
            let id = |part: &str| self.ids.get(part).copied();
            let mut pairs: Vec<_> = cuts
                .filter_map(|(left, right)| Some((id(left)?, id(right)?, left, right)))
                .collect();
            pairs.sort_unstable();
            merges.extend(pairs.into_iter().map(|(_, _, left, right)| (score, left, right)));
        }
        let length = |part: &str| part.chars().count();
        merges.sort_by(|(a, a_left, a_right), (b, b_left, b_right)| {
            let longer = length(b_left).cmp(&length(a_left));
            b.total_cmp(a).then(longer).then(length(b_right).cmp(&length(a_right)))
        });
        let merges: Vec<_> = merges.into_iter().map(|(_, left, right)| [left, right]).collect();
        let unknown = self.kinds.iter().position(|kind| *kind == UNKNOWN);
        Ok(json!({
            "type": "BPE",
            "unk_token": unknown.map(|id| self.texts[id]),
            "fuse_unk": true,
            "byte_fallback": true,
            "vocab": self.vocabulary(),
            "merges": merges,
        }))
    }

    /// The token with the id of this value.
    fn named(&self, header: &Header<'_>, key: &str) -> Result<Option<&'a str>, String> {
        let key = format!("tokenizer.ggml.{key}_token_id");
        let Some(value) = header.values.get(&key[..]) else { return Ok(None) };
        let id = if let Value::Whole(id) = value { usize::try_from(*id).ok() } else { None };
        let token = id.and_then(|id| self.texts.get(id));
        let most = self.texts.len().saturating_sub(1);
        token
            .map(|token| Some(*token))
            .ok_or_else(|| format!("{key} is {value}; expected 0 to {most}"))
    }

    /// What is put around a text.
    fn frame(&self, header: &Header<'_>, begins: bool) -> Result<serde_json::Value, String> {
        let flag = |key: &str, default: bool| match header.values.get(key) {
            Some(&Value::Flag(flag)) => flag,
            _ => default,
        };
        let named = |name: &str, wanted: bool| {
            if wanted { self.named(header, name) } else { Ok(None) }
        };
        let first = named("bos", flag("tokenizer.ggml.add_bos_token", begins))?;
        let last = named("eos", flag("tokenizer.ggml.add_eos_token", false))?;
        let place = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
        let sequence = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
        let framed = |inner: &[&str]| -> Vec<serde_json::Value> {
            let inner = inner.iter().map(|id| sequence(id));
            first.map(place).into_iter().chain(inner).chain(last.map(place)).collect()
        };
        let special = [first, last].into_iter().flatten().map(|token| {
            let ids = json!({ "id": token, "ids": [self.ids[token]], "tokens": [token] });
            (token.to_owned(), ids)
        });
        Ok(json!({
            "type": "TemplateProcessing",
            "single": framed(&["A"]),
            "pair": framed(&["A", "B"]),
            "special_tokens": Map::from_iter(special),
        }))
    }

    /// The tokens that chat templates refer to by name.
    fn special(&self, header: &Header<'_>) -> Result<BTreeMap<String, String>, String> {
        let names = [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")];
        let mut all = BTreeMap::new();
        for (name, key) in names {
            if let Some(token) = self.named(header, key)? {
                all.insert(format!("{name}_token"), token.to_owned());
            }
        }
        Ok(all)
    }
}

fn texts<'a>(header: &Header<'a>, key: &str) -> Result<Vec<&'a str>, String> {
    let key = format!("tokenizer.ggml.{key}");
    let list = match header.values.get(&key[..]) {
        Some(Value::List(list)) => list.texts(),
        _ => None,
    };
    list.ok_or_else(|| format!("{key} is missing or no list of texts in UTF-8"))
}

fn numbers(header: &Header<'_>, key: &str, count: usize) -> Result<Vec<f32>, String> {
    let key = format!("tokenizer.ggml.{key}");
    let list = match header.values.get(&key[..]) {
        Some(Value::List(list)) => list.numbers(),
        _ => None,
    };
    list.filter(|list| list.len() == count && list.iter().all(|x| x.is_finite()))
        .ok_or_else(|| format!("{key} is missing or no list of {count} finite numbers"))
}

fn normalizer(header: &Header<'_>, kind: &Kind) -> serde_json::Value {
    match kind {
        Kind::Bpe(rule) if rule.nfc => json!({ "type": "NFC" }),
        Kind::Bpe(_) => serde_json::Value::Null,
        Kind::SentencePiece => {
            let prefix = header.values.get("tokenizer.ggml.add_space_prefix");
            let mut steps =
                vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE })];
            if prefix != Some(&Value::Flag(false)) {
                steps.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
            }
            json!({ "type": "Sequence", "normalizers": steps })
        }
    }
}

fn byte_level(own_pattern: bool) -> serde_json::Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": own_pattern })
}

fn pre_tokenizer(kind: &Kind) -> serde_json::Value {
    let Kind::Bpe(rule) = kind else { return serde_json::Value::Null };
    let mut steps = Vec::new();
    if rule.digits {
        steps.push(json!({ "type": "Digits", "individual_digits": true }));
    }
    if let Some(pattern) = rule.words {
        let pattern = json!({ "Regex": pattern });
        steps.push(
            json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false }),
        );
    }
    steps.push(byte_level(rule.words.is_none()));
    json!({ "type": "Sequence", "pretokenizers": steps })
}

fn decoder(kind: &Kind) -> serde_json::Value {
    match kind {
        Kind::Bpe(_) => byte_level(true),
        Kind::SentencePiece => json!({ "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": SPACE }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] }),
    }
}
