//! `amk runs` and `amk corpus` with the built binary, without a GPU: sealed runs, comparison, replay, trajectories,
//! garbage collection, and the store.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

#[path = "runs_tests/cards.rs"]
mod cards;
#[path = "runs_tests/hostile.rs"]
mod hostile;
#[path = "runs_tests/sft.rs"]
mod sft;

/// A way to change a ledger: its header and its rows.
type Forge = fn(&mut Value, &mut Vec<Value>);

/// Exit code, document and standard error.
fn amk(folder: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    let output = command.args(args).current_dir(folder).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), document, said)
}

#[track_caller]
fn succeeds(folder: &Path, args: &[&str], schema: &str) -> Value {
    let (code, document, said) = amk(folder, args);
    assert_eq!((code, &document["schema"]), (0, &Value::from(schema)), "{args:?}: {said}");
    document
}

/// Runs a search of `trials` trials on the toy.
#[track_caller]
fn search(folder: &Path, out: &str, more: &[&str]) -> Value {
    let args = ["loop", "--schedule", "neutral", "--model", "toy", "--device", "cpu", "--out", out];
    let budget = if more.contains(&"--budget") { &[][..] } else { &["--budget", "6"] };
    let (code, document, said) =
        amk(folder, &[&args[..], &["--kv-capacity", "16"], budget, more].concat());
    assert_eq!(code, 0, "{said}");
    document
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Rewrites a run's ledger with right hashes and a right tip record, and without its manifest.
fn forge(run: &Path, edit: impl FnOnce(&mut Value, &mut Vec<Value>)) {
    let path = run.join("ledger.jsonl");
    let contents = corpus::read(&path).unwrap();
    let (mut header, mut records) = (contents.header, contents.records);
    edit(&mut header, &mut records);
    for name in ["ledger.jsonl", "manifest.json"] {
        std::fs::remove_file(run.join(name)).unwrap();
    }
    let mut ledger = corpus::Ledger::create(&path, &header).unwrap();
    for record in records {
        ledger.append(&record).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_flipped_byte_in_any_file_of_a_run_is_found() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    search(folder.path(), "runs/b", &["--seed", "1"]);
    let run = folder.path().join("runs/b");
    let mut names: Vec<String> = std::fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["best.json", "ledger.head", "ledger.jsonl", "manifest.json", "results.tsv"]);
    let clean = succeeds(folder.path(), &["runs", "verify"], "amk.runs.v1");
    assert_eq!([&clean["runs"][0]["state"], &clean["runs"][1]["state"]], ["sealed", "sealed"]);
    for name in &names {
        let whole = std::fs::read(run.join(name)).unwrap();
        for at in [0, whole.len() / 3, whole.len() / 2, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(run.join(name), bytes).unwrap();
            let (code, document, said) = amk(folder.path(), &["runs", "verify", "runs/b"]);
            let reason = document["runs"][0]["reason"].as_str().unwrap_or_default();
            assert!([2, 4].contains(&code) && !reason.is_empty(), "{name} byte {at}: {said}");
            assert!(said.contains(name), "{name} byte {at}: {said}");
        }
        std::fs::write(run.join(name), whole).unwrap();
    }
    // The previous run is part of the chain, but its absence does not invalidate this run.
    std::fs::remove_dir_all(folder.path().join("runs/a")).unwrap();
    assert_eq!(amk(folder.path(), &["runs", "verify"]).0, 0, "a run that is gone is not its fault");
    let shown = succeeds(folder.path(), &["runs", "show", "runs/b"], "amk.run.v1");
    assert_eq!(shown["manifest"]["number"], 1);
    assert_eq!(shown["champion"]["verdict"]["correct"], true);
    let counts = shown["outcomes"].as_object().unwrap().values();
    assert_eq!(counts.map(|n| n.as_u64().unwrap()).sum::<u64>(), 6);
}

#[test]
fn a_sealed_run_goes_on_and_is_sealed_again() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    search(folder.path(), "runs/b", &["--seed", "1"]);
    let manifest = folder.path().join("runs/a/manifest.json");
    let before = std::fs::read(&manifest).unwrap();
    succeeds(folder.path(), &["loop", "--resume", "--out", "runs/a"], "amk.loop.v1");
    assert_eq!(std::fs::read(&manifest).unwrap(), before, "nothing was added, nothing is new");
    let more = ["loop", "--resume", "--out", "runs/a", "--budget", "9"];
    succeeds(folder.path(), &more, "amk.loop.v1");
    let shown = succeeds(folder.path(), &["runs", "show", "runs/a"], "amk.run.v1");
    let manifest = &shown["manifest"];
    assert_eq!(
        (&manifest["number"], manifest["supersedes"].as_array().unwrap().len()),
        (&0.into(), 1)
    );
    succeeds(folder.path(), &["runs", "verify"], "amk.runs.v1");
}

