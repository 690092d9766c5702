//! Tests that generated pages are fresh: opcodes and invariants under `docs/reference`, the knob table in `HARNESS.md`
//! and more. `BLESS=1` rewrites them.

use std::fmt::Write as _;

use abi::{BufferKind, Epilogue, Opcode, Prologue};
use ir::{Level, Rule};
use tests::filetest::unified;
use tests::root;

/// Compares a page, by its path from the repository's root, with the expected text, or rewrites it.
pub(crate) fn fresh(name: &str, expected: &str) {
    let path = root().join(name);
    let actual = std::fs::read_to_string(&path).unwrap_or_default();
    if actual == expected {
        return;
    }
    if tests::blessing() {
        std::fs::write(&path, expected)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    panic!(
        "{name} is stale; rewrite with: BLESS=1 cargo test -p tests docs\n{}",
        unified(&actual, expected)
    );
}

/// The doc comment above an op's row of the table. The table itself keeps the first line only.
fn op_doc(source: &str, op: Opcode) -> String {
    let info = op.info();
    let row = format!("{} = ", info.name);
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let at = lines
        .iter()
        .position(|line| line.starts_with(&row))
        .unwrap_or_else(|| panic!("no row `{row}` in abi/src/op.rs"));
    let first = lines[..at].iter().rposition(|line| !line.starts_with("///")).map_or(0, |i| i + 1);
    lines[first..at]
        .iter()
        .map(|line| line.trim_start_matches("///").trim())
        .collect::<Vec<_>>()
        .join("\n")
}

fn values<'a>(out: &mut String, title: &str, list: impl Iterator<Item = (&'a str, u32)>) {
    let names: Vec<String> = list.map(|(name, number)| format!("`{name}` {number}")).collect();
    let _ = writeln!(out, "- {title}: {}", names.join(", "));
}

fn opcodes() -> String {
    let source = std::fs::read_to_string(root().join("abi/src/op.rs"))
        .unwrap_or_else(|error| panic!("abi/src/op.rs: {error}"));
    let structs = abi::structs();
    let mut out = String::from(
        "# Opcodes\n\nGenerated from `abi/src/op.rs` by the tests (`BLESS=1 cargo test -p tests docs`); edits are overwritten.\n\n\
         The same name stands in the text form, in `op_<name>` on the device and in the reference VM. Parameters are 64 bytes;\nwords that are not \
         listed are zero.\n\nValues of enumerations:\n\n",
    );
    values(&mut out, "prologue", Prologue::ALL.iter().map(|v| (v.name(), *v as u32)));
    values(&mut out, "epilogue", Epilogue::ALL.iter().map(|v| (v.name(), *v as u32)));
    values(&mut out, "buffer kind", BufferKind::ALL.iter().map(|v| (v.name(), *v as u32)));
    for &op in Opcode::ALL {
        let info = op.info();
        let _ = writeln!(out, "\n## {} `{}`\n\n{}\n", op as u16, info.name, op_doc(&source, op));
        let _ = writeln!(out, "At most {} buffers read, {} written.\n", info.reads, info.writes);
        let _ = writeln!(out, "| byte | field | type | meaning |\n|---|---|---|---|");
        let name = format!("amk_{}_params", info.name);
        let layout = structs
            .iter()
            .find(|layout| layout.c_name == name)
            .unwrap_or_else(|| panic!("no struct {name}"));
        for field in layout.fields {
            let array = field.len.map_or(String::new(), |n| format!("[{n}]"));
            let _ = writeln!(
                out,
                "| {} | `{}` | `{}{array}` | {} |",
                field.offset,
                field.name,
                field.ty.c_name(),
                field.doc.trim()
            );
        }
    }
    out
}

