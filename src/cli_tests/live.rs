//! Looks into a running process: captures beside clients, an idle server, two captures at once.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::serve::Server;
use super::{Ran, command, folder, ran};

const TRACKS: [&str; 4] = ["client", "turn", "command", "device"];

/// A server on the reference VM with four places.
pub(super) fn server(runtime: &Path) -> Server {
    let arguments =
        ["--model", "toy", "--device", "cpu", "--sessions", "4", "--metrics", "127.0.0.1:0"];
    Server::start_in(
        &[&arguments[..], &["--kv-capacity", "2048", "--schedule", "neutral"]].concat(),
        Some(runtime),
    )
}

/// Starts `amk` beside the test.
fn beside(runtime: &Path, arguments: &[&str]) -> Child {
    let mut command = command(runtime, arguments);
    command.env("XDG_RUNTIME_DIR", runtime).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

pub(super) fn amk(runtime: &Path, arguments: &[&str]) -> Ran {
    ran(beside(runtime, arguments).wait_with_output().unwrap())
}

/// Four clients, each with some requests one after the other.
pub(super) fn clients(server: &Server) {
    std::thread::scope(|scope| {
        for client in 1..=4 {
            scope.spawn(move || {
                for request in 0..3 {
                    let prompt: Vec<u32> = (0..5 + 9 * client).map(|i| 1 + (i + request) % 9).collect();
                    let fields = json!({"model": "toy", "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "seed": 7});
                    assert_eq!(server.complete(fields).status, 200);
                }
            });
        }
    });
}

fn count(document: &Value, pointer: &str) -> u64 {
    document
        .pointer(pointer)
        .and_then(Value::as_u64)
        .unwrap_or_else(|| panic!("{pointer}: {document}"))
}

/// The slices of a file by track, each with its begin and end.
fn slices(path: &Path) -> Vec<(String, f64, f64)> {
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
    let slice = |event: &Value| {
        let track = event["cat"].as_str().unwrap().to_owned();
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        (track, ts, ts + dur)
    };
    events.map(slice).collect()
}

#[test]
fn captures_are_what_clients_did() {
    let home = folder();
    let runtime = home.path();
    let mut server = server(runtime);
    let pid = server.document["pid"].to_string();
    let trace = |more: &[&str]| beside(runtime, &[&["trace", "--pid", &pid], more].concat());

    let idle = amk(runtime, &["trace", "--pid", &pid, "--seconds", "0.2"]);
    assert_eq!(idle.code, 3, "{}", idle.stderr);
    let document = idle.json();
    assert_eq!((&document["empty_trace"], &document["events"]), (&json!(true), &json!(0)));
    assert_eq!(document["stopped_by"], "time");

    let [perfetto, digest] = ["t.json", "t.md"].map(|name| runtime.join(name));
    let files = ["--perfetto", perfetto.to_str().unwrap(), "--digest", digest.to_str().unwrap()];
    let before = server.positions();
    let whole = trace(&[&["--seconds", "3"], &files[..]].concat());
    let second = trace(&["--seconds", "3"]);
    let few = trace(&["--seconds", "20", "--max-events", "100"]);
    std::thread::sleep(Duration::from_millis(800));
    clients(&server);
    let ran_there = server.positions() - before;
    let [whole, second, few] = [whole, second, few].map(|child| {
        let ran = ran(child.wait_with_output().unwrap());
        ran.succeeds("amk.trace_live.v1")
    });

    assert_eq!(whole["stopped_by"], "time");
    for (document, name) in [(&whole, "first"), (&second, "second")] {
        assert_eq!(document["dropped"], 0, "{name}: {document}");
        assert_eq!(count(document, "/metrics/positions_before"), before, "{name}: it began later");
        assert_eq!(count(document, "/positions"), ran_there, "{name}: {document}");
        assert_eq!(count(document, "/metrics/positions"), ran_there, "{name}: {document}");
        assert_eq!(count(document, "/tokens"), 4 * 3 * 12, "{name}: {document}");
    }
    let slices = slices(&perfetto);
    assert_eq!(slices.len() as u64, count(&whole, "/events"));
    assert!(slices.iter().all(|(_, begin, end)| begin < end), "every slice has a length");
    for track in TRACKS {
        let here = slices.iter().filter(|(of, ..)| of == track).count() as u64;
        assert!(here > 10, "{track}: {here}");
        assert_eq!(count(&whole, &format!("/tracks/{track}/slices")), here);
    }
    let text = std::fs::read_to_string(digest).unwrap();
    assert!(text.len() < 6 * 1024 && TRACKS.iter().all(|track| text.contains(track)), "{text}");

    // Of 100 events, those of turns have the positions that `/metrics` had counted by the last of them.
    assert_eq!((&few["stopped_by"], &few["events"]), (&json!("events"), &json!(100)));
    assert_eq!(count(&few, "/positions"), count(&few, "/metrics/positions"), "{few}");
    assert!(count(&few, "/positions") < ran_there);

    // Each op of each worker: those of a pass of the program, times the passes.
    ops_are_those_of_the_program(&whole, ran_there, runtime);
    server.interrupt();
    assert_eq!(server.end(), 0);
}

/// Compares the mix of ops with the text of the same program: its tasks by worker, times the positions.
fn ops_are_those_of_the_program(document: &Value, passes: u64, runtime: &Path) {
    let file = runtime.join("p.amk");
    let lower =
        ["lower", "--model", "toy", "--kv-capacity", "2048", "--schedule", "neutral", "--output"];
    let lower = [&lower[..], &[file.to_str().unwrap()]].concat();
    let lowered = amk(runtime, &lower).succeeds("amk.lower.v2");
    let ops = &document["ops"];
    assert_eq!(ops["source"], "derived");
    let program = &ops["programs"][0];
    assert_eq!((&program["program"], &program["passes"]), (&lowered["program_id"], &json!(passes)));
    let text = std::fs::read_to_string(file).unwrap();
    let mut expected: Vec<Value> = Vec::new();
    for line in text.lines() {
        if line.starts_with("worker ") {
            expected.push(json!({}));
        } else if let (Some(op), Some(worker)) = (line.strip_prefix("  "), expected.last_mut()) {
            let name = op.split(' ').next().unwrap();
            worker[name] = json!(worker[name].as_u64().unwrap_or(0) + passes);
        }
    }
    assert!(expected.len() > 100, "{text}");
    let found = ops["by_worker"].as_array().unwrap();
    assert_eq!(found.len(), expected.len());
    for (worker, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "worker {worker}");
    }
}

#[test]
fn counters_by_op_are_everywhere_the_same() {
    let home = folder();
    let runtime = home.path();
    let server = server(runtime);
    clients(&server);
    let seen = amk(runtime, &["top", "--once", "--json", "--every", "50"]).succeeds("amk.top.v2");
    let tasks = seen["ops"]["tasks"].as_object().unwrap();
    assert_eq!(seen["ops"]["source"], "derived");
    assert_eq!(seen["ops"]["programs"][0]["passes"], seen["totals"]["positions"]);
    assert!(tasks.len() >= 4, "{tasks:?}");
    for (op, tasks) in tasks {
        let metric = server.sum(&format!("amk_tasks_total{{op=\"{op}\"}} "));
        assert_eq!(Some(metric), tasks.as_u64(), "{op}");
    }
    // Between two looks the workers together run passes of the same program.
    let text = json!({"model": "toy", "prompt": [1, 2], "max_tokens": 1900, "ignore_eos": true});
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(server.complete(text).status, 200));
        amk(runtime, &["top", "--once", "--json", "--every", "100"]).succeeds("amk.top.v2")
    });
    let workers = seen["ops"]["by_worker"].as_array().unwrap();
    assert_eq!(Some(workers.len() as u64), seen["ops"]["programs"][0]["workers"].as_u64());
    let between = |op: &str| workers.iter().filter_map(|of| of[op].as_u64()).sum::<u64>();
    let total = |op: &str| seen["ops"]["tasks"][op].as_u64().unwrap();
    assert!(between("matvec") > 0, "{seen}");
    for op in tasks.keys() {
        assert_eq!(between(op) * total("matvec"), total(op) * between("matvec"), "{op}");
    }
    let shown = amk(runtime, &["top", "--once"]);
    assert!(
        shown.stdout.contains("matvec") && shown.stdout.contains("(derived)"),
        "{}",
        shown.stdout
    );
}

