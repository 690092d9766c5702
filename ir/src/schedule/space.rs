//! Walks over the knob table: the search space, the JSON schema, the docs table.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json, json};

use super::defaults::default_config;
use super::validate::{check, remote_handoffs};
use super::value::{Domain, Handoff, KnobType as _, Value};
use super::{Knob, ScheduleConfig};
use crate::graph::Graph;
use crate::target::Target;

/// A config with this value, and the least demanding value of every other knob. If it is illegal, the value is illegal
/// by itself.
fn undemanding(knob: Knob, value: Value, graph: &Graph, target: &Target) -> ScheduleConfig {
    let mut config = ScheduleConfig::default();
    config.pipeline.stage_bytes = 8192;
    config.pipeline.stages = 2;
    config.tiling.attention.kv_block = 32;
    // `value` is from the knob's own domain.
    let _ = config.set(knob, value);
    let stage = config.pipeline.stage_bytes;
    if knob != Knob::PipelineInFlightBeforeWaitBytes {
        config.pipeline.in_flight_before_wait_bytes = stage;
    }
    if knob != Knob::PipelineInFlightBytes {
        config.pipeline.in_flight_bytes = config.pipeline.in_flight_before_wait_bytes;
    }
    config.pipeline.stages = config.pipeline.stages.max(config.pipeline.in_flight_bytes / stage);
    for remote in remote_handoffs(&config, graph) {
        if target.devices > 1 && knob != remote {
            let _ = config.set(remote, Handoff::FlagInData.to_value());
        }
    }
    config
}

/// The values of a knob that are legal for this graph and target, at least together with some values of the other
/// knobs.
#[must_use]
pub fn legal_values(knob: Knob, graph: &Graph, target: &Target) -> Vec<Value> {
    let legal =
        |value: &Value| check(&undemanding(knob, *value, graph, target), graph, target).is_empty();
    knob.values().into_iter().filter(legal).collect()
}

/// The search space: each knob's dotted path with `{type, choices | min, max, step, default, acts_on, desc}`. Values
/// that are illegal in every config for this graph and target are left out; `default` is [`default_config`]'s.
#[must_use]
pub fn search_space(graph: &Graph, target: &Target) -> Json {
    let config = default_config(graph, target);
    let mut space = Map::new();
    for &knob in Knob::ALL {
        let legal = legal_values(knob, graph, target);
        let mut row = Map::new();
        row.insert("type".into(), knob.type_name().into());
        match (knob.domain(), legal.first(), legal.last()) {
            (Domain::Range { step, .. }, Some(min), Some(max)) => {
                row.insert("min".into(), min.to_json());
                row.insert("max".into(), max.to_json());
                row.insert("step".into(), step.into());
            }
            (Domain::Choices(_) | Domain::Range { .. }, _, _) => {
                row.insert("choices".into(), legal.iter().map(|v| v.to_json()).collect());
            }
        }
        row.insert("default".into(), config.get(knob).to_json());
        row.insert("acts_on".into(), knob.acts_on().name().into());
        row.insert("desc".into(), knob.desc().into());
        space.insert(knob.path().into(), row.into());
    }
    Json::Object(space)
}

/// The JSON schema of a config file. It names no defaults: those depend on graph and target.
#[must_use]
pub fn json_schema() -> Json {
    let mut root = object(
        "A schedule: any subset of the knobs. Those left out take the rule-based default for the model and GPU, which `amk propose` prints.",
    );
    root.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
    root.insert("title".into(), "ScheduleConfig".into());
    let mut root = Json::Object(root);
    for &knob in Knob::ALL {
        let mut node = &mut root;
        let (groups, field) = knob.path().rsplit_once('.').unwrap_or(("", knob.path()));
        for group in groups.split('.').filter(|group| !group.is_empty()) {
            let next = &mut node["properties"][group];
            if next.is_null() {
                *next = Json::Object(object(""));
            }
            node = next;
        }
        node["properties"][field] = knob_schema(knob);
    }
    root
}

fn object(description: &str) -> Map<String, Json> {
    let mut map = Map::new();
    map.insert("type".into(), "object".into());
    if !description.is_empty() {
        map.insert("description".into(), description.into());
    }
    map.insert("additionalProperties".into(), false.into());
    map.insert("properties".into(), Json::Object(Map::new()));
    map
}

fn knob_schema(knob: Knob) -> Json {
    let mut schema = json!({"type": knob.type_name(), "description": knob.desc()});
    match knob.domain() {
        Domain::Choices(choices) => schema["enum"] = choices.iter().map(|v| v.to_json()).collect(),
        Domain::Range { min, max, step } => {
            schema["minimum"] = min.into();
            schema["maximum"] = max.into();
            if step > 1 && min.is_multiple_of(step) {
                schema["multipleOf"] = step.into();
            }
        }
    }
    schema
}

impl schemars::JsonSchema for ScheduleConfig {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ScheduleConfig".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::Schema::try_from(json_schema()).unwrap_or_default()
    }
}

/// The knob table as Markdown, for the docs.
#[must_use]
pub fn knob_table_markdown() -> String {
    let mut out = String::from(
        "| knob | values | neutral | acts on | what it decides |\n|---|---|---|---|---|\n",
    );
    for &knob in Knob::ALL {
        let (values, neutral) = (knob.domain(), knob.default());
        let _ = writeln!(
            out,
            "| `{knob}` | {values} | {neutral} | {} | {} |",
            knob.acts_on().name(),
            knob.desc()
        );
    }
    out
}
