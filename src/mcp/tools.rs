//! The tools: each is a command's arguments, its answer, and a description for the agent that chooses between them.

use std::sync::Arc;

use jsonschema::Validator;
use rmcp::model::{Tool, ToolAnnotations};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::arguments::{self, Problem};
use super::jobs::Jobs;
use super::status::Status;
use super::{listed, paths};
use crate::cli::{
    CompareArgs, DeviceChoice, DiffArgs, DoctorArgs, EvaluateArgs, ExplainArgs, LoopArgs,
    PlaceArgs, ProposeArgs, ReplayArgs, ReportArgs, RunsArgs, TraceArgs,
};
use crate::commands::runs::replay;
use crate::commands::{diff, doctor, evaluate, explain, html, propose, runs, search_loop, trace};
use crate::config_source::ConfigSource;
use crate::failure::{Exit, Failure};
use crate::report::Answer;

/// A tool that answers from its arguments alone.
type Call = Box<dyn Fn(Value) -> Result<Answer<Value>, Failure> + Send + Sync>;

pub(super) enum Run {
    /// Answers soon, and runs concurrently with other calls.
    Quick(Call),
    /// The same, and writes a file.
    Write(Call),
    /// Judges a schedule: one at a time.
    Judge(Call),
    Search,
}

pub(super) struct Entry {
    /// The tool as listed.
    pub(super) tool: Tool,
    pub(super) run: Run,
    schema: Value,
    validator: Validator,
    check: fn(&Map<String, Value>) -> Vec<Problem>,
}

impl Entry {
    /// The arguments, with strings converted where the type allows only one reading.
    pub(super) fn typed(&self, arguments: Map<String, Value>) -> Map<String, Value> {
        arguments::typed(&self.schema, arguments)
    }

    /// Every error in these arguments.
    pub(super) fn problems(&self, arguments: &Map<String, Value>) -> Vec<Problem> {
        let whole = Value::Object(arguments.clone());
        let mut problems = arguments::against(&self.validator, &self.schema, &whole);
        let outside = paths::outside(arguments);
        if !outside.is_empty() {
            // A path outside the folder is not read for further checks.
            return problems.into_iter().chain(outside).collect();
        }
        let shape = problems.len();
        problems.extend((self.check)(arguments));
        // If only the schedule is illegal, the verdict reports it.
        let only_config = shape == 0 && problems.iter().all(Problem::is_about_config);
        if only_config && matches!(self.run, Run::Judge(_)) { Vec::new() } else { problems }
    }
}

/// Arguments of `status`.
#[derive(Debug, Deserialize, JsonSchema)]
struct StatusArgs {
    /// First end the search that is under way, after its trial.
    #[serde(default)]
    stop: bool,
}

/// Arguments of `loop`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct LoopCall {
    /// Answer at once with a `status`, and go on searching: `status` follows and stops it.
    #[serde(default)]
    pub(super) background: bool,
    #[serde(flatten)]
    pub(super) search: LoopArgs,
}

/// The answer of `loop`: the result, or with `background` the status.
#[derive(JsonSchema)]
#[schemars(extend(
    "type" = "object",
    "properties" = json!({"schema": {"type": "string", "enum": ["amk.loop.v1", "amk.status.v1"]}})
))]
struct LoopAnswer {}

/// Arguments of `trace`.
#[derive(Debug, Deserialize, JsonSchema)]
struct TraceCall {
    /// As for `evaluate`.
    model: String,
    /// As for `evaluate`.
    target: Option<String>,
    /// As for `evaluate`.
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("enum" = ["auto", "cpu", "cuda"], "type" = "string"))]
    device: DeviceChoice,
    /// As for `evaluate`. Default: the shipped schedule, else the rule-based one.
    #[schemars(with = "Option<Value>", extend("type" = ["object", "string", "null"]))]
    config: Option<ConfigSource>,
    /// Tokens before the step. Default: 128.
    #[schemars(range(min = 0))]
    context: Option<u32>,
}

fn traced(call: &TraceCall) -> Result<Answer<trace::TracedSteps>, Failure> {
    let TraceCall { model, target, device, config, context } = call;
    trace::answer(&TraceArgs {
        model: Some(model.clone()),
        place: PlaceArgs { target: target.clone(), device: *device, ..PlaceArgs::default() },
        config: config.iter().cloned().collect(),
        context: context.unwrap_or(128),
        digest_in_answer: true,
        ..TraceArgs::default()
    })
}

