//! A fleet of real worker processes on a PostgreSQL server of the test's own, under a storm: workers are killed and
//! stopped past their leases, the server is stopped without warning and its disk is full for a while, and a proxy cuts
//! connections. Each job ends with one result, every ledger holds, and the results are those of an undisturbed fleet.
//!
//! AMK_STORM=full is the whole storm: 16 workers, 300 jobs, 100 kills, 20 stops past the lease, 10 stops of the server.
#![cfg(unix)]

#[path = "../fleet/tests/boards/proxy.rs"]
mod proxy;
#[path = "../fleet/tests/boards/server.rs"]
mod server;

use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fleet::Board;
use proxy::Proxy;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use server::Server;

/// How much happens.
struct Storm {
    workers: usize,
    seeds: usize,
    kills: usize,
    stops: usize,
    server_stops: usize,
    /// Messages between two cuts, for all workers together.
    cuts: i64,
    /// The longest time until all jobs are done.
    most: Duration,
}

fn storm() -> Storm {
    let most = |minutes: u64| Duration::from_secs(60 * minutes);
    match std::env::var("AMK_STORM").as_deref() {
        Ok("full") => Storm {
            workers: 16,
            seeds: 150,
            kills: 100,
            stops: 20,
            server_stops: 10,
            cuts: 997,
            most: most(40),
        },
        _ => Storm {
            workers: 4,
            seeds: 10,
            kills: 8,
            stops: 2,
            server_stops: 2,
            cuts: 199,
            most: most(2),
        },
    }
}

fn main() -> ExitCode {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("PGPASSWORD", "owner") };
    server::run(&[
        ("a_storm_changes_no_result", a_storm_changes_no_result),
        ("sigterm_gives_the_job_back_within_5_s", sigterm_gives_the_job_back_within_5_s),
        ("tls_checks_the_certificate_and_the_name", tls_checks_the_certificate_and_the_name),
    ])
}

