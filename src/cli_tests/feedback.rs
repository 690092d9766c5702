//! Output for people and for programs: documents on a terminal, usage errors, configs in every accepted form.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};

use super::{Ran, amk, amk_in, command, folder, ran};

/// Both ends of a terminal: ours, and the one that a process writes to.
fn terminal() -> (OwnedFd, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
    (ours, theirs)
}

/// Reads what is printed to a terminal until its other end is closed, which is an I/O error.
fn printed(ours: OwnedFd) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut printed = Vec::new();
        let _ = std::fs::File::from(ours).read_to_end(&mut printed);
        printed
    })
}

/// Runs `amk` with a terminal as its standard output.
fn on_a_terminal(args: &[&str]) -> Ran {
    let (ours, theirs) = terminal();
    let mut command = command(&std::env::temp_dir(), args);
    let child = command.stdout(theirs).stderr(Stdio::piped()).spawn().unwrap();
    // The command holds the terminal's other end open: the read would never end.
    drop(command);
    let reader = printed(ours);
    let output = child.wait_with_output().unwrap();
    ran(std::process::Output { stdout: reader.join().unwrap(), ..output })
}

#[test]
fn a_search_says_that_it_confirms_its_champion() {
    let (dir, (ours, theirs)) = (folder(), terminal());
    let args = ["loop", "--model", "toy", "--device", "cpu", "--budget", "2"];
    let mut command = command(dir.path(), &args);
    let child = command.env("TERM", "xterm").stdout(Stdio::piped()).stderr(theirs).spawn().unwrap();
    drop(command);
    let reader = printed(ours);
    assert!(child.wait_with_output().unwrap().status.success());
    let printed = String::from_utf8(reader.join().unwrap()).unwrap();
    assert!(printed.contains("confirming the champion"), "{printed}");
}

/// `eval` runs a graph without a schedule: only commands that run a model offer it.
#[test]
fn eval_is_offered_where_it_is_taken() {
    for (command, offered) in
        [("loop", false), ("evaluate", false), ("generate", true), ("serve", true)]
    {
        let help = amk(&[command, "--help"]).stdout;
        let named = help.split(|c: char| !c.is_alphanumeric()).any(|word| word == "eval");
        assert_eq!(named, offered, "{command}: {help}");
    }
    amk(&["loop", "--model", "toy", "--device", "eval"]).fails(2, &["eval", "cpu"]);
}

#[test]
fn a_terminal_gets_the_summary_and_the_document_only_with_json() {
    let toy = ["--model", "toy", "--device", "cpu"];
    let generate = ["generate", "--tokens", "1,2", "--max-new-tokens", "2"];
    for (call, code, said) in [
        (["propose"].to_vec(), 0, "pipeline.stages"),
        (["evaluate"].to_vec(), 0, "latency"),
        (["lower"].to_vec(), 0, "tasks"),
        (generate.to_vec(), 0, "tokens: "),
        (["evaluate", "--config", "none.json"].to_vec(), 2, "check the path"),
        (["evaluate", "--budget", "3"].to_vec(), 2, "unexpected argument"),
    ] {
        let call = [&call[..], &toy].concat();
        let plain = on_a_terminal(&call);
        assert_eq!((plain.code, plain.stdout.as_str()), (code, ""), "{call:?}: {}", plain.stderr);
        assert!(plain.stderr.contains(said), "{call:?}: {said:?} is not in {}", plain.stderr);
        let forced = on_a_terminal(&[&call[..], &["--json"]].concat());
        assert!(forced.json()["schema"].is_string(), "{call:?}: {}", forced.stdout);
        assert!(forced.stdout.lines().count() > 1, "{call:?}: a terminal gets it indented");
        let piped = amk(&call);
        assert!(piped.json()["schema"].is_string(), "{call:?}: {}", piped.stdout);
        assert_eq!(piped.stdout.lines().count(), 1, "{call:?}");
    }
}

