//! Checks a tool's arguments: reports every error, each with its place, the legal values and a suggestion.

use std::path::Path;

use jsonschema::Validator;
use jsonschema::error::ValidationErrorKind as Kind;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::PlaceArgs;
use crate::commands::{diff, runs};
use crate::config_source::ConfigSource;
use crate::context::{Context, kv_capacity};
use crate::failure::{Exit, Failure};
use crate::report;

/// An error in the arguments. The fields are those of a schedule's violations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Problem {
    pub(super) at: String,
    value: Value,
    legal: Option<String>,
    suggestion: Option<String>,
    message: String,
}

impl Problem {
    /// Whether it violates a rule of schedules.
    pub(super) fn is_about_config(&self) -> bool {
        self.at.starts_with("config.")
    }

    pub(super) fn new(at: impl Into<String>, value: &Value, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { at: at.into(), value: value.clone(), legal: None, suggestion: None, message }
    }
}

/// The document of a call with wrong arguments.
pub(super) fn document(tool: &str, problems: &[Problem]) -> Value {
    let count = problems.len();
    let message = format!(
        "{count} of the arguments of `{tool}` {}",
        if count == 1 { "is wrong" } else { "are wrong" }
    );
    let mut document = report::error_document(Exit::Usage, &message);
    document["violations"] = json!(problems);
    document
}

/// The arguments, with strings converted to the only type they can mean: clients send `"2048"` for a number and one
/// path for a list of them.
pub(super) fn typed(schema: &Value, mut arguments: Map<String, Value>) -> Map<String, Value> {
    for (name, given) in &mut arguments {
        let Value::String(text) = given else { continue };
        let takes = |wanted: &str| match &schema["properties"][name.as_str()]["type"] {
            Value::String(only) => only == wanted,
            Value::Array(types) => types.iter().any(|name| name == wanted),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
        };
        if takes("string") {
            continue;
        }
        let read = serde_json::from_str::<Value>(text.trim()).ok();
        let meant = match read {
            Some(number @ Value::Number(_)) if takes("integer") || takes("number") => number,
            Some(truth @ Value::Bool(_)) if takes("boolean") => truth,
            Some(list @ Value::Array(_)) if takes("array") => list,
            _ if takes("array") => Value::Array(vec![Value::String(text.clone())]),
            _ => continue,
        };
        *given = meant;
    }
    arguments
}

/// Violations of the tool's schema.
pub(super) fn against(validator: &Validator, schema: &Value, arguments: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    for error in validator.iter_errors(arguments) {
        let at = error.instance_path().to_string().trim_start_matches('/').replace('/', ".");
        if let Kind::AdditionalProperties { unexpected } = error.kind() {
            problems.extend(unexpected.iter().map(|name| unknown(name, schema, arguments)));
            continue;
        }
        let mut problem = if let Kind::Required { property } = error.kind() {
            Problem::new(property.as_str().unwrap_or_default(), &Value::Null, "it is missing")
        } else {
            Problem::new(at, error.instance(), error.to_string())
        };
        problem.legal = described(schema, problem.at.split('.').next().unwrap_or_default());
        problems.push(problem);
    }
    problems
}

fn described(schema: &Value, name: &str) -> Option<String> {
    schema["properties"][name]["description"].as_str().map(str::to_owned)
}

/// An unknown argument.
fn unknown(name: &str, schema: &Value, arguments: &Value) -> Problem {
    let empty = Map::new();
    let known = schema["properties"].as_object().unwrap_or(&empty);
    let names: Vec<&str> = known.keys().map(String::as_str).collect();
    let mut problem = Problem::new(name, &arguments[name], "unknown argument");
    problem.legal = Some(if names.is_empty() { "none".to_owned() } else { names.join(", ") });
    problem.suggestion = ir::nearest(name, names.iter().copied()).map(str::to_owned);
    problem
}

