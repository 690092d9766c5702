//! The gates of a trial, in order. Each takes the proof that the one before it made; the last hands out what may be timed.
//!
//! The expected values come from the graph, with no schedule, and are computed once. They cover several positions from zero on fresh
//! tokens of the search's seed; how many of them a candidate must show depends on what the model's size allows.

use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use ir::{Graph, Target, Valid, Weights};
use rayon::prelude::*;
use rayon::{Scope, ThreadPool};
use reference_vm::compare::{Agreement, Device as OnDevice, Reference};

use crate::ahead::Ahead;
use crate::clock::{Clock, no_clock};
use crate::cpu::{Candidate, Cpu, KernelId};
use crate::device::{Contender, Device, DeviceError, Plan, Ran, Samples, Side};
use crate::dropped::{BitsDiffer, Dropped};
use crate::expected::Expected;
use crate::measure::Predicted;

/// Tokens that one block times at most. Eight steps of a small model are some milliseconds, of which the command's round trip is a
/// few microseconds, the same for both sides; blocks of one length vary by tenths of a per cent.
const TIMED_TOKENS: usize = 8;

/// Positions of the first stage on the device, after which a candidate that is clearly slower is given up.
const FIRST_STAGE: usize = 24;

/// Everything that candidates are judged by.
pub struct Gate<'a> {
    context: Option<u32>,
    timed_from: usize,
    /// Threads for the reference machine beside the device; none: those of whoever calls.
    pool: Option<Arc<ThreadPool>>,
    /// The part that needs no device, with what it found so far.
    pub(crate) ahead: Arc<Ahead<'a>>,
    /// Seconds so far in which a device that had done its part waited for the reference machine, by the clock of those who asked for
    /// [`first`](Self::first).
    pub(crate) waited_s: f64,
}

impl<'a> Gate<'a> {
    /// The gate of a model, a target and inputs.
    #[must_use]
    pub fn new(
        graph: &'a Graph,
        weights: &'a dyn Weights,
        target: &'a Target,
        options: lower::Options,
        kernel_id: KernelId<'a>,
        expected: Expected,
    ) -> Self {
        let tokens = expected.tokens.len();
        let timed_from = tokens.saturating_sub(TIMED_TOKENS).max(tokens / 2);
        let cpu = Cpu::new(graph, weights, target, options, kernel_id, expected);
        let ahead = Arc::new(Ahead::new(cpu));
        Self { context: None, timed_from, pool: None, ahead, waited_s: 0.0 }
    }

    /// The same gate for another device, or another search without helpers: what needs no device is found out once for both.
    #[must_use]
    pub fn beside(&self) -> Self {
        let Self { context, timed_from, ref pool, ref ahead, .. } = *self;
        Self { context, timed_from, pool: pool.clone(), ahead: ahead.clone(), waited_s: 0.0 }
    }

    /// Runs the reference machine on threads of its own. Where several devices share what is known, each needs them: a thread that waits
    /// for its part of a program must not take up the same program for another device, which waits for the first.
    pub(crate) fn with_pool(self, pool: ThreadPool) -> Self {
        Self { pool: Some(Arc::new(pool)), ..self }
    }

    /// Predicts at this many tokens of context instead of those of the gate's tokens.
    #[must_use]
    pub fn with_context(mut self, tokens: u32) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Times the gate's tokens from this one on, instead of the last few. At least one is timed.
    #[must_use]
    pub fn with_timed_from(mut self, first: usize) -> Self {
        self.timed_from = first.min(self.expected().tokens.len().saturating_sub(1));
        self
    }

