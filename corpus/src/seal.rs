//! Documents that contain their own hash, so that edits are detected.
//!
//! The hash is the blake3 of the document's canonical text without its field `hash`: keys in alphabetical order, no
//! white space, numbers as `serde_json` prints them. Reformatting and reordering keep it, any other change does not.
//! Like the ledger's chain it protects against mistakes and quiet edits, not against recomputing the hash.

use serde_json::{Map, Value};

/// The field that holds the hash.
const FIELD: &str = "hash";

/// Adds the hash as the last field, or replaces it.
#[must_use]
pub fn seal(document: &Map<String, Value>) -> Map<String, Value> {
    let mut sealed = without_hash(document);
    sealed.insert(FIELD.to_owned(), hash(document).into());
    sealed
}

/// Checks that the hash is present and correct.
///
/// # Errors If there is no hash, or it differs.
pub fn check_seal(document: &Map<String, Value>) -> Result<(), String> {
    let Some(held) = document.get(FIELD).and_then(Value::as_str) else {
        return Err("it has no hash".to_owned());
    };
    let found = hash(document);
    if held == found {
        return Ok(());
    }
    Err(format!("it was edited: its hash is {held}, its contents have {found}"))
}

fn without_hash(document: &Map<String, Value>) -> Map<String, Value> {
    let fields = document.iter().filter(|(key, _)| *key != FIELD);
    fields.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn hash(document: &Map<String, Value>) -> String {
    let mut text = String::new();
    canonical(&Value::Object(without_hash(document)), &mut text);
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

fn canonical(value: &Value, out: &mut String) {
    let mut list = |open: char, close: char, items: Vec<(Option<&String>, &Value)>| {
        out.push(open);
        for (index, (key, item)) in items.into_iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            if let Some(key) = key {
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
            }
            canonical(item, out);
        }
        out.push(close);
    };
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().map(|(key, item)| (Some(key), item)).collect();
            fields.sort_by_key(|(key, _)| *key);
            list('{', '}', fields);
        }
        Value::Array(items) => list('[', ']', items.iter().map(|item| (None, item)).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn a_seal_survives_printing_and_reordering() {
        // Numbers whose shortest text is misread as a neighbour by a parser without exact rounding.
        let sealed = seal(&object(json!({
            "b": [0.1, 643.012_345_678_901_2, 1e-7, 5.0, 8.988_465_674_311_579e307, u64::MAX],
            "a": {"y": null, "x": "\u{e9}\"\n"},
        })));
        assert_eq!(check_seal(&sealed), Ok(()));
        let pretty = serde_json::to_string_pretty(&sealed).expect("text");
        let parsed: Map<String, Value> = serde_json::from_str(&pretty).expect("an object");
        assert_eq!(check_seal(&parsed), Ok(()));
        let reversed: Map<String, Value> = parsed.into_iter().rev().collect();
        assert_eq!(check_seal(&reversed), Ok(()));
        assert_eq!(seal(&sealed), sealed, "sealing twice changes nothing");
    }

    #[test]
    fn every_edit_breaks_it() {
        let sealed = seal(&object(json!({"us": 640.5, "config": {"stages": 5}, "list": [1, 2]})));
        let edits: [(&str, Value); 4] = [
            ("/us", json!(640.4)),
            ("/config/stages", json!(6)),
            ("/list", json!([2, 1])),
            ("/hash", json!("0".repeat(64))),
        ];
        for (place, value) in edits {
            let mut edited = Value::Object(sealed.clone());
            *edited.pointer_mut(place).expect(place) = value;
            assert!(check_seal(&object(edited)).is_err(), "{place}");
        }
        let mut more = sealed.clone();
        more.insert("note".to_owned(), json!("faster"));
        assert!(check_seal(&more).is_err());
        let mut none = sealed;
        none.remove(FIELD);
        assert_eq!(check_seal(&none), Err("it has no hash".to_owned()));
    }
}