#[test]
fn compare_gives_a_verdict_or_every_reason_against_one() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    search(folder.path(), "runs/b", &["--seed", "1", "--budget", "3"]);
    let args = ["runs", "compare", "runs/a", "runs/b"];
    let document = succeeds(folder.path(), &args, "amk.compare.v1");
    assert_eq!(
        (&document["comparable"], &document["reasons"]),
        (&true.into(), &Value::Array(vec![]))
    );
    let us = |side: &str| document[side]["latency_us"].as_f64().unwrap();
    let better = if us("a") < us("b") {
        "a"
    } else if us("b") < us("a") {
        "b"
    } else {
        "equal"
    };
    let same = document["a"]["schedule_id"] == document["b"]["schedule_id"];
    assert_eq!(document["better"], if same { "equal" } else { better });
    assert_eq!(document["changed"].as_object().unwrap().is_empty(), same);
    let edits: [(&str, Forge); 6] = [
        ("protocol", |header, _| header["protocol"] = 2.into()),
        ("graph", |header, _| header["graph_id"] = "0".into()),
        ("card", |header, _| header["device"] = "another".into()),
        ("commit", |header, _| header["commit"] = "abc".into()),
        ("kernel build", |_, rows| rows[0]["verdict"]["kernel_id"] = "0".into()),
        ("lowering", |_, rows| rows[0]["verdict"]["program_id"] = "0".into()),
    ];
    for (what, edit) in edits {
        let other = folder.path().join("runs/c");
        copy(&folder.path().join("runs/b"), &other);
        forge(&other, edit);
        let (code, document, said) = amk(folder.path(), &["runs", "compare", "runs/a", "runs/c"]);
        let reasons = document["reasons"].as_array().unwrap();
        assert_eq!((code, &document["comparable"], reasons.len()), (1, &false.into(), 1), "{said}");
        assert_eq!((&reasons[0]["what"], &document["better"]), (&what.into(), &Value::Null));
        std::fs::remove_dir_all(other).unwrap();
    }
    // All reasons at once.
    let others =
        ["loop", "--model", "toy", "--device", "cpu", "--target", "h100", "--kv-capacity", "32"];
    let (code, _, said) =
        amk(folder.path(), &[&others[..], &["--budget", "2", "--out", "runs/d"]].concat());
    assert_eq!(code, 0, "{said}");
    let (code, document, _) = amk(folder.path(), &["runs", "compare", "runs/a", "runs/d"]);
    let what: Vec<&str> =
        document["reasons"].as_array().unwrap().iter().filter_map(|r| r["what"].as_str()).collect();
    assert!(
        code == 1 && what.contains(&"target") && what.contains(&"key/value capacity"),
        "{what:?}"
    );
    let (code, _, said) = amk(folder.path(), &["runs", "compare", "runs/a", "runs"]);
    assert!(code == 2 && said.contains("name one of them"), "{said}");
}

