//! The command line from the outside: the built binary, its documents, its exit codes, and its errors for bad input.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

#[path = "cli_tests/chat.rs"]
mod chat;
#[path = "cli_tests/compatibility.rs"]
mod compatibility;
#[path = "cli_tests/csv.rs"]
mod csv;
#[path = "cli_tests/doctor.rs"]
mod doctor;
#[path = "cli_tests/enough.rs"]
mod enough;
#[path = "cli_tests/feedback.rs"]
mod feedback;
#[path = "cli_tests/gpus.rs"]
mod gpus;
#[cfg(feature = "full")]
#[path = "cli_tests/hub.rs"]
mod hub;
#[path = "cli_tests/inspect.rs"]
mod inspect;
#[path = "cli_tests/interrupts.rs"]
mod interrupts;
#[path = "cli_tests/kv_dtype.rs"]
mod kv_dtype;
#[path = "cli_tests/live.rs"]
mod live;
#[path = "cli_tests/manifest.rs"]
mod manifest;
#[path = "cli_tests/memory.rs"]
mod memory;
#[path = "cli_tests/predecessors.rs"]
mod predecessors;
#[path = "cli_tests/prefill.rs"]
mod prefill;
#[path = "cli_tests/quantised.rs"]
mod quantised;
#[path = "cli_tests/refusals.rs"]
mod refusals;
#[path = "cli_tests/replay.rs"]
mod replay;
#[path = "cli_tests/sanitize.rs"]
mod sanitize;
#[path = "cli_tests/schemas.rs"]
mod schemas;
#[path = "cli_tests/batch.rs"]
mod seqs;
#[path = "serve_tests.rs"]
mod serve;
#[path = "cli_tests/speculate.rs"]
mod speculate;
#[path = "top_tests.rs"]
mod top;
#[path = "cli_tests/trace.rs"]
mod trace;

/// The result of one call of `amk`.
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("{e}: {} / {}", self.stdout, self.stderr))
    }

    /// Asserts the exit code, and for failures that the reason is one line that contains every word.
    #[track_caller]
    fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{} / {}", self.stdout, self.stderr);
        let line = self.stderr.lines().last().unwrap_or_default();
        for word in words {
            assert!(line.contains(word), "{word:?} is not in {line:?}");
        }
        let document = self.json();
        assert_eq!(document["schema"], "amk.error.v1");
        assert_eq!(document["exit_code"], code);
    }

    #[track_caller]
    fn succeeds(&self, schema: &str) -> Value {
        assert_eq!(self.code, 0, "{} / {}", self.stdout, self.stderr);
        let document = self.json();
        assert_eq!(document["schema"], schema);
        document
    }
}

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.args(args).current_dir(folder).env("AMK_DATA", folder).stdin(Stdio::null());
    // No test reaches the network.
    command.env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", folder.join("no-hub"));
    command
}

