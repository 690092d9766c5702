//! The pairs of tasks that `verify` exists to exclude: they touch the same bytes, one of them writes, and nothing orders them.

use std::collections::BTreeMap;

use abi::SlotKind;

use crate::id::{SlotId, WorkerId};
use crate::program::{Accesses, Program, Region, accesses};

use super::memory::AddressMap;
use super::order::Order;
use super::tasks;

/// Pairs that are told; a wait that is missing in one place gives many.
const PAIRS_MAX: usize = 64;

/// Looks at pairs of accesses at most.
const WORK_MAX: u64 = 1 << 26;

/// Two tasks, both by worker and index in its queue, that no order parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unordered {
    /// The one that writes.
    pub writer: (WorkerId, u32),
    /// The other one.
    pub other: (WorkerId, u32),
    /// The slot that is written.
    pub slot: SlotId,
    /// First word of it that both touch.
    pub start: u32,
    /// One past the last of the first run of such words.
    pub end: u32,
}

/// An access to a piece of memory.
#[derive(Clone, Copy)]
struct Touch<'a> {
    task: u32,
    region: &'a Region,
    writes: bool,
}

/// See [`unordered`](crate::program::unordered).
pub(in crate::program) fn unordered(program: &Program, order: &Order) -> Vec<Unordered> {
    let touched: Vec<Accesses> = tasks(program).map(|(_, task)| accesses(program, task)).collect();
    let map = AddressMap::new(program);
    let mut place = vec![0_usize; order.len()];
    order.sequence().iter().enumerate().for_each(|(at, &task)| place[task as usize] = at);
    let apart =
        |a: u32, b: u32| a != b && !order.happens_before(a, b) && !order.happens_before(b, a);
    let mut pairs: BTreeMap<(usize, u32, u32), Unordered> = BTreeMap::new();
    let mut work = 0;
    for (bytes, piece) in pieces(&map, &touched) {
        let writes = piece.iter().filter(|touch| touch.writes);
        for (write, other) in writes.flat_map(|write| piece.iter().map(move |other| (write, other)))
        {
            work += 1;
            let polled = !other.writes && is_polled(program, write.region, other.region);
            let told = other.writes && other.task < write.task;
            if polled || told || !apart(write.task, other.task) {
                continue;
            }
            let (start, end) = map.words(write.region.slot, bytes);
            let unordered = Unordered {
                writer: order.place(write.task),
                other: order.place(other.task),
                slot: write.region.slot,
                start,
                end,
            };
            pairs.entry((place[write.task as usize], write.task, other.task)).or_insert(unordered);
        }
        if work > WORK_MAX {
            break;
        }
    }
    pairs.into_values().take(PAIRS_MAX).collect()
}

/// A reader of tagged words waits for the words themselves.
fn is_polled(program: &Program, write: &Region, read: &Region) -> bool {
    let same = write.slot == read.slot && write.generation == read.generation;
    same && program.slots[read.slot.index()].kind == SlotKind::Tagged
}

/// The runs of bytes that no access splits further, each with who touches it.
fn pieces<'a>(
    map: &AddressMap,
    touched: &'a [Accesses],
) -> impl Iterator<Item = ((u64, u64), Vec<Touch<'a>>)> {
    let all = touched.iter().zip(0_u32..).flat_map(|(accesses, task)| {
        let reads = accesses.reads.iter().map(move |region| Touch { task, region, writes: false });
        let writes = accesses.writes.iter().map(move |region| Touch { task, region, writes: true });
        reads.chain(writes)
    });
    let all: Vec<(Touch<'a>, (u64, u64))> =
        all.filter_map(|touch| Some((touch, map.bytes(touch.region)?))).collect();
    let mut cuts: Vec<u64> = all.iter().flat_map(|(_, (start, end))| [*start, *end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut by_piece: Vec<Vec<Touch<'a>>> = vec![Vec::new(); cuts.len()];
    for (touch, (start, end)) in all {
        let find = |byte: u64| cuts.partition_point(|&cut| cut < byte);
        by_piece[find(start)..find(end)].iter_mut().for_each(|piece| piece.push(touch));
    }
    let ends: Vec<(u64, u64)> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
    ends.into_iter().zip(by_piece)
}