fn invariants() -> String {
    let files = tests::filetest::all();
    let folder = root();
    let mut out = String::from(
        "# Invariants\n\nGenerated from the rule table in `ir/src/violation.rs` by the tests (`BLESS=1 cargo test -p tests docs`); edits are\n\
         overwritten.\n\n`validate` checks what somebody wrote, `verify` what we made. Both report everything they find, each with its\nplace \
         and its numbers.\n",
    );
    for (level, title, who) in
        [(Level::Schedule, "Schedules", "validate"), (Level::Program, "Programs", "verify")]
    {
        let _ = writeln!(
            out,
            "\n## {title}: `{who}`\n\n| rule | what holds | broken in |\n|---|---|---|"
        );
        for rule in Rule::ALL.iter().filter(|rule| rule.level() == level) {
            let broken: Vec<String> = files
                .iter()
                .filter(|file| file.expected_rules().iter().any(|id| id == rule.id()))
                .filter_map(|file| {
                    Some(format!(
                        "`{}`",
                        file.path.strip_prefix(folder.join("tests/filetests")).ok()?.display()
                    ))
                })
                .take(4)
                .collect();
            let broken =
                if broken.is_empty() { "unit tests".to_owned() } else { broken.join(", ") };
            let _ = writeln!(
                out,
                "| {} | {} | {broken} |",
                rule.id(),
                rule.sentence().replace('|', "\\|")
            );
        }
    }
    out
}

#[test]
fn docs_of_opcodes_are_fresh() {
    fresh("docs/reference/opcodes.md", &opcodes());
}

#[test]
fn docs_of_invariants_are_fresh() {
    fresh("docs/reference/invariants.md", &invariants());
}

/// The same for the part of a page between `<!-- MARK:begin -->` and `<!-- MARK:end -->`.
pub(crate) fn fresh_part(name: &str, mark: &str, expected: &str) {
    let (begin, end) = (format!("<!-- {mark}:begin -->\n"), format!("<!-- {mark}:end -->"));
    let page = std::fs::read_to_string(root().join(name))
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let missing = || panic!("{name} has no {} ... {end}", begin.trim_end());
    let (before, rest) = page.split_once(&begin).unwrap_or_else(missing);
    let (_, after) = rest.split_once(&end).unwrap_or_else(missing);
    fresh(name, &format!("{before}{begin}{expected}{end}{after}"));
}

#[test]
fn docs_of_knobs_are_fresh() {
    fresh_part("HARNESS.md", "knobs", &ir::schedule::knob_table_markdown());
}

/// The tables of the store.
#[test]
fn docs_of_the_store_are_fresh() {
    fresh_part("docs/reference/store.md", "tables", &tables_of_the_store());
}

fn tables_of_the_store() -> String {
    let mut out = String::from("| table | | a row is | key |\n|---|---|---|---|\n");
    for table in corpus::store::schema::TABLES {
        let kind = if table.is_derived() { "derived" } else { "kept" };
        let _ = writeln!(out, "| `{}` | {kind} | {} | `{}` |", table.name, table.about, table.key);
    }
    out
}

/// The life of a ring entry.
#[test]
fn docs_of_transitions_are_fresh() {
    let mut table = String::from("| from | to | by | when |\n|---|---|---|---|\n");
    for change in abi::CHANGES {
        let (from, to) = (change.from.name(), change.to.name());
        let _ = writeln!(table, "| {from} | {to} | {} | {} |", change.by.name(), change.when);
    }
    fresh_part("docs/explanation/protocol.md", "transitions", &table);
}

/// The telemetry segment as a C header, for readers in other languages.
#[test]
fn the_header_of_telemetry_is_fresh() {
    let mut out = String::from(
        "/* The shared stats segment of a running amk (docs/reference/telemetry.md). Generated from abi/src/telemetry.rs by the tests\n\
         (BLESS=1 cargo test -p tests docs). Each field's comment begins with its offset. */\n#include <stdint.h>\n",
    );
    for part in abi::telemetry_structs() {
        let _ = writeln!(out, "\n/* {} bytes. */\nstruct {} {{", part.size, part.c_name);
        for field in part.fields {
            let len = field.len.map_or(String::new(), |len| format!("[{len}]"));
            let declared = format!("{} {}{len};", field.ty.c_name(), field.name);
            let _ = writeln!(out, "  {declared:36} /* {}: {} */", field.offset, field.doc.trim());
        }
        out.push_str("};\n");
    }
    fresh("docs/reference/amk_telemetry.h", &out);
}

/// The attacks that the tests run.
#[test]
fn attacks_are_listed() {
    fresh_part("docs/reference/attacks.md", "attacks", &crate::attacks::table());
}
