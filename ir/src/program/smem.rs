//! Shared memory of a worker: the one formula that `validate`, the launch and the device agree on.

use crate::program::Dims;

/// Bytes for reductions, barriers and task records, whatever the program.
pub const FIXED_BYTES: u32 = 11 * 1024;

/// Query heads that the attention op works on at once, at most.
pub const ATTENTION_GROUP: u32 = 7;

/// Consumer warps of a worker.
pub const CONSUMER_WARPS: u32 = 8;

/// Warps of a worker: the consumers, the loader, the fetcher of tasks, the watchdog that also polls the host ring, and one that only
/// completes the group of four that gives registers to the consumers.
pub const WARPS: u32 = CONSUMER_WARPS + 4;

/// Bytes of the activation buffer: the longest staged vector (4 bytes an element: an f32, or the high and low 16-bit halves), or what
/// the consumer warps leave each other in attention and its merge.
#[must_use]
pub fn activation_bytes(dims: &Dims) -> u32 {
    let unit_cols = abi::UNIT_ROW_BYTES / dims.dtype.bytes() as u32;
    let q_width = dims.heads * dims.head_dim;
    let k_max = dims.hidden.max(q_width).max(dims.ffn).next_multiple_of(unit_cols);
    (4 * k_max).max(scratch_bytes(dims)).next_multiple_of(128)
}

/// Bytes of it that attention and its merge need.
fn scratch_bytes(dims: &Dims) -> u32 {
    // Of each warp its heads: maximum, sum, padding, outputs; then the new key and value, as f16.
    let group = (dims.heads / dims.kv_heads.max(1)).min(ATTENTION_GROUP);
    let attention = 4 * CONSUMER_WARPS * group * (dims.head_dim + 4) + 4 * dims.head_dim;
    // Six floats of each thread, 16-byte aligned.
    let merge = 32 * CONSUMER_WARPS * 32;
    merge.max(attention)
}

/// Tiles of which a worker keeps the sums of all lanes before an epilogue, where a step has several (decision 022).
pub const LANE_TILES: u32 = 8;

/// Bytes of the activation buffer where a step has several lanes: their vectors stay in registers, so it holds the warps' sums of two
/// epilogues in turn, or what attention and its merge need.
#[must_use]
pub fn lanes_activation_bytes(dims: &Dims, lanes: u32) -> u32 {
    let sums = 4 * 2 * LANE_TILES * CONSUMER_WARPS * abi::UNIT_ROWS * lanes;
    sums.max(scratch_bytes(dims)).next_multiple_of(128)
}

/// Bytes of shared memory that a worker needs.
#[must_use]
pub fn worker_bytes(stages: u32, stage_bytes: u32, activation_bytes: u32) -> u32 {
    stages * stage_bytes + activation_bytes + FIXED_BYTES
}