    /// The model.
    #[must_use]
    pub fn graph(&self) -> &'a Graph {
        self.ahead.cpu.graph
    }

    /// The target.
    #[must_use]
    pub fn target(&self) -> &'a Target {
        self.ahead.cpu.target
    }

    /// The inputs and what is expected of them.
    #[must_use]
    pub fn expected(&self) -> &Expected {
        &self.ahead.cpu.expected
    }

    /// Whether the schedule is legal here: what a proposal must show before a trial is spent on it.
    ///
    /// # Errors
    /// Every violation.
    pub fn validate(&self, config: &ScheduleConfig) -> Result<Valid<ScheduleConfig>, Dropped> {
        self.ahead.cpu.validate(config)
    }

    /// Lowers and verifies.
    ///
    /// # Errors
    /// If it cannot be lowered.
    pub fn lower(&self, config: Valid<ScheduleConfig>) -> Result<Candidate, Dropped> {
        self.ahead.cpu.lower(config)
    }

    /// Runs the program on the reference machine. Equal programs are run once.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn reference(&self, candidate: &Candidate) -> Result<Agreement<Reference>, Dropped> {
        self.ahead.judge(candidate, no_clock).found
    }

    /// Runs the program on fresh tokens, over more than one block of keys if the model's size allows; returns the positions.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn thorough(&self, candidate: &Candidate, seed: u64) -> Result<usize, Dropped> {
        self.ahead.cpu.thorough(candidate, seed)
    }

    /// Positions of the first stage on the device.
    #[must_use]
    pub fn first_stage(&self) -> usize {
        FIRST_STAGE.min(self.expected().tokens.len())
    }

    /// Runs the program on the reference machine, unless that was done ahead, and meanwhile the first positions on the device. Both
    /// must agree; the reference machine is asked first.
    ///
    /// # Errors
    /// If the reference machine refuses it. The inner error is the device's.
    pub fn first(
        &mut self,
        device: &mut dyn Device,
        candidate: &Candidate,
        clock: Clock,
    ) -> Result<(Agreement<Reference>, Result<OnDeviceOnce, Dropped>), Dropped> {
        let ahead = &*self.ahead;
        let tokens = &ahead.cpu.expected.tokens[..self.first_stage()];
        let known = ahead.is_judged(&candidate.program_id);
        let judge = (!known).then_some(|| drop(ahead.judge(candidate, clock)));
        let (ran, answered) = beside(self.pool.as_deref(), judge, || {
            let ran = device
                .prepare(&candidate.program, &candidate.config.kernel)
                .and_then(|handle| device.run(handle, tokens, 0))
                .map_err(Dropped::Failed);
            (ran, clock())
        });
        let reference = ahead.judge(candidate, clock).found;
        self.waited_s += (clock() - answered).as_secs_f64();
        let reference = reference?;
        let first = ran.and_then(|ran| {
            let agreement = self.agreed(reference, &ran)?;
            Ok(OnDeviceOnce { ran, agreement })
        });
        Ok((reference, first))
    }

    /// Runs the positions that were not run yet; every one so far must agree. Nothing is run if there is none.
    ///
    /// # Errors
    /// If it traps, hangs or disagrees.
    pub fn rest(
        &self,
        device: &mut dyn Device,
        candidate: &Candidate,
        reference: Agreement<Reference>,
        once: OnDeviceOnce,
    ) -> Result<OnDeviceOnce, Dropped> {
        let expected = self.expected();
        let OnDeviceOnce { mut ran, .. } = once;
        let first = ran.logits.len();
        if first == expected.tokens.len() {
            return Ok(OnDeviceOnce { ran, ..once });
        }
        let handle = device
            .prepare(&candidate.program, &candidate.config.kernel)
            .map_err(Dropped::Failed)?;
        let rest = device.run(handle, &expected.tokens, first).map_err(Dropped::Failed)?;
        ran.logits.extend(rest.logits);
        ran.chosen.extend(rest.chosen);
        let agreement = self.agreed(reference, &ran)?;
        Ok(OnDeviceOnce { ran, agreement })
    }

    /// Compares what a device gave at the first positions, all that it ran.
    fn agreed(
        &self,
        reference: Agreement<Reference>,
        ran: &Ran,
    ) -> Result<Agreement<OnDevice>, Dropped> {
        let expected = self.expected();
        let rows = expected.logits.get(..ran.logits.len()).unwrap_or(&expected.logits);
        reference
            .and_device(rows, &ran.logits, &ran.chosen, expected.on_device)
            .map_err(|at| Dropped::Disagreed { by: "device", at })
    }

    /// Runs all positions again, on a fresh sequence. Every one must agree again, with the bits of the first run.
    ///
    /// # Errors
    /// If it traps, hangs, disagrees, or gives other bits.
    pub fn again(
        &self,
        device: &mut dyn Device,
        candidate: &Candidate,
        reference: Agreement<Reference>,
        once: &OnDeviceOnce,
    ) -> Result<Agreement<OnDevice>, Dropped> {
        let handle = device
            .prepare(&candidate.program, &candidate.config.kernel)
            .map_err(Dropped::Failed)?;
        let again = device.run(handle, &self.expected().tokens, 0).map_err(Dropped::Failed)?;
        let agreement = self.agreed(reference, &again)?;
        match bits_differ(&once.ran.logits, &again.logits) {
            Some(at) => Err(Dropped::Unrepeatable(at)),
            None => Ok(agreement),
        }
    }

    /// Checks the outputs of timed runs: a program that is only right when nobody times it is wrong.
    ///
    /// # Errors
    /// If a side's last logits, or the token chosen by them, disagree; which side, the candidate's first.
    pub fn timed(
        &self,
        proof: Agreement<Reference>,
        positions: usize,
        samples: &Samples,
    ) -> Result<(), (Side, Dropped)> {
        let last = positions.saturating_sub(1).min(self.expected().logits.len());
        let last = &self.expected().logits[last..][..1];
        let sides = [Side::Incumbent, Side::Candidate].into_iter().zip(samples.last());
        for (side, (actual, chosen)) in sides.rev() {
            let _ = proof
                .and_device(last, actual, chosen, self.expected().on_device)
                .map_err(|at| (side, Dropped::Disagreed { by: "timed", at }))?;
        }
        Ok(())
    }

    /// What the cost model says, at the position where a device would be timed.
    ///
    /// # Errors
    /// If it is below the floor, which is a fault of the model.
    pub fn predict(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
    ) -> Result<Predicted, Dropped> {
        self.predict_at(candidate, proof, self.context.unwrap_or(self.timed_position()))
    }

    /// What the cost model says at a position.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    pub fn predict_at(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
        position: u32,
    ) -> Result<Predicted, Dropped> {
        let Candidate { program, config, .. } = candidate;
        let cost = lower::predict(program, &config.kernel, self.target(), position);
        Predicted::new(proof, cost.latency_us, cost.bound_us).map_err(Dropped::BelowFloor)
    }

    /// Times two contenders on the gate's tokens; the first ones fill the cache, the others are timed.
    ///
    /// # Errors
    /// If the device gives no result.
    pub fn time(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
        rounds: usize,
        warmup: usize,
    ) -> Result<Samples, DeviceError> {
        let tokens = &self.expected().tokens;
        let plan = Plan { tokens, first: self.timed_from, rounds, warmup };
        crate::device::time(device, contenders, &plan)
    }

    /// Times one round at the end of the positions that were run: of the first stage's, or where races are timed.
    ///
    /// # Errors
    /// If the device gives no result.
    pub fn time_once(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
        positions: usize,
    ) -> Result<Samples, DeviceError> {
        if positions == self.expected().tokens.len() {
            return self.time(device, contenders, 1, 0);
        }
        let tokens = &self.expected().tokens[..positions];
        let first = tokens.len().saturating_sub(TIMED_TOKENS).max(tokens.len() / 2);
        let plan = Plan { tokens, first, rounds: 1, warmup: 0 };
        crate::device::time(device, contenders, &plan)
    }

    /// Position of the middle of the timed tokens: where floors are computed.
    #[must_use]
    pub fn timed_position(&self) -> u32 {
        ((self.timed_from + self.expected().tokens.len()) / 2) as u32
    }
}

