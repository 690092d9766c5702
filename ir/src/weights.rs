//! Access to stored weights, independent of how they are read.

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

/// Decodes `out.len()` elements of `dtype` from the start of `bytes`.
///
/// # Panics
/// If `bytes` holds fewer elements than `out`.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert!(
        bytes.len() >= out.len() * dtype.bytes(),
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
