//! `amk bench` with other engines, which are scripts written here: their answers, and every way in which they fail.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

/// Runs a bench of the toy with these scripts first on the PATH and returns the document and standard error.
fn bench(scripts: &[(&str, &str)], more: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    for (name, script) in scripts {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let output = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["bench", "--model", "toy", "--device", "cpu"])
        .args(more)
        .env("PATH", path)
        .env_remove("AMK_PYTHON")
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    (serde_json::from_slice(&output.stdout).unwrap(), said)
}

fn peer<'a>(document: &'a Value, name: &str) -> &'a Value {
    let peers = document["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 3, "each peer is named");
    peers.iter().find(|peer| peer["name"] == name).unwrap()
}

#[track_caller]
fn is_absent(peer: &Value, words: &str) {
    let reason = peer["absent"].as_str().unwrap_or_else(|| panic!("{peer}"));
    assert!(reason.contains(words), "{words:?} is not in {reason:?}");
    assert!(peer["us_per_token"].is_null() && peer["interval"].is_null(), "{peer}");
}

const SOUND: &str = r#"cat > asked.json
echo 'a warning'
echo '{"version": "2.11.0", "us_per_token": [10, 12, 11, 14, 13], "conditions": ["CUDA graph"]}'"#;

#[test]
fn a_peer_that_answers_is_a_median_with_its_spread() {
    let keep = tempfile::tempdir().unwrap();
    let asked = keep.path().join("asked.json");
    let script = SOUND.replace("asked.json", &asked.display().to_string());
    let (document, said) = bench(&[("python3", &script)], &["--peers", "torch-graph"]);
    let found = peer(&document, "torch-graph");
    assert_eq!(found["us_per_token"], 12.0);
    assert_eq!(found["interval"], serde_json::json!([10.0, 14.0]));
    assert_eq!(found["version"], "2.11.0");
    assert_eq!(found["conditions"], serde_json::json!(["5 blocks", "CUDA graph"]));
    assert!(found["absent"].is_null());
    assert!(said.contains("12.0 us per token (10.0 to 14.0)"), "{said}");
    // Without a GPU measurement there is no comparison.
    assert!(!said.contains("x amk"), "{said}");
    let asked: Value = serde_json::from_slice(&std::fs::read(asked).unwrap()).unwrap();
    let shapes = ["hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "layers", "context"];
    let numbers: Vec<u64> = shapes.iter().map(|shape| asked[shape].as_u64().unwrap()).collect();
    assert_eq!(numbers, [64, 4, 2, 16, 128, 256, 1, 128]);
    assert_eq!((&asked["dtype"], &asked["peer"]), (&"bf16".into(), &"torch-graph".into()));
    is_absent(peer(&document, "torch-compile"), "--peers torch-compile");
    is_absent(peer(&document, "llama.cpp"), "--peers llama.cpp");
}

#[test]
fn llama_bench_needs_a_model_and_its_samples_become_microseconds_a_token() {
    let answer = r#"echo "$@" > args
echo '[{"build_commit": "abc", "build_number": 7, "model_type": "llama 1B BF16", "gpu_info": "H200", "n_gen": 32, "samples_ns": [32000, 64000, 96000, 64000, 32000]}]'"#;
    let keep = tempfile::tempdir().unwrap();
    let args = keep.path().join("args");
    let script = answer.replace("args", &args.display().to_string());
    let scripts = [("llama-bench", &script[..])];
    let (document, _) = bench(&scripts, &["--peers", "llama.cpp", "--gguf", "m.gguf"]);
    let found = peer(&document, "llama.cpp");
    assert_eq!((&found["us_per_token"], &found["version"]), (&2.0.into(), &"abc (build 7)".into()));
    assert_eq!(found["interval"], serde_json::json!([1.0, 3.0]));
    let args = std::fs::read_to_string(args).unwrap();
    assert!(args.contains("-m m.gguf") && args.contains("-n 32 -d 128"), "{args}");

    let (document, _) = bench(&scripts, &["--peers", "llama.cpp"]);
    is_absent(peer(&document, "llama.cpp"), "--gguf");
    let (document, _) = bench(&[], &["--peers", "llama.cpp", "--gguf", "m.gguf"]);
    is_absent(peer(&document, "llama.cpp"), "llama-bench is not on the PATH");
    let garbage = [("llama-bench", "echo '[{}]'")];
    let (document, _) = bench(&garbage, &["--peers", "llama.cpp", "--gguf", "m.gguf"]);
    is_absent(peer(&document, "llama.cpp"), "llama-bench's JSON");
}

#[test]
fn a_peer_that_fails_is_absent_with_its_reason() {
    for (script, words) in [
        (
            "echo 'Traceback' >&2; echo 'ValueError: bad shapes' >&2; exit 3",
            "ValueError: bad shapes",
        ),
        ("kill -9 $$", "signal: 9"),
        ("echo hello", "not the expected JSON: hello"),
        ("exit 0", "not the expected JSON: nothing"),
        ("echo '{\"version\": \"2\"}'", "not the expected JSON"),
        ("echo '{\"absent\": \"torch 2 finds no CUDA device\"}'", "no CUDA device"),
        ("echo '{\"version\": \"2\", \"us_per_token\": [1, 2]}'", "5 times or more"),
        (
            "echo '{\"version\": \"2\", \"us_per_token\": [1, 2, 3, 4, \"x\"]}'",
            "not the expected JSON",
        ),
        ("echo '{\"version\": \"2\", \"us_per_token\": [1, 2, 3, 4, 0]}'", "5 times or more"),
        ("yes | head -c 3000000", "not the expected JSON: y"),
        (
            "exec 0<&-; sleep 0.2; yes | head -c 3000000 >&2; exit 1",
            "it failed (exit status: 1): y",
        ),
    ] {
        let (document, said) = bench(&[("python3", script)], &["--peers", "torch-graph"]);
        is_absent(peer(&document, "torch-graph"), words);
        assert!(said.contains("absent: "), "{said}");
    }
}

#[test]
fn a_peer_that_hangs_is_ended() {
    let start = Instant::now();
    let script = "trap '' TERM; while true; do sleep 0.1; done";
    let more = ["--peers", "torch-graph,torch-compile", "--peer-timeout", "1"];
    let (document, _) = bench(&[("python3", script)], &more);
    for name in ["torch-graph", "torch-compile"] {
        is_absent(peer(&document, name), "no answer within 1 s; --peer-timeout");
    }
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn an_interpreter_that_is_missing_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["bench", "--model", "toy", "--device", "cpu", "--peers", "all"])
        .env("AMK_PYTHON", "/no/such/python")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    is_absent(peer(&document, "torch-graph"), "/no/such/python is not there");
}

