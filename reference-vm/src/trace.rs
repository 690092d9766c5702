//! A trace of each task's stores in a step, in the order in which the machine ran them.

use ir::{BufferId, WorkerId};

/// A task that ran.
#[derive(Clone, Debug)]
pub struct Fired {
    /// Its worker.
    pub worker: WorkerId,
    /// Its index in the worker's queue.
    pub task: u32,
    /// Its stores, as a reader sees them.
    pub writes: Vec<Stored>,
    /// The appended key and value.
    pub appended: Option<Appended>,
    /// The chosen token.
    pub chosen: Option<u32>,
}

impl Fired {
    /// A task that was run by another executor, such as a device.
    #[must_use]
    pub fn elsewhere(worker: WorkerId, task: u32, writes: Vec<Stored>) -> Self {
        Self { worker, task, writes, appended: None, chosen: None }
    }
}

/// Words of a buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The buffer.
    pub buffer: BufferId,
    /// First word.
    pub start: u32,
    /// The words.
    pub values: Vec<f32>,
}

/// Key and value of one head at the step's position.
#[derive(Clone, Debug, PartialEq)]
pub struct Appended {
    /// The key/value head.
    pub kv_head: u32,
    /// The key, after norm and rotation.
    pub key: Vec<f32>,
    /// The value.
    pub value: Vec<f32>,
}
