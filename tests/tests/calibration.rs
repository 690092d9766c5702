//! Compares the cost model with the measurements of the grids under `corpus/grids/`.

use std::collections::BTreeMap;

use ir::Target;
use ir::schedule::neutral_config;
use lower::{RateFile, Rates};
use search::calibrate::{Calibration, Case, Point, read};
use tests::root;

/// Least rank correlation of predictions.
const RANK_MIN: f64 = 0.94;

/// Largest median error of predictions, relative to the measurement.
const ERROR_MAX: f64 = 0.04;

/// Points taken of each grid.
const POINTS: usize = 300;

/// Largest median error on the grids of rows, whose tasks have up to 32 stages: rates fitted to few stages are worse
/// there (docs/lab/2026-11-23-cost-model-rows.md).
const ROWS_ERROR_MAX: f64 = 0.06;

/// Cases of the grids in a folder.
fn cases(folder: &str) -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"] {
        let path = root().join(format!("{folder}/h200-{name}-128.jsonl"));
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
    within(calibration, ERROR_MAX)
}

fn within(calibration: &Calibration, error: f64) -> bool {
    calibration.rank_correlation >= RANK_MIN
        && calibration.error_median <= error
        && calibration.below_bound == 0
}

/// With the rates of `corpus/grids/without-MODEL.rates.json`, which are fitted to the other two grids.
fn left_out(case: &Case) -> Point {
    let path = root().join(format!("corpus/grids/without-{}.rates.json", case.model));
    let text = std::fs::read_to_string(&path).expect("committed rates");
    let file: RateFile = serde_json::from_str(&text).expect("rates");
    assert!(!file.source.contains(&case.model), "{}: {}", path.display(), file.source);
    case.point(&file.rates)
}

#[test]
fn predictions_rank_measured_schedules_and_a_spoilt_model_does_not() {
    let cases = cases("corpus/grids");
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

#[test]
fn rates_that_have_not_seen_a_model_predict_it() {
    for (name, calibration) in judged(&cases("corpus/grids"), left_out) {
        assert!(good(&calibration), "{name}: {calibration:?}");
    }
    let rows = cases("corpus/grids/rows");
    let rows = judged(&rows, left_out);
    println!("{rows:#?}");
    assert_eq!(rows.len(), 3);
    for (name, calibration) in rows {
        assert!(within(&calibration, ROWS_ERROR_MAX), "{name}, rows: {calibration:?}");
    }
}
