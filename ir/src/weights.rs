//! Access to stored weights, independent of how they are read.

use abi::CodeBlock;
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
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        DType::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        DType::E4m3 => {
            for (o, &code) in out.iter_mut().zip(bytes) {
                *o = e4m3(code);
            }
        }
        DType::Int8 => {
            for (o, code) in out.iter_mut().zip(bytes) {
                *o = f32::from(code.cast_signed());
            }
        }
        DType::E4m3G64
        | DType::Int8G32
        | DType::Int4G128
        | DType::Int4G128Zero
        | DType::Int4G32 => {
            decode_blocks(dtype, bytes, out);
        }
    }
}

/// Decodes a row of codes that lie in blocks, from its start, with the scales of their groups.
fn decode_blocks(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let Some(block) = dtype.block() else { return };
    let group = (block.codes / block.groups) as usize;
    let blocks = bytes.chunks_exact(block.bytes()).zip(out.chunks_mut(block.codes as usize));
    for (bytes, out) in blocks {
        let (codes, scales) = bytes.split_at(CodeBlock::CODE_BYTES);
        let scale = |at: usize| f16::from_le_bytes([scales[2 * at], scales[2 * at + 1]]).to_f32();
        for (i, out) in out.iter_mut().enumerate() {
            let at = i / group;
            *out = match dtype {
                DType::E4m3G64 => {
                    e4m3(codes[i])
                        * f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]])
                }
                DType::Int8G32 => f32::from(codes[i].cast_signed()) * scale(at),
                DType::Int4G128 | DType::Int4G128Zero | DType::Int4G32 => {
                    let code = f32::from(codes[i / 2] >> (4 * (i % 2)) & 15);
                    let (zero, scale) = if block.zeros {
                        (scale(2 * at + 1), scale(2 * at))
                    } else {
                        (8.0, scale(at))
                    };
                    (code - zero) * scale
                }
                DType::F32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::Int8 => return, // they lie in no blocks
            };
        }
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