/// Arguments of `runs`.
#[derive(Debug, Deserialize, JsonSchema)]
struct RunsCall {
    /// Check every row (the chain, the tip record, and that each follows from its samples); for an invalid ledger,
    /// report the line and the reason.
    #[serde(default)]
    verify: bool,
    #[serde(flatten)]
    runs: RunsArgs,
}

/// The answer of `compare`: the document of `runs compare` for two runs, else that of `diff`.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(extend(
    "type" = "object",
    "properties" = json!({"schema": {"type": "string", "enum": ["amk.compare.v1", "amk.diff.v2"]}})
))]
enum Comparison {
    Runs(Box<runs::compare::Compared>),
    Parts(Box<diff::Difference>),
}

pub(super) fn all(jobs: &Arc<Jobs>) -> Result<Vec<Entry>, Failure> {
    let mut all = of_schedules(jobs)?;
    all.extend(of_results()?);
    Ok(all)
}

/// The tools that propose, judge and search.
fn of_schedules(jobs: &Arc<Jobs>) -> Result<Vec<Entry>, Failure> {
    let jobs = jobs.clone();
    Ok(vec![
        entry::<ProposeArgs, propose::Proposal>(
            "propose",
            "The schedule to start from and the search space: every knob with its legal values for this model and GPU. With `ledger`, the schedule that leads in that search.",
            Run::Quick(typed(propose::answer)),
            |given| [arguments::about_model(given), about_ledger(given)].concat(),
        )?,
        entry::<EvaluateArgs, evaluate::Judgement>(
            "evaluate",
            "Judges one schedule: legal, lowered, verified, equal to the graph's values on the reference VM and the GPU, then timed, or predicted without a GPU. An illegal schedule is an error with every violation; a wrong or slow one is a verdict.",
            Run::Judge(typed(evaluate::answer)),
            arguments::about_model,
        )?,
        entry::<TraceCall, trace::TracedSteps>(
            "trace",
            "Where the time of a step goes under one schedule: a `digest` in words (time by op and layer, the longest waits and their producers), bounds, the critical path. Measured on a GPU, else predicted.",
            Run::Judge(typed(traced)),
            arguments::about_model,
        )?,
        entry::<LoopCall, LoopAnswer>(
            "loop",
            "Searches for a faster schedule: proposes, judges, keeps what is better. Blocks until the budget is spent, unless `background`; reports progress by trials. Cancelling ends it after the trial under way; every finished trial is kept, and `resume` with `out` goes on. A larger `budget` resumes: it counts trials from the first.",
            Run::Search,
            |given| [arguments::about_model(given), about_folder(given)].concat(),
        )?,
        entry::<StatusArgs, Status>(
            "status",
            "What this server is doing: idle, judging or searching; of the latest search the trials so far, the best latency, how it ended and the whole result.",
            Run::Quick(typed(move |args: &StatusArgs| {
                if let Some(search) = jobs.search().filter(|_| args.stop) {
                    search.stop();
                }
                Ok(Answer { document: Status::of(&jobs), exit: Exit::Yes })
            })),
            |_| Vec::new(),
        )?,
    ])
}

/// The tools that look at what there is.
fn of_results() -> Result<Vec<Entry>, Failure> {
    Ok(vec![
        entry::<RunsCall, runs::Runs>(
            "runs",
            "The searches on the disk with their trials, device and best latency; with `verify`, whether their ledgers hold.",
            Run::Quick(typed(|call: &RunsCall| {
                if call.verify { runs::verify(&call.runs) } else { runs::list(&call.runs) }
            })),
            |given| about_paths("paths", given),
        )?,
        entry::<DiffArgs, Comparison>(
            "compare",
            "Compares two schedules knob by knob, with `model` also what they lower to and their predicted latencies; two saved programs task by task; or two runs: which champion is better, or every reason why the runs may not be compared.",
            Run::Quick(typed(compare)),
            arguments::about_pair,
        )?,
        entry::<ReplayArgs, replay::Replayed>(
            "replay",
            "Repeats a trial of a search: whether its program, values and time are those on record.",
            Run::Judge(typed(replay::answer)),
            about_replayed,
        )?,
        entry::<ReportArgs, html::Written>(
            "report",
            "Writes searches as one HTML page for people (progress, what was kept and why, each knob's effect, how to reproduce) and answers with its path, never with the page.",
            Run::Write(typed(html::answer)),
            |given| [about_paths("runs", given), about_page(given)].concat(),
        )?,
        entry::<DoctorArgs, doctor::Findings>(
            "doctor",
            "What this machine can do, what is missing and how to get it; with `model`, whether it fits.",
            Run::Quick(typed(doctor::answer)),
            |_| Vec::new(),
        )?,
        entry::<ExplainArgs, explain::Explanation>(
            "explain",
            "What a knob, rule, trap, exit code or term means. Without `name`, every name there is.",
            Run::Quick(typed(explain::answer)),
            |_| Vec::new(),
        )?,
    ])
}

