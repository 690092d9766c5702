//! The simulation: per worker one clock and the state of its ring, tasks in any order that their inputs allow.

use abi::{AttentionParams, MatvecParams, Opcode, SlotKind};
use ir::program::{Program, Region, Task, accesses, active_splits, attended, split_range};
use ir::{KernelConfig, MatrixId, SlotId, Target};
use rustc_hash::FxHashMap;

use super::PhaseTime;
use super::rates::{ATTENTION_US, Rates, TASK_US};

/// Steps to run until the ring's fill at the end of a step no longer changes.
const STEPS: usize = 3;

/// What one task costs and waits for.
struct Cost {
    /// Index of its phase.
    phase: usize,
    stream_bytes: f64,
    /// Read without the ring: keys and values, partials.
    direct_bytes: f64,
    /// Activation vector that it stages.
    vector_bytes: f64,
    fixed_us: f64,
    /// Counters waited for.
    waits: Vec<usize>,
    /// Tagged regions read.
    polls: Vec<Poll>,
    signal: Option<usize>,
    /// Tagged writes: slot, place in its list.
    posts: Vec<(usize, usize)>,
}

/// A tagged region that a task reads: writers `first..last` of a slot.
struct Poll {
    slot: usize,
    first: usize,
    last: usize,
}

#[derive(Clone, Copy, Default)]
struct Counter {
    arrivals: u32,
    have: u32,
    time: f64,
}

/// The writers of one tagged slot and generation, by first word; when each was done in this step.
#[derive(Default)]
struct Tagged {
    writers: Vec<(u32, u32)>,
    done: Vec<Option<f64>>,
    have: usize,
    time: f64,
}

#[derive(Clone, Copy, Default)]
struct WorkerState {
    next: usize,
    /// When it is free.
    time: f64,
    /// Bytes that have landed and not been multiplied.
    landed: f64,
}

struct Phase {
    name: usize,
    tasks: u32,
    stream_bytes: u64,
    end: f64,
}

/// One simulated step.
pub(super) struct Step {
    pub(super) us: f64,
    pub(super) phases: Vec<PhaseTime>,
}

pub(super) struct Simulation {
    rates: Rates,
    workers: Vec<Vec<Cost>>,
    counters: Vec<Counter>,
    tagged: Vec<Tagged>,
    phases: Vec<Phase>,
    names: Vec<String>,
    states: Vec<WorkerState>,
    kv_bytes: u64,
}

impl Simulation {
    pub(super) fn new(
        program: &Program,
        kernel: &KernelConfig,
        target: &Target,
        position: u32,
    ) -> Self {
        let mut builder = Builder::new(program, position, abi::KV_ELEMENT_BYTES);
        let workers = program
            .workers
            .iter()
            .map(|worker| worker.tasks.iter().map(|task| builder.cost(task)).collect())
            .collect();
        let mut counters = vec![Counter::default(); program.counters as usize];
        let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
        for signal in tasks.filter_map(|task| task.signal) {
            counters[signal.index()].arrivals += 1;
        }
        Self {
            rates: Rates::new(program, kernel, target),
            workers,
            counters,
            tagged: builder.tagged,
            phases: builder.phases,
            names: builder.names,
            states: vec![WorkerState::default(); program.workers.len()],
            kv_bytes: builder.kv_bytes,
        }
    }

    pub(super) fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    /// Every counter and every tagged slot is one handoff.
    pub(super) fn handoffs(&self) -> u32 {
        let counters = self.counters.iter().filter(|counter| counter.arrivals > 0).count();
        (counters + self.tagged.len()) as u32
    }

    /// Runs a few steps; the last one.
    pub(super) fn run(&mut self) -> Step {
        let mut start = 0.0;
        let mut before = 0.0;
        for _ in 0..STEPS {
            before = start;
            start = self.step(start);
        }
        Step { us: start - before, phases: self.breakdown(before, start) }
    }

