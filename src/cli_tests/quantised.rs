//! Quantised models on the command line: they run, and standard error says in which form.

use super::{amk, amk_in, folder};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantised/ct-int8-llama");
const SLOW: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantised/ct-nvfp4-llama");
const FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantised/gguf-q4_k_m-qwen3/model.gguf");

#[test]
fn quantised_models_run_and_their_cost_is_said() {
    let cases = [
        (FOLDER, "14 as int8 of compressed-tensors", "W8A8 runs as W8A16", "multiplied as codes"),
        (FILE, "10 as Q4_K, 6 as Q6_K", "give token ids", "multiplied as codes"),
        (SLOW, "14 as nvfp4", "no faster than an f32 copy", "dequantised to f32"),
    ];
    for (model, kinds, note, form) in cases {
        let tokens = ["cpu", "eval"].map(|device| {
            let ran = amk(&[
                "generate",
                "--model",
                model,
                "--tokens",
                "5,6,7",
                "--max-new-tokens",
                "4",
                "--device",
                device,
            ]);
            for said in [kinds, note, form] {
                assert_eq!(ran.stderr.matches(said).count(), 1, "{said}: {}", ran.stderr);
            }
            ran.succeeds("amk.generate.v1")["tokens"].clone()
        });
        assert_eq!(tokens[0], tokens[1], "{model}");
    }
    let text = ["generate", "--model", FILE, "--prompt", "a", "--device", "eval"];
    amk(&text).fails(2, &["tokenizer", "--tokens"]);
}

#[test]
fn a_quantised_preset_runs() {
    let dir = folder();
    let quantize = ["quantize", "--model", "toy-2l", "--format", "fp8", "--lm-head", "int8"];
    let command = [&quantize[..], &["--out", "q"]].concat();
    let document = amk_in(dir.path(), &command).succeeds("amk.quantize.v1");
    assert_eq!((&document["format"], &document["matrices"]), (&"fp8".into(), &15.into()));
    assert!(document["bytes"].as_u64() < document["bytes_before"].as_u64());
    let run = "generate --model q --tokens 5,6,7 --max-new-tokens 4 --device";
    let tokens = ["cpu", "eval"].map(|device| {
        let args: Vec<&str> = run.split(' ').chain([device]).collect();
        amk_in(dir.path(), &args).succeeds("amk.generate.v1")["tokens"].clone()
    });
    assert_eq!(tokens[0], tokens[1]);
    amk_in(dir.path(), &command).fails(2, &["q", "not an empty folder"]);
    let again = ["quantize", "--model", "q", "--format", "int8", "--out", "r"];
    amk_in(dir.path(), &again).fails(2, &["quantised already", "16-bit"]);
    let int4 = ["quantize", "--model", "toy", "--format", "int4-g128", "--out", "r"];
    amk_in(dir.path(), &int4).fails(2, &["128 does not divide", "use fp8 or int8"]);
    let fp4 = ["quantize", "--model", "toy", "--format", "fp4", "--out", "r"];
    let error = amk_in(dir.path(), &fp4).json();
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains("fp8, int8, int4-g128"), "{message}");
    assert!(!dir.path().join("r").exists());
}
