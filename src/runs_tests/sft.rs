//! `amk runs export --sft`: prompts that do not tell their completions, and sides that share no model and GPU.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{amk, folder, succeeds};

#[test]
fn prompts_do_not_tell_their_completions_and_no_model_and_gpu_is_on_both_sides() {
    let folder = folder();
    let mut of_run: BTreeMap<String, (String, String)> = BTreeMap::new();
    for (model, target) in
        [("toy", "h200"), ("toy", "h100"), ("toy", "a100"), ("toy-2l", "h200"), ("toy-2l", "l40s")]
    {
        for seed in ["0", "1"] {
            let out = format!("runs/{model}-{target}-{seed}");
            let terms = ["--model", model, "--target", target, "--seed", seed, "--out", &out];
            let more = ["--schedule", "neutral", "--device", "cpu", "--budget", "8"];
            let more = [&more[..], &["--kv-capacity", "16", "--store", "none"]].concat();
            succeeds(folder.path(), &[&["loop"], &terms[..], &more].concat(), "amk.loop.v1");
            let shown = succeeds(folder.path(), &["runs", "show", &out], "amk.run.v1");
            let run = shown["run"].as_str().expect("an id").to_owned();
            of_run.insert(run, (model.to_owned(), target.to_owned()));
        }
    }
    let export = ["runs", "export", "--sft", "--validation", "50", "--out", "t"];
    let document = succeeds(folder.path(), &export, "amk.trajectories.v1");
    assert_eq!(document["format"], "sft");
    let mut sides: [BTreeSet<&(String, String)>; 2] = Default::default();
    let mut lines = 0;
    for (side, name) in ["train", "validation"].iter().enumerate() {
        let text = std::fs::read_to_string(folder.path().join(format!("t/{name}.jsonl"))).unwrap();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let text = |key: &str| line[key].as_str().unwrap();
            for change in text("completion").lines() {
                let (knob, value) = change.split_once('=').unwrap();
                assert!(!text("prompt").contains(change), "{line}");
                // The leading schedule has another value of this knob.
                let start = text("prompt").find("schedule: ").unwrap() + "schedule: ".len();
                let config = text("prompt")[start..].lines().next().unwrap();
                let config: Value = serde_json::from_str(config).unwrap();
                let before = &config.pointer(&format!("/{}", knob.replace('.', "/"))).unwrap();
                let before = before.as_str().map_or_else(|| before.to_string(), str::to_owned);
                assert_ne!(before, value, "{line}");
            }
            sides[side].insert(&of_run[text("run")]);
            lines += 1;
        }
    }
    let both: Vec<_> = sides[0].intersection(&sides[1]).collect();
    assert!(both.is_empty() && !sides[0].is_empty() && !sides[1].is_empty(), "{sides:?}");
    assert!(lines >= 10, "{lines}");
    let (code, _, said) = amk(folder.path(), &export);
    assert!(code == 2 && said.contains("t is there already"), "{said}");
}
