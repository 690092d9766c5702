//! Quantised models on the command line: they run, and standard error says in which form.

use super::amk;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantised/ct-int8-llama");
const FILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantised/gguf-q4_k_m-qwen3/model.gguf");

#[test]
fn quantised_models_run_and_their_cost_is_said() {
    let cases = [
        (
            FOLDER,
            "14 as int8 of compressed-tensors",
            "W8A8 runs as W8A16",
            "multiplied as they are stored",
        ),
        (FILE, "10 as Q4_K, 6 as Q6_K", "give token ids", "dequantised to f32"),
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
