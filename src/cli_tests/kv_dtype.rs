//! `--kv-dtype`: caches of codes on the CPU, and the commands that are of f16 only.

use serde_json::Value;

use super::{amk, folder};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/qwen3-qknorm-bf16");

#[test]
fn every_executor_keeps_the_same_codes() {
    let home = folder();
    let run = |dtype: &str, device: &str| {
        let path = home.path().join(format!("{dtype}-{device}"));
        let logits = path.to_str().unwrap();
        let what = ["generate", "--model", MODEL, "--tokens", "3,5,8,13", "--logits", logits];
        let how = ["--max-new-tokens", "8", "--device", device, "--kv-dtype", dtype];
        let document = amk(&[&what[..], &how].concat()).succeeds("amk.generate.v1");
        (document["tokens"].clone(), std::fs::read(path).unwrap())
    };
    let (graph, program) = (run("e4m3", "eval"), run("e4m3", "cpu"));
    assert_eq!(graph.0, program.0);
    assert_ne!(run("f16", "eval").1, graph.1, "they cost something");
}

#[test]
fn the_verdict_says_the_bytes_of_a_token() {
    let of = |dtype: &str| {
        let line = ["evaluate", "--model", "toy", "--device", "cpu", "--kv-dtype", dtype];
        let verdict = amk(&[&line[..], &["--kv-capacity", "64"]].concat()).json();
        assert_eq!(verdict["correct"], true, "{verdict}");
        verdict["notes"].to_string()
    };
    let notes = of("e4m3");
    assert!(
        notes.contains("caches of e4m3 (--kv-dtype)") && notes.contains("per token"),
        "{notes}"
    );
    assert!(!of("f16").contains("--kv-dtype"));
    let doctor = |dtype: &str| {
        let line = ["doctor", "--model", "llama-3.2-1b", "--kv-dtype", dtype];
        amk(&line).json().to_string()
    };
    assert!(doctor("e4m3").contains("20480 bytes of keys and values per token (e4m3)"));
    assert!(doctor("f16").contains("32768 bytes of keys and values per token (f16)"));
}

#[test]
fn searches_and_bundles_are_of_f16() {
    let toy = ["--model", "toy", "--device", "cpu", "--kv-dtype", "e4m3"];
    let refused = |command: &[&str], word: &str| {
        amk(&[command, &toy].concat()).fails(2, &[word, "leave --kv-dtype e4m3 out"]);
    };
    refused(&["loop", "--budget", "1"], "a search is for key/value caches of f16");
    refused(&["bench", "--bundle", "bundle.json"], "a bundle is for");
    amk(&["evaluate", "--model", "toy", "--kv-dtype", "fp8"]).fails(2, &["--help"]);
    let _: Value = amk(&["bench", "--context", "8", "--peers", "none"]
        .iter()
        .chain(&toy)
        .copied()
        .collect::<Vec<_>>())
    .json();
}