#[test]
fn replay_does_a_trial_again_and_says_what_it_did_not() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    for trial in [&[][..], &["--trial", "3"]] {
        let args = [&["runs", "replay", "runs/a", "--device", "cpu"][..], trial].concat();
        let document = succeeds(folder.path(), &args, "amk.replay.v1");
        let stages: Vec<(&str, &str)> = (document["stages"].as_array().unwrap().iter())
            .map(|stage| (stage["stage"].as_str().unwrap(), stage["result"].as_str().unwrap()))
            .collect();
        let names = ["files", "graph", "schedule", "program", "kernel", "reference", "predict"];
        assert_eq!(stages, names.map(|name| (name, "same")));
    }
    let (code, _, said) = amk(folder.path(), &["runs", "replay", "runs/a", "--trial", "99"]);
    assert!(code == 2 && said.contains("no such trial: 0 to 5"), "{said}");
    forge(&folder.path().join("runs/a"), |_, rows| {
        rows.iter_mut().for_each(|row| row["verdict"]["program_id"] = "0".into());
    });
    let (code, document, said) = amk(folder.path(), &["runs", "replay", "runs/a"]);
    assert_eq!((code, &document["same"]), (1, &false.into()), "{said}");
    assert!(said.contains("program   DIFFERS recorded 0"), "{said}");
    forge_graph(&folder.path().join("runs/a"));
    let (code, document, said) = amk(folder.path(), &["runs", "replay", "runs/a"]);
    assert_eq!((code, document["stages"].as_array().unwrap().len()), (1, 2), "{said}");
}

fn forge_graph(run: &Path) {
    std::fs::write(run.join("manifest.json"), "").unwrap();
    forge(run, |header, _| header["graph_id"] = "0".into());
}

#[test]
fn trajectories_are_split_by_whole_runs_and_keep_failures() {
    let folder = folder();
    for seed in 0..6 {
        let (out, seed) = (format!("runs/{seed}"), seed.to_string());
        search(folder.path(), &out, &["--seed", &seed]);
    }
    // The same search again: its steps are those of the first, so it must be on the same side.
    search(folder.path(), "runs/again", &["--seed", "0"]);
    let export = ["runs", "export", "--validation", "50", "--out", "t"];
    let document = succeeds(folder.path(), &export, "amk.trajectories.v1");
    let runs = document["runs"].as_array().unwrap();
    let split = |name: &str| {
        let named = runs.iter().find(|run| run["ledger"] == format!("runs/{name}/ledger.jsonl"));
        named.unwrap()["split"].clone()
    };
    assert_eq!(split("0"), split("again"));
    let mut sides = [0, 0];
    for (side, name) in ["train", "validation"].iter().enumerate() {
        let text = std::fs::read_to_string(folder.path().join(format!("t/{name}.jsonl"))).unwrap();
        for line in text.lines() {
            let step: Value = serde_json::from_str(line).unwrap();
            let placed = runs.iter().find(|run| run["run"] == step["run"]).unwrap();
            assert_eq!(placed["split"], **name, "a run is on one side");
            assert_eq!(step["parent"].is_null(), step["trial"] == 0);
            sides[side] += 1;
        }
    }
    assert!(sides[0] > 0 && sides[1] > 0, "{sides:?}");
    let mut steps = 0;
    for run in runs {
        let contents = corpus::read(&folder.path().join(run["ledger"].as_str().unwrap())).unwrap();
        let trials = contents.records.iter().filter(|row| row["kind"] == "trial");
        steps +=
            trials.map(|t| 1 + t["skipped"]["examples"].as_array().unwrap().len()).sum::<usize>();
    }
    assert_eq!(sides[0] + sides[1], steps, "every trial and every proposal on record is there");
    let (code, _, said) = amk(folder.path(), &export);
    assert!(code == 2 && said.contains("t is there already"), "{said}");
    let text = |name: &str| std::fs::read(folder.path().join(name).join("train.jsonl")).unwrap();
    succeeds(
        folder.path(),
        &["runs", "export", "--validation", "50", "--out", "u"],
        "amk.trajectories.v1",
    );
    assert_eq!(text("t"), text("u"));
}

