//! A step of one sequence: the gates of a search, then accuracy and time at the row's context.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Instant;

use ir::FeedForward;
use ir::program::Program;
use ir::schedule::ScheduleConfig;
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use search::{
    Contender, Device, DeviceError, Gate, Handle, POSITIONS_MAX, Plan, Ran, Rejection, Samples,
    Timing, assess, draw_tokens,
};

use super::{Measured, Row, TIMED_TOKENS};
use crate::commands::evaluate::stop_on_our_fault;
use crate::failure::Failure;
use crate::report;
use crate::spinner::Spinner;

/// At most this many positions are all compared; beyond that: the first ones, some between, and the last before and
/// among the timed ones.
const COMPARE_ALL: usize = 192;
pub(super) const COMPARE_FIRST: usize = 16;
pub(super) const COMPARE_BETWEEN: usize = 16;
pub(super) const COMPARE_LAST: usize = 64;

/// Positions whose logits are read from the device at once.
const PIECE: usize = 128;

/// The tokens of a bench and the graph's logits at the compared positions.
pub(super) struct Passage {
    pub(super) tokens: Vec<u32>,
    /// First timed position.
    pub(super) context: usize,
    pub(super) positions: Vec<usize>,
    /// The rows of these positions; none for a model with experts, whose rows depend on the routes of a run.
    pub(super) expected: Option<Vec<Vec<f32>>>,
    pub(super) seed: u64,
}

pub(super) fn measure(row: &Row<'_>) -> Result<Measured, Failure> {
    let (args, context, config) = (row.args, &row.context, &row.chosen.config);
    let mut device = context.open_process(&args.sharing)?;
    if args.bundle.is_some() && device.is_none() {
        return Err(Failure::no_gpu("--bundle is for what is measured"));
    }
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let name = &context.graph().name;
    let _working = Spinner::on(format!("evaluating {name}, then judging the schedule"));
    let positions = device.is_some().then_some(POSITIONS_MAX);
    let gate = context.gate(args.seed, positions, &kernel_id)?;
    let mut gate = gate.with_contexts(&[args.context]);
    let (mut measured, outcome) = match &mut device {
        None => {
            let (verdict, outcome) =
                assess::evaluate(&mut gate, None, config, row.timing(), args.seed);
            (Measured::new(verdict, *config, None), outcome.map(drop))
        }
        Some(device) => {
            let passage = Passage::new(row).map_err(|e| context.unevaluated(e))?;
            Bench { gate: &mut gate, device, passage: &passage, timing: row.timing() }.run(config)
        }
    };
    if let Err(dropped) = &outcome {
        stop_on_our_fault(dropped)?;
    }
    if context.shape_only {
        let note = "the model has no weights: random ones in the shape of its config.json";
        measured.verdict.notes.push(note.to_owned());
    }
    Ok(measured)
}

impl Passage {
    fn new(row: &Row<'_>) -> Result<Self, search::ExpectedError> {
        let (args, graph) = (row.args, row.context.graph());
        let end = args.context.saturating_add(TIMED_TOKENS);
        let length = end.min(row.context.kv_capacity) as usize;
        let tokens = draw_tokens(args.seed, graph.vocab, length);
        let positions = compared(length);
        let mut expected = None;
        if !graph.layers.iter().any(|layer| matches!(layer.mlp.body, FeedForward::Experts(_))) {
            report::say(&format!("evaluating the graph at {length} positions"));
            let start = Instant::now();
            let mut evaluator = Evaluator::new(graph, &*row.context.model.weights)?;
            expected = Some(evaluator.run_at(&tokens, &positions)?);
            report::say(&format!("evaluated in {:.1} s", start.elapsed().as_secs_f64()));
        }
        let (context, seed) = (args.context as usize, args.seed);
        Ok(Self { tokens, context, positions, expected, seed })
    }

