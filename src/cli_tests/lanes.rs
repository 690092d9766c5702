//! Several sequences at once: what is refused where, before any device is looked for.

use super::amk;

#[test]
fn lanes_are_not_ignored_on_the_cpu() {
    for device in ["cpu", "eval"] {
        amk(&["serve", "--model", "toy", "--device", device, "--lanes", "4"])
            .fails(2, &["--lanes", "--device cuda"]);
    }
    amk(&["serve", "--model", "toy", "--lanes", "3"]).fails(2, &["--lanes <N>", "[1, 2, 4, 8]"]);
}

#[test]
fn sequences_that_cannot_be_timed_are_refused() {
    let bench = |model, more: &[&str]| {
        let place = ["bench", "--model", model, "--device", "cpu", "--sequences"];
        amk(&[&place[..], more].concat())
    };
    bench("toy", &["3"]).fails(2, &["--sequences <N>", "[2, 4, 8]"]);
    bench("toy", &["1"]).fails(2, &["--sequences <N>", "[2, 4, 8]"]);
    bench("smollm2-135m", &["2", "--context", "9999999"]).fails(2, &["--context 9999999", "8192"]);
    bench("smollm2-135m", &["2", "--context", "0"]).fails(2, &["--context 0"]);
    let f32 = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama-tied-f32");
    bench(f32, &["8", "--context", "16"]).fails(2, &["16-bit weights", "f32"]);
    bench("smollm2-135m", &["8"]).fails(3, &["--sequences", "no GPU here"]);
    let both = bench("toy", &["2", "--prefill", "8"]);
    assert_eq!(both.code, 2, "{}", both.stderr);
    assert!(both.stderr.contains("cannot be used with"), "{}", both.stderr);
}
