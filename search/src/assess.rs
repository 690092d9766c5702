//! From a candidate to what may be compared: the gates in order, written down in a verdict as they pass.

use ir::schedule::ScheduleConfig;
use reference_vm::compare::{Agreement, Device as OnDevice, Reference, Summary};

use crate::device::{Contender, Device, DeviceError, Samples, Side};
use crate::gate::{Candidate, Dropped, Gate};
use crate::measure::{Interval, Latency, Predicted};
use crate::verdict::{LatencyKind, Verdict};

/// A candidate that agrees, with the proofs.
#[derive(Debug)]
pub struct Assessed {
    /// The candidate.
    pub candidate: Candidate,
    /// It agrees on the reference machine.
    pub reference: Agreement<Reference>,
    /// What the cost model says of it.
    pub predicted: Predicted,
    /// It agrees on the device, if there is one.
    pub on_device: Option<Agreement<OnDevice>>,
}

/// A verdict that knows what the schedule alone says.
#[must_use]
pub fn begin(gate: &Gate<'_>, device: Option<&dyn Device>, config: &ScheduleConfig) -> Verdict {
    let name = device.map_or_else(|| "cpu".to_owned(), |device| device.describe().name);
    let mut verdict = Verdict::new(&gate.graph().name, &gate.target().name, &name);
    verdict.schedule_id = Some(config.id());
    verdict
}

/// Writes down why a candidate is out.
pub fn refuse(verdict: &mut Verdict, dropped: &Dropped) {
    let gate = match dropped {
        Dropped::Rejected(violations) => {
            let all = violations.list().iter().filter_map(|v| serde_json::to_value(v).ok());
            verdict.violations = all.collect();
            "validate"
        }
        Dropped::Unloadable(_) => "lower",
        Dropped::Unrunnable(_)
        | Dropped::Unevaluated(_)
        | Dropped::Halted(_)
        | Dropped::Sampled { .. } => "reference",
        Dropped::Disagreed { by, .. } => by,
        Dropped::Failed(_) => "device",
        Dropped::BelowFloor(_) => "floor",
    };
    if gate != "floor" {
        verdict.correct = false;
    }
    verdict.failed(gate, dropped.to_string());
}

/// Validates, lowers and verifies.
///
/// # Errors
/// Why the candidate is out; the verdict does not know it yet ([`refuse`]).
pub fn lower(
    gate: &Gate<'_>,
    config: &ScheduleConfig,
    verdict: &mut Verdict,
) -> Result<Candidate, Dropped> {
    let valid = gate.validate(config)?;
    verdict.passed("validate", "every rule of schedules holds");
    let candidate = gate.lower(valid)?;
    describe(&candidate, verdict);
    Ok(candidate)
}

/// Writes down what lowering says.
pub fn describe(candidate: &Candidate, verdict: &mut Verdict) {
    let program = &candidate.program;
    verdict.valid = true;
    verdict.program_id = Some(candidate.program_id.clone());
    verdict.kernel_id = Some(candidate.kernel_id.clone());
    verdict.tasks = Some(program.task_len() as u64);
    verdict.weight_mb = Some(program.stream_bytes() as f64 / 1e6);
    verdict.n_slots = Some(program.slots.len() as u64);
    verdict.n_counters = Some(u64::from(program.counters));
    let workers = program.workers.len();
    verdict.passed("lower", format!("{} tasks on {workers} workers", program.task_len()));
    verdict.passed("verify", "no deadlock, no race, every tile once, within every limit");
}

/// Runs the candidate on the reference machine and, if there is one, on the device.
///
/// # Errors
/// Why the candidate is out.
pub fn assess(
    gate: &mut Gate<'_>,
    device: Option<&mut (dyn Device + '_)>,
    candidate: Candidate,
    verdict: &mut Verdict,
) -> Result<Assessed, Dropped> {
    let reference = gate.reference(&candidate)?;
    set_errors(verdict, reference.summary());
    let positions = gate.expected().reference_positions;
    verdict.passed("reference", format!("logits agree with the graph's at {positions} positions"));
    let block = candidate.config.tiling.attention.kv_block as usize;
    if positions <= block {
        verdict.notes.push(format!(
            "the reference machine ran {positions} positions, fewer than one block of {block} keys"
        ));
    }
    let on_device = match device {
        None => None,
        Some(device) => {
            let (agreement, repeatable) = gate.device(device, &candidate, reference)?;
            set_errors(verdict, agreement.summary());
            let positions = gate.expected().tokens.len();
            let detail = format!("logits agree with the graph's at {positions} positions, twice");
            verdict.passed("device", detail);
            if !repeatable {
                verdict.notes.push("repeatable: false (two runs gave different bits)".to_owned());
            }
            Some(agreement)
        }
    };
    verdict.correct = true;
    let predicted = gate.predict(&candidate, &reference)?;
    Ok(Assessed { candidate, reference, predicted, on_device })
}

fn set_errors(verdict: &mut Verdict, summary: Summary) {
    verdict.max_abs_err = Some(summary.max_abs_err);
    verdict.max_rel_err = Some(summary.max_rel_err);
    verdict.top1_agreement = Some(summary.top1_agreement);
}

/// Writes down a prediction.
pub fn set_predicted(verdict: &mut Verdict, predicted: &Predicted) {
    verdict.set_latency(predicted.us(), LatencyKind::Predicted, predicted.bound_us());
}

/// The floors of a program on a device, in microseconds a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floors {
    /// All bytes read, over the bandwidth: what percentages refer to.
    pub bound_us: f64,
    /// The same, less what the cache may hold from one token to the next: what no honest time is below.
    pub artefact_us: f64,
}

