//! What a search on the disk survives: SIGKILL at random moments, a full disk, a read-only one, forged rows. On the built binary.
//!
//! The line that `amk loop` prints on standard error for each trial is its acknowledgement: it comes after the row is
//! on the disk. `AMK_KILLS=200` sets the number of kills instead of ten.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

const LOOP: [&str; 8] =
    ["loop", "--schedule", "neutral", "--model", "toy", "--device", "cpu", "--kv-capacity"];

/// Kills per folder, after which a new search is begun.
const KILLS_OF_A_SEARCH: u64 = 10;

/// The longest time before a search is killed. A trial takes some milliseconds.
const LATEST_MS: u64 = 400;

fn amk(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command
}

/// Starts the search in `s`, or resumes it.
fn start(folder: &Path, resume: bool, budget: &str) -> Command {
    let fresh = [&LOOP[..], &["16", "--out", "s", "--budget", budget]].concat();
    let again = ["loop", "--resume", "--out", "s", "--budget", budget];
    amk(folder, if resume { &again[..] } else { &fresh })
}

/// Exit code, document and standard error.
fn ran(command: &mut Command) -> (i32, Value, String) {
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), document, said)
}

/// Number and outcome of a trial, from its acknowledging line.
fn acknowledged(line: &str) -> Option<(usize, String)> {
    let mut words = line.strip_prefix("  ")?.split_whitespace();
    let number = words.next()?.parse().ok()?;
    let origins = ["baseline", "sweep", "model", "step", "combine", "jump"];
    words.next().filter(|origin| origins.contains(origin))?;
    Some((number, words.next()?.to_owned()))
}

/// Runs the search for `time`, kills it, and returns the acknowledged trials.
fn killed_after(folder: &Path, resume: bool, time: Duration) -> Vec<(usize, String)> {
    let mut child = start(folder, resume, "100000")
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        // The last line may be cut; `lines` returns it all the same, so only complete ones count.
        let mut lines = Vec::new();
        for line in said.split(b'\n') {
            lines.push(String::from_utf8_lossy(&line.unwrap()).into_owned());
        }
        lines
    });
    std::thread::sleep(time);
    assert!(child.try_wait().unwrap().is_none(), "the search ended by itself");
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap().iter().filter_map(|line| acknowledged(line)).collect()
}

/// The trials of a valid ledger.
#[track_caller]
fn trials(folder: &Path) -> Vec<Value> {
    let contents = corpus::read(&folder.join("s/ledger.jsonl")).unwrap();
    let trials = contents.records.into_iter().filter(|record| record["kind"] == "trial");
    let trials: Vec<Value> = trials.collect();
    for (index, trial) in trials.iter().enumerate() {
        assert_eq!(trial["trial"], index, "a trial is missing or there twice");
    }
    trials
}

fn schedules(trials: &[Value]) -> Vec<String> {
    trials.iter().map(|trial| trial["verdict"]["schedule_id"].to_string()).collect()
}

/// Brings the store up to date, twice, and compares it with the ledger. Returns the number of rows that the killed search had not added.
#[track_caller]
fn store_is_brought_to_the_ledger(folder: &Path) -> u64 {
    let args = ["corpus", "import", "s", "s/ledger.jsonl", "--store", "store.sqlite"];
    let (code, document, said) = ran(&mut amk(folder, &args));
    assert_eq!(code, 0, "{said}");
    let contents = corpus::read(&folder.join("s/ledger.jsonl")).unwrap();
    let links: Vec<corpus::Link> = contents.links().collect();
    let [first, second] = [0, 1].map(|index| &document["runs"][index]);
    assert_eq!((&second["new"], &second["held"]), (&0.into(), &links.len().into()), "{said}");
    let run = first["run"].as_str().unwrap();
    let store = corpus::Store::existing(&folder.join("store.sqlite")).unwrap();
    assert_eq!(store.runs().unwrap(), [run], "one run, whole");
    assert_eq!(store.links(run).unwrap(), links, "exactly the ledger's rows");
    assert_eq!(store.check().unwrap(), Ok(()), "no torn row, and the tables follow");
    first["new"].as_u64().unwrap()
}

