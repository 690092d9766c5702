//! Compares telemetry with the requests sent: a server on the reference VM, `amk top --once --json` and `/metrics`. In
//! `tests/serve/client.py`, Prometheus's own parser reads the latter, and a terminal shows the former.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::serve::Server;
use super::{Ran, command, folder, ran};

/// The time limit of every wait.
const PATIENCE: Duration = Duration::from_secs(30);

fn top(runtime: &Path, arguments: &[&str]) -> Ran {
    let mut command = command(runtime, &[&["top"], arguments].concat());
    ran(command.env("XDG_RUNTIME_DIR", runtime).output().unwrap())
}

fn look(runtime: &Path) -> Value {
    top(runtime, &["--once", "--json", "--every", "50"]).succeeds("amk.top.v2")
}

/// Polls until the condition holds.
fn until(runtime: &Path, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let seen = look(runtime);
        if is(&seen) {
            return seen;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: {seen}");
    }
}

/// The value of a metric, labels included in its name.
fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
}

fn ask(server: &Server, prompt: usize, limit: u64, tier: &str) -> (u64, u64, String) {
    let prompt: Vec<usize> = (1..=prompt).collect();
    let fields = json!({"model": "toy", "prompt": prompt, "max_tokens": limit, "temperature": 0.8, "seed": 3, "service_tier": tier});
    let answer = server.complete(fields).json();
    let count = |field: &str| answer["usage"][field].as_u64().unwrap();
    let finish = answer["choices"][0]["finish_reason"].as_str().unwrap().to_owned();
    (count("prompt_tokens"), count("completion_tokens"), finish)
}

#[test]
fn who_is_not_there_is_told_what_to_do() {
    let home = folder();
    top(home.path(), &["--once"]).fails(3, &["no running amk", "amk serve", "XDG_RUNTIME_DIR"]);
    top(home.path(), &["--once", "--pid", "1"]).fails(3, &["process 1 has no page", "none"]);
    top(home.path(), &["--json"]).fails(3, &["no running amk"]);
}

#[test]
fn figures_are_what_was_sent() {
    let home = folder();
    let runtime = home.path();
    let file = runtime.join("metrics.txt");
    let arguments =
        ["--model", "toy", "--device", "cpu", "--sessions", "2", "--kv-capacity", "2048"];
    let metrics = ["--metrics", "127.0.0.1:0", "--metrics-every", "1", "--metrics-file"];
    let arguments = [&arguments[..], &metrics, &[file.to_str().unwrap()]].concat();
    let mut server = Server::start_in(&arguments, Some(runtime));
    let pid = server.document["pid"].as_u64().unwrap();
    let page = runtime.join(format!("amk/{pid}.telemetry"));
    assert_eq!(std::fs::metadata(&page).unwrap().permissions().mode() & 0o777, 0o600);
    top(runtime, &["--every", "50"]).fails(2, &["no terminal", "--once"]);

    let sent = [
        ask(&server, 3, 9, "default"),
        ask(&server, 40, 5, "flex"),
        ask(&server, 1, 1, "priority"),
    ];
    server
        .complete(json!({"model": "toy", "prompt": [1], "max_tokens": -1}))
        .refuses(400, Some("max_tokens"));
    let seen = until(runtime, "all have left", |seen| seen["occupancy"]["empty"] == 2);
    // The last token of each is sampled and not fed.
    let positions: u64 = sent.iter().map(|(prompt, chosen, _)| prompt + chosen - 1).sum();
    let tokens: u64 = sent.iter().map(|(_, chosen, _)| chosen).sum();
    let ended = |how: &str| sent.iter().filter(|(.., finish)| finish == how).count() as u64;
    let totals = &seen["totals"];
    assert_eq!(
        (&totals["tokens"], &totals["positions"]),
        (&json!(tokens), &json!(positions)),
        "{seen}"
    );
    assert_eq!((&totals["opened"], &totals["steps"]), (&json!(3), &json!(positions)), "{seen}");
    assert_eq!((&totals["faults"], &seen["waiting"]), (&json!(0), &json!(0)));
    assert_eq!(seen["endings"]["length"], ended("length"), "{seen}");
    assert_eq!(seen["endings"]["stop"], ended("stop"), "{seen}");
    for (index, priority) in ["normal", "low", "high"].into_iter().enumerate() {
        let (prompt, chosen, _) = &sent[index];
        assert_eq!(seen["priority_tokens"][priority], *chosen, "{seen}");
        assert_eq!(seen["priority_positions"][priority], prompt + chosen - 1, "{seen}");
    }
    let turns = totals["turns"].as_u64().unwrap();
    assert_eq!(
        totals["requeues"],
        turns - 3,
        "every turn but a sequence's last is followed by another"
    );
    assert_eq!(
        (&seen["commands"]["published"], &seen["commands"]["drained"]),
        (&json!(turns), &json!(turns))
    );
    assert_eq!(
        (&seen["activity"], &seen["silent"], &seen["pid"]),
        (&json!("idle"), &Value::Null, &json!(pid))
    );
    let telemetry = &seen["telemetry"];
    assert!(telemetry["ns_per_write"].as_u64().unwrap() > 0, "{telemetry}");
    assert!(
        seen["since_start"]["p50_us"].as_f64() <= seen["since_start"]["p99_us"].as_f64(),
        "{seen}"
    );

    scraped(&server, &file, tokens, positions);
    cancelled(&server, runtime, tokens);
    server.interrupt();
    assert_eq!(server.end(), 0);
    assert!(!page.exists(), "a page goes with its process");
    top(runtime, &["--once"]).fails(3, &["no running amk"]);
}

