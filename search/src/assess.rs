//! From a candidate to something that can be compared: runs the gates in order and records them in a verdict.

use ir::KvDtype;
use ir::program::Program;
use ir::schedule::ScheduleConfig;
use rayon::prelude::*;
use reference_vm::compare::{Agreement, Device as OnDevice, Reference, Summary};

use crate::cpu::Candidate;
use crate::decide::Decision;
use crate::device::{Contender, Device, DeviceError, ProgramGuard, Ran, Samples, Side};
use crate::effort::{Interim, StoppingRule};
use crate::expected::why_fewer_positions;
use crate::follow::Rows;
use crate::gate::Gate;
use crate::measure::{Interval, Latency, Predicted, geometric_mean};
use crate::rejection::{BitsDiffer, Rejection};
use crate::settings::Clock;
use crate::verdict::{LatencyKind, Verdict};

/// Positions of the first stage on the device, after which a candidate that is clearly slower is given up.
const FIRST_STAGE: usize = 24;

/// A candidate that agrees, with its proofs.
#[derive(Debug)]
pub struct Assessed {
    /// The candidate.
    pub candidate: Candidate,
    /// Its agreement on the reference VM.
    pub reference: Agreement<Reference>,
    /// The prediction of the cost model.
    pub predicted: Predicted,
    /// Its agreement on the device, if there is one.
    pub on_device: Option<Agreement<OnDevice>>,
    /// The expected logits, if its routes on the device are not the graph's own.
    pub(crate) followed: Option<Rows>,
}

/// A candidate that agrees on the reference VM and, once, on the device: at the positions of the first stage or at all.
/// It may be timed, but only to give it up: nothing but an [`Assessed`] is ever kept.
#[derive(Debug)]
pub(crate) struct Screened {
    pub(crate) candidate: Candidate,
    pub(crate) reference: Agreement<Reference>,
    /// The outputs of the positions that the device ran.
    ran: Ran,
    agreement: Agreement<OnDevice>,
    followed: Option<Rows>,
}

impl Screened {
    /// Number of positions that the device ran.
    pub(crate) fn positions(&self) -> usize {
        self.ran.logits.len()
    }
}

/// A verdict with the facts that follow from the schedule alone.
#[must_use]
pub fn begin(gate: &Gate<'_>, device: Option<&dyn Device>, config: &ScheduleConfig) -> Verdict {
    let name = device.map_or_else(|| "cpu".to_owned(), |device| device.describe().name);
    let mut verdict = Verdict::new(&gate.graph().name, &gate.target().name, &name);
    verdict.schedule_id = Some(config.id());
    verdict
}

/// The note on a legal schedule.
const VALID: &str = "every rule of schedules holds";

/// Records why a candidate is rejected.
pub fn refuse(verdict: &mut Verdict, dropped: &Rejection) {
    let gate = match dropped {
        Rejection::Rejected(violations) => {
            let all = violations.list().iter().filter_map(|v| serde_json::to_value(v).ok());
            verdict.violations = all.collect();
            "validate"
        }
        Rejection::Unloadable(_) => {
            verdict.passed("validate", VALID);
            "lower"
        }
        Rejection::Unrunnable(_)
        | Rejection::Unevaluated(_)
        | Rejection::Halted(_)
        | Rejection::Sampled { .. } => "reference",
        Rejection::Disagreed { by, .. } => by,
        Rejection::Unrepeatable(_) | Rejection::Failed(_) => "device",
        Rejection::BelowBound(_) => "bound",
    };
    if gate != "bound" {
        verdict.correct = false;
    }
    verdict.failed(gate, dropped.to_string());
}

