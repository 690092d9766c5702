//! An agent that has nothing but the MCP tools: it changes one knob after the other, keeps what `compare` predicts to be
//! faster, and has the last one judged by `evaluate`. Its time is looked up among those measured on an H200, which the
//! agent never sees.

use std::collections::BTreeMap;

use ir::schedule::{ScheduleConfig, neutral_config, read_config_over};
use tests::measured_grid::{Found, MeasuredGrid};

use super::*;

const MODEL: &str = "smollm2-135m";
/// A prediction must gain this much to be kept, as in a search.
const GAIN: f64 = 0.001;

/// Sets a knob by its path.
fn set(config: &Value, path: &str, value: &Value) -> Value {
    let mut config = config.clone();
    let place = path.split('.').fold(&mut config, |at, name| &mut at[name]);
    *place = value.clone();
    config
}

/// The answer of a tool about schedules of the model; none if one is refused.
fn ask(server: &mut Server, tool: &str, about: Value) -> Option<Value> {
    let mut arguments = json!({"model": MODEL, "target": "h200"});
    arguments.as_object_mut().unwrap().extend(about.as_object().unwrap().clone());
    let id = server.begin(tool, arguments);
    let result = server.result(id);
    let text = result["content"][0]["text"].as_str().unwrap();
    (result["isError"] == false).then(|| serde_json::from_str(text).unwrap())
}

/// The predicted time of a schedule; none if it is refused.
fn predicted(server: &mut Server, config: &Value) -> Option<f64> {
    let answer = ask(server, "compare", json!({"a": config, "b": config}))?;
    answer["lowered"]["predicted_us"][0].as_f64()
}

/// Every change of this many knobs, one or two.
fn moves(knobs: &Value, together: usize) -> Vec<Vec<(String, Value)>> {
    let all: Vec<(String, Value)> = knobs
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, values)| {
            values.as_array().unwrap().iter().map(|value| (path.clone(), value.clone()))
        })
        .collect();
    if together == 1 {
        return all.into_iter().map(|one| vec![one]).collect();
    }
    let all = &all;
    let second = move |i: usize| all[i + 1..].iter().filter(move |(path, _)| *path != all[i].0);
    let pairs = move |i: usize| second(i).map(move |other| vec![all[i].clone(), other.clone()]);
    (0..all.len()).flat_map(pairs).collect()
}

/// Passes over the knobs from a schedule on, until one changes nothing. Nothing is asked twice.
fn agent(server: &mut Server, start: &Value, knobs: &Value) -> (Value, usize) {
    let mut seen = BTreeMap::new();
    let mut config = start.clone();
    let mut best = predicted(server, &config).expect("the first is legal");
    loop {
        let before = config.clone();
        // One knob at a time, and two where one alone brings nothing: a hand-off and what it feeds, say.
        for together in [1, 2] {
            for moves in moves(knobs, together) {
                let tried = moves
                    .iter()
                    .fold(config.clone(), |config, (path, value)| set(&config, path, value));
                let ask = || predicted(server, &tried);
                let us = *seen.entry(tried.to_string()).or_insert_with(ask);
                if let Some(us) = us.filter(|us| *us < best * (1.0 - GAIN)) {
                    (best, config) = (us, tried);
                }
            }
            if config != before {
                break;
            }
        }
        if config == before {
            return (config, seen.len());
        }
    }
}

#[test]
fn an_agent_with_the_tools_alone_comes_within_three_percent_of_the_best() {
    let model = model::preset(MODEL).unwrap();
    let target = ir::Target::by_name("h200").unwrap();
    let neutral = neutral_config(&model.graph, &target);
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/grids");
    let text = std::fs::read_to_string(corpus.join("h200-smollm2-135m-128.jsonl")).unwrap();
    let grid = MeasuredGrid::read(&text, &neutral).unwrap();
    let terms: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let us = |config: &ScheduleConfig| match grid.at(config) {
        Found::Timed(_, us, _) => us,
        other @ (Found::Outside | Found::Illegal | Found::Unrecorded | Found::Failed(_)) => {
            panic!("{other:?}")
        }
    };
    let dir = folder();
    let mut server = Server::start(dir.path());
    let start = serde_json::to_value(grid.start()).unwrap();
    let began = Instant::now();
    let (end, calls) = agent(&mut server, &start, &terms["grid"]["axes"]);
    let verdict =
        ask(&mut server, "evaluate", json!({"config": end, "device": "cpu", "kv_capacity": 136}))
            .unwrap();
    assert_eq!(verdict["correct"], true, "{verdict}");
    let end = read_config_over(neutral, &end.to_string(), &model.graph, &target).unwrap();
    let [start, end] = [grid.start(), &end].map(us);
    let (_, best) = grid.best().unwrap();
    eprintln!("{calls} calls in {:.1?}: {start:.1}, {end:.1}, best {best:.1} us", began.elapsed());
    assert!(start > 1.03 * best, "the start is no challenge: {start} of {best}");
    assert!(end <= 1.03 * best, "{end} us after {calls} calls; the best is {best}");
}