    /// The graph's rows: those of a run's routes for a model with experts.
    fn expected_of(&self, gate: &Gate<'_>, actual: &Ran) -> Result<Cow<'_, [Vec<f32>]>, Rejection> {
        if let Some(expected) = &self.expected {
            return Ok(Cow::Borrowed(expected));
        }
        let routes = actual.routes.as_ref().ok_or_else(|| DeviceError::Unavailable {
            reason: "it cannot say which experts it chose".to_owned(),
        })?;
        Ok(Cow::Owned(gate.follow(&self.tokens, routes, Some(&self.positions))?))
    }
}

/// The positions out of `length` whose logits are compared, in order; the last one is among them.
pub(super) fn compared(length: usize) -> Vec<usize> {
    if length <= COMPARE_ALL {
        return (0..length).collect();
    }
    let between = (1..=COMPARE_BETWEEN).map(|i| i * length / (COMPARE_BETWEEN + 1));
    let positions: BTreeSet<usize> =
        (0..COMPARE_FIRST).chain(between).chain(length - COMPARE_LAST..length).collect();
    positions.into_iter().collect()
}

pub(super) struct Bench<'b, 'a> {
    pub(super) gate: &'b mut Gate<'a>,
    pub(super) device: &'b mut dyn Device,
    pub(super) passage: &'b Passage,
    pub(super) timing: Timing,
}

impl Bench<'_, '_> {
    pub(super) fn run(mut self, config: &ScheduleConfig) -> (Measured, Result<(), Rejection>) {
        let verdict = assess::begin(self.gate, Some(&*self.device), config);
        let mut measured = Measured::new(verdict, *config, Some(self.device.describe()));
        let outcome = self.measure(config, &mut measured);
        if let Err(dropped) = &outcome {
            assess::refuse(&mut measured.verdict, dropped);
        }
        (measured, outcome)
    }

    fn measure(
        &mut self,
        config: &ScheduleConfig,
        measured: &mut Measured,
    ) -> Result<(), Rejection> {
        let (passage, verdict) = (self.passage, &mut measured.verdict);
        let candidate = assess::lower(self.gate, config, verdict)?;
        let assessed = assess::assess(self.gate, Some(self.device), candidate, verdict)?;
        let candidate = &assessed.candidate;
        let kernel = &candidate.config.kernel;
        let handle = self.device.prepare(&candidate.program, kernel).map_err(Rejection::Failed)?;
        let actual = rows_at(self.device, (handle, &candidate.program), passage)?;
        let expected = passage.expected_of(self.gate, &actual)?;
        let accuracy = Accuracy::of(&expected, &actual.logits, Tolerance::DEVICE);
        let disagreed = |by| move |at| Rejection::Disagreed { by, at };
        let agreement = assessed
            .reference
            .and_device(&expected, &actual.logits, &actual.chosen, Tolerance::DEVICE)
            .map_err(disagreed("device"))?;
        let contender = Contender::new(handle, &agreement);
        let Timing { rounds, warmup } = self.timing;
        let plan = Plan { tokens: &passage.tokens, first: passage.context, rounds, warmup };
        let samples: Samples =
            search::time(self.device, [contender; 2], &plan).map_err(Rejection::Failed)?;
        let last = expected.last().map(std::slice::from_ref).unwrap_or_default();
        for (actual, chosen) in samples.last() {
            let _ = assessed
                .reference
                .and_device(last, actual, chosen, Tolerance::DEVICE)
                .map_err(disagreed("timed"))?;
        }
        let middle = u32::midpoint(passage.context as u32, passage.tokens.len() as u32);
        let bounds = assess::bounds(self.gate, self.device, candidate, &[middle]);
        let _ = assess::set_measured(verdict, &agreement, &samples, bounds, passage.seed)?;
        let program = &candidate.program;
        measured.bytes = Some(program.stream_bytes() + program.kv_bytes(middle));
        measured.set_noise(samples, passage.seed);
        measured.set_accuracy(accuracy);
        Ok(())
    }
}

/// The device's logits at the passage's positions. The others are dropped piece by piece: at a long context they would not fit.
fn rows_at(
    device: &mut dyn Device,
    program: (Handle, &Program),
    passage: &Passage,
) -> Result<Ran, Rejection> {
    let wanted: BTreeSet<usize> = passage.positions.iter().copied().collect();
    let mut kept = Ran::default();
    for first in (0..passage.tokens.len()).step_by(PIECE) {
        let end = passage.tokens.len().min(first + PIECE);
        let ran = search::run(device, program, &passage.tokens[..end], first)?;
        match (&mut kept.routes, ran.routes) {
            (Some(routes), Some(more)) => routes.extend(more),
            (routes, more) => *routes = more.filter(|_| first == 0),
        }
        let positions = ran.logits.into_iter().zip(ran.chosen).zip(first..);
        for ((row, token), _) in positions.filter(|(_, position)| wanted.contains(position)) {
            kept.logits.push(row);
            kept.chosen.push(token);
        }
    }
    Ok(kept)
}
