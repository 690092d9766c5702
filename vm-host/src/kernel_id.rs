//! What a compiled kernel is called: a hash of the code that its compilation reaches.
//!
//! A measurement holds for a kernel's id. Comments, branches of `#if` that the kernel's macros leave out, and declarations of the generated
//! header that the rest does not name are no part of the machine code, so an edit there leaves the id, and with it every measurement, as it is.

use std::collections::{BTreeMap, BTreeSet};

/// Macros that NVRTC defines itself; only whether they are defined is asked.
const COMPILER: [&str; 2] = ["__CUDACC_RTC__", "__CUDA_ARCH__"];
/// The hash of the layout, which only a probe kernel returns: structures that a kernel uses are in its text anyway.
const LAYOUT: &str = "AMK_ABI_HASH";

/// The id of `source` compiled with `options`.
pub(crate) fn kernel_id(source: &str, options: &[String]) -> String {
    let bare = without_comments(source);
    // Code that is not understood is kept whole: then every edit counts.
    let reached = reached(&bare, options).map(|text| named(&text));
    digest(&joined(&reached.unwrap_or(bare)), options)
}

pub(crate) fn digest(source: &str, options: &[String]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(source.as_bytes());
    for option in options {
        hasher.update(option.as_bytes());
        hasher.update(&[0]);
    }
    hasher.finalize().to_hex()[..16].to_string()
}

/// The source without comments, indentation and empty lines.
fn without_comments(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find(['/', '"']) {
        code += &rest[..at];
        let tail = &rest[at..];
        let (kept, length) = if tail.starts_with("//") {
            ("", tail.find('\n').unwrap_or(tail.len()))
        } else if tail.starts_with("/*") {
            (" ", tail.find("*/").map_or(tail.len(), |end| end + 2))
        } else {
            let length = if tail.starts_with('"') { string_len(tail) } else { 1 };
            (&tail[..length], length)
        };
        code += kept;
        rest = &tail[length..];
    }
    code += rest;
    code.lines().map(str::trim).filter(|line| !line.is_empty()).flat_map(|l| [l, "\n"]).collect()
}

/// The text of all files as one: in which of them a line stands is no part of the machine code.
fn joined(text: &str) -> String {
    let of_files = |line: &&str| !line.starts_with("#line ") && *line != "#pragma once";
    text.lines().filter(of_files).flat_map(|line| [line, "\n"]).collect()
}

/// Length of the string literal that `text` begins with.
fn string_len(text: &str) -> usize {
    let mut escaped = true; // the opening quote does not end it
    let end = text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = if byte == b'"' { false } else { byte == b'\\' && !escaped };
        ends
    });
    end.map_or(text.len(), |end| end + 1)
}

/// The lines that the preprocessor keeps, or nothing if a condition is not understood.
fn reached(code: &str, options: &[String]) -> Option<String> {
    let given = options.iter().filter_map(|option| option.strip_prefix("-D")?.split_once('='));
    let mut macros: BTreeMap<&str, &str> = given.chain(COMPILER.map(|name| (name, "1"))).collect();
    // Per open `#if`: whether its lines are kept, whether some branch was, whether the lines around it are.
    let mut open: Vec<[bool; 3]> = Vec::new();
    let mut text = String::with_capacity(code.len());
    for line in code.lines() {
        let around = open.last().is_none_or(|[kept, ..]| *kept);
        let (directive, rest) = line.split_once(' ').unwrap_or((line, ""));
        match directive {
            "#if" | "#ifdef" | "#ifndef" => {
                let holds = around && holds(directive, rest, &macros)?;
                open.push([holds, holds, around]);
            }
            "#elif" => {
                let [kept, any, outer] = open.last_mut()?;
                *kept = *outer && !*any && value(rest, &macros)? != 0;
                *any |= *kept;
            }
            "#else" => {
                let [kept, any, outer] = open.last_mut()?;
                *kept = *outer && !*any;
            }
            "#endif" => {
                open.pop()?;
            }
            _ if around => {
                if let Some((name, value)) = definition(line) {
                    macros.insert(name, value);
                }
                text += line;
                text.push('\n');
            }
            _ => {}
        }
    }
    open.is_empty().then_some(text)
}

fn holds(directive: &str, rest: &str, macros: &BTreeMap<&str, &str>) -> Option<bool> {
    match directive {
        "#ifdef" => Some(macros.contains_key(rest)),
        "#ifndef" => Some(!macros.contains_key(rest)),
        _ => Some(value(rest, macros)? != 0),
    }
}

/// Name and value of a macro without arguments.
fn definition(line: &str) -> Option<(&str, &str)> {
    let rest = line.strip_prefix("#define ")?;
    let end = rest.find(|letter| !is_word(letter)).unwrap_or(rest.len());
    let (name, value) = rest.split_at(end);
    (!value.starts_with('(')).then(|| (name, value.trim()))
}

