//! Every access to every byte, in the order of the tasks: reads find their writes, conflicting accesses are ordered.
//!
//! The bytes of the arena and the words of the logits are cut at every border of an access. Each such piece remembers its last writer
//! and who has touched it since. Two accesses conflict when they touch the same piece and one writes.

use abi::SlotKind;

use crate::id::SlotId;
use crate::program::rules::order::{Order, WriteIndex};
use crate::program::{Accesses, Program, Region, accesses};
use crate::violation::{At, Rule, Violations};

use super::{slot_name, tasks};

/// Visits of pieces that `verify` is willing to make. A 70B program makes a hundredth of them.
const WORK_MAX: u64 = 1 << 28;

/// Where logits begin: beyond every arena.
const LOGITS_BASE: u64 = 1 << 40;

pub(in crate::program) fn check(program: &Program, order: &Order, found: &mut Violations) {
    let touched: Vec<Accesses> = tasks(program).map(|(_, task)| accesses(program, task)).collect();
    let map = AddressMap::new(program);
    let mut memory = Memory::new(program, order, &map, &touched);
    for &task in order.sequence() {
        let Accesses { reads, writes } = &touched[task as usize];
        memory.overlap(task, reads, writes, found);
        for region in reads {
            memory.read(task, region, found);
        }
        for region in writes {
            memory.write(task, region, found);
        }
        if memory.work > WORK_MAX {
            found.push(
                Rule::PLimit,
                At::Whole,
                format!("accesses cut the slots into too many pieces (over {WORK_MAX} visits)"),
            );
            return;
        }
    }
    memory.coverage(&touched, found);
}

/// Where the words of each slot lie.
pub(super) struct AddressMap {
    /// First byte and bytes of a word.
    slots: Vec<Option<(u64, u64)>>,
}

impl AddressMap {
    pub(super) fn new(program: &Program) -> Self {
        let mut logits = LOGITS_BASE;
        let slots = program
            .slots
            .iter()
            .map(|slot| match slot.kind {
                SlotKind::Plain | SlotKind::Tagged => Some((slot.offset, 4)),
                SlotKind::Logits => {
                    let base = logits;
                    logits += u64::from(slot.words) * 4;
                    Some((base, 4))
                }
                SlotKind::Constant | SlotKind::KvCache | SlotKind::Embedding => None,
            })
            .collect();
        Self { slots }
    }

    /// The bytes of a region; caches and constants have rules of their own.
    pub(super) fn bytes(&self, region: &Region) -> Option<(u64, u64)> {
        let (base, word) = self.slots[region.slot.index()]?;
        Some((base + u64::from(region.start) * word, base + u64::from(region.end) * word))
    }

    /// The words of a slot that lie in these bytes.
    pub(super) fn words(&self, slot: SlotId, (start, end): (u64, u64)) -> (u32, u32) {
        let (base, word) = self.slots[slot.index()].unwrap_or((0, 4));
        let place = |byte: u64| (byte.saturating_sub(base) / word) as u32;
        (place(start), place(end))
    }
}

/// The last write to a piece.
#[derive(Clone, Copy)]
struct Write {
    task: u32,
    slot: SlotId,
    generation: u16,
}

#[derive(Clone, Default)]
struct Piece {
    writer: Option<Write>,
    /// Whether anything has read the last write.
    read: bool,
    /// Tasks that must be over before the next write: the last writer, and who has read since.
    pending: Vec<u32>,
    /// Tagged writes of this step.
    tags: Vec<(SlotId, u16)>,
}

struct Memory<'a> {
    program: &'a Program,
    order: &'a Order,
    map: &'a AddressMap,
    cuts: Vec<u64>,
    pieces: Vec<Piece>,
    writers: WriteIndex,
    work: u64,
}

