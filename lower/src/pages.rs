//! Places scratch slots in the activation arena.
//!
//! Plain and tagged slots live in two parts of the arena, so they never share bytes. Tagged slots that share bytes get distinct
//! generations; when those run out a slot gets bytes of its own.
//!
//! **When two slots may share.** Everybody who writes or reads the first must be done, in the sense of the memory model, before anybody writes
//! the second (`order`). Tagged hand-offs do not order that, so slots share across counters. `verify` proves it again.

use abi::SlotKind;
use ir::program::Slot;
use ir::schedule::PageAllocation;

use crate::order::PhaseOrder;
use crate::phase::Op;
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
    order: &PhaseOrder,
    scratch: &[Scratch],
    slots: &mut [Slot],
) -> Pages {
    let mut generations = vec![0; scratch.len()];
    let mut base = 0;
    for kind in [SlotKind::Plain, SlotKind::Tagged] {
        let (own, shared): (Vec<usize>, Vec<usize>) = (0..scratch.len())
            .filter(|&i| slots[scratch[i].slot.index()].kind == kind)
            .partition(|_| policy == PageAllocation::None);
        let mut region = Region { kind, base, bytes: 0, placed: Vec::new() };
        match policy {
            PageAllocation::None => {}
            PageAllocation::Linear => region.linear(&shared, order, scratch, slots),
            PageAllocation::GraphColor => region.color(&shared, order, scratch, slots),
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
    fn linear(
        &mut self,
        members: &[usize],
        order: &PhaseOrder,
        scratch: &[Scratch],
        slots: &mut [Slot],
    ) {
        let mut buffers: Vec<((Op, u32), Placed)> = Vec::new();
        for &i in members {
            let Scratch { op, layer, .. } = scratch[i];
            let key = if op == Op::Down { (Op::Embed, (layer + 1) % 2) } else { (op, layer % 2) };
            let slot = &mut slots[scratch[i].slot.index()];
            let buffer = buffers.iter().position(|(other, _)| *other == key);
            let last = buffer
                .map(|b| buffers[b].1)
                .filter(|last| over(order, &scratch[last.index], &scratch[i]));
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
        order: &PhaseOrder,
        scratch: &[Scratch],
        slots: &mut [Slot],
    ) {
        for &i in members {
            let slot = &mut slots[scratch[i].slot.index()];
            let bytes = slot.arena_bytes().next_multiple_of(ALIGN);
            // Bytes whose generations have run out stay taken.
            let free = |p: &Placed| {
                over(order, &scratch[p.index], &scratch[i])
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

/// Whether everybody is done with the first slot before anybody writes the second. It is read by the phase behind it, and once more if it
/// is the residual.
fn over(order: &PhaseOrder, first: &Scratch, second: &Scratch) -> bool {
    [first.written, first.written + 1, first.last_read]
        .into_iter()
        .all(|phase| order.happens_before(phase, second.written))
}
