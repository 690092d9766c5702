//! The compatibility promise to programs that read our documents: a field that a schema id ever had stays there under
//! that id, with the same type.
//!
//! `tests/schemas.json` has the fields of every document. New ones are added with
//! `BLESS=1 cargo test -p amk --test cli schemas`; a field that is gone or has another type needs a new id,
//! and blessing does not remove it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{Path, amk_in, folder, golden};

#[path = "fields.rs"]
pub(super) mod fields;

use fields::{Fields, broken, fields_of, known, settle};

/// Documents that need a card or nvdisasm: unit tests inside the binary and `inspect.rs` check them against the record.
const ON_A_CARD: [&str; 4] =
    ["amk.aa.v1", "amk.found.v1", "amk.inspect_kernel.v1", "amk.sanitize.v1"];

/// Ids that are no longer written, and are refused or read by name.
const NOT_WRITTEN: [&str; 4] =
    ["amk.bundle.v1", "amk.landscape.v1", "amk.ledger.v2", "amk.verdict.v1"];

/// A search from the neutral schedule, so that trials are kept and reverted.
const SEARCH: &str = "loop --schedule neutral --budget 4 --strategy hill-climb --out runs/a";
/// Records a measured grid over the grid file in the folder.
const RECORD: &str = "grid record --context 4 --grid grid.json --out points.jsonl";

/// What is asked of the runs of the session; then a log of commands and its replay.
const ON_RUNS: [&str; 4] = [
    "runs export runs --out prompts --sft",
    "notes kept --in runs",
    "generate --model toy --device cpu --tokens 1,2 --max-new-tokens 2 --command-log commands.jsonl",
    "replay commands.jsonl",
];

/// The session of a fleet of one worker; its ledgers go through a store and out of it.
const FLEET: [&str; 9] = [
    "fleet init --board b.sqlite",
    "fleet submit --board b.sqlite --models toy --device cpu --budget 2",
    "fleet status --board b.sqlite",
    "fleet worker --board b.sqlite --device cpu --until-done --out legs",
    "fleet status --board b.sqlite",
    "fleet report --board b.sqlite --out written",
    "corpus import written --store night.sqlite",
    "corpus export --store night.sqlite --out again",
    "fleet drain --board b.sqlite",
];

