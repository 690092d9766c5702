//! `--speculate`: the tokens, logits and log probabilities of a text are those without it.

use serde_json::Value;

use super::{amk, folder};

fn golden(name: &str) -> String {
    format!("{}/corpus/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn generated(model: &str, how: &[&str]) -> Value {
    let what = ["generate", "--model", model, "--device", "cpu", "--tokens", "3,5,8,3,5,8,3,5"];
    amk(&[&what[..], how].concat()).succeeds("amk.generate.v1")
}

#[test]
fn guesses_change_no_token() {
    let (mut accepted, mut rejected) = (0, 0);
    for model in ["qwen3-qknorm-bf16", "llama3-rope-bf16"].map(golden) {
        for how in [
            &["--max-new-tokens", "80"][..],
            &["--max-new-tokens", "80", "--temperature", "0.7", "--seed", "5"],
            &["--max-new-tokens", "40", "--temperature", "1", "--repetition-penalty", "1.3"],
            &["--max-new-tokens", "40", "--logprobs", "2"],
        ] {
            let plain = generated(&model, how);
            assert!(plain.get("speculation").is_none());
            for most in ["1", "4", "7"] {
                let guessed = generated(&model, &[how, &["--speculate", most]].concat());
                let what = format!("{model} {how:?} {most}");
                assert_eq!(guessed["tokens"], plain["tokens"], "{what}");
                assert_eq!(guessed["logprobs"], plain["logprobs"], "{what}");
                let tally = &guessed["speculation"];
                let of = |field: &str| tally[field].as_u64().unwrap();
                assert!(of("accepted") + of("windows") >= of("tokens"), "{tally}");
                accepted += of("accepted");
                rejected += of("rejected");
            }
        }
    }
    assert!(accepted > 50 && rejected > 10, "{accepted} right, {rejected} wrong");
}

#[test]
fn kept_logits_are_those_of_the_tokens_that_were_right() {
    let home = folder();
    let rows = |name: &str, more: &[&str]| {
        let path = home.path().join(name);
        let keep = ["--max-new-tokens", "60", "--logits", path.to_str().unwrap()];
        generated(&golden("llama3-rope-bf16"), &[&keep[..], more].concat());
        std::fs::read(path).unwrap()
    };
    assert!(rows("plain", &[]) == rows("guessed", &["--speculate", "5"]));
}

#[test]
fn what_cannot_be_guessed_is_refused() {
    let model = golden("llama3-rope-bf16");
    let on = |device: &str, more: &[&str]| {
        let what = ["generate", "--model", &model, "--device", device, "--tokens", "1"];
        amk(&[&what[..], more].concat())
    };
    on("eval", &["--speculate", "2"]).fails(2, &["--speculate", "--device cpu or cuda"]);
    let eight = on("cpu", &["--speculate", "8"]);
    assert!(eight.code == 2 && eight.stderr.contains("0..=7"), "{}", eight.stderr);
    let log = on("cpu", &["--speculate", "2", "--command-log", "a"]);
    assert!(log.code == 2 && log.stderr.contains("cannot be used with"), "{}", log.stderr);
}

#[test]
fn a_bench_counts_the_tokens_of_a_step() {
    let bench = |more: &[&str]| {
        let what = ["bench", "--model", "toy", "--device", "cpu", "--context", "16"];
        amk(&[&what[..], &["--speculate", "5"], more].concat())
    };
    let of = |acceptance: &str| {
        let document = bench(&["--acceptance", acceptance]).succeeds("amk.bench.v1");
        assert_eq!(
            (&document["correct"], &document["latency_kind"]),
            (&true.into(), &"predicted".into())
        );
        let found = &document["speculation"];
        assert_eq!(found["tokens_as_plain"], true);
        (found["tokens_per_step"].as_f64().unwrap(), document["us"].as_f64().unwrap())
    };
    let [none, some, all] = ["0", "0.7", "1"].map(of);
    assert!(
        (none.0, all.0) == (1.0, 6.0) && (2.3..3.6).contains(&some.0),
        "{none:?} {some:?} {all:?}"
    );
    assert!(none.1 > some.1 && some.1 > all.1, "{none:?} {some:?} {all:?}");
    bench(&[]).succeeds("amk.bench.v1");
    let wrong = bench(&["--acceptance", "1.5"]);
    assert!(wrong.code == 2 && wrong.stderr.contains("from 0 to 1"), "{}", wrong.stderr);
}
