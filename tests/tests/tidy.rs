//! House rules that a script can check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ir::{Level, Rule};
use tests::root;

/// Allowed dependencies between crates. There are no upward edges; the oracle does not depend on what it judges, nor
/// the search on a driver.
const EDGES: &[(&str, &[&str])] = &[
    ("abi", &[]),
    ("fleet", &[]),
    ("ir", &["abi"]),
    ("vm-device", &["abi"]),
    ("lower", &["abi", "ir"]),
    ("model", &["ir"]),
    ("hub", &["model"]),
    ("reference-vm", &["abi", "ir"]),
    ("vm-host", &["abi", "ir", "vm-device"]),
    ("corpus", &["abi", "ir"]),
    ("search", &["abi", "corpus", "ir", "lower", "model", "reference-vm"]),
    ("remote", &["abi", "ir", "search", "telemetry"]),
    ("sessions", &["abi"]),
    ("telemetry", &["abi"]),
    ("trace", &["abi", "ir", "lower"]),
    (
        "amk",
        &[
            "abi",
            "corpus",
            "fleet",
            "hub",
            "ir",
            "lower",
            "model",
            "reference-vm",
            "remote",
            "search",
            "sessions",
            "telemetry",
            "trace",
            "vm-device",
            "vm-host",
        ],
    ),
    ("python", &["amk"]),
    (
        "tests",
        &[
            "abi",
            "corpus",
            "ir",
            "lower",
            "model",
            "reference-vm",
            "search",
            "vm-device",
            "vm-host",
        ],
    ),
];

/// Additional dependencies allowed for tests and benches of a crate. Still nothing that the crate judges.
const TEST_EDGES: &[(&str, &[&str])] = &[
    ("ir", &["model"]),
    ("lower", &["model"]),
    ("search", &["model", "tests"]),
    ("remote", &["lower", "model", "tests"]),
    // Sources of programs to run. The library is built without them.
    ("reference-vm", &["lower", "model"]),
    ("trace", &["model"]),
    ("vm-host", &["lower", "model", "reference-vm", "sessions"]),
    ("amk", &["tests"]),
];

/// Most lines of a file, and of a function.
const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;

/// The only device files that may touch memory with instructions of their own.
const ORDER_FILES: &[&str] = &["sync.cuh", "ring.cuh", "stage.cuh"];

/// Files below a folder with one of these extensions; build output and hidden folders are left out.
pub(crate) fn files(extensions: &[&str]) -> Vec<(PathBuf, String)> {
    let mut folders = vec![root()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path
                .extension()
                .and_then(|e| e.to_str())
                .is_some_and(|e| extensions.contains(&e))
            {
                let text = std::fs::read_to_string(&path)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                found.push((path.strip_prefix(root()).unwrap_or(&path).to_path_buf(), text));
            }
        }
    }
    found.sort();
    found
}

fn none(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

/// Internal dependencies by section of a manifest.
fn dependencies(manifest: &str) -> BTreeMap<String, Vec<String>> {
    let mut section = String::new();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in manifest.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if section.ends_with("dependencies") && !section.starts_with("workspace") {
            let name = line.split(['.', ' ', '=']).next().unwrap_or("");
            if EDGES.iter().any(|(crate_name, _)| *crate_name == name) {
                found.entry(section.clone()).or_default().push(name.to_owned());
            }
        }
    }
    found
}

#[test]
fn crates_depend_downwards_only() {
    let mut problems = Vec::new();
    for (name, allowed) in EDGES {
        let folder = if *name == "amk" { root() } else { root().join(name) };
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let for_tests =
            TEST_EDGES.iter().find(|(n, _)| n == name).map_or(&[][..], |(_, list)| list);
        for (section, list) in dependencies(&manifest) {
            for dependency in list {
                let fits = allowed.contains(&dependency.as_str())
                    || (section.contains("dev-dependencies")
                        && for_tests.contains(&dependency.as_str()));
                if !fits {
                    problems.push(format!("{name} may not depend on {dependency} ([{section}])"));
                }
            }
        }
        let driver = manifest.lines().any(|line| line.starts_with("cudarc"));
        if driver && *name != "vm-host" && manifest.contains("[dependencies]") && *name != "amk" {
            problems.push(format!("{name} may not see cudarc"));
        }
    }
    none(&problems);
}

