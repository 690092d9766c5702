//! Shared memory of a worker: the one formula that `validate`, the launch and the device use.

use abi::{ATTENTION_GROUP, BATCH_TILES, CONSUMER_WARPS, FIXED_BYTES, UNIT_BYTES};

use crate::format::Format;
use crate::program::Dims;

/// The longest vectors that a worker stages, by their form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors {
    /// Elements, as operands of the tensor cores: an f32, or the high and the low 16-bit half; with `one_half` the high one alone.
    pub plain: u32,
    /// [`Dims::one_half`].
    pub one_half: bool,
    /// Bytes of the longest that is staged as integers ([`Format::has_digits`]).
    pub digit_bytes: u32,
}

impl Vectors {
    /// Those of matrices with these columns and formats, of which some are `experts`.
    pub fn new(dims: &Dims, experts: bool, matrices: impl Iterator<Item = (u32, Format)>) -> Self {
        let (mut plain, mut digit_bytes) = (0, 0);
        for (cols, format) in matrices {
            if format.has_digits() {
                digit_bytes = digit_bytes.max(format.units_per_tile(cols) * format.digit_bytes());
            } else {
                plain = plain.max(cols);
            }
        }
        if digit_bytes == 0 || experts {
            plain = dims.longest_vector();
        }
        Self { plain, one_half: dims.one_half(experts), digit_bytes }
    }
}

/// Bytes of the activation buffer: the longest staged vector, or what the consumer warps exchange in attention and its
/// merge.
#[must_use]
pub fn activation_bytes(dims: &Dims, vectors: Vectors) -> u32 {
    let operand = |format: &&Format| format.operand() == dims.dtype;
    let unit_cols =
        Format::ALL.iter().filter(operand).map(|format| format.unit_cols()).max().unwrap_or(1);
    let element = if vectors.one_half { 2 } else { 4 };
    let plain = element * vectors.plain.next_multiple_of(unit_cols);
    plain.max(vectors.digit_bytes).max(scratch_bytes(dims)).next_multiple_of(128)
}

/// Bytes of the activation buffer that attention and its merge need.
fn scratch_bytes(dims: &Dims) -> u32 {
    // Per warp, for each of its heads: maximum, sum, padding, outputs; then the new key and value, as f16.
    let group = (dims.heads / dims.kv_heads.max(1)).min(ATTENTION_GROUP);
    let attention = 4 * CONSUMER_WARPS * group * (dims.head_dim + 4) + 4 * dims.head_dim;
    // Six floats per thread, 16-byte aligned.
    let merge = 32 * CONSUMER_WARPS * 32;
    merge.max(attention)
}

/// Bytes of the activation buffer of a kernel with several sequences. Their vectors stay in registers, so it holds the
/// warps' sums of two epilogues in turn, or what attention and its merge need.
#[must_use]
pub fn batch_activation_bytes(dims: &Dims, seqs: u32) -> u32 {
    let sums = 4 * 2 * BATCH_TILES * CONSUMER_WARPS * abi::UNIT_ROWS * seqs;
    sums.max(scratch_bytes(dims)).next_multiple_of(128)
}

/// Sequences whose new keys and values fit in shared memory together, as f16, a power of two: the most that a step with a
/// window has.
#[must_use]
pub fn fresh_rows(head_dim: u32) -> u32 {
    let rows = (abi::FRESH_BYTES / (4 * head_dim.max(1))).clamp(1, abi::SEQS_MAX as u32);
    1 << rows.ilog2()
}

/// Bytes of a stage of the ring: a stage has room for as many of the longest units as the knob's bytes hold of plain ones.
#[must_use]
pub fn stage_bytes(knob: u32, unit_bytes: u32) -> u32 {
    knob / UNIT_BYTES * unit_bytes
}

/// Bytes of shared memory that a worker needs.
#[must_use]
pub fn worker_bytes(stages: u32, stage_bytes: u32, activation_bytes: u32) -> u32 {
    stages * stage_bytes + activation_bytes + FIXED_BYTES
}
