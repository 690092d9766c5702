//! The fields of documents, and the fields on record in `tests/schemas.json` for every schema id. Shared by the tests
//! of the built binary and the unit tests, which make the documents that need a card.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Fields of a document: dotted path to type. All elements of a list share one path.
pub(crate) type Fields = BTreeMap<String, String>;

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemas.json")
}

/// Names that are data and not fields: knobs, ids, paths.
const DATA: [&str; 11] = [
    "search_space",
    "best_config",
    "config",
    "schedule_config",
    "start_config",
    "changed",
    "changes",
    "names",
    "dropped",
    "axes",
    "base",
];

pub(crate) fn fields_of(value: &Value, at: &str, into: &mut Fields) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if !at.is_empty() {
        let known = into.entry(at.to_owned()).or_insert_with(|| kind.to_owned());
        if known == "null" {
            *known = kind.to_owned();
        }
    }
    let last = at.rsplit('.').next().unwrap_or_default();
    match value {
        Value::Object(map) if !DATA.contains(&last) => {
            for (name, value) in map {
                let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                fields_of(value, &path, into);
            }
        }
        Value::Array(list) => {
            list.iter().for_each(|value| fields_of(value, &format!("{at}[]"), into))
        }
        Value::Object(_) | Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Lists what of `old` is missing from `new`. A null on either side, or a list that is empty now, is not counted.
pub(crate) fn broken(
    old: &BTreeMap<String, Fields>,
    new: &BTreeMap<String, Fields>,
) -> Vec<String> {
    let mut broken = Vec::new();
    for (schema, fields) in old {
        let Some(now) = new.get(schema) else {
            broken.push(format!("nothing answers with {schema} any more"));
            continue;
        };
        for (path, kind) in fields {
            let parent = path.rsplit_once(['.', '[']).map(|(parent, _)| parent.to_owned());
            let there = parent.is_none_or(|parent| {
                now.get(&parent).is_some_and(|kind| kind == "object" && !path.ends_with(']'))
            });
            match now.get(path) {
                None if there => broken.push(format!("{schema}: {path} is gone")),
                Some(other) if other != kind && other != "null" && kind != "null" => {
                    broken.push(format!("{schema}: {path} is {other} and was {kind}"));
                }
                None | Some(_) => {}
            }
        }
    }
    broken
}

/// The fields on record, by schema.
pub(crate) fn known() -> BTreeMap<String, Fields> {
    let text = std::fs::read_to_string(recorded()).unwrap_or_else(|_| "{}".to_owned());
    serde_json::from_str(&text).unwrap()
}

/// Compares documents with the record, or adds their new fields to it (`BLESS=1`). Schemas that are not in `new` are skipped.
pub(crate) fn settle(new: BTreeMap<String, Fields>) {
    let mut known = known();
    let old = known.iter().filter(|(schema, _)| new.contains_key(*schema));
    let broken = broken(&old.map(|(s, f)| (s.clone(), f.clone())).collect(), &new);
    assert!(
        broken.is_empty(),
        "a new schema id is needed, or the field back:\n{}",
        broken.join("\n")
    );
    let before = known.clone();
    for (schema, fields) in new {
        let held = known.entry(schema).or_default();
        for (path, kind) in fields {
            let entry = held.entry(path).or_insert_with(|| kind.clone());
            if entry == "null" {
                *entry = kind;
            }
        }
    }
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(recorded(), serde_json::to_string_pretty(&known).unwrap() + "\n").unwrap();
        return;
    }
    assert!(before == known, "new fields: BLESS=1 cargo test -p amk --test cli schemas");
}
