//! One step of every worker in whole nanoseconds: where each of them went, and which task was waited for.
//!
//! A worker's time is split at the marks of its tasks, so nothing is counted twice and nothing is left out:
//! `bound + excess + waiting + bubble = workers * span`, which [`Timeline::total`] asserts.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use abi::TaskRecord;
use ir::program::Program;

use crate::clocks::Clocks;
use crate::graph;

/// How to read the times in records.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Nanoseconds per cycle.
    pub ns_per_cycle: f64,
    /// The begin and end of the step, if not in the records.
    pub span: Option<[u64; 2]>,
    /// Whether each GPU of the program has a clock of its own.
    pub per_device: bool,
    /// Whether a task that polls flag-in-data words is marked ready before they arrive. The device marks the end of
    /// counter waits, and then the arrival of the input; the simulation has the time of arrival.
    pub polls_after_ready: bool,
}

/// A task with its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its worker.
    pub worker: u32,
    /// Its layer.
    pub layer: u16,
    /// Index of its name in [`Timeline::names`].
    pub name: usize,
    /// The marks in nanoseconds, in order: none is before the one above it.
    pub begin: u64,
    /// When its input had arrived.
    pub arrived: u64,
    /// When its input was in shared memory.
    pub staged: u64,
    /// When its products were done.
    pub multiplied: u64,
    /// When its stores were done and signalled.
    pub end: u64,
    /// How long its products waited for weights.
    pub starved: u64,
    /// Bytes it takes out of the ring.
    pub bytes: u64,
    /// It has nothing to do at this position, though others of its phase take bytes: a split without keys.
    pub idle: bool,
    /// The time of these bytes at the worker's part of the bandwidth.
    pub bound: u64,
    /// The tasks whose output it reads, or whose signal it waits for.
    pub dependencies: Arc<[u32]>,
    /// Of those, the last to finish.
    pub producer: Option<usize>,
}

/// Which tasks have nothing to do, by worker: those without bytes of a phase that takes some.
pub(crate) fn idle_tasks(program: &Program, bytes: &[Vec<u64>]) -> Vec<Vec<bool>> {
    let tasks = || program.workers.iter().zip(bytes).map(|(w, bytes)| w.tasks.iter().zip(bytes));
    let takes: HashSet<&str> = tasks()
        .flatten()
        .filter(|(_, bytes)| **bytes > 0)
        .map(|(task, _)| program.phase_name(task))
        .collect();
    let idle = |(task, &bytes)| bytes == 0 && takes.contains(program.phase_name(task));
    tasks().map(|of_worker| of_worker.map(idle).collect()).collect()
}

/// Parts of workers' time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Number of tasks.
    pub tasks: u64,
    /// The time of the bytes at the full bandwidth, divided evenly.
    pub bound: i64,
    /// Work beyond that. Negative if bytes arrived while the worker waited: the ring runs ahead.
    pub excess: i64,
    /// Waiting for the input of tasks.
    pub waiting: i64,
    /// No task running: before the first, between two, after the last.
    pub bubble: [i64; 3],
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
    /// All three bubbles.
    pub fn bubbles(&self) -> i64 {
        self.bubble.iter().sum()
    }

    /// All parts.
    pub fn sum(&self) -> i64 {
        self.bound + self.excess + self.waiting + self.bubbles()
    }

    /// Adds the parts of others.
    pub fn add(&mut self, other: &Self) {
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
pub struct Timeline {
    /// Names of phases.
    pub names: Vec<String>,
    /// Worker by worker, in queue order.
    pub tasks: Vec<Task>,
    /// The tasks of each worker.
    pub workers: Vec<Range<usize>>,
    /// The begin of the step.
    pub start: u64,
    /// The end of the step.
    pub end: u64,
    /// Nanoseconds by which marks were moved because a clock put one before its predecessor.
    pub moved: u64,
    /// What the clocks of its GPUs are ahead of the first one's.
    pub clocks: Clocks,
    /// Workers of each GPU.
    per_device: usize,
    /// The tasks in an order in which queues and dependencies point backwards.
    pub order: Arc<[u32]>,
    /// How long a phase usually waits for its input, by name.
    usual: Vec<Usual>,
}

/// Usual times of a phase in nanoseconds; zero where the step has none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usual {
    /// From the end of the last producer to the arrival, of tasks that began before that end: the middle one.
    pub(crate) hand_off: u64,
    /// From the begin to the arrival, of the other tasks. For some of them the input was still on its way, so that it is
    /// one of the shortest.
    pub(crate) look: u64,
}

