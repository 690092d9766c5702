//! `amk diff`, `amk report` and the diagnosis of a wrong program, on the built binary.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn amk(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.args(args).current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn document(ran: &Output, code: i32) -> Value {
    let error = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(code), "{error}");
    serde_json::from_slice(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {error}"))
}

fn write(folder: &Path, name: &str, config: &Value) {
    std::fs::write(folder.join(name), config.to_string()).unwrap();
}

#[test]
fn schedules_are_compared_knob_by_knob() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.json", &json!({"pipeline": {"stages": 4}}));
    write(
        dir.path(),
        "b.json",
        &json!({"pipeline": {"stages": 6}, "sm_assignment": "round_robin"}),
    );
    write(dir.path(), "c.json", &json!({"kernel": {"evict": "normal"}, "pipeline": {"stages": 4}}));
    let differ = |a: &str, b: &str, more: &[&str]| {
        let ran = amk(dir.path(), &[&["diff", a, b][..], more].concat());
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        (document(&ran, 0), said)
    };
    let (same, said) = differ("a.json", "a.json", &[]);
    assert_eq!(
        (&same["same"], &same["acts_on"], &same["knobs"]),
        (&json!(true), &json!("nothing"), &json!([]))
    );
    assert!(said.contains("are the same"), "{said}");

    let (tables, said) = differ("a.json", "b.json", &["--json"]);
    assert_eq!((&tables["same"], &tables["acts_on"]), (&json!(false), &json!("program")));
    let knobs = tables["knobs"].as_array().unwrap();
    assert_eq!(knobs.len(), 2);
    assert_eq!(
        (&knobs[1]["knob"], &knobs[1]["a"], &knobs[1]["b"]),
        (&json!("pipeline.stages"), &json!(4), &json!(6))
    );
    assert!(
        said.contains("pipeline.stages: 4 -> 6 (program)")
            && said.contains("new tables are uploaded"),
        "{said}"
    );
    assert_eq!(differ("a.json", "c.json", &[]).0["acts_on"], "kernel");

    let (lowered, _) = differ("a.json", "b.json", &["--model", "toy"]);
    let lowered = &lowered["lowered"];
    assert_ne!(lowered["program_ids"][0], lowered["program_ids"][1]);
    assert_eq!(lowered["kernel_ids"][0], lowered["kernel_ids"][1]);
    assert!(lowered["predicted_us"][0].as_f64().unwrap() > 0.0);
    assert_eq!(lowered["programs"]["sizes"]["ring.stages"], json!([4, 6]));

    write(dir.path(), "bad.json", &json!({"pipeline": {"stages": 99, "stage": 1}}));
    let refused = document(&amk(dir.path(), &["diff", "a.json", "bad.json"]), 1);
    let message = refused["message"].as_str().unwrap();
    assert!(
        message.contains("bad.json")
            && message.contains("pipeline.stages")
            && message.contains("pipeline.stage:"),
        "{message}"
    );
}

#[test]
fn programs_are_compared_task_by_task() {
    let dir = tempfile::tempdir().unwrap();
    // From the neutral schedule, whose phases have one task for each of many workers.
    let lower = |name: &str, change: Value| {
        let mut config = json!(ir::ScheduleConfig::default());
        for (path, value) in change.as_object().unwrap() {
            *config.pointer_mut(path).expect("a knob") = value.clone();
        }
        write(dir.path(), "config.json", &config);
        let args =
            ["lower", "--model", "toy", "--device", "cpu", "--config", "config.json", "-o", name];
        assert!(amk(dir.path(), &args).status.success());
    };
    lower("a.amkp", json!({}));
    lower("a.amk", json!({}));
    lower("moved.amkp", json!({"/sm_assignment": "carry"}));
    lower("flag-in-data.amkp", json!({"/sync/qkv": "flag_in_data"}));
    lower("rows.amkp", json!({"/tiling/down/rows": 8}));
    let tasks = |b: &str| document(&amk(dir.path(), &["diff", "a.amkp", b]), 0)["programs"].clone();

    let same = document(&amk(dir.path(), &["diff", "a.amkp", "a.amk"]), 0);
    assert_eq!((&same["same"], &same["kind"]), (&json!(true), &json!("programs")));
    let all = &same["programs"]["tasks"];
    assert_eq!((&all["a"], &all["same"]), (&all["b"], &all["a"]), "{all}");
    assert_eq!(
        (&same["programs"]["by_opcode"], &same["programs"]["examples"]),
        (&json!({}), &json!([]))
    );

    let count = |diff: &Value, what: &str| diff["tasks"][what].as_u64().unwrap();
    let moved = tasks("moved.amkp");
    assert!(count(&moved, "moved") > 0 && count(&moved, "added") == 0, "{moved}");
    assert_eq!(count(&moved, "buffers"), 0);
    let flag_in_data = tasks("flag-in-data.amkp");
    assert!(
        count(&flag_in_data, "buffers") > 0 && count(&flag_in_data, "sync") > 0,
        "{flag_in_data}"
    );
    assert_eq!(
        (
            count(&flag_in_data, "added"),
            count(&flag_in_data, "removed"),
            count(&flag_in_data, "moved")
        ),
        (0, 0, 0),
        "{flag_in_data}"
    );
    let rows = tasks("rows.amkp");
    assert!(count(&rows, "added") > 0 && count(&rows, "removed") > 0, "{rows}");
    assert!((1..=16).contains(&rows["examples"].as_array().unwrap().len()));
    for diff in [moved, flag_in_data, rows] {
        let of_a = count(&diff, "same") + count(&diff, "removed");
        assert!(of_a <= count(&diff, "a"), "{diff}");
    }

    write(dir.path(), "c.json", &json!({}));
    let refused = document(&amk(dir.path(), &["diff", "a.amkp", "c.json"]), 2);
    assert!(refused["message"].as_str().unwrap().contains("a program and a schedule"), "{refused}");
}

