//! A fleet of real worker processes on one board: killed, stopped past their leases, told to end. Whatever happens,
//! each job has one result, and the champions are those of an undisturbed fleet. On the built binary, on the CPU.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fleet::{Board, Device, Kind, Spec};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sha2::Digest as _;

/// The longest wait of these tests for anything.
const PATIENCE: Duration = Duration::from_secs(120);

fn amk(folder: &Path, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.args(args.split(' ')).current_dir(folder).stdin(Stdio::null());
    command.env("AMK_DATA", folder).env("HF_HUB_OFFLINE", "1");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Exit code, document and standard error.
fn said(output: &Output) -> (i32, Value, String) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), document, text)
}

fn ran(folder: &Path, args: &str) -> (i32, Value, String) {
    said(&amk(folder, args).output().unwrap())
}

#[track_caller]
fn answers(folder: &Path, args: &str) -> Value {
    let (code, document, text) = ran(folder, args);
    assert_eq!(code, 0, "{args}: {text}");
    document
}

#[track_caller]
fn refuses(folder: &Path, args: &str, wanted: i32, words: &str) {
    let (code, document, text) = ran(folder, args);
    assert_eq!(code, wanted, "{args}: {text}");
    assert!(text.contains(words), "{args}: {text}");
    assert_eq!(document["exit_code"], wanted, "{document}");
}

const WORKER: &str = "fleet worker --board b.sqlite --device cpu --until-done";

fn start(folder: &Path, args: &str) -> Child {
    amk(folder, args).stderr(Stdio::null()).spawn().unwrap()
}

fn status(folder: &Path) -> Value {
    answers(folder, "fleet status --board b.sqlite --json")
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what} does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// The document and exit code of a worker that ends by itself.
#[track_caller]
fn ended(mut child: Child) -> (i32, Value) {
    wait_until("the end of a worker", || child.try_wait().unwrap().is_some());
    let (code, document, _) = said(&child.wait_with_output().unwrap());
    (code, document)
}

/// The ledgers of attempts, of workers that are gone too.
fn ledgers(folder: &Path) -> Vec<PathBuf> {
    let inside = |path: PathBuf| {
        std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path())
    };
    let attempts = inside(folder.join("runs/fleet")).flat_map(inside);
    attempts.map(|path| path.join("ledger.jsonl")).filter(|path| path.is_file()).collect()
}

/// Waits until an attempt has this many rows.
#[track_caller]
fn in_mid_leg(folder: &Path, rows: usize) {
    wait_until("a trial", || {
        let lines = |path: &PathBuf| std::fs::read_to_string(path).map_or(0, |t| t.lines().count());
        ledgers(folder).iter().any(|path| lines(path) >= rows)
    });
}

/// What a fleet found, without what differs between two runs: times and names of workers.
fn found(folder: &Path) -> Vec<Value> {
    let out = folder.join("out");
    answers(folder, "fleet report --board b.sqlite --out out");
    let board = Board::open(&folder.join("b.sqlite")).unwrap();
    let results = board.results().unwrap();
    let rows = |(job, result): &(u64, fleet::Recorded)| {
        let ledger = corpus::read(&out.join(job.to_string()).join("ledger.jsonl")).unwrap();
        let trial =
            |row: &Value| json!([row["trial"], row["outcome"], row["verdict"]["schedule_id"]]);
        json!({
            "job": job,
            "finding": result.finding,
            "rows": ledger.records.iter().map(trial).collect::<Vec<_>>(),
        })
    };
    results.iter().map(rows).collect()
}

