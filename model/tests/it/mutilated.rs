//! Truncated files and files with flipped bytes give an error or a model, never a panic.

use ir::TensorId;
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::folder::{Copy, quantised, sharded};

/// Damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    /// Keeps this fraction of it, in 65536ths.
    Cut(u16),
    /// Puts these bytes at these places, in 65536ths of its first `within` bytes.
    Flip(Vec<(u16, u8)>),
    /// Puts a number that looks like a size or an offset over the digits at a place.
    Number(u16, u64),
}

impl Damage {
    fn apply(&self, file: &[u8], within: usize) -> Vec<u8> {
        let mut out = file.to_vec();
        let within = within.min(out.len());
        let place = |share: u16| share as usize * within / 65536;
        match self {
            Self::Cut(share) => out.truncate(*share as usize * file.len() / 65536),
            Self::Flip(flips) => {
                for &(share, bits) in flips {
                    out[place(share)] ^= bits;
                }
            }
            Self::Number(share, number) => {
                let start = place(*share);
                if let Some(digit) = out[start..within].iter().position(u8::is_ascii_digit) {
                    let from = start + digit;
                    let length = out[from..].iter().take_while(|b| b.is_ascii_digit()).count();
                    out.splice(from..from + length, number.to_string().into_bytes());
                }
            }
        }
        out
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let flips = proptest::collection::vec((any::<u16>(), 1..=255_u8), 1..4);
    let number =
        prop_oneof![any::<u64>(), 0..=300_u64, Just(1 << 60), Just(u64::MAX), Just(1 << 32)];
    prop_oneof![
        any::<u16>().prop_map(Damage::Cut),
        flips.prop_map(Damage::Flip),
        (any::<u16>(), number).prop_map(|(share, number)| Damage::Number(share, number)),
    ]
}

/// Imports the folder; if that succeeds, reads every byte and builds everything that a user would.
fn survive(copy: &Copy) {
    match model::import(copy.dir()) {
        Ok(model) => {
            for (i, tensor) in model.graph.tensors.iter().enumerate() {
                assert_eq!(model.weights.bytes(TensorId(i as u32)).len(), tensor.bytes());
            }
            assert!(model.shape.problems().is_empty());
            assert!(model.graph.inv_freq.iter().all(|f| f.is_finite()));
            let _ = model.tokenizer();
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && text.len() < 40_000, "{} bytes of message", text.len());
        }
    }
}

fn check(copy: &Copy, file: &str, within: usize) {
    let whole = copy.read(file);
    proptest!(Config { cases: 400, failure_persistence: None, ..Config::default() }, |(damage in damage())| {
        copy.write(file, damage.apply(&whole, within));
        survive(copy);
    });
}

#[test]
fn damaged_checkpoint() {
    // Only the header matters here; the rest of the file is numbers.
    check(&Copy::of("llama-tied-f32"), "model.safetensors", 3000);
}

#[test]
fn damaged_config() {
    check(&Copy::of("qwen3-qknorm-bf16"), "config.json", usize::MAX);
    check(&Copy::of("llama3-rope-bf16"), "config.json", usize::MAX);
}

#[test]
fn damaged_quantised_folder() {
    let copy = Copy::of_folder(&quantised("gptq-desc-act-g128-llama"));
    check(&copy, "config.json", usize::MAX);
    let copy = Copy::of_folder(&quantised("ct-w4a16-asym-g128-qwen2"));
    check(&copy, "model.safetensors", 6000);
}

#[test]
fn damaged_generation_config() {
    let copy = Copy::of("llama-tied-f32");
    copy.write("generation_config.json", r#"{"bos_token_id": 1, "eos_token_id": [2, 3]}"#);
    check(&copy, "generation_config.json", usize::MAX);
}

#[test]
fn damaged_index() {
    check(&sharded("llama-tied-f32"), "model.safetensors.index.json", usize::MAX);
}

#[test]
fn damaged_tokenizer_and_template() {
    let copy = Copy::of("llama3-rope-bf16");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let whole = copy.read(file);
        let tokenizer_only = |damaged: Vec<u8>| {
            copy.write(file, damaged);
            let Ok(tokenizer) = model::Tokenizer::load(copy.dir(), 512) else { return };
            let _ = tokenizer.encode("def main(argv=None):", true);
            let _ = tokenizer.decode(&[0, 1, 2, 300, 511, 999], false);
            let messages = [model::Message::new("user", "hi")];
            let now = std::time::UNIX_EPOCH;
            let chat =
                model::Chat { messages: &messages, add_generation_prompt: true, extra: None, now };
            let _ = tokenizer.chat(&chat);
        };
        proptest!(Config { cases: 200, failure_persistence: None, ..Config::default() }, |(damage in damage())| {
            tokenizer_only(damage.apply(&whole, usize::MAX));
        });
        copy.write(file, &whole);
    }
}

#[test]
fn every_cut_of_a_small_checkpoint() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let whole = crate::folder::safetensors(header, &[0; 8]);
    let copy = Copy::of("llama-tied-f32");
    for length in 0..whole.len() {
        copy.write("model.safetensors", &whole[..length]);
        assert!(copy.refusal().starts_with("DIR/model.safetensors: "));
    }
}
