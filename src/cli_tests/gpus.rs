//! Several GPUs in one step, on the reference VM.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use super::{Ran, amk, command, golden, ran};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/qwen3-qknorm-bf16");

fn generated(gpus: &str, logits: &str) -> Ran {
    generated_by(["--gpus", gpus], logits)
}

fn generated_by(place: [&str; 2], logits: &str) -> Ran {
    let place = ["generate", "--model", MODEL, "--device", "cpu", place[0], place[1]];
    let what = ["--tokens", "3,5,8,13", "--max-new-tokens", "4", "--logits", logits];
    amk(&[&place[..], &what].concat())
}

#[test]
fn the_logits_are_those_of_one_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let run = |gpus: &str, name: &str| {
        let path = folder.path().join(name);
        let document = generated(gpus, path.to_str().unwrap()).succeeds("amk.generate.v1");
        (document["tokens"].clone(), std::fs::read(path).unwrap())
    };
    let one = run("1", "one");
    for gpus in ["2", "4", "0,1,2"] {
        assert!(run(gpus, "several") == one, "{gpus}");
    }
    let path = folder.path().join("halves");
    let halves = generated_by(["--emulate", "2"], path.to_str().unwrap());
    let document = halves.succeeds("amk.generate.v1");
    assert!((document["tokens"].clone(), std::fs::read(path).unwrap()) == one);
}

/// Settings of every kind, on one GPU and on several: the same tokens.
#[test]
fn the_sampled_tokens_are_those_of_one_gpu() {
    let sampled = |place: [&str; 2], settings: &[&str]| {
        let place = ["generate", "--model", MODEL, "--device", "cpu", place[0], place[1]];
        let what = ["--tokens", "3,5,8,13", "--max-new-tokens", "12", "--seed", "9"];
        let document = amk(&[&place[..], &what, settings].concat()).succeeds("amk.generate.v1");
        (document["tokens"].clone(), document["logprobs"].clone())
    };
    let greedy = sampled(["--gpus", "1"], &[]);
    for settings in [
        &["--temperature", "0.8", "--top-p", "0.9", "--top-k", "40"][..],
        &["--temperature", "1.2", "--min-p", "0.01", "--repetition-penalty", "1.3"],
        &["--temperature", "1.5", "--logit-bias", "3:-inf,5:-2", "--logprobs", "2"],
    ] {
        let one = sampled(["--gpus", "1"], settings);
        assert_ne!(one.0, greedy.0, "{settings:?} samples");
        for place in [["--gpus", "2"], ["--gpus", "4"], ["--emulate", "2"]] {
            assert_eq!(sampled(place, settings), one, "{place:?} {settings:?}");
        }
    }
}

/// Steps of several positions, which check guesses, have the logits of one GPU's steps of one.
#[test]
fn guesses_on_several_gpus_change_no_logit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits");
    let logits = |more: &[&str]| {
        let what = ["generate", "--model", MODEL, "--device", "cpu", "--tokens", "3,5,8,3,5,8,3,5"];
        let keep = ["--max-new-tokens", "40", "--logits", path.to_str().unwrap()];
        let document = amk(&[&what[..], &keep, more].concat()).succeeds("amk.generate.v1");
        (document["tokens"].clone(), std::fs::read(&path).unwrap())
    };
    let one = logits(&[]);
    for place in [["--gpus", "2"], ["--gpus", "4"], ["--emulate", "2"]] {
        assert!(logits(&[&place[..], &["--speculate", "5"]].concat()) == one, "{place:?}");
    }
}

/// A conversation on two GPUs is the one on one.
#[test]
fn a_conversation_is_that_of_one_gpu() {
    let model = golden("llama3-rope-bf16").display().to_string();
    let chat = |gpus: &str| {
        let place = ["chat", "--model", &model, "--device", "cpu", "--gpus", gpus];
        let settings = ["--max-new-tokens", "5", "--temperature", "0.9", "--seed", "4"];
        let mut command = command(&std::env::temp_dir(), &[&place[..], &settings].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"Hello\nAgain\n").unwrap();
        let said = ran(child.wait_with_output().unwrap()).succeeds("amk.chat.v1");
        said["messages"].clone()
    };
    let one = chat("1");
    assert_eq!(one.as_array().map(Vec::len), Some(4), "{one}");
    assert_eq!(chat("2"), one);
}

