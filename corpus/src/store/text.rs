//! The store as JSON lines: the ledgers' own lines, each prefixed with the id of its run, and programs in hexadecimal.
//! Imports are checked by the same chain.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};

use serde_json::Value;

use super::Store;
use crate::error::{At, CorpusError};
use crate::ledger::Link;

/// Longest line that is read: a program in hexadecimal, or a row with its samples.
const LINE_MAX: u64 = 256 << 20;

/// The contents of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// The rows of each run, the header first.
    pub runs: BTreeMap<String, Vec<Link>>,
    /// Programs by id, in their binary form.
    pub programs: Vec<(String, Vec<u8>)>,
}

/// Writes every record and every program.
///
/// # Errors
/// If the store cannot be read or the lines cannot be written.
pub fn write(store: &Store, out: &mut impl Write) -> Result<u64, CorpusError> {
    let path = store.path();
    let mut lines = 0;
    for run in store.runs()? {
        for link in store.links(&run)? {
            writeln!(out, "{{\"run\":\"{run}\",{}", &link.line()[1..]).at("write", path)?;
            lines += 1;
        }
    }
    for row in store.query("SELECT program_id, saved FROM programs ORDER BY program_id", &[])? {
        writeln!(out, "{{\"program\":{},\"saved\":{}}}", row["program_id"], row["saved"])
            .at("write", path)?;
        lines += 1;
    }
    out.flush().at("write", path)?;
    Ok(lines)
}

/// Reads what [`write`] wrote. The chain is checked by [`Store::add`].
///
/// # Errors
/// The first line that is malformed, counted from one, with the expected form.
pub fn read(mut input: impl BufRead) -> Result<Exported, String> {
    let mut found = Exported::default();
    for number in 1.. {
        let mut line = Vec::new();
        let read = input.by_ref().take(LINE_MAX + 1).read_until(b'\n', &mut line);
        if read.map_err(|e| format!("line {number}: {e}"))? == 0 {
            break;
        }
        if line.len() as u64 > LINE_MAX {
            return Err(format!("line {number} has more than {LINE_MAX} bytes"));
        }
        let line = String::from_utf8(line).map_err(|_| format!("line {number} is not text"))?;
        let line = line.trim_end_matches(['\n', '\r']);
        let taken = match line.strip_prefix("{\"run\":\"").and_then(|rest| rest.split_once("\",")) {
            Some((run, rest)) => Link::parse(&format!("{{{rest}"))
                .map(|link| found.runs.entry(run.to_owned()).or_default().push(link)),
            None => program(line).map(|program| found.programs.push(program)),
        };
        if taken.is_none() {
            return Err(format!("line {number} is neither a row of a run nor a program"));
        }
    }
    Ok(found)
}

fn program(line: &str) -> Option<(String, Vec<u8>)> {
    let fields: Value = serde_json::from_str(line).ok()?;
    let text = |key: &str| fields.get(key).and_then(Value::as_str);
    Some((text("program")?.to_owned(), unhex(text("saved")?)?))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or('0');
    bytes.iter().flat_map(|&byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2).map(|pair| {
        let digit = |&digit: &u8| char::from(digit).to_digit(16);
        let [high, low] = pair else { return None };
        u8::try_from(digit(high)? * 16 + digit(low)?).ok()
    });
    digits.collect()
}
