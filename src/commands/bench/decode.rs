//! A step of one sequence: the gates of a search, then accuracy and time at the row's context.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Instant;

use ir::Graph;
use ir::program::Program;
use ir::schedule::ScheduleConfig;
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use search::{
    Contender, Device, DeviceError, Expected, Gate, Handle, Plan, Ran, Rejection, Samples, Timing,
    assess, device_positions, draw_tokens, why_fewer_positions,
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
    /// Those at which the graph was evaluated: the last timed one is among them, but for large models at a long
    /// context.
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
    let positions = device.is_some().then(|| device_positions(context.graph()));
    let gate = context.gate(args.seed, positions, &kernel_id)?;
    let mut gate = gate.with_contexts(&[args.context]);
    let (mut measured, outcome) = match &mut device {
        None => {
            let (verdict, outcome) =
                assess::evaluate(&mut gate, None, config, row.timing(), args.seed);
            (Measured::new(verdict, *config, None), outcome.map(drop))
        }
        Some(device) => {
            let passage = Passage::new(row, gate.expected()).map_err(|e| context.unevaluated(e))?;
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
    fn new(row: &Row<'_>, gate: &Expected) -> Result<Self, search::ExpectedError> {
        let (args, graph) = (row.args, row.context.graph());
        let end = args.context.saturating_add(TIMED_TOKENS);
        let length = end.min(row.context.kv_capacity) as usize;
        let tokens = draw_tokens(args.seed, graph.vocab, length);
        let evaluated = length.min(evaluated_max(graph));
        let positions = compared(evaluated);
        let (context, seed) = (args.context as usize, args.seed);
        if graph.has_experts() {
            return Ok(Self { tokens, context, positions, expected: None, seed });
        }
        // The gate's tokens begin alike, and a position's logits do not depend on those behind.
        if let Some(known) = known(gate, &tokens[..evaluated], &positions) {
            return Ok(Self { tokens, context, positions, expected: Some(known), seed });
        }
        report::say(&format!("evaluating the graph at {evaluated} positions"));
        let start = Instant::now();
        let mut evaluator = Evaluator::new(graph, &*row.context.model.weights)?;
        let expected = Some(evaluator.run_at(&tokens[..evaluated], &positions)?);
        report::say(&format!("evaluated in {:.1} s", start.elapsed().as_secs_f64()));
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
        let evaluated = self.positions.last().map_or(0, |last| last + 1);
        Ok(Cow::Owned(gate.follow(&self.tokens[..evaluated], routes, Some(&self.positions))?))
    }

    /// Whether the graph was evaluated at the last timed position.
    fn reaches_the_end(&self) -> bool {
        self.positions.last().map(|last| last + 1) == Some(self.tokens.len())
    }

    /// How timed rows are checked if the graph was not evaluated there.
    fn note(&self) -> Option<String> {
        let (all, evaluated) =
            (self.tokens.len(), self.positions.last().map_or(0, |last| last + 1));
        (!self.reaches_the_end()).then(|| {
            format!(
                "the graph was evaluated at the first {evaluated} of {all} positions: the last timed row is compared with the one of the same program that ran untimed"
            )
        })
    }
}

/// Positions that a bench evaluates the graph at. Of large models no more than are compared in full: a context of
/// thousands would take the CPU an hour.
pub(super) fn evaluated_max(graph: &Graph) -> usize {
    if why_fewer_positions(graph).is_some() { COMPARE_ALL } else { usize::MAX }
}

/// The logits of these positions if the gate was evaluated on all of these tokens.
fn known(gate: &Expected, tokens: &[u32], positions: &[usize]) -> Option<Vec<Vec<f32>>> {
    gate.tokens
        .starts_with(tokens)
        .then(|| positions.iter().map(|&at| gate.logits[at].clone()).collect())
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
        let (actual, last_ran) = rows_at(self.device, (handle, &candidate.program), passage)?;
        let expected = passage.expected_of(self.gate, &actual)?;
        let limit = Tolerance::device_limit(self.gate.graph().kv_dtype);
        let accuracy = Accuracy::of(&expected, &actual.logits, limit);
        let disagreed = |by| move |at| Rejection::Disagreed { by, at };
        let agreement = assessed
            .reference
            .and_device(&expected, &actual.logits, &actual.chosen, limit)
            .map_err(disagreed("device"))?;
        let contender = Contender::new(handle, &agreement);
        let Timing { rounds, warmup } = self.timing;
        let plan = Plan { tokens: &passage.tokens, first: passage.context, rounds, warmup };
        let samples: Samples =
            search::time(self.device, [contender; 2], &plan).map_err(Rejection::Failed)?;
        let last = expected.last().filter(|_| passage.reaches_the_end());
        let last = last.map_or(&*last_ran, std::slice::from_ref);
        verdict.notes.extend(passage.note());
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

/// The device's logits at the passage's positions, and those of its last token. The others are dropped piece by piece:
/// at a long context they would not fit.
fn rows_at(
    device: &mut dyn Device,
    program: (Handle, &Program),
    passage: &Passage,
) -> Result<(Ran, Vec<Vec<f32>>), Rejection> {
    let wanted: BTreeSet<usize> = passage.positions.iter().copied().collect();
    let (mut kept, mut last) = (Ran::default(), Vec::new());
    for first in (0..passage.tokens.len()).step_by(PIECE) {
        let end = passage.tokens.len().min(first + PIECE);
        let ran = search::run(device, program, &passage.tokens[..end], first)?;
        match (&mut kept.routes, ran.routes) {
            (Some(routes), Some(more)) => routes.extend(more),
            (routes, more) => *routes = more.filter(|_| first == 0),
        }
        last = ran.logits.last().cloned().into_iter().collect();
        let positions = ran.logits.into_iter().zip(ran.chosen).zip(first..);
        for ((row, token), _) in positions.filter(|(_, position)| wanted.contains(position)) {
            kept.logits.push(row);
            kept.chosen.push(token);
        }
    }
    Ok((kept, last))
}