/// Records where a rejected candidate first goes wrong. It is lowered again for that, because the caller has released
/// it, and is unloaded from the device afterwards.
pub(crate) fn locate(
    gate: &Gate<'_>,
    device: Option<&mut (dyn Device + '_)>,
    config: &ScheduleConfig,
    dropped: &Rejection,
    verdict: &mut Verdict,
) {
    let differs = matches!(
        dropped,
        Rejection::Halted(_)
            | Rejection::Sampled { .. }
            | Rejection::Disagreed { .. }
            | Rejection::Unrepeatable(_)
    );
    if differs && let Ok(candidate) = gate.lower(config) {
        let mut guard = device.map(|device| candidate.guard(device));
        let device = guard.as_mut().map(ProgramGuard::device);
        verdict.first_divergence = gate.locate(device, &candidate, dropped);
    }
}

/// Validates, lowers and verifies.
///
/// # Errors
/// Why the candidate is rejected; the caller records that in the verdict ([`refuse`]).
pub fn lower(
    gate: &Gate<'_>,
    config: &ScheduleConfig,
    verdict: &mut Verdict,
) -> Result<Candidate, Rejection> {
    let candidate = gate.lower(config)?;
    describe(&candidate, verdict);
    Ok(candidate)
}

/// Records the results of lowering.
pub(crate) fn describe(candidate: &Candidate, verdict: &mut Verdict) {
    let program = &candidate.program;
    verdict.passed("validate", VALID);
    verdict.valid = true;
    verdict.program_id = Some(candidate.program_id.clone());
    verdict.kernel_id = Some(candidate.kernel_id.clone());
    verdict.tasks = Some(program.task_len() as u64);
    verdict.weight_mb = Some(program.stream_bytes() as f64 / 1e6);
    verdict.n_buffers = Some(program.buffers.len() as u64);
    verdict.n_counters = Some(u64::from(program.counters));
    let workers = program.workers.len();
    verdict.passed("lower", format!("{} tasks on {workers} workers", program.task_len()));
    verdict.passed("verify", "no deadlock, no race, every tile once, within every limit");
    verdict.notes.extend(about_codes(program));
}

/// What a reader of the verdict should know of caches of codes.
fn about_codes(program: &Program) -> Option<String> {
    let (kv, wide) = (program.kv_dtype(), KvDtype::F16);
    let row_bytes = |dtype: KvDtype| u64::from(dtype.row_bytes(program.dims.head_dim));
    let of_token = program.kv_bytes(0);
    (kv != wide).then(|| {
        format!(
            "key/value caches of {} (--kv-dtype): {of_token} bytes per token, {} as {}; the graph has the same codes, so what they cost is not in the errors",
            kv.name(),
            of_token / row_bytes(kv) * row_bytes(wide),
            wide.name()
        )
    })
}

/// Runs the candidate on the reference VM and, if there is one, on the device, at every position and twice.
///
/// # Errors
/// Why the candidate is rejected.
pub fn assess(
    gate: &mut Gate<'_>,
    device: Option<&mut (dyn Device + '_)>,
    candidate: Candidate,
    verdict: &mut Verdict,
) -> Result<Assessed, Rejection> {
    let Some(device) = device else {
        let reference = gate.reference(&candidate)?;
        passed_reference(gate, &candidate, reference, verdict);
        verdict.correct = true;
        let predicted = gate.predict(&candidate, &reference)?;
        verdict.chain_us = Some(predicted.chain_us());
        return Ok(Assessed { candidate, reference, predicted, on_device: None, followed: None });
    };
    let screened = screen(gate, device, candidate, verdict, || std::time::Duration::ZERO)?;
    complete(gate, device, screened, verdict)
}

/// Runs the candidate on the reference VM and at the first positions on the device.
pub(crate) fn screen(
    gate: &mut Gate<'_>,
    device: &mut dyn Device,
    candidate: Candidate,
    verdict: &mut Verdict,
    clock: Clock,
) -> Result<Screened, Rejection> {
    let (reference, ran) = gate.judge_beside(&candidate, clock, |expected| {
        let first = FIRST_STAGE.min(expected.tokens.len());
        candidate.run(device, &expected.tokens[..first], 0)
    });
    let reference = reference?;
    passed_reference(gate, &candidate, reference, verdict);
    let ran = ran?;
    let (agreement, followed) = gate.agreed(reference, &ran)?;
    set_errors(verdict, agreement.summary());
    Ok(Screened { candidate, reference, ran, agreement, followed })
}

/// Runs the positions that the first stage left out, if any.
pub(crate) fn extend(
    gate: &Gate<'_>,
    device: &mut dyn Device,
    mut screened: Screened,
    verdict: &mut Verdict,
) -> Result<Screened, Rejection> {
    let (tokens, first) = (&gate.expected().tokens, screened.positions());
    if first < tokens.len() {
        let rest = screened.candidate.run(device, tokens, first)?;
        screened.ran.logits.extend(rest.logits);
        screened.ran.chosen.extend(rest.chosen);
        if let (Some(routes), Some(more)) = (&mut screened.ran.routes, rest.routes) {
            routes.extend(more);
        }
        (screened.agreement, screened.followed) = gate.agreed(screened.reference, &screened.ran)?;
        set_errors(verdict, screened.agreement.summary());
    }
    Ok(screened)
}

/// Runs the positions left out so far, then all of them again on a fresh sequence, which must give the same bits.
pub(crate) fn complete(
    gate: &Gate<'_>,
    device: &mut dyn Device,
    screened: Screened,
    verdict: &mut Verdict,
) -> Result<Assessed, Rejection> {
    let Screened { candidate, reference, ran, .. } = extend(gate, device, screened, verdict)?;
    let tokens = &gate.expected().tokens;
    let again = candidate.run(device, tokens, 0)?;
    let (agreement, followed) = gate.agreed(reference, &again)?;
    if let Some(at) = bits_differ(&ran.logits, &again.logits) {
        return Err(Rejection::Unrepeatable(at));
    }
    set_errors(verdict, agreement.summary());
    let positions = tokens.len();
    let detail =
        format!("logits agree with the graph's at {positions} positions, twice with the same bits");
    verdict.passed("device", detail);
    verdict.notes.extend(gate.said_of_routes(&again));
    verdict.notes.extend(why_fewer_positions(gate.graph()));
    verdict.correct = true;
    let predicted = gate.predict(&candidate, &reference)?;
    verdict.chain_us = Some(predicted.chain_us());
    Ok(Assessed { candidate, reference, predicted, on_device: Some(agreement), followed })
}

/// The first difference between two runs of the same positions. Both agree with the graph, so they have equally many
/// rows of equal length.
fn bits_differ(one: &[Vec<f32>], other: &[Vec<f32>]) -> Option<BitsDiffer> {
    let differ = |(position, (a, b)): (usize, (&Vec<f32>, &Vec<f32>))| {
        let word = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())?;
        Some(BitsDiffer { position, word, values: [a[word], b[word]] })
    };
    one.par_iter().zip(other).enumerate().find_map_first(differ)
}

fn passed_reference(
    gate: &Gate<'_>,
    candidate: &Candidate,
    reference: Agreement<Reference>,
    verdict: &mut Verdict,
) {
    set_errors(verdict, reference.summary());
    let (scope, keys) = (gate.expected().reference_scope(), gate.expected().reference_keys());
    verdict.passed("reference", format!("logits agree with the graph's at {scope}"));
    let block = candidate.config.tiling.attention.kv_block as usize;
    if keys <= block {
        verdict.notes.push(format!(
            "the reference VM attended to {keys} keys, not more than one block of {block}"
        ));
    }
}

/// Records that the positions run so far were enough to give the candidate up.
fn given_up(gate: &Gate<'_>, ran: usize, verdict: &mut Verdict) {
    let all = gate.expected().tokens.len();
    let (rest, when) = if ran == all {
        ("a second run was not needed".to_owned(), "first run")
    } else {
        (format!("{all} were not needed"), "first stage")
    };
    verdict.passed("device", format!("logits agree with the graph's at {ran} positions; {rest}"));
    verdict.correct = true;
    verdict.notes.push(format!("given up after the {when}: timed once, before position {ran}"));
}

fn set_errors(verdict: &mut Verdict, summary: Summary) {
    verdict.max_abs_err = Some(summary.max_abs_err);
    verdict.max_rel_err = Some(summary.max_rel_err);
    verdict.top1_agreement = Some(summary.top1_agreement);
}

/// Records a prediction.
pub(crate) fn set_predicted(verdict: &mut Verdict, predicted: &Predicted) {
    verdict.set_latency(predicted.us(), LatencyKind::Predicted, predicted.bound_us());
}

/// The bounds of a program on a device, in microseconds per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// All bytes read, over the bandwidth. Percentages refer to it.
    pub bound_us: f64,
    /// The same without the bytes that the cache may hold from one token to the next. No valid time is below it.
    pub artefact_us: f64,
}