fn has_started(folder: &Path) -> bool {
    std::fs::read(folder.join("s/ledger.jsonl")).is_ok_and(|bytes| bytes.contains(&b'\n'))
}

/// Kills one search repeatedly, checks its files after each kill, and lets it end.
fn killed_often(kills: u64, rng: &mut Xoshiro256PlusPlus) -> [usize; 3] {
    let folder = tempfile::tempdir().unwrap();
    let (mut safe, mut torn, mut behind) = (Vec::new(), 0, 0);
    for _ in 0..kills {
        let time = Duration::from_micros(rng.random_range(0..LATEST_MS * 1000));
        let resume = has_started(folder.path());
        safe.extend(killed_after(folder.path(), resume, time));
        if !has_started(folder.path()) {
            assert!(safe.is_empty(), "{safe:?} were acknowledged without a ledger");
            continue;
        }
        torn += usize::from(corpus::read(&folder.path().join("s/ledger.jsonl")).unwrap().torn);
        behind += usize::from(store_is_brought_to_the_ledger(folder.path()) > 0);
        let held = trials(folder.path());
        for (number, outcome) in &safe {
            let row = held.get(*number).unwrap_or_else(|| panic!("trial {number} was lost"));
            assert_eq!(row["outcome"], **outcome, "trial {number} is another one");
        }
    }
    let (code, document, said) = ran(&mut amk(folder.path(), &["runs", "verify", "s"]));
    assert_eq!((code, &document["runs"][0]["holds"]), (0, &Value::from(true)), "{said}");
    let held = trials(folder.path());
    let budget = (held.len() + 3).to_string();
    let (code, document, said) =
        ran(&mut start(folder.path(), has_started(folder.path()), &budget));
    assert_eq!((code, &document["n_trials"]), (0, &Value::from(held.len() + 3)), "{said}");
    assert_eq!(
        schedules(&trials(folder.path()))[..held.len()],
        schedules(&held),
        "rows were rewritten"
    );
    assert_eq!(
        store_is_brought_to_the_ledger(folder.path()),
        0,
        "the search added its rows itself"
    );
    [safe.len(), torn, behind]
}

#[test]
fn nothing_acknowledged_is_lost_when_a_search_is_killed_at_random_moments() {
    let kills = std::env::var("AMK_KILLS").map_or(10, |text| text.parse().unwrap());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(6);
    let (mut safe, mut torn, mut behind, mut done) = (0, 0, 0, 0);
    while done < kills {
        let kills = KILLS_OF_A_SEARCH.min(kills - done);
        let [more, more_torn, more_behind] = killed_often(kills, &mut rng);
        (safe, torn, done) = (safe + more, torn + more_torn, done + kills);
        behind += more_behind;
    }
    println!(
        "{done} kills, {safe} acknowledged trials, none lost; {torn} unfinished rows cut off; the store was behind {behind} times and brought to the ledger's rows each time"
    );
    assert!(safe > 0, "no search came as far as a trial");
}

const IMPORT: [&str; 5] = ["corpus", "import", "runs", "--store", "store.sqlite"];

/// Checks that the store is valid and each run in it is complete. Returns the number of runs.
#[track_caller]
fn whole_runs(folder: &Path, ledgers: &[Vec<corpus::Link>]) -> usize {
    let path = folder.join("store.sqlite");
    if !path.exists() {
        return 0;
    }
    let store = corpus::Store::existing(&path).unwrap();
    assert_eq!(store.check().unwrap(), Ok(()), "no torn row, and the tables follow");
    let runs = store.runs().unwrap();
    for run in &runs {
        assert!(ledgers.contains(&store.links(run).unwrap()), "{run} is not whole");
    }
    runs.len()
}