    /// One step from `start`; when the next one may start.
    fn step(&mut self, start: f64) -> f64 {
        for counter in &mut self.counters {
            (counter.have, counter.time) = (0, start);
        }
        for tagged in &mut self.tagged {
            tagged.done.fill(None);
            (tagged.have, tagged.time) = (0, start);
        }
        for worker in 0..self.states.len() {
            self.advance(worker, start);
            self.states[worker].next = 0;
        }
        let mut progress = true;
        while progress {
            progress = false;
            for worker in 0..self.workers.len() {
                while let Some(arrival) = self.arrival(worker) {
                    self.fire(worker, arrival);
                    progress = true;
                }
            }
        }
        let end = self.states.iter().map(|state| state.time).fold(start, f64::max);
        // The step state is published and seen by everyone: one more handoff, with the rings full or nearly so.
        end + self.rates.trips(4.0, 0.0)
    }

    /// Lets the stream of an idle worker run on until `time`.
    fn advance(&mut self, worker: usize, time: f64) {
        let state = &mut self.states[worker];
        let idle = (time - state.time).max(0.0);
        state.landed = (state.landed + idle * self.rates.stream_near).min(self.rates.ring);
        state.time = state.time.max(time);
    }

    /// When the inputs of the worker's next task were done: `None` if some are not, or there is no task.
    fn arrival(&self, worker: usize) -> Option<Arrival> {
        let task = self.workers[worker].get(self.states[worker].next)?;
        let mut arrival = Arrival::default();
        for &wait in &task.waits {
            let counter = self.counters[wait];
            if counter.have < counter.arrivals {
                return None;
            }
            arrival.counter = Some(arrival.counter.unwrap_or(0.0).max(counter.time));
        }
        for poll in &task.polls {
            let time = self.tagged[poll.slot].arrival(poll)?;
            arrival.tagged = Some(arrival.tagged.unwrap_or(0.0).max(time));
        }
        Some(arrival)
    }

    fn fire(&mut self, worker: usize, arrival: Arrival) {
        let ready = self.ready(worker, arrival);
        self.advance(worker, ready);
        let task = &self.workers[worker][self.states[worker].next];
        let rates = &self.rates;
        let state = &mut self.states[worker];
        let multiply = rates.multiply(task.stream_bytes, state.landed);
        let aside =
            task.fixed_us + rates.vector(task.vector_bytes) + task.direct_bytes / rates.direct;
        let landed = state.landed + multiply * rates.stream - task.stream_bytes;
        state.landed = (landed.max(0.0) + aside * rates.stream_near).min(rates.ring);
        state.time += multiply + aside;
        state.next += 1;
        let end = state.time;
        self.phases[task.phase].end = self.phases[task.phase].end.max(end);
        if let Some(signal) = task.signal {
            let counter = &mut self.counters[signal];
            counter.have += 1;
            counter.time = counter.time.max(end);
        }
        for &(slot, place) in &task.posts {
            let tagged = &mut self.tagged[slot];
            tagged.done[place] = Some(end);
            tagged.have += 1;
            tagged.time = tagged.time.max(end);
        }
    }

    /// When a task has its input. A counter handoff is four trips: store, release, poll, load; the last two are made even if
    /// the input arrived long ago. A tagged one is two: store and load.
    fn ready(&self, worker: usize, arrival: Arrival) -> f64 {
        let state = &self.states[worker];
        let latest = arrival.counter.unwrap_or(0.0).max(arrival.tagged.unwrap_or(0.0));
        let idle = (latest - state.time).max(0.0);
        let landed = (state.landed + idle * self.rates.stream_near).min(self.rates.ring);
        let trips = |count| self.rates.trips(count, self.rates.ring - landed);
        let mut ready = state.time;
        if let Some(time) = arrival.counter {
            ready = ready.max(time + trips(4.0) + self.rates.poll()).max(state.time + trips(2.0));
        }
        if let Some(time) = arrival.tagged {
            ready = ready.max(time + trips(2.0) + self.rates.poll()).max(state.time + trips(1.0));
        }
        ready
    }

