//! The simulation: a clock and the state of the ring per worker; tasks run in any order that their inputs allow.

use super::rates::{Flow, LINK_US, Shape, Speeds};
use super::work::{Cost, Plan, Poll, Work};
use super::{Delay, Disturbance, PhaseTime, SimulatedStep, TaskTimes};

/// Steps to simulate until the ring's fill at the end of a step no longer changes.
const STEPS: usize = 3;

/// Trips through L2 of a counter hand-off (store, release, poll, load) and of a flag-in-data one (store, load).
const COUNTER_TRIPS: f64 = 4.0;
const FLAG_IN_DATA_TRIPS: f64 = 2.0;

/// Elements of an input vector that arrive within the last trip; measured with an exchange of so many words.
const TRIP_ELEMENTS: f64 = 2048.0;

/// A sum over all warps before the vector of a product is staged: five shuffles, a barrier of the warps, eight
/// words of shared memory and a root. Some 400 cycles by counting instructions; not measured. What is added to the vector
/// is there before it.
const POST_NORM_US: f64 = 0.25;

/// Products of a second stage that waits in registers, and the sums of its rows. Measured: from a vector's arrival to the
/// task's barrier 0.27 us with one stage of 18 KB, 0.38 with two (docs/lab/2026-11-25-chain.md).
const SECOND_STAGE_US: f64 = 0.11;

/// One look at words in L2. Measured (docs/lab/2026-11-25-chain.md).
const LOOK_US: f64 = 0.2;

/// Stages per microsecond of a stream that nobody waits for.
const ENDLESS: f64 = 1e12;

#[derive(Clone, Copy, Default)]
struct Counter {
    have: u32,
    time: f64,
}

/// The times at which the writers of one flag-in-data buffer finished in this step.
struct FlagInData {
    done: Vec<Option<f64>>,
    have: usize,
    time: f64,
}

#[derive(Clone, Copy, Default)]
struct WorkerState {
    next: usize,
    /// Time at which it becomes free.
    time: f64,
    /// Stages that have arrived and not been multiplied.
    arrived: f64,
    /// Time up to which they have been counted: before `time` after attention, while the stream goes on.
    streamed: f64,
    /// Time at which what was requested last has arrived.
    quiet: f64,
    /// End of its last task, whose rows are stored while other warps begin the next one.
    ended: f64,
}

pub(super) struct Step {
    pub(super) us: f64,
    pub(super) phases: Vec<PhaseTime>,
}