/// The bounds at these positions: of several, their geometric mean.
#[must_use]
pub fn bounds(gate: &Gate<'_>, device: &dyn Device, candidate: &Candidate, at: &[u32]) -> Bounds {
    let info = device.describe();
    let bandwidth = info.bandwidth.unwrap_or(gate.target().total_bandwidth() as f64);
    let program = &candidate.program;
    let keys = |at| u64::from(gate.batch()) * program.kv_bytes(at);
    let bytes = at.iter().map(|&at| (program.stream_bytes() + keys(at)) as f64);
    let beyond_cache = bytes.clone().map(|bytes| (bytes - info.cache_bytes as f64).max(0.0));
    Bounds {
        bound_us: geometric_mean(bytes) / bandwidth * 1e6,
        artefact_us: geometric_mean(beyond_cache) / bandwidth * 1e6,
    }
}

/// Minimum rounds for a bootstrap interval of a median.
pub(crate) const INTERVAL_ROUNDS: usize = 4;

/// Records a measured latency.
///
/// # Errors
/// If it is below the bound.
pub fn set_measured(
    verdict: &mut Verdict,
    agreement: &Agreement<OnDevice>,
    samples: &Samples,
    bounds: Bounds,
    seed: u64,
) -> Result<Latency, Rejection> {
    let latency = Latency::new(agreement, samples, Side::Candidate, bounds.artefact_us, seed)?;
    verdict.passed("bound", format!("not below {:.1} us", bounds.artefact_us));
    verdict.notes.extend(samples.clocks.notes());
    verdict.set_latency(latency.median_us(), LatencyKind::MeasuredGpu, bounds.bound_us);
    let Interval { low, high } = latency.ci_us();
    verdict.ci_us = (samples.rounds.len() >= INTERVAL_ROUNDS).then_some([low, high]);
    Ok(latency)
}

