//! The devices of a program.
//!
//! Workers are dealt to devices in order, the same number to each. Every device has an arena of the same layout, its own
//! counters, and its own copy of each buffer. A store to a *replicated* buffer goes to the copies of all devices; a store
//! to another buffer goes to that of the storing worker's device. Replicated words are flag-in-data words, so a reader
//! polls its own copy, and no counter is ever waited for across devices.
//!
//! A step ends on all devices together: their `sample` tasks exchange their best candidates, choose the same token, and
//! release everything before to everything after (rule O-STEP).

use serde::{Deserialize, Serialize};

use abi::{BufferKind, Opcode};

use super::Program;
use crate::id::{BufferId, WorkerId};

/// Most devices of a program.
pub const DEVICES_MAX: u32 = abi::DEVICES_MAX as u32;

/// How many devices run a program, and which buffers all of them have a whole copy of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Topology {
    /// Devices.
    pub devices: u32,
    /// Buffers whose stores go to every device, in ascending order.
    pub replicated: Vec<BufferId>,
}

impl Default for Topology {
    fn default() -> Self {
        Self { devices: 1, replicated: Vec::new() }
    }
}

impl Topology {
    /// Whether a store to this buffer goes to every device.
    #[must_use]
    pub fn is_replicated(&self, buffer: BufferId) -> bool {
        self.replicated.binary_search(&buffer).is_ok()
    }
}

impl Program {
    /// Workers of each device.
    #[must_use]
    pub fn workers_per_device(&self) -> usize {
        self.workers.len() / self.topology.devices.max(1) as usize
    }

    /// The device of a worker.
    #[must_use]
    pub fn device_of(&self, worker: WorkerId) -> u32 {
        (worker.index() / self.workers_per_device().max(1)) as u32
    }

    /// Whether the devices write one set of words between them: a replicated buffer, or the logits, of which each
    /// writes its own rows.
    pub(super) fn is_shared(&self, buffer: BufferId) -> bool {
        self.buffers[buffer.index()].kind == BufferKind::Logits
            || self.topology.is_replicated(buffer)
    }

    /// Whether every device has all words of each of these: of a replicated buffer, and of a route, which each chooses itself.
    #[must_use]
    pub fn each_has_whole(&self, buffers: &[BufferId]) -> bool {
        let tasks = || self.workers.iter().flat_map(|worker| &worker.tasks);
        let chosen =
            |id| tasks().any(|t| t.opcode == Opcode::Route && t.writes.contains(&Some(id)));
        self.topology.devices == 1
            || buffers.iter().all(|&id| self.topology.is_replicated(id) || chosen(id))
    }

    /// The words that a task of `device` reads as `buffer`, as a number: those of its device, or those of all.
    pub(super) fn instance(&self, device: u32, buffer: BufferId) -> usize {
        let device = if self.is_shared(buffer) { 0 } else { device as usize };
        device * self.buffers.len() + buffer.index()
    }
}
