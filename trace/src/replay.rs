//! What-if: the recorded step again with parts of it changed.
//!
//! Each task keeps the lengths of its parts as recorded; its begin and its input follow from the tasks before it. With
//! no edit every time is as recorded, to the nanosecond (`identity_is_exact`). What an edit does not model: a schedule
//! with other tasks, and bytes in flight that change the time of a hand-off.

use crate::attribution::Cause;
use crate::parts::{OWN, Parts, recorded};
use crate::timeline::Timeline;

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

impl Edit {
    /// Reads `hop=0.5,stream=2x,op.attention=0,balance=perfect`; the ops are those of `names`.
    ///
    /// # Errors
    /// All that is wrong with it, one sentence each.
    pub fn parse(text: &str, names: &[String]) -> Result<Self, String> {
        let (mut edit, mut wrong) = (Self::default(), Vec::new());
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            let factor = value.strip_suffix('x').unwrap_or(value).parse::<f64>().ok();
            let factor = factor.filter(|factor| (0.0..=1000.0).contains(factor));
            match (key, factor) {
                ("hop", Some(factor)) => edit.hop = factor,
                ("stream", Some(factor)) if factor > 0.0 => edit.stream = factor,
                ("balance", _) if value == "perfect" => edit.balanced = true,
                _ => match (key.strip_prefix("op."), factor) {
                    (Some(op), Some(factor)) => match names.iter().position(|name| name == op) {
                        Some(place) => edit.ops.push((place, factor)),
                        None => wrong.push(format!("no op `{op}`; there are {}", names.join(", "))),
                    },
                    _ => wrong.push(format!(
                        "`{item}` is no edit: write hop=FACTOR, stream=FACTOR, op.NAME=FACTOR (0 to 1000) or balance=perfect"
                    )),
                },
            }
        }
        if wrong.is_empty() { Ok(edit) } else { Err(wrong.join("; ")) }
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

/// Replays a recorded step with an edit.
#[must_use]
pub fn replay(timeline: &Timeline, edit: &Edit) -> Replayed {
    run(timeline, &edited(timeline, edit))
}

/// The step of which each task has these parts.
pub(crate) fn run(timeline: &Timeline, parts: &[Parts]) -> Replayed {
    let tasks = &timeline.tasks;
    let mut ends = vec![0.0_f64; tasks.len()];
    for &index in timeline.order.iter() {
        let task = index as usize;
        let part = |cause| parts[task].get(cause);
        let free = timeline.previous(task).map_or(0.0, |previous| ends[previous]);
        let looked = free + part(Cause::Issue) + part(Cause::Look);
        let inputs = tasks[task].dependencies.iter().map(|&of| ends[of as usize]);
        let hop = part(Cause::HandOff);
        let arrived = inputs.fold(looked, |latest, end| latest.max(end + hop));
        ends[task] = arrived + OWN.iter().map(|&cause| part(cause)).sum::<f64>();
    }
    let last = tasks.iter().map(|task| task.end).max().unwrap_or(timeline.start);
    let boundary = (timeline.end - last) as f64;
    let span = ends.iter().copied().fold(0.0, f64::max) + boundary;
    Replayed { span, ends }
}

fn edited(timeline: &Timeline, edit: &Edit) -> Vec<Parts> {
    let mut parts = recorded(timeline);
    let tasks = &timeline.tasks;
    if edit.balanced {
        balance(timeline, &mut parts);
    }
    for (part, task) in parts.iter_mut().zip(tasks) {
        *part.get_mut(Cause::HandOff) *= edit.hop;
        *part.get_mut(Cause::Starved) /= edit.stream;
        for &(_, factor) in edit.ops.iter().filter(|(name, _)| *name == task.name) {
            OWN.iter().for_each(|&cause| *part.get_mut(cause) *= factor);
        }
    }
    parts
}

/// Gives each worker the mean of the time that a phase of a layer takes on the workers.
fn balance(timeline: &Timeline, parts: &mut [Parts]) {
    const WORK: [Cause; 3] = [Cause::Products, Cause::Starved, Cause::Output];
    let tasks = &timeline.tasks;
    let workers = timeline.workers.len() as f64;
    let mut all = rustc_hash::FxHashMap::<(u16, usize), f64>::default();
    let mut own = rustc_hash::FxHashMap::<(u16, usize, u32), f64>::default();
    for (part, task) in parts.iter().zip(tasks) {
        let time = WORK.iter().map(|&cause| part.get(cause)).sum::<f64>();
        *all.entry((task.layer, task.name)).or_default() += time;
        *own.entry((task.layer, task.name, task.worker)).or_default() += time;
    }
    for (part, task) in parts.iter_mut().zip(tasks) {
        let mean = all[&(task.layer, task.name)] / workers;
        let own = own[&(task.layer, task.name, task.worker)];
        let factor = if own > 0.0 { mean / own } else { 1.0 };
        WORK.iter().for_each(|&cause| *part.get_mut(cause) *= factor);
    }
}