fn amk(folder: &Path, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.args(args.split(' ')).current_dir(folder).stdin(Stdio::null());
    command.env("AMK_DATA", folder).env("HF_HUB_OFFLINE", "1").env("PGPASSWORD", "owner");
    command.env("RAYON_NUM_THREADS", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[track_caller]
fn answers(folder: &Path, args: &str) -> Value {
    let output = amk(folder, args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args}: {text}");
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

fn start(folder: &Path, board: &str) -> Child {
    let args = format!("fleet worker --board {board} --device cpu --until-done");
    amk(folder, &args).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

fn signal(child: &Child, signal: Signal) {
    // One that has ended by itself needs no signal.
    let _ = kill_process(Pid::from_child(child), signal);
}

fn submit(board: &str, seeds: usize) -> String {
    let seeds: Vec<String> = (0..seeds).map(|seed| seed.to_string()).collect();
    let seeds = seeds.join(",");
    format!(
        "fleet submit --board {board} --models toy,toy-2l --device cpu --budget 4 --seeds {seeds}"
    )
}

/// Verdicts by job, and champions.
fn found(folder: &Path, board: &str) -> (Vec<Value>, Value) {
    let document = answers(folder, &format!("fleet status --board {board}"));
    let path = if board.contains("://") { board.into() } else { folder.join(board) };
    let results = Board::open(&path).unwrap().results().unwrap();
    let verdicts = results.iter().map(|(job, result)| json!([job, result.finding])).collect();
    (verdicts, document["champions"].clone())
}

/// A library under which a disk is full as long as there is a file of this name.
fn full_disk(folder: &Path, flag: &Path) -> std::path::PathBuf {
    let (source, library) = (folder.join("full.c"), folder.join("full.so"));
    let code = format!(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <errno.h>\n#include <sys/uio.h>\n#include <unistd.h>\n\
        static int full(void) {{ return access(\"{}\", F_OK) == 0; }}\n\
        ssize_t pwrite64(int f, const void *b, size_t n, off_t o) {{\n\
          if (full()) {{ errno = ENOSPC; return -1; }}\n\
          return ((ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, \"pwrite64\"))(f, b, n, o); }}\n\
        ssize_t pwritev64(int f, const struct iovec *v, int n, off_t o) {{\n\
          if (full()) {{ errno = ENOSPC; return -1; }}\n\
          return ((ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, \"pwritev64\"))(f, v, n, o); }}\n",
        flag.display()
    );
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-xc", "-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    library
}

fn undisturbed(folder: &Path, seeds: usize) {
    answers(folder, &submit("b.sqlite", seeds));
    let crew: Vec<Child> = (0..4).map(|_| start(folder, "b.sqlite")).collect();
    crew.into_iter().for_each(|mut worker| assert!(worker.wait().unwrap().success()));
}

/// Blows in a random order: kills, stops past the lease (of all workers: one alone may have no job whose lease could
/// expire), stops of the server, and a full disk.
fn shuffled(rng: &mut Xoshiro256PlusPlus, kills: usize, stops: usize, quits: usize) -> Vec<char> {
    let mut blows: Vec<char> = [('k', kills), ('s', stops), ('q', quits), ('f', 1)]
        .into_iter()
        .flat_map(|(blow, times)| std::iter::repeat_n(blow, times))
        .collect();
    for at in (1..blows.len()).rev() {
        blows.swap(at, rng.random_range(0..=at));
    }
    blows
}

fn a_storm_changes_no_result() {
    let Storm { workers, seeds, kills, stops, server_stops, cuts, most } = storm();
    let (calm, rough) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    undisturbed(calm.path(), seeds);
    let flag = rough.path().join("full");
    // The server runs as somebody else, and looks for the flag.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(rough.path(), open).unwrap();
    let mut server = Server::start_with(Some(full_disk(rough.path(), &flag)));
    server.sql("ALTER ROLE amk_worker PASSWORD 'owner'");
    let owner = server.url("owner").display().to_string();
    let terms = "--lease 1.5 --heartbeat 0.3 --attempts 1000 --worker-role amk_worker";
    answers(rough.path(), &format!("fleet init --board {owner} {terms}"));
    answers(rough.path(), &submit(&owner, seeds));
    let proxy = Proxy::start(server.port, 50, cuts);
    let board = server.url_at("amk_worker", proxy.port).display().to_string();

    let (began, mut rng) = (Instant::now(), Xoshiro256PlusPlus::seed_from_u64(7));
    let mut crew: Vec<Child> = (0..workers).map(|_| start(rough.path(), &board)).collect();
    let blows = shuffled(&mut rng, kills, stops, server_stops);
    for blow in blows {
        std::thread::sleep(Duration::from_millis(rng.random_range(50..250)));
        let at = rng.random_range(0..crew.len());
        match blow {
            'k' => crew[at].kill().unwrap(),
            's' => {
                crew.iter().for_each(|worker| signal(worker, Signal::STOP));
                std::thread::sleep(Duration::from_millis(2000));
                crew.iter().for_each(|worker| signal(worker, Signal::CONT));
            }
            'q' => {
                server.stop_immediately();
                server.again();
            }
            _ => {
                std::fs::write(&flag, "").unwrap();
                std::thread::sleep(Duration::from_secs(1));
                std::fs::remove_file(&flag).unwrap();
                // Without room for its log the server shuts itself down. The test starts it again, as a service manager does.
                server.stop_immediately();
                server.again();
            }
        }
        revive(&mut crew, rough.path(), &board);
    }
    while crew.iter_mut().any(|worker| !worker.try_wait().unwrap().is_some_and(|end| end.success()))
    {
        let late = || answers(rough.path(), &format!("fleet status --board {owner}"));
        assert!(began.elapsed() < most, "not done after {:?}: {}", began.elapsed(), late());
        std::thread::sleep(Duration::from_millis(50));
        revive(&mut crew, rough.path(), &board);
    }
    let took = began.elapsed();
    holds(rough.path(), &owner, 2 * seeds);
    let attempts = Board::open(Path::new(&owner)).unwrap().attempts().unwrap();
    let how = |name: &str| attempts.iter().filter(|attempt| attempt.how == name).count();
    println!(
        "{} jobs, {took:?}: {kills} kills, {stops} stops past the lease, {server_stops} stops of the server, a full \
         disk, {} cuts; attempts: {} done, {} expired, {} failed, {} given back",
        2 * seeds,
        proxy.cuts.load(std::sync::atomic::Ordering::SeqCst),
        how("done"),
        how("expired"),
        how("failed"),
        how("given_back")
    );
    assert_eq!((how("done"), how("running")), (2 * seeds, 0));
    assert!(how("expired") > 0 && proxy.was_cut(), "the storm was felt");
    assert_eq!(found(rough.path(), &owner), found(calm.path(), "b.sqlite"));
}

/// Starts workers that were killed or failed again.
fn revive(crew: &mut [Child], folder: &Path, board: &str) {
    for worker in crew {
        if worker.try_wait().unwrap().is_some_and(|end| !end.success()) {
            *worker = start(folder, board);
        }
    }
}

/// All jobs are done, and their ledgers hold, also on the way into a store and out of it again.
#[track_caller]
fn holds(folder: &Path, board: &str, jobs: usize) {
    let status = answers(folder, &format!("fleet status --board {board}"));
    assert_eq!(status["jobs"], json!({"queued": 0, "leased": 0, "done": jobs, "dead": 0}));
    answers(folder, &format!("fleet report --board {board} --out out"));
    answers(folder, "runs verify out");
    let imported = answers(folder, "corpus import out --store all.sqlite");
    assert_eq!(imported["runs"].as_array().unwrap().len(), jobs);
    assert_eq!(answers(folder, "corpus check --store all.sqlite")["holds"], true);
}

fn sigterm_gives_the_job_back_within_5_s() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start();
    let board = server.url("owner").display().to_string();
    let long = format!("fleet submit --board {board} --models toy-2l --device cpu --budget 200");
    answers(folder.path(), &long);
    let mut worker = start(folder.path(), &board);
    let began = Instant::now();
    let jobs = || answers(folder.path(), &format!("fleet status --board {board}"))["jobs"].clone();
    while jobs()["leased"] != 1 {
        assert!(began.elapsed() < Duration::from_secs(60), "no lease");
        std::thread::sleep(Duration::from_millis(50));
    }
    let told = Instant::now();
    signal(&worker, Signal::TERM);
    assert!(worker.wait().unwrap().success());
    assert!(told.elapsed() < Duration::from_secs(5), "{:?}", told.elapsed());
    assert_eq!(jobs(), json!({"queued": 1, "leased": 0, "done": 0, "dead": 0}));
    let attempts = Board::open(Path::new(&board)).unwrap().attempts().unwrap();
    assert_eq!(attempts[0].how, "given_back");
}

/// A whole job over TLS; then the same server with a root certificate that did not sign its own, with none, and under
/// a name that is not in its certificate.
fn tls_checks_the_certificate_and_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start();
    let [root, other] = server.encrypt();
    let url = |host: &str| format!("postgres://owner@{host}:{}/postgres", server.port);
    let run = |args: &str, root: Option<&Path>| {
        let mut command = amk(folder.path(), args);
        command.env_remove("PGSSLROOTCERT").envs(root.map(|file| ("PGSSLROOTCERT", file)));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code(), document, text)
    };
    let works = |args: &str| {
        let (code, document, text) = run(args, Some(&root));
        assert_eq!(code, Some(0), "{args}: {text}");
        document
    };
    let board = url("localhost");
    works(&format!("fleet init --board {board}?sslmode=verify-full"));
    works(&format!("fleet submit --board {board} --models toy --device cpu --budget 2"));
    let worker = format!("fleet worker --board {board} --device cpu --until-done");
    assert_eq!(works(&worker)["done"], 1);
    assert_eq!(works(&format!("fleet status --board {board}"))["jobs"]["done"], 1);
    let log = server.log();
    let encrypted = log.lines().filter(|line| line.contains("application_name=amk SSL enabled"));
    assert!(encrypted.count() >= 2, "two connections of the worker: {log}");

    let refused = |host: &str, root: Option<&Path>, why: &str| {
        let began = Instant::now();
        let (code, document, text) = run(&format!("fleet status --board {}", url(host)), root);
        assert_eq!((code, &document["exit_code"]), (Some(2), &json!(2)), "{text}");
        assert!(text.contains(why) && text.contains("PGSSLROOTCERT"), "{text}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    };
    refused("localhost", Some(&other), "BadSignature");
    refused("localhost", None, "UnknownIssuer");
    refused("127.0.0.1", Some(&root), "not valid for name");
}