#[test]
fn parts_of_a_gpu_are_a_target_of_their_own() {
    let lower = |place: &[&str]| {
        let model = ["lower", "--model", "toy", "--device", "cpu"];
        amk(&[&model[..], place].concat()).succeeds("amk.lower.v2")
    };
    let (halves, named) = (lower(&["--emulate", "2"]), lower(&["--target", "h200/2"]));
    assert_eq!(halves["target"], "h200/2");
    assert_eq!(halves["program_id"], named["program_id"]);
    assert_eq!((&halves["devices"], &halves["workers"]), (&2.into(), &132.into()));
    assert_eq!(halves["numeric_id"], lower(&["--gpus", "2"])["numeric_id"]);
    for wrong in [&["--emulate", "1"][..], &["--emulate", "9"], &["--emulate", "2", "--gpus", "2"]]
    {
        let model = ["lower", "--model", "toy", "--device", "cpu"];
        assert_eq!(amk(&[&model[..], wrong].concat()).code, 2, "{wrong:?}");
    }
    amk(&["lower", "--model", "toy", "--device", "cpu", "--target", "h200x2", "--emulate", "2"])
        .fails(2, &["h200x2", "--emulate 2"]);
}

#[test]
fn a_schedule_for_several_gpus_is_judged_and_predicted() {
    for (gpus, name) in [("1", "h200"), ("2", "h200x2"), ("4", "h200x4")] {
        let place = ["evaluate", "--model", "toy", "--device", "cpu", "--gpus", gpus];
        let verdict = amk(&place).succeeds("amk.verdict.v2");
        assert_eq!(verdict["target"], name);
        assert_eq!(verdict["correct"], true, "{verdict}");
    }
    let bound = |gpus: &str| {
        let place = ["bench", "--model", "smollm2-135m", "--device", "cpu", "--gpus", gpus];
        let benched = amk(&place);
        assert_eq!(benched.code, 0, "{}", benched.stderr);
        benched.json()["bound_us"].as_f64().unwrap()
    };
    assert!((bound("1") / bound("4") - 4.0).abs() < 0.05);
}

#[test]
fn a_program_has_devices_and_its_schedule_a_numeric_id() {
    let lower = |gpus: &str| {
        let place = ["lower", "--model", "toy", "--device", "cpu", "--gpus", gpus];
        amk(&place).succeeds("amk.lower.v2")
    };
    let (one, two) = (lower("1"), lower("2"));
    assert_eq!((&one["devices"], &two["devices"]), (&1.into(), &2.into()));
    assert_eq!(one["numeric_id"], two["numeric_id"]);
    assert_ne!(one["program_id"], two["program_id"]);
}

#[test]
fn a_search_for_two_gpus_is_resumed_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let search =
        ["loop", "--model", "toy", "--device", "cpu", "--gpus", "2", "--budget", "3", "--out", out];
    assert_eq!(amk(&search).json()["best_verdict"]["target"], "h200x2");
    let other =
        ["loop", "--model", "toy", "--gpus", "4", "--budget", "4", "--out", out, "--resume"];
    amk(&other).fails(2, &["--gpus", "2"]);
    let on = ["loop", "--budget", "4", "--out", out, "--resume"];
    assert_eq!(amk(&on).json()["best_verdict"]["target"], "h200x2");
}