#[test]
fn a_store_holds_whole_runs_when_who_writes_it_is_killed_at_random_moments() {
    let kills = std::env::var("AMK_KILLS").map_or(10, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let seeds = ["0", "1", "2", "3"];
    let ledgers = seeds.map(|seed| {
        let out = format!("runs/{seed}");
        let args = ["16", "--budget", "12", "--store", "none", "--seed", seed, "--out", &out];
        let (code, _, said) = ran(&mut amk(folder.path(), &[&LOOP[..], &args].concat()));
        assert_eq!(code, 0, "{said}");
        corpus::read(&folder.path().join(out).join("ledger.jsonl")).unwrap().links().collect()
    });
    let began = Instant::now();
    let (code, _, said) = ran(&mut amk(folder.path(), &IMPORT));
    let latest = began.elapsed();
    assert_eq!(code, 0, "{said}");
    assert_eq!(whole_runs(folder.path(), &ledgers), seeds.len());
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    let mut found = [0; 5];
    for _ in 0..kills {
        if whole_runs(folder.path(), &ledgers) == seeds.len() {
            for file in ["store.sqlite", "store.sqlite-wal", "store.sqlite-shm"] {
                let _ = std::fs::remove_file(folder.path().join(file));
            }
        }
        let time = Duration::from_micros(rng.random_range(0..latest.as_micros() as u64));
        let mut child = amk(folder.path(), &IMPORT)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(time);
        child.kill().unwrap();
        child.wait().unwrap();
        found[whole_runs(folder.path(), &ledgers)] += 1;
    }
    println!(
        "{kills} kills while a store was written; it held 0 to 4 whole runs so often: {found:?}"
    );
    let (code, _, said) = ran(&mut amk(folder.path(), &IMPORT));
    assert_eq!(code, 0, "{said}");
    assert_eq!(whole_runs(folder.path(), &ledgers), seeds.len());
}

#[test]
fn a_killed_search_makes_the_trials_of_one_that_was_left_alone() {
    let [cut, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for ms in [150, 200, 250] {
        killed_after(cut.path(), has_started(cut.path()), Duration::from_millis(ms));
    }
    // At least 17: a search of fewer trials draws its proposals otherwise, and on a slow machine few were made.
    let budget = (trials(cut.path()).len() + 5).max(17).to_string();
    assert_eq!(ran(&mut start(cut.path(), true, &budget)).0, 0);
    // A search's exploration depends on its budget, so the other search gets the same one.
    assert_eq!(ran(&mut start(whole.path(), false, "1000")).0, 0);
    let held = schedules(&trials(cut.path()));
    assert_eq!(held[..], schedules(&trials(whole.path()))[..held.len()]);
}

/// Limits the size of files, as a quota would. The signal that comes with it is ignored, so that the write fails instead.
#[test]
fn a_file_that_may_not_grow_ends_the_search_and_keeps_what_was_done() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap '' XFSZ; ulimit -f 32; exec \"$0\" \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_amk")]).args(LOOP);
    command.args(["16", "--out", "s", "--budget", "64"]).current_dir(folder.path());
    let (code, document, said) = ran(&mut command);
    refused(code, &document, &said, &["s/ledger.jsonl", "ulimit -f", "amk loop --resume --out s"]);
    let held = trials(folder.path());
    assert!((5..64).contains(&held.len()), "{} trials", held.len());
    let said_safe = said.lines().filter_map(acknowledged).count();
    assert_eq!(held.len(), said_safe, "the row that did not fit was taken back");
    let (code, document, said) = ran(&mut start(folder.path(), true, "64"));
    assert_eq!((code, &document["n_trials"]), (0, &Value::from(64)), "{said}");
    assert_eq!(schedules(&trials(folder.path()))[..held.len()], schedules(&held));
}

#[track_caller]
fn refused(code: i32, document: &Value, said: &str, words: &[&str]) {
    assert_eq!((code, &document["schema"]), (2, &Value::from("amk.error.v1")), "{said}");
    let last = said.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "{word:?} is not in {last:?}");
    }
}