/// Code with comments, strings and character literals blanked out; lines stay where they are.
fn blanked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let chars: Vec<char> = text.chars().collect();
    let mut i = 0;
    let blank = |out: &mut String, from: usize, to: usize| {
        out.extend(
            chars[from..to.min(chars.len())].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }),
        );
    };
    while i < chars.len() {
        let rest = &chars[i..];
        let end = match rest {
            ['/', '/', ..] => i + rest.iter().position(|&c| c == '\n').unwrap_or(rest.len()),
            ['/', '*', ..] => {
                rest.windows(2).position(|w| w == ['*', '/']).map_or(chars.len(), |n| i + n + 2)
            }
            ['r', '#', '"', ..] => {
                rest.windows(2).position(|w| w == ['"', '#']).map_or(chars.len(), |n| {
                    let from = n + 2;
                    rest[from..]
                        .windows(2)
                        .position(|w| w == ['"', '#'])
                        .map_or(chars.len(), |m| i + from + m + 2)
                })
            }
            ['"', ..] => i + string_end(rest),
            ['\'', '\\', ..] => {
                i + 2 + rest[2..].iter().skip(1).position(|&c| c == '\'').map_or(0, |n| n + 2)
            }
            ['\'', _, '\'', ..] => i + 3,
            _ => i,
        };
        if end == i {
            out.push(chars[i]);
            i += 1;
        } else {
            blank(&mut out, i, end);
            i = end;
        }
    }
    out
}

/// One past the closing quote of a string that begins here.
fn string_end(rest: &[char]) -> usize {
    let mut escaped = false;
    for (index, &c) in rest.iter().enumerate().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return index + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Functions of a Rust file: name, first line, lines.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let code = blanked(text);
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(place) = line.find("fn ").filter(|&p| p == 0 || line[..p].ends_with([' ', '(']))
        else {
            continue;
        };
        let name: String =
            line[place + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() {
            continue;
        }
        let mut depth = 0_i32;
        let mut opened = false;
        'body: for (offset, body) in lines[index..].iter().enumerate() {
            for c in body[if offset == 0 { place } else { 0 }..].chars() {
                depth += i32::from(c == '{') - i32::from(c == '}');
                opened |= c == '{';
                if (opened && depth == 0) || (!opened && c == ';' && !body.contains('[')) {
                    if opened {
                        found.push((name, index + 1, offset + 1));
                    }
                    break 'body;
                }
            }
        }
    }
    found
}

#[test]
fn files_and_functions_are_short() {
    let mut problems = Vec::new();
    let mut functions_seen = 0;
    for (path, text) in files(&["rs", "cu", "cuh"]) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            problems.push(format!("{}: {lines} lines, at most {FILE_LINES_MAX}", path.display()));
        }
        if path.extension().is_some_and(|e| e == "rs") {
            for (name, line, lines) in functions(&text) {
                functions_seen += 1;
                if lines > FUNCTION_LINES_MAX {
                    problems.push(format!(
                        "{}:{line}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}",
                        path.display()
                    ));
                }
            }
        }
    }
    assert!(functions_seen > 500, "the scan found only {functions_seen} functions");
    none(&problems);
}

#[test]
fn nothing_is_left_for_later() {
    // Spelled in parts, so that this file passes.
    let words = [
        concat!("todo", "!"),
        concat!("FIX", "ME"),
        concat!("#[", "ignore"),
        concat!("unimplemented", "!"),
        concat!("X", "XX"),
    ];
    let mut problems = Vec::new();
    for (path, text) in files(&["rs", "cu", "cuh"]) {
        for (line, number) in text.lines().zip(1..) {
            if let Some(word) = words.iter().find(|word| line.contains(**word)) {
                problems.push(format!("{}:{number}: `{word}`", path.display()));
            }
        }
    }
    none(&problems);
}