/// What decides the bits of a schedule's results is the first one's, unless others are allowed.
#[test]
fn schedules_for_two_gpus_keep_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("search");
    let out = out.to_str().unwrap();
    let search = [
        "loop",
        "--model",
        "toy",
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--strategy",
        "random",
        "--budget",
        "12",
        "--out",
        out,
    ];
    let kinds = |more: &[&str]| {
        amk(&[&search[..], more].concat()).json();
        let ledger = std::fs::read_to_string(folder.path().join("search/ledger.jsonl")).unwrap();
        std::fs::remove_dir_all(out).unwrap();
        let records = ledger.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let configs = records.filter_map(|line| line["record"].get("config").cloned());
        configs
            .map(|config| ir::schedule::numeric_id(&serde_json::from_value(config).unwrap()))
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(kinds(&[]).len(), 1);
    assert!(kinds(&["--allow-other-bits"]).len() > 1);
    amk(&[&search[..], &["--allow-other-bits"]].concat()).json();
    let resumed = ["loop", "--budget", "13", "--out", out, "--resume"];
    amk(&resumed).json();
    amk(&["loop", "--model", "toy", "--device", "cpu", "--allow-other-bits"]).fails(2, &["--gpus"]);
    let proposer =
        ["loop", "--model", "toy", "--device", "cpu", "--gpus", "2", "--proposer", "cat"];
    amk(&proposer).fails(2, &["--allow-other-bits"]);
}

/// One timeline has the workers of both GPUs, and what they hand each other.
#[test]
fn a_trace_is_of_all_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events.json");
    let place = ["trace", "--model", "toy", "--device", "cpu", "--gpus", "2", "--perfetto"];
    let document = amk(&[&place[..], &[events.to_str().unwrap()]].concat());
    let document = document.succeeds("amk.trace.v2");
    let step = &document["schedules"][0]["step"];
    assert_eq!(
        (document["target"].as_str(), step["workers"].as_u64()),
        (Some("h200x2"), Some(264))
    );
    let events: Value = serde_json::from_slice(&std::fs::read(&events).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let names = events.iter().filter_map(|event| event["args"]["name"].as_str());
    let names: Vec<&str> = names.filter(|name| name.ends_with("worker 131")).collect();
    assert_eq!(names, ["GPU 0 worker 131", "GPU 1 worker 131"]);
    let gpu = |event: &Value| event["tid"].as_u64().unwrap() / 132;
    let arrows = |ph: &str| events.iter().filter(|event| event["ph"] == ph).map(gpu).collect();
    let (from, to): (Vec<u64>, Vec<u64>) = (arrows("s"), arrows("f"));
    let between = from.iter().zip(&to).filter(|(from, to)| from != to).count();
    assert!(between > 0, "{} arrows and none between the GPUs", from.len());
}

#[test]
fn what_several_gpus_cannot_do_is_refused_with_what_is_missing() {
    amk(&["generate", "--model", "toy", "--tokens", "1", "--device", "cuda", "--gpus", "2"])
        .fails(3, &["capability missing"]);
    amk(&["levers", "--model", "toy", "--device", "cpu", "--gpus", "2"]).fails(3, &["h200x2"]);
    amk(&["evaluate", "--model", "toy", "--device", "cpu", "--target", "h200x4", "--gpus", "2"])
        .fails(2, &["h200x4", "--gpus 2"]);
    amk(&["generate", "--model", "toy", "--tokens", "1", "--device", "eval", "--gpus", "2"])
        .fails(2, &["--device eval"]);
    amk(&["serve", "--model", "toy", "--device", "eval", "--gpus", "2"])
        .fails(2, &["--device eval"]);
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("counter.json");
    std::fs::write(&config, r#"{"sync": {"down": "counter"}}"#).unwrap();
    let config = config.to_str().unwrap();
    let place = ["evaluate", "--model", "toy", "--device", "cpu", "--gpus", "2"];
    let refused = amk(&[&place[..], &["--config", config]].concat());
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    assert!(refused.stdout.contains("S-REMOTE") && refused.stdout.contains("sync.down"));
    for gpus in ["0", "9", "0,0"] {
        assert_eq!(generated(gpus, "unused").code, 2);
    }
}
