//! Device sources compiled as host C++, so that their arithmetic is tested where there is no card.

use std::path::Path;
use std::process::{Command, Stdio};

/// The C++ compiler, or `None` if the environment excuses its absence.
pub(crate) fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let asked = Command::new(&name).arg("--version").stdout(Stdio::null()).status();
    if asked.is_ok_and(|status| status.success()) {
        return Some(name);
    }
    assert!(std::env::var_os("AMK_NO_CXX").is_some(), "no C++ compiler `{name}` (AMK_NO_CXX=1)");
    eprintln!("skipped: no C++ compiler `{name}`, and AMK_NO_CXX is set");
    None
}

/// Output of `tests/emulated/<program>.cpp`, compiled after these device sources, given `input` as a file. `spoil` replaces a text of the
/// sources by another: a mutation that the test must detect.
pub(crate) fn run(
    compiler: &str,
    program: &str,
    (sources, defines): (&[&str], &[String]),
    spoil: Option<(&str, &str)>,
    input: &str,
) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let all = vm_device::SOURCES.iter().chain(vm_device::PREFILL_SOURCES);
    let found = all
        .filter(|source| sources.iter().any(|name| source.name.rsplit('/').next() == Some(name)));
    let mut text: String = found.map(|source| source.text).collect();
    if let Some((from, to)) = spoil {
        assert!(text.contains(from), "there is no {from}");
        text = text.replace(from, to);
    }
    let header = folder.path().join("device.hpp");
    std::fs::write(header, text.replace("#pragma once", "")).expect("a file");
    let main = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/emulated/{program}.cpp"));
    let (built, file) = (folder.path().join(program), folder.path().join("input"));
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O1", "-w", "-I"])
        .arg(folder.path())
        .args(defines)
        .args([&main, Path::new("-o"), &built])
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(&file, input).expect("a file");
    let ran = Command::new(built).arg(file).output().expect("it starts");
    match ran.status.success() {
        true => String::from_utf8(ran.stdout).expect("text"),
        false => ran.status.to_string(), // a check of the program itself failed
    }
}

/// Runs tasks whose numbers start at `first`.
#[test]
fn the_task_prefetcher_never_overruns_its_consumers_where_the_numbers_wrap() {
    let Some(compiler) = compiler() else { return };
    let says = |first: u32, spoil| {
        let define = format!("-DAMK_FIRST_TASK={first}u");
        run(&compiler, "tasks", (&["tasks.cuh"], &[define]), spoil, "")
    };
    for first in [0, 1, u32::MAX, 0_u32.wrapping_sub(4), 0_u32.wrapping_sub(32), 1 << 31] {
        assert_eq!(says(first, None), "right\n", "from {first} on");
    }
    let near_wrap = 0_u32.wrapping_sub(32);
    for (from, to) in [
        // The former guard: open for the first six tasks, and again after the wrap.
        ("next - done <= STAGED - 3", "next - done <= STAGED - 3 || next < STAGED - 2"),
        ("(int32_t)(staged - number) > 0", "staged > number"),
        ("next - done <= STAGED - 3", "next <= done + STAGED - 3"),
    ] {
        let spoiled = says(near_wrap, Some((from, to)));
        assert_ne!(spoiled, "right\n", "nobody notices {to}");
    }
}
