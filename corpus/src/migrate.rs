//! Migration of documents from the previous version's names: schedules, grids and ledgers.
//!
//! Only names change: knobs, their values, and a few fields and values of documents. Every schedule id that depends on
//! those names is recomputed wherever the document mentions it; texts for people stay unchanged. A rewritten document
//! has `migrated_from`: the hash of the original file, or of the last row of the original ledger.

use std::collections::BTreeMap;
use std::path::Path;

use ir::schedule::{self, ScheduleConfig};
use serde_json::{Map, Value, json};

use crate::ledger::{EARLIER_LEDGER_SCHEMA, read_earlier};
use crate::{CorpusError, LEDGER_SCHEMA, Ledger};

/// Renamed fields: old name, new name.
const FIELDS: &[(&str, &str)] = &[("n_slots", "n_buffers")];

/// Renamed values of fields.
const VALUES: &[(&str, &str, &str)] = &[
    ("schema", EARLIER_LEDGER_SCHEMA, LEDGER_SCHEMA),
    ("schema", "amk.landscape.v1", "amk.measured_grid.v1"),
    ("schema", "amk.verdict.v1", "amk.verdict.v2"),
    ("strategy", "climb", "hill-climb"),
    ("outcome", "below_floor", "below_bound"),
    ("gate", "floor", "bound"),
];

/// Documents with a field `migrated_from`, by schema.
const SAYS_FROM: &[&str] = &["amk.measured_grid.v1", LEDGER_SCHEMA];

/// Rewrites the JSON documents of one file, or of its lines. Returns how many of them changed.
pub fn documents(documents: &mut [Value], from: &str) -> usize {
    let before = documents.to_vec();
    for document in &mut *documents {
        rename(document, "", false);
    }
    let mut ids = BTreeMap::new();
    for document in &*documents {
        collect_ids(document, &mut ids);
    }
    for document in &mut *documents {
        replace_ids(document, &ids);
    }
    let changed = before.iter().zip(&*documents).filter(|(before, after)| before != after).count();
    if let Some(Value::Object(first)) = documents.first_mut()
        && changed > 0
        && first.get("schema").and_then(Value::as_str).is_some_and(|id| SAYS_FROM.contains(&id))
    {
        first.insert("migrated_from".to_owned(), json!(from));
    }
    changed
}

/// Rewrites the text of a file: one JSON document, or one per line. Returns the new text and how many documents
/// changed.
///
/// # Errors
/// The first line that is not JSON.
pub fn text(text: &str) -> Result<(String, usize), serde_json::Error> {
    let from = blake3::hash(text.as_bytes()).to_hex();
    if let Ok(mut document) = serde_json::from_str::<Value>(text) {
        let schema = document.get("schema").and_then(Value::as_str).unwrap_or_default();
        if schema.starts_with("amk.bundle.") {
            return Err(<serde_json::Error as serde::de::Error>::custom(
                "a bundle is evidence of one program and kernel; measure again: amk bench --bundle",
            ));
        }
        let changed = documents(std::slice::from_mut(&mut document), &from);
        return Ok((format!("{document:#}\n"), changed));
    }
    let lines = text.lines().map(serde_json::from_str);
    let mut rows = lines.collect::<Result<Vec<Value>, _>>()?;
    let changed = documents(&mut rows, &from);
    Ok((rows.iter().map(|row| format!("{row}\n")).collect(), changed))
}

/// Rewrites the ledger of a run into a new file, with a new chain. Returns its rows.
///
/// # Errors
/// If it is not a ledger of the previous version, was tampered with, or the new one cannot be written.
pub fn ledger(from: &Path, to: &Path) -> Result<u64, CorpusError> {
    let earlier = read_earlier(from)?;
    let last = earlier.hashes.last().cloned().unwrap_or_default();
    let mut rows: Vec<Value> = std::iter::once(earlier.header).chain(earlier.records).collect();
    documents(&mut rows, &last);
    let mut ledger = Ledger::create(to, &rows[0])?;
    for row in &rows[1..] {
        ledger.append(row)?;
    }
    Ok(rows.len() as u64)
}

/// The current path of a knob named in a text or a field.
fn renamed(name: &str) -> Option<String> {
    if let Some(knob) = schedule::renamed_knob(name) {
        return Some(knob.path().to_owned());
    }
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let knob = schedule::RENAMED_KNOBS.iter().find(|(old, _)| last(old) == name);
    knob.map(|(_, knob)| last(knob.path()))
}

/// `field` is the key that holds the value, `in_sync` whether a key above it belongs to the `sync` knobs.
fn rename(value: &mut Value, field: &str, in_sync: bool) {
    match value {
        Value::Object(fields) => {
            let mut new = Map::new();
            for (key, mut child) in std::mem::take(fields) {
                rename(&mut child, &key, in_sync || key == "sync" || key.starts_with("sync."));
                let today =
                    FIELDS.iter().find(|(old, _)| *old == key).map(|(_, new)| (*new).into());
                new.insert(today.or_else(|| renamed(&key)).unwrap_or(key), child);
            }
            *fields = new;
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, field, in_sync)),
        Value::String(text) => {
            let value = VALUES.iter().find(|(at, old, _)| *at == field && old == text);
            if let Some((_, _, new)) = value {
                *text = (*new).to_owned();
            } else if let Some(knob) = schedule::renamed_knob(text) {
                *text = knob.path().to_owned();
            } else if let Some(new) = schedule::renamed_value(text).filter(|_| in_sync) {
                *text = new.to_owned();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Earlier ids of the schedules in a document, with the current ones.
fn collect_ids(value: &Value, ids: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            if fields.contains_key("pipeline")
                && let Ok(config) = serde_json::from_value::<ScheduleConfig>(value.clone())
            {
                ids.insert(schedule::earlier_schedule_id(&config), config.id());
            }
            fields.values().for_each(|child| collect_ids(child, ids));
        }
        Value::Array(items) => items.iter().for_each(|item| collect_ids(item, ids)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn replace_ids(value: &mut Value, ids: &BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|child| replace_ids(child, ids)),
        Value::Array(items) => items.iter_mut().for_each(|item| replace_ids(item, ids)),
        Value::String(text) => {
            if let Some(new) = ids.get(text.as_str()) {
                text.clone_from(new);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
#[path = "migrate_tests.rs"]
mod tests;