/// The same figures as text, from the listener and from the file.
fn scraped(server: &Server, file: &Path, tokens: u64, positions: u64) {
    let url = server.document["metrics"].as_str().unwrap();
    let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let answer = server.at(address, "GET /metrics HTTP/1.0");
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("application/openmetrics-text; version=1.0.0"), "{}", answer.head);
    assert_eq!(server.at(address, "GET /v1/models HTTP/1.0").status, 404, "figures only");
    let began = Instant::now();
    let written = loop {
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.ends_with("# EOF\n"), "the file is whole whenever it is read");
        let empty = metric(&text, "amk_occupancy{state=\"empty\"}");
        if empty > 1.5 && metric(&text, "amk_turns_total") > 2.5 {
            break text;
        }
        assert!(began.elapsed() < PATIENCE, "{text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    for text in [&answer.body, &written] {
        let by = |name: &str| {
            ["low", "normal", "high"].map(|p| metric(text, &format!("{name}{{priority=\"{p}\"}}")))
        };
        assert!((by("amk_tokens_total").iter().sum::<f64>() - tokens as f64).abs() < 0.5, "{text}");
        assert!(
            (by("amk_positions_total").iter().sum::<f64>() - positions as f64).abs() < 0.5,
            "{text}"
        );
        assert!(
            (metric(text, "amk_step_duration_seconds_count") - positions as f64).abs() < 0.5,
            "{text}"
        );
        assert!((metric(text, "amk_sequences_opened_total") - 3.0).abs() < 0.5, "{text}");
    }
}

/// A running sequence is shown, and one whose client disconnects is counted as cancelled.
fn cancelled(server: &Server, runtime: &Path, tokens: u64) {
    let fields = json!({"model": "toy", "prompt": [5, 6], "max_tokens": 2000, "stream": true, "temperature": 0, "logit_bias": {"1": -100, "2": -100}});
    let mut stream = server.send(
        "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json",
        &fields.to_string(),
    );
    stream.read_exact(&mut [0; 64]).unwrap();
    let seen = until(runtime, "it runs", |seen| seen["sessions"][0]["tokens"].as_u64() > Some(0));
    assert_eq!(seen["sessions"][0]["positions_max"], 2002, "{seen}");
    assert_eq!(seen["endings"]["cancelled"], 0);
    drop(stream);
    let seen = until(runtime, "it has left", |seen| seen["endings"]["cancelled"] == 1);
    assert_eq!(seen["sessions"], json!([]));
    assert!(seen["totals"]["tokens"].as_u64().unwrap() > tokens);
}

#[test]
fn a_line_per_look_until_the_process_ends_or_nobody_reads() {
    let home = folder();
    let runtime = home.path();
    let toy = ["--model", "toy", "--device", "eval"];
    let server = Server::start_in(&toy, Some(runtime));
    let watch = |every: &str| {
        let mut command = command(runtime, &["top", "--json", "--every", every]);
        command.env("XDG_RUNTIME_DIR", runtime).stdout(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let ends = |mut child: std::process::Child| {
        let began = Instant::now();
        loop {
            match child.try_wait().unwrap() {
                Some(status) => return status,
                None if began.elapsed() > PATIENCE => panic!("it goes on"),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    };
    let mut unread = watch("50");
    drop(unread.stdout.take());
    assert!(ends(unread).success(), "nobody reads");
    let mut child = watch("50");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut look = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let (first, second) = (look(), look());
    assert_eq!((&first["schema"], &first["pid"]), (&json!("amk.top.v2"), &second["pid"]));
    assert!(first["uptime_s"].as_f64() < second["uptime_s"].as_f64(), "{first} {second}");
    drop(server);
    for line in lines.by_ref().map(Result::unwrap) {
        assert!(serde_json::from_str::<Value>(&line).is_ok(), "{line}");
    }
    assert!(ends(child).success(), "the process has ended");
}

#[test]
fn a_search_without_a_gpu_is_shown_until_it_ends() {
    let home = folder();
    let runtime = home.path();
    let args = ["loop", "--model", "toy", "--device", "cpu", "--budget", "20000", "--quiet"];
    let mut command = command(runtime, &args);
    command.env("XDG_RUNTIME_DIR", runtime);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    let seen = loop {
        let ran = top(runtime, &["--once", "--json", "--every", "50"]);
        let seen = if ran.code == 0 { ran.json() } else { Value::Null };
        if seen["search"]["trials"].as_u64() > Some(1) {
            break seen;
        }
        assert!(began.elapsed() < PATIENCE, "no trial: {}", ran.stderr);
    };
    assert_eq!((&seen["command"], &seen["device"]), (&json!("search"), &json!("cpu")));
    assert_eq!((&seen["model"], &seen["activity"]), (&json!("toy"), &json!("running")));
    assert!(seen["search"]["best_us"].as_f64() > Some(1.0), "{seen}");
    let shown = top(runtime, &["--once"]).stdout;
    assert!(shown.contains("trials ") && shown.contains("predicted"), "{shown}");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    top(runtime, &["--once"]).fails(3, &["no running amk"]);
}