#[test]
fn the_ring_is_shown_with_its_entries_and_last_commands() {
    let home = folder();
    let runtime = home.path();
    let server = server(runtime);
    let pid = server.document["pid"].to_string();
    clients(&server);
    let seen = amk(runtime, &["inspect", "ring", "--pid", &pid]).succeeds("amk.inspect_ring.v1");
    let entries = seen["entries"].as_array().unwrap();
    assert_eq!((entries.len(), &seen["places"]), (64, &json!(4)));
    assert!(entries.iter().all(|entry| entry["state"] == "empty"), "{seen}");
    assert_eq!(seen["entered"]["published"], 12, "{seen}");
    assert_eq!(seen["entered"]["done"], 12, "{seen}");
    let commands = seen["commands"].as_array().unwrap();
    assert_eq!(commands.len(), 64, "as many as the ring has entries");
    let last = seen["drained"].as_u64().unwrap();
    for (command, number) in commands.iter().zip(last - 63..) {
        assert_eq!(command["number"], number, "{seen}");
        assert!(command["begin_ns"].as_u64() < command["end_ns"].as_u64(), "{command}");
    }
}

/// T6 on a machine without a GPU: what has no source is missing, and never zero.
#[test]
fn evidence_that_is_missing_cannot_be_claimed() {
    let home = folder();
    let runtime = home.path();
    let server = server(runtime);
    let pid = server.document["pid"].to_string();
    let ran = amk(runtime, &["inspect", "evidence", "--pid", &pid]);
    assert_eq!(ran.code, 5, "{}", ran.stderr);
    let seen = ran.json();
    assert_eq!(seen["schema"], "amk.inspect_evidence.v1");
    assert_eq!(
        (&seen["complete"], &seen["missing"]),
        (&json!(false), &json!(["copy", "residency"]))
    );
    assert_eq!(seen["derived"], json!([]));
    for family in ["ring", "control"] {
        let of = &seen["families"][family];
        assert_eq!(of["known"], "measured", "{seen}");
        assert!(of["source"].is_string() && of["figures"].is_object(), "{of}");
        assert!(of["decode_ns"].as_u64() > Some(0), "{of}");
    }
    for family in ["copy", "residency"] {
        let of = &seen["families"][family];
        assert_eq!(of["known"], "missing", "{seen}");
        assert!(of["source"].is_null() && of["figures"].is_null(), "{of}");
    }
    assert!(seen["read_ns"].as_u64() > Some(0), "{seen}");
}

#[test]
fn what_cannot_be_captured_is_refused() {
    let home = folder();
    amk(home.path(), &["trace"]).fails(2, &[]);
    amk(home.path(), &["trace", "--pid", "1"]).fails(3, &["process 1 has no page"]);
    amk(home.path(), &["trace", "--pid", "1", "--model", "toy"]).fails(2, &[]);
    amk(home.path(), &["trace", "--seconds", "1", "--model", "toy"]).fails(2, &[]);
    amk(home.path(), &["inspect", "evidence"]).fails(3, &["no running amk"]);
    let streamed = ["serve", "--model", "toy", "--device", "cpu", "--stream-weights"];
    amk(home.path(), &streamed).fails(2, &["--stream-weights", "--device cuda"]);
}
