//! Inputs that are refused before anything runs or is overwritten, and their errors.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Ran, amk, amk_in, command, folder, golden, ran, search, timeless};

/// Runs `amk` with an argument that is not UTF-8.
fn with_bytes(folder: &Path, args: &[&str], last: &[u8]) -> Ran {
    let mut command = command(folder, args);
    ran(command.arg(OsStr::from_bytes(last)).output().unwrap())
}

#[test]
fn an_argument_that_json_cannot_name_is_refused_before_anything_runs() {
    let dir = folder();
    let toy = ["loop", "--model", "toy", "--device", "cpu", "--budget", "2", "--out"];
    with_bytes(dir.path(), &toy, b"s\xff").fails(2, &["not UTF-8", "rename"]);
    with_bytes(dir.path(), &["runs", "verify"], b"s\xff").fails(2, &["not UTF-8"]);
    with_bytes(dir.path(), &["export", "--model", "toy", "--out"], b"\xff")
        .fails(2, &["not UTF-8"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something was written");
}

#[test]
fn a_search_begins_in_a_folder_of_its_own() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("mine")).unwrap();
    std::fs::write(dir.path().join("mine/best.json"), "precious").unwrap();
    search(dir.path(), &["--budget", "2", "--out", "mine"])
        .fails(2, &["mine is not empty", "best.json", "--out"]);
    let kept = std::fs::read_to_string(dir.path().join("mine/best.json")).unwrap();
    assert_eq!(kept, "precious");
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    search(dir.path(), &["--budget", "2", "--out", "empty"]).succeeds("amk.loop.v1");
}

#[test]
fn a_page_is_written_over_another_only_with_force() {
    let dir = folder();
    search(dir.path(), &["--budget", "2", "--out", "s"]).succeeds("amk.loop.v1");
    std::fs::write(dir.path().join("page.html"), "precious").unwrap();
    let report = ["report", "s", "--out", "page.html"];
    amk_in(dir.path(), &report).fails(2, &["page.html exists", "--force"]);
    let page = || std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert_eq!(page(), "precious");
    amk_in(dir.path(), &[&report[..], &["--force"]].concat()).succeeds("amk.report.v1");
    assert!(page().contains("<svg"));
}

