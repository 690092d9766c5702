//! Stored records: bundles and ledgers.

use std::sync::LazyLock;
use std::time::Duration;

use corpus::Ledger;
use ir::Target;
use ir::schedule::{KernelConfig, Knob};
use search::{Budget, Bundle, Expected, Gate, Row, Search, Settings, Step, Timing};
use serde_json::{Map, Value, json};

use super::{file, in_scratch, write};

const KV_CAPACITY: u32 = 16;

/// `R` and a whole file, or `S` and a document, which gets the right hash.
pub(super) fn bundle(input: &[u8]) {
    static MODEL: LazyLock<(ir::Graph, Target)> = LazyLock::new(|| {
        (model::preset("toy").expect("a preset").graph, Target::by_name("h200").expect("a target"))
    });
    let Some((&form, rest)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    let sealed = if form == b'S' {
        let Ok(fields) = serde_json::from_str::<Map<String, Value>>(text) else { return };
        serde_json::to_string(&corpus::seal(&fields)).expect("JSON prints")
    } else {
        text.to_owned()
    };
    let Ok(bundle) = Bundle::read(&sealed) else { return };
    assert_eq!(Bundle::read(&bundle.to_text()).as_ref(), Ok(&bundle), "writing lost something");
    let (graph, target) = &*MODEL;
    let _ = bundle.rebuild(graph, target);
}

pub(super) fn bundle_seeds() -> Vec<Vec<u8>> {
    let shipped = file("corpus/schedules/h200/llama-3.2-1b/2048.bundle.json");
    vec![[b"S", &shipped[..]].concat(), [b"R", &shipped[..]].concat()]
}

/// `R` and a whole file, or `L` and records, one per line, which get a chain.
pub(super) fn ledger(input: &[u8]) {
    let Some((&form, rest)) = input.split_first() else { return };
    in_scratch(|scratch| {
        let path = scratch.join("ledger.jsonl");
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_file(path.with_extension("head"));
        let records = if form == b'L' { chained(&path, rest) } else { None };
        if records.is_none() {
            write(&path, rest);
        }
        let read = corpus::read(&path);
        if let (Some(records), Ok(contents)) = (records, &read) {
            assert_eq!(contents.records.len(), records, "a row was lost");
        }
        let Ok(contents) = read else { return };
        for record in &contents.records {
            let _ = serde_json::from_value::<Row>(record.clone());
        }
        if let Ok((mut ledger, _)) = Ledger::resume(&path) {
            ledger.append(&"one more").expect("there is room");
            drop(ledger);
            let again = corpus::read(&path).expect("what was resumed is whole");
            assert_eq!(again.records.len(), contents.records.len() + 1);
        }
    });
}

/// Writes the records as a ledger; `None` if the first is not a header.
fn chained(path: &std::path::Path, text: &[u8]) -> Option<usize> {
    let mut records = text.split(|&byte| byte == b'\n').map(serde_json::from_slice::<Value>);
    let header = records.next()?.ok().filter(Value::is_object)?;
    let mut ledger = Ledger::create(path, &header).ok()?;
    let rows = records.filter_map(Result::ok).take(64);
    Some(rows.map(|row| ledger.append(&row).expect("there is room")).count())
}

pub(super) fn ledger_seeds() -> Vec<Vec<u8>> {
    let rows = rows();
    let text: Vec<String> = rows.iter().map(Value::to_string).collect();
    let whole = in_scratch(|scratch| {
        let path = scratch.join("seed.jsonl");
        let mut ledger = Ledger::create(&path, &rows[0]).expect("a new ledger");
        for row in &rows[1..] {
            ledger.append(row).expect("there is room");
        }
        let whole = std::fs::read(&path).expect("it was written");
        ledger.remove().expect("it was written");
        whole
    });
    vec![[b"L", text.join("\n").as_bytes()].concat(), [&b"R"[..], &whole[..]].concat()]
}

/// A header and the rows of a short search.
fn rows() -> Vec<Value> {
    let model = model::preset("toy").expect("a preset");
    let target = Target::by_name("h200").expect("a target");
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = Expected::new(graph, weights, KV_CAPACITY, 0, None).expect("a small model");
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected);
    let settings = Settings {
        seed: 0,
        budget: Budget::Trials(2),
        explore: 2,
        min_gain: 0.001,
        default: ir::schedule::neutral_config(graph, &target),
        space: Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect(),
        timing: Timing::default(),
        finalists: 0,
        simplest: None,
    };
    let mut search = Search::new(gate, None, settings);
    let mut rows = vec![json!({"seed": 0, "min_gain": 0.001, "latency_kind": "predicted"})];
    while let Ok(Step::Trial(trial)) = search.step(Duration::ZERO) {
        rows.push(serde_json::to_value(Row::Trial(trial)).expect("a row is JSON"));
    }
    rows
}