impl<'a> Memory<'a> {
    fn new(
        program: &'a Program,
        order: &'a Order,
        map: &'a AddressMap,
        touched: &[Accesses],
    ) -> Self {
        let mut cuts: Vec<u64> = Vec::new();
        let mut writers = WriteIndex::default();
        for (accesses, task) in touched.iter().zip(0_u32..) {
            for region in accesses.reads.iter().chain(&accesses.writes) {
                if let Some((start, end)) = map.bytes(region) {
                    cuts.extend([start, end]);
                }
            }
            for region in &accesses.writes {
                writers.entry((region.slot, region.generation)).or_default().push((
                    region.start,
                    region.end,
                    task,
                ));
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        let pieces = vec![Piece::default(); cuts.len()];
        Self { program, order, map, cuts, pieces, writers, work: 0 }
    }

    fn range(&self, region: &Region) -> std::ops::Range<usize> {
        let Some((start, end)) = self.map.bytes(region) else { return 0..0 };
        let find = |byte: u64| self.cuts.partition_point(|&cut| cut < byte);
        find(start)..find(end)
    }

    fn name(&self, slot: SlotId) -> String {
        slot_name(self.program, slot)
    }

    /// A task must not overwrite what it reads: its threads are not ordered among themselves.
    fn overlap(&mut self, task: u32, reads: &[Region], writes: &[Region], found: &mut Violations) {
        for write in writes {
            let Some((start, end)) = self.map.bytes(write) else { continue };
            for read in reads {
                let hit = self
                    .map
                    .bytes(read)
                    .is_some_and(|(other, other_end)| other < end && start < other_end);
                if hit {
                    let detail = format!(
                        "reads {} and writes {} in the same bytes",
                        self.name(read.slot),
                        self.name(write.slot)
                    );
                    found.push(Rule::MPage, self.order.at(task), detail);
                }
            }
        }
    }

    fn read(&mut self, task: u32, region: &Region, found: &mut Violations) {
        let polled = self.program.slots[region.slot.index()].kind == SlotKind::Tagged;
        let mut finding: Option<(Rule, String)> = None;
        for index in self.range(region) {
            let piece = &self.pieces[index];
            self.work += 1;
            let found_write =
                piece.writer.filter(|w| w.slot == region.slot && w.generation == region.generation);
            if finding.is_none() {
                finding = match found_write {
                    Some(write) if polled || self.order.happens_before(write.task, task) => None,
                    Some(write) => Some((Rule::RHappens, self.unordered_read(region, write.task))),
                    None => Some(self.missing(task, region, polled, piece.writer)),
                };
            }
            let piece = &mut self.pieces[index];
            piece.read |= found_write.is_some();
            piece.pending.push(task);
        }
        if let Some((rule, detail)) = finding {
            found.push(rule, self.order.at(task), detail);
        }
    }

    fn unordered_read(&self, region: &Region, writer: u32) -> String {
        let place = self.order.at(writer);
        format!(
            "reads words {}..{} of {}, written by {place}, and is not ordered after it",
            region.start,
            region.end,
            self.name(region.slot)
        )
    }

    /// Why a read found another write, or none.
    fn missing(
        &self,
        task: u32,
        region: &Region,
        polled: bool,
        last: Option<Write>,
    ) -> (Rule, String) {
        let all =
            self.writers.get(&(region.slot, region.generation)).map_or(&[][..], Vec::as_slice);
        let mut writers =
            all.iter().filter(|w| w.0 < region.end && region.start < w.1).map(|w| w.2);
        let late = writers
            .clone()
            .find(|&writer| !polled && writer != task && !self.order.happens_before(writer, task));
        if let Some(writer) = late {
            return (Rule::RHappens, self.unordered_read(region, writer));
        }
        let words = format!("words {}..{} of {}", region.start, region.end, self.name(region.slot));
        match (writers.next(), last) {
            (Some(_), Some(last)) => {
                let by = format!(
                    "{} ({}, generation {})",
                    self.order.at(last.task),
                    self.name(last.slot),
                    last.generation
                );
                (Rule::MPage, format!("reads {words}, of which {by} has overwritten some"))
            }
            (Some(_), None) => {
                (Rule::RUnwritten, format!("reads {words}, of which some are written by no task"))
            }
            (None, _) => (
                Rule::RUnwritten,
                format!(
                    "reads {words}, generation {}, which no task has written",
                    region.generation
                ),
            ),
        }
    }

    fn write(&mut self, task: u32, region: &Region, found: &mut Violations) {
        let tagged = self.program.slots[region.slot.index()].kind == SlotKind::Tagged;
        let mut finding: Option<(Rule, String)> = None;
        for index in self.range(region) {
            self.work += 1 + self.pieces[index].pending.len() as u64;
            if finding.is_none() {
                finding = self.conflict(task, region, &self.pieces[index], tagged);
            }
            let piece = &mut self.pieces[index];
            piece.pending.clear();
            piece.pending.push(task);
            piece.writer = Some(Write { task, slot: region.slot, generation: region.generation });
            piece.read = false;
            if tagged {
                piece.tags.push((region.slot, region.generation));
            }
        }
        if let Some((rule, detail)) = finding {
            found.push(rule, self.order.at(task), detail);
        }
    }

    fn conflict(
        &self,
        task: u32,
        region: &Region,
        piece: &Piece,
        tagged: bool,
    ) -> Option<(Rule, String)> {
        let name = self.name_of(region);
        let unordered = |&&other: &&u32| other != task && !self.order.happens_before(other, task);
        if let Some(&other) = piece.pending.iter().find(unordered) {
            let same = piece.writer.is_none_or(|last| last.slot == region.slot);
            let rule = if same { Rule::RWriter } else { Rule::MPage };
            let used = piece
                .writer
                .filter(|last| last.slot != region.slot)
                .map_or(String::new(), |last| format!(" (as {})", self.name(last.slot)));
            return Some((
                rule,
                format!(
                    "writes {name}, which {} uses{used}, and is not ordered after it",
                    self.order.at(other)
                ),
            ));
        }
        if let Some(last) = piece.writer.filter(|_| !piece.read) {
            let detail = format!(
                "overwrites {name}, which {} wrote and nothing has read",
                self.order.at(last.task)
            );
            return Some((Rule::ROverlap, detail));
        }
        if tagged && piece.tags.iter().any(|&(_, generation)| generation == region.generation) {
            return Some((
                Rule::MPage,
                format!(
                    "writes {name} with generation {}, which these bytes had before",
                    region.generation
                ),
            ));
        }
        None
    }

    fn name_of(&self, region: &Region) -> String {
        format!("words {}..{} of {}", region.start, region.end, self.name(region.slot))
    }

    /// Every word of every slot that is used is written.
    fn coverage(&self, touched: &[Accesses], found: &mut Violations) {
        let mut written: Vec<Vec<(u32, u32)>> = vec![Vec::new(); self.program.slots.len()];
        let mut used = vec![false; self.program.slots.len()];
        for accesses in touched {
            for region in &accesses.reads {
                used[region.slot.index()] = true;
            }
            for region in &accesses.writes {
                used[region.slot.index()] = true;
                written[region.slot.index()].push((region.start, region.end));
            }
        }
        for (index, mut regions) in written.into_iter().enumerate() {
            if !used[index] || self.map.slots[index].is_none() {
                continue;
            }
            regions.sort_unstable();
            let mut end = 0;
            let mut gap = None;
            for (start, stop) in regions {
                if start > end && gap.is_none() {
                    gap = Some((end, start));
                }
                end = end.max(stop);
            }
            let words = self.program.slots[index].words;
            let gap = gap.or((end < words).then_some((end, words)));
            if let Some((start, stop)) = gap {
                let slot = SlotId(index as u32);
                found.push(
                    Rule::TCover,
                    At::Slot(slot),
                    format!("no task writes words {start}..{stop} of {}", self.name(slot)),
                );
            }
        }
    }
}