/// How a device is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Rounds of four blocks.
    pub rounds: usize,
    /// Untimed blocks before the first round.
    pub warmup: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self { rounds: 12, warmup: 1 }
    }
}

/// Times two assessed programs against each other, a few rounds at a time, and checks the outputs of the timed runs.
/// `enough` takes all samples so far and returns the number of rounds to add, or `None` to end.
pub(crate) fn race(
    gate: &Gate<'_>,
    device: &mut dyn Device,
    sides: [&Assessed; 2],
    timing: Timing,
    mut enough: impl FnMut(&Samples) -> Option<usize>,
) -> Result<Samples, Rejection> {
    let [incumbent, candidate] = sides;
    let (Some(first), Some(second)) = (&incumbent.on_device, &candidate.on_device) else {
        let reason = "a program without agreement on the device cannot be timed".to_owned();
        return Err(DeviceError::Unavailable { reason }.into());
    };
    let proofs = [(&incumbent.candidate, first), (&candidate.candidate, second)];
    let contenders = contenders(device, proofs)?;
    let (mut samples, mut warmup) = (Samples::default(), timing.warmup);
    while let Some(rounds) = enough(&samples) {
        let mut each = Vec::new();
        for what in gate.timed_each() {
            let more = gate.time(device, contenders, what, Timing { rounds, warmup })?;
            let last = sides.map(|side| what.last(side.followed.as_ref()));
            let timed = gate.timed(candidate.reference, last, &more);
            timed.map_err(|found| blamed(found, &incumbent.candidate, &candidate.candidate))?;
            each.push(more);
        }
        samples.extend(Samples::geometric_mean(each));
        warmup = 0;
    }
    Ok(samples)
}