impl Timeline {
    /// The step in the records, which are in the program's order, one per task. `bytes` are the bytes that each task
    /// takes out of the ring, and `bandwidth` is that of all workers together, in bytes per second.
    pub fn new(
        program: &Program,
        records: &[TaskRecord],
        bytes: &[Vec<u64>],
        bandwidth: u64,
        clock: Clock,
    ) -> Self {
        let dependencies = graph::dependencies(program);
        let mut timeline = Self::timed(program, records, bytes, (bandwidth, clock), dependencies);
        let previous: Vec<Option<u32>> = (0..timeline.tasks.len())
            .map(|task| timeline.previous(task).map(|p| p as u32))
            .collect();
        timeline.order = graph::topological(&timeline.tasks, &previous).into();
        timeline
    }

    /// Another step of the same program, without working out its dependencies again.
    #[must_use]
    pub fn again(
        &self,
        program: &Program,
        records: &[TaskRecord],
        bytes: &[Vec<u64>],
        bandwidth: u64,
        clock: Clock,
    ) -> Self {
        let dependencies = self.tasks.iter().map(|task| task.dependencies.clone()).collect();
        let mut timeline = Self::timed(program, records, bytes, (bandwidth, clock), dependencies);
        timeline.order = self.order.clone();
        timeline
    }

