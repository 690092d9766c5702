//! Prompts in chunks: which arguments are refused before any device is looked for.

use super::amk;

const TOY: [&str; 6] = ["--model", "toy", "--kv-capacity", "16", "--max-new-tokens", "2"];

#[test]
fn chunks_are_not_ignored_on_the_cpu() {
    for device in ["cpu", "eval", "auto"] {
        let place = ["generate", "--tokens", "1,2", "--device", device, "--prefill"];
        let with = |how: &'static str| [&place[..], &[how], &TOY].concat();
        amk(&with("chunks")).fails(2, &["--prefill chunks", "--device cuda"]);
        for how in ["auto", "steps"] {
            amk(&with(how)).succeeds("amk.generate.v1");
        }
    }
    amk(&["serve", "--model", "toy", "--device", "eval", "--prefill", "chunks"])
        .fails(2, &["--prefill chunks", "--device cuda"]);
}

#[test]
fn prompts_that_cannot_be_timed_are_refused() {
    let bench = |model, tokens| amk(&["bench", "--model", model, "--prefill", tokens]);
    bench("toy", "0").fails(2, &["--prefill 0", "1 to "]);
    bench("smollm2-135m", "9999999").fails(2, &["--prefill 9999999", "1 to 8192"]);
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama-tied-f32");
    bench(model, "8").fails(2, &["f32 weights", "token by token"]);
    let both = amk(&["bench", "--model", "toy", "--prefill", "8", "--context", "4"]);
    assert_eq!(both.code, 2, "{}", both.stderr);
    assert!(both.stderr.contains("'--prefill <TOKENS>' cannot be used with"), "{}", both.stderr);
}
