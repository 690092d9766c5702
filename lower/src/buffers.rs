//! The buffers of a program: those of the flow, then a buffer for each value that a phase writes.
//!
//! Buffers are written once per step. `pages` decides their offsets.

use abi::BufferKind;
use ir::program::{Buffer, BufferSource};
use ir::schedule::Handoff;

use crate::assign::Shares;
use crate::emit::task_count;
use crate::error::{Limit, LowerError, within};
use crate::flow::Flow;

pub(crate) fn buffers(flow: &Flow, shares: &[Shares]) -> Result<Vec<Buffer>, LowerError> {
    let mut list = flow.buffers.clone();
    for value in &flow.values {
        let (Some(handoff), Some(writer)) = (value.handoff, value.writer) else { continue };
        let kind = match handoff {
            Handoff::Counter => BufferKind::Plain,
            Handoff::FlagInData => BufferKind::FlagInData,
        };
        let tasks = task_count(&flow.phases[writer], &shares[writer]);
        let words = value.words * if value.per_task { tasks.into() } else { 1 };
        within(Limit::BufferWords, u32::MAX.into(), words)?;
        let (name, words, source) = (value.name.clone(), words as u32, BufferSource::Scratch);
        list.push(Buffer { name, kind, words, source, offset: 0 });
    }
    within(Limit::Buffers, abi::BUFFERS_MAX.into(), list.len() as u64)?;
    Ok(list)
}
