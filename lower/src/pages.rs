//! Places scratch buffers in the activation arena. Each has bytes of its own; plain buffers come before flag-in-data
//! ones.
//!
//! Sharing bytes would save a few megabytes of memory, which is not scarce, and no time on any model that was measured
//! (docs/explanation/performance.md). `verify` supports programs whose buffers share bytes (rule M-PAGE).

use abi::BufferKind;
use ir::program::Buffer;

/// One L2 line: buffers never share one.
const ALIGN: u64 = 128;

/// Sets the offsets of all scratch buffers and returns the size of the arena in bytes.
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