#[test]
fn gc_says_what_it_would_do_and_does_it_only_when_asked() {
    let folder = folder();
    for (name, budget) in [("a", "6"), ("b", "3"), ("c", "2")] {
        search(folder.path(), &format!("runs/{name}"), &["--budget", budget]);
    }
    let empty = folder.path().join("runs/d");
    let header = corpus::read(&folder.path().join("runs/a/ledger.jsonl")).unwrap().header;
    drop(corpus::Ledger::create(&empty.join("ledger.jsonl"), &header).unwrap());
    let actions = |document: &Value| -> Vec<String> {
        let runs = document["runs"].as_array().unwrap().iter();
        runs.map(|run| run["action"].as_str().unwrap().to_owned()).collect()
    };
    let document = succeeds(folder.path(), &["runs", "gc"], "amk.gc.v1");
    assert_eq!(actions(&document), ["keep", "keep", "keep", "remove"]);
    assert_eq!(document["applied"], false);
    assert!(empty.exists());
    let store = folder.path().join("runs/store.sqlite");
    std::fs::rename(&store, folder.path().join("elsewhere")).unwrap();
    let document = succeeds(folder.path(), &["runs", "gc", "--keep", "1"], "amk.gc.v1");
    assert_eq!(
        actions(&document),
        ["keep", "keep", "keep", "remove"],
        "what is nowhere else stays"
    );
    std::fs::rename(folder.path().join("elsewhere"), &store).unwrap();
    let document = succeeds(folder.path(), &["runs", "gc", "--keep", "1", "--apply"], "amk.gc.v1");
    assert_eq!(actions(&document), ["keep", "collect", "keep", "remove"]);
    assert!(!empty.exists());
    let left: Vec<_> = std::fs::read_dir(folder.path().join("runs/b")).unwrap().collect();
    assert_eq!(left.len(), 1, "its manifest");
    let document = succeeds(folder.path(), &["runs", "verify"], "amk.runs.v1");
    assert_eq!(document["runs"].as_array().unwrap().len(), 2, "the chain holds without it");
    let shown = succeeds(folder.path(), &["corpus", "show"], "amk.corpus.v1");
    assert_eq!(shown["rows"]["trials"], 11, "the store has its trials");
}

#[test]
fn the_store_is_filled_shown_and_imported() {
    let folder = folder();
    let document = search(folder.path(), "runs/a", &[]);
    assert_eq!(document["store"], "runs/store.sqlite");
    search(folder.path(), "runs/b", &["--seed", "1", "--store", "none"]);
    let shown = succeeds(folder.path(), &["corpus", "show"], "amk.corpus.v1");
    assert_eq!((&shown["rows"]["runs"], &shown["rows"]["trials"]), (&1.into(), &6.into()));
    assert!(shown["rows"]["programs"].as_u64().unwrap() >= 1, "programs that led");
    assert_eq!(shown["best"][0]["best_us"], document["best_verdict"]["latency_us"]);
    succeeds(folder.path(), &["corpus", "import", "runs"], "amk.corpus_import.v1");
    succeeds(folder.path(), &["corpus", "check"], "amk.corpus_check.v1");
    let import = ["corpus", "import", "runs/store.sqlite", "--store", "two.sqlite"];
    let document = succeeds(folder.path(), &import, "amk.corpus_import.v1");
    assert_eq!(document["runs"].as_array().unwrap().len(), 2);
    assert_eq!(document["programs"], shown["rows"]["programs"]);
    succeeds(folder.path(), &["corpus", "check", "--store", "two.sqlite"], "amk.corpus_check.v1");
    let of = |name: &str| corpus::Store::existing(&folder.path().join(name)).unwrap();
    let (one, two) = (of("runs/store.sqlite"), of("two.sqlite"));
    assert_eq!(one.counts().unwrap(), two.counts().unwrap());
    for run in one.runs().unwrap() {
        assert_eq!(one.links(&run).unwrap(), two.links(&run).unwrap());
    }
    drop((one, two));
    let export = ["corpus", "export", "--store", "two.sqlite", "--out", "back"];
    let document = succeeds(folder.path(), &export, "amk.corpus_export.v1");
    assert_eq!(document["runs"].as_array().unwrap().len(), 2);
    succeeds(folder.path(), &["runs", "verify", "back"], "amk.runs.v1");
    let (code, _, said) = amk(folder.path(), &export);
    assert!(code == 2 && said.contains("back is there already"), "{said}");
    // A row that was edited in the file, and a ledger with new hashes over a figure that does not follow.
    let edit = "import sqlite3; db = sqlite3.connect('two.sqlite'); n = db.execute('UPDATE records SET \
        record = replace(record, ?, ?) WHERE seq = 0', ('toy', 'try')).rowcount; db.commit(); assert n";
    let python = Command::new("python3").args(["-c", edit]).current_dir(folder.path()).status();
    assert!(python.unwrap().success());
    let export = ["corpus", "export", "--store", "two.sqlite", "--out", "edited"];
    let (code, document, said) = amk(folder.path(), &export);
    assert_eq!((code, &document["schema"]), (4, &"amk.error.v1".into()), "{said}");
    assert!(!folder.path().join("edited").exists(), "nothing was written");
    let import = ["corpus", "import", "two.sqlite", "--store", "three.sqlite"];
    let (code, document, said) = amk(folder.path(), &import);
    assert_eq!((code, &document["schema"]), (4, &"amk.error.v1".into()), "{said}");
    assert!(!folder.path().join("three.sqlite").exists(), "nothing was begun");
    forge(&folder.path().join("runs/b"), |_, rows| rows[2]["verdict"]["latency_us"] = 0.001.into());
    let (code, _, said) =
        amk(folder.path(), &["corpus", "import", "runs", "--store", "three.sqlite"]);
    assert!(code == 4 && said.contains("runs/b/ledger.jsonl line 4"), "{said}");
    let (code, _, said) = amk(folder.path(), &["corpus", "show", "--store", "none.sqlite"]);
    assert!(code == 2 && said.contains("corpus import"), "{said}");
}

