//! The step that the cost model predicts, as a timeline.

use abi::TaskRecord;
use ir::program::{Program, Verified};
use ir::{KernelConfig, Target};
use lower::{Predictor, Rates, SimulatedStep};

use crate::counters::{self, Counter, Ring};
use crate::timeline::{Clock, Timeline};

/// A simulated step.
#[derive(Clone, Debug)]
pub struct Predicted {
    /// What the traced kernel would record if a cycle took a nanosecond, in the program's order.
    pub records: Vec<TaskRecord>,
    /// The same as a timeline.
    pub timeline: Timeline,
    /// The same with marks as the device takes them: staging is part of the wait of a task that polls its input.
    pub as_recorded: Timeline,
    /// Bytes multiplied, in the rings, and in flight.
    pub counters: Vec<Counter>,
    /// The predicted time of the step.
    pub us: f64,
}

/// Simulates one step at `position` with these rates.
#[must_use]
pub fn predicted(
    program: &Verified<Program>,
    kernel: &KernelConfig,
    target: &Target,
    position: u32,
    rates: &Rates,
) -> Predicted {
    let predictor = Predictor::new(program, kernel, target, position);
    let step = predictor.simulate(rates);
    let records = records(program, &step);
    let span = Some([0, (step.us * 1000.0).round() as u64]);
    let clock = Clock { ns_per_cycle: 1.0, span, per_device: false, polls_after_ready: false };
    let bytes = predictor.task_bytes();
    let timeline = Timeline::new(program, &records, &bytes, target.total_bandwidth(), clock);
    let as_device = Clock { polls_after_ready: true, ..clock };
    let as_recorded =
        timeline.again(program, &records, &bytes, target.total_bandwidth(), as_device);
    let pipeline = &program.pipeline;
    let stage = u64::from(program.stage_bytes());
    let ring = Ring {
        bytes: u64::from(pipeline.stages) * stage,
        in_flight: u64::from(pipeline.in_flight) * stage,
    };
    let mut counters = vec![counters::multiplied(&timeline)];
    counters.extend(counters::rings(&timeline, &step, ring));
    Predicted { records, timeline, as_recorded, counters, us: predictor.predict(rates).latency_us }
}

pub(crate) fn records(program: &Program, step: &SimulatedStep) -> Vec<TaskRecord> {
    let ns = |us: f64| (us * 1000.0).round() as u64;
    let mut records = Vec::with_capacity(program.task_len());
    for (worker, (queue, times)) in program.workers.iter().zip(&step.workers).enumerate() {
        for (task, t) in queue.tasks.iter().zip(times) {
            let begin = ns(t.begin);
            let since = |us: f64| ns(us).saturating_sub(begin) as u32;
            records.push(TaskRecord {
                begin,
                ready: since(t.ready),
                staged: since(t.staged),
                multiplied: since(t.multiplied),
                end: since(t.end),
                starved: ns(t.starved) as u32,
                worker: worker as u32,
                task: records.len() as u32,
                opcode: task.opcode as u32,
                delays: [0; 2],
            });
        }
    }
    records
}
