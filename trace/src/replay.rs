//! What-if: the recorded step again with parts of it changed.
//!
//! Each task keeps the lengths of its parts as recorded; its begin and its input follow from the tasks before it. With
//! no edit every time is as recorded, to the nanosecond (`identity_is_exact`). What an edit does not model: a schedule
//! with other tasks, and bytes in flight that change the time of a hand-off.

use crate::timeline::{Task, Timeline};

/// What to change. Factors of one change nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Edit {
    /// Factor of every hand-off, from the last producer's end to the arrival of the input.
    pub hop: f64,
    /// Speed of the stream: the time that products waited for bytes is divided by it.
    pub stream: f64,
    /// Factors of the products and output of an op, by its index in the timeline's names.
    pub ops: Vec<(usize, f64)>,
    /// Every task of a phase takes the mean of its phase: no worker is later than another by its share of the work.
    pub balanced: bool,
}

impl Default for Edit {
    fn default() -> Self {
        Self { hop: 1.0, stream: 1.0, ops: Vec::new(), balanced: false }
    }
}

/// The replayed step.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// Nanoseconds from the start to the end of the last task, and the boundary after it as recorded.
    pub span: f64,
    /// The end of each task, from the start of the step.
    pub ends: Vec<f64>,
}

/// Lengths of a task's parts in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    gap: f64,
    look: f64,
    hop: f64,
    staging: f64,
    products: f64,
    starved: f64,
    output: f64,
}

/// Replays a recorded step with an edit.
#[must_use]
pub fn replay(timeline: &Timeline, edit: &Edit) -> Replayed {
    let parts = edited(timeline, edit);
    let tasks = &timeline.tasks;
    let mut ends = vec![0.0_f64; tasks.len()];
    for &index in &timeline.order {
        let task = index as usize;
        let Parts { gap, look, hop, staging, products, starved, output } = parts[task];
        let free = timeline.previous(task).map_or(0.0, |previous| ends[previous]) + gap;
        let inputs = tasks[task].dependencies.iter().map(|&of| ends[of as usize]);
        let arrived = inputs.fold(free + look, |latest, end| latest.max(end + hop));
        ends[task] = arrived + staging + starved + products + output;
    }
    let last = tasks.iter().map(|task| task.end).max().unwrap_or(timeline.start);
    let boundary = (timeline.end - last) as f64;
    let span = ends.iter().copied().fold(0.0, f64::max) + boundary;
    Replayed { span, ends }
}

/// The parts of each task as recorded.
///
/// A hand-off is recorded where a task waited for it: it is the time from the end of its last producer to the arrival.
/// Where the input had been there for a while, the recorded difference says nothing of the hand-off; the middle one of
/// the same op stands in, as far as the record allows: neither the look nor the hand-off may end after the arrival.
fn recorded(timeline: &Timeline) -> Vec<Parts> {
    let mut hops: Vec<Vec<u64>> = vec![Vec::new(); timeline.names.len()];
    let mut looks: Vec<Vec<u64>> = vec![Vec::new(); timeline.names.len()];
    for (index, task) in timeline.tasks.iter().enumerate() {
        match timeline.hand_off(index) {
            Some(hop) => hops[task.name].push(hop),
            None => looks[task.name].push(task.arrived - task.begin),
        }
    }
    let middle = |all: &mut Vec<u64>| {
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    };
    let hops: Vec<u64> = hops.iter_mut().map(middle).collect();
    let looks: Vec<u64> = looks.iter_mut().map(middle).collect();
    let of = |(index, task): (usize, &Task)| {
        let last = task.producer.map(|of| timeline.tasks[of].end);
        let room = last.map_or(0, |end| task.arrived.saturating_sub(end));
        let own = task.arrived - task.begin;
        let (look, hop) = match timeline.hand_off(index) {
            Some(hop) => (looks[task.name].min(own), hop),
            None => (own, hops[task.name].min(room)),
        };
        let starved = task.starved.min(task.multiplied - task.staged);
        Parts {
            gap: (task.begin - timeline.free(index)) as f64,
            look: look as f64,
            hop: hop as f64,
            staging: (task.staged - task.arrived) as f64,
            products: (task.multiplied - task.staged - starved) as f64,
            starved: starved as f64,
            output: (task.end - task.multiplied) as f64,
        }
    };
    timeline.tasks.iter().enumerate().map(of).collect()
}

fn edited(timeline: &Timeline, edit: &Edit) -> Vec<Parts> {
    let mut parts = recorded(timeline);
    let tasks = &timeline.tasks;
    if edit.balanced {
        balance(timeline, &mut parts);
    }
    for (part, task) in parts.iter_mut().zip(tasks) {
        part.hop *= edit.hop;
        part.starved /= edit.stream;
        for &(_, factor) in edit.ops.iter().filter(|(name, _)| *name == task.name) {
            part.staging *= factor;
            part.products *= factor;
            part.starved *= factor;
            part.output *= factor;
        }
    }
    parts
}

/// Gives each worker the mean of the time that a phase of a layer takes on the workers.
fn balance(timeline: &Timeline, parts: &mut [Parts]) {
    let tasks = &timeline.tasks;
    let workers = timeline.workers.len() as f64;
    let mut all = rustc_hash::FxHashMap::<(u16, usize), f64>::default();
    let mut own = rustc_hash::FxHashMap::<(u16, usize, u32), f64>::default();
    let time = |part: &Parts| part.products + part.starved + part.output;
    for (part, task) in parts.iter().zip(tasks) {
        *all.entry((task.layer, task.name)).or_default() += time(part);
        *own.entry((task.layer, task.name, task.worker)).or_default() += time(part);
    }
    for (part, task) in parts.iter_mut().zip(tasks) {
        let mean = all[&(task.layer, task.name)] / workers;
        let own = own[&(task.layer, task.name, task.worker)];
        let factor = if own > 0.0 { mean / own } else { 1.0 };
        part.products *= factor;
        part.starved *= factor;
        part.output *= factor;
    }
}
