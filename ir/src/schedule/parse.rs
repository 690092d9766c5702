//! Reads a config file: any subset of the tree of dotted paths, as JSON. All errors are reported at once.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;

use super::defaults::default_config;
use super::renamed::{renamed_knob, renamed_value};
use super::validate::check;
use super::value::Value;
use super::{Knob, ScheduleConfig, Valid};
use crate::graph::Graph;
use crate::nearest::nearest;
use crate::target::Target;
use crate::violation::{At, Rule, Violation, Violations, bounded};

/// Parses a config; missing knobs take [`default_config`]'s value. Rules between knobs are not checked here.
///
/// # Errors
/// Every unknown key, wrong type and value out of range, or the place where the text stops being JSON.
pub fn parse_config(
    text: &str,
    graph: &Graph,
    target: &Target,
) -> Result<ScheduleConfig, Violations> {
    let mut found = Violations::default();
    let config = read(default_config(graph, target), text, &mut found);
    found.into_result().map(|()| config)
}

/// Parses and validates in one call, and reports errors in the text together with those between knobs. Rules between
/// knobs use the default for a knob that could not be read.
///
/// # Errors
/// All violations.
pub fn read_config(
    text: &str,
    graph: &Graph,
    target: &Target,
) -> Result<Valid<ScheduleConfig>, Violations> {
    read_config_over(default_config(graph, target), text, graph, target)
}

/// The same with another schedule, such as the neutral one, for the knobs that the text leaves out.
///
/// # Errors
/// All violations.
pub fn read_config_over(
    base: ScheduleConfig,
    text: &str,
    graph: &Graph,
    target: &Target,
) -> Result<Valid<ScheduleConfig>, Violations> {
    let mut found = Violations::default();
    let config = read(base, text, &mut found);
    if !found.has(Rule::SJson) {
        for violation in check(&config, graph, target).list() {
            found.add(violation.clone());
        }
    }
    found.into_result().map(|()| Valid(config))
}

fn read(mut config: ScheduleConfig, text: &str, found: &mut Violations) -> ScheduleConfig {
    match unique_json(text) {
        Ok(tree) => walk(&tree, "", &mut config, found),
        Err(error) => {
            let at = At::Text { line: error.line() as u32, column: error.column() as u32 };
            let whole = error.to_string();
            let message =
                whole.rsplit_once(" at line ").map_or(whole.as_str(), |(message, _)| message);
            found.add(Violation::new(Rule::SJson, at, message));
        }
    }
    config
}

/// Reads JSON in which no object gives a key twice.
///
/// # Errors
/// The place of the first error.
pub fn unique_json(text: &str) -> Result<Json, serde_json::Error> {
    serde_json::from_str::<Unique>(text).map(|Unique(tree)| tree)
}

/// JSON in which no object gives a key twice: the parser alone would silently keep the last.
struct Unique(Json);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(value)) = seq.next_element()? {
            list.push(value);
        }
        Ok(Json::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut object = serde_json::Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key `{key}` is given twice")));
            }
            let Unique(value) = map.next_value()?;
            object.insert(key, value);
        }
        Ok(Json::Object(object))
    }
}

/// The part of a knob's path below `prefix` up to the next dot.
fn child(knob: Knob, prefix: &str) -> Option<&'static str> {
    let rest = knob.path().strip_prefix(prefix)?;
    let rest = if prefix.is_empty() { rest } else { rest.strip_prefix('.')? };
    rest.split('.').next()
}

/// The keys of the table below `prefix`, in table order.
fn children(prefix: &str) -> Vec<&'static str> {
    let mut keys: Vec<&str> = Vec::new();
    for key in Knob::ALL.iter().filter_map(|&knob| child(knob, prefix)) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

fn walk(node: &Json, prefix: &str, config: &mut ScheduleConfig, found: &mut Violations) {
    let Json::Object(map) = node else {
        let rule = if prefix.is_empty() { Rule::SJson } else { Rule::SType };
        let place = if prefix.is_empty() { At::Whole } else { At::Knob(prefix.to_string()) };
        let detail = format!("{} instead of an object", kind(node));
        let legal = format!("an object with {}", children(prefix).join(", "));
        found.add(Violation::new(rule, place, detail).value(node.clone()).legal(legal));
        return;
    };
    let keys = children(prefix);
    for (key, value) in map {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match Knob::from_path(&path) {
            Some(knob) if keys.contains(&key.as_str()) => leaf(knob, value, config, found),
            _ if keys.contains(&key.as_str()) => walk(value, &path, config, found),
            _ => found.add(unknown(&path, key, &keys)),
        }
    }
}