/// A promise of the documentation: other programs can read the file directly.
#[test]
fn python_reads_the_store_while_a_search_writes_it() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    let store = corpus::Store::existing(&folder.path().join("runs/store.sqlite")).unwrap();
    let script = "import sqlite3; db = sqlite3.connect('file:runs/store.sqlite?mode=ro', uri=True); \
        print(db.execute('SELECT count(*), min(latency_us) > 0 FROM trials JOIN runs USING (run)').fetchone())";
    let python = Command::new("python3").args(["-c", script]).current_dir(folder.path()).output();
    drop(store);
    match python {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "(6, 1)", "{said}");
        }
        Err(error) => println!("skipped: no python3 here: {error}"),
    }
}

/// The schedules of a run's trials and their origins.
fn proposals(run: &Path) -> Vec<(Value, Value)> {
    let contents = corpus::read(&run.join("ledger.jsonl")).unwrap();
    let trials = contents.records.iter().filter(|record| record["outcome"].is_string());
    trials.map(|trial| (trial["origin"].clone(), trial["config"].clone())).collect()
}

#[test]
fn a_resumed_search_proposes_what_would_have_come_whatever_the_strategy() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    search(folder.path(), "teach/a", &["--budget", "24", "--store", "store.sqlite"]);
    for strategy in ["random", "hill-climb", "residual"] {
        let [whole, parts] = ["whole", "parts"].map(|kind| format!("{kind}/{strategy}"));
        let terms = ["--strategy", strategy, "--seed", "3", "--store", "store.sqlite"];
        // The trials from the store are fixed when a search begins.
        std::fs::copy(at("store.sqlite"), at("before.sqlite")).unwrap();
        search(folder.path(), &whole, &[&terms[..], &["--budget", "14"]].concat());
        std::fs::copy(at("before.sqlite"), at("store.sqlite")).unwrap();
        search(folder.path(), &parts, &[&terms[..], &["--budget", "14"]].concat());
        let shorter = corpus::read(&at(&parts).join("ledger.jsonl")).unwrap();
        forge(&at(&parts), |_, records| records.truncate(10));
        assert!(shorter.records.len() > 10);
        let resume = ["loop", "--resume", "--out", &parts, "--store", "other.sqlite"];
        succeeds(folder.path(), &resume, "amk.loop.v1");
        assert_eq!(proposals(&at(&whole)), proposals(&at(&parts)), "{strategy}");
        let _ = std::fs::remove_file(at("other.sqlite"));
    }
    let origins = proposals(&at("whole/residual")).into_iter().map(|(origin, _)| origin);
    assert!(origins.filter(|origin| origin == "model").count() > 1);
    let other = ["loop", "--resume", "--out", "whole/random", "--strategy", "hill-climb"];
    let (code, _, said) = amk(folder.path(), &other);
    assert!(code == 2 && said.contains("--strategy hill-climb contradicts"), "{said}");
}