    /// Time between the ends of consecutive phases, summed by kind. Publishing the next step counts to the last one.
    fn breakdown(&self, start: f64, end: f64) -> Vec<PhaseTime> {
        let mut order: Vec<&Phase> = self.phases.iter().collect();
        order.sort_by(|a, b| a.end.total_cmp(&b.end));
        let mut times: Vec<PhaseTime> = Vec::new();
        let mut before = start;
        for phase in order {
            let name = &self.names[phase.name];
            let index = times.iter().position(|time| time.phase == *name).unwrap_or_else(|| {
                times.push(PhaseTime { phase: name.clone(), tasks: 0, stream_bytes: 0, us: 0.0 });
                times.len() - 1
            });
            let time = &mut times[index];
            time.tasks += phase.tasks;
            time.stream_bytes += phase.stream_bytes;
            time.us += (phase.end - before).max(0.0);
            before = phase.end.max(before);
        }
        if let Some(last) = times.last_mut() {
            last.us += end - before;
        }
        times
    }
}

/// When the last input of each kind was done.
#[derive(Clone, Copy, Default)]
struct Arrival {
    counter: Option<f64>,
    tagged: Option<f64>,
}

impl Tagged {
    fn arrival(&self, poll: &Poll) -> Option<f64> {
        if poll.last - poll.first == self.writers.len() {
            return (self.have == self.writers.len()).then_some(self.time);
        }
        self.done[poll.first..poll.last]
            .iter()
            .try_fold(0.0_f64, |max, done| Some(max.max((*done)?)))
    }
}

/// Costs tasks one by one, and numbers phases and tagged slots on the way.
struct Builder<'a> {
    program: &'a Program,
    position: u32,
    kv_element_bytes: u64,
    tagged: Vec<Tagged>,
    tagged_ids: FxHashMap<(SlotId, u16), usize>,
    phases: Vec<Phase>,
    phase_ids: FxHashMap<(u16, usize), usize>,
    names: Vec<String>,
    kv_bytes: u64,
}

impl<'a> Builder<'a> {
    fn new(program: &'a Program, position: u32, kv_element_bytes: u64) -> Self {
        let mut builder = Self {
            program,
            position,
            kv_element_bytes,
            tagged: Vec::new(),
            tagged_ids: FxHashMap::default(),
            phases: Vec::new(),
            phase_ids: FxHashMap::default(),
            names: Vec::new(),
            kv_bytes: 0,
        };
        let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
        for region in tasks.flat_map(|task| accesses(program, task).writes) {
            if !builder.is_tagged(&region) {
                continue;
            }
            let next = builder.tagged.len();
            let id = *builder.tagged_ids.entry((region.slot, region.generation)).or_insert(next);
            if id == next {
                builder.tagged.push(Tagged::default());
            }
            builder.tagged[id].writers.push((region.start, region.end));
        }
        for tagged in &mut builder.tagged {
            tagged.writers.sort_unstable();
            tagged.done = vec![None; tagged.writers.len()];
        }
        builder
    }

    fn is_tagged(&self, region: &Region) -> bool {
        self.program.slots[region.slot.index()].kind == SlotKind::Tagged
    }