fn unknown(path: &str, key: &str, keys: &[&'static str]) -> Violation {
    let violation = Violation::new(
        Rule::SKey,
        At::Knob(path.to_string()),
        format!("no knob or group is called `{key}` here"),
    )
    .legal(keys.join(", "));
    if let Some(knob) = renamed_knob(path) {
        let what = format!("{knob}: the knob was renamed; `amk migrate` rewrites old files");
        return violation.suggest(what);
    }
    if Knob::from_path(key).is_some() {
        return violation.suggest(format!("nested objects, one for each part of `{key}`"));
    }
    if let Some(near) = nearest(key, keys.iter().copied()) {
        return violation.suggest(near);
    }
    // A knob of this name exists under another path.
    let last = |knob: &&Knob| knob.path().rsplit('.').next() == Some(key);
    let near = Knob::ALL.iter().find(last).map(|knob| knob.path());
    match near.or_else(|| nearest(path, Knob::ALL.iter().map(|knob| knob.path()))) {
        Some(near) => violation.suggest(near),
        None => violation,
    }
}

fn leaf(knob: Knob, given: &Json, config: &mut ScheduleConfig, found: &mut Violations) {
    let value = match (knob.domain().is_names(), given) {
        (true, Json::String(name)) => {
            knob.values().into_iter().find(|v| matches!(v, Value::Name(n) if n == name))
        }
        (false, Json::Number(number)) if number.is_i64() || number.is_u64() => {
            number.as_u64().and_then(|n| u32::try_from(n).ok()).map(Value::Number)
        }
        (
            true | false,
            Json::Null
            | Json::Bool(_)
            | Json::Number(_)
            | Json::String(_)
            | Json::Array(_)
            | Json::Object(_),
        ) => {
            let article = if knob.domain().is_names() { "a string" } else { "an integer" };
            let detail = format!("{} instead of {article}", kind(given));
            found.add(refused(Rule::SType, knob, given, detail));
            return;
        }
    };
    if value.is_none_or(|value| config.set(knob, value).is_err()) {
        found.add(out_of_range(knob, given.clone()));
    }
}

/// The violation for a value of the right type that the table does not list.
pub(super) fn out_of_range(knob: Knob, given: Json) -> Violation {
    let detail = format!("{} is not a value of this knob", bounded(given.clone()));
    refused(Rule::SRange, knob, &given, detail)
}

fn refused(rule: Rule, knob: Knob, given: &Json, detail: String) -> Violation {
    let violation = Violation::new(rule, At::Knob(knob.path().to_string()), detail)
        .value(given.clone())
        .legal(knob.domain().to_string());
    match nearest_value(knob, given) {
        Some(value) => violation.suggest(format!("{knob} = {value}")),
        None => violation,
    }
}

/// The legal value nearest to the given one, as a number or by its letters.
fn nearest_value(knob: Knob, given: &Json) -> Option<Value> {
    let values = knob.values();
    if knob.domain().is_names() {
        let names = values.iter().filter_map(|v| match v {
            Value::Name(name) => Some(*name),
            Value::Number(_) => None,
        });
        let given = given.as_str()?;
        return renamed_value(given).or_else(|| nearest(given, names)).map(Value::Name);
    }
    let number = match given {
        Json::Number(number) => number.as_f64()?,
        Json::String(text) => text.trim().parse::<f64>().ok().filter(|n| n.is_finite())?,
        Json::Null | Json::Bool(_) | Json::Array(_) | Json::Object(_) => return None,
    };
    let gap = |value: &Value| match value {
        Value::Number(n) => (f64::from(*n) - number).abs(),
        Value::Name(_) => f64::INFINITY,
    };
    values.into_iter().min_by(|a, b| gap(a).total_cmp(&gap(b)))
}

/// The type of a JSON value, with its article.
fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(number) if number.is_f64() => "a fraction",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "an array",
        Json::Object(_) => "an object",
    }
}
