//! The points of a measured grid, on a scripted device.

use ir::Target;
use ir::program::Program;
use ir::schedule::{KernelConfig, ScheduleConfig, neutral_config};
use model::Model;
use search::measured_grid::{Answer, Probe, prepare};
use search::{DeviceError, Expected, Gate};
use tests::scripted::{Behaviour, ScriptedDevice};

const KV_CAPACITY: u32 = 24;

fn model(name: &str) -> (Model, Target) {
    (model::preset(name).unwrap(), Target::by_name("h200").unwrap())
}

/// Schedules of the toy model that lower to different programs.
fn points(model: &Model, target: &Target) -> Vec<ScheduleConfig> {
    let mut points = vec![neutral_config(&model.graph, target); 4];
    for (config, rows) in points.iter_mut().skip(1).zip([8, 32, 64]) {
        config.tiling.lm_head.rows = rows;
    }
    points
}

/// Measures the points one after another; returns their results and the number of positions that were run untimed.
fn recorded(behaviours: [Behaviour; 4]) -> (Vec<Answer>, usize) {
    let (model, target) = model("toy");
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = Expected::new(graph, weights, KV_CAPACITY, 1, Some(16)).unwrap();
    let logits = expected.logits.clone();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected);
    let points = points(&model, &target);
    let ready: Vec<_> = points.iter().map(|config| prepare(&gate, config).unwrap()).collect();
    let ids: Vec<_> = ready.iter().map(|(candidate, _)| candidate.program_id.clone()).collect();
    let script = move |program: &Program, _: &KernelConfig| {
        let point = ids.iter().position(|id| *id == program.id()).unwrap();
        behaviours[point].clone()
    };
    let mut device = ScriptedDevice::new(logits, 1, script);
    let mut probe = Probe::new(&gate, ready[0].clone(), 8..16, 2, 3);
    let mut answers = vec![probe.anchor(&mut device).unwrap()];
    for (candidate, reference) in &ready[1..] {
        answers.push(probe.measure(&mut device, candidate, *reference).unwrap());
    }
    (answers, device.positions)
}

/// The median of an answer, or the name of its failure.
fn said(answer: &Answer) -> Result<f64, &str> {
    if let Answer::Measured(measured) = answer {
        assert_eq!(measured.blocks_us.len(), 8);
        return Ok(measured.us);
    }
    let Answer::Failed { outcome, .. } = answer else { panic!("{answer:?}") };
    Err(outcome)
}

#[test]
fn points_of_a_measured_grid_share_their_context() {
    let us = |us| Behaviour::takes(us);
    let (answers, positions) = recorded([us(20.0), us(30.0), us(40.0), us(50.0)]);
    assert_eq!(
        answers.iter().map(said).collect::<Vec<_>>(),
        [Ok(20.0), Ok(30.0), Ok(40.0), Ok(50.0)]
    );
    // Sixteen positions once, then the eight timed ones of each point.
    assert_eq!(positions, 16 + 4 * 8);
}

#[test]
fn a_point_that_fails_is_a_row_and_the_next_one_is_measured() {
    let us = |us| Behaviour::takes(us);
    let trap = DeviceError::TimedOut { after_ms: 1, status: "silent".into() };
    let wrong = Behaviour { wrong: true, ..us(1.0) };
    let timed = Behaviour { wrong_when_timed: true, ..us(1.0) };
    let late = Behaviour { wrong_from: Some(15), ..us(1.0) };
    for (bad, outcome) in [
        (wrong, "disagreed"),
        (timed, "disagreed"),
        (late, "disagreed"),
        (Behaviour { run_error: Some(trap.clone()), ..us(1.0) }, "timed_out"),
        (Behaviour { time_error: Some(trap.clone()), ..us(1.0) }, "timed_out"),
        (
            Behaviour { load_error: Some(DeviceError::Compile { log: "no".into() }), ..us(1.0) },
            "compile_failed",
        ),
    ] {
        let (answers, _) = recorded([us(20.0), us(30.0), bad, us(50.0)]);
        assert_eq!(
            answers.iter().map(said).collect::<Vec<_>>(),
            [Ok(20.0), Ok(30.0), Err(outcome), Ok(50.0)]
        );
    }
}
