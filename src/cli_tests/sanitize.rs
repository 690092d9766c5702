//! `amk sanitize`, with a compute-sanitizer that prints recorded reports.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;

use super::folder;
use super::schemas::fields;

const FLAG: &str = "========= Error: Race reported between Write access at flag_store(unsigned int *, unsigned int)+0x7a00 in stage.cuh:8
=========     and Read access at flag_load(const unsigned int *)+0x40 in stage.cuh:7 [66896 hazards]
=========     and Read access at flag_load(const unsigned int *)+0x90 in stage.cuh:7 [12 hazards]
=========     and Read access at flag_acquire(const unsigned int *)+0xab50 in stage.cuh:13 [4608 hazards]
=========
========= Error: Race reported between Read access at flag_load(const unsigned int *)+0x5a0 in stage.cuh:7
=========     and Write access at store_if(bool, void *, unsigned int)+0x224d0 in stage.cuh:101 [24 hazards]
=========
";
const STAGED: &str = "========= Error: Race reported between Write access at prefetcher_run(const Worker &)+0x4060 in megakernel.cu:42
=========     and Read access at op_matvec(Worker &, const StagedTask &, Cursor &)+0x7e20 in op_matvec.cuh:570 [27392 hazards]
=========
========= Error: Race reported between Write access at plan_store(StagedTask &, const MatvecPlan &)+0x6c70 in worker.cuh:40
=========     and Read access at plan_of(const StagedTask &)+0x1dbd0 in worker.cuh:44 [100 hazards]
=========
";
const RING: &str = "========= Error: Race reported between Read access at amk_megakernel+0x8660
=========     and Write access at stage_copy_at(unsigned int, unsigned long long, unsigned int, unsigned int, unsigned long long)+0x5cc0 in stage.cuh:62 [107136 hazards]
=========
";
const END: &str = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n";

/// Prints the report of a tool, and ends as it was told to.
const TOOL: &str = r#"#!/bin/sh
[ "$1" = "--tool" ] || exit 7
echo "$@" >> calls
echo "$AMK_DEADLINE_S" >> deadline
cat "$2.report"
exit "$(cat "$2.exit" 2>/dev/null || echo 0)"
"#;

/// Runs `amk sanitize` where each tool says this.
fn sanitize(reports: &[(&str, &str, i32)], more: &[&str]) -> (i32, Value, String) {
    let folder = folder();
    let path = folder.path();
    let tool = path.join("compute-sanitizer");
    std::fs::write(&tool, TOOL).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (name, report, code) in reports {
        std::fs::write(path.join(format!("{name}.report")), report).unwrap();
        std::fs::write(path.join(format!("{name}.exit")), code.to_string()).unwrap();
    }
    let search = format!("{}:{}", path.display(), std::env::var("PATH").unwrap_or_default());
    let ran = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["sanitize", "--json"])
        .args(more)
        .env("PATH", search)
        .current_dir(path)
        .output()
        .unwrap();
    let document = serde_json::from_slice(&ran.stdout).unwrap();
    let calls = std::fs::read_to_string(path.join("calls")).unwrap_or_default();
    // The tools slow a kernel down a thousand times.
    let deadlines = std::fs::read_to_string(path.join("deadline")).unwrap_or_default();
    assert_eq!(deadlines, "120\n".repeat(calls.lines().count()));
    (ran.status.code().unwrap(), document, calls)
}

fn racecheck(report: &str) -> (i32, Value) {
    let (code, document, _) = sanitize(&[("racecheck", report, 0)], &["--tool", "racecheck"]);
    (code, document["tools"][0].clone())
}

#[test]
fn the_three_tools_run_a_model_or_a_program() {
    let clean = "========= ERROR SUMMARY: 0 errors\n";
    let all = [("memcheck", clean, 0), ("synccheck", clean, 0), ("racecheck", END, 0)];
    let (code, document, calls) = sanitize(&all, &["--model", "toy-2l", "--out", "reports"]);
    assert_eq!((code, &document["schema"]), (0, &"amk.sanitize.v1".into()), "{document}");
    assert_eq!(document["tools"][0]["summary"], "ERROR SUMMARY: 0 errors");
    assert_eq!(document["tools"][2]["report"], "reports/racecheck.txt");
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!(calls.len(), 3);
    // To the tool, /proc/self/exe would be the tool.
    let this = format!("{} generate --device cuda --model toy-2l", env!("CARGO_BIN_EXE_amk"));
    assert!(calls.iter().all(|call| call.contains(&this)), "{calls:?}");
    let exits = |call: &&str| call.contains("--error-exitcode 9");
    assert_eq!(calls.iter().filter(|call| exits(call)).count(), 2, "{calls:?}");
    let mut found = fields::Fields::new();
    fields::fields_of(&document, "", &mut found);
    fields::settle([("amk.sanitize.v1".to_owned(), found)].into());

    let program = ["--tool", "memcheck", "--", "./a program", "--its", "argument"];
    let (code, document, calls) = sanitize(&all, &program);
    assert_eq!(code, 0, "{document}");
    assert_eq!(document["command"], serde_json::json!(["./a program", "--its", "argument"]));
    assert!(calls.trim_end().ends_with("./a program --its argument"), "{calls}");
}

