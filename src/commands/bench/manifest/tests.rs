use super::*;

fn shipped_manifest() -> Value {
    serde_json::from_str(include_str!("../../../../corpus/bench.json")).expect("it is JSON")
}

fn problems(edit: impl Fn(&mut Value)) -> Vec<String> {
    let mut manifest = shipped_manifest();
    edit(&mut manifest);
    let manifest: Manifest = serde_json::from_value(manifest).expect("its fields are known");
    manifest.problems()
}

#[test]
fn the_manifest_of_this_repository_is_usable_and_has_a_row_of_each_kind() {
    assert_eq!(problems(|_| ()), Vec::<String>::new());
    let manifest: Manifest = serde_json::from_value(shipped_manifest()).expect("it is one");
    let kinds: Vec<_> = manifest.rows.iter().map(|row| (row.batch, row.prompt)).collect();
    assert_eq!(kinds, [(1, None), (8, None), (1, Some(2048))]);
    assert!(manifest.rows.iter().all(|row| row.model == "llama-3.2-1b"));
    assert!(manifest.gates.spread_pct <= 2.0 && !manifest.gates.throttling);
}

#[test]
fn everything_that_is_wrong_with_a_manifest_is_said_at_once() {
    let all = problems(|manifest| {
        manifest["schema"] = json!("amk.grid.v1");
        manifest["repeats"] = json!(3);
        manifest["processes"] = json!(1);
        manifest["timeout_s"] = json!(0);
        manifest["rows"][0]["gpus"] = json!(2);
        manifest["rows"][1]["batch"] = json!(3);
        manifest["rows"][1]["name"] = manifest["rows"][0]["name"].clone();
        manifest["rows"][2]["context"] = json!(128);
        manifest["rows"][2]["schedule"] = json!("found");
    });
    let says = [
        "not amk.bench_manifest.v1",
        "repeats is 3",
        "processes is 1",
        "timeout_s",
        "gpus is 2",
        "its own",
        "batch is 3",
        "no batch and no context",
        "schedule is found",
    ];
    assert_eq!(all.len(), says.len(), "{all:?}");
    says.iter().for_each(|part| assert!(all.iter().any(|why| why.contains(part)), "{part}"));
    let mut unknown = shipped_manifest();
    unknown["rows"][0]["lanes"] = json!(2);
    assert!(serde_json::from_value::<Manifest>(unknown).is_err());
}

#[test]
fn weights_of_another_format_are_no_result() {
    let manifest: Manifest = serde_json::from_value(shipped_manifest()).expect("it is one");
    let process = Process { dtype: "f32".to_owned(), ..Process::default() };
    let reasons = judge(&manifest, &manifest.rows[0], &[process]).expect_err("another format");
    assert!(reasons.iter().any(|why| why == "the weights are f32, not bf16"), "{reasons:?}");
}
