//! Bundles, samples and calibrations with the built binary on a machine without a GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ir::Target;
use search::{BUNDLE_SCHEMA, Bundle, Conditions, GateReport, Proof};
use serde_json::{Value, json};

#[path = "provenance_tests.rs"]
mod provenance;

const KV_CAPACITY: u32 = 64;

/// Exit code, document and standard error.
fn amk(args: &[&str]) -> (i32, Value, String) {
    amk_in(Path::new("."), args)
}

fn amk_in(folder: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    let output = command.args(args).current_dir(folder).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    (output.status.code().unwrap_or(-1), document, said)
}

/// A bundle of the toy's neutral schedule, as a GPU would have produced it.
fn bundle() -> Bundle {
    let graph = model::preset("toy").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let config = ir::schedule::default_config(&graph, &target);
    let valid = ir::schedule::validate(config, &graph, &target).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let program = lower::lower(&valid, &graph, &target, options).unwrap();
    let bytes = program.stream_bytes() + program.kv_bytes(32);
    let gate = |gate: &str| GateReport {
        gate: gate.to_owned(),
        passed: true,
        detail: "as it should".to_owned(),
    };
    Bundle {
        schema: BUNDLE_SCHEMA.to_owned(),
        model: "toy".to_owned(),
        dtype: graph.dtype.name().to_owned(),
        target: "h200".to_owned(),
        context: 16,
        kv_capacity: KV_CAPACITY,
        seed: 0,
        config,
        schedule_id: config.id(),
        program_id: program.id(),
        kernel_id: "0123456789abcdef".to_owned(),
        conditions: Conditions { card: "NVIDIA H200".to_owned(), ..Conditions::default() },
        gates: ["validate", "lower", "verify", "reference", "device", "bound"].map(gate).to_vec(),
        accuracy: Proof {
            positions: 48,
            rel_err_worst: 1e-4,
            rel_err_mean: 1e-5,
            kl_mean: 1e-6,
            top1_decided: 40,
            top1_equal: 40,
        },
        timed_tokens: 32,
        median_us: 25.5,
        ci_us: [25.0, 26.0],
        rounds_us: vec![[30.0, 25.0, 26.0, 30.0]; 4],
        bound_us: bytes as f64 / 4e12 * 1e6,
        bytes_per_token: bytes,
        bandwidth: 4e12,
        notes: Vec::new(),
    }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_whole_bundle_holds_and_says_what_was_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "128.bundle.json", &bundle().to_text());
    let (code, document, said) = amk(&["bundle", path.to_str().unwrap()]);
    assert_eq!((code, &document["schema"]), (0, &Value::from("amk.bundles.v1")), "{said}");
    let row = &document["bundles"][0];
    assert_eq!((&row["holds"], &row["latency_kind"]), (&true.into(), &"measured-gpu".into()));
    assert_eq!((&row["us_per_token"], &row["same_kernel"]), (&25.5.into(), &false.into()));
    let checked: Vec<&str> =
        row["checked"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(checked.len(), 4, "{checked:?}");
    assert!(checked[3].contains("reference VM"), "{checked:?}");
    assert!(said.contains("another kernel") && said.contains("NVIDIA H200"), "{said}");
}

#[test]
fn a_bundle_of_another_kernel_is_stale_which_fails_where_current_evidence_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let mut stale = bundle();
    stale.conditions.amk = "0.1.0 (515e03b)".to_owned();
    let path = write(folder.path(), "stale.bundle.json", &stale.to_text());
    let (code, document, said) = amk(&["bundle", path.to_str().unwrap()]);
    let row = &document["bundles"][0];
    assert_eq!((code, &row["status"], &row["holds"]), (0, &"stale".into(), &true.into()));
    assert_eq!(row["built"], "0.1.0 (515e03b)");
    assert!(said.contains("stale") && said.contains("515e03b"), "{said}");
    let (code, document, said) = amk(&["bundle", "--current", path.to_str().unwrap()]);
    assert_eq!((code, &document["bundles"][0]["status"]), (1, &"stale".into()), "{said}");
    let mut of_another_program = bundle();
    of_another_program.program_id = "0123456789abcdef".to_owned();
    let path = write(folder.path(), "program.bundle.json", &of_another_program.to_text());
    let (code, document, said) = amk(&["bundle", path.to_str().unwrap()]);
    let row = &document["bundles"][0];
    assert_eq!((code, &row["status"], &row["us_per_token"]), (0, &"stale".into(), &25.5.into()));
    assert!(said.contains("0123456789abcdef was measured"), "{said}");
    assert_eq!(amk(&["bundle", "--current", path.to_str().unwrap()]).0, 1);
    let mut altered = bundle();
    altered.ci_us = [0.0, 1e6];
    let altered = write(folder.path(), "altered.bundle.json", &altered.to_text());
    let (code, document, said) = amk(&["bundle", "--current", altered.to_str().unwrap()]);
    assert_eq!((code, &document["bundles"][0]["status"]), (4, &"altered".into()), "{said}");
    assert!(said.contains("interval"), "{said}");
    // Control characters in a file cannot alter the terminal output.
    let mut painted = bundle();
    painted.conditions.card = "NVIDIA H200\u{1b}[2J".to_owned();
    let painted = write(folder.path(), "painted.bundle.json", &painted.to_text());
    let (_, _, said) = amk(&["bundle", painted.to_str().unwrap()]);
    assert!(!said.contains('\u{1b}') && said.contains("\\u{1b}[2J"), "{said}");
}

