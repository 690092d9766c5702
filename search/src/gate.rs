//! The gates of a trial, in order. Each takes the proof of the gate before it; the last one returns what may be timed.
//!
//! The expected values come from the graph, without a schedule, and are computed once. They cover several positions
//! from zero on fresh tokens of the search's seed; the model's size limits how many of them a candidate runs.

use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use ir::{Graph, Target, Weights};
use lower::{Predictor, Rates};
use rayon::{Scope, ThreadPool};
use reference_vm::compare::{Agreement, Device as OnDevice, Reference};

use crate::ahead::Ahead;
use crate::assess::Timing;
use crate::cpu::{Candidate, Cpu, KernelId};
use crate::device::{Contender, Device, DeviceError, Plan, Ran, Samples, Side};
use crate::expected::Expected;
use crate::measure::Predicted;
use crate::rejection::Rejection;
use crate::settings::{Clock, no_clock};

/// Maximum tokens of a timed block. Eight steps of a small model take some milliseconds, of which the command's round
/// trip is a few microseconds, the same for both sides; blocks of one length vary by tenths of a per cent.
const TIMED_TOKENS: usize = 8;

/// The inputs and expected values that candidates are judged by.
pub struct Gate<'a> {
    context: Option<u32>,
    /// Thread pool of the reference VM beside the device; `None` uses the caller's pool.
    pool: Option<Arc<ThreadPool>>,
    /// The part that needs no device, with its cached results.
    pub(crate) ahead: Arc<Ahead<'a>>,
    /// Seconds so far in which the device had finished and waited for the reference VM, by the clock passed to
    /// [`judge_beside`](Self::judge_beside).
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
        let cpu = Cpu::new(graph, weights, target, options, kernel_id, expected);
        let ahead = Arc::new(Ahead::new(cpu));
        Self { context: None, pool: None, ahead, waited_s: 0.0 }
    }

    /// The same gate for another device, or another search without helpers: both share the results that need no device.
    #[must_use]
    pub fn beside(&self) -> Self {
        let (pool, ahead) = (self.pool.clone(), self.ahead.clone());
        Self { context: self.context, pool, ahead, waited_s: 0.0 }
    }

    /// Runs the reference VM on a pool of its own. Devices that share results need separate pools: a thread that waits
    /// for its part of a program must not steal the same program's work for another device, which waits for the first.
    pub(crate) fn with_pool(self, pool: ThreadPool) -> Self {
        Self { pool: Some(Arc::new(pool)), ..self }
    }

    /// Predicts at this many tokens of context instead of those of the gate's tokens.
    #[must_use]
    pub fn with_context(mut self, tokens: u32) -> Self {
        self.context = Some(tokens);
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

    /// Validates, lowers and verifies.
    ///
    /// # Errors
    /// Every violation, or why it cannot be lowered.
    pub fn lower(&self, config: &ScheduleConfig) -> Result<Candidate, Rejection> {
        self.ahead.cpu.lower(self.ahead.cpu.validate(config)?)
    }

    /// Runs the program on the reference VM. Equal programs are run once.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn reference(&self, candidate: &Candidate) -> Result<Agreement<Reference>, Rejection> {
        self.ahead.judge(candidate, no_clock).found
    }

    /// Runs the program on the reference VM, unless that was done ahead, and runs `here` at the same time.
    pub(crate) fn judge_beside<R>(
        &mut self,
        candidate: &Candidate,
        clock: Clock,
        here: impl FnOnce(&Expected) -> R,
    ) -> (Result<Agreement<Reference>, Rejection>, R) {
        let ahead = &*self.ahead;
        let known = ahead.is_judged(&candidate.program_id);
        let judge = (!known).then_some(|| drop(ahead.judge(candidate, clock)));
        let (done, answered) =
            beside(self.pool.as_deref(), judge, || (here(&ahead.cpu.expected), clock()));
        let found = ahead.judge(candidate, clock).found;
        self.waited_s += (clock() - answered).as_secs_f64();
        (found, done)
    }

    /// Compares the outputs of a device at the first positions, all that it ran.
    pub(crate) fn agreed(
        &self,
        reference: Agreement<Reference>,
        ran: &Ran,
    ) -> Result<Agreement<OnDevice>, Rejection> {
        let expected = self.expected();
        let rows = expected.logits.get(..ran.logits.len()).unwrap_or(&expected.logits);
        reference
            .and_device(rows, &ran.logits, &ran.chosen, expected.on_device)
            .map_err(|at| Rejection::Disagreed { by: "device", at })
    }

    /// Checks the outputs of timed runs: a program that is right only when it is not timed is wrong. The error names
    /// the side whose last logits, or the token chosen from them, disagree; the candidate is checked first.
    pub(crate) fn timed(
        &self,
        proof: Agreement<Reference>,
        positions: usize,
        samples: &Samples,
    ) -> Result<(), (Side, Rejection)> {
        let last = positions.saturating_sub(1).min(self.expected().logits.len());
        let last = &self.expected().logits[last..][..1];
        let sides = [Side::Incumbent, Side::Candidate].into_iter().zip(samples.last());
        for (side, (actual, chosen)) in sides.rev() {
            let _ = proof
                .and_device(last, actual, chosen, self.expected().on_device)
                .map_err(|at| (side, Rejection::Disagreed { by: "timed", at }))?;
        }
        Ok(())
    }

    /// The cost model's prediction at the position where a device would be timed. A prediction below the bound is an
    /// error of the model.
    pub(crate) fn predict(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
    ) -> Result<Predicted, Rejection> {
        self.predict_at(candidate, proof, self.context.unwrap_or(self.timed_position()))
    }

    pub(crate) fn predict_at(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
        position: u32,
    ) -> Result<Predicted, Rejection> {
        let Candidate { program, config, .. } = candidate;
        let predictor = Predictor::new(program, &config.kernel, self.target(), position);
        let cost = predictor.predict(Rates::shipped());
        let chain_us = predictor.chain_us(Rates::shipped());
        Ok(Predicted::new(proof, cost.latency_us, cost.bound_us, chain_us)?)
    }

    /// Times two contenders on the first of the gate's tokens: these fill the cache, and the last few of them are timed.
    pub(crate) fn time(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
        positions: usize,
        Timing { rounds, warmup }: Timing,
    ) -> Result<Samples, DeviceError> {
        let tokens = &self.expected().tokens[..positions];
        let plan = Plan { tokens, first: timed_from(positions), rounds, warmup };
        crate::device::time(device, contenders, &plan)
    }

    /// Middle of the timed positions, where bounds are computed.
    #[must_use]
    pub fn timed_position(&self) -> u32 {
        let positions = self.expected().tokens.len();
        ((timed_from(positions) + positions) / 2) as u32
    }
}

/// First timed position of `tokens` tokens.
fn timed_from(tokens: usize) -> usize {
    tokens.saturating_sub(TIMED_TOKENS).max(tokens / 2)
}

/// Runs `here` on this thread and `there` on a pool at the same time: the caller's pool if none is given.
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