/// A folder with the files that the session reads.
fn inputs() -> tempfile::TempDir {
    let dir = folder();
    std::fs::write(dir.path().join("a.json"), r#"{"pipeline": {"stages": 4}}"#).unwrap();
    std::fs::write(dir.path().join("bad.json"), r#"{"pipeline": {"stages": 99}}"#).unwrap();
    std::fs::write(dir.path().join("grid.json"), grid().to_string()).unwrap();
    std::fs::write(dir.path().join("bench.json"), manifest().to_string()).unwrap();
    std::fs::write(dir.path().join("rows.jsonl"), measured_rows()).unwrap();
    std::fs::copy(shipped_bundle(), dir.path().join("128.bundle.json")).unwrap();
    let page = "It takes <!-- from 128.bundle.json#/median_us .1 -->1.0<!-- / --> us, or 7 us.\n";
    std::fs::write(dir.path().join("page.md"), page).unwrap();
    dir
}

/// Documents of a small session, by schema.
fn documents() -> BTreeMap<String, Fields> {
    let dir = inputs();
    let toy = ["--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
    let with_toy =
        |args: &[&str]| args.iter().chain(&toy).map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let plain = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let calls = [
        plain("doctor"),
        with_toy(&["propose"]),
        with_toy(&["evaluate", "--config", "a.json"]),
        with_toy(&["evaluate", "--config", "bad.json"]),
        with_toy(&SEARCH.split(' ').collect::<Vec<_>>()),
        with_toy(&["loop", "--budget", "3", "--seed", "4", "--out", "runs/b"]),
        plain("runs list runs"),
        plain("runs verify runs"),
        plain("runs show runs/a"),
        plain("runs compare runs/a runs/b"),
        plain("runs replay runs/a"),
        plain("runs export runs --out trajectories"),
        plain("runs gc runs"),
        plain("corpus show"),
        plain("corpus check"),
        plain("corpus import runs"),
        with_toy(&["lower", "-o", "toy.amk"]),
        plain("verify toy.amk"),
        plain("interpret toy.amk --model toy"),
        with_toy(&["rerun", "--schedule", "neutral", "--task", "0:1"]),
        plain("explain"),
        plain("explain S-RING"),
        plain("diff a.json bad.json"),
        plain("diff a.json a.json --model toy"),
        plain("diff toy.amk toy.amk"),
        plain("report runs"),
        with_toy(&["bench", "--context", "8"]),
        plain("bench --manifest bench.json --device cpu"),
        plain("bench --phase down --model toy --device cpu --kv-capacity 64 --context 4"),
        plain("generate --model toy --device eval --tokens 1,2 --max-new-tokens 2"),
        plain(&format!("chat --model {} --system x", golden("llama3-rope-bf16").display())),
        plain("export --model toy --out toy"),
        plain("quantize --model toy --format fp8 --out toy-fp8"),
        plain("man --out pages"),
        plain(
            "trace --model toy --device cpu --kv-capacity 64 --context 4 --residuals residuals.json --what-if hop=1 --plants 1",
        ),
        with_toy(&["levers", "--context", "8"]),
        with_toy(&["levers", "--context", "8", "--try", "sync.down=counter"]),
        with_toy(&RECORD.split(' ').collect::<Vec<_>>()),
        plain("calibrate rows.jsonl"),
        plain("migrate a.json --out today.json"),
        plain(&format!("bundle {}", shipped_bundle().display())),
        plain("provenance page.md"),
        plain("evaluate --model no-such-model"),
    ];
    let mut all: BTreeMap<String, Fields> = BTreeMap::new();
    for call in calls.into_iter().chain(FLEET.map(plain)).chain(ON_RUNS.map(plain)) {
        let args: Vec<&str> = call.iter().map(String::as_str).collect();
        let document = amk_in(dir.path(), &args).json();
        let schema = document["schema"].as_str().unwrap_or_else(|| panic!("{args:?}: {document}"));
        fields_of(&document, "", all.entry(schema.to_owned()).or_default());
    }
    let mut add = |document: &Value| {
        let schema = document["schema"].as_str().unwrap_or_else(|| panic!("{document}"));
        fields_of(document, "", all.entry(schema.to_owned()).or_default());
    };
    files(dir.path()).iter().for_each(&mut add);
    add(&asked(dir.path()));
    add(&status());
    served().iter().for_each(&mut add);
    all
}

/// One knob with two values.
fn grid() -> Value {
    json!({
        "schema": "amk.grid.v1",
        "base": {},
        "axes": {"sm_assignment": ["round_robin", "carry"]},
    })
}

/// Rows to bench, of which one is unstable without a GPU.
fn manifest() -> Value {
    json!({
        "schema": "amk.bench_manifest.v1",
        "require": {"card": "NVIDIA H200", "alone": true, "stable_clocks": true, "driver_min": "570.0"},
        "gates": {"interval_pct": 1.0, "noise_pct": 1.0, "spread_pct": 2.0, "throttling": false},
        "repeats": 4,
        "processes": 2,
        "timeout_s": 60,
        "rows": [{
            "name": "toy", "model": "toy", "format": "f16", "context": 8, "batch": 1, "gpus": 1,
            "schedule": "default", "seed": 0, "kv_capacity": 16
        }],
    })
}

fn corpus(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(path)
}

/// A measured grid of which only the first points were measured.
fn measured_rows() -> String {
    let text = std::fs::read_to_string(corpus("grids/h200-smollm2-135m-128.jsonl")).unwrap();
    let measured = text.lines().filter(|line| line.contains("\"measured\"")).take(3);
    text.lines().take(1).chain(measured).flat_map(|line| [line, "\n"]).collect()
}

fn shipped_bundle() -> std::path::PathBuf {
    corpus("schedules/h200/llama-3.2-1b/128.bundle.json")
}

/// The first line of each kind of written file.
fn files(dir: &Path) -> Vec<Value> {
    let first = |path: &Path| -> Value {
        let text =
            std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let line = serde_json::from_str(text.lines().next().unwrap_or_default());
        line.or_else(|_| serde_json::from_str(&text))
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let split = |name: &str| std::fs::metadata(dir.join(name)).is_ok_and(|file| file.len() > 0);
    let trajectories = ["trajectories/train.jsonl", "trajectories/validation.jsonl"];
    let trajectory = trajectories.into_iter().find(|name| split(name)).unwrap();
    let prompts = ["prompts/train.jsonl", "prompts/validation.jsonl"];
    let prompt = prompts.into_iter().find(|name| split(name)).unwrap();
    let checks = std::fs::read_to_string(corpus("checks/h200.jsonl")).unwrap();
    let checks = checks.lines().take(2).map(|line| serde_json::from_str(line).unwrap());
    let files = vec![
        first(&dir.join(prompt)),
        first(&dir.join("runs/a/ledger.jsonl"))["record"].clone(),
        first(&dir.join("runs/a/manifest.json")),
        first(&dir.join(trajectory)),
        first(&dir.join("points.jsonl")),
        first(&dir.join("residuals.json")),
        first(&dir.join("commands.jsonl")),
        grid(),
        manifest(),
        first(&shipped_bundle()),
    ];
    files.into_iter().chain(checks).collect()
}

/// The first message that a proposer receives.
fn asked(dir: &Path) -> Value {
    let proposer = "head -n 1 > asked.json";
    let toy = ["--model", "toy", "--device", "cpu", "--kv-capacity", "16", "--budget", "2"];
    amk_in(dir, &[&["loop", "--proposer", proposer, "--out", "asked"][..], &toy].concat());
    let said: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("asked.json")).unwrap()).unwrap();
    said["search"].clone()
}

/// The answer of the tool `status`.
fn status() -> Value {
    let mut child = Command::new(env!("CARGO_BIN_EXE_amk"))
        .arg("mcp")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let client = json!({"name": "test", "version": "0"});
    let begin = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client});
    let lines = [
        json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin}),
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "status", "arguments": {}}}),
    ];
    let mut input = child.stdin.take().unwrap();
    for line in lines {
        writeln!(input, "{line}").unwrap();
    }
    let output = BufReader::new(child.stdout.take().unwrap());
    let answers = output.lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let answer = answers.into_iter().find(|answer| answer["id"] == 2).unwrap();
    drop(input);
    child.wait().unwrap();
    answer["result"]["structuredContent"].clone()
}

