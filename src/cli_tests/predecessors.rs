//! The page that says where predecessors' capabilities are here: every command on it runs, and every test that it names is there.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::folder;

const PAGE: &str = include_str!("../../docs/explanation/predecessors.md");

/// Rows of each predecessor, in the page's order.
const ROWS: [usize; 5] = [32, 22, 31, 19, 26];

/// What stands in the second column: it works, and how, or why not.
const VERDICTS: [&str; 4] = ["works", "out", "not yet", "blocked"];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The rows of a predecessor: what, verdict, where it is seen.
fn rows(section: &str) -> Vec<[&str; 3]> {
    let lines = section.lines().filter(|line| line.starts_with("| "));
    lines
        .skip(1)
        .map(|line| {
            let mut cells = line.trim_matches('|').split('|').map(str::trim);
            [(); 3].map(|()| cells.next().unwrap_or_default())
        })
        .collect()
}

/// The commands between backticks that begin with this.
fn commands<'a>(cell: &'a str, begin: &str) -> Vec<&'a str> {
    cell.split('`').skip(1).step_by(2).filter(|code| code.starts_with(begin)).collect()
}

/// A process that `amk top` can look at.
struct Served(Child);

impl Served {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
        command.args(["serve", "--model", "toy", "--device", "cpu", "--addr", "127.0.0.1:0"]);
        command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.stderr(Stdio::null()).spawn().expect("a server"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_row_is_judged_and_shown() {
    let sections: Vec<&str> = PAGE.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), ROWS.len());
    for (section, count) in sections.into_iter().zip(ROWS) {
        let rows = rows(section);
        assert_eq!(rows.len(), count, "{}", section.lines().next().unwrap_or_default());
        for [what, verdict, seen] in rows {
            assert!(VERDICTS.iter().any(|word| verdict.starts_with(word)), "{what}: {verdict}");
            let shown = seen.contains('`') || seen.contains("](");
            assert!(shown || !verdict.starts_with("works"), "nothing shows: {what}");
        }
    }
}

#[test]
fn every_command_of_the_page_runs() {
    let folder = folder();
    let bad = r#"{"pipeline": {"stages": 1000000}, "banana": 1}"#;
    std::fs::write(folder.path().join("bad.json"), bad).unwrap();
    let served = Served::start(folder.path());
    let pid = served.0.id().to_string();
    let mut ran = BTreeSet::new();
    for command in PAGE.lines().flat_map(|line| commands(line, "amk ")) {
        if !ran.insert(command) {
            continue;
        }
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        // These read the repository's pages.
        let place = if ["notes", "provenance"].contains(&words[0]) {
            Path::new(ROOT)
        } else {
            folder.path()
        };
        let mut run = Command::new(env!("CARGO_BIN_EXE_amk"));
        run.args(&words).current_dir(place).stdin(Stdio::null());
        match words[..] {
            ["top" | "inspect", ..] if words[1] != "kernel" => drop(run.args(["--pid", &pid])),
            [.., "--pid"] => drop(run.arg(&pid)),
            _ => {}
        }
        let output = run.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let expected: &[i32] = match words[..] {
            _ if command.contains("bad.json") => &[1],
            // What needs a GPU or NVRTC says so where there is none.
            [.., "cuda"] | ["sanitize" | "inspect", "kernel" | "--model", ..] => &[0, 3],
            ["provenance", ..] => &[0, 5], // stale figures are said to be stale
            ["inspect", "evidence"] => &[5], // on the CPU nothing is copied
            ["trace", .., "--pid"] => &[3], // nobody asks the server anything
            _ => &[0],
        };
        let code = output.status.code().unwrap_or(-1);
        assert!(expected.contains(&code), "{command}: exit code {code}\n{said}");
    }
    assert!(ran.len() > 40, "{}", ran.len());
}

/// The tests in the sources of a file or folder: their modules and names.
fn tests_in(path: &Path, module: &str, into: &mut Vec<String>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            let stem = entry.path().file_stem().unwrap().to_string_lossy().into_owned();
            tests_in(&entry.path(), &format!("{module}::{stem}"), into);
        }
    } else if path.is_file() && path.extension().is_some_and(|extension| extension == "rs") {
        let text = std::fs::read_to_string(path).unwrap();
        for test in text.split("#[test]").skip(1) {
            let name = test.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
            into.extend(name.map(|(name, _)| format!("{module}::{name}")));
        }
    }
}

/// The tests that a command of the page runs, without the filter at its end.
fn tests_of(home: &Path, package: &str, place: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    match place {
        ["--test", "cli"] if package == "amk" => {
            let listed = Command::new(std::env::current_exe().unwrap()).arg("--list").output();
            let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
            found.extend(
                listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned),
            );
        }
        ["--test", name] if package == "amk" => {
            tests_in(&home.join(format!("src/{name}_tests.rs")), "", &mut found);
        }
        ["--test", name] => {
            tests_in(&home.join(format!("tests/{name}.rs")), "", &mut found);
            tests_in(&home.join(format!("tests/{name}")), "", &mut found);
            // One binary of all files beside `main.rs`.
            if *name == "main" {
                tests_in(&home.join("tests"), "", &mut found);
            }
        }
        ["--lib"] => tests_in(&home.join("src"), "", &mut found),
        [] => ["src", "tests"].iter().for_each(|of| tests_in(&home.join(of), "", &mut found)),
        _ => panic!("{package} {place:?}: of another form"),
    }
    found
}

#[test]
fn every_test_that_the_page_names_is_there() {
    for command in PAGE.lines().flat_map(|line| commands(line, "cargo test ")) {
        let words: Vec<&str> = command.split(' ').skip(2).collect();
        let ["-p", package, rest @ ..] = &words[..] else { panic!("{command}") };
        let home = Path::new(ROOT).join(if *package == "amk" { "." } else { package });
        if *rest == ["--doc"] {
            assert!(home.join("src/lib.rs").is_file(), "{command}");
            continue;
        }
        let (place, filter) = match rest {
            ["--test", _, filter] => (&rest[..2], *filter),
            ["--lib", filter] => (&rest[..1], *filter),
            _ => (rest, ""),
        };
        let tests = tests_of(&home, package, place);
        assert!(tests.iter().any(|test| test.contains(filter)), "{command} runs no test");
    }
}