    /// A step without an order.
    fn timed(
        program: &Program,
        records: &[TaskRecord],
        bytes: &[Vec<u64>],
        (bandwidth, clock): (u64, Clock),
        dependencies: Vec<Arc<[u32]>>,
    ) -> Self {
        let records = &records[..program.task_len()];
        let clocks = match clock.per_device && program.topology.devices > 1 {
            true => Clocks::new(program, records, &dependencies, clock.ns_per_cycle),
            false => Clocks::default(),
        };
        let records = clocks.common(program, records);
        let begins = records.iter().map(|record| record.begin);
        let start = clock.span.map_or_else(|| begins.min().unwrap_or(0), |[start, _]| start);
        let mut timeline = Self {
            names: Vec::new(),
            tasks: Vec::new(),
            workers: Vec::new(),
            start,
            end: start,
            moved: 0,
            clocks,
            per_device: program.workers_per_device(),
            order: Arc::new([]),
            usual: Vec::new(),
        };
        let idle = idle_tasks(program, bytes);
        let mut names = HashMap::new();
        let mut dependencies = dependencies.into_iter();
        let mut bounds = Bounds { bytes: 0, workers: program.workers.len() as u64, bandwidth };
        for (index, worker) in program.workers.iter().enumerate() {
            let first = timeline.tasks.len();
            let mut before = start;
            for (place, (task, &bytes)) in worker.tasks.iter().zip(&bytes[index]).enumerate() {
                let record = &records[timeline.tasks.len()];
                let name = *names.entry(program.phase_name(task)).or_insert_with_key(|name| {
                    timeline.names.push((*name).to_owned());
                    timeline.names.len() - 1
                });
                let waits_for_words = clock.polls_after_ready && graph::polls(program, task);
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
                    idle: idle[index][place],
                    bound: bounds.of(bytes),
                    dependencies: dependencies.next().unwrap_or_default(),
                    producer: None,
                });
            }
            timeline.end = timeline.end.max(before);
            timeline.workers.push(first..timeline.tasks.len());
        }
        timeline.end = timeline.end.max(clock.span.map_or(0, |[_, end]| end));
        timeline.link();
        timeline
    }

    /// Finds the producer of each task.
    fn link(&mut self) {
        let ends: Vec<u64> = self.tasks.iter().map(|task| task.end).collect();
        for task in &mut self.tasks {
            let last = task.dependencies.iter().max_by_key(|&&of| (ends[of as usize], of));
            task.producer = last.map(|&of| of as usize);
        }
        self.usual = self.usual_times();
        self.wait_for_the_last();
    }

    fn usual_times(&self) -> Vec<Usual> {
        let mut all: Vec<[Vec<u64>; 2]> = vec![Default::default(); self.names.len()];
        for task in &self.tasks {
            let Some(producer) = task.producer else { continue };
            let [hand_offs, looks] = &mut all[task.name];
            let end = self.tasks[producer].end;
            match end < task.begin {
                true => looks.push(task.arrived - task.begin),
                false => hand_offs.extend(task.arrived.checked_sub(end)),
            }
        }
        let at = |mut times: Vec<u64>, part: usize| {
            times.sort_unstable();
            times.get(times.len() / part).copied().unwrap_or(0)
        };
        all.into_iter().map(|[h, l]| Usual { hand_off: at(h, 2), look: at(l, 10) }).collect()
    }

    /// The usual times of a task's phase.
    pub(crate) fn usual(&self, task: &Task) -> Usual {
        self.usual.get(task.name).copied().unwrap_or_default()
    }

    /// Moves the marks of tasks whose last producer ended after them. One thread takes the marks, for its own warp; another
    /// warp's part of the input may come later, and no product is complete before it has.
    fn wait_for_the_last(&mut self) {
        for index in 0..self.tasks.len() {
            let Some(producer) = self.tasks[index].producer else { continue };
            let produced = self.tasks[producer].end;
            let usual = self.usual(&self.tasks[index]).hand_off;
            let task = &mut self.tasks[index];
            if produced > task.arrived {
                let arrived = (produced + usual).min(task.end);
                for mark in [&mut task.arrived, &mut task.staged, &mut task.multiplied] {
                    *mark = arrived.max(*mark);
                }
            }
        }
    }

    /// The task before it in its worker's queue.
    #[must_use]
    pub fn previous(&self, task: usize) -> Option<usize> {
        let before = task.checked_sub(1)?;
        (self.tasks[before].worker == self.tasks[task].worker).then_some(before)
    }

    /// When its worker became free for it: the end of the previous task, or the start of the step.
    #[must_use]
    pub fn free(&self, task: usize) -> u64 {
        self.previous(task).map_or(self.start, |previous| self.tasks[previous].end)
    }

    /// The hand-off that a task waited for: from the end of its last producer to the arrival of its input. The input of a
    /// task that began after that end was still on its way, or there to be looked at; the one that takes less beyond its
    /// usual time is taken to be true.
    #[must_use]
    pub fn hand_off(&self, task: usize) -> Option<u64> {
        let of = &self.tasks[task];
        let took = of.arrived.checked_sub(self.tasks[of.producer?].end)?;
        let (own, usual) = (of.arrived - of.begin, self.usual(of));
        let on_its_way = took + usual.look <= own + usual.hand_off;
        (took <= own || on_its_way).then_some(took)
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

    /// Nanoseconds of the step.
    pub fn span(&self) -> u64 {
        self.end - self.start
    }

    /// What a worker is called: of several GPUs, with its GPU.
    #[must_use]
    pub fn worker_name(&self, worker: usize) -> String {
        match self.workers.len() > self.per_device {
            true => format!("GPU {} worker {}", worker / self.per_device, worker % self.per_device),
            false => format!("worker {worker}"),
        }
    }

    /// The phase of a task.
    pub fn name(&self, task: &Task) -> &str {
        &self.names[task.name]
    }

    /// The parts of one worker's time.
    pub fn worker(&self, worker: usize) -> Sums {
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
    pub fn total(&self) -> Sums {
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
    pub fn by<K: std::hash::Hash + Eq>(&self, key: impl Fn(&Task) -> K) -> HashMap<K, Sums> {
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
