//! The program rules: one family per file, each rule a function. `verify` runs them in stages. A family may rely on
//! what earlier stages proved, and its comment states that.

pub(super) mod attention;
pub(super) mod buffer;
pub(super) mod counter;
pub(super) mod device;
pub(super) mod limit;
pub(super) mod matrix;
pub(super) mod order;
pub(super) mod route;
pub(super) mod task;
pub(super) mod words;

use crate::id::{BufferId, WorkerId};
use crate::program::{Program, Task};
use crate::violation::At;

pub(super) fn at(worker: usize, index: usize) -> At {
    At::Task(WorkerId(worker as u32), index as u32)
}

pub(super) fn tasks(program: &Program) -> impl Iterator<Item = (At, &Task)> {
    program.workers.iter().enumerate().flat_map(|(w, worker)| {
        worker.tasks.iter().enumerate().map(move |(i, task)| (at(w, i), task))
    })
}

/// Every task with its device, in the order of [`tasks`].
pub(super) fn on_devices(program: &Program) -> impl Iterator<Item = (u32, &Task)> {
    program.workers.iter().zip(0..).flat_map(|(worker, w)| {
        let device = program.device_of(WorkerId(w));
        worker.tasks.iter().map(move |task| (device, task))
    })
}

/// A buffer's name in messages: `s3 (layers.0.h)`.
pub(super) fn buffer_name(program: &Program, buffer: BufferId) -> String {
    match program.buffers.get(buffer.index()) {
        Some(s) => format!("{buffer} ({})", s.name),
        None => format!("{buffer}"),
    }
}

/// The buffers that a task names, reads first.
pub(super) fn named(task: &Task) -> impl Iterator<Item = BufferId> {
    task.reads.iter().chain(&task.writes).copied().flatten()
}