/// Compares two runs with `runs compare`, everything else with `diff`.
fn compare(args: &DiffArgs) -> Result<Answer<Comparison>, Failure> {
    if let (Some(a), Some(b)) = (arguments::run_path(&args.a), arguments::run_path(&args.b)) {
        let pair = CompareArgs { a: a.to_path_buf(), b: b.to_path_buf() };
        let Answer { document, exit } = runs::compare::answer(&pair)?;
        return Ok(Answer { document: Comparison::Runs(Box::new(document)), exit });
    }
    let Answer { document, exit } = diff::answer(args)?;
    Ok(Answer { document: Comparison::Parts(Box::new(document)), exit })
}

/// Checks that the ledger exists.
fn about_ledger(given: &Map<String, Value>) -> Vec<Problem> {
    let Some(path @ Value::String(name)) = given.get("ledger") else { return Vec::new() };
    let there = std::path::Path::new(name).is_file();
    let problem = Problem::new("ledger", path, "there is no such file; `runs` lists ledgers");
    if there { Vec::new() } else { vec![problem] }
}

/// Checks that a search can begin or continue in the folder.
fn about_folder(given: &Map<String, Value>) -> Vec<Problem> {
    let folder = serde_json::from_value::<LoopArgs>(Value::Object(given.clone()));
    let checked = folder.ok().map(|args| search_loop::check_folder(&args));
    let out = given.get("out").unwrap_or(&Value::Null);
    checked.and_then(|checked| arguments::about_path("out", out, checked)).into_iter().collect()
}

/// Checks that the output is an HTML page: the tool writes and overwrites nothing else.
fn about_page(given: &Map<String, Value>) -> Vec<Problem> {
    let default = Value::from(html::FILE);
    let out = given.get("out").filter(|out| !out.is_null()).unwrap_or(&default);
    let Some(name) = out.as_str() else { return Vec::new() };
    let path = std::path::Path::new(name);
    let html = path.extension().is_some_and(|end| end == "html");
    let folder = path.parent().is_none_or(|dir| dir.as_os_str().is_empty() || dir.is_dir());
    let problem = |message| vec![Problem::new("out", out, message)];
    match (html, folder) {
        (false, _) => problem("the page's name must end in .html"),
        (true, false) => problem("its folder does not exist"),
        (true, true) if path.exists() => problem("the page exists; name another"),
        (true, true) => Vec::new(),
    }
}

/// Checks that there is a search to repeat a trial of.
fn about_replayed(given: &Map<String, Value>) -> Vec<Problem> {
    let Some(path @ Value::String(name)) = given.get("path") else { return Vec::new() };
    let found = runs::ledgers(&[std::path::PathBuf::from(name)]).map(drop);
    arguments::about_path("path", path, found).into_iter().collect()
}

fn about_paths(name: &'static str, given: &Map<String, Value>) -> Vec<Problem> {
    let paths = given.get(name).and_then(Value::as_array);
    let problem = |path: &Value| {
        let file = std::path::PathBuf::from(path.as_str()?);
        arguments::about_path(name, path, runs::ledgers(&[file]).map(drop))
    };
    paths.into_iter().flatten().filter_map(problem).collect()
}

