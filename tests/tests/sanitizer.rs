//! Tests which reports `tests/sanitizer/racecheck` accepts.

use std::path::Path;
use std::process::Command;

const FLAG: &str = "========= Error: Race reported between Write access at flag_store(unsigned int *, unsigned int)+0x7a00 in stage.cuh:8
=========     and Read access at flag_load(const unsigned int *)+0x40 in stage.cuh:7 [66896 hazards]
=========     and Read access at flag_load(const unsigned int *)+0x90 in stage.cuh:7 [12 hazards]
=========
";
const STAGED: &str = "========= Error: Race reported between Write access at prefetcher_run(const Worker &)+0x4060 in megakernel.cu:42
=========     and Read access at op_matvec(Worker &, const StagedTask &, Cursor &)+0x7e20 in op_matvec.cuh:570 [27392 hazards]
=========
";
const RING: &str = "========= Error: Race reported between Read access at amk_megakernel+0x8660
=========     and Write access at stage_copy_at(unsigned int, unsigned long long, unsigned int, unsigned int, unsigned long long)+0x5cc0 in stage.cuh:62 [107136 hazards]
=========
";
const END: &str = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n";

/// Exit code and output for one report.
fn judged(name: &str, report: &str) -> (Option<i32>, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let file = std::env::temp_dir().join(format!("amk-racecheck-{}-{name}", std::process::id()));
    std::fs::write(&file, report).unwrap();
    let script = root.join("tests/sanitizer/racecheck");
    let ran = Command::new("python3").arg(script).arg(&file).output().expect("python3 runs");
    std::fs::remove_file(&file).unwrap();
    let said = String::from_utf8(ran.stdout).unwrap() + &String::from_utf8(ran.stderr).unwrap();
    (ran.status.code(), said)
}

#[test]
fn what_is_ordered_by_means_that_racecheck_does_not_follow_passes() {
    let (code, said) = judged("known", &format!("{FLAG}{STAGED}{RING}{END}"));
    assert_eq!(code, Some(0), "{said}");
    for count in ["66908", "27392", "107136"] {
        assert!(said.contains(count), "{count} is counted: {said}");
    }
    let (code, said) = judged("none", END);
    assert_eq!(code, Some(0), "{said}");
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
    ];
    for (index, (write, read)) in pairs.into_iter().enumerate() {
        let (code, said) =
            judged(&format!("race-{index}"), &(FLAG.to_owned() + &between(write, read)));
        assert_eq!(code, Some(1), "{write} and {read}: {said}");
        assert!(said.contains("UNKNOWN") && said.contains(write) && said.contains(read), "{said}");
    }
}

#[test]
fn whoever_writes_beside_the_prefetcher_is_in_a_race() {
    let read = "and Read access at op_matvec(";
    assert!(STAGED.contains(read));
    let (code, said) =
        judged("two", &(STAGED.replace(read, "and Write access at op_matvec(") + END));
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn a_report_that_ends_early_is_no_proof() {
    let (code, said) = judged("early", &format!("{FLAG}{RING}"));
    assert_eq!(code, Some(1), "{said}");
}