#[test]
fn a_search_at_contexts_says_so_and_keeps_to_them() {
    let folder = folder();
    let toy = ["loop", "--schedule", "neutral", "--model", "toy", "--device", "cpu"];
    let at = |out: &str, more: &[&str]| {
        // The start alone, so that the contexts are all that differs.
        let terms = ["--budget", "1", "--store", "store.sqlite", "--out", out];
        let found = succeeds(folder.path(), &[&toy[..], &terms, more].concat(), "amk.loop.v1");
        found["best_verdict"]["latency_us"].as_f64().unwrap()
    };
    at("plain", &[]);
    let (short, long) = (at("short", &["--context", "64"]), at("long", &["--context", "1024"]));
    let both = at("both", &["--context", "1024,64,1024"]);
    assert!(short < both && both < long, "{short} {both} {long}");
    let header =
        |run: &str| corpus::read(&folder.path().join(run).join("ledger.jsonl")).unwrap().header;
    assert_eq!(header("both")["contexts"], serde_json::json!([64, 1024]));
    assert_eq!(header("plain").get("contexts"), None);
    succeeds(folder.path(), &["runs", "replay", "both"], "amk.replay.v1");
    succeeds(folder.path(), &["corpus", "check", "--store", "store.sqlite"], "amk.corpus_check.v1");
    let (code, document, _) = amk(folder.path(), &["runs", "compare", "short", "both"]);
    assert_eq!((code, &document["reasons"][0]["what"]), (1, &"contexts".into()));
    let (code, _, said) =
        amk(folder.path(), &["loop", "--resume", "--out", "both", "--context", "64"]);
    let contradicts = said.contains("--context 64 contradicts") && said.contains("64,1024");
    assert!(code == 2 && contradicts, "{said}");
    let beyond = ["--kv-capacity", "16", "--context", "9", "--out", "none"];
    let (code, _, said) = amk(folder.path(), &[&toy[..], &beyond].concat());
    assert!(code == 2 && said.contains("--context 9 is out of range"), "{said}");
    assert!(!folder.path().join("none/ledger.jsonl").exists());
}