/// A whole search on a model whose name is an HTML element.
#[test]
fn a_report_is_one_page_that_a_name_cannot_break_out_of() {
    let dir = tempfile::tempdir().unwrap();
    let hostile = "<img src=x onerror=alert(1)>";
    assert!(amk(dir.path(), &["export", "--model", "toy", "--out", hostile]).status.success());
    let args = [
        "loop",
        "--schedule",
        "neutral",
        "--model",
        hostile,
        "--device",
        "cpu",
        "--kv-capacity",
        "16",
        "--budget",
        "5",
        "--out",
        "<b>run",
    ];
    document(&amk(dir.path(), &args), 0);
    let written = document(&amk(dir.path(), &["report", "<b>run", "--out", "page.html"]), 0);
    assert_eq!((&written["schema"], &written["trials"]), (&json!("amk.report.v1"), &json!(5)));
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert_eq!(written["bytes"], page.len());
    assert!(
        page.contains("&lt;img src=x") && !page.contains("<img") && !page.contains("<b>run"),
        "{page}"
    );
    for part in [
        "Progress",
        "Kept and reverted",
        "What each knob was worth",
        "beside the start",
        "How to reproduce",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(page.contains("predicted latency, us per token") && !page.contains("measured latency"));
    assert!(!page.contains("does not hold"));
    // The page gives the commands that check the search and repeat it.
    let command = page.lines().find(|line| line.starts_with("amk loop ")).unwrap();
    assert!(command.contains("--budget 5") && command.contains("--kv-capacity 16"), "{command}");

    // A tampered ledger is refused.
    let ledger = dir.path().join("<b>run/ledger.jsonl");
    let text = std::fs::read_to_string(&ledger).unwrap().replacen(
        "\"correct\":true",
        "\"correct\":false",
        1,
    );
    std::fs::write(&ledger, text).unwrap();
    document(&amk(dir.path(), &["report", "<b>run"]), 4);
    assert!(!dir.path().join("report.html").exists());
    document(&amk(dir.path(), &["report", "nowhere"]), 2);
}

#[test]
fn the_first_task_that_goes_wrong_is_named_and_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let amk = |args: &[&str]| amk(dir.path(), args);
    let lower = ["lower", "--model", "toy-2l", "--kv-capacity", "32", "--device", "cpu"];
    document(&amk(&[&lower[..], &["-o", "right.amk"]].concat()), 0);
    let text = std::fs::read_to_string(dir.path().join("right.amk")).unwrap();
    // Another scale in one layer, which `verify` cannot detect.
    let edit = |line: &str| match line.contains("attention layer=1") {
        true => line.replacen("scale=0.25", "scale=0.5", 1),
        false => line.to_owned(),
    };
    let wrong: String = text.lines().map(|line| edit(line) + "\n").collect();
    assert_ne!(wrong, text);
    std::fs::write(dir.path().join("wrong.amk"), wrong).unwrap();

    let right = document(&amk(&["interpret", "right.amk", "--model", "toy-2l"]), 0);
    assert_eq!((&right["correct"], &right["first_divergence"]), (&json!(true), &Value::Null));
    let ran = amk(&["interpret", "wrong.amk", "--model", "toy-2l"]);
    let found = document(&ran, 1)["first_divergence"].clone();
    assert_eq!((&found["class"], &found["by"]), (&json!("wrong"), &json!("reference")));
    let task = (&found["task"]["opcode"], &found["task"]["layer"], &found["buffer"]);
    assert_eq!(task, (&json!("attention"), &json!(1), &json!("layers.1.partials")), "{found}");
    assert!(found["ulp"].as_u64().unwrap() > 0 && found["got"] != found["want"], "{found}");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    let command = found["rerun"].as_str().unwrap();
    assert!(said.contains("first divergence: ") && said.contains(command), "{said}");

    // The command is one line that runs as it is, and separates the task's words from the expected ones.
    let words: Vec<&str> = command.split_whitespace().collect();
    assert_eq!(words[0], "amk");
    let again = document(&amk(&words[1..]), 1);
    assert_eq!(again["schema"], "amk.rerun.v2");
    assert_eq!((&again["task"], &again["repeatable"]), (&found["task"], &json!(true)));
    assert_eq!(again["words"][0]["buffer"], found["buffer"]);
    let index = |document: &Value| document["index"].clone();
    let shown = again["words"].as_array().unwrap();
    assert!(shown.iter().any(|word| index(word) == index(&found)), "{again}");
    // The same task of the correct program, and tasks that do not exist.
    let right: Vec<&str> =
        words[1..].iter().map(|w| if *w == "wrong.amk" { "right.amk" } else { w }).collect();
    assert_eq!(document(&amk(&right), 0)["n_wrong"], 0);
    let task = format!("{}:99", found["task"]["worker"]);
    let none = ["rerun", "--model", "toy-2l", "--program", "right.amk", "--task", &task];
    let refused = document(&amk(&none), 2);
    assert!(refused["message"].as_str().unwrap().contains("amk disasm"), "{refused}");
}