/// Does one thing here and another on a pool meanwhile: the caller's, if none is given.
fn beside<R>(
    pool: Option<&ThreadPool>,
    there: Option<impl FnOnce() + Send>,
    here: impl FnOnce() -> R,
) -> R {
    fn both<'s, R>(
        scope: &Scope<'s>,
        there: Option<impl FnOnce() + Send + 's>,
        here: impl FnOnce() -> R,
    ) -> R {
        if let Some(there) = there {
            scope.spawn(|_| there());
        }
        here()
    }
    match pool {
        Some(pool) => pool.in_place_scope(|scope| both(scope, there, here)),
        None => rayon::in_place_scope(|scope| both(scope, there, here)),
    }
}

/// Where two runs of the same positions differ first. Both agree with the graph, so that they have equally many rows of equal length.
fn bits_differ(one: &[Vec<f32>], other: &[Vec<f32>]) -> Option<BitsDiffer> {
    let differ = |(position, (a, b)): (usize, (&Vec<f32>, &Vec<f32>))| {
        let word = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())?;
        Some(BitsDiffer { position, word, values: [a[word], b[word]] })
    };
    one.par_iter().zip(other).enumerate().find_map_first(differ)
}

/// What a device gave at the positions that it ran once, from the first on.
#[derive(Debug)]
pub struct OnDeviceOnce {
    ran: Ran,
    /// It agrees at all of them.
    pub agreement: Agreement<OnDevice>,
}

impl OnDeviceOnce {
    /// How many.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.ran.logits.len()
    }
}
