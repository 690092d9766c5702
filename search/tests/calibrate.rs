//! Fits to synthetic measurements with known rates.

use std::collections::BTreeMap;

use ir::Target;
use ir::schedule::{neutral_config, validate};
use lower::{Options, Rates, lower, predict};
use search::LatencyKind;
use search::calibrate::{Calibration, Case, Changes, cases as lowered, fit, points, read, split};
use search::checks::{Check, Checked, Checks, Line};
use search::measured_grid::{GRID_SCHEMA, Grid, MEASURED_GRID_SCHEMA, Measured, Terms};
use tests::random_sample::RandomSample;

const KV_CAPACITY: u32 = 256;

fn terms() -> Terms {
    Terms {
        schema: MEASURED_GRID_SCHEMA.to_owned(),
        latency_kind: LatencyKind::MeasuredGpu,
        model: "toy-2l".to_owned(),
        graph_id: String::new(),
        target: "h200".to_owned(),
        conditions: None,
        kv_capacity: KV_CAPACITY,
        context: 128,
        timed_tokens: 8,
        rounds: 2,
        seed: 0,
        bandwidth: None,
        grid: Grid { schema: GRID_SCHEMA.to_owned(), base: BTreeMap::new(), axes: BTreeMap::new() },
        shard: [0, 1],
        migrated_from: None,
    }
}

fn measured(us: f64) -> Measured {
    let ids = (String::new(), String::new());
    Measured { program_id: ids.0, kernel_id: ids.1, us, blocks_us: vec![us], sm_mhz: None }
}

/// Cases of the toy model whose measurements are the predictions of these rates, with a deterministic error of at most
/// `error`.
fn cases(count: usize, truth: &Rates, error: f64) -> Vec<Case> {
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let known = [neutral_config(&graph, &target)];
    let sample = RandomSample { graph: &graph, target: &target, known: &known, seed: 4 };
    let case = |(index, (_, config)): (usize, (_, ir::ScheduleConfig))| {
        let mut case = Case::new(&terms(), config, &measured(0.0), &graph, &target).ok()?;
        let off = error * ((index * 7 % 11) as f64 / 5.0 - 1.0);
        case.measured_us = case.point(truth).predicted_us * (1.0 + off);
        Some(case)
    };
    sample.draws().enumerate().filter_map(case).take(count).collect()
}

#[test]
fn a_fit_finds_rates_that_predict_rows_it_has_not_seen() {
    let shipped = Rates::shipped();
    // Other rates than the shipped ones, each a fifth of the way to its upper bound.
    let truth = Rates::TABLE.iter().enumerate().fold(*shipped, |rates, (index, &(_, _, high))| {
        rates.with(index, rates.get(index) + 0.2 * (high - rates.get(index)))
    });
    let (fitted, held) = split(cases(60, &truth, 0.01));
    assert_eq!((fitted.len(), held.len()), (45, 15));
    let quality = |cases: &[Case], rates: &Rates| Calibration::of(&points(cases, rates));
    let before = quality(&held, shipped);
    let mut losses = Vec::new();
    let found = fit(&fitted, &[], shipped, |_, loss| losses.push(loss));
    let after = quality(&held, &found);
    assert!(losses.len() > 1 && losses.is_sorted_by(|a, b| a > b), "{losses:?}");
    assert!(before.error_median > 0.1, "{before:?}");
    assert!(after.error_median < 0.02, "{after:?}");
    assert!(after.rank_correlation > 0.95, "{after:?}");
    assert_eq!(after.below_bound, 0);
    assert_eq!(found, fit(&fitted, &[], shipped, |_, _| ()), "a fit is deterministic");
}

