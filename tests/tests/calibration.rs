//! Compares the cost model with the measured points under `corpus/grids/`, which are of the kernel that the shipped
//! rates are for.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use ir::Target;
use ir::schedule::neutral_config;
use lower::{RateFile, Rates};
use search::calibrate::{Calibration, Case, Point, read};
use tests::root;

/// Where the points are, and the rates that have not seen a model.
const FOLDER: &str = "corpus/grids";

/// Least rank correlation of predictions.
const RANK_MIN: f64 = 0.97;

/// Largest median error of predictions, relative to the measurement.
const ERROR_MAX: f64 = 0.04;

/// Points taken of each grid.
const POINTS: usize = 600;

/// Largest regret of the fastest of the [`RACED`] schedules that are predicted to be the fastest, relative to the fastest of
/// the points.
const REGRET_MAX: f64 = 0.01;

/// Schedules that a search races at its end. The first of them alone may be a draw: those of qwen3-0.6b are predicted within
/// 0.3 us of each other (docs/lab/2026-11-28-grids-of-today.md).
const RACED: usize = 5;

/// Cases of all models, which are lowered once for all tests.
static CASES: LazyLock<Vec<Case>> = LazyLock::new(cases);

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"] {
        let path = root().join(format!("{FOLDER}/h200-{name}-128.jsonl"));
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

/// Points by model and context. A point is a prediction, which takes most of the time of these tests.
type Groups = BTreeMap<String, Vec<Point>>;

fn points(point: impl Fn(&Case) -> Point) -> Groups {
    let mut groups = Groups::new();
    for case in CASES.iter() {
        let group = format!("{} at {}", case.model, case.context);
        groups.entry(group).or_default().push(point(case));
    }
    groups
}

fn judged(groups: &Groups) -> BTreeMap<&str, Calibration> {
    groups.iter().map(|(name, points)| (name.as_str(), Calibration::of(points))).collect()
}

/// The same points with another prediction of each.
fn predicted(groups: &Groups, us: impl Fn(&Point) -> f64) -> Groups {
    let other = |points: &Vec<Point>| {
        points.iter().map(|point| Point { predicted_us: us(point), ..*point }).collect()
    };
    groups.iter().map(|(name, points)| (name.clone(), other(points))).collect()
}

/// How much slower than the fastest point the fastest of those is that are predicted to be the fastest.
fn regret(points: &[Point]) -> f64 {
    let mut predicted: Vec<&Point> = points.iter().collect();
    predicted.sort_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us));
    let fastest = |of: &[&Point]| of.iter().map(|point| point.measured_us).fold(f64::MAX, f64::min);
    fastest(&predicted[..RACED]) / fastest(&predicted) - 1.0
}

fn good(calibration: &Calibration) -> bool {
    calibration.rank_correlation >= RANK_MIN
        && calibration.error_median <= ERROR_MAX
        && calibration.below_bound == 0
}

/// With the rates of `without-MODEL.rates.json`, which are fitted to the points and checks of the other two models.
fn left_out(case: &Case) -> Point {
    let path = root().join(format!("{FOLDER}/without-{}.rates.json", case.model));
    let text = std::fs::read_to_string(&path).expect("committed rates");
    let file: RateFile = serde_json::from_str(&text).expect("rates");
    assert!(!file.source.contains(&case.model), "{}: {}", path.display(), file.source);
    case.point(&file.rates)
}

#[test]
fn predictions_rank_measured_schedules_and_a_spoilt_model_does_not() {
    let with_shipped = points(|case| case.point(Rates::shipped()));
    let shipped = judged(&with_shipped);
    println!("{shipped:#?}");
    assert!(shipped.values().all(|of| of.rows == POINTS) && shipped.len() == 3, "{shipped:?}");
    for (name, calibration) in &shipped {
        assert!(
            good(calibration),
            "{name}: {calibration:?}; fit again: amk calibrate corpus/grids/h200-*.jsonl --checks corpus/checks/h200.jsonl --fit lower/src/cost/rates.json"
        );
    }
    // A model that uses only the bytes.
    let bound = predicted(&with_shipped, |point| point.bound_us);
    let spoilt = judged(&bound);
    assert!(!spoilt.values().any(|calibration| calibration.rank_correlation >= RANK_MIN));
    assert!(!spoilt.values().any(good), "bytes alone pass: {spoilt:?}");
    // Every rate at the far end of its range: the order may survive that, the error may not.
    let far = |rates: Rates, (index, &(_, low, high)): (usize, &(&str, f64, f64))| {
        rates.with(index, if rates.get(index) > f64::midpoint(low, high) { low } else { high })
    };
    let far = Rates::TABLE.iter().enumerate().fold(*Rates::shipped(), far);
    let far = points(|case| case.point(&far));
    let spoilt = judged(&far);
    assert!(!spoilt.values().all(good), "a spoilt model passes: {spoilt:?}");
}

#[test]
fn rates_that_have_not_seen_a_model_predict_it() {
    let unseen = points(left_out);
    for (name, calibration) in judged(&unseen) {
        assert!(good(&calibration), "{name}: {calibration:?}");
    }
    // The slowest predicted are not the fastest.
    let turned = predicted(&unseen, |point| -point.predicted_us);
    for (name, points) in &unseen {
        assert!(regret(points) <= REGRET_MAX, "{name}: {}", regret(points));
        assert!(regret(&turned[name]) > REGRET_MAX, "{name}: {}", regret(&turned[name]));
    }
}
