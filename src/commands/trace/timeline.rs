//! One step of every worker in whole nanoseconds: where each of them went, and which task was waited for.
//!
//! A worker's time is split at the marks of its tasks, so nothing is counted twice and nothing is left out:
//! `bound + excess + waiting + bubble = workers * span`, which [`Timeline::total`] asserts.

use std::collections::HashMap;
use std::ops::Range;

use abi::{BufferKind, TaskRecord};
use ir::program::{Program, Region, Task as ProgramTask, accesses};

/// How to read the times in records.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Nanoseconds per cycle.
    pub(super) ns_per_cycle: f64,
    /// The begin and end of the step, if not in the records.
    pub(super) span: Option<[u64; 2]>,
    /// Whether a task that polls flag-in-data words is marked ready before they arrive. The device marks the end of
    /// counter waits, and then the arrival of the input; the simulation has the time of arrival.
    pub(super) polls_after_ready: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) worker: u32,
    pub(super) layer: u16,
    /// Index of its name in [`Timeline::names`].
    pub(super) name: usize,
    /// The marks in nanoseconds, in order: none is before the one above it.
    pub(super) begin: u64,
    /// When its input had arrived.
    pub(super) arrived: u64,
    pub(super) staged: u64,
    pub(super) multiplied: u64,
    pub(super) end: u64,
    /// How long its products waited for weights.
    pub(super) starved: u64,
    /// Bytes it takes out of the ring.
    pub(super) bytes: u64,
    /// The time of these bytes at the worker's part of the bandwidth.
    pub(super) bound: u64,
    /// Of the tasks that it waited for, the last to finish.
    pub(super) producer: Option<usize>,
}

/// Parts of workers' time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) tasks: u64,
    /// The time of the bytes at the full bandwidth, divided evenly.
    pub(super) bound: i64,
    /// Work beyond that. Negative if bytes arrived while the worker waited: the ring runs ahead.
    pub(super) excess: i64,
    /// Waiting for the input of tasks.
    pub(super) waiting: i64,
    /// No task running: before the first, between two, after the last.
    pub(super) bubble: [i64; 3],
}

/// Nanoseconds from one mark to the next.
///
/// # Panics
/// If they are out of order, in every build: differences that wrap would still add up to the span.
fn between(from: u64, to: u64) -> i64 {
    assert!(from <= to, "a mark at {to} ns, after one at {from}");
    (to - from) as i64
}

impl Sums {
    pub(super) fn bubbles(&self) -> i64 {
        self.bubble.iter().sum()
    }

    pub(super) fn sum(&self) -> i64 {
        self.bound + self.excess + self.waiting + self.bubbles()
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.tasks += other.tasks;
        self.bound += other.bound;
        self.excess += other.excess;
        self.waiting += other.waiting;
        self.bubble.iter_mut().zip(other.bubble).for_each(|(all, one)| *all += one);
    }

    fn add_task(&mut self, task: &Task) {
        self.tasks += 1;
        self.bound += task.bound as i64;
        self.excess += between(task.arrived, task.end) - task.bound as i64;
        self.waiting += between(task.begin, task.arrived);
    }
}

/// One step of every worker.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    pub(super) names: Vec<String>,
    /// Worker by worker, in queue order.
    pub(super) tasks: Vec<Task>,
    pub(super) workers: Vec<Range<usize>>,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Nanoseconds by which marks were moved because a clock put one before its predecessor.
    pub(super) moved: u64,
}

impl Timeline {
    /// The step in the records, which are in the program's order, one per task. `bytes` are the bytes that each task
    /// takes out of the ring, and `bandwidth` is that of all workers together, in bytes per second.
    pub(super) fn new(
        program: &Program,
        records: &[TaskRecord],
        bytes: &[Vec<u64>],
        bandwidth: u64,
        clock: Clock,
    ) -> Self {
        let all = || program.workers.iter().flat_map(|worker| &worker.tasks);
        let begins = records.iter().take(all().count()).map(|record| record.begin);
        let start = clock.span.map_or_else(|| begins.min().unwrap_or(0), |[start, _]| start);
        let mut timeline = Self {
            names: Vec::new(),
            tasks: Vec::new(),
            workers: Vec::new(),
            start,
            end: start,
            moved: 0,
        };
        let mut names = HashMap::new();
        let mut bounds = Bounds { bytes: 0, workers: program.workers.len() as u64, bandwidth };
        for (index, worker) in program.workers.iter().enumerate() {
            let first = timeline.tasks.len();
            let mut before = start;
            for (task, &bytes) in worker.tasks.iter().zip(&bytes[index]) {
                let record = &records[timeline.tasks.len()];
                let name = *names.entry(program.phase_name(task)).or_insert_with_key(|name| {
                    timeline.names.push((*name).to_owned());
                    timeline.names.len() - 1
                });
                let waits_for_words = clock.polls_after_ready && polls(program, task);
                let marks = timeline.marks(record, clock.ns_per_cycle, before, waits_for_words);
                let [begin, arrived, staged, multiplied, end] = marks;
                before = end;
                timeline.tasks.push(Task {
                    worker: index as u32,
                    layer: task.layer,
                    name,
                    begin,
                    arrived,
                    staged,
                    multiplied,
                    end,
                    starved: (f64::from(record.starved) * clock.ns_per_cycle).round() as u64,
                    bytes,
                    bound: bounds.of(bytes),
                    producer: None,
                });
            }
            timeline.end = timeline.end.max(before);
            timeline.workers.push(first..timeline.tasks.len());
        }
        timeline.end = timeline.end.max(clock.span.map_or(0, |[_, end]| end));
        for (index, producer) in producers(program, &timeline.tasks).into_iter().enumerate() {
            timeline.tasks[index].producer = producer;
        }
        timeline
    }

