use ::tests::scripted::{Behaviour, ScriptedDevice};
use clap::Parser;
use ir::Target;
use ir::program::Program;
use ir::schedule::KernelConfig;
use reference_vm::eval::{Evaluator, Logits};
use search::{Expected, Gate, POSITIONS_MAX, Rejection, draw_tokens};

use super::decode::{Bench, COMPARE_BETWEEN, COMPARE_FIRST, COMPARE_LAST, Passage, compared};
use super::*;

const TIMING: Timing = Timing { rounds: 24, warmup: WARMUP };

#[test]
fn compared_positions_are_all_of_a_few_and_some_of_many() {
    assert_eq!(compared(160), (0..160).collect::<Vec<_>>());
    for length in [193, 2080, 16_416] {
        let positions = compared(length);
        assert!(positions.is_sorted_by(|a, b| a < b));
        assert!(positions.len() <= COMPARE_FIRST + COMPARE_BETWEEN + COMPARE_LAST);
        assert_eq!((positions[0], positions.last()), (0, Some(&(length - 1))));
        // The 32 before the context's end, and the timed ones.
        assert!((length - 64..length).all(|position| positions.contains(&position)));
    }
}

/// Runs a bench of the toy on a scripted device whose logits beyond the gate's positions are `edit`ed; returns
/// what was measured and the outcome.
fn bench_of(
    edit: impl Fn(&mut Vec<f32>),
    behaviour: Behaviour,
) -> (Measured, Result<(), Rejection>) {
    bench_evaluated_to(300, edit, behaviour)
}

/// The same, where the graph is evaluated at the first positions only.
fn bench_evaluated_to(
    evaluated: usize,
    edit: impl Fn(&mut Vec<f32>),
    behaviour: Behaviour,
) -> (Measured, Result<(), Rejection>) {
    let model = model::preset("toy").expect("a preset");
    let (graph, weights) = (&model.graph, &*model.weights);
    let target = Target::by_name("h200").expect("a known target");
    let tokens = draw_tokens(3, graph.vocab, 300);
    let mut evaluator = Evaluator::new(graph, weights).expect("the toy can be evaluated");
    let rows = evaluator.run(&tokens, Logits::All).expect("the toy can be evaluated");
    let positions = compared(evaluated);
    let expected = Some(positions.iter().map(|&position| rows[position].clone()).collect());
    let passage = Passage { tokens, context: 268, positions, expected, seed: 3 };
    let gate_inputs = Expected::new(graph, weights, 512, 3, Some(POSITIONS_MAX)).expect("as above");
    let mut answers = rows;
    answers.iter_mut().skip(POSITIONS_MAX).for_each(edit);
    let script = move |_: &Program, _: &KernelConfig| behaviour.clone();
    let mut device = ScriptedDevice::new(answers, 1, script).with_bandwidth(4.6e12);
    let kernel_id = |_: &KernelConfig| "0123456789abcdef".to_owned();
    let options = lower::Options { kv_capacity: 512 };
    let mut gate = Gate::new(graph, weights, &target, options, &kernel_id, gate_inputs);
    let config = ir::schedule::neutral_config(graph, &target);
    Bench { gate: &mut gate, device: &mut device, passage: &passage, timing: TIMING }.run(&config)
}

#[test]
fn a_device_that_is_right_is_measured_at_the_context() {
    let (measured, outcome) = bench_of(|_| (), Behaviour::takes(50.0).with_noise(0.01));
    assert_eq!(outcome, Ok(()));
    let (accuracy, verdict) = (measured.accuracy, &measured.verdict);
    let accuracy = accuracy.expect("it was measured");
    assert_eq!(accuracy.positions, compared(300).len());
    assert_eq!((accuracy.rel_worst, accuracy.kl_mean), (0.0, 0.0));
    assert!(verdict.correct && verdict.rejected_reason.is_none());
    let us = verdict.latency_us.expect("it was timed");
    assert!((us - 50.0).abs() < 0.5 && verdict.ci_us.is_some());
    let bound = measured.bytes.expect("it was counted") as f64 / 4.6e12 * 1e6;
    assert!((verdict.bound_us.expect("it has a bound") - bound).abs() < 1e-9);
}