/// Wraps a command as a tool's call.
fn typed<A, D>(answer: impl Fn(&A) -> Result<Answer<D>, Failure> + Send + Sync + 'static) -> Call
where
    A: DeserializeOwned,
    D: Serialize,
{
    Box::new(move |given| {
        let answered = answer(&read(given)?)?;
        let document = as_json(&answered.document)?;
        Ok(Answer { document, exit: answered.exit })
    })
}

/// Deserializes arguments that passed the schema.
pub(super) fn read<A: DeserializeOwned>(given: Value) -> Result<A, Failure> {
    serde_json::from_value(given).map_err(|error| Failure::usage(format!("arguments: {error}")))
}

pub(super) fn as_json(document: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(document).map_err(|error| Failure::bug(error.to_string()))
}

fn entry<A: JsonSchema, D: JsonSchema>(
    name: &'static str,
    description: &'static str,
    run: Run,
    check: fn(&Map<String, Value>) -> Vec<Problem>,
) -> Result<Entry, Failure> {
    let mut input =
        listed::object(SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<A>());
    // The types cannot express it: a flattened struct does not see the fields of its siblings.
    input.insert("additionalProperties".into(), false.into());
    input.entry("properties").or_insert_with(|| Value::Object(Map::new()));
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let output = listed::object(settings.into_generator().into_root_schema_for::<D>());
    let schema = Value::Object(input.clone());
    let validator = jsonschema::validator_for(&schema)
        .map_err(|error| Failure::bug(format!("the schema of `{name}`: {error}")))?;
    let writes = matches!(run, Run::Search | Run::Write(_));
    let hints = ToolAnnotations::new().read_only(!writes).destructive(false).open_world(false);
    let mut tool = Tool::new(name, description, Arc::new(listed::plain(input)));
    tool.output_schema = Some(Arc::new(listed::shallow(&output)));
    tool.annotations = Some(hints);
    Ok(Entry { tool, run, schema, validator, check })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_describe_themselves_whole() {
        for entry in all(&Arc::default()).expect("schemas that compile") {
            let name = &entry.tool.name;
            let properties = entry.schema["properties"].as_object().expect("an object");
            for (property, schema) in properties {
                let described = schema["description"].as_str().unwrap_or_default();
                assert!(!described.is_empty(), "{name}: {property} is not described");
            }
            let output = entry.tool.output_schema.as_ref().expect("an output schema");
            assert_eq!(output["type"], "object", "{name}");
            let id = &output["properties"]["schema"];
            assert!(id["type"] == "string", "{name}: {id}");
        }
    }

    #[test]
    fn schemas_have_no_formats_that_clients_do_not_know() {
        fn formats(schema: &Value, into: &mut Vec<String>) {
            match schema {
                Value::Object(map) => {
                    into.extend(map.get("format").and_then(Value::as_str).map(str::to_owned));
                    map.values().for_each(|inner| formats(inner, into));
                }
                Value::Array(list) => list.iter().for_each(|inner| formats(inner, into)),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
            }
        }
        for entry in all(&Arc::default()).expect("schemas that compile") {
            let mut found = Vec::new();
            let output = entry.tool.output_schema.as_ref().expect("an output schema");
            formats(&Value::Object((**output).clone()), &mut found);
            formats(&entry.schema, &mut found);
            assert_eq!(found, Vec::<String>::new(), "{}", entry.tool.name);
        }
    }

    #[test]
    fn what_may_be_left_out_is_listed_with_its_type_and_may_be_null() {
        let tools = all(&Arc::default()).expect("schemas that compile");
        let tool = tools.iter().find(|entry| entry.tool.name == "loop").expect("loop");
        for entry in &tools {
            let listed = entry.tool.input_schema["properties"].as_object().expect("an object");
            for (name, property) in listed {
                let text = property.to_string();
                assert!(!text.contains("null"), "{}: {name}: {text}", entry.tool.name);
            }
        }
        assert_eq!(tool.tool.input_schema["properties"]["kv_capacity"]["type"], "integer");
        let given = json!({"model": "toy", "kv_capacity": null, "devices": ["cuda:1", 0]});
        assert_eq!(tool.problems(given.as_object().expect("an object")), []);
        let given = json!({"model": "toy", "devices": ["gpu"], "kv_capacity": "sixteen"});
        let problems = tool.problems(given.as_object().expect("an object"));
        let places: Vec<&str> = problems.iter().map(|problem| &*problem.at).collect();
        assert_eq!(places, ["devices.0", "kv_capacity"]);
    }

    #[test]
    fn everything_wrong_is_said_at_once() {
        let tools = all(&Arc::default()).expect("schemas that compile");
        let tool = tools.iter().find(|entry| entry.tool.name == "evaluate").expect("evaluate");
        let given = serde_json::json!({
            "model": "toy", "target": "h2000", "device": "gpu", "kv_capacity": 99_999_999, "sed": 1,
            "config": {"pipeline": {"stages": 99, "stage": 1}}
        });
        let problems = tool.problems(given.as_object().expect("an object"));
        let places: Vec<&str> = problems.iter().map(|problem| &*problem.at).collect();
        for place in [
            "target",
            "device",
            "kv_capacity",
            "sed",
            "config.pipeline.stages",
            "config.pipeline.stage",
        ] {
            assert!(places.contains(&place), "{place} is not in {places:?}");
        }
        assert_eq!(problems.len(), 6, "{problems:?}");
        // An illegal schedule as the only error is left to the verdict.
        let given = serde_json::json!({"model": "toy", "config": {"pipeline": {"stages": 99}}});
        assert_eq!(tool.problems(given.as_object().expect("an object")), []);
    }
}
