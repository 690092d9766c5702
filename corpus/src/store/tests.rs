use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::json;

use super::*;
use crate::ledger::{Ledger, read};

/// A header of a search on a card.
fn header(run: &str) -> Value {
    json!({
        "run": run, "model": "toy", "graph": "toy", "graph_id": "g0", "target": "h200",
        "latency_kind": "measured-gpu", "device": "NVIDIA H200", "seed": 3, "budget": "64",
        "min_gain": 0.01, "kv_capacity": 64, "protocol": 1, "cache_bytes": 50_000_000,
        "shape": {"hidden": 64, "layers": 2, "dtype": "f32"},
        "conditions": {
            "card": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "nvrtc": "13.0", "amk": "0.1.0",
            "notes": ["uuid 00ff", "clocks at most 1980 MHz, memory 3201 MHz", "132 multiprocessors"],
        },
    })
}

fn trial(number: u64) -> Value {
    let gain = number as f64 / 1000.0;
    let kept = number % 5 == 1;
    json!({
        "kind": "trial", "trial": number, "origin": "step", "incumbent": number.checked_sub(1),
        "outcome": if kept { "kept" } else { "reverted" }, "why": "a,\"hash\":\"b", "threshold": 0.01,
        "noise_floor": null, "gain": {"low": gain, "high": gain + 0.5},
        "changed": {"pipeline.stages": [8, number % 7 + 2], "sync.qkv": ["counter", "flag_in_data"]},
        "config": {"pipeline": {"stages": number % 7 + 2}},
        "samples_us": [[10.0, 9.5, 9.6, 10.1], [10.2, 9.4, 9.5, 10.0]],
        "verdict": {
            "valid": true, "correct": true, "latency_us": 9.5 + gain, "latency_kind": "measured-gpu",
            "ci_us": [9.4, 9.6], "schedule_id": format!("s{number}"), "program_id": format!("p{}", number / 2),
            "kernel_id": "k", "tasks": 160,
        },
        "skipped": {"rejected": 1, "repeated": 2}, "spent": {"total_s": 0.5}, "ended_s": 0.5,
    })
}

/// The rows of a ledger with this many trials.
fn ledger(folder: &Path, run: &str, trials: u64) -> Vec<Link> {
    let path = folder.join(run).join("ledger.jsonl");
    let mut ledger = Ledger::create(&path, &header(run)).unwrap();
    let written: Vec<Link> = (0..trials).map(|n| ledger.append(&trial(n)).unwrap()).collect();
    let links: Vec<Link> = read(&path).unwrap().links().collect();
    assert_eq!(links[1..], written, "what is read is what was appended");
    links
}

fn store(folder: &Path) -> Store {
    Store::open(&folder.join("store.sqlite")).unwrap()
}

fn one(store: &Store, sql: &str) -> Value {
    Value::Object(store.query(sql, &[]).unwrap().remove(0))
}

