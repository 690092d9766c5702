//! `amk bench --manifest`: rows that are no result say why, and what cannot be measured is refused.

use serde_json::{Value, json};

use super::{amk_in, folder};

/// Runs a manifest with these rows on the CPU, where nothing can be measured.
fn bench(rows: &Value) -> super::Ran {
    let dir = folder();
    let manifest = json!({
        "schema": "amk.bench_manifest.v1",
        "gates": {"interval_pct": 1.0, "noise_pct": 1.0, "spread_pct": 2.0},
        "repeats": 4,
        "processes": 2,
        "timeout_s": 60,
        "rows": rows,
    });
    std::fs::write(dir.path().join("bench.json"), manifest.to_string()).unwrap();
    amk_in(dir.path(), &["bench", "--manifest", "bench.json", "--device", "cpu", "--bundle", "out"])
}

#[test]
fn a_prediction_is_no_result_and_the_row_says_so() {
    let toy = json!({"name": "toy", "model": "toy", "format": "f16", "context": 8, "schedule": "default", "kv_capacity": 16});
    // A bundle needs a GPU, and the failure of the process is that of the command.
    bench(&json!([toy])).fails(3, &["row \"toy\", process 1", "--bundle", "no GPU here"]);
    let dir = folder();
    let mut manifest: Value =
        serde_json::from_str(include_str!("../../corpus/bench.json")).unwrap();
    manifest["rows"] = json!([toy]);
    std::fs::write(dir.path().join("bench.json"), manifest.to_string()).unwrap();
    let ran = amk_in(dir.path(), &["bench", "--manifest", "bench.json", "--device", "cpu"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let document = ran.json();
    let row = &document["rows"][0];
    assert_eq!((&document["holds"], &row["status"]), (&json!(false), &json!("unstable")));
    assert!(row["result"].is_null() && row["program_id"].is_string(), "{row}");
    let reasons = row["reasons"].to_string();
    for part in [
        "process 1: it measured nothing",
        "process 2: it measured nothing",
        "the card is unknown",
        "other processes",
        "older than 570.0",
        "clocks could not be read",
        "the weights are",
    ] {
        assert!(reasons.contains(part), "{part}: {reasons}");
    }
    assert!(ran.stderr.contains("toy: UNSTABLE: "), "{}", ran.stderr);
}

#[test]
fn a_manifest_that_cannot_be_measured_is_refused() {
    let batch = json!({"name": "a", "model": "smollm2-135m", "format": "bf16", "batch": 8, "schedule": "default"});
    bench(&json!([batch.clone()])).fails(3, &["row \"a\", process 1", "--batch", "no GPU here"]);
    let model = json!({"name": "a", "model": "no-such-model", "format": "bf16"});
    bench(&json!([model])).fails(2, &["row \"a\", process 1", "no-such-model"]);
    let two = json!({"name": "a b", "model": "toy", "format": "bf16", "gpus": 2, "batch": 3});
    bench(&json!([two])).fails(2, &["batch is 3", "a name is of letters"]);
    let mut both = batch;
    both["gpus"] = json!(2);
    bench(&json!([both])).fails(3, &["row \"a\", process 1", "--batch", "no GPU here"]);
    let alone = super::amk(&["bench", "--manifest", "x.json", "--model", "toy"]);
    assert_eq!(alone.code, 2, "{}", alone.stderr);
    super::amk(&["bench", "--manifest", "x.json"]).fails(2, &["x.json"]);
}