/// The floors at the timed position.
#[must_use]
pub fn floors(gate: &Gate<'_>, device: &dyn Device, candidate: &Candidate) -> Floors {
    let info = device.describe();
    let bandwidth = info.bandwidth.unwrap_or(gate.target().bandwidth as f64);
    let program = &candidate.program;
    let kv_bytes =
        program.kv_bytes(gate.timed_position(), candidate.config.kernel.kv_cache.bytes());
    let bytes = (program.stream_bytes() + kv_bytes) as f64;
    let beyond_cache = (bytes - info.cache_bytes as f64).max(0.0);
    Floors { bound_us: bytes / bandwidth * 1e6, artefact_us: beyond_cache / bandwidth * 1e6 }
}

/// Writes down a measured latency.
///
/// # Errors
/// If it is below the floor.
pub fn set_measured(
    verdict: &mut Verdict,
    agreement: &Agreement<OnDevice>,
    samples: &Samples,
    floors: Floors,
    seed: u64,
) -> Result<Latency, Dropped> {
    let latency = Latency::new(agreement, samples, Side::Candidate, floors.artefact_us, seed)
        .map_err(Dropped::BelowFloor)?;
    verdict.passed("floor", format!("not below {:.1} us", floors.artefact_us));
    verdict.set_latency(latency.median_us(), LatencyKind::MeasuredGpu, floors.bound_us);
    let Interval { low, high } = latency.ci_us();
    verdict.ci_us = Some([low, high]);
    Ok(latency)
}

/// How a device is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Rounds of four blocks.
    pub rounds: usize,
    /// Untimed blocks first.
    pub warmup: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self { rounds: 12, warmup: 2 }
    }
}

/// Times two assessed programs against each other and checks the outputs of the timed runs.
///
/// # Errors
/// If the device gives no result, or a timed output disagrees.
pub fn race(
    gate: &Gate<'_>,
    device: &mut dyn Device,
    incumbent: &Assessed,
    candidate: &Assessed,
    timing: Timing,
) -> Result<Samples, Dropped> {
    let mut contender = |assessed: &Assessed| {
        let kernel = &assessed.candidate.config.kernel;
        device.prepare(&assessed.candidate.program, kernel).map_err(Dropped::Failed)
    };
    let handles = [contender(incumbent)?, contender(candidate)?];
    let (Some(first), Some(second)) = (&incumbent.on_device, &candidate.on_device) else {
        let reason = "a program without agreement on the device cannot be timed".to_owned();
        return Err(Dropped::Failed(DeviceError::Unavailable { reason }));
    };
    let contenders = [Contender::new(handles[0], first), Contender::new(handles[1], second)];
    let samples =
        gate.time(device, contenders, timing.rounds, timing.warmup).map_err(Dropped::Failed)?;
    gate.timed(candidate.reference, &samples)?;
    Ok(samples)
}

/// The whole answer for one schedule: what `evaluate` prints. A measured latency comes with its noise, from racing the program against itself.
pub fn evaluate(
    gate: &mut Gate<'_>,
    mut device: Option<&mut (dyn Device + '_)>,
    config: &ScheduleConfig,
    timing: Timing,
    seed: u64,
) -> (Verdict, Result<Assessed, Dropped>) {
    let shared = device.as_deref().map(|device| device as &dyn Device);
    let mut verdict = begin(gate, shared, config);
    let mut run = || {
        let candidate = lower(gate, config, &mut verdict)?;
        let assessed = assess(gate, device.as_deref_mut(), candidate, &mut verdict)?;
        match (device.as_deref_mut(), &assessed.on_device) {
            (Some(device), Some(agreement)) => {
                let floors = floors(gate, device, &assessed.candidate);
                let samples = race(gate, device, &assessed, &assessed, timing)?;
                set_measured(&mut verdict, agreement, &samples, floors, seed)?;
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
    }
    (verdict, outcome)
}