#[test]
fn rows_are_added_once_and_the_tables_follow_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let links = ledger(folder.path(), "r1", 11);
    let mut store = store(folder.path());
    assert_eq!(store.add("r1", links[..5].to_vec()).unwrap(), Added { new: 5, held: 0 });
    assert_eq!(store.add("r1", links.clone()).unwrap(), Added { new: 7, held: 5 });
    assert_eq!(store.add("r1", links.clone()).unwrap(), Added { new: 0, held: 12 });
    assert_eq!(store.links("r1").unwrap(), links);
    let counts = store.counts().unwrap();
    let count = |name: &str| counts.iter().find(|(table, _)| *table == name).unwrap().1;
    assert_eq!([count("records"), count("trials"), count("samples")], [12, 11, 22]);
    assert_eq!([count("runs"), count("machines"), count("changes")], [1, 1, 22]);
    let row = one(
        &store,
        "SELECT * FROM trials JOIN runs USING (run) JOIN machines USING (machine) WHERE trial = 6",
    );
    for (column, value) in [
        ("outcome", json!("kept")),
        ("latency_us", json!(9.506)),
        ("ci_low_us", json!(9.4)),
        ("correct", json!(1)),
        ("noise_floor", Value::Null),
        ("seed", json!(3)),
        ("layers", json!(2)),
        ("uuid", json!("00ff")),
        ("clocks", json!("at most 1980 MHz, memory 3201 MHz")),
        ("driver", json!("580.1")),
        ("changed", json!(r#"{"pipeline.stages":[8,8],"sync.qkv":["counter","flag_in_data"]}"#)),
    ] {
        assert_eq!(row[column], value, "{column}");
    }
    // Moves to 3 stages: trials 1 (kept) and 8.
    let prior = one(&store, r#"SELECT * FROM priors WHERE move LIKE '{"pipeline.stages":3,%'"#);
    assert_eq!(
        (&prior["tries"], &prior["kept"], &prior["graph"]),
        (&json!(2), &json!(1), &json!("g0"))
    );
    let gains = 0.001 + 0.008 + 0.5;
    assert!((prior["gain_sum"].as_f64().unwrap() - gains).abs() < 1e-9, "{prior}");
    assert!((prior["gain_best"].as_f64().unwrap() - 0.258).abs() < 1e-9, "{prior}");
    assert_eq!(store.check().unwrap(), Ok(()));
}

#[test]
fn a_trial_belongs_to_the_machine_of_its_card() {
    let folder = tempfile::tempdir().unwrap();
    let mut header = header("r1");
    let first = header["conditions"].clone();
    let mut second = first.clone();
    second["notes"][0] = json!("uuid 11ee");
    header["cards"] = json!([first, second]);
    let path = folder.path().join("r1/ledger.jsonl");
    let mut ledger = Ledger::create(&path, &header).unwrap();
    for number in 0..4 {
        let mut trial = trial(number);
        trial["card"] = json!(number % 2);
        ledger.append(&trial).unwrap();
    }
    let mut store = store(folder.path());
    let links: Vec<Link> = read(&path).unwrap().links().collect();
    store.add("r1", links).unwrap();
    let sql = "SELECT trial, uuid, card FROM trials JOIN machines ON machine = measured_on";
    let rows = store.query(&format!("{sql} ORDER BY trial"), &[]).unwrap();
    let uuids: Vec<&str> = rows.iter().filter_map(|row| row["uuid"].as_str()).collect();
    assert_eq!(uuids, ["00ff", "11ee", "00ff", "11ee"]);
    assert_eq!(rows[1]["card"], json!("NVIDIA H200"));
    let run = one(&store, "SELECT uuid FROM runs JOIN machines USING (machine)");
    assert_eq!(run["uuid"], json!("00ff"), "a search is at home on its first card");
    assert_eq!(store.check().unwrap(), Ok(()));
}

#[test]
fn what_does_not_follow_is_refused_and_nothing_of_it_added() {
    let folder = tempfile::tempdir().unwrap();
    let links = ledger(folder.path(), "r1", 4);
    let mut store = store(folder.path());
    let edited = |index: usize, edit: fn(&mut Link)| {
        let mut links = links.clone();
        edit(&mut links[index]);
        links
    };
    let wrong = [
        ("edited", edited(2, |link| link.record = link.record.replace("9.501", "1.501"))),
        ("row 2 belongs here", {
            let mut rows = links.clone();
            rows.remove(2);
            rows
        }),
        ("row 0 belongs here", links[1..].to_vec()),
        ("edited", edited(0, |link| link.hash = "00".repeat(32))),
    ];
    for (word, rows) in wrong {
        let error = store.add("r1", rows).unwrap_err();
        assert!(error.is_integrity() && error.to_string().contains(word), "{word}: {error}");
        assert_eq!(store.counts().unwrap()[0], ("records", 0), "{word}");
    }
    store.add("r1", links.clone()).unwrap();
    // The same search, continued elsewhere.
    let other = tempfile::tempdir().unwrap();
    let path = other.path().join("ledger.jsonl");
    let mut apart = Ledger::create(&path, &header("r1")).unwrap();
    apart.append(&trial(9)).unwrap();
    let error = store.add("r1", read(&path).unwrap().links()).unwrap_err();
    assert!(error.to_string().contains("another row 1 of run r1"), "{error}");
    assert_eq!(store.links("r1").unwrap(), links);
}

#[test]
fn check_finds_an_edited_table() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path());
    store.add("r1", ledger(folder.path(), "r1", 4)).unwrap();
    let edits = [
        ("trials", "UPDATE trials SET latency_us = 1.0 WHERE trial = 2"),
        ("samples", "DELETE FROM samples WHERE seq = 3 AND round = 1"),
        ("priors", "UPDATE priors SET kept = 5"),
        ("edited", "UPDATE records SET record = replace(record, '9.502', '1.502')"),
    ];
    for (word, edit) in edits {
        store.db.execute_batch(&format!("BEGIN; {edit}")).unwrap();
        let found = store.check().unwrap().unwrap_err();
        assert!(found.contains(word), "{word}: {found}");
        store.db.execute_batch("ROLLBACK").unwrap();
        assert_eq!(store.check().unwrap(), Ok(()));
    }
}

