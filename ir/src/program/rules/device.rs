//! Device rules: workers are dealt to devices evenly, replicated buffers hold flag-in-data words, and the key/value cache
//! of a head is on one device.

use abi::{AttentionParams, BufferKind, Opcode};
use rustc_hash::FxHashMap;

use crate::id::BufferId;
use crate::program::topology::DEVICES_MAX;
use crate::program::{Program, Topology};
use crate::violation::{At, Rule, Violations};

use super::{buffer_name, on_devices, tasks};

/// Checks the numbers. Nothing else may be computed from a topology before.
pub(in crate::program) fn limits(program: &Program, found: &mut Violations) {
    let (devices, workers) = (program.topology.devices, program.workers.len());
    if !(1..=DEVICES_MAX).contains(&devices) {
        let detail = format!("number of devices is {devices}, not within 1..={DEVICES_MAX}");
        found.push(Rule::PLimit, At::Whole, detail);
    } else if !workers.is_multiple_of(devices as usize) {
        let detail = format!("{workers} workers do not divide among {devices} devices");
        found.push(Rule::PLimit, At::Whole, detail);
    }
}

/// Checks the list of replicated buffers. A reader on another device can only poll: it shares no counter with the writer.
pub(in crate::program) fn replicas(program: &Program, found: &mut Violations) {
    let Topology { devices, replicated } = &program.topology;
    if !replicated.is_sorted_by(|a, b| a < b) {
        found.push(Rule::DReplica, At::Whole, "replicated buffers are not in ascending order");
    }
    for &buffer in replicated {
        let wrong = match program.buffers.get(buffer.index()) {
            None => format!("there is no buffer {buffer}"),
            Some(of) if of.kind != BufferKind::FlagInData => {
                format!("{} is replicated and {}", of.name, of.kind.name())
            }
            Some(of) if *devices == 1 => format!("{} is replicated on one device", of.name),
            Some(_) => continue,
        };
        found.push(Rule::DReplica, At::Buffer(buffer), wrong);
    }
}

/// Checks that all splits of a head are attended on one device: each device reads its own cache.
pub(in crate::program) fn heads(program: &Program, found: &mut Violations) {
    let mut homes: FxHashMap<(BufferId, u32), u32> = FxHashMap::default();
    for ((device, task), (at, _)) in on_devices(program).zip(tasks(program)) {
        if task.opcode != Opcode::Attention {
            continue;
        }
        let AttentionParams { kv_head, .. } = task.params();
        let Some(cache) = task.writes[1] else { continue };
        let home = *homes.entry((cache, kv_head)).or_insert(device);
        if home != device {
            let name = buffer_name(program, cache);
            let detail = format!("head {kv_head} of {name} is on device {home}, not {device}");
            found.push(Rule::DHead, at, detail);
        }
    }
}