#[test]
fn a_pipe_or_a_folder_in_the_place_of_a_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = |name: &str| {
        let path = folder.path().join(name);
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (bundle, program, rows, grid) =
        (pipe("b.json"), pipe("p.amk"), pipe("rows.jsonl"), pipe("grid.json"));
    let store = folder.path().join("s.sqlite").to_str().unwrap().to_owned();
    let out = folder.path().join("out.jsonl").to_str().unwrap().to_owned();
    let record = ["grid", "record", "--model", "toy", "--device", "cpu", "--context", "8"];
    for args in [
        vec!["bundle", &bundle],
        vec!["verify", &program],
        vec!["calibrate", &rows],
        vec!["corpus", "import", &rows, "--store", &store],
        [&record[..], &["--grid", &grid, "--out", &out]].concat(),
    ] {
        let (code, document, said) = amk(&args);
        assert_eq!(code, 2, "{args:?}: {said}");
        assert!(document["message"].is_string(), "{args:?}: {document}");
    }
    let (code, _, said) = amk(&["bundle", folder.path().to_str().unwrap()]);
    assert_eq!(code, 2, "{said}");
}

#[test]
fn bundles_that_prove_nothing_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let text = bundle().to_text();
    let edited = text.replace("\"median_us\": 25.5", "\"median_us\": 20.5");
    let cases = [
        (edited, 4, "edited"),
        ("{\"schema\": \"amk.verdict.v2\"}".to_owned(), 2, "amk.verdict.v2"),
    ];
    for (text, expected, word) in cases {
        let path = write(folder.path(), "x.bundle.json", &text);
        let whole = write(folder.path(), "y.bundle.json", &bundle().to_text());
        let (code, document, said) =
            amk(&["bundle", path.to_str().unwrap(), whole.to_str().unwrap()]);
        assert_eq!(code, expected, "{said}");
        assert!(said.contains(word) && said.contains("REFUSED"), "{said}");
        assert_eq!((&document["bundles"][0]["holds"]), &Value::from(false));
        assert!(document["bundles"][0]["reason"].as_str().unwrap().contains(word));
        assert_eq!(document["bundles"][1]["holds"], true, "the others are judged all the same");
    }
}

#[test]
fn what_must_be_measured_is_not_made_up() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("b.json");
    let bench = ["bench", "--model", "toy", "--device", "cpu", "--context", "16", "--bundle"];
    let (code, document, _) = amk(&[&bench[..], &[bundle.to_str().unwrap()]].concat());
    assert_eq!((code, &document["error"]), (3, &"capability_missing".into()));
    assert!(!bundle.exists());
}

/// A measured grid whose times are the model's predictions, or with `reversed` 1000 over these, which reverses the
/// ranking.
fn measured_grid(folder: &Path, reversed: bool) -> PathBuf {
    let grid = json!({"schema": "amk.grid.v1", "base": {}, "axes": {
        "tiling.qkv.rows": [8, 16, 32, 64], "tiling.down.rows": [8, 16, 32], "pipeline.stages": [4, 8],
    }});
    let grid = write(folder, "grid.json", &grid.to_string());
    let out = folder.join(if reversed { "wrong.jsonl" } else { "rows.jsonl" });
    let record = ["grid", "record", "--model", "toy", "--device", "cpu", "--context", "16"];
    let (code, _, said) =
        amk(&[&record[..], &["--grid", grid.to_str().unwrap(), "--out", out.to_str().unwrap()]]
            .concat());
    assert_eq!(code, 0, "{said}");
    let text = std::fs::read_to_string(&out).unwrap();
    let rows = text.lines().map(|line| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        if let Some(predicted) = row.as_object_mut().unwrap().remove("predicted") {
            let us = predicted["us"].as_f64().unwrap();
            let us = if reversed { 1000.0 / us } else { us };
            row["measured"] = json!({
                "program_id": predicted["program_id"], "kernel_id": "", "us": us,
                "blocks_us": [us], "sm_mhz": null,
            });
        }
        row.to_string() + "\n"
    });
    std::fs::write(&out, rows.collect::<String>()).unwrap();
    out
}

#[test]
fn a_calibration_says_how_good_predictions_are_and_fits_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = measured_grid(folder.path(), false);
    let (code, document, said) = amk(&["calibrate", path.to_str().unwrap()]);
    assert_eq!((code, &document["holds"]), (0, &true.into()), "{said}");
    let table = &document["tables"][0]["models"]["toy at 16"];
    assert_eq!((table["rows"].as_u64() > Some(9), &table["below_bound"]), (true, &0.into()));
    assert!(table["rank_correlation"].as_f64().unwrap() > 0.999, "{table}");
    assert!(table["error_median"].as_f64().unwrap() < 1e-9, "{table}");

    let wrong = measured_grid(folder.path(), true);
    let (code, document, said) = amk(&["calibrate", wrong.to_str().unwrap()]);
    assert_eq!((code, &document["holds"]), (1, &false.into()), "{said}");

    let rates = folder.path().join("rates.json");
    let fit = ["calibrate", path.to_str().unwrap(), "--fit", rates.to_str().unwrap()];
    let (code, document, said) = amk(&fit);
    assert_eq!((code, document["tables"].as_array().unwrap().len()), (0, 5), "{said}");
    let again = ["calibrate", path.to_str().unwrap(), "--rates", rates.to_str().unwrap()];
    assert_eq!(amk(&again).0, 0);

    let broken = write(folder.path(), "broken.jsonl", "{}\n");
    let (code, _, said) = amk(&["calibrate", broken.to_str().unwrap()]);
    assert!(code == 2 && said.contains("broken.jsonl line 1"), "{said}");
}