pub(super) struct Simulation<'a> {
    plan: &'a Plan,
    speeds: Speeds,
    flows: Vec<Flow>,
    counters: Vec<Counter>,
    flag_in_data: Vec<FlagInData>,
    /// End of the last task of each phase.
    ends: Vec<f64>,
    states: Vec<WorkerState>,
    /// For each worker, the times of the tasks of the step; only if requested.
    trace_buffer: Option<Vec<Vec<TaskTimes>>>,
    /// Extra time of tasks, by worker and place.
    delays: Option<&'a dyn Fn(usize, usize) -> Delay>,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(plan: &'a Plan, speeds: Speeds) -> Self {
        let flag_in_data = |writers: &Vec<(u32, u32)>| FlagInData {
            done: vec![None; writers.len()],
            have: 0,
            time: 0.0,
        };
        Self {
            plan,
            speeds,
            flows: plan.flows.iter().map(|shape| speeds.flow(shape)).collect(),
            counters: vec![Counter::default(); plan.counters.len()],
            flag_in_data: plan.flag_in_data.iter().map(flag_in_data).collect(),
            ends: vec![0.0; plan.phases.len()],
            states: vec![WorkerState::default(); plan.workers.len()],
            trace_buffer: None,
            delays: None,
        }
    }

    /// The same with a disturbance.
    pub(super) fn disturbed(mut self, by: &Disturbance<'a>) -> Self {
        self.delays = Some(by.tasks);
        if let Some(most) = by.in_flight {
            let capped = |shape: &Shape| Shape {
                in_flight: shape.in_flight.min(most),
                in_flight_before_wait: shape.in_flight_before_wait.min(most),
                ..*shape
            };
            self.flows = self.plan.flows.iter().map(|s| self.speeds.flow(&capped(s))).collect();
        }
        self
    }

    /// The same with weights that are there at once, and with hand-offs that no bytes in flight slow down.
    pub(super) fn without_stream(mut self) -> Self {
        for flow in &mut self.flows {
            *flow = Flow {
                stream: ENDLESS,
                stream_before_wait: ENDLESS,
                alone: ENDLESS,
                round: 1.0 / ENDLESS,
                before_wait: 0.0,
                refill: 0.0,
                ..*flow
            };
        }
        self
    }

    /// Runs a few steps and returns the times of all tasks of the last one.
    pub(super) fn record(mut self) -> SimulatedStep {
        self.trace_buffer = Some(vec![Vec::new(); self.states.len()]);
        let mut start = 0.0;
        let mut before = 0.0;
        for _ in 0..STEPS {
            before = start;
            self.trace_buffer.iter_mut().flatten().for_each(Vec::clear);
            start = self.step(start);
        }
        let mut workers = self.trace_buffer.take().unwrap_or_default();
        workers.iter_mut().flatten().for_each(|times| times.shift(before));
        SimulatedStep { us: start - before, workers }
    }

    /// Runs a few steps and returns the last one.
    pub(super) fn run(&mut self) -> Step {
        let mut start = 0.0;
        let mut before = 0.0;
        for _ in 0..STEPS {
            before = start;
            start = self.step(start);
        }
        Step { us: start - before, phases: self.breakdown(before, start) }
    }

    /// Simulates one step from `start` and returns the earliest start of the next one.
    fn step(&mut self, start: f64) -> f64 {
        for counter in &mut self.counters {
            *counter = Counter { have: 0, time: start };
        }
        for flag_in_data in &mut self.flag_in_data {
            flag_in_data.done.fill(None);
            (flag_in_data.have, flag_in_data.time) = (0, start);
        }
        for worker in 0..self.states.len() {
            let first = self.plan.workers[worker].first();
            let flow = self.flows[first.map_or(0, |task| task.flow as usize)];
            self.speeds.advance(&mut self.states[worker], &flow, flow.ring, start);
            self.states[worker].next = 0;
        }
        let mut progress = true;
        while progress {
            progress = false;
            for worker in 0..self.states.len() {
                while let Some(arrival) = self.arrival(worker) {
                    self.fire(worker, arrival);
                    progress = true;
                }
            }
        }
        let end = self.ends.iter().copied().fold(start, f64::max);
        // The devices exchange their best tokens.
        let exchange = if self.plan.devices > 1 { LINK_US } else { 0.0 };
        let end = end + self.speeds.rates.step_us + exchange;
        self.speeds.note_step(self.plan.bytes as f64, end - start, self.states.len());
        end
    }

    /// Completion times of the inputs of the worker's next task; `None` if some are not complete, or there is no task.
    fn arrival(&self, worker: usize) -> Option<Arrival> {
        let task = self.plan.workers[worker].get(self.states[worker].next)?;
        let mut arrival = Arrival::default();
        for &wait in &task.waits {
            let counter = self.counters[wait as usize];
            if counter.have < self.plan.counters[wait as usize] {
                return None;
            }
            arrival.counter = Some(arrival.counter.unwrap_or(0.0).max(counter.time));
        }
        for poll in &task.polls {
            let mut time = self.flag_in_data[poll.buffer as usize].arrival(poll)?;
            if self.plan.remote[poll.buffer as usize] {
                time += LINK_US;
            }
            arrival.flag_in_data = Some(arrival.flag_in_data.unwrap_or(0.0).max(time));
        }
        Some(arrival)
    }

    fn fire(&mut self, worker: usize, arrival: Arrival) {
        let task: &Cost = &self.plan.workers[worker][self.states[worker].next];
        let flow = self.flows[task.flow as usize];
        let delay = self.delays.map_or(Delay::default(), |of| of(worker, self.states[worker].next));
        let late = |time: Option<f64>| time.map(|time| time + delay.hand_off);
        let arrival =
            Arrival { counter: late(arrival.counter), flag_in_data: late(arrival.flag_in_data) };
        let ready = self.ready(&self.states[worker], task, &flow, arrival);
        // A warp that stores rows takes the marks, so that no task begins in them before the one before has ended.
        let begin = self.states[worker].time.max(self.states[worker].ended).min(ready);
        let waited = if task.waits.is_empty() { begin } else { ready };
        let late = self.residual_late(task, waited + self.speeds.rates.begin_us);
        let state = &mut self.states[worker];
        let mut times = TaskTimes { begin, ready, ..TaskTimes::default() };
        let room = room(task, &flow);
        self.speeds.advance(state, &flow, room, ready);
        let mut aside = self.speeds.aside(&task.work);
        aside.after += delay.output;
        aside.after += if late { LOOK_US } else { 0.0 };
        // First the vector is staged while the stream continues, then the products, then the reduction and the stores.
        self.speeds.advance(state, &flow, room, ready + aside.before);
        times.staged = state.time;
        times.arrived[0] = state.arrived * flow.payload;
        let attends = matches!(task.work, Work::Attention { .. });
        let mean = self.plan.mean_bytes(task.phase);
        let (multiply, starved) = self.speeds.multiply(state, &task.work, &flow, mean);
        times.starved = starved;
        state.time += multiply + delay.products;
        state.streamed = state.time;
        if attends || flow.needed > flow.taken {
            state.quiet = state.time + flow.refill;
        }
        times.multiplied = state.time;
        times.arrived[1] = state.arrived * flow.payload;
        // A product's rows are reduced and stored by the first warps while the others begin the next task.
        let end = times.multiplied + aside.after;
        if !matches!(task.work, Work::Product { .. }) {
            self.speeds.advance(state, &flow, flow.ring, end);
        }
        state.next += 1;
        times.end = end;
        state.ended = end;
        if attends {
            state.time += self.speeds.rates.attended_us;
        }
        if let Some(trace_buffer) = &mut self.trace_buffer {
            trace_buffer[worker].push(times);
        }
        self.publish(task, end);
    }

    /// Publishes the end of a task to those that wait for it.
    fn publish(&mut self, task: &Cost, end: f64) {
        let phase_end = &mut self.ends[task.phase as usize];
        *phase_end = phase_end.max(end);
        if let Some(signal) = task.signal {
            let counter = &mut self.counters[signal as usize];
            counter.have += 1;
            counter.time = counter.time.max(end);
        }
        for &(buffer, place) in &task.posts {
            let flag_in_data = &mut self.flag_in_data[buffer as usize];
            flag_in_data.done[place as usize] = Some(end);
            flag_in_data.have += 1;
            flag_in_data.time = flag_in_data.time.max(end);
        }
    }

    /// Whether words that a product adds to its rows were not there when it requested them, before its vector had arrived: it
    /// then looks again when its products are done. A worker whose task before is some phases back asks too early.
    fn residual_late(&self, task: &Cost, asked: f64) -> bool {
        let poll = task.residual.map(|index| &task.polls[index as usize]);
        let written = poll.and_then(|poll| self.flag_in_data[poll.buffer as usize].arrival(poll));
        written.is_some_and(|time| time + LOOK_US > asked)
    }

    /// Time at which a task has its input. A counter hand-off takes four trips, of which the last two are needed even if
    /// the input arrived long ago; a flag-in-data hand-off takes two, of which the last is needed.
    fn ready(&self, state: &WorkerState, task: &Cost, flow: &Flow, arrival: Arrival) -> f64 {
        let latest = arrival.counter.unwrap_or(0.0).max(arrival.flag_in_data.unwrap_or(0.0));
        let from = latest.max(state.time);
        let room = room(task, flow);
        let idle = from - state.streamed;
        let stream = self.speeds.stream_before_wait(flow, room - state.arrived);
        let arrived = (state.arrived + idle * stream).min(room);
        let takes = if room > flow.ring { state.streamed + flow.refill } else { 0.0 };
        let fill = state.quiet.max(takes) - from;
        let trips = |count| self.speeds.trips(count, flow, room - arrived, fill);
        let (poll, counter_us) = (self.speeds.poll, self.speeds.rates.counter_us);
        let looks = state.time.max(state.ended + self.speeds.rates.begin_us);
        let mut ready = state.time;
        if let Some(time) = arrival.counter {
            let arrived = time + trips(COUNTER_TRIPS) + poll + counter_us;
            ready = ready.max(arrived).max(looks + trips(COUNTER_TRIPS / 2.0));
        }
        if let Some(time) = arrival.flag_in_data {
            let arrived = time + trips(FLAG_IN_DATA_TRIPS) + poll;
            ready = ready.max(arrived).max(looks + trips(FLAG_IN_DATA_TRIPS / 2.0));
        }
        ready
    }

    /// Time between the ends of consecutive phases, summed by kind. Time between two steps counts towards the last one.
    fn breakdown(&self, start: f64, end: f64) -> Vec<PhaseTime> {
        let mut order: Vec<usize> = (0..self.ends.len()).collect();
        order.sort_by(|&a, &b| self.ends[a].total_cmp(&self.ends[b]));
        let mut times: Vec<PhaseTime> = Vec::new();
        let mut before = start;
        for index in order {
            let phase = &self.plan.phases[index];
            let name = &self.plan.names[phase.name];
            let place = times.iter().position(|time| time.phase == *name).unwrap_or_else(|| {
                times.push(PhaseTime { phase: name.clone(), tasks: 0, stream_bytes: 0, us: 0.0 });
                times.len() - 1
            });
            let time = &mut times[place];
            time.tasks += phase.tasks;
            time.stream_bytes += phase.stream_bytes;
            time.us += (self.ends[index] - before).max(0.0);
            before = self.ends[index].max(before);
        }
        if let Some(last) = times.last_mut() {
            last.us += end - before;
        }
        times
    }
}

