//! File tests: a program in text form, directives, and the expected result.
//!
//! A file begins with directives, `;! name = value`. `test` lists the modes:
//!
//! - `verify`: the program is parsed and verified;
//! - `text`: the file equals the output of `print`;
//! - `lower`, `run`: see `tests/lowering.rs`.
//!
//! An expected error is a comment `; error: RULE words of the detail` on the line of its buffer, matrix, worker or
//! task, or on a line of its own before the program if it has no line. A parse error has `PARSE` for a rule. Every
//! error must be expected, and every expected error must occur. `BLESS=1` rewrites the expectations.

use std::path::{Path, PathBuf};

use ir::program::{Program, check};
use ir::text::{parse, print};
use ir::{At, Violations};
use similar::TextDiff;

/// A parsed file test.
pub struct Filetest {
    /// Its path.
    pub path: PathBuf,
    /// The whole text.
    pub text: String,
}

/// An expected or actual error, on a line (from one), or on none.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Expectation {
    line: Option<usize>,
    rule: String,
    detail: String,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("filetests")
}

/// Every file test, sorted by path.
///
/// # Panics
/// If a folder or file cannot be read.
#[must_use]
pub fn all() -> Vec<Filetest> {
    let mut folders = vec![folder()];
    let mut files = Vec::new();
    let unreadable =
        |path: &Path, error: std::io::Error| -> ! { panic!("{}: {error}", path.display()) };
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| unreadable(&folder, error));
        for entry in entries {
            let path = entry.unwrap_or_else(|error| unreadable(&folder, error)).path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "amk") {
                files.push(path);
            }
        }
    }
    files.sort();
    let read = |path: PathBuf| Filetest {
        text: std::fs::read_to_string(&path).unwrap_or_else(|error| unreadable(&path, error)),
        path,
    };
    files.into_iter().map(read).collect()
}

/// The lines in which two texts differ, with two lines around them: `-` for those only in `expected`, `+` for those only in `actual`.
#[must_use]
pub fn unified(expected: &str, actual: &str) -> String {
    TextDiff::from_lines(expected, actual).unified_diff().context_radius(2).to_string()
}

const MARK: &str = "; error: ";

impl Filetest {
    /// Its path relative to the folder of file tests.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.strip_prefix(folder()).unwrap_or(&self.path).display().to_string()
    }

    /// The value of a directive.
    #[must_use]
    pub fn directive(&self, name: &str) -> Option<&str> {
        let lines = self.text.lines().take_while(|line| line.starts_with(";!"));
        lines
            .filter_map(|line| line[2..].split_once('='))
            .find(|(key, _)| key.trim() == name)
            .map(|(_, value)| value.trim())
    }

    /// Whether `test` lists this mode.
    #[must_use]
    pub fn has_mode(&self, mode: &str) -> bool {
        self.directive("test").is_some_and(|modes| modes.split(',').any(|m| m.trim() == mode))
    }

    /// The rules that the file expects to be broken.
    #[must_use]
    pub fn expected_rules(&self) -> Vec<String> {
        expectations(&self.text).into_iter().map(|e| e.rule).collect()
    }

    /// Runs the modes that need only `ir`. `Err` holds the text that would pass, if there is one, and the error.
    ///
    /// # Errors
    /// If an expectation is not met.
    pub fn run(&self) -> Result<(), (String, String)> {
        if !self.has_mode("verify") && !self.has_mode("text") {
            return Ok(());
        }
        let actual = self.actual();
        let expected = expectations(&self.text);
        let hit = |e: &Expectation, a: &Expectation| {
            e.line == a.line && e.rule == a.rule && a.detail.contains(&e.detail)
        };
        let unexpected: Vec<_> =
            actual.iter().filter(|a| !expected.iter().any(|e| hit(e, a))).collect();
        let missing: Vec<_> =
            expected.iter().filter(|e| !actual.iter().any(|a| hit(e, a))).collect();
        let mut wrong = String::new();
        for a in &unexpected {
            wrong += &format!("unexpected: {} {} (line {:?})\n", a.rule, a.detail, a.line);
        }
        for e in &missing {
            wrong += &format!("did not occur: {} {} (line {:?})\n", e.rule, e.detail, e.line);
        }
        let mut passing = self.text.clone();
        if !wrong.is_empty() {
            passing = annotate(&self.text, &actual);
        }
        if self.has_mode("text")
            && let Ok(program) = parse(&self.text)
        {
            let canonical = canonical(&self.text, &program);
            if canonical != self.text {
                wrong += "not as `print` writes it\n";
                passing = canonical;
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err((passing, wrong)) }
    }

    /// The actual errors.
    fn actual(&self) -> Vec<Expectation> {
        let program = match parse(&self.text) {
            Ok(program) => program,
            Err(e) => {
                let detail = format!("column {}: {}", e.column, e.message);
                return vec![Expectation {
                    line: Some(e.line as usize),
                    rule: "PARSE".into(),
                    detail,
                }];
            }
        };
        if !self.has_mode("verify") {
            return Vec::new();
        }
        match check(&program) {
            Ok(()) => Vec::new(),
            Err(violations) => located(&self.text, &violations),
        }
    }
}

