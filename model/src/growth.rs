//! Bounds on the growth of a text in a tokenizer.
//!
//! A `tokenizer.json` is a small program: a `Replace` writes one text for every match of another, and three of them
//! that write a thousand letters for one turn a kilobyte into a terabyte. So the growth of each step is bounded from
//! its description before the file is used. A tokenizer that can multiply a text too much is refused, and so is a text
//! that could grow too long.

use serde::Deserialize;
use tokenizers::decoders::DecoderWrapper as Decoder;
use tokenizers::models::ModelWrapper as Model;
use tokenizers::normalizers::NormalizerWrapper as Normalizer;
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as PreTokenizer;
use tokenizers::processors::PostProcessorWrapper as PostProcessor;

/// Most bytes that a text may grow to during encoding, in the worst case.
const GROWN_MAX: u64 = 16 << 20;
/// Length of a text that every tokenizer must accept.
const TEXT_LEAST: u64 = 16 << 10;
/// Most bytes that a decoder may write for one byte of a token.
const DECODED_MAX: u64 = 16;
/// Longest token, in bytes.
const TOKEN_MAX: usize = 64 << 10;
/// Longest unknown token, in bytes: it is written for each unknown character.
const UNKNOWN_MAX: usize = 64;

/// A bound on the length of a text: `times` its bytes, plus `plus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    times: u64,
    plus: u64,
}

impl Growth {
    const NONE: Self = Self { times: 1, plus: 0 };

    fn by(times: u64) -> Self {
        Self { times, plus: 0 }
    }

    fn then(self, next: Self) -> Self {
        Self {
            times: self.times.saturating_mul(next.times),
            plus: self.plus.saturating_mul(next.times).saturating_add(next.plus),
        }
    }

    fn of(self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.times).saturating_add(self.plus)
    }

    pub(crate) fn check(self, text: &str) -> Result<(), String> {
        let (bytes, times) = (text.len() as u64, self.times);
        if self.of(bytes) <= GROWN_MAX {
            return Ok(());
        }
        let most = (GROWN_MAX - self.plus.min(GROWN_MAX)) / times;
        Err(format!(
            "a text of {bytes} bytes could grow to {times} times its length with this tokenizer; supported: up to {most} bytes"
        ))
    }
}

/// The parts of `tokenizer.json` that rewrite text, parsed as the tokenizer library parses them.
#[derive(Deserialize)]
pub(crate) struct Steps {
    #[serde(default)]
    normalizer: Option<Normalizer>,
    #[serde(default)]
    pre_tokenizer: Option<PreTokenizer>,
    #[serde(default)]
    post_processor: Option<PostProcessor>,
    #[serde(default)]
    decoder: Option<Decoder>,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

/// A token that is normalized when the file is read.
#[derive(Deserialize)]
struct Added {
    content: String,
}

impl Steps {
    /// The bound on growth, or the reason to refuse the tokenizer.
    pub(crate) fn growth(&self) -> Result<Growth, String> {
        let growth = Growth::NONE
            .then(self.normalizer.as_ref().map_or(Growth::NONE, normalizer))
            .then(self.pre_tokenizer.as_ref().map_or(Growth::NONE, pre_tokenizer))
            .then(self.post_processor.as_ref().map_or(Growth::NONE, post_processor));
        if growth.of(TEXT_LEAST) > GROWN_MAX {
            return Err(format!(
                "its normalizer, pre_tokenizer and post_processor can turn a text of {TEXT_LEAST} bytes into {}; supported: up to {GROWN_MAX}",
                growth.of(TEXT_LEAST)
            ));
        }
        let added = self.added_tokens.iter().map(|token| token.content.len() as u64).sum();
        if growth.of(added) > GROWN_MAX {
            return Err(format!(
                "its {} added tokens can grow to {} bytes; supported: up to {GROWN_MAX}",
                self.added_tokens.len(),
                growth.of(added)
            ));
        }
        let decoded = self.decoder.as_ref().map_or(1, decoder);
        if decoded > DECODED_MAX {
            return Err(format!(
                "its decoder can write {decoded} bytes for one of a token; supported: up to {DECODED_MAX}"
            ));
        }
        Ok(growth)
    }
}

/// Refuses tokens that are longer than any text they could represent.
pub(crate) fn check_tokens<'a>(
    model: &Model,
    mut tokens: impl Iterator<Item = &'a String>,
) -> Result<(), String> {
    let unknown = match model {
        Model::BPE(bpe) => bpe.unk_token.as_ref(),
        Model::WordPiece(words) => Some(&words.unk_token),
        Model::WordLevel(words) => Some(&words.unk_token),
        // Unigram models keep unknown text as it is.
        Model::Unigram(_) => None,
    };
    if let Some(unknown) = unknown.filter(|token| token.len() > UNKNOWN_MAX) {
        let bytes = unknown.len();
        return Err(format!("its unk_token has {bytes} bytes; supported: up to {UNKNOWN_MAX}"));
    }
    match tokens.find(|token| token.len() > TOKEN_MAX) {
        None => Ok(()),
        Some(token) => {
            let bytes = token.len();
            Err(format!("it has a token of {bytes} bytes; supported: up to {TOKEN_MAX}"))
        }
    }
}

