//! Runs of several cards, written by searches on scripted devices and read by `runs`.

use std::path::Path;
use std::time::Duration;

use corpus::Ledger;
use ir::Target;
use ir::schedule::{Evict, KernelConfig, Knob};
use search::{
    Budget, Conditions, Device, Expected, Gate, Opener, Row, Search, Settings, Step, Timing,
    WorkerPool,
};
use serde_json::{Value, json};
use tests::scripted::{Behaviour, ScriptedDevice};

use super::amk;

const KV_CAPACITY: u32 = 24;

/// Maps a kernel to µs per token.
type Times = fn(&KernelConfig) -> f64;

fn conditions(uuid: &str) -> Conditions {
    let text = |text: &str| text.to_owned();
    Conditions {
        card: text("H200"),
        uuid: Some(uuid.to_owned()),
        driver: text("580"),
        cuda: text("13.0"),
        nvrtc: text("13.0"),
        amk: text("0"),
        ..Conditions::default()
    }
}

fn settings(graph: &ir::Graph, target: &Target, knob: Knob) -> Settings {
    Settings {
        seed: 5,
        budget: Budget::Trials(6),
        explore: 6,
        min_gain: 0.01,
        default: ir::schedule::neutral_config(graph, target),
        space: vec![(knob, ir::schedule::legal_values(knob, graph, target))],
        timing: Timing::default(),
        finalists: 0,
        simplest: None,
    }
}

/// Writes the run of a search over one knob, on cards with these UUIDs.
fn write_run(folder: &Path, knob: Knob, cards: &[(&str, Times)]) {
    let (model, target) = (model::preset("toy").unwrap(), Target::by_name("h200").unwrap());
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 5, Some(144)).unwrap();
    let kernel_id = KernelConfig::id;
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let known: Vec<Conditions> = cards.iter().map(|(uuid, _)| conditions(uuid)).collect();
    let header = json!({
        "schema": null, "run": format!("run-{}", folder.display()), "protocol": 1, "model": "toy", "graph": graph.name, "graph_id": graph.id(),
        "target": "h200", "latency_kind": "measured-gpu", "device": "H200", "seed": 5, "budget": "6", "explore": 6, "min_gain": 0.01,
        "kv_capacity": KV_CAPACITY, "cache_bytes": 0, "conditions": known[0], "cards": known,
    });
    let mut ledger = Ledger::create(&folder.join("ledger.jsonl"), &header).unwrap();
    std::thread::scope(|scope| {
        let opener = |&(_, times): &(&str, Times)| -> Opener<'_> {
            let logits = expected().logits;
            Box::new(move || {
                let script = move |_: &ir::program::Program, kernel: &KernelConfig| {
                    Behaviour::takes(times(kernel)).with_noise(0.002)
                };
                // A plausible bandwidth for the named card: bounds are checked against it.
                let device = ScriptedDevice::new(logits, 3, script).with_bandwidth(4.6e12);
                Ok(Box::new(device) as Box<dyn Device>)
            })
        };
        let pool = WorkerPool::open(scope, cards.iter().map(opener).collect());
        let gate = Gate::new(graph, weights, &target, options, &kernel_id, expected());
        let mut search = Search::side_by_side(gate, pool, settings(graph, &target, knob));
        while let Step::Trial(trial) = search.step(Duration::ZERO).unwrap() {
            ledger.append(&Row::Trial(trial)).unwrap();
        }
        let confirmation = search.confirm().unwrap().unwrap();
        ledger.append(&Row::Confirmation(Box::new(confirmation))).unwrap();
    });
}

fn quick(kernel: &KernelConfig) -> f64 {
    match (kernel.evict, kernel.poll_sleep_ns) {
        (Evict::First, _) => 94.0,
        (_, 100) => 97.0,
        _ => 100.0,
    }
}

/// The same, 3% slower.
fn slow(kernel: &KernelConfig) -> f64 {
    1.03 * quick(kernel)
}

/// A card on which the other knob has the larger effect.
fn other(kernel: &KernelConfig) -> f64 {
    match (kernel.evict, kernel.poll_sleep_ns) {
        (Evict::First, _) => 97.0,
        (_, 100) => 94.0,
        _ => 100.0,
    }
}

#[track_caller]
fn says(dir: &Path, args: &[&str], code: i32) -> Value {
    let (found, document, said) = amk(dir, args);
    assert_eq!(found, code, "{args:?}: {said}");
    document
}