/// Checks of the toy model's neutral schedule whose measured gains are what these rates predict.
fn changes(truth: &Rates) -> Changes {
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let schedule = neutral_config(&graph, &target);
    let check = |change: &str, program_id: &str| Check {
        card: "NVIDIA H200".to_owned(),
        kernel_id: String::new(),
        program_id: program_id.to_owned(),
        model: graph.name.clone(),
        context: 128,
        change: change.to_owned(),
        predicted_pct: 0.0,
        measured_pct: 0.0,
    };
    let knobs =
        ["tiling.qkv.rows=8", "tiling.down.rows=8", "sync.qkv=counter", "kernel.poll_sleep_ns=0"];
    let older = check("tiling.qkv.rows=32", "of an older schedule");
    let made = |each: Vec<Check>| {
        let checked = Checked { program_id: "of the newest".to_owned(), schedule_config: schedule };
        let lines =
            std::iter::once(Line::Schedule(checked)).chain(each.into_iter().map(Line::Check));
        let text: Vec<String> = lines.map(|line| serde_json::to_string(&line).unwrap()).collect();
        Changes::new(&Checks::read(&text.join("\n")).unwrap(), &terms(), &graph, &target)
    };
    let newest = knobs.map(|change| check(change, "of the newest"));
    let all: Vec<Check> = std::iter::once(older.clone()).chain(newest).collect();
    let measured = |of: Check| Check { measured_pct: of.predicted_pct, ..of };
    let measured = made(all).unwrap().unwrap().predicted(truth).into_iter().map(measured).collect();
    let found = made(measured).unwrap().unwrap();
    assert_eq!(
        (found.len(), found.base),
        (knobs.len(), schedule),
        "one check is of an older schedule"
    );
    assert!(made(vec![older]).unwrap().is_none(), "its schedule is not in the file");
    let refused = made(vec![check("tiling.qkv.rows=9", "of the newest")]).err().unwrap();
    assert!(refused.contains("tiling.qkv.rows=9: tiling.qkv.rows takes"), "{refused}");
    found
}

#[test]
fn a_fit_learns_from_changes_what_times_of_other_schedules_do_not_say() {
    let shipped = Rates::shipped();
    let (index, &(_, low, high)) =
        Rates::TABLE.iter().enumerate().find(|(_, row)| row.0 == "poll_us").unwrap();
    let truth = shipped.with(index, f64::midpoint(low, high));
    // The times are those of the shipped rates, so that only the changes say otherwise.
    let times = cases(8, shipped, 0.0);
    let changes = [changes(&truth)];
    let error = |rates: &Rates| {
        let off = |of: &Check| (of.predicted_pct - of.measured_pct).abs();
        changes[0].predicted(rates).iter().map(off).fold(0.0, f64::max)
    };
    let with = fit(&times, &changes, shipped, |_, _| ());
    assert!(error(&with) < 0.5 * error(shipped), "{} {}", error(&with), error(shipped));
    assert!((error(&fit(&times, &[], shipped, |_, _| ())) - error(shipped)).abs() < 1e-6);
}

#[test]
fn a_case_predicts_what_the_lowering_predicts() {
    let case = &cases(1, Rates::shipped(), 0.0)[0];
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let valid = validate(case.config, &graph, &target).unwrap();
    let program = lower(&valid, &graph, &target, Options { kv_capacity: KV_CAPACITY }).unwrap();
    let predicted = predict(&program, &valid.kernel, &target, 128 + 4);
    let point = case.point(Rates::shipped());
    assert_eq!((point.predicted_us, point.bound_us), (predicted.latency_us, predicted.bound_us));
}

#[test]
fn a_measured_grid_is_read_point_by_point_and_its_errors_name_the_line() {
    let terms = serde_json::to_string(&terms()).unwrap();
    let row = |point: u32| {
        let result = serde_json::to_value(measured(20.0)).unwrap();
        serde_json::json!({"point": point, "measured": result}).to_string()
    };
    let text =
        [terms.clone(), row(0), r#"{"point": 1, "illegal": ["S-RING"]}"#.to_owned()].join("\n");
    let file = read(&text).unwrap();
    assert_eq!(file.points, [(0, measured(20.0))]);
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let space = file.terms.grid.space(&neutral_config(&graph, &target)).unwrap();
    let cases = lowered(&file, &space, 100, &graph, &target).unwrap();
    assert_eq!((cases.len(), cases[0].same_program), (1, false));
    assert_eq!(cases[0].config, neutral_config(&graph, &target));
    assert_eq!(read("{}\n").unwrap_err().0, 1);
    assert_eq!(read(&format!("{terms}\n{{}}\n")).unwrap_err().0, 2);
    let other = terms.replace(MEASURED_GRID_SCHEMA, "amk.other.v1");
    assert!(read(&other).unwrap_err().1.contains("amk.other.v1"));
}
