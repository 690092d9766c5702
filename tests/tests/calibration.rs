//! Compares the cost model with the measurements of the grids under `corpus/grids/`.

use std::collections::BTreeMap;

use ir::schedule::{Knob, ScheduleConfig, neutral_config, validate};
use ir::{Graph, Target};
use lower::{Options, Predictor, RateFile, Rates};
use search::calibrate::{Calibration, Case, Point, read};
use search::checks::{Check, Past};
use serde_json::{Value, json};
use tests::root;

/// Least rank correlation of predictions.
const RANK_MIN: f64 = 0.94;

/// Largest median error of predictions, relative to the measurement.
const ERROR_MAX: f64 = 0.04;

/// Points taken of each grid.
const POINTS: usize = 300;

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"] {
        let path = root().join(format!("corpus/grids/h200-{name}-128.jsonl"));
        let at = path.display();
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{at}: {error}"));
        let file = read(&text).unwrap_or_else(|(line, what)| panic!("{at} line {line}: {what}"));
        let graph = model::preset(name).expect("a preset").graph;
        let target = Target::by_name(&file.terms.target).expect("a target of the table");
        let space = file.terms.grid.space(&neutral_config(&graph, &target)).expect("a grid");
        let lowered = search::calibrate::cases(&file, &space, POINTS, &graph, &target);
        cases.extend(lowered.unwrap_or_else(|(point, why)| panic!("{at} point {point}: {why}")));
    }
    cases
}

/// By model and context.
fn judged(cases: &[Case], point: impl Fn(&Case) -> Point) -> BTreeMap<String, Calibration> {
    let mut groups: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for case in cases {
        let group = format!("{} at {}", case.model, case.context);
        groups.entry(group).or_default().push(point(case));
    }
    groups.into_iter().map(|(name, points)| (name, Calibration::of(&points))).collect()
}

fn good(calibration: &Calibration) -> bool {
    calibration.rank_correlation >= RANK_MIN
        && calibration.error_median <= ERROR_MAX
        && calibration.below_bound == 0
}

#[test]
fn predictions_rank_measured_schedules_and_a_spoilt_model_does_not() {
    let cases = cases();
    let shipped = judged(&cases, |case| case.point(Rates::shipped()));
    println!("{shipped:#?}");
    assert!(shipped.values().all(|of| of.rows == POINTS) && shipped.len() == 3, "{shipped:?}");
    for (name, calibration) in &shipped {
        assert!(
            good(calibration),
            "{name}: {calibration:?}; fit again: amk calibrate corpus/grids/*.jsonl --fit lower/src/cost/rates.json"
        );
    }
    // A model that uses only the bytes.
    let bound = |point: Point| Point { predicted_us: point.bound_us, ..point };
    let spoilt = judged(&cases, |case| bound(case.point(Rates::shipped())));
    assert!(!spoilt.values().any(|calibration| calibration.rank_correlation >= RANK_MIN));
    assert!(!spoilt.values().any(good), "bytes alone pass: {spoilt:?}");
    // Every rate at the far end of its range: the order may survive that, the error may not.
    let far = |rates: Rates, (index, &(_, low, high)): (usize, &(&str, f64, f64))| {
        rates.with(index, if rates.get(index) > f64::midpoint(low, high) { low } else { high })
    };
    let far = Rates::TABLE.iter().enumerate().fold(*Rates::shipped(), far);
    let spoilt = judged(&cases, |case| case.point(&far));
    assert!(!spoilt.values().all(good), "a spoilt model passes: {spoilt:?}");
}

/// The rates of `corpus/grids/without-MODEL.rates.json` are fitted to the other two grids.
#[test]
fn rates_that_have_not_seen_a_model_predict_it() {
    for (name, calibration) in judged(&cases(), |case| {
        let path = root().join(format!("corpus/grids/without-{}.rates.json", case.model));
        let text = std::fs::read_to_string(&path).expect("committed rates");
        let file: RateFile = serde_json::from_str(&text).expect("rates");
        assert!(!file.source.contains(&case.model), "{}: {}", path.display(), file.source);
        case.point(&file.rates)
    }) {
        assert!(good(&calibration), "{name}: {calibration:?}");
    }
}

/// Recorded changes are those of the schedules that were shipped then: today's with these knobs.
fn checked_base(model: &str) -> ScheduleConfig {
    let path = root().join(format!("corpus/schedules/h200/{model}/128.json"));
    let text = std::fs::read_to_string(&path).expect("a shipped schedule");
    let mut config: ScheduleConfig = serde_json::from_str(&text).expect("a schedule");
    if model == "smollm2-135m" {
        for (knob, value) in [
            ("pipeline.in_flight_bytes", json!(98304)),
            ("pipeline.in_flight_before_wait_bytes", json!(65536)),
            ("sync.embed", json!("flag_in_data")),
            ("tiling.lm_head.rows", json!(8)),
            ("tiling.attention.kv_split", json!(1)),
        ] {
            config = with(config, knob, |of| *of == value);
        }
    }
    config
}

fn with(mut config: ScheduleConfig, knob: &str, is: impl Fn(&Value) -> bool) -> ScheduleConfig {
    let knob = Knob::from_path(knob).expect("a knob");
    let value = knob.values().into_iter().find(|of| is(&of.to_json())).expect("a value");
    config.set(knob, value).expect("its own value");
    config
}

/// The id of a schedule's program, and its predicted step.
fn predicted(config: ScheduleConfig, graph: &Graph, target: &Target) -> (String, f64) {
    let valid = validate(config, graph, target).expect("a legal schedule");
    let program = lower::lower(&valid, graph, target, Options { kv_capacity: 4096 });
    let program = program.expect("it lowers");
    let predictor = Predictor::new(&program, &valid.kernel, target, 128);
    (program.id(), predictor.predict(Rates::shipped()).latency_us)
}

/// The recorded changes of one knob, predicted again by today's model: the file says what was predicted before they were
/// measured.
fn checks_again(model: &str) -> Past {
    let text = std::fs::read_to_string(root().join("corpus/checks/h200.jsonl")).expect("checks");
    let all = text.lines().map(|line| serde_json::from_str::<Check>(line).expect("a check"));
    let target = Target::by_name("h200").expect("a target of the table");
    let graph = model::preset(model).expect("a preset").graph;
    let base = checked_base(model);
    let (id, before) = predicted(base, &graph, &target);
    let again = |mut check: Check| {
        assert_eq!(check.program_id, id, "{model}: the schedule that was changed");
        let (knob, value) = check.change.split_once('=').expect("KNOB=VALUE");
        let is = |of: &Value| of.as_str().map_or_else(|| of.to_string(), str::to_owned) == value;
        let (_, after) = predicted(with(base, knob, is), &graph, &target);
        check.predicted_pct = 100.0 * (1.0 - after / before);
        check
    };
    let all: Vec<Check> = all.filter(|check| check.model == model).map(again).collect();
    Past::new(&all, &all[0].card)
}

#[test]
fn recorded_changes_are_predicted_again() {
    // Sign right of the changes that matter, and the median error in percent of the step.
    for (model, right, error) in
        [("llama-3.2-1b", 48, 0.6), ("qwen3-0.6b", 45, 1.0), ("smollm2-135m", 43, 1.0)]
    {
        let figures = checks_again(model).figures();
        println!("{model}: {figures:?}");
        assert!(figures.sign_right >= right, "{model}: {figures:?}");
        assert!(figures.median_error_pct.is_some_and(|of| of <= error), "{model}: {figures:?}");
    }
}
