//! The slots of a program: those of the flow, then a buffer for each value that a phase writes.
//!
//! Buffers are written once per step. Where they lie is the business of `pages`.

use abi::SlotKind;
use ir::program::{Slot, SlotSource};
use ir::schedule::Handoff;

use crate::assign::Shares;
use crate::emit::task_count;
use crate::error::{Limit, LowerError, within};
use crate::flow::Flow;

pub(crate) fn slots(flow: &Flow, shares: &[Shares]) -> Result<Vec<Slot>, LowerError> {
    let mut list = flow.slots.clone();
    for value in &flow.values {
        let (Some(handoff), Some(writer)) = (value.handoff, value.writer) else { continue };
        let kind = match handoff {
            Handoff::Counter => SlotKind::Plain,
            Handoff::Tagged => SlotKind::Tagged,
        };
        let tasks = task_count(&flow.phases[writer], &shares[writer]);
        let words = value.words * if value.per_task { tasks.into() } else { 1 };
        within(Limit::SlotWords, u32::MAX.into(), words)?;
        let (name, words, source) = (value.name.clone(), words as u32, SlotSource::Scratch);
        list.push(Slot { name, kind, words, source, offset: 0 });
    }
    within(Limit::Slots, abi::SLOTS_MAX.into(), list.len() as u64)?;
    Ok(list)
}