/// All jobs are done, each once, and everything that the board holds can be taken into a store.
#[track_caller]
fn holds(folder: &Path, jobs: usize) {
    let status = status(folder);
    assert_eq!(status["jobs"], json!({"queued": 0, "leased": 0, "done": jobs, "dead": 0}));
    assert_eq!(status["open"], json!([]));
    let board = Board::open(&folder.join("b.sqlite")).unwrap();
    let results: Vec<u64> = board.results().unwrap().into_iter().map(|(job, _)| job).collect();
    assert_eq!(results, (1..=jobs as u64).collect::<Vec<_>>(), "one result each");
    let attempts = board.attempts().unwrap();
    let done = attempts.iter().filter(|attempt| attempt.how == "done").count();
    assert_eq!((done, attempts.iter().filter(|a| a.how == "running").count()), (jobs, 0));
    answers(folder, "fleet report --board b.sqlite --out out");
    answers(folder, "runs verify out");
    through_a_store_and_back(folder, jobs);
}

/// The ledgers of a report are the same bytes after they were in a store.
#[track_caller]
fn through_a_store_and_back(folder: &Path, jobs: usize) {
    let imported = answers(folder, "corpus import out --store all.sqlite");
    assert_eq!(imported["runs"].as_array().unwrap().len(), jobs);
    assert_eq!(answers(folder, "corpus check --store all.sqlite")["holds"], true);
    let _ = std::fs::remove_dir_all(folder.join("back"));
    let exported = answers(folder, "corpus export --store all.sqlite --out back");
    answers(folder, "runs verify back");
    let files = |file: &str| {
        let hash = |path: &Path| sha2::Sha256::digest(std::fs::read(path).unwrap()).to_vec();
        [hash(&folder.join(file)), hash(&folder.join(file).with_extension("head"))]
    };
    let by_run = |document: &Value, key: &str| -> BTreeMap<String, [Vec<u8>; 2]> {
        let runs = document["runs"].as_array().unwrap();
        let word = |run: &Value, key: &str| run[key].as_str().unwrap().to_owned();
        runs.iter().map(|run| (word(run, "run"), files(&word(run, key)))).collect()
    };
    let (before, after) = (by_run(&imported, "from"), by_run(&exported, "ledger"));
    assert_eq!((before.len(), &before), (jobs, &after));
}

/// Blows to the fleet; more with AMK_KILLS, and more legs.
fn blows() -> usize {
    std::env::var("AMK_KILLS").map_or(14, |text| text.parse().unwrap())
}

#[test]
fn a_fleet_that_is_killed_and_stopped_finds_what_an_undisturbed_one_finds() {
    let (calm, storm) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let seeds: Vec<String> = (0..=blows() / 8).map(|seed| seed.to_string()).collect();
    let submit =
        "fleet submit --board b.sqlite --models toy,toy-2l --device cpu --budget 8 --seeds";
    let submit = format!("{submit} {}", seeds.join(","));
    let legs = 2 * seeds.len();
    assert_eq!(answers(calm.path(), &submit)["new"], legs);
    let workers = [(); 2].map(|()| start(calm.path(), WORKER));
    let done: u64 = workers.map(|w| ended(w).1["done"].as_u64().unwrap()).iter().sum();
    assert_eq!(done, legs as u64);
    holds(calm.path(), legs);

    answers(
        storm.path(),
        "fleet init --board b.sqlite --lease 0.6 --heartbeat 0.1 --attempts 1000",
    );
    answers(storm.path(), &submit);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
    let mut workers: Vec<Child> = (0..3).map(|_| start(storm.path(), WORKER)).collect();
    let (mut kills, mut stops) = (0, 0);
    for blow in 0..blows() {
        std::thread::sleep(Duration::from_millis(rng.random_range(60..260)));
        let at = rng.random_range(0..workers.len());
        if workers[at].try_wait().unwrap().is_none() {
            if blow % 4 == 3 {
                signal(&workers[at], Signal::STOP);
                std::thread::sleep(Duration::from_millis(800));
                signal(&workers[at], Signal::CONT);
                stops += 1;
                continue;
            }
            workers[at].kill().unwrap();
            kills += 1;
        }
        workers[at].wait().unwrap();
        workers[at] = start(storm.path(), WORKER);
    }
    for worker in workers {
        assert_eq!(ended(worker).0, 0);
    }
    holds(storm.path(), legs);
    let board = Board::open(&storm.path().join("b.sqlite")).unwrap();
    let lost = board.attempts().unwrap().len() - legs;
    println!("{kills} kills, {stops} stops past the lease, {lost} attempts lost");
    assert!(kills >= 5 && stops >= 1 && lost >= 2, "{kills} kills, {stops} stops, {lost} lost");
    assert_eq!(found(storm.path()), found(calm.path()));
    let champions = |folder: &Path| status(folder)["champions"].clone();
    assert_eq!(champions(storm.path()), champions(calm.path()));
    assert_eq!(champions(calm.path()).as_array().unwrap().len(), 2, "one a model");
}

