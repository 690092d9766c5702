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
        let lacks = ["cuda", "sanitize", "kernel"].iter().any(|word| words.contains(word));
        let expected: &[i32] = match words[0] {
            _ if command.contains("bad.json") => &[1],
            _ if lacks => &[0, 1, 3], // what needs a GPU or NVRTC says so where there is none
            "provenance" => &[0, 5],  // stale figures are said to be stale
            "inspect" => &[0, 5],     // without a GPU nothing is copied
            "trace" if command.ends_with("--pid") => &[3], // nobody asks the server anything
            _ => &[0],
        };
        let code = output.status.code().unwrap_or(-1);
        assert!(expected.contains(&code), "{command}: exit code {code}\n{said}");
    }
    assert!(ran.len() > 40, "{}", ran.len());
}

/// All sources of tests in a folder as one text.
fn sources(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            into.push_str(&format!("mod {};\n", path.file_name().unwrap().to_string_lossy()));
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&format!("mod {};\n", path.file_stem().unwrap().to_string_lossy()));
            into.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_that_the_page_names_is_there() {
    for command in PAGE.lines().flat_map(|line| commands(line, "cargo test ")) {
        let words: Vec<&str> = command.split(' ').skip(2).collect();
        let [_, package, rest @ ..] = &words[..] else { panic!("{command}") };
        let home = Path::new(ROOT).join(if *package == "amk" { "." } else { package });
        assert!(home.join("Cargo.toml").is_file(), "{command}");
        let manifest = std::fs::read_to_string(home.join("Cargo.toml")).unwrap();
        let filter = match rest {
            ["--doc" | "--lib"] | [] => None,
            ["--lib", filter] => Some(filter),
            ["--test", name] | ["--test", name, _] => {
                let file = home.join("tests").join(name);
                let there = file.with_extension("rs").is_file() || file.join("main.rs").is_file();
                let named = manifest.contains(&format!("name = \"{name}\""));
                assert!(there || named, "{command}");
                rest.get(2)
            }
            _ => panic!("{command}: of another form"),
        };
        let Some(filter) = filter else { continue };
        let mut text = String::new();
        let folders: &[&str] = if *package == "amk" { &["src"] } else { &["src", "tests"] };
        folders.iter().for_each(|folder| sources(&home.join(folder), &mut text));
        let named = |line: &str| {
            let of = line.trim().trim_start_matches("pub(crate) ").trim_start_matches("pub ");
            (of.starts_with("fn ") || of.starts_with("mod ")) && of.contains(*filter)
        };
        assert!(text.lines().any(named), "{command}: no test has that name");
    }
}
