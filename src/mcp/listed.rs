//! Schemas as listed for clients: short, since a client puts the whole list into its model's context, and in the
//! keywords that all clients support.

use rmcp::model::JsonObject;
use schemars::Schema;
use serde_json::{Map, Value, json};

/// An answer's schema without the structure of its fields, which HARNESS.md describes.
pub(super) fn shallow(whole: &JsonObject) -> JsonObject {
    let definitions = whole.get("$defs").and_then(Value::as_object);
    let fields = whole.get("properties").and_then(Value::as_object);
    let field = |(name, schema): (&String, &Value)| {
        let mut shown = Map::new();
        let mut types = types(schema, definitions);
        types.dedup();
        match &types[..] {
            [] => {}
            [only] => drop(shown.insert("type".to_owned(), json!(only))),
            several => drop(shown.insert("type".to_owned(), json!(several))),
        }
        for key in ["const", "enum", "description"] {
            if let Some(value) = schema.get(key) {
                shown.insert(key.to_owned(), value.clone());
            }
        }
        (name.clone(), Value::Object(shown))
    };
    let fields: Map<String, Value> = fields.into_iter().flatten().map(field).collect();
    let mut shown = Map::new();
    shown.insert("type".to_owned(), json!("object"));
    shown.insert("properties".to_owned(), Value::Object(fields));
    shown
}

/// The JSON types that a value may have; none if the schema does not restrict them.
fn types<'a>(schema: &'a Value, definitions: Option<&'a Map<String, Value>>) -> Vec<&'a str> {
    match schema.get("type") {
        Some(Value::String(one)) => return vec![one],
        Some(Value::Array(several)) => return several.iter().filter_map(Value::as_str).collect(),
        _ => {}
    }
    if let Some(name) = schema.get("$ref").and_then(Value::as_str) {
        let name = name.rsplit('/').next().unwrap_or_default();
        return definitions
            .and_then(|all| all.get(name))
            .map_or_else(Vec::new, |definition| types(definition, None));
    }
    let any = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(*key)?.as_array());
    let each: Vec<Vec<&str>> =
        any.into_iter().flatten().map(|one| types(one, definitions)).collect();
    // One alternative without a type allows any.
    if each.iter().any(Vec::is_empty) { Vec::new() } else { each.concat() }
}

/// Arguments as listed. An optional argument also accepts null, which is not listed: clients that convert strings to
/// numbers rely on a single type.
pub(super) fn plain(mut input: JsonObject) -> JsonObject {
    let properties = input.get_mut("properties").and_then(Value::as_object_mut);
    for property in properties.into_iter().flat_map(|all| all.values_mut()) {
        if let Some(property) = property.as_object_mut() {
            property.retain(|key, value| key != "default" || !value.is_null());
        }
        if let Some(Value::Array(values)) = property.get_mut("enum") {
            values.retain(|value| !value.is_null());
        }
        let Some(Value::Array(types)) = property.get_mut("type") else { continue };
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            property["type"] = only.clone();
        }
    }
    input
}

/// A schema without the parts that clients do not need.
pub(super) fn object(schema: Schema) -> JsonObject {
    let Value::Object(mut object) = schema.to_value() else { return Map::new() };
    // The type's name and doc comment describe the Rust type; the tool has its own.
    object.remove("title");
    object.remove("$schema");
    object.remove("description");
    object.values_mut().for_each(without_widths);
    object
}

/// Removes the formats for the width of a number (`uint64`): JSON schema has none, and clients warn about each of them.
fn without_widths(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            let width = |format: &Value| {
                let name = format.as_str().unwrap_or_default();
                ["uint", "int", "float", "double"].iter().any(|width| name.starts_with(width))
            };
            if map.get("format").is_some_and(width) {
                map.remove("format");
            }
            map.values_mut().for_each(without_widths);
        }
        Value::Array(list) => list.iter_mut().for_each(without_widths),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