/// A file system of 48 KiB that fills up, is made larger, and then read-only, in its own mount namespace.
const DISK: &str = r#"
amk=$1; mkdir d; mount -t tmpfs -o size=48k none d || exit 77
run() { "$amk" "$@" > "$name.json" 2> "$name.err"; echo $? > "$name.code"; }
name=full;     run loop --model toy --device cpu --kv-capacity 16 --out d/s --budget 64
cp -r d/s full-s
name=again;    mount -o remount,size=8m d; run loop --resume --out d/s --budget 64
name=readonly; mount -o remount,ro d;      run loop --resume --out d/s --budget 70
name=fresh;    run loop --model toy --device cpu --out d/t
name=verify;   run runs verify d/s
"#;

#[test]
fn a_full_disk_and_a_read_only_one_end_the_search_and_keep_what_was_done() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args([
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        DISK,
        "disk",
        env!("CARGO_BIN_EXE_amk"),
    ]);
    let status = command.current_dir(folder.path()).stdin(Stdio::null()).output();
    if !status.as_ref().is_ok_and(|output| output.status.success()) {
        assert!(
            std::env::var_os("AMK_REQUIRE_MOUNTS").is_none(),
            "no file systems of our own: {status:?}"
        );
        println!("skipped: no file systems of our own here (unshare --mount): {status:?}");
        return;
    }
    let of = |name: &str| {
        let read = |end: &str| {
            std::fs::read_to_string(folder.path().join(format!("{name}.{end}"))).unwrap()
        };
        let document = serde_json::from_str(&read("json")).unwrap_or(Value::Null);
        (read("code").trim().parse().unwrap(), document, read("err"))
    };
    let (code, document, said) = of("full");
    refused(code, &document, &said, &["d/s/ledger.jsonl", "free some space", "--resume --out d/s"]);
    let held = corpus::read(&folder.path().join("full-s/ledger.jsonl")).unwrap();
    let safe = said.lines().filter_map(acknowledged).count();
    assert!(
        !held.torn && safe > 3 && held.records.len() == safe,
        "{} of {safe}",
        held.records.len()
    );
    let (code, document, said) = of("again");
    assert_eq!((code, &document["n_trials"]), (0, &Value::from(64)), "{said}");
    let (code, document, said) = of("readonly");
    refused(code, &document, &said, &["d/s/ledger.jsonl", "read-only"]);
    let (code, document, said) = of("fresh");
    refused(code, &document, &said, &["d/t", "read-only"]);
    let (code, document, said) = of("verify");
    assert_eq!((code, &document["runs"][0]["trials"]), (0, &Value::from(64)), "{said}");
}

/// Rewrites a ledger with right hashes and a right tip record.
fn forge(folder: &Path, edit: impl FnOnce(&mut Vec<Value>)) {
    let path = folder.join("s/ledger.jsonl");
    let contents = corpus::read(&path).unwrap();
    let mut records = contents.records;
    edit(&mut records);
    std::fs::remove_file(&path).unwrap();
    let mut ledger = corpus::Ledger::create(&path, &contents.header).unwrap();
    for record in records {
        ledger.append(&record).unwrap();
    }
}

/// A way to tamper with a ledger, with the line and words of the report.
type Tampering = (&'static str, fn(&Path), u64, &'static str);

