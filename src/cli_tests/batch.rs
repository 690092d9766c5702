//! Batches: which arguments are refused before any device is looked for.

use super::{Ran, amk};

/// Asserts an error of the argument parser, which spans several lines.
fn unread(ran: &Ran, says: &[&str]) {
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    says.iter().for_each(|part| assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr));
}

#[test]
fn sequences_are_not_ignored_on_the_cpu() {
    for device in ["cpu", "eval"] {
        amk(&["serve", "--model", "toy", "--device", device, "--batch", "4"])
            .fails(2, &["--batch", "--device cuda"]);
    }
    let three = amk(&["serve", "--model", "toy", "--batch", "3"]);
    unread(&three, &["--batch <N>", "[1, 2, 4, 8]"]);
}

#[test]
fn sequences_that_cannot_be_timed_are_refused() {
    let bench = |model: &str, more: &[&str]| {
        let place = ["bench", "--model", model, "--device", "cpu", "--batch"];
        amk(&[&place[..], more].concat())
    };
    for several in ["3", "1", "many"] {
        unread(&bench("toy", &[several]), &["--batch <N>", "[2, 4, 8]"]);
    }
    bench("smollm2-135m", &["2", "--context", "9999999"]).fails(2, &["--context 9999999", "8192"]);
    bench("smollm2-135m", &["2", "--context", "0"]).fails(2, &["--context 0"]);
    let f32 = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama-tied-f32");
    bench(f32, &["8", "--context", "16"]).fails(2, &["16-bit weights", "f32"]);
    let quantised = |name: &str| format!("{}/corpus/quantised/{name}", env!("CARGO_MANIFEST_DIR"));
    let experts = quantised("fp8-block-qwen3-moe");
    let says = ["--batch 8", "has experts: run one sequence"];
    bench(&experts, &["8", "--context", "16"]).fails(2, &says);
    // Codes are not.
    for codes in ["ct-fp8-dynamic-llama", "ct-w4a16-g32-qwen3"].map(quantised) {
        bench(&codes, &["8", "--context", "16"]).fails(3, &["--batch", "no GPU here"]);
    }
    for place in [&[][..], &["--gpus", "2"], &["--emulate", "2"]] {
        let refused = bench("smollm2-135m", &[&["8"], place].concat());
        refused.fails(3, &["--batch", "no GPU here"]);
    }
    unread(&bench("toy", &["2", "--prefill", "8"]), &["cannot be used with"]);
}