#[test]
fn a_trace_that_finds_no_room_leaves_no_half_file() {
    let dir = folder();
    // The limit is in blocks of 512 or 1024 bytes; the signal is ignored, so that the write itself fails.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\"";
    let trace = "trace --model toy --device cpu --kv-capacity 256 --perfetto a.json";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_amk")]).args(trace.split(' '));
    let ran = ran(command.current_dir(dir.path()).stdin(Stdio::null()).output().unwrap());
    ran.fails(2, &["cannot write a.json"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something is left");
}

#[test]
fn a_context_beyond_the_cache_is_refused_by_trace_too() {
    let args = ["trace", "--model", "toy", "--device", "cpu", "--context", "4294967295"];
    amk(&args).fails(2, &["--context 4294967295", "--kv-capacity"]);
}

#[test]
fn a_name_of_any_length_is_answered_in_a_few_words() {
    let long = "x".repeat(100_000);
    let ran = amk(&["explain", &long]);
    ran.fails(2, &["xxx...", "(100000 bytes)"]);
    assert!(ran.stdout.len() < 1_000, "{} bytes", ran.stdout.len());
}

#[test]
fn a_name_of_the_hub_gets_the_command_that_downloads_it_and_no_preset() {
    let ran = amk(&["evaluate", "--model", "Qwen/Qwen3-0.6B"]);
    let command = "hf download Qwen/Qwen3-0.6B";
    ran.fails(
        3,
        &["HF_HUB_OFFLINE", command, "--local-dir Qwen3-0.6B", "models--Qwen--Qwen3-0.6B"],
    );
    assert!(!ran.stderr.contains("qwen3-0.6b"), "{}", ran.stderr);
}

#[test]
fn a_config_without_weights_is_scheduled_and_predicted_for_and_no_more() {
    let dir = super::folder();
    let config = dir.path().join("config.json");
    std::fs::copy(golden("llama3-rope-bf16").join("config.json"), &config).unwrap();
    let whole = golden("llama3-rope-bf16").display().to_string();
    for name in [config.display().to_string(), dir.path().display().to_string()] {
        let of = |command: &[&str], name: &str| {
            let cpu = ["--device", "cpu", "--kv-capacity", "64"];
            amk(&[command, &["--model", name], &cpu].concat())
        };
        let ids = |name: &str| {
            let lowered = of(&["lower"], name).succeeds("amk.lower.v2");
            (lowered["schedule_id"].clone(), lowered["tasks"].clone())
        };
        assert_eq!(ids(&name), ids(&whole), "the same shape gives the same program");
        let proposed = of(&["propose"], &name);
        assert!(proposed.stderr.contains("has no weights"), "{}", proposed.stderr);
        let schedule = |ran: super::Ran| ran.succeeds("amk.propose.v1")["schedule_id"].clone();
        assert_eq!(schedule(proposed), schedule(of(&["propose"], &whole)));
        of(&["trace", "--context", "8"], &name).succeeds("amk.trace.v2");
        let bench = of(&["bench", "--context", "8"], &name).succeeds("amk.bench.v1");
        assert!(bench["notes"].to_string().contains("no weights"), "{}", bench["notes"]);
        let generate = ["generate", "--tokens", "1"];
        let command: [&[&str]; 2] = [&generate, &["evaluate"]];
        for command in command {
            let refused = of(command, &name);
            assert_eq!(refused.code, 2, "{}", refused.stderr);
        }
    }
}

#[test]
fn a_model_with_experts_is_lowered_and_run_like_any_other() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/families/gpt-oss-bf16");
    let of = |command: &[&str]| amk(&[command, &["--model", model]].concat());
    of(&["lower", "--kv-capacity", "64"]).succeeds("amk.lower.v2");
    let config = format!("{model}/config.json");
    for proposed in [of(&["propose"]), amk(&["propose", "--model", &config])] {
        let said = proposed.stderr.clone();
        proposed.succeeds("amk.propose.v1");
        assert!(said.contains("A step reads 0.5 MB of the 0.7 MB of weights"), "{said}");
    }
    let tokens = |device: &str| {
        let run = ["generate", "--tokens", "17,40,251", "--max-new-tokens", "4"];
        let run = [&run[..], &["--device", device]].concat();
        of(&run).succeeds("amk.generate.v1")["tokens"].clone()
    };
    assert_eq!(tokens("cpu"), tokens("eval"));
}

#[test]
fn a_prediction_for_a_card_without_a_kernel_says_so() {
    let notes = |target: &str| {
        let args = ["evaluate", "--model", "toy", "--device", "cpu", "--target", target];
        amk(&args).succeeds("amk.verdict.v2")["notes"].to_string()
    };
    assert!(notes("l40s").contains("no kernel for sm_89; rates from H200"), "{}", notes("l40s"));
    for target in ["h200", "h100", "gh200"] {
        assert!(!notes(target).contains("no kernel"), "{target}: {}", notes(target));
    }
}

#[test]
fn one_violation_is_counted_as_one() {
    let one = super::evaluate(br#"{"pipeline": {"stages": 0}}"#);
    assert!(one.stderr.contains("rejected: 1 violation\n"), "{}", one.stderr);
    let two = super::evaluate(br#"{"pipeline": {"stages": 0, "stage": 1}}"#);
    assert!(two.stderr.contains("rejected: 2 violations\n"), "{}", two.stderr);
}

#[test]
fn a_prompt_may_come_on_standard_input() {
    let model = golden("llama3-rope-bf16").display().to_string();
    let args = ["generate", "--model", &model, "--max-new-tokens", "2", "--device", "eval"];
    let piped = |more: &[&str]| {
        let mut command = command(&std::env::temp_dir(), &[&args[..], more].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"The sky is\n").unwrap();
        ran(child.wait_with_output().unwrap())
    };
    let given = amk(&[&args[..], &["--prompt", "The sky is"]].concat());
    let given = given.succeeds("amk.generate.v1");
    let piped = piped(&["--prompt", "-"]).succeeds("amk.generate.v1");
    assert_eq!(timeless(piped), timeless(given));
}

#[test]
fn one_standard_input_is_not_read_as_both_a_prompt_and_a_config() {
    let model = golden("llama3-rope-bf16").display().to_string();
    let args = ["generate", "--model", &model, "--device", "cpu", "--prompt", "-", "--config", "-"];
    amk(&args).fails(2, &["--prompt -", "--config -"]);
}

#[test]
fn quiet_and_verbose_are_about_standard_error_alone() {
    let evaluate = |more: &[&str]| {
        let common = ["evaluate", "--model", "toy", "--device", "cpu", "--config"];
        amk(&[&common[..], more].concat())
    };
    let usual = evaluate(&["{}"]);
    assert!(
        usual.stderr.contains("predicted") && !usual.stderr.contains("INFO"),
        "{}",
        usual.stderr
    );
    let quiet = evaluate(&["{}", "-q"]);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (usual.code, ""));
    assert_eq!(quiet.json()["schedule_id"], usual.json()["schedule_id"]);
    let refused = evaluate(&["nowhere.json", "--quiet"]);
    assert!(refused.code == 2 && refused.stderr.contains("nowhere.json"), "{}", refused.stderr);
    let verbose = evaluate(&["{}", "-v"]);
    assert!(
        verbose.stderr.contains("INFO") && verbose.stderr.contains("model opened"),
        "{}",
        verbose.stderr
    );
    let both = evaluate(&["{}", "-q", "-v"]);
    let message = both.json()["message"].to_string();
    assert!(
        both.code == 2 && message.contains("--quiet") && message.contains("--verbose"),
        "{message}"
    );
}