/// Stops a worker, not in the middle of a request: SQLite's lock would be held for as long as it sleeps.
fn stop_outside_of_a_request(folder: &Path, worker: &Child) {
    let mut board = Board::open(&folder.join("b.sqlite")).unwrap();
    board.set_patience(Duration::from_millis(100)).unwrap();
    wait_until("a stop outside of a request", || {
        signal(worker, Signal::STOP);
        std::thread::sleep(Duration::from_millis(20));
        let free = board.freeze("").is_ok();
        if !free {
            signal(worker, Signal::CONT);
        }
        free
    });
}

const LONG: &str = "fleet submit --board b.sqlite --models toy-2l --device cpu --budget 24";

#[test]
fn a_worker_that_sleeps_past_its_lease_is_refused_and_its_ledger_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    answers(folder.path(), "fleet init --board b.sqlite --lease 0.4 --heartbeat 0.1");
    answers(folder.path(), LONG);
    let sleeper = start(folder.path(), WORKER);
    in_mid_leg(folder.path(), 3);
    stop_outside_of_a_request(folder.path(), &sleeper);
    let [own] = &ledgers(folder.path())[..] else { panic!("one attempt") };
    let second = answers(folder.path(), WORKER);
    assert_eq!(second["done"], 1);
    let result = status(folder.path())["champions"].clone();
    signal(&sleeper, Signal::CONT);
    let (code, document) = ended(sleeper);
    assert_eq!((code, &document["late"], &document["done"]), (0, &json!(1), &json!(0)));
    holds(folder.path(), 1);
    assert_eq!(status(folder.path())["champions"], result, "the second one's result stands");
    let run = own.parent().unwrap().display().to_string();
    answers(folder.path(), &format!("runs verify {run}"));
    assert!(status(folder.path())["card_seconds"]["lost"].as_f64().unwrap() > 0.0);
}

#[test]
fn sigterm_gives_the_job_back_and_the_attempt_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    answers(folder.path(), "fleet init --board b.sqlite --attempts 1");
    answers(folder.path(), LONG);
    let worker = start(folder.path(), WORKER);
    in_mid_leg(folder.path(), 3);
    let began = Instant::now();
    signal(&worker, Signal::TERM);
    let (code, document) = ended(worker);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!((code, &document["given_back"]), (0, &json!(1)));
    let now = status(folder.path());
    assert_eq!((&now["jobs"]["queued"], &now["open"][0]["attempts"]), (&json!(1), &json!(0)));
    assert_eq!(now["workers"][0]["state"], "gone");
    assert_eq!(answers(folder.path(), WORKER)["done"], 1);
    holds(folder.path(), 1);
}

/// A trial, or the evaluation before the first one, may take longer than a worker has after SIGTERM.
#[test]
fn sigterm_does_not_wait_for_a_long_trial() {
    let folder = tempfile::tempdir().unwrap();
    let submit = "fleet submit --board b.sqlite --models smollm2-135m --device cpu --budget 2";
    answers(folder.path(), submit);
    let one = || amk(folder.path(), WORKER).env("RAYON_NUM_THREADS", "1").spawn().unwrap();
    let worker = one();
    in_mid_leg(folder.path(), 1);
    let began = Instant::now();
    signal(&worker, Signal::TERM);
    let (code, document) = ended(worker);
    let took = began.elapsed();
    // A second is what a trial gets; a machine that is done earlier has no long one.
    println!("ended after {} ms", took.as_millis());
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!((code, &document["given_back"]), (0, &json!(1)));
    assert_eq!(status(folder.path())["jobs"]["queued"], 1);
}