/// Time of a loader and of warps that wait for each other in turn, since the ring between them holds few stages: more than
/// that of the slower one, the more so the nearer they are to each other. Traces of products and of the output matrix, whose
/// ratios are 0.5 to 0.98, take 1.01 to 1.19 times the longer (docs/lab/2026-11-26-cost-model-again.md).
fn in_turn(warps: f64, loader: f64) -> f64 {
    let (long, short) = (warps.max(loader), warps.min(loader));
    long * (1.0 + (short / long).powi(4)).powf(0.25)
}

/// Stages that a worker holds before a task's products: those of the ring, and those that it takes into registers as soon
/// as it begins the task. So what is in flight when the task before has just ended is what this task takes.
fn room(task: &Cost, flow: &Flow) -> f64 {
    flow.ring + if matches!(task.work, Work::Product { .. }) { flow.taken } else { 0.0 }
}

/// Time of a task outside its products: before them, and after.
struct Aside {
    before: f64,
    after: f64,
}

impl Speeds {
    /// Continues the stream of a worker that multiplies nothing until `time`, up to `room` stages.
    fn advance(&self, state: &mut WorkerState, flow: &Flow, room: f64, time: f64) {
        let idle = (time - state.streamed).max(0.0);
        let stream = self.stream_before_wait(flow, room - state.arrived);
        state.arrived = (state.arrived + idle * stream).min(room);
        state.time = state.time.max(time);
        state.streamed = state.time;
    }