/// A file of the first version: records only.
fn first_version(path: &Path, links: &[Link]) {
    let db = Connection::open(path).unwrap();
    db.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).unwrap();
    for table in STEPS[0] {
        db.execute_batch(&table.sql()).unwrap();
    }
    for link in links {
        let row = params!["r1", link.seq.cast_signed(), link.prev, link.hash, link.record];
        db.execute("INSERT INTO records VALUES (?,?,?,?,?)", row).unwrap();
    }
    db.pragma_update(None, "application_id", APPLICATION_ID).unwrap();
    db.pragma_update(None, "user_version", 1).unwrap();
}

#[test]
fn an_older_store_is_brought_up_to_date_and_a_newer_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite");
    let links = ledger(folder.path(), "r1", 6);
    first_version(&path, &links);
    let mut store = Store::existing(&path).unwrap();
    assert_eq!(store.version().unwrap(), VERSION);
    assert_eq!(store.check().unwrap(), Ok(()));
    assert_eq!(one(&store, "SELECT count(*) AS n FROM trials"), json!({"n": 6}));
    assert!(store.add_program("p0", b"bytes").unwrap() && !store.add_program("p0", b"").unwrap());
    assert_eq!(store.program("p0").unwrap().as_deref(), Some(&b"bytes"[..]));
    store.db.pragma_update(None, "user_version", VERSION + 1).unwrap();
    drop(store);
    let error = Store::open(&path).unwrap_err().to_string();
    for word in ["store.sqlite", &format!("version {}", VERSION + 1), "newer amk", "corpus import"]
    {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn other_files_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "not a database, and long enough to have a header of one\n".repeat(8))
        .unwrap();
    let before = std::fs::read(&text).unwrap();
    let error = Store::open(&text).unwrap_err().to_string();
    assert!(error.contains("notes.txt") && error.contains("no SQLite file"), "{error}");
    assert_eq!(std::fs::read(&text).unwrap(), before);
    let other = folder.path().join("other.sqlite");
    Connection::open(&other)
        .unwrap()
        .execute_batch("CREATE TABLE t (x); INSERT INTO t VALUES (1)")
        .unwrap();
    let error = Store::open(&other).unwrap_err().to_string();
    assert!(error.contains("no store of amk"), "{error}");
    assert!(Store::existing(&folder.path().join("none")).is_err());
    assert!(!folder.path().join("none").exists());
    assert!(Store::open(folder.path()).unwrap_err().to_string().contains("--store"));
}

#[test]
fn several_read_while_one_writes_and_several_begin_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite");
    let runs: Vec<_> =
        (0..3).map(|n| (format!("r{n}"), ledger(folder.path(), &format!("r{n}"), 30))).collect();
    let done = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            while !done.load(Ordering::SeqCst) {
                let store = Store::open(&path).unwrap();
                // A row and its derived rows become visible together or not at all.
                let sql = "SELECT count(*) AS n FROM records WHERE seq > 0 AND NOT EXISTS (SELECT 1 FROM trials t WHERE t.run = records.run AND t.seq = records.seq)";
                assert_eq!(one(&store, sql), json!({"n": 0}));
                looks += 1;
            }
            looks
        });
        let writers: Vec<_> = runs
            .iter()
            .map(|(run, links)| {
                let path = &path;
                scope.spawn(move || {
                    let mut store = Store::open(path).unwrap();
                    for link in links {
                        store.add(run, [link.clone()]).unwrap();
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::SeqCst);
        reader.join().unwrap()
    });
    assert!(looks > 0);
    let store = Store::open(&path).unwrap();
    for (run, links) in &runs {
        assert_eq!(&store.links(run).unwrap(), links);
    }
    assert_eq!(store.check().unwrap(), Ok(()));
}

/// No query scans every trial to find those of a run. `AMK_STORE_TRIALS=100000` prints how long queries take with that
/// many.
#[test]
fn questions_find_trials_by_an_index() {
    let trials = std::env::var("AMK_STORE_TRIALS").map_or(20, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path());
    let each = (trials / 2).clamp(1, 1_000);
    for number in 0..trials / each {
        let run = format!("r{number}");
        let mut last: Option<Link> = None;
        let records =
            std::iter::once(header(&run)).chain((0..each).map(|n| trial(number * each + n)));
        let links: Vec<Link> = records
            .map(|record| {
                let link = Link::after(last.as_ref(), record.to_string());
                last = Some(link.clone());
                link
            })
            .collect();
        store.add(&run, links).unwrap();
    }
    for question in [BEST, PRIORS] {
        let began = Instant::now();
        assert!(!store.query(question, &[]).unwrap().is_empty());
        println!("{trials} trials: {:.1?} for {question}", began.elapsed());
        let plan = store.query(&format!("EXPLAIN QUERY PLAN {question}"), &[]).unwrap();
        let steps: Vec<&str> = plan.iter().filter_map(|step| step["detail"].as_str()).collect();
        assert!(steps.iter().any(|step| step.starts_with("SCAN ")), "{steps:?}");
        let scans = |step: &&str| step.starts_with("SCAN t") || step.starts_with("SCAN records");
        assert!(!steps.iter().any(scans), "{question}: {steps:?}");
    }
}

#[test]
fn what_no_store_has_is_refused_or_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sqlite");
    let mut store = Store::open(&path).unwrap();
    store.add("r1", ledger(folder.path(), "r1", 3)).unwrap();
    for (word, edit) in [
        ("more", "CREATE TABLE more (x)"),
        ("look", "CREATE VIEW look AS SELECT * FROM trials"),
        ("trials_0", "DROP INDEX trials_0"),
        ("fast", "CREATE INDEX fast ON trials (why)"),
        ("programs", "DROP TABLE programs; CREATE TABLE programs (program_id, saved, more)"),
    ] {
        store.db.execute_batch(&format!("BEGIN; {edit}")).unwrap();
        let found = store.check().unwrap().unwrap_err();
        assert!(found.contains(word), "{word}: {found}");
        store.db.execute_batch("ROLLBACK").unwrap();
    }
    assert_eq!(store.check().unwrap(), Ok(()));
    let trigger = "CREATE TRIGGER late AFTER INSERT ON records BEGIN DELETE FROM samples; END";
    store.db.execute_batch(trigger).unwrap();
    assert!(store.check().unwrap().unwrap_err().contains("late"));
    drop(store);
    let error = Store::open(&path).unwrap_err();
    assert!(error.is_integrity() && error.to_string().contains("late"), "{error}");
    let pipe = folder.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, mode, 0).unwrap();
    assert!(Store::open(&pipe).unwrap_err().to_string().contains("regular"));
}

