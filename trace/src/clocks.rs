//! The clocks of several GPUs, from what they hand each other.
//!
//! A task ends after every task whose output it reads, by a true clock. If the reader is on one GPU and the producer on another,
//! the difference of their ends is the time that passed plus what the one clock is ahead of the other; in the opposite
//! direction it is the time minus that. The least difference in each direction bounds it from above and below, as in NTP, and
//! the middle is right where the fastest hand-offs of both directions take the same time.

use std::sync::Arc;

use abi::TaskRecord;
use ir::program::Program;
use rustc_hash::FxHashMap;

/// What the clock of each GPU is ahead of the first one's in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clocks {
    /// Nanoseconds, one per GPU; the first is 0.
    pub ahead_ns: Vec<i64>,
    /// The most nanoseconds by which one of them may be wrong.
    pub within_ns: u64,
}

impl Clocks {
    /// From the records of a step, in the program's order, and the tasks on which each one depends. Where two GPUs hand each other
    /// nothing, their clocks are taken to be the same.
    pub(crate) fn new(
        program: &Program,
        records: &[TaskRecord],
        dependencies: &[Arc<[u32]>],
        ns_per_cycle: f64,
    ) -> Self {
        let devices = program.topology.devices as usize;
        let ends: Vec<i64> = records.iter().map(|record| end(record, ns_per_cycle)).collect();
        let of = devices_of_tasks(program);
        // Least difference of ends from a GPU to another.
        let mut least = vec![vec![i64::MAX; devices]; devices];
        // Most tasks of a phase depend on the same ones.
        let mut last: FxHashMap<*const u32, Vec<i64>> = FxHashMap::default();
        for (reader, producers) in dependencies.iter().enumerate().take(ends.len()) {
            let last = last.entry(producers.as_ptr()).or_insert_with(|| {
                let mut last = vec![i64::MIN; devices];
                for &task in producers.iter() {
                    let last = &mut last[of[task as usize]];
                    *last = ends[task as usize].max(*last);
                }
                last
            });
            for (from, &last) in last.iter().enumerate().filter(|(_, last)| **last > i64::MIN) {
                let least = &mut least[from][of[reader]];
                *least = (ends[reader] - last).min(*least);
            }
        }
        let mut clocks = Self { ahead_ns: vec![0; devices], within_ns: 0 };
        for (device, ahead) in clocks.ahead_ns.iter_mut().enumerate().skip(1) {
            let (there, back) = (least[0][device], least[device][0]);
            if there < i64::MAX && back < i64::MAX {
                *ahead = (there - back).div_euclid(2);
                let within = (there + back).unsigned_abs().div_ceil(2);
                clocks.within_ns = clocks.within_ns.max(within);
            }
        }
        clocks
    }

    /// The records by the first GPU's clock.
    pub(crate) fn common(&self, program: &Program, records: &[TaskRecord]) -> Vec<TaskRecord> {
        let by_first = |(record, device): (&TaskRecord, usize)| {
            let ahead = self.ahead_ns.get(device).copied().unwrap_or(0);
            TaskRecord { begin: record.begin.wrapping_add_signed(-ahead), ..*record }
        };
        records.iter().zip(devices_of_tasks(program)).map(by_first).collect()
    }
}

/// The end of a task by its GPU's clock.
fn end(record: &TaskRecord, ns_per_cycle: f64) -> i64 {
    record.begin as i64 + (f64::from(record.end) * ns_per_cycle).round() as i64
}

/// The GPU of each task, in the program's order.
fn devices_of_tasks(program: &Program) -> Vec<usize> {
    let per_device = program.workers_per_device().max(1);
    let workers = program.workers.iter().enumerate();
    workers.flat_map(|(at, worker)| vec![at / per_device; worker.tasks.len()]).collect()
}
