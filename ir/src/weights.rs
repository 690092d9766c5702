//! Access to stored weights, independent of how they are read.

use std::borrow::Cow;

use abi::{CodeBlock, Scalar, Scales};
use half::{bf16, f16};

use crate::graph::DType;
use crate::id::TensorId;

/// A tensor's range in a file, for a loader that reads it directly instead of through the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// The file.
    pub path: std::path::PathBuf,
    /// First byte of the tensor's data.
    pub offset: u64,
    /// Bytes of the tensor's data.
    pub bytes: u64,
}

/// The stored weights of one graph: row-major, little-endian, in each tensor's own element type.
pub trait Weights: Sync {
    /// The tensor's bytes. They need not be aligned.
    fn bytes(&self, tensor: TensorId) -> &[u8];

    /// The tensor's bytes for a reader that needs them once, such as a loader: weights that are made in memory are not
    /// kept for it, so that a model may be larger than the host's memory.
    fn read(&self, tensor: TensorId) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes(tensor))
    }

    /// The tensor's range in a file, if it is in one.
    fn file_range(&self, _tensor: TensorId) -> Option<FileRange> {
        None
    }
}

/// Decodes `out.len()` elements of `dtype` from the start of `bytes`; of codes in blocks, those of one row.
///
/// # Panics
/// If `bytes` holds fewer elements than `out`.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert!(
        bytes.len() >= dtype.row_bytes(out.len()),
        "{} bytes for {} elements",
        bytes.len(),
        out.len()
    );
    match dtype.block() {
        Some(block) => decode_blocks(dtype.scalar(), block, bytes, out),
        None => decode_scalars(dtype.scalar(), bytes, out),
    }
}

/// Decodes elements from the start of `bytes`; codes without a scale.
fn decode_scalars(scalar: Scalar, bytes: &[u8], out: &mut [f32]) {
    match scalar {
        Scalar::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Scalar::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        Scalar::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        Scalar::E4m3 => {
            for (o, &code) in out.iter_mut().zip(bytes) {
                *o = e4m3(code);
            }
        }
        Scalar::Int8 => {
            for (o, code) in out.iter_mut().zip(bytes) {
                *o = f32::from(code.cast_signed());
            }
        }
        Scalar::Int4 | Scalar::E2m1 => {
            for (pair, code) in out.chunks_mut(2).zip(bytes) {
                for (o, code) in pair.iter_mut().zip([code & 15, code >> 4]) {
                    *o = if scalar == Scalar::E2m1 { e2m1(code) } else { f32::from(code) };
                }
            }
        }
    }
}

/// Decodes a row of codes that lie in blocks, from its start, with the scales of their groups.
fn decode_blocks(scalar: Scalar, block: CodeBlock, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(block.bytes()).zip(out.chunks_mut(block.codes as usize));
    for (bytes, out) in blocks {
        let (codes, constants) = bytes.split_at(CodeBlock::CODE_BYTES);
        decode_scalars(scalar, codes, out);
        let (head, constants) = constants.split_at(block.head_bytes());
        let constants = constants.chunks_exact(block.group_scale_bytes());
        for (out, constants) in out.chunks_mut(block.group as usize).zip(constants) {
            let [scale, zero, offset] = constants_of(scalar, block, head, constants);
            out.iter_mut().for_each(|value| *value = (*value - zero) * scale - offset);
        }
    }
}

/// Scale, zero point and offset of a group.
fn constants_of(scalar: Scalar, block: CodeBlock, head: &[u8], own: &[u8]) -> [f32; 3] {
    let half = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    // Codes of 4 bits are unsigned: what is 8 is zero, if nothing says otherwise.
    let middle = if scalar == Scalar::Int4 { 8.0 } else { 0.0 };
    match (block.scales, own.first_chunk()) {
        (Scales::Shared, Some(bytes)) => [f32::from_le_bytes(*bytes), middle, 0.0],
        (Scales::Powers, _) => [e8m0(own[0]), middle, 0.0],
        (Scales::WithZeros, _) => [half(own, 0), half(own, 2), 0.0],
        (Scales::Factors, _) => {
            let scale = half(head, 0) * (f32::from(own[0]) - 128.0);
            [scale, 0.0, half(head, 2) * f32::from(own[1])]
        }
        (Scales::Each | Scales::Shared, _) => [half(own, 0), middle, 0.0],
    }
}

/// The value of an e2m1 code (bias 1), without its scale.
#[must_use]
pub const fn e2m1(code: u8) -> f32 {
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
        [code as usize & 15]
}

/// The value of an e8m0 code: a power of two from 2^-127 to 2^127; 255 is NaN.
#[must_use]
pub const fn e8m0(code: u8) -> f32 {
    match code {
        // The only subnormal of binary32 among them.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// The value of an e4m3 code ("fn": bias 7, no infinities), without its scale; 0x7f and 0xff are NaN.
#[must_use]
pub const fn e4m3(code: u8) -> f32 {
    let sign = (code as u32 >> 7) << 31;
    let (exponent, mantissa) = ((code as u32 >> 3) & 15, code as u32 & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => 0x7fc0_0000,
        // Subnormal: a multiple of 2^-9.
        (0, _) => (mantissa as f32 / 512.0).to_bits(),
        // The bias of binary32 is 127, 120 more.
        _ => (exponent + 120) << 23 | mantissa << 20,
    };
    f32::from_bits(sign | magnitude)
}
