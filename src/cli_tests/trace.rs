//! `amk trace` and `amk levers` without a GPU.

use serde_json::Value;

use super::*;

#[test]
fn without_a_gpu_trace_takes_a_predicted_step_apart() {
    let folder = folder();
    let files = ["--perfetto", "a.json", "--digest", "a.md"];
    let args = ["trace", "--model", "toy", "--device", "cpu", "--kv-capacity", "256"];
    let document = amk_in(folder.path(), &[&args[..], &files].concat()).succeeds("amk.trace.v2");
    assert_eq!(document["latency_kind"], "predicted");
    let step = &document["schedules"][0]["step"];
    let ns = |key: &str| step[key].as_i64().unwrap_or_else(|| panic!("{key}: {step}"));
    let bubbles = ["before", "between", "after"].map(|at| step["bubble_ns"][at].as_i64().unwrap());
    let parts = ns("bound_ns") + ns("excess_ns") + ns("waiting_ns") + bubbles.iter().sum::<i64>();
    assert_eq!(parts, ns("span_ns") * ns("workers"));
    for file in files.iter().skip(1).step_by(2) {
        assert!(std::fs::metadata(folder.path().join(file)).unwrap().len() > 500, "{file}");
    }
    let bounds = &document["schedules"][0]["bounds"];
    let bound = |key: &str| bounds[key].as_f64().unwrap_or_else(|| panic!("{key}: {bounds}"));
    assert_eq!(bound("bound_us"), bound("bytes_us").max(bound("chain_us")));
    // All of the toy's step is its chain, and the span is in whole nanoseconds.
    assert!(bound("bound_us") * 1000.0 < ns("span_ns") as f64 + 1.0, "{bounds}");
    let refused = amk_in(folder.path(), &[&args[..], &["--digest", "no/such/folder.md"]].concat());
    refused.fails(2, &["cannot write", "no/such/folder.md"]);
    amk(&["trace", "--model", "toy", "--device", "cpu", "--context", "999999"])
        .fails(2, &["--context"]);
}

#[test]
fn trace_replays_edits_and_finds_planted_causes() {
    let folder = folder();
    let args = ["trace", "--model", "toy-2l", "--device", "cpu", "--kv-capacity", "256"];
    let files = ["--residuals", "r.json", "--html", "step.html"];
    let edits = ["--what-if", "hop=1", "--what-if", "hop=0.5,op.attention=0"];
    let plants = ["--plant", "down.products=+3us", "--plants", "3"];
    let all = [&args[..], &files, &edits, &plants].concat();
    let document = amk_in(folder.path(), &all).succeeds("amk.trace.v2");
    let schedule = &document["schedules"][0];
    let what_if = schedule["what_if"].as_array().expect("a row for each");
    assert_eq!(what_if[0]["span_ns"], schedule["step"]["span_ns"].as_f64().expect("ns"));
    assert!(what_if[1]["gain_pct"].as_f64() > Some(1.0), "{}", what_if[1]);
    let planted = &schedule["planted"];
    assert_eq!((&planted["causes"], &planted["nothing"]), (&4.into(), &3.into()));
    assert_eq!(planted["no_finding"], 3);
    let first = &planted["each"][0];
    assert_eq!(
        (&first["plant"], &first["named_first"]),
        (&"down.products=+3us".into(), &true.into())
    );
    let sum: i64 =
        first["causes"].as_array().unwrap().iter().filter_map(|c| c["ns"].as_i64()).sum();
    assert_eq!(Some(sum), first["growth_ns"].as_i64(), "the causes add up to the growth");
    let residuals: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("r.json")).unwrap()).unwrap();
    assert_eq!(residuals["schema"], "amk.residuals.v1");
    // The predicted step against itself.
    assert_eq!(residuals["residuals"]["growth_ns"], 0);
    let page = std::fs::read_to_string(folder.path().join("step.html")).unwrap();
    assert!(page.contains("\"critical_path\"") && !page.contains("/*DATA*/"));
    let refused = amk(&[&args[..], &["--what-if", "op.nothing=1,x"]].concat());
    assert!(!refused.stderr.contains("us per token"), "{}", refused.stderr);
    refused.fails(2, &["no op `nothing`", "`x` is no edit"]);
    // What cannot be written is known before the step is traced.
    let inside_a_file = folder.path().join("step.html/events.json");
    let nowhere = folder.path().join("none/events.json");
    for path in [folder.path(), &inside_a_file, &nowhere] {
        let path = path.to_str().unwrap();
        let refused = amk(&["trace", "--model", "toy", "--device", "cpu", "--perfetto", path]);
        assert!(!refused.stderr.contains("us per token"), "{}", refused.stderr);
        refused.fails(2, &[path]);
        amk(&["lower", "--model", "toy", "--device", "cpu", "--output", path]).fails(2, &[path]);
    }
    amk(&[&args[..], &["--plant", "down=3"]].concat()).fails(2, &[]);
}

#[test]
fn levers_say_what_each_move_should_bring() {
    let args = ["levers", "--model", "toy-2l", "--device", "cpu", "--kv-capacity", "256"];
    let document = amk(&args).succeeds("amk.levers.v1");
    let levers = document["levers"].as_array().expect("one for each knob");
    assert_eq!(levers.len(), ir::Knob::ALL.len());
    for lever in levers {
        assert!(!lever["shrinks"].as_array().unwrap().is_empty(), "{lever}");
        for row in lever["moves"].as_array().unwrap() {
            let (gain, refused) = (&row["predicted_gain_pct"], &row["refused"]);
            assert!(gain.is_f64() != refused.is_string(), "{row}");
            assert!(row["to"] != lever["now"], "{lever}");
        }
    }
    let tried = amk(&[&args[..], &["--try", "sync.down=flag_in_data"]].concat());
    let tried = &tried.succeeds("amk.levers.v1")["tried"];
    let us = |key: &str| tried[key].as_f64().unwrap_or_else(|| panic!("{key}: {tried}"));
    assert!((us("gain_pct") - 100.0 * (1.0 - us("us_after") / us("us_before"))).abs() < 1e-9);
    let sum = |key: &str| -> i64 {
        tried["causes"].as_array().unwrap().iter().filter_map(|row| row[key].as_i64()).sum()
    };
    assert!((us("us_before") * 1000.0 - sum("before_ns") as f64).abs() <= 1.0, "{tried}");
    assert_eq!(tried["rollback"]["sync.down"], tried["was"]);
    let refused = amk(&[&args[..], &["--try", "sync.up=counter"]].concat());
    refused.fails(2, &["there is no knob sync.up"]);
}