#[test]
fn a_search_of_a_removed_strategy_is_read_but_not_resumed() {
    let folder = folder();
    search(folder.path(), "old", &["--budget", "3"]);
    forge(&folder.path().join("old"), |header, _| header["strategy"] = "restarts".into());
    succeeds(folder.path(), &["runs", "verify", "old"], "amk.runs.v1");
    succeeds(folder.path(), &["runs", "show", "old"], "amk.run.v1");
    let (code, _, said) = amk(folder.path(), &["loop", "--resume", "--out", "old"]);
    assert_eq!(code, 2, "{said}");
    for part in ["unknown variant `restarts`", "`hill-climb`", "not resume", "another --out"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// Runs a search with a proposer command; also returns standard error.
fn proposed(folder: &Path, out: &str, budget: &str, command: &str) -> (Value, String) {
    let args = ["loop", "--model", "toy", "--device", "cpu", "--kv-capacity", "16", "--budget"];
    let more = [budget, "--out", out, "--proposer", command];
    let (code, document, said) = amk(folder, &[&args[..], &more].concat());
    assert_eq!(code, 0, "{said}");
    (document, said)
}

#[test]
fn a_command_outside_proposes_and_its_faults_end_the_search_cleanly() {
    let folder = folder();
    // Three stages of 16 KB are illegal with 64 KB in flight: refused, counted, and asked for again.
    let script = r#"n=2; while read -r line; do echo "$line" >> heard.jsonl; case "$line" in *'"ask"'*)
        n=$((n+1)); echo "{\"config\": {\"pipeline\": {\"stages\": $n, \"stage_bytes\": 16384}}}";; esac; done"#;
    let (document, _) = proposed(folder.path(), "runs/a", "4", script);
    assert_eq!((&document["n_trials"], &document["n_rejected"]), (&4.into(), &1.into()));
    let stages = |name: &str| -> Vec<Value> {
        let proposals = proposals(&folder.path().join(name)).into_iter().skip(1);
        proposals.map(|(_, config)| config["pipeline"]["stages"].clone()).collect()
    };
    assert_eq!(stages("runs/a"), [4, 5, 6]);
    let heard = std::fs::read_to_string(folder.path().join("heard.jsonl")).unwrap();
    let heard: Vec<Value> = heard.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(heard[0]["search"]["schema"], "amk.ask.v1");
    assert_eq!(heard[2]["ask"]["refused"][0]["rule"], "S-IN-FLIGHT");
    assert_eq!(heard[3]["tell"]["config"]["pipeline"]["stages"], 4);
    assert!(heard[3]["tell"]["gain"].is_number());
    for (name, command, why) in [
        ("runs/b", "exit 0", "it has ended"),
        ("runs/c", "echo hello; sleep 60", "no JSON object"),
        ("runs/d", r#"echo '{"configs": []}'; sleep 60"#, "neither"),
        ("runs/e", r#"echo '{"stop": true}'; sleep 60"#, "nothing more to propose"),
        ("runs/f", r#"yes '{"config": {"pipeline": {"stage": 1}}}'"#, "could not be read"),
    ] {
        let (document, said) = proposed(folder.path(), name, "5", command);
        assert!(said.contains(why), "{command}: {said}");
        assert_eq!(
            (&document["n_trials"], &document["stopped_by"]),
            (&1.into(), &"exhausted".into())
        );
    }
}

#[test]
fn a_predicted_measured_grid_is_complete_says_so_and_goes_on_after_a_kill() {
    let folder = folder();
    let grid = r#"{"schema": "amk.grid.v1", "base": {"sync.qkv": "flag_in_data"},
        "axes": {"pipeline.stages": [2, 8], "tiling.lm_head.rows": [8, 16], "kernel.poll_sleep_ns": [0, 20]}}"#;
    std::fs::write(folder.path().join("grid.json"), grid).unwrap();
    let args = ["grid", "record", "--model", "toy", "--device", "cpu", "--grid", "grid.json"];
    let record =
        |more: &[&str]| amk(folder.path(), &[&args[..], &["--context", "8"], more].concat());
    let (code, document, said) = record(&["--out", "land.jsonl"]);
    assert_eq!(code, 0, "{said}");
    assert_eq!(document["latency_kind"], "predicted");
    assert_eq!(document["answers"], serde_json::json!({"illegal S-IN-FLIGHT": 4, "predicted": 4}));
    let (code, document, said) = record(&["--out", "few.jsonl", "--points", "3"]);
    assert_eq!(code, 0, "{said}");
    assert_eq!(document["answers"], serde_json::json!({"illegal S-IN-FLIGHT": 4, "predicted": 3}));
    let path = folder.path().join("land.jsonl");
    let whole = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 40]).unwrap(); // in the middle of a line
    let (code, document, said) = record(&["--out", "land.jsonl", "--resume"]);
    assert_eq!((code, &document["new"]), (0, &1.into()), "{said}");
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&std::fs::read_to_string(&path).unwrap()), sorted(&whole));
    let (code, _, said) = record(&["--out", "land.jsonl", "--resume", "--seed", "1"]);
    assert!(code == 2 && said.contains("other terms"), "{said}");
    let (code, _, said) = record(&["--out", "land.jsonl"]);
    assert!(code == 2 && said.contains("--resume"), "{said}");
}
