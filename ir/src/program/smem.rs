//! Shared memory of a worker: the one formula that `validate`, the launch and the device agree on.

use crate::program::Dims;

/// Bytes for reductions, barriers and task records, whatever the program.
pub const FIXED_BYTES: u32 = 12 * 1024;

/// Query heads that the attention op works on at once.
pub const ATTENTION_GROUP: u32 = 4;

/// Bytes of the activation buffer: the longest staged vector (4 bytes an element: an f32, or the high and low 16-bit halves), the
/// merge's vector and split weights, or the attention scratch.
#[must_use]
pub fn activation_bytes(dims: &Dims, kv_block: u32, splits: u32, warps: u32) -> u32 {
    let unit_cols = abi::UNIT_ROW_BYTES / dims.dtype.bytes() as u32;
    let q_width = dims.heads * dims.head_dim;
    let k_max = dims.hidden.max(q_width).max(dims.ffn).next_multiple_of(unit_cols);
    let merge = 4 * q_width.next_multiple_of(unit_cols) + 4 * dims.heads * splits;
    let group = (dims.heads / dims.kv_heads).min(ATTENTION_GROUP);
    // Queries, one key, scores of a block, partial outputs of each warp, running statistics.
    let attention = 4
        * (group * dims.head_dim
            + dims.head_dim
            + group * kv_block
            + warps * group * dims.head_dim
            + 4 * group * warps);
    (4 * k_max).max(merge).max(attention).next_multiple_of(128)
}

/// Bytes of shared memory that a worker needs.
#[must_use]
pub fn worker_bytes(stages: u32, stage_bytes: u32, activation_bytes: u32) -> u32 {
    stages * stage_bytes + activation_bytes + FIXED_BYTES
}