/// Violations with their lines.
fn located(text: &str, violations: &Violations) -> Vec<Expectation> {
    let places = places(text);
    let line = |at: &At| places.iter().find(|(place, _)| place == at).map(|&(_, line)| line);
    let expectation = |v: &ir::Violation| Expectation {
        line: line(&v.at),
        rule: v.rule.id().into(),
        detail: v.detail.clone(),
    };
    violations.list().iter().map(expectation).collect()
}

/// The line of each declaration.
fn places(text: &str) -> Vec<(At, usize)> {
    let mut places = Vec::new();
    let (mut matrices, mut buffers, mut workers, mut tasks) = (0, 0, 0, 0);
    for (line, number) in text.lines().zip(1..) {
        let at = match line.split_whitespace().next().unwrap_or(";") {
            "matrix" => {
                matrices += 1;
                At::Matrix(ir::MatrixId(matrices - 1))
            }
            "buffer" => {
                buffers += 1;
                At::Buffer(ir::BufferId(buffers - 1))
            }
            "worker" => {
                (workers, tasks) = (workers + 1, 0);
                At::Worker(ir::WorkerId(workers - 1))
            }
            word if workers > 0 && word != "load" && !word.starts_with(';') => {
                tasks += 1;
                At::Task(ir::WorkerId(workers - 1), tasks - 1)
            }
            _ => continue,
        };
        places.push((at, number));
    }
    places
}

/// Splits a line before its expectation. A detail may contain `;` but no second mark.
fn split_mark(line: &str) -> (&str, Option<&str>) {
    match line.find(MARK) {
        Some(start) => (line[..start].trim_end(), Some(&line[start..])),
        None => (line, None),
    }
}

fn expectations(text: &str) -> Vec<Expectation> {
    let mut list = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let (code, marks) = split_mark(line);
        for mark in marks.unwrap_or("").split(MARK).skip(1) {
            let (rule, detail) = mark.trim().split_once(' ').unwrap_or((mark.trim(), ""));
            let line = (!code.is_empty()).then_some(number);
            list.push(Expectation { line, rule: rule.into(), detail: detail.trim().into() });
        }
    }
    list
}

/// The text with exactly these expectations.
fn annotate(text: &str, actual: &[Expectation]) -> String {
    let marks = |line: Option<usize>| -> Vec<String> {
        actual
            .iter()
            .filter(|a| a.line == line)
            .map(|a| format!("{MARK}{} {}", a.rule, a.detail))
            .collect()
    };
    let mut out = String::new();
    let mut headless = marks(None);
    for (line, number) in text.lines().zip(1..) {
        let (code, old) = split_mark(line);
        if code.is_empty() && old.is_some() {
            continue;
        }
        if code.starts_with("amk ") {
            for mark in headless.drain(..) {
                out += &format!("{mark}\n");
            }
        }
        let marks = marks(Some(number));
        out += code;
        for mark in &marks {
            out += &format!(" {mark}");
        }
        out.push('\n');
    }
    out
}

/// The file's leading comments, then the program as printed.
fn canonical(text: &str, program: &Program) -> String {
    let head: String = text
        .lines()
        .take_while(|line| line.starts_with(';'))
        .map(|line| format!("{line}\n"))
        .collect();
    head + &print(program)
}
