//! The cost model: predicts the time of a step by a deterministic simulation of every worker's loads and tasks.
//!
//! A prediction ranks schedules and breaks down the time; it does not replace a measurement, and it is never below the
//! bound (bytes over bandwidth). Its rates are fitted to measurements on one H200, see `rates`.
//!
//! Each worker loads at its part of the bandwidth, limited by the bytes in flight, until the ring is full; loads run
//! ahead of the tasks and across the end of the step. A task starts when its inputs have arrived, which takes longer
//! the more bytes are in flight to its worker; it ends when its weights have arrived and been multiplied. A few steps
//! are simulated and the last is reported.

mod rates;
mod simulate;
mod work;

use ir::program::{Program, Verified};
use ir::{KernelConfig, Target};
use serde::Serialize;

pub use rates::{RateFile, Rates};

use rates::Speeds;
use simulate::Simulation;
use work::{Cost, Plan};

/// The predicted cost of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Microseconds per step. Never below `bound_us`.
    pub latency_us: f64,
    /// The roofline bound: all bytes at the target's full bandwidth.
    pub bound_us: f64,
    /// Weight bytes that a step streams.
    pub stream_bytes: u64,
    /// Key/value bytes that the step at this position reads.
    pub kv_bytes: u64,
    /// Phases that hand over to another phase, in sequence.
    pub handoffs: u32,
    /// Time by kind of phase, in the order of the step. The times add up to the simulated step.
    pub phases: Vec<PhaseTime>,
}

/// The phases of one kind, over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseTime {
    /// Name, such as `gate_up`.
    pub phase: String,
    /// Number of tasks.
    pub tasks: u32,
    /// Weight bytes that they multiply.
    pub stream_bytes: u64,
    /// Microseconds from the end of the preceding phases to the end of these.
    pub us: f64,
}

/// One step of every worker in the simulation's virtual time.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedStep {
    /// Microseconds from its start to that of the next step.
    pub us: f64,
    /// The tasks of each worker, in the order of its queue.
    pub workers: Vec<Vec<TaskTimes>>,
}

/// Times of a task in microseconds from the start of its step, in non-decreasing order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TaskTimes {
    /// Its worker became free for it.
    pub begin: f64,
    /// Everything that it waits for had arrived.
    pub ready: f64,
    /// Its input vector was in shared memory.
    pub staged: f64,
    /// Its products were done.
    pub multiplied: f64,
    /// Its stores were done and signalled.
    pub end: f64,
    /// Time that its products waited for weights.
    pub starved: f64,
    /// Bytes in its worker's ring when its products began and when they were done.
    pub arrived: [f64; 2],
}

impl TaskTimes {
    fn shift(&mut self, start: f64) {
        for time in [
            &mut self.begin,
            &mut self.ready,
            &mut self.staged,
            &mut self.multiplied,
            &mut self.end,
        ] {
            *time -= start;
        }
    }
}

/// What slows a simulated step beyond the model: the known causes of tests, and the noise between steps.
pub struct Disturbance<'a> {
    /// Extra time of a task, by worker and place in its queue.
    pub tasks: &'a dyn Fn(usize, usize) -> Delay,
    /// Stages in flight at most.
    pub in_flight: Option<u32>,
}

/// Extra microseconds of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delay {
    /// Of its products.
    pub products: f64,
    /// Of its output.
    pub output: f64,
    /// From the end of its last producer until its input is there.
    pub hand_off: f64,
}

/// The work of a program at a position, extracted once: predictions with other rates are cheap.
pub struct Predictor {
    plan: Plan,
    workers: usize,
    kernel: KernelConfig,
    target: Target,
    stream_bytes: u64,
}

impl Predictor {
    /// Extracts the work of one step at `position` (keys `0..=position` are there).
    #[must_use]
    pub fn new(
        program: &Verified<Program>,
        kernel: &KernelConfig,
        target: &Target,
        position: u32,
    ) -> Self {
        Self::unverified(program, kernel, target, position)
    }

    /// The same for a program without a proof.
    pub(crate) fn unverified(
        program: &Program,
        kernel: &KernelConfig,
        target: &Target,
        position: u32,
    ) -> Self {
        Self {
            plan: Plan::new(program, position),
            workers: program.workers.len(),
            kernel: *kernel,
            target: target.clone(),
            stream_bytes: program.stream_bytes(),
        }
    }

    /// Simulates the step with these rates, task by task. Its length is not raised to the bound.
    #[must_use]
    pub fn simulate(&self, rates: &Rates) -> SimulatedStep {
        let speeds = Speeds::new(rates, self.workers, &self.kernel, &self.target);
        Simulation::new(&self.plan, speeds).record()
    }

    /// Simulates the step with these rates and what disturbs it.
    #[must_use]
    pub fn disturbed(&self, rates: &Rates, by: &Disturbance<'_>) -> SimulatedStep {
        let speeds = Speeds::new(rates, self.workers, &self.kernel, &self.target);
        Simulation::new(&self.plan, speeds).disturbed(by).record()
    }

    /// Microseconds of the step with an infinitely fast stream: the longest chain of hand-offs, which no bytes in flight
    /// slow down, and of the tasks' own time. A predicted bound, since it depends on the rates and on the schedule.
    #[must_use]
    pub fn chain_us(&self, rates: &Rates) -> f64 {
        let speeds = Speeds::new(rates, self.workers, &self.kernel, &self.target);
        Simulation::new(&self.plan, speeds).without_stream().run().us
    }

    /// Bytes that each task takes from its worker's ring: weights, or keys and values.
    #[must_use]
    pub fn task_bytes(&self) -> Vec<Vec<u64>> {
        let of = |tasks: &Vec<Cost>| tasks.iter().map(|task| task.work.bytes()).collect();
        self.plan.workers.iter().map(of).collect()
    }

    /// Predicts the step with these rates.
    #[must_use]
    pub fn predict(&self, rates: &Rates) -> Prediction {
        let speeds = Speeds::new(rates, self.workers, &self.kernel, &self.target);
        let step = Simulation::new(&self.plan, speeds).run();
        let kv_bytes = self.plan.kv_bytes;
        let bytes = (self.stream_bytes + kv_bytes) as f64;
        let bound_us = bytes / self.target.total_bandwidth() as f64 * 1e6;
        Prediction {
            latency_us: step.us.max(bound_us),
            bound_us,
            stream_bytes: self.stream_bytes,
            kv_bytes,
            handoffs: self.plan.handoffs,
            phases: step.phases,
        }
    }
}

/// Predicts one step at `position` (keys `0..=position` are there), with the shipped rates.
#[must_use]
pub fn predict(
    program: &Verified<Program>,
    kernel: &KernelConfig,
    target: &Target,
    position: u32,
) -> Prediction {
    Predictor::new(program, kernel, target, position).predict(Rates::shipped())
}