fn normalizer(step: &Normalizer) -> Growth {
    match step {
        Normalizer::Sequence(steps) => {
            steps.as_ref().iter().map(normalizer).fold(Growth::NONE, Growth::then)
        }
        Normalizer::Replace(step) => replace(step),
        Normalizer::Prepend(step) => Growth { times: 1, plus: step.prepend.len() as u64 },
        Normalizer::Precompiled(step) => Growth::by(longest_entry(step)),
        // Two spaces around each Chinese character of three bytes, and decomposed accents.
        Normalizer::BertNormalizer(_) => Growth::by(6),
        // Unicode's own bounds for UTF-8 (annex 15).
        Normalizer::NFC(_) | Normalizer::NFD(_) => Growth::by(3),
        Normalizer::NFKC(_) | Normalizer::NFKD(_) => Growth::by(11),
        Normalizer::Lowercase(_) | Normalizer::ByteLevel(_) => Growth::by(2),
        Normalizer::StripNormalizer(_) | Normalizer::StripAccents(_) | Normalizer::Nmt(_) => {
            Growth::NONE
        }
    }
}

fn pre_tokenizer(step: &PreTokenizer) -> Growth {
    match step {
        PreTokenizer::Sequence(steps) => {
            steps.as_ref().iter().map(pre_tokenizer).fold(Growth::NONE, Growth::then)
        }
        // A piece may be one byte, and each gets a space of its own.
        PreTokenizer::ByteLevel(step) => Growth::by(if step.add_prefix_space { 4 } else { 2 }),
        PreTokenizer::Metaspace(step) => Growth::by(2 * step.get_replacement().len_utf8() as u64),
        PreTokenizer::BertPreTokenizer(_)
        | PreTokenizer::Delimiter(_)
        | PreTokenizer::Whitespace(_)
        | PreTokenizer::Split(_)
        | PreTokenizer::Punctuation(_)
        | PreTokenizer::WhitespaceSplit(_)
        | PreTokenizer::Digits(_)
        | PreTokenizer::UnicodeScripts(_)
        | PreTokenizer::FixedLength(_) => Growth::NONE,
    }
}

fn post_processor(step: &PostProcessor) -> Growth {
    match step {
        PostProcessor::Sequence(steps) => {
            steps.as_ref().iter().map(post_processor).fold(Growth::NONE, Growth::then)
        }
        PostProcessor::Template(step) => template(&json(step)),
        PostProcessor::Roberta(_) | PostProcessor::Bert(_) => Growth { times: 1, plus: 2 },
        PostProcessor::ByteLevel(_) => Growth::NONE,
    }
}

fn decoder(step: &Decoder) -> u64 {
    match step {
        Decoder::Sequence(steps) => {
            steps.get_decoders().iter().map(decoder).fold(1, u64::saturating_mul)
        }
        Decoder::Replace(step) => replace(step).times,
        // Bytes that form no character become the three of the replacement character.
        Decoder::ByteLevel(_) => 3,
        // A space per token, or between the letters of one.
        Decoder::BPE(_) | Decoder::WordPiece(_) | Decoder::CTC(_) => 2,
        Decoder::Metaspace(_) | Decoder::Fuse(_) | Decoder::Strip(_) | Decoder::ByteFallback(_) => {
            1
        }
    }
}

/// A step as JSON, since some of its fields are private in the library.
fn json(step: &impl serde::Serialize) -> serde_json::Value {
    serde_json::to_value(step).unwrap_or_default()
}

fn replace(step: &Replace) -> Growth {
    let content = step.content.len() as u64;
    match json(step).pointer("/pattern/String").and_then(serde_json::Value::as_str) {
        Some(text) if !text.is_empty() => Growth::by(content.div_ceil(text.len() as u64).max(1)),
        // A pattern that can match nothing matches beside every byte.
        _ => Growth { times: content.saturating_mul(2).saturating_add(1), plus: content },
    }
}

