//! Places scratch slots in the activation arena.
//!
//! Plain and tagged slots live in two parts of the arena, so they never share bytes. Tagged slots that share bytes get distinct
//! generations; when those run out a slot gets bytes of its own.
//!
//! **When two slots may share.** Slot `a` is last read in phase `r`, slot `b` is written in a later phase `q`. Sharing is safe if
//! some phase `j` with `r < j <= q` has tasks that each wait for *all* tasks of the phase before it: then every read of `a` is over
//! before any task of `j` runs, and every task of `q` is one of those or runs after one. `verify` proves it again. A split of attention
//! that has no keys writes without waiting for anything, so partial results of several splits share with nobody.

use abi::SlotKind;
use ir::program::Slot;
use ir::schedule::PageAllocation;

use crate::phase::{Op, Phase};
use crate::slots::Scratch;

/// One L2 line: slots never share one.
const ALIGN: u64 = 128;

/// Where the slots lie, and which write of a step to its bytes each is.
pub(crate) struct Pages {
    pub(crate) arena_bytes: u64,
    /// Generation of each scratch slot, in the order of the scratch list.
    pub(crate) generations: Vec<u16>,
}

/// Sets the offsets of all scratch slots.
pub(crate) fn pages(
    policy: PageAllocation,
    splits: u32,
    phases: &[Phase],
    scratch: &[Scratch],
    slots: &mut [Slot],
) -> Pages {
    let alone =
        |i: usize| policy == PageAllocation::None || (splits > 1 && scratch[i].op == Op::Attention);
    let mut generations = vec![0; scratch.len()];
    let mut base = 0;
    for kind in [SlotKind::Plain, SlotKind::Tagged] {
        let (own, shared): (Vec<usize>, Vec<usize>) = (0..scratch.len())
            .filter(|&i| slots[scratch[i].slot.index()].kind == kind)
            .partition(|&i| alone(i));
        let mut region = Region { kind, base, bytes: 0, placed: Vec::new() };
        match policy {
            PageAllocation::None => {}
            PageAllocation::Linear => region.linear(&shared, scratch, slots),
            PageAllocation::GraphColor => region.color(&shared, phases, scratch, slots),
        }
        for &i in &own {
            region.append(i, &mut slots[scratch[i].slot.index()]);
        }
        for placed in &region.placed {
            generations[placed.index] = placed.generation;
        }
        base += region.bytes;
    }
    Pages { arena_bytes: base, generations }
}

#[derive(Clone, Copy)]
struct Placed {
    /// Index in the scratch list.
    index: usize,
    start: u64,
    end: u64,
    generation: u16,
}

/// The part of the arena for one kind of slot. Offsets in `placed` count from its base.
struct Region {
    kind: SlotKind,
    base: u64,
    bytes: u64,
    placed: Vec<Placed>,
}

impl Region {
    fn put(&mut self, index: usize, slot: &mut Slot, start: u64, generation: u16) {
        let end = start + slot.arena_bytes().next_multiple_of(ALIGN);
        slot.offset = self.base + start;
        self.bytes = self.bytes.max(end);
        self.placed.push(Placed { index, start, end, generation });
    }

    fn append(&mut self, index: usize, slot: &mut Slot) {
        self.put(index, slot, self.bytes, 0);
    }

    /// The generation after this one, if there is one left. Plain slots have no generations.
    fn after(&self, last: Option<u16>) -> Option<u16> {
        match self.kind {
            SlotKind::Tagged => {
                let next = last.map_or(0, |last| last + 1);
                (u32::from(next) < abi::GENERATIONS_MAX).then_some(next)
            }
            SlotKind::Plain
            | SlotKind::Constant
            | SlotKind::KvCache
            | SlotKind::Embedding
            | SlotKind::Logits => Some(0),
        }
    }

    /// Two buffers per kind of slot. The residual streams before the first layer and after each are one kind.
    fn linear(&mut self, members: &[usize], scratch: &[Scratch], slots: &mut [Slot]) {
        let mut buffers: Vec<((Op, u32), Placed)> = Vec::new();
        for &i in members {
            let Scratch { op, layer, .. } = scratch[i];
            let key = if op == Op::Down { (Op::Embed, (layer + 1) % 2) } else { (op, layer % 2) };
            let slot = &mut slots[scratch[i].slot.index()];
            let buffer = buffers.iter().position(|(other, _)| *other == key);
            let last = buffer.map(|b| buffers[b].1);
            match last.and_then(|last| Some((last.start, self.after(Some(last.generation))?))) {
                Some((start, generation)) => self.put(i, slot, start, generation),
                None => self.append(i, slot),
            }
            let placed = self.placed[self.placed.len() - 1];
            match buffer {
                Some(b) => buffers[b].1 = placed,
                None => buffers.push((key, placed)),
            }
        }
    }

    /// First fit among the bytes of slots whose life is over.
    fn color(
        &mut self,
        members: &[usize],
        phases: &[Phase],
        scratch: &[Scratch],
        slots: &mut [Slot],
    ) {
        let joins = next_joins(phases);
        for &i in members {
            let slot = &mut slots[scratch[i].slot.index()];
            let bytes = slot.arena_bytes().next_multiple_of(ALIGN);
            // Bytes whose generations have run out stay taken.
            let free = |p: &Placed| {
                joins[scratch[p.index].last_read] <= scratch[i].written
                    && self.after(Some(p.generation)).is_some()
            };
            let mut alive: Vec<(u64, u64)> =
                self.placed.iter().filter(|p| !free(p)).map(|p| (p.start, p.end)).collect();
            alive.sort_unstable();
            let mut start = 0;
            for (from, to) in alive {
                if start + bytes <= from {
                    break;
                }
                start = start.max(to);
            }
            let had = self.placed.iter().filter(|p| p.start < start + bytes && start < p.end);
            let generation = self.after(had.map(|p| p.generation).max()).unwrap_or(0);
            self.put(i, slot, start, generation);
        }
    }
}

/// For each phase, the first later one whose tasks wait for all tasks of the phase before it.
fn next_joins(phases: &[Phase]) -> Vec<usize> {
    let mut next = vec![usize::MAX; phases.len()];
    for index in (0..phases.len().saturating_sub(1)).rev() {
        next[index] = if phases[index + 1].joins { index + 1 } else { next[index + 1] };
    }
    next
}