#[track_caller]
fn compared(dir: &Path, a: &str, b: &str, code: i32) -> Value {
    says(dir, &["runs", "compare", a, b], code)
}

#[test]
fn runs_of_several_cards_are_compared_card_by_card() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, knob: Knob, cards: &[(&str, Times)]| {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        write_run(&dir.path().join(name), knob, cards);
    };
    let (evict, sleep) = (Knob::KernelEvict, Knob::KernelPollSleepNs);
    run("evict", evict, &[("aa", quick), ("bb", slow)]);
    run("sleep", sleep, &[("aa", quick), ("bb", slow)]);
    run("turned", sleep, &[("bb", slow), ("aa", quick)]);
    run("split-a", evict, &[("aa", quick), ("cc", other)]);
    run("split-b", sleep, &[("aa", quick), ("cc", other)]);
    run("elsewhere", sleep, &[("dd", quick), ("ee", quick)]);

    says(dir.path(), &["runs", "verify", "."], 0);
    let shown = says(dir.path(), &["runs", "show", "evict"], 0);
    let cards = shown["cards"].as_array().unwrap();
    assert_eq!((cards.len(), &cards[1]["uuid"]), (2, &json!("bb")));
    let ratio =
        cards[1]["baseline_us"].as_f64().unwrap() / cards[0]["baseline_us"].as_f64().unwrap();
    assert!((ratio - 1.03).abs() < 0.003, "{ratio}");
    assert!(cards.iter().all(|card| card["noise_floor"].as_f64().is_some()));

    // Every card that both ran on agrees, whatever its number in either.
    for b in ["sleep", "turned"] {
        let found = compared(dir.path(), "evict", b, 0);
        assert_eq!(
            (&found["comparable"], &found["better"]),
            (&json!(true), &json!("a")),
            "{found}"
        );
        let why = found["why"].as_str().unwrap();
        assert!(why.contains("card aa: saves 5.") && why.contains("; card bb: saves 5."), "{why}");
    }
    // Two cards that disagree.
    let found = compared(dir.path(), "split-a", "split-b", 0);
    assert_eq!(found["better"], "inconclusive", "{found}");
    // Only one card in common: it decides, with its own figures.
    let found = compared(dir.path(), "evict", "split-b", 0);
    assert_eq!(found["better"], "a", "{found}");
    assert!(!found["why"].as_str().unwrap().contains("card "), "{found}");
    let found = compared(dir.path(), "evict", "elsewhere", 1);
    assert_eq!(found["reasons"][0]["what"], "card's UUID", "{found}");
    assert_eq!(
        (&found["reasons"][0]["a"], &found["reasons"][0]["b"]),
        (&json!("aa, bb"), &json!("dd, ee"))
    );
}

#[test]
fn a_trial_of_a_card_is_replayed_without_it_as_far_as_that_goes() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path(), Knob::KernelEvict, &[("aa", quick), ("bb", slow)]);
    let args = ["runs", "replay", ".", "--trial", "1", "--device", "cpu"];
    let (_, found, error) = amk(dir.path(), &args);
    // The kernel's id differs here: the search's was made up.
    let result = |name: &str| {
        let stages = found["stages"].as_array().unwrap();
        stages.iter().find(|s| s["stage"] == name).map(|s| s["result"].clone()).unwrap_or_default()
    };
    for stage in ["files", "graph", "schedule", "program", "reference"] {
        assert_eq!(result(stage), "same", "{error}");
    }
    assert_eq!(result("measure"), "skipped", "{error}");
}

#[test]
fn a_row_that_another_card_measured_is_found() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path(), Knob::KernelEvict, &[("aa", quick), ("bb", slow)]);
    let ledger = dir.path().join("ledger.jsonl");
    let contents = corpus::read(&ledger).unwrap();
    std::fs::remove_file(&ledger).unwrap();
    let _ = std::fs::remove_file(dir.path().join("ledger.head"));
    // Rewritten with all hashes new: the row itself must give it away.
    let mut forged = Ledger::create(&ledger, &contents.header).unwrap();
    for (index, record) in contents.records.iter().enumerate() {
        let mut record = record.clone();
        if index == 1 {
            record["card"] = json!(0);
        }
        forged.append(&record).unwrap();
    }
    let found = says(dir.path(), &["runs", "verify", "."], 4);
    let reason = found["runs"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("threshold") || reason.contains("samples"), "{reason}");
}