/// The text without the declarations of its first file, the generated header, that nothing else names.
fn named(text: &str) -> String {
    let end = text[1..].find("#line ").map_or(text.len(), |at| at + 1);
    let (header, rest) = text.split_at(end);
    let mut wanted: BTreeSet<&str> = words(rest).collect();
    let mut items = items(header);
    // From the last to the first: a declaration names only those before it.
    items.reverse();
    items.retain(|item| {
        let keep = item.name.is_none_or(|name| name != LAYOUT && wanted.contains(name));
        if keep {
            wanted.extend(words(item.text));
        }
        keep
    });
    items.iter().rev().map(|item| item.text).chain([rest]).collect()
}

/// A declaration of the header.
struct Item<'a> {
    /// What it declares; a check names the structure that it is about.
    name: Option<&'a str>,
    text: &'a str,
}

fn items(header: &str) -> Vec<Item<'_>> {
    let mut found = Vec::new();
    let mut rest = header;
    while !rest.is_empty() {
        let line = rest.lines().next().unwrap_or_default();
        let structure = line.starts_with("struct ");
        let end = if structure { rest.find("\n};\n").map(|at| at + 4) } else { None };
        let (text, tail) = rest.split_at(end.unwrap_or(line.len() + 1).min(rest.len()));
        let checked = line.strip_prefix("static_assert(sizeof(").and_then(|l| words(l).next());
        let declared = structure.then(|| words(line).find(|word| word.starts_with("amk_")));
        let name = definition(line).map(|(name, _)| name).or(checked).or(declared.flatten());
        found.push(Item { name, text });
        rest = tail;
    }
    found
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter| !is_word(letter)).filter(|word| !word.is_empty())
}

/// The value of a condition: numbers, macros, `defined`, and the binary operators of [`OPERATORS`].
fn value(condition: &str, macros: &BTreeMap<&str, &str>) -> Option<u64> {
    let mut reader = Reader { rest: condition, macros, depth: 0 };
    let value = reader.binary(0)?;
    reader.rest.trim_start().is_empty().then_some(value)
}

type Operator = (&'static str, fn(u64, u64) -> Option<u64>);

/// By precedence, the weakest first. A longer operator stands before its beginning.
const OPERATORS: [&[Operator]; 7] = [
    &[("||", |a, b| Some(u64::from(a != 0 || b != 0)))],
    &[("&&", |a, b| Some(u64::from(a != 0 && b != 0)))],
    &[("&", |a, b| Some(a & b))],
    &[("==", |a, b| Some(u64::from(a == b))), ("!=", |a, b| Some(u64::from(a != b)))],
    &[(">", |a, b| Some(u64::from(a > b)))],
    &[(">>", |a, b| a.checked_shr(u32::try_from(b).ok()?))],
    &[("*", u64::checked_mul)],
];

/// How deep macros may stand for others.
const DEPTH_MAX: u32 = 8;

struct Reader<'a> {
    rest: &'a str,
    macros: &'a BTreeMap<&'a str, &'a str>,
    depth: u32,
}

impl Reader<'_> {
    fn binary(&mut self, level: usize) -> Option<u64> {
        let Some(operators) = OPERATORS.get(level) else { return self.single() };
        let mut left = self.binary(level + 1)?;
        while let Some((_, apply)) = operators.iter().find(|(name, _)| self.takes(name)) {
            left = apply(left, self.binary(level + 1)?)?;
        }
        Some(left)
    }

    /// Whether the next operator is this one and no longer one; takes it.
    fn takes(&mut self, name: &str) -> bool {
        let rest = self.rest.trim_start();
        let length = rest.find(|letter| !"|&=!><*".contains(letter)).unwrap_or(rest.len());
        let next = &rest[..length] == name;
        if next {
            self.rest = &rest[length..];
        }
        next
    }

    fn single(&mut self) -> Option<u64> {
        let rest = self.rest.trim_start();
        if let Some(inner) = rest.strip_prefix('(') {
            self.rest = inner;
            let value = self.binary(0)?;
            self.rest = self.rest.trim_start().strip_prefix(')')?;
            return Some(value);
        }
        let end = rest.find(|letter| !is_word(letter)).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        self.rest = tail;
        if word == "defined" {
            let (name, tail) = tail.trim_start().strip_prefix('(')?.split_once(')')?;
            self.rest = tail;
            return Some(u64::from(self.macros.contains_key(name.trim())));
        }
        if word.starts_with(|letter: char| letter.is_ascii_digit()) {
            return word.trim_end_matches(['u', 'l']).parse().ok();
        }
        if word.is_empty() || self.depth == DEPTH_MAX {
            return None;
        }
        // What is not defined is 0, as the language has it.
        let Some(text) = self.macros.get(word) else { return Some(0) };
        let mut inner = Reader { rest: text, macros: self.macros, depth: self.depth + 1 };
        let value = inner.binary(0)?;
        inner.rest.trim_start().is_empty().then_some(value)
    }
}

#[cfg(test)]
#[path = "kernel_id_tests.rs"]
mod tests;
