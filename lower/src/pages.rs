//! Places scratch slots in the activation arena: each has bytes of its own, plain slots in front of tagged ones.
//!
//! Sharing bytes saves memory that nobody lacks (a few megabytes) and no time on any model that was measured (docs/explanation/performance.md). `verify`
//! knows programs whose slots do share (rule M-PAGE).

use abi::SlotKind;
use ir::program::Slot;

/// One L2 line: slots never share one.
const ALIGN: u64 = 128;

/// Sets the offsets of all scratch slots; how many bytes they take.
pub(crate) fn pages(slots: &mut [Slot]) -> u64 {
    let mut bytes = 0;
    for kind in [SlotKind::Plain, SlotKind::Tagged] {
        for slot in slots.iter_mut().filter(|slot| slot.kind == kind) {
            slot.offset = bytes;
            bytes += slot.arena_bytes().next_multiple_of(ALIGN);
        }
    }
    bytes
}