fn ran(output: Output) -> Ran {
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn amk_in(folder: &Path, args: &[&str]) -> Ran {
    ran(command(folder, args).output().unwrap())
}

fn amk(args: &[&str]) -> Ran {
    amk_in(&std::env::temp_dir(), args)
}

/// `evaluate` on the toy with a config on standard input.
fn evaluate(config: &[u8]) -> Ran {
    let args = ["evaluate", "--model", "toy", "--device", "cpu", "--config", "-"];
    let mut child = command(&std::env::temp_dir(), &args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(config).unwrap();
    ran(child.wait_with_output().unwrap())
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// What `generate` answers without the times that it measured.
fn timeless(mut document: Value) -> Value {
    let times = document.as_object_mut().unwrap().remove("between_tokens_ms");
    assert!(times.is_some());
    document
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/golden").join(name)
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn without_arguments_it_says_what_to_do_first() {
    let ran = amk(&[]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ""));
    assert!(ran.stderr.contains("amk doctor") && ran.stderr.contains("amk loop"));
}

#[test]
fn every_command_has_help_with_examples() {
    let all = amk(&["--help"]);
    let listed = all.stdout.lines().take_while(|line| *line != "Options:");
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next());
    let names: Vec<&str> = names.collect();
    assert!(names.contains(&"trace") && names.contains(&"calibrate"), "{names:?}");
    for name in names {
        let ran = amk(&[name, "--help"]);
        assert_eq!(ran.code, 0);
        assert!(ran.stdout.contains("Examples:"), "{name}");
    }
    for section in ["Use a model:", "Search for a schedule:", "Exit codes:", "Environment:"] {
        assert!(all.stdout.contains(section), "{section}");
    }
    assert_eq!(amk(&["--version"]).stdout.trim(), concat!("amk ", env!("AMK_VERSION")));
}

/// The process that drives a GPU for a search cannot be started by a user.
#[test]
fn a_device_process_serves_its_parent_and_nobody_else() {
    assert!(!amk(&["--help"]).stdout.contains("device-child"));
    amk(&["device-child", "--model", "toy"]).fails(2, &["started by `amk` itself", "socket"]);
    // A parent that hangs up before it has sent anything.
    let (parent, child) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(parent);
    let mut command = command(Path::new("."), &["device-child", "--model", "toy"]);
    let ran = ran(command.stdin(std::os::fd::OwnedFd::from(child)).output().unwrap());
    ran.fails(2, &["no file came"]);
}

#[test]
fn wrong_usage_is_exit_2_with_a_document() {
    for args in [
        &["lop"][..],
        &["evaluate"],
        &["loop", "--budget", "soon"],
        &["generate", "--model", "toy"],
        &["generate", "--model", "toy", "--tokens", "1,x"],
        &["generate", "--model", "toy", "--tokens", "1", "--chat"],
        &["generate", "--model", "toy", "--tokens", "1", "--stream-weights"],
        &["generate", "--model", "toy", "--tokens", "1", "--read-weights-by", "pread"],
    ] {
        let ran = amk(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert_eq!(ran.json()["schema"], "amk.error.v1", "{args:?}");
    }
}

#[test]
fn propose_gives_a_config_and_the_whole_space() {
    let document =
        amk(&["propose", "--model", "toy", "--device", "cpu"]).succeeds("amk.propose.v1");
    let expected =
        "schema model target schedule_config schedule_id predicted search_space".split(' ');
    assert_eq!(keys(&document), expected.collect::<Vec<_>>());
    let predicted =
        ["us_per_token", "bound_us", "chain_us"].map(|us| document["predicted"][us].as_f64());
    let [us, bound, chain] = predicted.map(Option::unwrap);
    assert!(us >= bound && us >= chain && bound > 0.0 && chain > 0.0, "{us} {bound} {chain}");
    assert_eq!((&document["model"], &document["target"]), (&"toy".into(), &"h200".into()));
    for (path, knob) in document["search_space"].as_object().unwrap() {
        assert!(knob.get("choices").is_some() || knob.get("max").is_some(), "{path}");
        for field in ["type", "default", "acts_on", "desc"] {
            assert!(knob.get(field).is_some(), "{path}: {field}");
        }
    }
    let config = serde_json::to_vec(&document["schedule_config"]).unwrap();
    let verdict = evaluate(&config).succeeds("amk.verdict.v2");
    assert_eq!(verdict["schedule_id"], document["schedule_id"]);
}

#[test]
fn a_verdict_has_exactly_the_fields_of_the_contract() {
    let verdict = evaluate(b"{}").succeeds("amk.verdict.v2");
    let expected = "schema valid rejected_reason violations correct max_abs_err max_rel_err top1_agreement latency_us \
                    latency_kind ci_us bound_us pct_of_roofline chain_us schedule_id program_id kernel_id tasks \
                    weight_mb model target device n_buffers n_counters gates notes first_divergence schedule_source";
    assert_eq!(keys(&verdict), expected.split_whitespace().collect::<Vec<_>>());
    assert_eq!(verdict["latency_kind"], "predicted");
    assert_eq!(verdict["device"], "cpu");
    let (latency, bound) = (&verdict["latency_us"], &verdict["bound_us"]);
    let (latency, bound) = (latency.as_f64().unwrap(), bound.as_f64().unwrap());
    let share = verdict["pct_of_roofline"].as_f64().unwrap();
    assert!(latency >= bound && (share - 100.0 * bound / latency).abs() < 1e-9);
    let gates: Vec<&str> =
        verdict["gates"].as_array().unwrap().iter().map(|g| g["gate"].as_str().unwrap()).collect();
    assert_eq!(gates, ["validate", "lower", "verify", "reference"]);
}

#[test]
fn bad_configs_list_every_violation_and_are_exit_1() {
    let ran = evaluate(
        br#"{"pipelin": {"stages": 4}, "kernel": {"poll_sleep_ns": 7, "evict": "banana"}, "tiling": {"qkv": {"rows": "two"}}}"#,
    );
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let verdict = ran.json();
    assert_eq!(verdict["schema"], "amk.verdict.v2");
    assert_eq!(
        (&verdict["valid"], &verdict["correct"], &verdict["latency_us"]),
        (&false.into(), &false.into(), &Value::Null)
    );
    let violations = verdict["violations"].as_array().unwrap();
    assert_eq!(violations.len(), 4, "{violations:?}");
    let unknown = &violations[0];
    assert_eq!(unknown["at"], "pipelin");
    assert!(unknown["suggestion"].as_str().unwrap().contains("pipeline"), "{unknown}");
    for violation in violations {
        for field in ["rule", "at", "value", "legal", "suggestion", "message"] {
            assert!(violation.get(field).is_some(), "{field}: {violation}");
        }
    }
    assert!(verdict["rejected_reason"].as_str().unwrap().contains("poll_sleep_ns"));
}

#[test]
fn absurd_values_are_refused_not_run() {
    for config in [
        r#"{"pipeline": {"stages": 0}}"#,
        r#"{"pipeline": {"stages": 18446744073709551616}}"#,
        r#"{"pipeline": {"stages": -1}}"#,
        r#"{"pipeline": {"stages": 1e300}}"#,
        r#"{"pipeline": {"stages": 26, "stage_bytes": 32768}}"#,
        r#"{"pipeline": {"in_flight_bytes": 8192, "in_flight_before_wait_bytes": 65536}}"#,
        r#"{"kernel": null}"#,
        r#"{"kernel": []}"#,
        "[]",
        "7",
        "null",
    ] {
        let ran = evaluate(config.as_bytes());
        assert!(ran.code == 1 || ran.code == 2, "{config}: {} {}", ran.code, ran.stderr);
        let document = ran.json();
        assert!(document["schema"] == "amk.error.v1" || document["valid"] == false, "{config}");
    }
}

#[test]
fn unreadable_configs_are_exit_2() {
    let deep = "[".repeat(100_000);
    for config in [&b""[..], b"{", b"not json", b"\xff\xfe", deep.as_bytes()] {
        let ran = evaluate(config);
        ran.fails(2, &["standard input"]);
    }
    let dir = folder();
    let here = dir.path().display().to_string();
    let with = |path: &str| amk_in(dir.path(), &["evaluate", "--model", "toy", "--config", path]);
    with("none.json").fails(2, &["none.json", "check the path"]);
    with(&here).fails(2, &[&here]);
}

#[test]
fn bad_models_are_exit_2_and_name_the_place() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let evaluate = |model: &str| amk_in(dir.path(), &["evaluate", "--model", model]);
    evaluate("smolm2-135m").fails(2, &["smollm2-135m"]);
    evaluate("/no/such/folder").fails(2, &["/no/such/folder"]);
    std::fs::write(at("file"), "x").unwrap();
    evaluate("./file").fails(2, &["./file"]);
    std::fs::create_dir(at("empty")).unwrap();
    evaluate("empty").fails(2, &["config.json"]);
    std::fs::create_dir(at("absurd")).unwrap();
    let config = std::fs::read_to_string(golden("llama-tied-f32").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["num_attention_heads"] = 0.into();
    std::fs::write(at("absurd/config.json"), config.to_string()).unwrap();
    evaluate("absurd").fails(2, &["num_attention_heads", "config.json"]);
    std::fs::write(at("absurd/config.json"), "{").unwrap();
    evaluate("absurd").fails(2, &["config.json"]);
    let args = ["evaluate", "--model", "toy", "--target", "h2O0"];
    amk_in(dir.path(), &args).fails(2, &["h2O0", "h200"]);
    let args = ["evaluate", "--model", "toy", "--kv-capacity", "0"];
    amk_in(dir.path(), &args).fails(2, &["--kv-capacity"]);
}

/// Starts from a slow schedule, so that the search finds an improvement.
const LOOP: &[&str] =
    &["loop", "--model", "toy", "--device", "cpu", "--kv-capacity", "16", "--schedule", "neutral"];

fn search(folder: &Path, more: &[&str]) -> Ran {
    amk_in(folder, &[LOOP, more].concat())
}

fn trials(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("ledger.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| row["record"].clone()).filter(|record| record["kind"] == "trial").collect()
}

#[track_caller]
fn assert_each_once(trials: &[Value]) {
    let key = |trial: &Value| {
        let verdict = &trial["verdict"];
        (verdict["program_id"].to_string(), verdict["kernel_id"].to_string())
    };
    let distinct: std::collections::BTreeSet<_> = trials.iter().map(key).collect();
    assert_eq!(distinct.len(), trials.len(), "a trial was repeated");
    for (index, trial) in trials.iter().enumerate() {
        assert_eq!(trial["trial"], index);
    }
}

#[test]
fn a_search_ends_with_its_best_schedule_and_leaves_its_files() {
    let dir = folder();
    let ran = search(dir.path(), &["--budget", "8", "--out", "s"]);
    let document = ran.succeeds("amk.loop.v1");
    for field in [
        "best_verdict",
        "best_config",
        "n_trials",
        "n_raced",
        "n_valid",
        "n_correct",
        "n_kept",
        "n_rejected",
        "results_tsv",
        "ledger",
        "store",
        "stopped_by",
    ] {
        assert!(document.get(field).is_some(), "{field}");
    }
    assert_eq!((&document["n_trials"], &document["stopped_by"]), (&8.into(), &"trials".into()));
    assert!(ran.stderr.contains("kept:") && ran.stderr.contains("champion confirmed"));
    let out = dir.path().join("s");
    let rows = trials(&out);
    assert_eq!(rows.len(), 8);
    assert_each_once(&rows);
    assert_eq!(rows[0]["outcome"], "baseline");
    let table = std::fs::read_to_string(out.join("results.tsv")).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 9);
    assert!(lines[0].starts_with("trial\torigin\toutcome\tlatency_us"));
    let cells = lines[0].split('\t').count();
    assert!(lines.iter().all(|line| line.split('\t').count() == cells));

    let best = out.join("best.json").display().to_string();
    let args = ["evaluate", "--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
    let verdict =
        amk_in(dir.path(), &[&args[..], &["--config", &best]].concat()).succeeds("amk.verdict.v2");
    assert_eq!(verdict["program_id"], document["best_verdict"]["program_id"]);
    let ledger = out.join("ledger.jsonl").display().to_string();
    let proposed = amk(&["propose", "--model", "toy", "--device", "cpu", "--ledger", &ledger])
        .succeeds("amk.propose.v1");
    assert_eq!(proposed["schedule_id"], document["best_verdict"]["schedule_id"]);
}

#[test]
fn a_resumed_search_equals_one_that_never_stopped() {
    let dir = folder();
    search(dir.path(), &["--budget", "12", "--out", "whole"]).succeeds("amk.loop.v1");
    search(dir.path(), &["--budget", "12", "--out", "cut"]).succeeds("amk.loop.v1");
    let cut = dir.path().join("cut/ledger.jsonl");
    let text = std::fs::read_to_string(&cut).unwrap();
    // The header and five trials stay; the sixth is cut in the middle of its line.
    let kept: usize = text.lines().take(6).map(|line| line.len() + 1).sum();
    std::fs::write(&cut, &text[..kept + 40]).unwrap();
    let fifth: Value = serde_json::from_str(text.lines().nth(5).unwrap()).unwrap();
    let head = format!("{{\"rows\":6,\"hash\":{}}}\n", fifth["hash"]);
    std::fs::write(cut.with_extension("head"), head).unwrap();
    std::fs::remove_file(cut.with_file_name("manifest.json")).unwrap(); // as in a run that has not ended
    let again = amk_in(dir.path(), &["loop", "--resume", "--out", "cut"]).succeeds("amk.loop.v1");
    assert_eq!(again["n_trials"], 12);
    let ids = |name: &str| -> Vec<String> {
        let rows = trials(&dir.path().join(name));
        assert_each_once(&rows);
        rows.iter().map(|row| row["verdict"]["schedule_id"].to_string()).collect()
    };
    assert_eq!(ids("whole"), ids("cut"));
    let table = std::fs::read_to_string(dir.path().join("cut/results.tsv")).unwrap();
    assert_eq!(table.lines().count(), 13);

    let done = amk_in(dir.path(), &["loop", "--resume", "--out", "cut"]).succeeds("amk.loop.v1");
    assert_eq!(done["n_trials"], 12);
    let more = amk_in(dir.path(), &["loop", "--resume", "--out", "cut", "--budget", "14"]);
    assert_eq!(more.succeeds("amk.loop.v1")["n_trials"], 14);
}

#[test]
fn searches_without_a_folder_are_numbered_and_the_latest_is_resumed() {
    let dir = folder();
    search(dir.path(), &["--budget", "2"]).succeeds("amk.loop.v1");
    search(dir.path(), &["--budget", "3"]).succeeds("amk.loop.v1");
    assert_eq!(trials(&dir.path().join("runs/0001")).len(), 2);
    let again = amk_in(dir.path(), &["loop", "--resume", "--budget", "4"]);
    assert_eq!(again.succeeds("amk.loop.v1")["n_trials"], 4);
    assert_eq!(trials(&dir.path().join("runs/0002")).len(), 4);
}

#[test]
fn what_cannot_be_continued_or_written_is_said_before_anything_runs() {
    let dir = folder();
    search(dir.path(), &["--budget", "3", "--out", "s"]).succeeds("amk.loop.v1");
    search(dir.path(), &["--out", "s"]).fails(2, &["s/ledger.jsonl", "--resume"]);
    let resume =
        |more: &[&str]| amk_in(dir.path(), &[&["loop", "--resume", "--out", "s"], more].concat());
    resume(&["--seed", "9"]).fails(2, &["--seed"]);
    resume(&["--model", "toy-2l"]).fails(2, &["--model"]);
    resume(&["--device", "cuda"]).fails(2, &["--device"]);
    amk_in(dir.path(), &["loop", "--resume", "--out", "none"]).fails(2, &["none", "--resume"]);
    amk_in(dir.path(), &["loop", "--resume"]).fails(2, &["runs/"]);
    std::fs::write(dir.path().join("plain"), "").unwrap();
    search(dir.path(), &["--out", "plain/s"]).fails(2, &["plain"]);
    search(dir.path(), &["--min-gain", "100", "--out", "v"]).fails(2, &["--min-gain"]);
}

#[test]
fn a_tampered_ledger_is_exit_4() {
    let dir = folder();
    search(dir.path(), &["--budget", "3", "--out", "s"]).succeeds("amk.loop.v1");
    let path = dir.path().join("s/ledger.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let edited = text.replacen("\"outcome\":\"baseline\"", "\"outcome\":\"kept\"", 1);
    assert_ne!(edited, text);
    std::fs::write(&path, edited).unwrap();
    let ran = amk_in(dir.path(), &["loop", "--resume", "--out", "s"]);
    ran.fails(4, &["ledger.jsonl line 2", "edited", "restore the file from a copy"]);
    let ledger = path.display().to_string();
    amk(&["propose", "--model", "toy", "--ledger", &ledger]).fails(4, &["line 2"]);
}

/// Starts a long search and waits until it has finished a few trials.
#[cfg(unix)]
fn under_way(folder: &Path) -> std::process::Child {
    let args = [LOOP, &["--budget", "20000", "--out", "s"]].concat();
    let mut child =
        command(folder, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ledger = folder.join("s/ledger.jsonl");
    for _ in 0..3000 {
        let lines = std::fs::read_to_string(&ledger).unwrap_or_default().lines().count();
        if lines > 4 {
            return child;
        }
        assert!(child.try_wait().unwrap().is_none(), "the search ended early");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    child.kill().unwrap();
    panic!("no trials within 30 s");
}

#[cfg(unix)]
#[test]
fn a_killed_search_loses_nothing_it_acknowledged() {
    let dir = folder();
    let mut child = under_way(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let text = std::fs::read_to_string(dir.path().join("s/ledger.jsonl")).unwrap();
    let finished = text.matches('\n').count() - 1;
    let budget = (finished + 3).to_string();
    let args = ["loop", "--resume", "--out", "s", "--budget", &budget];
    let document = amk_in(dir.path(), &args).succeeds("amk.loop.v1");
    assert_eq!(document["n_trials"], finished + 3);
    assert_each_once(&trials(&dir.path().join("s")));
}

#[cfg(unix)]
#[test]
fn an_interrupted_search_says_how_to_go_on() {
    let dir = folder();
    let child = under_way(dir.path());
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let ran = ran(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    let document = ran.json();
    assert_eq!(document["stopped_by"], "interrupted");
    assert!(ran.stderr.contains("amk loop --resume --out s"), "{}", ran.stderr);
    let done = trials(&dir.path().join("s")).len();
    assert_eq!(document["n_trials"], done);
    let budget = (done + 2).to_string();
    let args = ["loop", "--resume", "--out", "s", "--budget", &budget];
    assert_eq!(amk_in(dir.path(), &args).succeeds("amk.loop.v1")["n_trials"], done + 2);
}

/// Shape of `logits` in a safetensors file.
fn logits_shape(path: &Path) -> Vec<usize> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.tensor("logits").unwrap().shape().to_vec()
}

#[test]
fn the_program_and_the_graph_generate_the_same() {
    let dir = folder();
    let model = golden("llama-tied-f32").display().to_string();
    let bytes = std::fs::read(golden("llama-tied-f32").join("golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |name: &str| -> Vec<i64> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    };
    let tokens: Vec<String> = numbers("tokens").iter().map(ToString::to_string).collect();
    for device in ["cpu", "eval"] {
        let args = [
            "generate",
            "--model",
            &model,
            "--tokens",
            &tokens.join(","),
            "--max-new-tokens",
            "24",
            "--device",
            device,
            "--logits",
            "l.safetensors",
        ];
        let document = amk_in(dir.path(), &args).succeeds("amk.generate.v1");
        let greedy: Vec<i64> =
            document["tokens"].as_array().unwrap().iter().map(|t| t.as_i64().unwrap()).collect();
        assert_eq!(greedy, numbers("greedy"), "{device}");
        assert_eq!(document["text"], Value::Null);
        assert_eq!(logits_shape(&dir.path().join("l.safetensors")), [48 + 23, 256]);
    }
}

#[test]
fn prompts_need_the_right_tokenizer() {
    let model = golden("llama3-rope-bf16").display().to_string();
    let text = std::fs::read_to_string(golden("llama3-rope-bf16").join("text.json")).unwrap();
    let text: Value = serde_json::from_str(&text).unwrap();
    let prompt = &text["prompts"][1];
    let args = ["generate", "--model", &model, "--max-new-tokens", "3", "--device", "cpu"];
    let ran = amk(&[&args[..], &["--prompt", prompt["text"].as_str().unwrap()]].concat());
    let document = ran.succeeds("amk.generate.v1");
    assert_eq!(document["prompt_tokens"], prompt["ids"]);
    assert!(document["text"].is_string());
    let (system, user) = (&text["chat"]["messages"][0], &text["chat"]["messages"][1]);
    let (system, user) = (system["content"].as_str().unwrap(), user["content"].as_str().unwrap());
    let chat = ["--chat", "--system", system, "--prompt", user];
    let document = amk(&[&args[..], &chat].concat()).succeeds("amk.generate.v1");
    assert_eq!(document["prompt_tokens"], text["chat"]["ids"]);

    let none = golden("llama-tied-f32").display().to_string();
    amk(&["generate", "--model", &none, "--prompt", "hi"])
        .fails(2, &["tokenizer.json", "--tokens"]);
    let dir = folder();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama-tied-f32").join(file), dir.path().join(file)).unwrap();
    }
    let foreign = golden("llama3-rope-bf16").join("tokenizer.json");
    std::fs::copy(foreign, dir.path().join("tokenizer.json")).unwrap();
    let model = dir.path().display().to_string();
    amk(&["generate", "--model", &model, "--prompt", "hi"])
        .fails(2, &["tokenizer.json", "another model"]);
}

/// The tokenizer's library panics on these files: that is the file's fault and must not be reported as a bug of amk.
#[test]
fn a_tokenizer_that_contradicts_itself_is_bad_input() {
    let dir = folder();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama3-rope-bf16").join(file), dir.path().join(file)).unwrap();
    }
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz-corpus/tokenizer");
    let found = found.join("special-token-that-is-not-there");
    std::fs::copy(found, dir.path().join("tokenizer.json")).unwrap();
    let model = dir.path().display().to_string();
    amk(&["generate", "--model", &model, "--prompt", "ab", "--device", "cpu"])
        .fails(2, &["tokenizer.json contradict"]);
}

#[test]
fn prompts_that_cannot_run_are_refused_first() {
    let generate =
        |more: &[&str]| amk(&[&["generate", "--model", "toy", "--device", "cpu"], more].concat());
    generate(&["--tokens", "1,256"]).fails(2, &["256", "0 to 255"]);
    generate(&["--tokens", "1,2,3,4,5", "--kv-capacity", "4"]).fails(2, &["--kv-capacity", "5"]);
    let short = ["--tokens", "1,2,3", "--kv-capacity", "8", "--max-new-tokens", "7"];
    generate(&short).fails(2, &["9 positions", "--max-new-tokens"]);
    generate(&["--tokens", "1", "--max-new-tokens", "18446744073709551615"])
        .fails(2, &["positions"]);
    generate(&["--tokens", "1", "--logits", "/no/such/dir/l"]).fails(2, &["/no/such/dir/l"]);
    let none = generate(&["--tokens", "1,2", "--max-new-tokens", "0"]).succeeds("amk.generate.v1");
    assert_eq!(none["tokens"], serde_json::json!([]));
}

#[test]
fn programs_are_saved_read_checked_and_run() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let amk = |args: &[&str]| amk_in(dir.path(), args);
    let lower = |file: &str| {
        amk(&[
            "lower",
            "--model",
            "toy",
            "--device",
            "cpu",
            "--json",
            "--kv-capacity",
            "32",
            "-o",
            file,
        ])
    };
    let id = lower("toy.amkp").succeeds("amk.lower.v2")["program_id"].clone();
    assert_eq!(lower("toy.amk").succeeds("amk.lower.v2")["program_id"], id);
    for file in ["toy.amk", "toy.amkp"] {
        let verified = amk(&["verify", file]).succeeds("amk.verify.v1");
        assert_eq!((&verified["verified"], &verified["program_id"]), (&true.into(), &id));
        let ran = amk(&["interpret", file, "--model", "toy"]).succeeds("amk.interpret.v1");
        assert_eq!((&ran["correct"], &ran["program_id"]), (&true.into(), &id));
    }
    let text = std::fs::read_to_string(at("toy.amk")).unwrap();
    assert_eq!(amk(&["disasm", "toy.amkp"]).stdout.trim_end(), text.trim_end());

    std::fs::write(at("broken.amk"), text.replacen(" signal c0", "", 1)).unwrap();
    let broken = amk(&["verify", "broken.amk"]);
    assert_eq!(broken.code, 1, "{}", broken.stderr);
    assert!(!broken.json()["violations"].as_array().unwrap().is_empty());
    amk(&["interpret", "broken.amk", "--model", "toy"]).fails(1, &["does not verify"]);
    amk(&["interpret", "toy.amk", "--model", "toy-2l"]).fails(2, &["toy-2l"]);
    amk(&["interpret", "toy.amk", "--model", "toy", "--tokens", "999"]).fails(2, &["999"]);
}

#[test]
fn damaged_program_files_are_told_apart() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let amk = |args: &[&str]| amk_in(dir.path(), args);
    let args = ["lower", "--model", "toy", "--device", "cpu", "-o", "toy.amkp"];
    amk(&args).succeeds("amk.lower.v2");
    let whole = std::fs::read(at("toy.amkp")).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for bytes in [&flipped[..], &whole[..whole.len() / 2], &whole[..3], b"", b"hello"] {
        std::fs::write(at("bad.amkp"), bytes).unwrap();
        amk(&["verify", "bad.amkp"]).fails(4, &["bad.amkp"]);
    }
    std::fs::write(at("bad.amk"), "amk 2\nmodel \"toy\"\nnonsense").unwrap();
    amk(&["disasm", "bad.amk"]).fails(2, &["bad.amk"]);
    amk(&["verify", "none.amk"]).fails(2, &["none.amk", "check the path"]);
    amk(&["verify", "toy.txt"]).fails(2, &["toy.txt", ".amkp"]);
    amk(&["lower", "--model", "toy", "-o", "toy.bin"]).fails(2, &["toy.bin"]);
    amk(&["lower", "--model", "toy", "-o", "none/toy.amk"]).fails(2, &["none/toy.amk"]);
    let left = std::fs::read_dir(dir.path()).unwrap();
    assert!(left.map(|e| e.unwrap().file_name()).all(|n| !n.to_string_lossy().contains("partial")));
}

#[test]
fn an_exported_preset_is_a_model_folder() {
    let dir = folder();
    let amk = |args: &[&str]| amk_in(dir.path(), args);
    amk(&["export", "--model", "toy", "--out", "toy-folder"]).succeeds("amk.export.v1");
    let args = ["generate", "--tokens", "1,2,3", "--device", "cpu", "--model"];
    let preset = amk(&[&args[..], &["toy"]].concat()).succeeds("amk.generate.v1");
    let folder = amk(&[&args[..], &["./toy-folder"]].concat()).succeeds("amk.generate.v1");
    assert_eq!(preset["tokens"], folder["tokens"]);
    amk(&["export", "--model", "toy", "--out", "toy-folder"]).fails(2, &["toy-folder"]);
}

#[test]
fn without_a_gpu_bench_predicts_and_says_so() {
    let ran = amk(&["bench", "--model", "toy", "--device", "cpu"]);
    let document = ran.succeeds("amk.bench.v1");
    assert_eq!(document["latency_kind"], "predicted");
    assert!(document["accuracy"].is_null(), "there is no device whose logits could be measured");
    assert!(ran.stderr.contains("not a measurement"));
    for line in ["  model ", "  context ", "  amk ", "  bound ", "  torch-graph ", "  llama.cpp "] {
        assert!(ran.stderr.contains(line), "{line:?} is not in {}", ran.stderr);
    }
    let peers = document["peers"].as_array().unwrap();
    assert!(peers.iter().all(|peer| peer["absent"].is_string()) && peers.len() == 3);
    // A context beyond the default cache makes the cache large enough.
    let deep = ["bench", "--model", "smollm2-135m", "--device", "cpu", "--context", "5000"];
    let document = amk(&deep).succeeds("amk.bench.v1");
    assert_eq!((&document["context"], &document["kv_capacity"]), (&5000.into(), &5032.into()));
    let ran = amk(&["bench", "--model", "toy", "--context", "100000"]);
    ran.fails(2, &["--context"]);
}

#[test]
fn completions_are_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = amk(&["completions", shell]);
        assert!(ran.code == 0 && ran.stdout.contains("evaluate"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_every_command() {
    let page = amk(&["man"]);
    assert!(page.code == 0 && page.stdout.contains(".TH amk"), "{}", page.stderr);
    let dir = folder();
    let written = amk_in(dir.path(), &["man", "--out", "pages", "--json"]).succeeds("amk.man.v1");
    let pages: Vec<&str> =
        written["pages"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in ["amk.1", "amk-evaluate.1", "amk-runs-replay.1", "amk-rerun.1"] {
        assert!(pages.contains(&name), "{name} is not in {pages:?}");
        assert!(
            std::fs::read_to_string(dir.path().join("pages").join(name)).unwrap().contains(".SH")
        );
    }
    // The process that `amk` starts itself is not a command for users.
    assert!(!page.stdout.contains("device-child"), "{}", page.stdout);
}

#[test]
fn explain_knows_every_kind_of_name() {
    for (name, kind) in [
        ("pipeline.stages", "knob"),
        ("r-happens", "rule"),
        ("stalled", "trap"),
        ("4", "exit"),
        ("wait_io", "state"),
        ("unloadable", "outcome"),
        ("ci_us", "field"),
        ("Flag-in-data word", "term"),
    ] {
        let entries = amk(&["explain", name]).succeeds("amk.explain.v1")["entries"].clone();
        assert_eq!(
            (&entries[0]["kind"], entries.as_array().map(Vec::len)),
            (&kind.into(), Some(1))
        );
    }
    amk(&["explain", "pipeline.stagez"]).fails(2, &["pipeline.stages", "amk explain"]);
    let names = amk(&["explain"]).succeeds("amk.explain.v1")["names"].clone();
    assert_eq!(names.as_object().map(serde_json::Map::len), Some(8));
}