#[test]
fn the_document_of_a_usage_error_lists_everything_that_its_text_does() {
    for (call, words) in [
        (&["generate"][..], &["--model <DIR|ORG/NAME|PRESET>", "--tokens <IDS>"][..]),
        (&["evaluate", "--model", "toy", "--confg", "x"], &["'--confg'", "tip:", "'--config'"]),
        (&["evaluate", "--model", "toy", "--device", "gpu"], &["'gpu'", "possible values", "cuda"]),
        (&["lop"], &["'lop'", "'loop'"]),
        (&["runs"], &["subcommand", "verify", "replay", "gc"]),
    ] {
        let ran = amk(call);
        let document = ran.json();
        assert_eq!((ran.code, &document["error"]), (2, &json!("usage")), "{call:?}");
        let message = document["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "{call:?}: {word:?} is not in {message:?}");
        }
        assert!(!message.contains('\n') && !message.contains("Usage:"), "{message:?}");
        assert!(!message.contains("Examples"), "{message:?}");
    }
}

/// `evaluate` on the toy with a config in its arguments.
fn with_config(config: &str) -> Ran {
    amk(&["evaluate", "--model", "toy", "--device", "cpu", "--config", config])
}

#[test]
fn text_that_begins_as_json_is_never_a_path() {
    let wrong = with_config("{pipeline: {stages: 4}}");
    wrong.fails(2, &["line 1 column 2", "key must be a string"]);
    with_config(r#"{"pipeline": {"stages": 4}"#).fails(2, &["line 1 column 26", "EOF"]);
    with_config("[]").fails(2, &["an array instead of an object"]);
    with_config(r#" {"pipeline": {"stages": 4}}"#).succeeds("amk.verdict.v2");
}

#[test]
fn a_key_that_is_given_twice_is_an_error_wherever_the_config_comes_from() {
    let twice = r#"{"pipeline": {"stages": 4, "stages": 6}}"#;
    with_config(twice).fails(2, &["`stages` is given twice", "line 1 column 35"]);
    super::evaluate(twice.as_bytes()).fails(2, &["`stages` is given twice"]);
}

#[test]
fn answers_of_propose_and_loop_are_configs() {
    let dir = folder();
    let toy = ["--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
    let call = |args: &[&str]| amk_in(dir.path(), &[args, &toy].concat());
    let keep = |name: &str, document: &Value| {
        std::fs::write(dir.path().join(name), document.to_string()).unwrap();
    };
    let proposed = call(&["propose"]).succeeds("amk.propose.v1");
    keep("propose.json", &proposed);
    let found = call(&["loop", "--budget", "4", "--out", "s"]).succeeds("amk.loop.v1");
    keep("loop.json", &found);
    let judged = call(&["evaluate", "--config", "propose.json"]).succeeds("amk.verdict.v2");
    assert_eq!(judged["schedule_id"], proposed["schedule_id"]);
    let judged = call(&["evaluate", "--config", "loop.json"]).succeeds("amk.verdict.v2");
    assert_eq!(judged["schedule_id"], found["best_verdict"]["schedule_id"]);
    let inline = super::evaluate(proposed.to_string().as_bytes()).succeeds("amk.verdict.v2");
    assert_eq!(inline["schedule_id"], proposed["schedule_id"]);
    // A verdict holds only the schedule's id.
    keep("verdict.json", &judged);
    let verdict = call(&["evaluate", "--config", "verdict.json"]);
    verdict.fails(2, &["amk.verdict.v2 without a schedule", "amk.propose.v1"]);
}

#[test]
fn a_long_value_is_repeated_in_part() {
    let long = json!({"pipeline": {"stages": "9".repeat(100_000)}, "kernel": {"evict": "e".repeat(9_000)}});
    let ran = super::evaluate(long.to_string().as_bytes());
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stdout.len() < 8_000, "{} bytes", ran.stdout.len());
    let value = ran.json()["violations"][0]["value"].as_str().unwrap().to_owned();
    assert!(value.starts_with("999") && value.ends_with("(100000 bytes)"), "{value}");
}
