//! What programs that read our documents rely on: a field that a schema id ever had is there under that id, of the same type.
//!
//! `tests/schemas.json` has the fields of every document. New ones are added with `BLESS=1 cargo test -p amk --test cli schemas`; one that is gone or
//! has another type needs a new id, and blessing does not take it away.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Path, PathBuf, amk_in, folder};

/// Fields of a document: dotted path to type. Elements of a list have one path.
type Fields = BTreeMap<String, String>;

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemas.json")
}

/// Names that are data are not fields: knobs, ids, paths.
const DATA: [&str; 7] =
    ["search_space", "best_config", "config", "schedule_config", "changed", "changes", "names"];

fn fields_of(value: &Value, at: &str, into: &mut Fields) {
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

/// The documents of a small work day, by schema.
fn documents() -> BTreeMap<String, Fields> {
    let dir = folder();
    std::fs::write(dir.path().join("a.json"), r#"{"pipeline": {"stages": 4}}"#).unwrap();
    std::fs::write(dir.path().join("bad.json"), r#"{"pipeline": {"stages": 99}}"#).unwrap();
    let toy = ["--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
    let with_toy =
        |args: &[&str]| args.iter().chain(&toy).map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let plain = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let calls = [
        plain("doctor"),
        with_toy(&["propose"]),
        with_toy(&["evaluate", "--config", "a.json"]),
        with_toy(&["evaluate", "--config", "bad.json"]),
        with_toy(&["loop", "--budget", "3", "--out", "runs/a"]),
        with_toy(&["loop", "--budget", "3", "--seed", "4", "--out", "runs/b"]),
        plain("runs list runs"),
        plain("runs verify runs"),
        plain("runs show runs/a"),
        plain("runs compare runs/a runs/b"),
        plain("runs replay runs/a"),
        plain("runs export runs --out trajectories"),
        plain("runs gc runs"),
        plain("corpus show"),
        plain("corpus check"),
        plain("corpus import runs"),
        plain("corpus export --out store.jsonl"),
        with_toy(&["lower", "-o", "toy.amk"]),
        plain("verify toy.amk"),
        plain("interpret toy.amk --model toy"),
        with_toy(&["rerun", "--task", "0:1"]),
        plain("explain"),
        plain("explain S-RING"),
        plain("diff a.json bad.json"),
        plain("diff a.json a.json --model toy"),
        plain("diff toy.amk toy.amk"),
        plain("report runs"),
        with_toy(&["bench", "--context", "8"]),
        plain("generate --model toy --device eval --tokens 1,2 --max-new-tokens 2"),
        plain("export --model toy --out toy"),
        plain("man --out pages"),
        plain("evaluate --model no-such-model"),
    ];
    let mut all: BTreeMap<String, Fields> = BTreeMap::new();
    for call in calls {
        let args: Vec<&str> = call.iter().map(String::as_str).collect();
        let document = amk_in(dir.path(), &args).json();
        let schema = document["schema"].as_str().unwrap_or_else(|| panic!("{args:?}: {document}"));
        fields_of(&document, "", all.entry(schema.to_owned()).or_default());
    }
    all
}

/// What of `old` is not in `new`, in words. What is null on either side, or lies in a list that is empty now, says nothing.
fn broken(old: &BTreeMap<String, Fields>, new: &BTreeMap<String, Fields>) -> Vec<String> {
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

#[test]
fn documents_keep_their_fields() {
    let new = documents();
    let text = std::fs::read_to_string(recorded()).unwrap_or_else(|_| "{}".to_owned());
    let mut old: BTreeMap<String, Fields> = serde_json::from_str(&text).unwrap();
    let broken = broken(&old, &new);
    assert!(
        broken.is_empty(),
        "a new schema id is needed, or the field back:\n{}",
        broken.join("\n")
    );
    let before = old.clone();
    for (schema, fields) in new {
        let known = old.entry(schema).or_default();
        for (path, kind) in fields {
            let entry = known.entry(path).or_insert_with(|| kind.clone());
            if entry == "null" {
                *entry = kind;
            }
        }
    }
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(recorded(), serde_json::to_string_pretty(&old).unwrap() + "\n").unwrap();
        return;
    }
    assert!(before == old, "new fields: BLESS=1 cargo test -p amk --test cli schemas");
}

#[test]
fn a_field_that_is_gone_or_changed_is_found() {
    let of = |text: &str| -> BTreeMap<String, Fields> {
        let document: Value = serde_json::from_str(text).unwrap();
        let mut fields = Fields::new();
        fields_of(&document, "", &mut fields);
        BTreeMap::from([("amk.x.v1".to_owned(), fields)])
    };
    let old = of(r#"{"a": 1, "b": {"c": "x"}, "d": [{"e": true}]}"#);
    assert!(broken(&old, &of(r#"{"a": 2, "b": {"c": "y", "z": 1}, "d": [], "n": 1}"#)).is_empty());
    assert!(broken(&old, &of(r#"{"a": 2, "b": null, "d": [{"e": false}]}"#)).is_empty());
    for (new, what) in [
        (r#"{"b": {"c": "x"}, "d": []}"#, "a is gone"),
        (r#"{"a": 1, "b": {}, "d": []}"#, "b.c is gone"),
        (r#"{"a": "1", "b": {"c": "x"}, "d": []}"#, "a is string and was number"),
        (r#"{"a": 1, "b": {"c": "x"}, "d": [{}]}"#, "d[].e is gone"),
    ] {
        let found = broken(&old, &of(new));
        assert!(found.len() == 1 && found[0].contains(what), "{new}: {found:?}");
    }
    assert_eq!(broken(&old, &BTreeMap::new()).len(), 1);
}
