//! Fits to synthetic measurements with known rates.

use ir::Target;
use ir::schedule::{neutral_config, validate};
use lower::{Options, Rates, lower, predict};
use search::Conditions;
use search::calibrate::{Calibration, Case, fit, points, split};
use search::random_sample::{OBSERVATION_SCHEMA, Observation, RandomSample};

const KV_CAPACITY: u32 = 256;

/// Cases of the toy model whose measurements are the predictions of these rates, with a deterministic error of at most
/// `error`.
fn cases(count: usize, truth: &Rates, error: f64) -> Vec<Case> {
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let known = [neutral_config(&graph, &target)];
    let sample = RandomSample { graph: &graph, target: &target, known: &known, seed: 4 };
    let case = |(index, (drawn, config)): (usize, (_, ir::ScheduleConfig))| {
        let valid = validate(config, &graph, &target).ok()?;
        let program = lower(&valid, &graph, &target, Options { kv_capacity: KV_CAPACITY }).ok()?;
        let row = Observation {
            schema: OBSERVATION_SCHEMA.to_owned(),
            model: "toy-2l".to_owned(),
            target: target.name.clone(),
            conditions: Conditions::default(),
            kv_capacity: KV_CAPACITY,
            context: 128,
            timed_tokens: 8,
            drawn,
            config,
            program_id: program.id(),
            kernel_id: String::new(),
            median_us: 0.0,
            ci_us: [0.0; 2],
            blocks_us: Vec::new(),
            bound_us: 0.0,
            bandwidth: 0.0,
        };
        let mut case = Case::new(row, &graph, &target).unwrap();
        assert!(case.same_program);
        let off = error * ((index * 7 % 11) as f64 / 5.0 - 1.0);
        case.row.median_us = case.point(truth).predicted_us * (1.0 + off);
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
    let found = fit(&fitted, shipped, |_, loss| losses.push(loss));
    let after = quality(&held, &found);
    assert!(losses.len() > 1 && losses.is_sorted_by(|a, b| a > b), "{losses:?}");
    assert!(before.error_median > 0.1, "{before:?}");
    assert!(after.error_median < 0.02, "{after:?}");
    assert!(after.rank_correlation > 0.95, "{after:?}");
    assert_eq!(after.below_bound, 0);
    assert_eq!(found, fit(&fitted, shipped, |_, _| ()), "a fit is deterministic");
}

#[test]
fn a_case_predicts_what_the_lowering_predicts() {
    let case = &cases(1, Rates::shipped(), 0.0)[0];
    let graph = model::preset("toy-2l").unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let valid = validate(case.row.config, &graph, &target).unwrap();
    let program = lower(&valid, &graph, &target, Options { kv_capacity: KV_CAPACITY }).unwrap();
    let predicted = predict(&program, &valid.kernel, &target, case.row.position());
    let point = case.point(Rates::shipped());
    assert_eq!((point.predicted_us, point.bound_us), (predicted.latency_us, predicted.bound_us));
}
