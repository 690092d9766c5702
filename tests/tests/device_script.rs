//! Tests the arguments of `.ci/device`, with dummies in place of the built programs and of Python.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const PROGRAMS: [&str; 11] = [
    "amk",
    "amk_unit",
    "devices",
    "differential",
    "nvidia-smi",
    "prefill",
    "python3",
    "sampling",
    "sessions",
    "together",
    "vm_host",
];

/// Exit code and output of the script with these arguments, in a folder where `bin` holds the programs.
fn device(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    for program in PROGRAMS {
        std::fs::write(bin.join(program), "#!/bin/sh\nexit 0\n").unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(bin.join(program), executable).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/device");
    let script = script.canonicalize().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(script);
    let ran = command.args(arguments).current_dir(folder).env("PATH", path).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    (ran.status.code(), said.into_owned())
}

#[test]
fn a_folder_of_programs_alone_runs_the_usual_stages() {
    let dir = tempfile::tempdir().unwrap();
    let (_, said) = device(dir.path(), &["bin"]);
    let stages: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("== ")).collect();
    assert_eq!(stages.first(), Some(&"differential"), "{said}");
    assert_eq!(stages.last(), Some(&"loop"), "{said}");
    assert!(!stages.contains(&"bin") && !stages.contains(&"sanitizer"), "{said}");
    assert!(dir.path().join("device-out").is_dir());
}

#[test]
fn stages_are_run_as_they_are_named_and_unknown_ones_refused_with_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let (code, said) = device(dir.path(), &["bin", "out", "faults"]);
    assert_eq!((code, said.contains("== faults")), (Some(0), true), "{said}");
    for wrong in [&["bin", "out", "faults", "fault"][..], &["none"], &[]] {
        let (code, said) = device(dir.path(), wrong);
        assert_eq!(code, Some(2), "{wrong:?}: {said}");
        assert!(said.contains("differential faults devices") && said.contains("ship"), "{said}");
        assert!(!said.contains("== "), "{wrong:?}: {said}");
    }
}
