//! The buffers of a program: those of the flow, then a buffer for each value that a phase writes.
//!
//! Buffers are written once per step. `pages` decides their offsets.

use abi::BufferKind;
use ir::BufferId;
use ir::program::{Buffer, BufferSource};
use ir::schedule::Handoff;

use crate::assign::Shares;
use crate::emit::task_count;
use crate::error::{Limit, LowerError, within};
use crate::flow::Flow;

/// The list of buffers, and which of them are replicated on every device. All devices have the same list: a buffer that
/// holds some words per task is as large as the device with the most tasks needs.
pub(crate) fn buffers(
    flow: &Flow,
    devices: &[Vec<Shares>],
) -> Result<(Vec<Buffer>, Vec<BufferId>), LowerError> {
    let (mut list, mut replicated) = (flow.buffers.clone(), Vec::new());
    for value in &flow.values {
        let (Some(handoff), Some(writer)) = (value.handoff, value.writer) else { continue };
        let kind = match handoff {
            Handoff::Counter => BufferKind::Plain,
            Handoff::FlagInData => BufferKind::FlagInData,
        };
        let tasks = devices.iter().map(|shares| task_count(&flow.phases[writer], &shares[writer]));
        let tasks = tasks.max().unwrap_or(0);
        let words = value.words * if value.per_task { tasks.into() } else { 1 };
        within(Limit::BufferWords, u32::MAX.into(), words)?;
        let (name, words, source) = (value.name.clone(), words as u32, BufferSource::Scratch);
        if value.replicated && devices.len() > 1 {
            replicated.push(BufferId(list.len() as u32));
        }
        list.push(Buffer { name, kind, words, source, offset: 0 });
    }
    within(Limit::Buffers, abi::BUFFERS_MAX.into(), list.len() as u64)?;
    Ok((list, replicated))
}