#[test]
fn what_was_measured_becomes_a_bundle_that_holds() {
    let cli = "amk bench --model toy --device cpu --target h200 --kv-capacity 512 --context 268 --seed 3 --schedule neutral";
    let cli = crate::cli::Cli::try_parse_from(cli.split(' ')).expect("a command");
    let Some(crate::cli::Command::Bench(args)) = cli.command else { panic!("it is a bench") };
    let row = Row::new(&args).unwrap_or_else(|failure| panic!("{}", failure.message));
    let (mut measured, outcome) = bench_of(|_| (), Behaviour::takes(50.0).with_noise(0.01));
    assert_eq!(outcome, Ok(()));
    let info = measured.info.take().expect("there is a device");
    let without = DeviceInfo { bandwidth: None, ..info.clone() };
    measured.info = Some(without);
    assert_eq!(row.bundle(&measured), None, "nobody measured the bandwidth");
    measured.info = Some(DeviceInfo { name: "NVIDIA H200".into(), ..info });
    let made = row.bundle(&measured).expect("nothing is missing");
    let read = Bundle::read(&made.to_text()).expect("it is whole");
    assert_eq!((read.context, read.rounds_us.len()), (268, TIMING.rounds));
    let rebuilt = read.rebuild(row.context.graph(), &row.context.target).expect("the same program");
    assert_eq!(Some(rebuilt.1.id()), measured.verdict.program_id);
    let document = row.document(&measured, &[]);
    let process: search::stability::Process =
        serde_json::from_value(document.clone()).expect("what a manifest reads");
    assert_eq!(Some(process.median_us()), measured.verdict.latency_us);
    assert_eq!(document["us"], document["us_per_token"]);
}

/// A large model at a long context: what runs in time is compared with what ran before.
#[test]
fn timed_rows_that_were_not_evaluated_are_compared_with_untimed_ones() {
    let (measured, outcome) = bench_evaluated_to(192, |_| (), Behaviour::takes(50.0));
    assert_eq!(outcome, Ok(()));
    assert_eq!(measured.accuracy.expect("it was measured").positions, 192);
    let says = |note: &String| note.contains("the first 192 of 300 positions");
    assert!(measured.verdict.notes.iter().any(says), "{:?}", measured.verdict.notes);
    let wrong = Behaviour { wrong_when_timed: true, ..Behaviour::takes(50.0) };
    let (measured, outcome) = bench_evaluated_to(192, |_| (), wrong);
    assert!(matches!(outcome, Err(Rejection::Disagreed { by: "timed", .. })), "{outcome:?}");
    assert!(!measured.verdict.correct && measured.verdict.latency_us.is_none());
    let (measured, _) = bench_of(|_| (), Behaviour::takes(50.0));
    assert!(!measured.verdict.notes.iter().any(|note| note.contains("was evaluated")));
}

/// Beyond the gate's positions: each logit is within the tolerance, which scales with the greatest one, but the row's error is too large.
#[test]
fn an_error_that_the_gate_accepts_can_be_too_large_for_the_bench() {
    let spread = |row: &mut Vec<f32>| {
        let largest = row.iter().fold(0f32, |largest, v| largest.max(v.abs()));
        for (index, value) in row.iter_mut().enumerate() {
            *value += largest * if index % 2 == 0 { 4.5e-3 } else { -4.5e-3 };
        }
    };
    let (measured, outcome) = bench_of(spread, Behaviour::takes(50.0));
    assert_eq!(outcome, Ok(()));
    let accuracy = measured.accuracy.expect("it was measured");
    assert!(accuracy.rel_worst > Accuracy::REL_MAX, "{accuracy:?}");
    let verdict = measured.verdict;
    assert!(verdict.gates.iter().all(|gate| gate.passed), "no gate has said no");
    assert!(!verdict.correct, "the bench has");
    let reason = verdict.rejected_reason.expect("it is said");
    assert!(reason.contains("accuracy") && reason.contains("5e-3"), "{reason}");
    assert!(accuracy_line(&accuracy).contains("OUT OF BOUNDS"));
}

#[test]
fn a_device_that_is_wrong_is_not_timed() {
    let wrong = Behaviour { wrong: true, ..Behaviour::takes(50.0) };
    let (Measured { verdict, .. }, outcome) = bench_of(|_| (), wrong);
    assert!(matches!(outcome, Err(Rejection::Disagreed { by: "device", .. })), "{outcome:?}");
    assert!(!verdict.correct && verdict.latency_us.is_none());
    let wrong = Behaviour { wrong_when_timed: true, ..Behaviour::takes(50.0) };
    let (Measured { verdict, .. }, outcome) = bench_of(|_| (), wrong);
    assert!(matches!(outcome, Err(Rejection::Disagreed { by: "timed", .. })), "{outcome:?}");
    assert!(verdict.latency_us.is_none());
}

#[test]
fn a_peer_stands_beside_a_measurement_with_its_ratio() {
    let peer = |us_per_token, absent: Option<&str>| Peer {
        name: "torch-graph",
        version: Some("2.11".into()),
        us_per_token,
        interval: us_per_token.map(|us| [us - 1.0, us + 1.0]),
        conditions: vec!["5 blocks".into()],
        blocks_us: Vec::new(),
        absent: absent.map(str::to_owned),
    };
    let line = peer_line(&peer(Some(150.0), None), Some(100.0));
    assert_eq!(line, "150.0 us per token (149.0 to 151.0), 1.50 x amk; 2.11; 5 blocks");
    assert!(!peer_line(&peer(Some(150.0), None), None).contains("x amk"));
    assert_eq!(peer_line(&peer(None, Some("no torch")), Some(100.0)), "absent: no torch");
}
