//! The generated C header: committed, accepted by a C++ compiler, and rejected after any edit that moves a field.
//!
//! A missing compiler fails these tests. `AMK_NO_CXX=1` declares that it is missing, and skips what needs one.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-device/include/amk_abi.h")
}

#[test]
fn header_is_fresh() {
    let expected = abi::c_header();
    if std::env::var_os("BLESS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path().parent().unwrap_or(Path::new(".")))
            .expect("the folder can be made");
        std::fs::write(path(), &expected).expect("the header can be written");
    }
    let committed = std::fs::read_to_string(path()).unwrap_or_default();
    assert!(
        committed == expected,
        "{} is stale; run: BLESS=1 cargo test -p abi header_is_fresh",
        path().display()
    );
}

/// The compiler, or `None` if its absence is excused.
fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let works = Command::new(&name)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success());
    if works {
        return Some(name);
    }
    assert!(
        std::env::var_os("AMK_NO_CXX").is_some(),
        "no C++ compiler `{name}`: the header is NOT checked. Install one, set CXX, or accept that with AMK_NO_CXX=1"
    );
    eprintln!("skipped: no C++ compiler `{name}`, and AMK_NO_CXX is set");
    None
}

/// Compiles text without output; returns the errors.
fn compile(compiler: &str, text: &str, name: &str) -> Result<(), String> {
    let file = std::env::temp_dir().join(format!("amk-abi-{}-{name}.cc", std::process::id()));
    std::fs::write(&file, text).expect("a temporary file can be written");
    let flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-fmax-errors=0"];
    let output =
        Command::new(compiler).args(flags).arg(&file).output().expect("the compiler starts");
    std::fs::remove_file(&file).expect("the temporary file can be removed");
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// `#pragma once` is a warning in a main file.
fn header() -> String {
    abi::c_header().replace("#pragma once\n", "") + &abi::c_field_asserts()
}

#[test]
fn header_compiles() {
    let Some(compiler) = compiler() else { return };
    if let Err(errors) = compile(&compiler, &header(), "whole") {
        panic!("{errors}");
    }
}

/// A struct of the header, split into the text before, the field lines and the text after.
struct Struct<'a> {
    name: &'a str,
    open: &'a str,
    fields: Vec<&'a str>,
    close: Vec<&'a str>,
}

fn structs(header: &str) -> Vec<Struct<'_>> {
    let mut found: Vec<Struct<'_>> = Vec::new();
    let mut inside = false;
    for line in header.lines() {
        if let Some(rest) = line.strip_prefix("struct ") {
            let name = rest.trim_end_matches(" {").rsplit(' ').next().unwrap_or(rest);
            found.push(Struct { name, open: line, fields: Vec::new(), close: Vec::new() });
            inside = true;
        } else if let Some(current) = found.last_mut() {
            if line == "};" {
                inside = false;
                current.close.push(line);
            } else if inside {
                current.fields.push(line);
            } else if line.starts_with("static_assert(sizeof") {
                current.close.push(line);
            }
        }
        if let Some(rest) = line.strip_prefix("static_assert(AMK_OFFSETOF(") {
            let of = rest.split(',').next();
            found
                .iter_mut()
                .filter(|known| Some(known.name) == of)
                .for_each(|known| known.close.push(line));
        }
    }
    found
}

/// The type of a field line, and its array suffix.
fn shape(field: &str) -> (&str, &str) {
    let mut words = field.trim().splitn(2, ' ');
    let ty = words.next().unwrap_or("");
    let rest = words.next().unwrap_or("").split(';').next().unwrap_or("");
    (ty, rest.find('[').map_or("", |start| &rest[start..]))
}

fn bytes(ty: &str) -> u32 {
    match ty {
        "uint8_t" => 1,
        "uint16_t" => 2,
        "uint64_t" => 8,
        _ => 4,
    }
}

/// Every edit of the fields that must not compile: neighbours of equal size swapped, and a field made wider.
fn edits(layout: &Struct<'_>) -> Vec<Vec<String>> {
    let lines: Vec<String> = layout.fields.iter().map(|line| (*line).to_owned()).collect();
    let mut edits = Vec::new();
    for index in 0..lines.len() {
        let (ty, array) = shape(layout.fields[index]);
        let equal = |other: &str| (bytes(shape(other).0), shape(other).1) == (bytes(ty), array);
        if layout.fields.get(index + 1).is_some_and(|next| equal(next)) {
            let mut edit = lines.clone();
            edit.swap(index, index + 1);
            edits.push(edit);
        }
        let wide = match ty {
            "uint8_t" => "uint16_t",
            "uint16_t" => "uint32_t",
            _ => "uint64_t",
        };
        let mut edit = lines.clone();
        edit[index] = if ty == "uint64_t" {
            format!("uint64_t wider; {}", lines[index])
        } else {
            lines[index].replacen(ty, wide, 1)
        };
        edits.push(edit);
    }
    edits
}

/// All edits in one translation unit, each in a namespace of its own; every namespace must be named in an error.
#[test]
fn every_moved_field_is_rejected() {
    let Some(compiler) = compiler() else { return };
    // Errors inside a macro would carry the line of the macro.
    let header = header();
    let mut text = String::from("#include <stdint.h>\n");
    let mut names = Vec::new();
    for layout in structs(&header) {
        let close = layout.close.join("\n").replace("AMK_OFFSETOF", "__builtin_offsetof");
        for (index, fields) in edits(&layout).into_iter().enumerate() {
            let name = format!("{}_{index}_edit", layout.name);
            text += &format!(
                "namespace {name} {{\n{}\n{}\n{}\n}}\n",
                layout.open,
                fields.join("\n"),
                close
            );
            names.push((name, fields));
        }
    }
    assert!(names.len() > 150, "only {} edits", names.len());
    let errors = compile(&compiler, &text, "edits").expect_err("edited headers must not compile");
    // Errors carry line numbers: find the namespace that each is in.
    let lines: Vec<&str> = text.lines().collect();
    let mut hit: Vec<&str> = Vec::new();
    for error in errors.lines().filter(|line| line.contains(": error: static assertion failed")) {
        let number: usize = error.split(':').nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
        let open = lines[..number].iter().rev().find_map(|line| line.strip_prefix("namespace "));
        hit.extend(open.map(|line| line.trim_end_matches(" {")));
    }
    let missed: Vec<&(String, Vec<String>)> =
        names.iter().filter(|(name, _)| !hit.contains(&name.as_str())).collect();
    assert!(
        missed.is_empty(),
        "{} of {} edits compile, such as {:?}",
        missed.len(),
        names.len(),
        missed.first()
    );
    println!("{} edits of the header, all rejected", names.len());
}

/// Stored programs and bundles hold this number. If it changes, measure the shipped schedules again, and write the new one here.
#[test]
fn programs_keep_their_language() {
    assert_eq!(abi::program_hash(), 0x18ed_7377_a7fd_20d5, "{:#x}", abi::program_hash());
}