/// Defects of the reference VM exist only to test the checks of machines; no other code may request one.
#[test]
fn only_tests_ask_for_defects() {
    let asks = |(path, text): &(PathBuf, String)| {
        // `tests.rs` beside the code is a module of tests.
        let may = path.starts_with("reference-vm")
            || path.starts_with("tests")
            || path.ends_with("tests.rs");
        !may && (text.contains("with_defect") || text.contains("Defect::"))
    };
    let problems: Vec<String> = files(&["rs"])
        .iter()
        .filter(|file| asks(file))
        .map(|(p, _)| p.display().to_string())
        .collect();
    none(&problems);
}

/// Faults of devices exist only to test their detection: a build for users has no way to request one.
#[test]
fn only_tests_ask_for_faults() {
    let asks = |manifest: &str| {
        let mut tests = false;
        manifest.lines().any(|line| {
            tests = if line.starts_with('[') { line.contains("dev-dependencies") } else { tests };
            !tests && line.contains("\"faults\"")
        })
    };
    assert!(asks("[dependencies]\nvm-host = { features = [\"faults\"] }"));
    assert!(!asks("[dev-dependencies]\nvm-host = { features = [\"faults\"] }\n[lints]"));
    let problems: Vec<String> = files(&["toml"])
        .iter()
        .filter(|(_, text)| asks(text))
        .map(|(path, _)| path.display().to_string())
        .collect();
    none(&problems);
}

/// The image is built without `rust-toolchain.toml`, by the compiler of its base image.
#[test]
fn the_image_has_the_compiler_of_the_repository() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let toolchain = read("rust-toolchain.toml");
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = \"")).unwrap();
    let minor = channel.rsplit_once('.').unwrap().0;
    let from = format!("FROM rust:{minor}-");
    assert!(read("packaging/Dockerfile").contains(&from), "packaging/Dockerfile lacks {from}");
    assert!(read(".dockerignore").lines().any(|line| line == "rust-toolchain.toml"));
}

#[test]
fn modules_have_names() {
    let banned = ["utils", "util", "common", "helpers", "misc"];
    let stem =
        |path: &Path| path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("").to_owned();
    let bad = |path: &PathBuf| {
        path.components().any(|c| banned.contains(&c.as_os_str().to_str().unwrap_or("")))
            || banned.contains(&stem(path).as_str())
    };
    let problems: Vec<String> = files(&["rs", "cu", "cuh"])
        .into_iter()
        .map(|(path, _)| path)
        .filter(bad)
        .map(|path| path.display().to_string())
        .collect();
    none(&problems);
}

