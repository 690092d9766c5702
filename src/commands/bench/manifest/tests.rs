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
        manifest["rows"][0]["gpus"] = json!(9);
        manifest["rows"][1]["gpus"] = json!(2);
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
        "gpus is 9",
        "its own",
        "batch is 3",
        "no batch and no context",
        "schedule is found",
    ];
    assert_eq!(all.len(), says.len(), "{all:?}");
    says.iter().for_each(|part| assert!(all.iter().any(|why| why.contains(part)), "{part}"));
    let mut unknown = shipped_manifest();
    unknown["rows"][0]["width"] = json!(2);
    assert!(serde_json::from_value::<Manifest>(unknown).is_err());
}

/// A row that a GPU would pass, so that only what is added can refuse it.
fn quiet(dtype: &str) -> Vec<Process> {
    let clocks = json!({"sm_mhz": 1980, "memory_mhz": 3201, "throttled": []});
    let process = json!({
        "correct": true, "rejected_reason": null, "latency_kind": "measured-gpu", "dtype": dtype,
        "conditions": {
            "card": "NVIDIA H200", "uuid": null, "sms": 132, "max_sm_mhz": 1980, "max_memory_mhz": 3201,
            "other_processes": 0, "driver": "580.159.04", "cuda": "13.0", "nvrtc": "13.0", "amk": "0.2.0"
        },
        "clocks": [clocks, clocks], "samples_us": vec![[600.0; 4]; 24],
        "schedule_id": "a", "program_id": "b", "kernel_id": "c",
    });
    let process: Process = serde_json::from_value(process).expect("what `amk bench` writes");
    vec![process; 2]
}

#[test]
fn weights_of_another_format_and_a_failed_process_are_no_result() {
    let manifest: Manifest = serde_json::from_value(shipped_manifest()).expect("it is one");
    let judged = |dtype, failed: Option<&str>| {
        judge(&manifest, &manifest.rows[0], &quiet(dtype), failed.map(str::to_owned))
    };
    assert!(judged("bf16", None).is_ok());
    let reasons = |dtype, failed| judged(dtype, failed).expect_err("it is no result");
    assert_eq!(reasons("f32", None), ["the weights are f32, not bf16"]);
    assert_eq!(reasons("bf16", Some("no answer within 1 s")), ["no answer within 1 s"]);
}

#[test]
fn a_process_that_does_not_answer_in_time_fails() {
    let mut command = Command::new("sh");
    command.args(["-c", "exec sleep 60"]);
    let failure = once(command, 0).expect_err("it does not answer");
    assert_eq!((failure.exit, failure.message.as_str()), (Exit::No, "no answer within 0 s"));
    let mut command = Command::new("sh");
    command.args(["-c", r#"echo '{"message": "no GPU"}'; exit 3"#]);
    let failure = once(command, 60).expect_err("it answers with a failure");
    assert_eq!((failure.exit, failure.message.as_str()), (Exit::Missing, "no GPU"));
}