/// Checks against the model: whether it exists, and whether the cache and the schedule fit it. Arguments that already
/// violate the schema are left out.
pub(super) fn about_model(arguments: &Map<String, Value>) -> Vec<Problem> {
    let Some(given @ Value::String(name)) = arguments.get("model") else { return Vec::new() };
    let known = |target: &&str| ir::Target::names().any(|name| name == *target);
    let target = arguments.get("target").and_then(Value::as_str).filter(known);
    let device = arguments.get("device").cloned().unwrap_or(Value::Null);
    let place = PlaceArgs {
        target: target.map(str::to_owned),
        device: serde_json::from_value(device).unwrap_or_default(),
        ..PlaceArgs::default()
    };
    let context = match Context::load(name, &place) {
        Ok(context) => context,
        Err(failure) => return vec![Problem::new("model", given, failure.message)],
    };
    let mut problems = Vec::new();
    if let Some(given) = arguments.get("kv_capacity")
        && let Some(tokens) = given.as_u64().and_then(|tokens| tokens.try_into().ok())
        && let Err(failure) = kv_capacity(Some(tokens), context.graph())
    {
        problems.push(Problem::new("kv_capacity", given, failure.message));
    }
    problems.extend(about_config(arguments, &context));
    problems
}

fn about_config(arguments: &Map<String, Value>, context: &Context) -> Vec<Problem> {
    let Some(given @ (Value::Object(_) | Value::String(_))) = arguments.get("config") else {
        return Vec::new();
    };
    let Ok(source) = serde_json::from_value::<ConfigSource>(given.clone()) else {
        return Vec::new();
    };
    match context.config(&source) {
        Ok(Ok(_)) => Vec::new(),
        Err(failure) => vec![Problem::new("config", given, failure.message)],
        Ok(Err(violations)) => {
            let problem = |violation: &ir::Violation| Problem {
                at: format!("config.{}", violation.at),
                value: violation.value.clone().unwrap_or_default(),
                legal: violation.legal.clone(),
                suggestion: violation.suggestion.clone(),
                message: format!("{}: {}", violation.rule, violation.detail),
            };
            violations.list().iter().map(problem).collect()
        }
    }
}

/// The path, if it names a run.
pub(super) fn run_path(source: &ConfigSource) -> Option<&Path> {
    let ConfigSource::File(path) = source else { return None };
    runs::names_run(path).then_some(path)
}

/// Errors in the two sides of a comparison, and in the model that they are lowered for.
pub(super) fn about_pair(arguments: &Map<String, Value>) -> Vec<Problem> {
    let side = |name: &'static str| {
        let given = arguments.get(name)?;
        Some((name, given, serde_json::from_value::<ConfigSource>(given.clone()).ok()?))
    };
    let sides: Vec<(&str, &Value, ConfigSource)> =
        ["a", "b"].into_iter().filter_map(side).collect();
    if sides.iter().any(|(_, _, source)| run_path(source).is_some()) {
        return about_runs_pair(arguments, &sides);
    }
    let mut problems = about_model(arguments);
    for (name, given, source) in &sides {
        problems.extend(about_path(name, given, diff::check(source)));
    }
    problems
}

/// Two runs: both sides must be one, and no model may be given, since runs have their own.
fn about_runs_pair(
    arguments: &Map<String, Value>,
    sides: &[(&str, &Value, ConfigSource)],
) -> Vec<Problem> {
    let unused = ["model", "target"].into_iter().filter_map(|name| {
        let why = "a run has its own; leave it out";
        Some(Problem::new(name, arguments.get(name).filter(|given| !given.is_null())?, why))
    });
    let side = |(name, given, source): &(&str, &Value, ConfigSource)| match run_path(source) {
        Some(path) => about_path(name, given, runs::one_ledger(path).map(drop)),
        None => {
            let why = "the other side is a run, and this is none: name the folder of a search";
            Some(Problem::new(*name, given, why))
        }
    };
    unused.chain(sides.iter().filter_map(side)).collect()
}

/// Checks the kind of each path: a problem for each argument whose check fails.
pub(super) fn about_path(
    name: &str,
    given: &Value,
    checked: Result<(), Failure>,
) -> Option<Problem> {
    checked.err().map(|failure| Problem::new(name, given, failure.message))
}
