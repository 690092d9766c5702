//! Each word of a buffer is written exactly once per step, and every read is ordered after that write.
//!
//! Relies on valid tasks: regions lie inside their buffers.

use abi::{BufferKind, Opcode};

use crate::id::{BufferId, WorkerId};
use crate::kv::KvDtype;
use crate::program::{Program, Region, accesses};
use crate::violation::{At, Rule, Violations};

use super::order::Order;
use super::{buffer_name, on_devices, tasks};

/// Most runs of words that tasks access, in total.
const REGIONS_MAX: usize = 1 << 22;

/// Most pairs of a read and a write that `verify` examines. A 70B program has a hundredth of them.
const PAIRS_MAX: usize = 1 << 28;

/// Most unordered pairs that are reported; one missing wait gives many.
const UNORDERED_MAX: usize = 64;

/// A task that reads what another one writes, with no happens-before between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unordered {
    /// The writer: worker, and index in its queue.
    pub writer: (WorkerId, u32),
    /// The reader.
    pub reader: (WorkerId, u32),
    /// The buffer.
    pub buffer: BufferId,
    /// First word of the buffer that both access.
    pub start: u32,
    /// One past the last.
    pub end: u32,
}

/// A run of words of a buffer and the task that writes it; tasks are numbered as in [`Order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Write {
    start: u32,
    end: u32,
    task: u32,
}

/// The writes of each buffer on each device (see [`Program::instance`]), sorted by first word.
pub(super) struct Writes<'a>(&'a Program, Vec<Vec<Write>>);

impl<'a> Writes<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        let mut buffers =
            vec![Vec::new(); program.buffers.len() * program.topology.devices as usize];
        for ((device, task), number) in on_devices(program).zip(0_u32..) {
            for Region { buffer, start, end } in accesses(program, task).writes {
                buffers[program.instance(device, buffer)].push(Write { start, end, task: number });
            }
        }
        buffers.iter_mut().for_each(|writes| writes.sort_unstable());
        Self(program, buffers)
    }

    fn writes_in(&self, device: u32, region: Region) -> impl Iterator<Item = Write> + '_ {
        let writes = &self.1[self.0.instance(device, region.buffer)];
        let first = writes.partition_point(|write| write.end <= region.start);
        writes[first..].iter().take_while(move |write| write.start < region.end).copied()
    }

    /// Tasks that write some word of the region as a task of `device` reads it. No word is written twice, so these are
    /// neighbours in the list.
    pub(super) fn writers(&self, device: u32, region: Region) -> impl Iterator<Item = u32> + '_ {
        self.writes_in(device, region).map(|write| write.task)
    }
}

/// Checks that every word of each buffer in use is written, by exactly one task.
pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    let mut used = vec![false; program.buffers.len()];
    let mut regions = 0;
    for (_, task) in tasks(program) {
        let touched = accesses(program, task);
        regions += touched.reads.len() + touched.writes.len();
        for region in touched.reads.iter().chain(&touched.writes) {
            used[region.buffer.index()] = true;
        }
    }
    if regions > REGIONS_MAX {
        let detail = format!("tasks touch {regions} runs of words, more than {REGIONS_MAX}");
        return found.push(Rule::PLimit, At::Whole, detail);
    }
    let places: Vec<At> = tasks(program).map(|(at, _)| at).collect();
    let all = Writes::new(program);
    for (instance, writes) in all.1.iter().enumerate() {
        let device = (instance / program.buffers.len()) as u32;
        let buffer = BufferId((instance % program.buffers.len()) as u32);
        // Writes to a cache are checked by the attention rules.
        let checked = used[buffer.index()]
            && KvDtype::of_buffer(program.buffers[buffer.index()].kind).is_none()
            && program.instance(device, buffer) == instance;
        if checked {
            twice(program, buffer, writes, &places, found);
            // One of several devices may write a part of its copy: rule D-LOCAL.
            if program.topology.devices == 1 || program.is_shared(buffer) {
                covered(program, buffer, writes, found);
            }
        }
    }
    if program.topology.devices > 1 {
        local(program, &all, found);
    }
}