    fn aside(&self, work: &Work) -> Aside {
        let rates = &self.rates;
        let merge = |merged: u32, split_us: f64| match merged {
            0 => 0.0,
            splits => rates.merge_us + f64::from(splits) * split_us,
        };
        match *work {
            Work::Product { elements, merged, normed, .. } => Aside {
                before: (elements - TRIP_ELEMENTS).max(0.0) / 1024.0 * rates.vector_us
                    + merge(merged, rates.fused_split_us)
                    + if normed { POST_NORM_US } else { 0.0 },
                after: rates.task_us,
            },
            Work::Attention { .. } => Aside { before: rates.attention_us, after: 0.0 },
            Work::Merge { merged } => {
                Aside { before: merge(merged, rates.split_us), after: rates.small_us }
            }
            Work::Small => Aside { before: 0.0, after: rates.small_us },
            Work::Nothing => Aside { before: 0.0, after: 0.0 },
        }
    }

    /// Takes a task's stages from the ring: how long its products last, and how long of that they wait for stages. `mean`:
    /// bytes of its phase, of an average worker.
    fn multiply(&self, state: &mut WorkerState, work: &Work, flow: &Flow, mean: f64) -> (f64, f64) {
        let Some((bytes, consume, tail)) = self.consume(work, flow) else { return (0.0, 0.0) };
        let stream = self.stream_of(flow, mean / bytes);
        let needed = bytes / flow.payload;
        let missing = (needed - state.arrived).max(0.0);
        // The last stage is used after it has arrived.
        let us =
            if missing == 0.0 { consume } else { in_turn(consume - tail, missing / stream) + tail };
        // Attention frees its stages at its end, so that nothing arrives beyond what it lacked.
        let attention = matches!(work, Work::Attention { .. });
        let refill = if attention && missing == 0.0 { 0.0 } else { us * stream };
        state.arrived = (state.arrived + refill - needed).clamp(0.0, flow.ring);
        (us, us - consume)
    }

