//! Each word of a buffer is written exactly once per step, and every read is ordered after that write.
//!
//! Relies on valid tasks: regions lie inside their buffers.

use abi::BufferKind;

use crate::id::{BufferId, WorkerId};
use crate::program::{Program, Region, accesses};
use crate::violation::{At, Rule, Violations};

use super::order::Order;
use super::{buffer_name, tasks};

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

/// The writes of each buffer, sorted by first word.
pub(super) struct Writes(Vec<Vec<Write>>);

impl Writes {
    pub(super) fn new(program: &Program) -> Self {
        let mut buffers = vec![Vec::new(); program.buffers.len()];
        for ((_, task), number) in tasks(program).zip(0_u32..) {
            for Region { buffer, start, end } in accesses(program, task).writes {
                buffers[buffer.index()].push(Write { start, end, task: number });
            }
        }
        buffers.iter_mut().for_each(|writes| writes.sort_unstable());
        Self(buffers)
    }

    fn writes_in(&self, region: Region) -> impl Iterator<Item = Write> + '_ {
        let writes = &self.0[region.buffer.index()];
        let first = writes.partition_point(|write| write.end <= region.start);
        writes[first..].iter().take_while(move |write| write.start < region.end).copied()
    }

    /// Tasks that write some word of the region. No word is written twice, so these are neighbours in the list.
    pub(super) fn writers(&self, region: Region) -> impl Iterator<Item = u32> + '_ {
        self.writes_in(region).map(|write| write.task)
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
    for ((writes, buffer), used) in Writes::new(program).0.iter().zip(0..).zip(used) {
        let buffer = BufferId(buffer);
        // Writes to a cache are checked by the attention rules.
        if used && program.buffers[buffer.index()].kind != BufferKind::KvCache {
            twice(program, buffer, writes, &places, found);
            covered(program, buffer, writes, found);
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
            let unordered = writes.writes_in(region).find(|write| {
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