/// Checks that each task of several devices reads words that its own device writes, or that all have, and that `sample`
/// reads all candidates of its device.
fn local(program: &Program, all: &Writes<'_>, found: &mut Violations) {
    for ((device, task), (at, _)) in on_devices(program).zip(tasks(program)) {
        for region in accesses(program, task).reads {
            let name = buffer_name(program, region.buffer);
            let mut next = region.start;
            for write in all.writes_in(device, region).filter(|write| write.end > region.start) {
                if write.start > next {
                    break;
                }
                next = next.max(write.end);
            }
            if next < region.end {
                let detail =
                    format!("reads word {next} of {name}, which no task of device {device} writes");
                found.push(Rule::DLocal, at.clone(), detail);
            }
            let whole = Region { start: 0, end: u32::MAX, ..region };
            let last = all.writes_in(device, whole).map(|write| write.end).max();
            if task.opcode == Opcode::Sample && last.is_some_and(|last| last > region.end) {
                let detail =
                    format!("reads {} words of {name}, device {device} writes more", region.end);
                found.push(Rule::DLocal, at.clone(), detail);
            }
        }
    }
}

fn twice(
    program: &Program,
    buffer: BufferId,
    writes: &[Write],
    places: &[At],
    found: &mut Violations,
) {
    for pair in writes.windows(2).filter(|pair| pair[1].start < pair[0].end) {
        let (start, end) = (pair[1].start, pair[0].end.min(pair[1].end));
        let name = buffer_name(program, buffer);
        let first = &places[pair[0].task as usize];
        let detail = format!("words {start}..{end} of {name} are written by {first} too");
        found.push(Rule::RWriter, places[pair[1].task as usize].clone(), detail);
    }
}

fn covered(program: &Program, buffer: BufferId, writes: &[Write], found: &mut Violations) {
    let words = program.buffers[buffer.index()].words;
    let mut next = 0;
    for write in writes.iter().chain(&[Write { start: words, end: words, task: 0 }]) {
        if write.start > next {
            let name = buffer_name(program, buffer);
            let detail = format!("no task writes words {next}..{} of {name}", write.start);
            return found.push(Rule::TCover, At::Buffer(buffer), detail);
        }
        next = next.max(write.end);
    }
}

/// Checks that every read is ordered after the writes that it reads. A reader of flag-in-data words polls these words
/// itself.
pub(in crate::program) fn check_order(program: &Program, order: &Order, found: &mut Violations) {
    let places: Vec<At> = tasks(program).map(|(at, _)| at).collect();
    let looked = unordered_reads(program, order, |reader, write, region| {
        let name = buffer_name(program, region.buffer);
        let detail = format!(
            "reads words {}..{} of {name}, written by {}, and is not ordered after it",
            region.start, region.end, places[write.task as usize]
        );
        found.push(Rule::RHappens, places[reader as usize].clone(), detail);
    });
    if looked > PAIRS_MAX {
        let detail = format!("tasks read the words of more than {PAIRS_MAX} writes");
        found.push(Rule::PLimit, At::Whole, detail);
    }
}

/// See [`unordered`](crate::program::unordered).
pub(in crate::program) fn unordered(program: &Program, order: &Order) -> Vec<Unordered> {
    let mut pairs = Vec::new();
    unordered_reads(program, order, |reader, write, region| {
        if pairs.len() < UNORDERED_MAX {
            pairs.push(Unordered {
                writer: order.place(write.task),
                reader: order.place(reader),
                buffer: region.buffer,
                start: region.start.max(write.start),
                end: region.end.min(write.end),
            });
        }
    });
    pairs
}

/// Calls `tell` with each read that is not ordered after its first such writer, in an order in which a single worker
/// would reach the readers. Returns the number of pairs examined; stops after [`PAIRS_MAX`].
fn unordered_reads(
    program: &Program,
    order: &Order,
    mut tell: impl FnMut(u32, Write, Region),
) -> usize {
    let writes = Writes::new(program);
    let mut looked = 0;
    for &reader in order.sequence() {
        let (worker, index) = order.place(reader);
        let task = &program.workers[worker.index()].tasks[index as usize];
        let plain =
            |region: &Region| program.buffers[region.buffer.index()].kind != BufferKind::FlagInData;
        for region in accesses(program, task).reads.into_iter().filter(plain) {
            let device = program.device_of(worker);
            let unordered = writes.writes_in(device, region).find(|write| {
                looked += 1;
                !order.happens_before(write.task, reader)
            });
            if let Some(write) = unordered {
                tell(reader, write, region);
            }
        }
        if looked > PAIRS_MAX {
            break;
        }
    }
    looked
}