#[test]
fn a_saved_program_is_judged_as_strictly_as_a_search_judges() {
    let dir = tempfile::tempdir().unwrap();
    let amk = |args: &[&str]| amk(dir.path(), args);
    for model in ["toy", "toy-2l"] {
        let lower = ["lower", "--model", model, "--kv-capacity", "256", "--device", "cpu"];
        document(&amk(&[&lower[..], &["-o", "right.amk"]].concat()), 0);
        let right = document(&amk(&["interpret", "right.amk", "--model", model]), 0);
        assert_eq!(right["scope"], "142 positions and 2 from position 223 on");
        let fed = right["tokens"].as_array().unwrap().len();
        assert_eq!((fed, right["next_tokens"].as_array().unwrap().len()), (144, 144));

        // Errors of 1e-5, which a comparison of a few tokens within 2e-4 does not detect.
        let text = std::fs::read_to_string(dir.path().join("right.amk")).unwrap();
        let edits: [(&str, &[(&str, &str)]); 5] = [
            (
                "a window",
                &[
                    ("scale=0.25", "scale=0.25 window=8"),
                    (" kv_block=128 reads", " kv_block=128 window=8 reads"),
                ],
            ),
            ("another epsilon", &[("eps=1e-5", "eps=1e-4")]),
            ("no epsilon", &[("eps=1e-5", "eps=0")]),
            ("another epsilon behind the last layer", &[("logits eps=1e-5", "logits eps=1e-3")]),
            ("another scale", &[("scale=0.25", "scale=0.250025")]),
        ];
        for (name, edits) in edits {
            let edited = edits.iter().fold(text.clone(), |text, (from, to)| text.replace(from, to));
            assert_ne!(edited, text, "{name}");
            std::fs::write(dir.path().join("wrong.amk"), edited).unwrap();
            document(&amk(&["verify", "wrong.amk"]), 0);
            let refused = document(&amk(&["interpret", "wrong.amk", "--model", model]), 1);
            assert_eq!(refused["correct"], false, "{name} of {model}: {refused}");
            assert_eq!(refused["first_divergence"]["class"], "wrong", "{name}: {refused}");
        }
        // Tokens given on the command line are compared within the rounding bound.
        let few = ["interpret", "right.amk", "--model", model, "--tokens", "1,2,3,4,5,6,7,8,9,10"];
        assert_eq!(document(&amk(&few), 0)["scope"], "10 positions");
    }
}

#[test]
fn a_model_without_a_logit_that_stands_out_proves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    document(&amk(dir.path(), &["export", "--model", "toy", "--out", "zero"]), 0);
    let path = dir.path().join("zero/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let place = ["--model", "zero", "--device", "cpu", "--kv-capacity", "16"];
    let evaluate = [&["evaluate"], &place[..]].concat();
    let search =
        [&["loop", "--budget", "2", "--out", "run", "--store", "none"], &place[..]].concat();
    for args in [evaluate, search] {
        let refused = document(&amk(dir.path(), &args), 2);
        let message = refused["message"].as_str().unwrap();
        assert!(message.contains("all its logits are equal"), "{message}");
    }
}

#[test]
fn a_schedule_may_be_written_on_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let evaluate = |config: &str| {
        let args = ["evaluate", "--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
        amk(dir.path(), &[&args[..], &["--config", config]].concat())
    };
    write(dir.path(), "a.json", &json!({"pipeline": {"stages": 4}}));
    let (file, inline) = (evaluate("a.json"), evaluate(r#"{"pipeline": {"stages": 4}}"#));
    assert_eq!(document(&file, 0), document(&inline, 0));
    assert_eq!(document(&file, 0)["first_divergence"], Value::Null);
    assert!(document(&evaluate(r#"{"pipeline": 4"#), 2)["message"].is_string());
}