/// The document of a server that listens, and those of commands that look into it.
fn served() -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["serve", "--model", "toy", "--device", "eval", "--addr", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let server: Value = serde_json::from_str(&line).unwrap();
    let load = "--clients 1 --requests 2 --prompt-tokens 3 --answer-tokens 2 --plot load.svg --csv load.csv";
    let mut bench = vec!["bench", "--serve", server["url"].as_str().unwrap()];
    bench.extend(load.split(' '));
    let dir = folder();
    let bench = amk_in(dir.path(), &bench);
    assert_eq!(bench.code, 0, "{}", bench.stderr);
    assert!(std::fs::read_to_string(dir.path().join("load.svg")).unwrap().starts_with("<svg"));
    let rows = std::fs::read_to_string(dir.path().join("load.csv")).unwrap();
    let rows: Vec<Vec<&str>> = rows.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!((rows.len(), rows[0].len(), rows[0][0]), (2, rows[1].len(), "url"), "{rows:?}");
    // Tokens that come in one event have no time between events.
    let timed = rows[0].iter().zip(&rows[1]).filter(|(name, _)| !name.starts_with("between_"));
    let empty: Vec<_> = timed.filter(|(_, cell)| cell.is_empty()).map(|(name, _)| *name).collect();
    assert_eq!(empty, ["rate"], "of a closed loop: {rows:?}");
    let pid = child.id().to_string();
    let looks: [&[&str]; 4] = [
        &["top", "--once", "--json"],
        &["trace", "--seconds", "0.05"],
        &["inspect", "ring"],
        &["inspect", "evidence"],
    ];
    let look = |args: &[&str]| amk_in(&std::env::temp_dir(), &[args, &["--pid", &pid]].concat());
    let looks: Vec<Value> = looks.iter().map(|args| look(args).json()).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    [vec![server, bench.json()], looks].concat()
}