#[test]
fn an_error_and_a_program_that_fails_are_told_apart() {
    let (code, document, _) = sanitize(
        &[
            ("memcheck", "========= ERROR SUMMARY: 2 errors\n", 9),
            ("synccheck", "wrong token\n========= ERROR SUMMARY: 0 errors\n", 1),
            ("racecheck", "========= Internal Sanitizer Error\n", 0),
        ],
        &[],
    );
    assert_eq!(code, 1);
    let why = |tool: usize| document["tools"][tool]["why"].as_str().unwrap_or_default();
    assert_eq!(why(0), "it found errors");
    assert!(why(1).contains("the program ended with"), "{document}");
    assert_eq!(why(2), "it did not reach its end");
}

#[test]
fn what_is_ordered_by_means_that_racecheck_does_not_follow_is_counted() {
    let (code, said) = racecheck(&format!("{FLAG}{STAGED}{RING}{END}"));
    assert_eq!(code, 0, "{said}");
    let counts: Vec<u64> = said["known"]
        .as_array()
        .unwrap()
        .iter()
        .map(|known| known["hazards"].as_u64().unwrap())
        .collect();
    assert_eq!(counts, [71_540, 27_492, 107_136], "{said}");
    assert_eq!(racecheck(END).0, 0);
}

#[test]
fn every_other_pair_of_accesses_is_a_race() {
    let between = |write: &str, read: &str| {
        format!(
            "========= Error: Race reported between Write access at {write}(Worker &)+0x10 in op_matvec.cuh:1
=========     and Read access at {read}(Worker &)+0x20 in op_matvec.cuh:2 [5 hazards]
=========
{END}"
        )
    };
    // None of these is accepted: a plain read of a flag's word, an op's read of the ring, an op's write of a task, sums
    // without a barrier.
    let pairs = [
        ("flag_store", "op_matvec"),
        ("stage_copy_at", "prefetcher_run"),
        ("op_matvec", "staged_task"),
        ("reduce_rows", "epilogue"),
        ("store_if", "digits_load"),
    ];
    for (write, read) in pairs {
        let (code, said) = racecheck(&(FLAG.to_owned() + &between(write, read)));
        assert_eq!(code, 1, "{write} and {read}: {said}");
        let race = &said["races"][0];
        let [one, other] = [0, 1].map(|side| race["between"][side]["function"].clone());
        assert_eq!((one, other), (write.into(), read.into()), "{said}");
        assert_eq!((&race["hazards"], &said["clean"]), (&5.into(), &false.into()), "{said}");
        assert_eq!(race["between"][0]["place"], "op_matvec.cuh:1", "{said}");
    }
}

#[test]
fn a_write_to_a_staged_task_beside_the_prefetcher_is_a_race() {
    let read = "and Read access at op_matvec(";
    assert!(STAGED.contains(read));
    let (code, said) = racecheck(&(STAGED.replace(read, "and Write access at op_matvec(") + END));
    assert_eq!(code, 1, "{said}");
}

#[test]
fn a_report_that_ends_early_or_is_not_understood_is_no_proof() {
    let (code, said) = racecheck(&format!("{FLAG}{RING}"));
    assert_eq!((code, &said["why"]), (1, &"it did not reach its end".into()), "{said}");
    let (code, said) = racecheck(&format!("{}{END}", FLAG.replace("flag_load(", "?(")));
    assert_eq!(code, 1, "{said}");
    assert!(said["races"][0]["unread"].as_str().unwrap().contains("Read access at ?"), "{said}");
}

#[test]
fn without_the_tool_it_says_where_it_comes_from() {
    let path = folder();
    let ran = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["sanitize", "--json", "--model", "toy"])
        .env("PATH", path.path())
        .env_remove("AMK_NVRTC")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    // A machine with the toolkit has one in /usr/local/cuda.
    assert!(
        ran.status.code() == Some(3) && said.contains("CUDA toolkit")
            || std::path::Path::new("/usr/local/cuda").exists(),
        "{said}"
    );
}