    /// The marks: begin, arrival, staged, multiplied, end; in order, and not before the end of the previous task.
    fn marks(
        &mut self,
        record: &TaskRecord,
        ns: f64,
        before: u64,
        waits_for_words: bool,
    ) -> [u64; 5] {
        let at = |cycles: u32| record.begin + (f64::from(cycles) * ns).round() as u64;
        let arrived = if waits_for_words { record.staged } else { record.ready };
        let mut marks =
            [record.begin, at(arrived), at(record.staged), at(record.multiplied), at(record.end)];
        let mut least = before;
        for mark in &mut marks {
            self.moved += least.saturating_sub(*mark);
            *mark = least.max(*mark);
            least = *mark;
        }
        marks
    }

    pub(super) fn span(&self) -> u64 {
        self.end - self.start
    }

    pub(super) fn name(&self, task: &Task) -> &str {
        &self.names[task.name]
    }

    pub(super) fn worker(&self, worker: usize) -> Sums {
        let mut sums = Sums::default();
        let mut before = self.start;
        for (place, task) in self.tasks[self.workers[worker].clone()].iter().enumerate() {
            sums.add_task(task);
            sums.bubble[usize::from(place > 0)] += between(before, task.begin);
            before = task.end;
        }
        sums.bubble[2] = between(before, self.end);
        sums
    }

    /// The time of all workers.
    ///
    /// # Panics
    /// If the parts do not add up to the whole, or marks are out of order.
    pub(super) fn total(&self) -> Sums {
        let mut total = Sums::default();
        for worker in 0..self.workers.len() {
            let sums = self.worker(worker);
            assert_eq!(sums.sum(), self.span() as i64, "the parts of worker {worker}");
            total.add(&sums);
        }
        assert_eq!(total.sum(), (self.span() * self.workers.len() as u64) as i64, "the parts");
        total
    }

    /// The tasks' time grouped by `key`. Bubbles belong to no task.
    pub(super) fn by<K: std::hash::Hash + Eq>(&self, key: impl Fn(&Task) -> K) -> HashMap<K, Sums> {
        let mut sums: HashMap<K, Sums> = HashMap::new();
        for task in &self.tasks {
            sums.entry(key(task)).or_default().add_task(task);
        }
        sums
    }
}

/// Distributes the time of all bytes over the tasks in whole nanoseconds, so that the parts add up to the total.
struct Bounds {
    bytes: u128,
    workers: u64,
    bandwidth: u64,
}

impl Bounds {
    fn until_now(&self) -> u64 {
        (self.bytes * 1_000_000_000 * u128::from(self.workers) / u128::from(self.bandwidth.max(1)))
            as u64
    }

    fn of(&mut self, bytes: u64) -> u64 {
        let before = self.until_now();
        self.bytes += u128::from(bytes);
        self.until_now() - before
    }
}

fn flag_in_data<'a>(
    program: &'a Program,
    regions: &'a [Region],
) -> impl Iterator<Item = &'a Region> {
    regions
        .iter()
        .filter(|region| program.buffers[region.buffer.index()].kind == BufferKind::FlagInData)
}

fn polls(program: &Program, task: &ProgramTask) -> bool {
    flag_in_data(program, &accesses(program, task).reads).next().is_some()
}

/// For each task, the last to finish of those that it waits for, by counter or by flag-in-data words.
fn producers(program: &Program, times: &[Task]) -> Vec<Option<usize>> {
    let all = || program.workers.iter().flat_map(|worker| &worker.tasks).enumerate();
    let later =
        |a: Option<usize>, b: usize| a.filter(|&a| times[a].end >= times[b].end).unwrap_or(b);
    let mut signalled: Vec<Option<usize>> = vec![None; program.counters as usize];
    let mut writers: HashMap<_, Vec<(u32, u32, usize)>> = HashMap::new();
    for (index, task) in all() {
        if let Some(counter) = task.signal {
            let last = &mut signalled[counter.index()];
            *last = Some(later(*last, index));
        }
        for region in flag_in_data(program, &accesses(program, task).writes) {
            let of_buffer = writers.entry(region.buffer).or_default();
            of_buffer.push((region.start, region.end, index));
        }
    }
    // Memoized, since many tasks read the same words.
    let mut known: HashMap<ir::program::Region, Option<usize>> = HashMap::new();
    let mut found = Vec::with_capacity(times.len());
    for (_, task) in all() {
        let counters = task.waits.iter().filter_map(|wait| signalled[wait.counter.index()]);
        let mut last = counters.fold(None, |last, index| Some(later(last, index)));
        for region in flag_in_data(program, &accesses(program, task).reads) {
            let writer = *known.entry(*region).or_insert_with(|| {
                let of_buffer = writers.get(&region.buffer);
                of_buffer
                    .into_iter()
                    .flatten()
                    .filter(|(start, end, _)| *start < region.end && region.start < *end)
                    .fold(None, |last, &(.., index)| Some(later(last, index)))
            });
            if let Some(writer) = writer {
                last = Some(later(last, writer));
            }
        }
        found.push(last);
    }
    found
}