#[test]
fn documents_keep_their_fields() {
    let new = documents();
    for schema in known().keys() {
        let there = new.contains_key(schema) || ON_A_CARD.contains(&schema.as_str());
        assert!(there, "nothing answers with {schema} any more");
    }
    settle(new);
}

/// The schema ids in the sources of a folder: every string of that form, tests left out.
fn ids_in(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.ends_with("_tests") && name != "tests" {
            ids_in(&path, into);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            into.extend(code.split('"').filter(|text| is_id(text)).map(str::to_owned));
        }
    }
}

/// `amk.NAME.vN`.
fn is_id(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let word =
        |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    let version = |text: &str| text.strip_prefix('v').is_some_and(|n| n.parse::<u32>().is_ok());
    matches!(parts[..], ["amk", name, number] if word(name) && version(number))
}

#[test]
fn every_schema_id_of_the_sources_is_on_record() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut ids = BTreeSet::new();
    for folder in [
        "src",
        "search/src",
        "corpus/src",
        "remote/src",
        "ir/src",
        "model/src",
        "sessions/src",
        "telemetry/src",
    ] {
        ids_in(&root.join(folder), &mut ids);
    }
    assert!(ids.len() > 35 && ids.contains("amk.verdict.v2"), "{ids:?}");
    let known = known();
    let listed = |id: &&String| !known.contains_key(*id) && !NOT_WRITTEN.contains(&id.as_str());
    let missing: Vec<&String> = ids.iter().filter(listed).collect();
    assert!(
        missing.is_empty(),
        "not in tests/schemas.json: {missing:?}; add a call to `documents`"
    );
    let gone: Vec<&String> = known.keys().filter(|id| !ids.contains(*id)).collect();
    assert!(gone.is_empty(), "in tests/schemas.json, and nowhere in the sources: {gone:?}");
    assert!(is_id("amk.a_b.v12") && !is_id("amk.a.b.v1") && !is_id("amk.x.v") && !is_id("x.a.v1"));
}

#[test]
fn a_field_that_is_gone_or_changed_is_found() {
    let of = |text: &str| -> BTreeMap<String, Fields> {
        let document: Value = serde_json::from_str(text).unwrap();
        let mut fields = Fields::new();
        fields_of(&document, "", &mut fields);
        BTreeMap::from([("amk.x.v1".to_owned(), fields)])
    };
    let old = of(r#"{"a": 1, "b": {"c": "x"}, "d": [{"e": true}]}"#);
    assert!(broken(&old, &of(r#"{"a": 2, "b": {"c": "y", "z": 1}, "d": [], "n": 1}"#)).is_empty());
    assert!(broken(&old, &of(r#"{"a": 2, "b": null, "d": [{"e": false}]}"#)).is_empty());
    for (new, what) in [
        (r#"{"b": {"c": "x"}, "d": []}"#, "a is gone"),
        (r#"{"a": 1, "b": {}, "d": []}"#, "b.c is gone"),
        (r#"{"a": "1", "b": {"c": "x"}, "d": []}"#, "a is string and was number"),
        (r#"{"a": 1, "b": {"c": "x"}, "d": [{}]}"#, "d[].e is gone"),
    ] {
        let found = broken(&old, &of(new));
        assert!(found.len() == 1 && found[0].contains(what), "{new}: {found:?}");
    }
    assert_eq!(broken(&old, &BTreeMap::new()).len(), 1);
}
