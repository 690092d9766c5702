//! Places scratch buffers in the activation arena: each has bytes of its own, plain buffers in front of flag-in-data ones.
//!
//! Sharing bytes saves memory that nobody lacks (a few megabytes) and no time on any model that was measured (docs/explanation/performance.md). `verify`
//! knows programs whose buffers do share (rule M-PAGE).

use abi::BufferKind;
use ir::program::Buffer;

/// One L2 line: buffers never share one.
const ALIGN: u64 = 128;

/// Sets the offsets of all scratch buffers; how many bytes they take.
pub(crate) fn pages(buffers: &mut [Buffer]) -> u64 {
    let mut bytes = 0;
    for kind in [BufferKind::Plain, BufferKind::FlagInData] {
        for buffer in buffers.iter_mut().filter(|buffer| buffer.kind == kind) {
            buffer.offset = bytes;
            bytes += buffer.arena_bytes().next_multiple_of(ALIGN);
        }
    }
    bytes
}
