//! The gates of a trial, in order. Each takes the proof of the gate before it; the last one returns what may be timed.
//!
//! The expected values come from the graph, without a schedule, and are computed once. They cover several positions
//! from zero on fresh tokens of the search's seed; the model's size limits how many of them a candidate runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ir::schedule::ScheduleConfig;
use ir::{Graph, Target, Weights};
use lower::{Predictor, Rates};
use rayon::{Scope, ThreadPool};
use reference_vm::compare::{Agreement, Device as OnDevice, Reference};

use crate::ahead::Ahead;
use crate::assess::Timing;
use crate::cpu::{Candidate, Cpu, KernelId};
use crate::device::{Contender, Device, DeviceError, Plan, Ran, Samples, Side};
use crate::expected::{Expected, TimedAfter};
use crate::follow::{Followed, Rows};
use crate::measure::{Predicted, geometric_mean};
use crate::rejection::Rejection;
use crate::settings::{Clock, no_clock};

/// Maximum tokens of a timed block. Eight steps of a small model take some milliseconds, of which the command's round
/// trip is a few microseconds, the same for both sides; blocks of one length vary by tenths of a per cent.
pub const TIMED_TOKENS: usize = 8;

/// The inputs and expected values that candidates are judged by.
pub struct Gate<'a> {
    /// The positions that predictions are for; empty for those that a device is timed at.
    contexts: Vec<u32>,
    /// Sequences that a step runs at once on the device.
    batch: u32,
    /// Thread pool of the reference VM beside the device; `None` uses the caller's pool.
    pool: Option<Arc<ThreadPool>>,
    /// The part that needs no device, with its cached results.
    pub(crate) ahead: Arc<Ahead<'a>>,
    /// Expected values on the routes of devices.
    pub(crate) followed: Arc<Followed>,
    /// Seconds so far in which the device had finished and waited for the reference VM, by the clock passed to
    /// [`judge_beside`](Self::judge_beside).
    pub(crate) waited_s: f64,
    /// The clock of [`evaluating`](Self::evaluating).
    pub(crate) clock: Clock,
    /// Time so far in which the graph was evaluated on the routes of devices.
    pub(crate) evaluating: Elapsed,
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
        let followed = Arc::default();
        let (contexts, evaluating) = (Vec::new(), Elapsed::default());
        let clock = no_clock;
        Self { contexts, batch: 1, pool: None, ahead, followed, waited_s: 0.0, clock, evaluating }
    }

    /// The same gate for another device, or another search without helpers: both share the results that need no device.
    #[must_use]
    pub fn beside(&self) -> Self {
        let (pool, ahead, followed) =
            (self.pool.clone(), self.ahead.clone(), self.followed.clone());
        let (contexts, evaluating) = (self.contexts.clone(), Elapsed::default());
        let (batch, clock) = (self.batch, self.clock);
        Self { contexts, batch, pool, ahead, followed, waited_s: 0.0, clock, evaluating }
    }

    /// Runs the reference VM on a pool of its own. Devices that share results need separate pools: a thread that waits
    /// for its part of a program must not steal the same program's work for another device, which waits for the first.
    pub(crate) fn with_pool(self, pool: ThreadPool) -> Self {
        Self { pool: Some(Arc::new(pool)), ..self }
    }

    /// Measures with this clock what evaluations take.
    #[must_use]
    pub(crate) fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Predicts at these tokens of context, of several the geometric mean, instead of those of the gate's tokens.
    #[must_use]
    pub fn with_contexts(self, contexts: &[u32]) -> Self {
        Self { contexts: contexts.to_vec(), ..self }
    }

    /// Bounds are those of steps in which the device runs this many sequences.
    #[must_use]
    pub fn with_batch(self, batch: u32) -> Self {
        Self { batch, ..self }
    }

    /// Sequences that a step runs at once on the device.
    pub(crate) fn batch(&self) -> u32 {
        self.batch
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

    /// Compares the outputs of a device at the first positions, all that it ran. Returns the expected logits too, if
    /// they are those on other routes than the graph's.
    pub(crate) fn agreed(
        &self,
        reference: Agreement<Reference>,
        ran: &Ran,
    ) -> Result<(Agreement<OnDevice>, Option<Rows>), Rejection> {
        let expected = self.expected();
        let followed = self.followed(ran)?;
        let own = expected.logits.get(..ran.logits.len()).unwrap_or(&expected.logits);
        let rows = followed.as_deref().map_or(own, |rows| &rows[..rows.len().min(own.len())]);
        let agreement = reference
            .and_device(rows, &ran.logits, &ran.chosen, expected.on_device)
            .map_err(|at| Rejection::Disagreed { by: "device", at })?;
        Ok((agreement, followed))
    }

    /// Checks the outputs of timed runs by each side's expected ones: a program that is right only when it is not timed
    /// is wrong. The error names the side whose last logits, or the token chosen from them, disagree; the candidate is checked first.
    pub(crate) fn timed(
        &self,
        proof: Agreement<Reference>,
        last: [&[f32]; 2],
        samples: &Samples,
    ) -> Result<(), (Side, Rejection)> {
        let sides = [Side::Incumbent, Side::Candidate].into_iter().zip(last).zip(samples.last());
        for ((side, last), (actual, chosen)) in sides.rev() {
            let _ = proof
                .and_device(&[last.to_vec()], actual, chosen, self.expected().on_device)
                .map_err(|at| (side, Rejection::Disagreed { by: "timed", at }))?;
        }
        Ok(())
    }

    /// The cost model's prediction where a device would be timed. A prediction below the bound is an error of the model.
    pub(crate) fn predict(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
    ) -> Result<Predicted, Rejection> {
        match &*self.contexts {
            [] => self.predict_at(candidate, proof, &self.timed_positions()),
            contexts => self.predict_at(candidate, proof, contexts),
        }
    }

    pub(crate) fn predict_at(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
        positions: &[u32],
    ) -> Result<Predicted, Rejection> {
        let Candidate { program, config, .. } = candidate;
        let at = |&position: &u32| {
            let predictor = Predictor::new(program, &config.kernel, self.target(), position);
            let cost = predictor.predict(Rates::shipped());
            [cost.latency_us, cost.bound_us, predictor.chain_us(Rates::shipped())]
        };
        let each: Vec<[f64; 3]> = positions.iter().map(at).collect();
        let [us, bound_us, chain_us] =
            [0, 1, 2].map(|index| geometric_mean(each.iter().map(|costs| costs[index])));
        Ok(Predicted::new(proof, us, bound_us, chain_us)?)
    }

    /// Times two contenders.
    pub(crate) fn time(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
        what: Timed<'_>,
        Timing { rounds, warmup }: Timing,
    ) -> Result<Samples, DeviceError> {
        let plan = Plan { tokens: what.tokens, first: what.first, rounds, warmup };
        crate::device::time(device, contenders, &plan)
    }

    /// The first of the gate's tokens: these fill the cache, and the last few of them are timed.
    pub(crate) fn timed_within(&self, positions: usize) -> Timed<'_> {
        let Expected { tokens, logits, .. } = self.expected();
        let last = positions.saturating_sub(1);
        Timed { tokens: &tokens[..positions], first: timed_from(positions), last: &logits[last] }
    }

    /// Everything that is timed: after each context of the search, or at the end of the gate's tokens.
    pub(crate) fn timed_each(&self) -> Vec<Timed<'_>> {
        let Expected { tokens, timed, .. } = self.expected();
        if timed.is_empty() {
            return vec![self.timed_within(tokens.len())];
        }
        let each = timed.iter();
        each.map(|TimedAfter { tokens, first, last }| Timed { tokens, first: *first, last })
            .collect()
    }

    /// Whether the search has contexts of its own, so that times at the gate's tokens decide nothing.
    pub(crate) fn has_contexts(&self) -> bool {
        !self.expected().timed.is_empty()
    }

    /// Middle of each run of timed positions, where bounds are computed.
    #[must_use]
    pub fn timed_positions(&self) -> Vec<u32> {
        let middle = |timed: Timed<'_>| ((timed.first + timed.tokens.len()) / 2) as u32;
        self.timed_each().into_iter().map(middle).collect()
    }
}

/// A sum of durations.
#[derive(Debug, Default)]
pub(crate) struct Elapsed(AtomicU64);

impl Elapsed {
    pub(crate) fn add(&self, more: Duration) {
        let nanoseconds = u64::try_from(more.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn seconds(&self) -> f64 {
        Duration::from_nanos(self.0.load(Ordering::Relaxed)).as_secs_f64()
    }
}

/// What two contenders are timed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed<'a> {
    tokens: &'a [u32],
    first: usize,
    /// The expected logits of the last position, on the graph's own routes.
    last: &'a [f32],
}

impl<'a> Timed<'a> {
    /// The expected logits of the last position of a program, whose routes have rows of their own if they are not the graph's.
    pub(crate) fn last<'r>(&self, followed: Option<&'r Rows>) -> &'r [f32]
    where
        'a: 'r,
    {
        let row = followed.and_then(|rows| rows.get(self.tokens.len() - 1));
        row.map_or(self.last, Vec::as_slice)
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