#[test]
fn drained_workers_end_after_their_job() {
    let folder = tempfile::tempdir().unwrap();
    answers(folder.path(), LONG);
    let worker = start(folder.path(), "fleet worker --board b.sqlite --device cpu");
    in_mid_leg(folder.path(), 3);
    assert_eq!(status(folder.path())["workers"][0]["job"], 1);
    assert_eq!(answers(folder.path(), "fleet drain --board b.sqlite")["workers"], 1);
    let (code, document) = ended(worker);
    assert_eq!((code, &document["done"]), (0, &json!(1)), "the job was finished");
    holds(folder.path(), 1);
}

#[test]
fn a_job_that_fails_everywhere_is_dead_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    answers(folder.path(), "export --model toy --out model");
    let submit = "fleet submit --board b.sqlite --models model,toy --device cpu --budget 2";
    answers(folder.path(), submit);
    std::fs::remove_dir_all(folder.path().join("model")).unwrap();
    let document = answers(folder.path(), WORKER);
    assert_eq!((&document["failed"], &document["done"]), (&json!(3), &json!(1)));
    let now = status(folder.path());
    assert_eq!((&now["jobs"]["dead"], &now["jobs"]["done"]), (&json!(1), &json!(1)));
    let why = now["open"][0]["why"].as_str().unwrap();
    assert!(why.contains("model"), "{why}");

    // The same on the page and in the metrics.
    let report = answers(folder.path(), "fleet report --board b.sqlite --out out");
    assert_eq!(report["page"], "out/report.html");
    let page = std::fs::read_to_string(folder.path().join("out/report.html")).unwrap();
    let start = why.split(['/', '"', '\'']).next().unwrap();
    assert!(page.contains("<b>1</b>jobs dead") && page.contains(start), "{start}");
    assert!(page.contains("1 done, 0 running, 0 lost with their lease, 3 failed"));
    let file = "fleet status --board b.sqlite --metrics-file amk.prom";
    answers(folder.path(), file);
    let metrics = std::fs::read_to_string(folder.path().join("amk.prom")).unwrap();
    let wanted = [
        "amk_fleet_jobs{state=\"dead\"} 1.0",
        "amk_fleet_attempts_total{outcome=\"failed\"} 3.0",
        "amk_fleet_champions{status=\"predicted\"} 1.0",
    ];
    for line in wanted {
        assert!(metrics.lines().any(|held| held == line), "{line} is not in {metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
}

#[test]
fn champions_are_raced_through_the_same_gates() {
    let folder = tempfile::tempdir().unwrap();
    // At short contexts the default schedules of toys are the best that a leg finds.
    let submit =
        "fleet submit --board b.sqlite --models toy-2l --contexts 512 --device cpu --budget 16";
    answers(folder.path(), submit);
    refuses(folder.path(), "fleet submit --board b.sqlite --races 2", 2, "nothing to race");
    answers(folder.path(), WORKER);
    // A leg that is only its start has won nothing.
    answers(folder.path(), "fleet submit --board one.sqlite --models toy --device cpu --budget 1");
    answers(folder.path(), &WORKER.replace("b.sqlite", "one.sqlite"));
    let one = answers(folder.path(), "fleet status --board one.sqlite --json")["champions"].clone();
    assert_eq!((&one[0]["decision"], &one[0]["saved"]), (&Value::Null, &json!([0.0, 0.0])));
    refuses(folder.path(), "fleet submit --board one.sqlite --races 2", 2, "nothing to race");
    let races = "fleet submit --board b.sqlite --races 2";
    assert_eq!(answers(folder.path(), races)["new"], 2);
    assert_eq!(answers(folder.path(), races)["new"], 0, "they are there");
    assert_eq!(answers(folder.path(), WORKER)["done"], 2);
    holds(folder.path(), 3);
    let results = Board::open(&folder.path().join("b.sqlite")).unwrap().results().unwrap();
    let (leg, race) = (&results[0].1.finding, &results[1].1.finding);
    assert_eq!((race.trials, race.decision.as_deref()), (2, Some("kept")));
    assert_eq!(
        (&race.config, &race.start_config, race.saved),
        (&leg.config, &leg.start_config, leg.saved)
    );
    let champions = &status(folder.path())["champions"];
    assert_eq!(champions[0]["status"], "predicted", "whatever the races say");
    assert_eq!(champions.as_array().unwrap().len(), 1);
}

/// A leg proposes from the snapshot that the board froze, and from nothing that came later.
#[test]
fn a_leg_is_repeated_from_its_snapshot_and_seed() {
    let trial = |rows: u32, us: f64| json!({"to": {"tiling.down.rows": rows}, "us": us, "predicted_us": 15.0});
    let known = json!([{"graph": "g", "weight": 1.0, "trials": [trial(64, 5.0), trial(8, 30.0)]}]);
    let run = |known: Option<&Value>| {
        let folder = tempfile::tempdir().unwrap();
        let mut board = Board::create(&folder.path().join("b.sqlite"), None).unwrap();
        let priors = known.map_or_else(String::new, |k| board.freeze(&k.to_string()).unwrap());
        let spec = Spec {
            kind: Kind::Leg,
            model: "toy".to_owned(),
            target: "h200".to_owned(),
            device: Device::Cpu,
            contexts: Vec::new(),
            seed: 0,
            budget: "6".to_owned(),
            strategy: "residual".to_owned(),
            protocol: search::PROTOCOL,
            priors,
            round: 0,
            race: None,
        };
        board.submit(&[spec]).unwrap();
        assert_eq!(answers(folder.path(), WORKER)["done"], 1);
        let found = found(folder.path());
        let header = corpus::read(&folder.path().join("out/1/ledger.jsonl")).unwrap().header;
        (found, header["prior"].clone())
    };
    let (first, prior) = run(Some(&known));
    assert_eq!(prior, known);
    assert_eq!(run(Some(&known)).0, first);
    let (without, prior) = run(None);
    assert_eq!(prior, json!([]));
    assert_ne!(without, first, "the snapshot is used");
}

/// The manifests start workers that work: their commands run here, on a board in a file and without a GPU.
#[test]
fn manifests_of_slurm_and_kubernetes_start_workers() {
    let folder = tempfile::tempdir().unwrap();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/fleet");
    let submit = "fleet submit --board b.sqlite --models toy --device cpu --budget 2";
    answers(folder.path(), submit);
    // Slurm's `srun` runs what follows its own options.
    let srun = folder.path().join("srun");
    std::fs::write(
        &srun,
        "#!/bin/sh\nwhile case $1 in --*) ;; *) false;; esac; do shift; done\nexec \"$@\"\n",
    )
    .unwrap();
    std::fs::set_permissions(&srun, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(folder.path().join("password"), "secret\n").unwrap();
    let script = || {
        let mut script = Command::new("bash");
        let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        script.arg(packaging.join("slurm.sh")).current_dir(folder.path()).env("PATH", path);
        script.env("AMK", env!("CARGO_BIN_EXE_amk")).env("AMK_DATA", folder.path());
        script.env("AMK_BOARD_PASSWORD_FILE", "password").env("AMK_DEVICE", "cpu");
        script
    };
    let output = script().env("AMK_BOARD", "b.sqlite").output().unwrap();
    let (code, document, text) = said(&output);
    assert_eq!((code, &document["done"]), (0, &json!(1)), "{text}");
    assert!(!script().env_remove("AMK_BOARD").output().unwrap().status.success(), "no board");

    let manifest = std::fs::read_to_string(packaging.join("kubernetes.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(
        (&manifest["kind"], &manifest["spec"]["completionMode"]),
        (&json!("Job"), &json!("Indexed"))
    );
    let pod = &manifest["spec"]["template"]["spec"];
    assert!(
        pod["terminationGracePeriodSeconds"].as_u64().unwrap() >= 5,
        "a worker gives its job back"
    );
    let container = &pod["containers"][0];
    let words = ["command", "args"].map(|key| container[key].as_array().unwrap().clone()).concat();
    let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
    let line = words[1..].join(" ").replace("$(AMK_BOARD)", "b.sqlite").replace("cuda", "cpu");
    answers(folder.path(), &submit.replace("toy", "toy-2l"));
    let document = answers(folder.path(), &line.replace("/runs", "runs"));
    assert_eq!((words[0], &document["done"]), ("amk", &json!(1)));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    refuses(at, "fleet status --board postgres://me:hidden@127.0.0.1/b", 2, "PGPASSWORD");
    refuses(at, "fleet init --board b.sqlite --worker-role w", 2, "which has no roles");
    refuses(at, "fleet status --board b.sqlite", 2, "amk fleet init");
    refuses(at, "fleet worker --board b.sqlite --for 3", 2, "--for takes a time");
    refuses(at, "fleet init --board b.sqlite --lease 1 --heartbeat 0.6", 2, "half of the lease");
    refuses(at, "fleet init --board b.sqlite --lease nan", 2, "out of range");
    refuses(at, "fleet submit --board b.sqlite --models toy,nothing --device cpu", 2, "nothing");
    refuses(at, "fleet submit --board b.sqlite --models toy --cards h300", 2, "h300");
    refuses(at, "fleet submit --board b.sqlite --models toy --device eval", 2, "eval");
    refuses(at, "fleet submit --board b.sqlite", 2, "--models");
    assert!(!at.join("b.sqlite").exists(), "nothing was made");
    answers(at, "fleet submit --board b.sqlite --models toy --device cpu --budget 2");
    refuses(at, "fleet init --board b.sqlite --lease 30", 2, "other terms");
    refuses(at, "fleet drain --board b.sqlite nobody", 2, "no active worker");
    std::fs::write(at.join("text"), "no board").unwrap();
    refuses(at, "fleet status --board text", 2, "no board");
}

/// A verdict on the board that its ledger does not give is found when the ledgers are written.
#[test]
fn a_verdict_that_does_not_follow_from_its_ledger_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut board = Board::create(&folder.path().join("b.sqlite"), None).unwrap();
    answers(folder.path(), "fleet submit --board b.sqlite --models toy --device cpu --budget 4");
    answers(folder.path(), WORKER);
    let (_, mut result) = board.results().unwrap().remove(0);
    answers(
        folder.path(),
        "fleet submit --board b.sqlite --models toy --device cpu --budget 4 --seeds 1",
    );
    let liar = fleet::Worker {
        id: "liar".to_owned(),
        host: String::new(),
        boot: String::new(),
        version: String::new(),
        target: String::new(),
        card: String::new(),
        card_name: String::new(),
    };
    board.join(&liar).unwrap();
    let fleet::Claim::Leased(job) = board.claim(&liar).unwrap() else { panic!() };
    // The ledger of another seed, hashed as if it were this job's.
    board.finish(job.id, job.fence, &result).unwrap().unwrap();
    refuses(folder.path(), "fleet report --board b.sqlite --out out", 4, "its seed differs");
    result.finding.latency_us = Some(1.0);
    answers(folder.path(), "fleet submit --board c.sqlite --models toy --device cpu --budget 4");
    let mut board = Board::open(&folder.path().join("c.sqlite")).unwrap();
    board.join(&liar).unwrap();
    let fleet::Claim::Leased(job) = board.claim(&liar).unwrap() else { panic!() };
    board.finish(job.id, job.fence, &result).unwrap().unwrap();
    refuses(
        folder.path(),
        "fleet report --board c.sqlite --out c",
        4,
        "does not follow from its ledger",
    );
}