    /// Bytes that a task takes from the ring, the time to consume them once they have arrived, and the part of that for
    /// the last stage.
    fn consume(&self, work: &Work, flow: &Flow) -> Option<(f64, f64, f64)> {
        match *work {
            Work::Product { bytes, stages, tiles, .. } => {
                // Those in registers are multiplied at once; each further one is waited for, loaded and freed.
                let further = (stages - flow.taken).max(0.0);
                let second = if flow.taken > 1.0 { SECOND_STAGE_US } else { 0.0 };
                let us = bytes * flow.byte + further * flow.stage + tiles * flow.tile + second;
                Some((bytes, us, us / stages.max(1.0)))
            }
            Work::Attention { passes, bytes } => {
                let us = f64::from(passes) * self.rates.pass_us;
                Some((bytes, us, us / f64::from(passes.max(1))))
            }
            Work::Merge { .. } | Work::Small | Work::Nothing => None,
        }
    }

    /// Time of `trips` dependent trips through L2 to a worker with `free` stages free in its ring, whose last request
    /// arrives after `quiet`. Trips are slow while bytes are in flight; once the ring is full none are, and the remaining
    /// trips take their unloaded time.
    fn trips(&self, trips: f64, flow: &Flow, free: f64, quiet: f64) -> f64 {
        let idle = trips * self.rates.trip_us;
        let fill = quiet.max(free / self.stream_before_wait(flow, free));
        if fill <= 0.0 {
            return idle;
        }
        let in_flight = free.max(1.0).min(flow.before_wait) * flow.payload;
        let loaded = idle + trips * self.queue(in_flight);
        if fill >= loaded { loaded } else { fill + (1.0 - fill / loaded) * idle }
    }
}

/// Completion time of the last input of each kind.
#[derive(Clone, Copy, Default)]
struct Arrival {
    counter: Option<f64>,
    flag_in_data: Option<f64>,
}

impl FlagInData {
    fn arrival(&self, poll: &Poll) -> Option<f64> {
        let (first, last) = (poll.first as usize, poll.last as usize);
        if last - first == self.done.len() {
            return (self.have == self.done.len()).then_some(self.time);
        }
        self.done[first..last].iter().try_fold(0.0_f64, |max, done| Some(max.max((*done)?)))
    }
}
