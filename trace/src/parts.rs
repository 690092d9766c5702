//! The parts of each task of a step: what its time went to, by cause, and what replay puts together again.

use crate::attribution::Cause;
use crate::timeline::{Task, Timeline};

/// The causes that are parts of a task, in its order.
pub(crate) const PARTS: [Cause; 7] = [
    Cause::Issue,
    Cause::Look,
    Cause::HandOff,
    Cause::Staging,
    Cause::Products,
    Cause::Starved,
    Cause::Output,
];

/// Those of them that begin when its input has arrived.
pub(crate) const OWN: [Cause; 4] = [Cause::Staging, Cause::Products, Cause::Starved, Cause::Output];

/// Nanoseconds of a task's parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parts([f64; PARTS.len()]);

impl Parts {
    pub(crate) fn get(&self, cause: Cause) -> f64 {
        self.0[place(cause)]
    }

    pub(crate) fn get_mut(&mut self, cause: Cause) -> &mut f64 {
        &mut self.0[place(cause)]
    }
}

fn place(cause: Cause) -> usize {
    PARTS.iter().position(|&part| part == cause).expect("a part of a task")
}

/// The parts of each task as recorded.
///
/// A hand-off is recorded where a task waited for it: it is the time from the end of its last producer to the arrival.
/// Where the input had been there for a while, the recorded difference says nothing of the hand-off; the middle one of
/// the same op stands in, as far as the record allows: neither the look nor the hand-off may end after the arrival.
pub(crate) fn recorded(timeline: &Timeline) -> Vec<Parts> {
    let of = |(index, task): (usize, &Task)| {
        // Clocks of two workers may put a producer's end after the arrival: then the room is negative.
        let last = task.producer.map_or(timeline.start, |of| timeline.tasks[of].end);
        let room = (task.arrived as i64 - last as i64) as f64; // absolute times have more digits than an f64
        let own = task.arrived - task.begin;
        let usual = timeline.usual(task);
        let (look, hop) = match timeline.hand_off(index) {
            Some(hop) => (usual.look.min(own), hop as f64),
            None => (own, room.min(usual.hand_off as f64)),
        };
        let starved = task.starved.min(task.multiplied - task.staged);
        Parts([
            (task.begin - timeline.free(index)) as f64,
            look as f64,
            hop,
            (task.staged - task.arrived) as f64,
            (task.multiplied - task.staged - starved) as f64,
            starved as f64,
            (task.end - task.multiplied) as f64,
        ])
    };
    timeline.tasks.iter().enumerate().map(of).collect()
}
