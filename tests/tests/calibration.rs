//! Compares the cost model with the measurements under `corpus/measurements/`.

use std::collections::BTreeMap;

use ir::Target;
use lower::Rates;
use search::calibrate::{Calibration, Case, Point};
use search::random_sample::{OBSERVATION_SCHEMA, Observation};
use tests::root;

/// Least rank correlation of predictions.
const RANK_MIN: f64 = 0.8;

/// Largest median error of predictions, relative to the measurement.
const ERROR_MAX: f64 = 0.1;

/// Fewest rows of a model and context for a rank correlation.
const ROWS_MIN: usize = 30;

fn cases() -> Vec<Case> {
    let folder = root().join("corpus/measurements");
    let entries = std::fs::read_dir(&folder).expect("the measurements are committed");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    let mut cases = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("it is text");
        for (index, line) in text.lines().enumerate() {
            let at = format!("{} line {}", path.display(), index + 1);
            let row: Observation =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{at}: {error}"));
            assert_eq!(row.schema, OBSERVATION_SCHEMA, "{at}");
            assert!(row.median_us >= row.bound_us * 0.9, "{at}: below what its card can read");
            let graph = model::preset(&row.model).expect("a preset").graph;
            let target = Target::by_name(&row.target).expect("a target of the table");
            cases.push(Case::new(row, &graph, &target).unwrap_or_else(|why| panic!("{at}: {why}")));
        }
    }
    cases
}

/// By model and context.
fn judged(cases: &[Case], point: impl Fn(&Case) -> Point) -> BTreeMap<String, Calibration> {
    let mut groups: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for case in cases {
        let group = format!("{} at {}", case.row.model, case.row.context);
        groups.entry(group).or_default().push(point(case));
    }
    groups.into_iter().map(|(name, points)| (name, Calibration::of(&points))).collect()
}

fn good(calibration: &Calibration) -> bool {
    let ranked = calibration.rows < ROWS_MIN || calibration.rank_correlation >= RANK_MIN;
    ranked && calibration.error_median <= ERROR_MAX && calibration.below_bound == 0
}

#[test]
fn predictions_rank_measured_schedules_and_a_spoilt_model_does_not() {
    let cases = cases();
    let shipped = judged(&cases, |case| case.point(Rates::shipped()));
    println!("{shipped:#?}");
    let llama = shipped.get("llama-3.2-1b at 128").expect("the model of the random sample");
    assert!(llama.rows >= 100, "{} rows", llama.rows);
    for (name, calibration) in &shipped {
        assert!(
            good(calibration),
            "{name}: {calibration:?}; fit again: amk calibrate corpus/measurements/*.jsonl --fit lower/src/cost/rates.json"
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