/// Memory order is confined to three small headers, which everything else calls. Flags in shared memory may be
/// volatile: only one block accesses them.
#[test]
fn device_memory_order_lives_in_its_headers() {
    let instructions =
        ["ld.", "st.", "red.", "atom.", "fence.", "cp.async", "mbarrier.", "membar", "prefetch"];
    let calls = [
        "atomicAdd(",
        "atomicExch(",
        "atomicCAS(",
        "__threadfence",
        "cuda::atomic",
        "__ldcg(",
        "__stcg(",
    ];
    let mut problems = Vec::new();
    for (path, text) in files(&["cu", "cuh"]) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if !path.starts_with("vm-device/cuda") || ORDER_FILES.contains(&name) {
            continue;
        }
        for (line, number) in text.lines().zip(1..) {
            let quoted: String = line.split('"').skip(1).step_by(2).collect::<Vec<_>>().join(" ");
            let in_asm = quoted
                .split([' ', ';', '{', '}'])
                .any(|word| instructions.iter().any(|i| word.starts_with(i)));
            let in_code =
                calls.iter().any(|call| line.split("//").next().unwrap_or("").contains(call));
            if in_asm || in_code {
                problems.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    none(&problems);
}

#[test]
fn docs_are_linked() {
    // Notebooks have an index of their own, which the other one links.
    let indices = ["docs/lab/README.md", "docs/README.md"]
        .map(|path| std::fs::read_to_string(root().join(path)).unwrap_or_default());
    let mut problems = Vec::new();
    for (path, _) in files(&["md"]) {
        let Ok(page) = path.strip_prefix("docs") else { continue };
        let of_lab = page.strip_prefix("lab").ok().filter(|page| *page != Path::new("README.md"));
        let (index, name) = match of_lab {
            Some(page) => (&indices[0], page),
            None => (&indices[1], page),
        };
        if page != Path::new("README.md") && !index.contains(&format!("({})", name.display())) {
            problems.push(format!("docs/{} is not linked from its index", page.display()));
        }
    }
    none(&problems);
}

/// Pages for readers, with their limits of lines.
const PAGES: [(&str, usize); 4] =
    [("README.md", 100), ("HARNESS.md", 150), ("docs/explanation/", 300), ("docs/guide/", 150)];
/// Most columns of a line; tables, code and links aside.
const COLUMNS: usize = 120;

/// The lines of a page that are prose.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let line = line.trim_start();
        let fence = line.starts_with("```");
        code ^= fence;
        !(code || fence || line.starts_with(['|', '<', '!']) || line.contains("]("))
    })
}

#[test]
fn pages_are_short_and_narrow() {
    let mut problems = Vec::new();
    for (path, text) in files(&["md"]) {
        let name = path.display().to_string();
        if name.starts_with("docs/lab/") {
            continue;
        }
        let wide = prose(&text).filter(|(_, line)| line.chars().count() > COLUMNS);
        problems.extend(wide.map(|(at, _)| format!("{name}:{}: over {COLUMNS} columns", at + 1)));
        let limit = PAGES.iter().find(|(page, _)| name.starts_with(page));
        if let Some((_, most)) = limit.filter(|(_, most)| text.lines().count() > *most) {
            problems.push(format!("{name} has {} lines, at most {most}", text.lines().count()));
        }
    }
    none(&problems);
}

#[test]
fn links_lead_somewhere() {
    let mut problems = Vec::new();
    for (path, text) in files(&["md"]) {
        let folder = root().join(path.parent().unwrap_or(Path::new("")));
        for (at, line) in text.lines().enumerate() {
            for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let file = link.split('#').next().unwrap_or_default();
                let elsewhere = link.contains("://") || link.contains(' ') || file.is_empty();
                if !elsewhere && !folder.join(file).exists() {
                    problems.push(format!("{}:{}: no {file}", path.display(), at + 1));
                }
            }
        }
    }
    none(&problems);
}

#[test]
fn every_program_rule_is_tested() {
    let expected: Vec<String> =
        tests::filetest::all().iter().flat_map(tests::filetest::Filetest::expected_rules).collect();
    let rules = Rule::ALL.iter().filter(|rule| rule.level() == Level::Program);
    let untested = rules.filter(|rule| !expected.iter().any(|id| id == rule.id()));
    let problems: Vec<String> = untested
        .map(|rule| format!("{rule} has no negative file test: {}", rule.sentence()))
        .collect();
    none(&problems);
    let unknown: Vec<String> =
        expected.into_iter().filter(|id| id != "PARSE" && Rule::from_id(id).is_none()).collect();
    none(&unknown);
}

/// Tests the scanner that the size rule relies on.
#[test]
fn the_function_scan_counts() {
    let text = "fn a() {\n    let s = \"}\"; // }\n    let c = '}';\n}\n\ntrait T {\n    fn b();\n    fn c(&self) -> u32 {\n        1\n    }\n}\n";
    let expected = vec![("a".to_owned(), 1, 4), ("c".to_owned(), 8, 3)];
    assert_eq!(functions(text), expected);
}