#[test]
fn sums_over_runs_hold_in_whatever_order_the_runs_came() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path());
    for (run, gain) in [("r3", 0.3), ("r1", 0.1), ("r2", 0.2), ("r0", 0.7)] {
        let trial = json!({"kind": "trial", "trial": 1, "outcome": "kept", "changed": {"a": [1, 2]},
            "gain": {"low": gain, "high": gain}, "verdict": {"latency_us": 1.0}});
        let mut link = Link::after(None, json!({"model": "m"}).to_string());
        let mut links = vec![link.clone()];
        link = Link::after(Some(&link), trial.to_string());
        links.push(link.clone());
        // Refuted, confirmed after all, refuted again.
        for (trials, decision) in [(2, "reverted"), (3, "kept"), (4, "reverted"), (5, "reverted")] {
            let last = json!({"kind": "confirmation", "champion": 1, "trials": trials, "decision": decision});
            link = Link::after(Some(&link), last.to_string());
            links.push(link.clone());
            if decision == "kept" && run != "r0" {
                break;
            }
        }
        store.add(run, links).unwrap();
    }
    assert_eq!(store.check().unwrap(), Ok(()));
    let priors = one(&store, "SELECT tries, kept, round(gain_sum, 9) AS gain_sum FROM priors");
    assert_eq!(priors, json!({"tries": 4, "kept": 3, "gain_sum": 0.6}));
}

#[test]
fn what_a_move_brought_is_kept_by_context_and_by_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path());
    store.add("r1", ledger(folder.path(), "r1", 3)).unwrap();
    let path = folder.path().join("r2").join("ledger.jsonl");
    let mut at_contexts = header("r2");
    at_contexts["contexts"] = json!([128, 2048]);
    Ledger::create(&path, &at_contexts).unwrap().append(&trial(1)).unwrap();
    store.add("r2", read(&path).unwrap().links()).unwrap();
    let path = folder.path().join("r3").join("ledger.jsonl");
    let mut of_eight = header("r3");
    of_eight["batch"] = json!(8);
    Ledger::create(&path, &of_eight).unwrap().append(&trial(1)).unwrap();
    store.add("r3", read(&path).unwrap().links()).unwrap();
    let runs = store.query("SELECT contexts, batch FROM runs ORDER BY run", &[]).unwrap();
    assert_eq!(
        runs.iter().map(|row| (&row["contexts"], &row["batch"])).collect::<Vec<_>>(),
        [
            (&Value::Null, &Value::Null),
            (&json!("[128,2048]"), &Value::Null),
            (&Value::Null, &json!(8))
        ]
    );
    let graphs = store.query("SELECT DISTINCT graph FROM priors ORDER BY graph", &[]).unwrap();
    let graphs: Vec<&Value> = graphs.iter().map(|row| &row["graph"]).collect();
    assert_eq!(graphs, [&json!("g0"), &json!("g0 at [128,2048]"), &json!("g0 by 8")]);
    assert_eq!(store.check().unwrap(), Ok(()));
}