fn text(folder: &Path, edit: impl FnOnce(&mut Vec<String>)) {
    let path = folder.join("s/ledger.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    edit(&mut lines);
    std::fs::write(&path, lines.join("\n") + "\n").unwrap();
}

const TAMPERINGS: [Tampering; 9] = [
    (
        "edited",
        |f| text(f, |rows| rows[2] = rows[2].replacen("\"trial\":1", "\"trial\":2", 1)),
        3,
        "edited",
    ),
    ("removed", |f| text(f, |rows| drop(rows.remove(2))), 3, "removed"),
    ("reordered", |f| text(f, |rows| rows.swap(2, 3)), 3, "moved"),
    ("inserted", |f| text(f, |rows| rows.insert(3, rows[2].clone())), 4, "inserted"),
    ("cut off", |f| text(f, |rows| rows.truncate(4)), 5, "cut off"),
    (
        "a forged latency",
        |f| forge(f, |rows| rows[2]["verdict"]["latency_us"] = 0.001.into()),
        4,
        "bound",
    ),
    ("a forged outcome", |f| forge(f, |rows| flip(&mut rows[2]["outcome"])), 4, "latencies say"),
    (
        "a forged schedule",
        |f| forge(f, |rows| other_stages(&mut rows[2]["config"]["pipeline"]["stages"])),
        4,
        "changed",
    ),
    ("a missing trial", |f| forge(f, |rows| drop(rows.remove(1))), 3, "number"),
];

/// Another number of stages than the recorded one.
fn other_stages(stages: &mut Value) {
    *stages = if *stages == 2 { 3 } else { 2 }.into();
}

/// Another outcome than the recorded one.
fn flip(outcome: &mut Value) {
    *outcome = if *outcome == "kept" { "reverted" } else { "kept" }.into();
}

#[test]
fn runs_verify_names_the_file_the_line_and_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(ran(&mut start(folder.path(), false, "6")).0, 0);
    // The last one is a view, which a resume rewrites before it checks the rows.
    let files = ["ledger.jsonl", "ledger.head", "results.tsv"];
    let whole = files.map(|name| std::fs::read(folder.path().join("s").join(name)).unwrap());
    for (what, tamper, line, word) in TAMPERINGS {
        tamper(folder.path());
        let (code, document, said) = ran(&mut amk(folder.path(), &["runs", "verify", "s"]));
        let row = &document["runs"][0];
        assert_eq!((code, &row["holds"]), (4, &Value::from(false)), "{what}: {said}");
        assert_eq!(
            (&row["ledger"], &row["line"]),
            (&"s/ledger.jsonl".into(), &line.into()),
            "{what}: {said}"
        );
        assert!(row["reason"].as_str().unwrap().contains(word), "{what}: {said}");
        assert!(
            said.contains("s/ledger.jsonl") && said.contains(&format!("line {line}")),
            "{said}"
        );
        let (code, _, said) = ran(&mut start(folder.path(), true, "8"));
        assert_eq!(code, 4, "{what} is not continued either: {said}");
        for (name, bytes) in files.iter().zip(&whole) {
            std::fs::write(folder.path().join("s").join(name), bytes).unwrap();
        }
    }
    let (code, document, said) =
        ran(&mut amk(folder.path(), &["runs", "verify", "s", "s/ledger.jsonl", "."]));
    assert_eq!((code, document["runs"].as_array().unwrap().len()), (0, 3), "{said}");
    let (code, document, _) = ran(&mut amk(folder.path(), &["runs", "list", "."]));
    assert_eq!((code, &document["runs"][0]["trials"]), (0, &Value::from(6)));
    let (code, _, said) = ran(&mut amk(folder.path(), &["runs", "verify"]));
    assert!(code == 2 && said.contains("no search in runs"), "{said}");
}

/// While the graph is evaluated no trial runs, so an interrupt waits for nothing.
#[test]
fn a_search_interrupted_before_its_first_trial_ends_at_once_and_can_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["loop", "--model", "smollm2-135m", "--budget", "1", "--out", "s"];
    let mut command = amk(dir.path(), &args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("search: smollm2-135m") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    std::thread::sleep(Duration::from_millis(100)); // the handler is installed right after that line
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    said.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    let go_on = "interrupted before the next trial; continue with: amk loop --resume --out s";
    assert!(text.contains(go_on), "{text}");
    let ledger = std::fs::read_to_string(dir.path().join("s/ledger.jsonl")).unwrap();
    assert_eq!(ledger.lines().count(), 1, "the terms of the search, and no trial");
}