/// A template writes the whole text for each of its places, and the text of its special tokens.
fn template(step: &serde_json::Value) -> Growth {
    let mut growth = Growth { times: 0, plus: 0 };
    for piece in step["single"].as_array().into_iter().flatten() {
        let Some(id) = piece.pointer("/SpecialToken/id").and_then(serde_json::Value::as_str) else {
            growth.times += 1;
            continue;
        };
        let tokens = step["special_tokens"][id]["tokens"].as_array();
        let bytes = tokens.into_iter().flatten().map(|token| match token.as_str() {
            Some(text) => text.len() as u64 + 1,
            None => 1,
        });
        growth.plus = growth.plus.saturating_add(bytes.sum());
    }
    growth.times = growth.times.max(1);
    growth
}

/// Bytes of the longest text that a SentencePiece character map writes for a character. The map has the size of its
/// index, the index, then texts that end with a zero.
fn longest_entry(step: &impl serde::Serialize) -> u64 {
    let step = json(step);
    let table = base64(step["precompiled_charsmap"].as_str().unwrap_or_default());
    let Some((size, rest)) = table.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default();
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max();
    longest.map_or(1, |bytes| bytes.max(1) as u64)
}

fn base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut word, mut bits) = (0_u32, 0);
    for letter in text.bytes() {
        let digit = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        word = word << 6 | u32::from(digit);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(json: &str) -> Result<Growth, String> {
        serde_json::from_str::<Steps>(json).expect("steps").growth()
    }

    #[test]
    fn tokenizers_in_use_are_taken() {
        let llama = r#"{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}"#;
        assert_eq!(growth(llama), Ok(Growth { times: 3, plus: 9 + 4 }));
        let qwen = r#"{"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": true, "use_regex": true}, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true}}"#;
        assert_eq!(growth(qwen), Ok(Growth { times: 6, plus: 0 }));
        assert_eq!(growth("{}"), Ok(Growth::NONE));
    }

    #[test]
    fn steps_that_multiply_are_refused_in_every_part() {
        let step = r#"{"type": "Replace", "pattern": {"String": "l"}, "content": "LLLL"}"#;
        let four = step.replace("LLLL", &"l".repeat(1000));
        let twice = format!("{four}, {four}");
        let sequence = |part: &str, list: &str, steps: &str| {
            format!(r#"{{"{part}": {{"type": "Sequence", "{list}": [{steps}]}}}}"#)
        };
        assert!(growth(&sequence("normalizer", "normalizers", &four)).is_ok());
        let refused = growth(&sequence("normalizer", "normalizers", &twice)).unwrap_err();
        assert!(refused.contains("into 16384000000; supported"), "{refused}");
        let refused = growth(&sequence("decoder", "decoders", &four)).unwrap_err();
        assert!(refused.contains("1000 bytes for one"), "{refused}");
        let bytes = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},"#;
        let bytes = bytes.repeat(11);
        let bytes = bytes.trim_end_matches(',');
        growth(&sequence("pre_tokenizer", "pretokenizers", bytes)).unwrap_err();
        let place = r#"{"Sequence": {"id": "A", "type_id": 0}},"#.repeat(40);
        let template = format!(
            r#"{{"type": "TemplateProcessing", "single": [{}], "pair": [], "special_tokens": {{}}}}"#,
            place.trim_end_matches(',')
        );
        growth(&sequence("post_processor", "processors", &format!("{template}, {template}")))
            .unwrap_err();
    }

    #[test]
    fn an_empty_match_is_counted_beside_every_byte() {
        let step = |pattern: &str| {
            format!(
                r#"{{"normalizer": {{"type": "Replace", "pattern": {pattern}, "content": "abc"}}}}"#
            )
        };
        assert_eq!(growth(&step(r#"{"String": "xyz"}"#)), Ok(Growth::NONE));
        assert_eq!(growth(&step(r#"{"String": ""}"#)), Ok(Growth { times: 7, plus: 3 }));
        assert_eq!(growth(&step(r#"{"Regex": "x*"}"#)), Ok(Growth { times: 7, plus: 3 }));
    }

    #[test]
    fn a_table_grows_by_its_longest_text() {
        // An index of four bytes, then "ab", "c" and "defgh".
        let step = serde_json::json!({"precompiled_charsmap": "BAAAAAAAAABhYgBjAGRlZmdoAA=="});
        assert_eq!(longest_entry(&step), 5);
        assert_eq!(longest_entry(&serde_json::json!({})), 1);
    }

    #[test]
    fn a_text_is_taken_up_to_its_limit() {
        let growth = Growth::by(1024);
        assert_eq!(growth.check(&"x".repeat(16 << 10)), Ok(()));
        let refused = growth.check(&"x".repeat((16 << 10) + 1)).unwrap_err();
        assert!(refused.contains("up to 16384 bytes"), "{refused}");
    }
}