    fn cost(&mut self, task: &Task) -> Cost {
        let touched = accesses(self.program, task);
        let mut polls = Vec::new();
        for region in touched.reads.iter().filter(|region| self.is_tagged(region)) {
            let Some(&slot) = self.tagged_ids.get(&(region.slot, region.generation)) else {
                continue;
            };
            let writers = &self.tagged[slot].writers;
            let first = writers.partition_point(|&(_, end)| end <= region.start);
            let last = writers.partition_point(|&(start, _)| start < region.end);
            polls.push(Poll { slot, first, last: last.max(first) });
        }
        let mut posts = Vec::new();
        for region in touched.writes.iter().filter(|region| self.is_tagged(region)) {
            let Some(&slot) = self.tagged_ids.get(&(region.slot, region.generation)) else {
                continue;
            };
            let place = self.tagged[slot].writers.binary_search(&(region.start, region.end));
            posts.extend(place.map(|place| (slot, place)));
        }
        let work = self.work(task);
        let phase = self.phase(task, &work);
        let read = |region: &Region| {
            let word = if self.is_tagged(region) { 8 } else { 4 };
            f64::from(region.end - region.start) * f64::from(word)
        };
        Cost {
            phase,
            stream_bytes: work.stream_bytes as f64,
            direct_bytes: work.direct_bytes as f64,
            vector_bytes: touched.reads.iter().map(read).sum(),
            fixed_us: work.fixed_us,
            waits: task.waits.iter().map(|wait| wait.counter.index()).collect(),
            polls,
            signal: task.signal.map(ir::CounterId::index),
            posts,
        }
    }

    fn work(&mut self, task: &Task) -> Work {
        match task.opcode {
            Opcode::Matvec => {
                let p: MatvecParams = task.params();
                let bytes = u64::from(p.tiles) * u64::from(p.units) * u64::from(abi::UNIT_BYTES);
                Work { name: self.matrix_name(task), stream_bytes: bytes, ..Work::default() }
            }
            Opcode::Attention => {
                let p: AttentionParams = task.params();
                let keys = attended(self.position, p.window);
                let active = active_splits(keys, p.kv_block, p.splits);
                let mine = if p.split < active {
                    split_range(keys, p.kv_block, active, p.split).len() as u64
                } else {
                    0
                };
                let bytes = mine * 2 * u64::from(p.head_dim) * self.kv_element_bytes;
                self.kv_bytes += bytes;
                let fixed_us = if mine > 0 { TASK_US + ATTENTION_US } else { 0.0 };
                Work { name: "attention".into(), direct_bytes: bytes, fixed_us, ..Work::default() }
            }
            Opcode::AttentionMerge => Work { name: "merge".into(), ..Work::default() },
            Opcode::Nop => Work { name: "nop".into(), fixed_us: 0.0, ..Work::default() },
            Opcode::Embed | Opcode::Sample => {
                Work { name: task.opcode.info().name.into(), ..Work::default() }
            }
        }
    }

    /// The last part of the matrix's name; the embedding multiplies as `lm_head` when tied.
    fn matrix_name(&self, task: &Task) -> String {
        let p: MatvecParams = task.params();
        let matrix = self.program.matrices.get(MatrixId(p.matrix).index());
        let part = matrix.and_then(|m| m.name.rsplit('.').next()).unwrap_or("matvec");
        match part {
            "embed" => "lm_head".into(),
            "o" => "o_proj".into(),
            other => other.into(),
        }
    }

    fn phase(&mut self, task: &Task, work: &Work) -> usize {
        let name = self.names.iter().position(|name| *name == work.name).unwrap_or_else(|| {
            self.names.push(work.name.clone());
            self.names.len() - 1
        });
        let next = self.phases.len();
        let id = *self.phase_ids.entry((task.layer, name)).or_insert(next);
        if id == next {
            self.phases.push(Phase { name, tasks: 0, stream_bytes: 0, end: 0.0 });
        }
        self.phases[id].tasks += 1;
        self.phases[id].stream_bytes += work.stream_bytes;
        id
    }
}

/// What a task does, as far as time goes.
struct Work {
    name: String,
    stream_bytes: u64,
    direct_bytes: u64,
    fixed_us: f64,
}

impl Default for Work {
    fn default() -> Self {
        Self { name: String::new(), stream_bytes: 0, direct_bytes: 0, fixed_us: TASK_US }
    }
}
