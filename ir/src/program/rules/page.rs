//! Which slots may share arena bytes at all. When they may, `memory` checks that they take turns.

use abi::SlotKind;

use crate::id::SlotId;
use crate::program::Program;
use crate::violation::{At, Rule, Violations};

use super::slot_name;

/// Tagged and plain slots never share bytes: a plain float could look like a tag that somebody waits for.
pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    let mut slots: Vec<(u64, u64, bool, SlotId)> = program
        .slots
        .iter()
        .enumerate()
        .filter(|(_, slot)| slot.arena_bytes() > 0)
        .map(|(i, slot)| {
            (
                slot.offset,
                slot.offset + slot.arena_bytes(),
                slot.kind == SlotKind::Tagged,
                SlotId(i as u32),
            )
        })
        .collect();
    slots.sort_unstable();
    // The slot of each kind that reaches farthest so far.
    let mut reach: [Option<(u64, SlotId)>; 2] = [None, None];
    for (start, end, tagged, slot) in slots {
        if let Some((other_end, other)) = reach[usize::from(!tagged)]
            && other_end > start
        {
            let detail = format!(
                "{} shares arena bytes with {}, and one of them is tagged",
                slot_name(program, slot),
                slot_name(program, other)
            );
            found.push(Rule::MPage, At::Slot(slot), detail);
        }
        let mine = &mut reach[usize::from(tagged)];
        if mine.is_none_or(|(far, _)| far < end) {
            *mine = Some((end, slot));
        }
    }
}