/// If PyTorch is installed, the step runs on the CPU: its shapes fit together and its positions are counted.
#[test]
fn the_step_in_pytorch_runs() {
    let python = std::env::var("AMK_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = include_str!("peers/torch_step.py");
    for (gpus, tied, bias, norm) in
        [(1, true, false, true), (1, false, true, false), (2, true, false, true)]
    {
        let ask = serde_json::json!({
            "peer": "torch-graph", "gpus": gpus, "device": "cpu", "dtype": "bf16", "hidden": 64, "layers": 2, "heads": 4,
            "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 300, "tied": tied,
            "attention_bias": bias, "qk_norm": norm, "norm_eps": 1e-5, "attn_scale": 0.25,
            "inv_freq": [1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.001], "context": 20, "tokens": 4,
            "blocks": 5, "warmup": 1, "seconds": 60
        });
        let mut child = Command::new(&python)
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        serde_json::to_writer(child.stdin.take().unwrap(), &ask).unwrap();
        let output = child.wait_with_output().unwrap();
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        if let Some(reason) = answer["absent"].as_str().filter(|r| r.contains("import torch")) {
            println!("skipped: {reason}");
            return;
        }
        assert_eq!(answer["us_per_token"].as_array().map(Vec::len), Some(5), "{answer}");
        let conditions = answer["conditions"].to_string();
        assert!(conditions.contains("the faster of 2 variants"), "{conditions}");
    }
}