/// Times a screened candidate against the incumbent for one round at the end of the positions run so far. Returns a
/// result only if it is enough to give the candidate up, and records that.
pub(crate) fn quick_look(
    gate: &Gate<'_>,
    device: &mut dyn Device,
    incumbent: &Assessed,
    screened: &Screened,
    bar: &StoppingRule,
    seed: u64,
    verdict: &mut Verdict,
) -> Result<Option<(Samples, Interim)>, Rejection> {
    let Some(first) = incumbent.on_device.as_ref().filter(|_| !gate.has_contexts()) else {
        return Ok(None);
    };
    let Screened { candidate, reference, agreement, followed, .. } = screened;
    let contenders = contenders(device, [(&incumbent.candidate, first), (candidate, agreement)])?;
    let positions = screened.positions();
    let once = Timing { rounds: 1, warmup: 0 };
    let what = gate.timed_within(positions);
    let samples = gate.time(device, contenders, what, once)?;
    let last = [&incumbent.followed, followed].map(|rows| what.last(rows.as_ref()));
    gate.timed(*reference, last, &samples)
        .map_err(|found| blamed(found, &incumbent.candidate, candidate))?;
    let look = bar.look(&samples, seed);
    if look.decision != Some(Decision::Reverted) {
        return Ok(None);
    }
    given_up(gate, positions, verdict);
    let bounds = bounds(gate, device, candidate, &[positions as u32]);
    set_measured(verdict, agreement, &samples, bounds, seed)?;
    Ok(Some((samples, look)))
}

/// Attributes a wrong output of a timed run. The candidate's makes the candidate wrong. The incumbent's, which had
/// agreed, means that nothing can be compared with it on this device.
fn blamed(
    (side, dropped): (Side, Rejection),
    incumbent: &Candidate,
    candidate: &Candidate,
) -> Rejection {
    if side == Side::Candidate || incumbent.key() == candidate.key() {
        return dropped;
    }
    let who = format!("the schedule that it was timed against ({})", incumbent.schedule_id);
    Rejection::Failed(incumbent_failed(&who, dropped))
}

/// The error of a device on which a schedule fails that had passed before: no candidate can be judged there, and no
/// candidate is to blame. The error of a lost device is returned as it is.
pub(crate) fn incumbent_failed(who: &str, dropped: Rejection) -> DeviceError {
    if let Rejection::Failed(gone @ DeviceError::Unavailable { .. }) = dropped {
        return gone;
    }
    DeviceError::Unavailable { reason: format!("{who} fails there: {dropped}") }
}

fn contenders<'a>(
    device: &mut dyn Device,
    sides: [(&Candidate, &'a Agreement<OnDevice>); 2],
) -> Result<[Contender<'a>; 2], Rejection> {
    let mut one = |(candidate, agreement): (&Candidate, &'a Agreement<OnDevice>)| {
        Ok::<_, Rejection>(Contender::new(candidate.load(device)?, agreement))
    };
    Ok([one(sides[0])?, one(sides[1])?])
}

/// A stopping rule with a fixed number of rounds.
pub(crate) fn fixed(rounds: usize) -> impl FnMut(&Samples) -> Option<usize> {
    move |samples| (samples.rounds.len() < rounds).then_some(rounds)
}

/// Evaluates one schedule: the result that `evaluate` prints. A measured latency comes with its noise, from racing the
/// program against itself.
pub fn evaluate(
    gate: &mut Gate<'_>,
    mut device: Option<&mut (dyn Device + '_)>,
    config: &ScheduleConfig,
    timing: Timing,
    seed: u64,
) -> (Verdict, Result<Assessed, Rejection>) {
    let shared = device.as_deref().map(|device| device as &dyn Device);
    let mut verdict = begin(gate, shared, config);
    let mut run = || {
        let candidate = lower(gate, config, &mut verdict)?;
        let assessed = assess(gate, device.as_deref_mut(), candidate, &mut verdict)?;
        match (device.as_deref_mut(), &assessed.on_device) {
            (Some(device), Some(agreement)) => {
                let bounds = bounds(gate, device, &assessed.candidate, &gate.timed_positions());
                let itself = [&assessed, &assessed];
                let samples = race(gate, device, itself, timing, fixed(timing.rounds))?;
                set_measured(&mut verdict, agreement, &samples, bounds, seed)?;
                let noise = crate::measure::noise_floor(&samples, seed);
                verdict.notes.push(format!("noise floor {:.2} %", 100.0 * noise));
            }
            (Some(_), None) | (None, _) => set_predicted(&mut verdict, &assessed.predicted),
        }
        Ok(assessed)
    };
    let outcome = run();
    if let Err(dropped) = &outcome {
        refuse(&mut verdict, dropped);
        locate(gate, device, config, dropped, &mut verdict);
    }
    (verdict, outcome)
}
