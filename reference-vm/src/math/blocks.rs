//! Rows of codes that lie in blocks with their scales. This decoder is the reference VM's own: `ir::decode` is another.

use abi::CodeBlock;
use half::f16;
use ir::DType;

use super::{Element, StoredE4m3, StoredInt8};

/// Decodes the first elements of a stored row.
pub(super) fn decode_row(dtype: DType, block: CodeBlock, row: &[u8], out: &mut [f32]) {
    let codes_each = block.codes as usize;
    for (bytes, out) in row.chunks(block.bytes()).zip(out.chunks_mut(codes_each)) {
        let (codes, scales) = bytes.split_at(CodeBlock::CODE_BYTES);
        let mut values = [0.0_f32; 2 * CodeBlock::CODE_BYTES];
        code_values(dtype, codes, &mut values);
        let groups = scales.chunks_exact(block.scale_bytes() / block.groups as usize);
        let columns = values.chunks(codes_each / block.groups as usize);
        let out = out.chunks_mut(codes_each / block.groups as usize);
        for ((constants, values), out) in groups.zip(columns).zip(out) {
            let constant =
                |at: usize| f16::from_le_bytes([constants[at], constants[at + 1]]).to_f32();
            // Codes of 4 bits are unsigned: what is 8 is zero, if no zero point says otherwise.
            let zero = match block {
                _ if block.codes == CodeBlock::CODE_BYTES as u32 => 0.0,
                _ if block.zeros => constant(2),
                _ => 8.0,
            };
            let scale = match constants.first_chunk() {
                Some(bytes) if block.shared => f32::from_le_bytes(*bytes),
                _ => constant(0),
            };
            for (out, value) in out.iter_mut().zip(values) {
                *out = (value - zero) * scale;
            }
        }
    }
}

/// What the codes of a block are, as numbers.
fn code_values(dtype: DType, codes: &[u8], values: &mut [f32]) {
    match dtype {
        DType::E4m3G64 => {
            values
                .iter_mut()
                .zip(codes)
                .for_each(|(value, &code)| *value = StoredE4m3::value(code));
        }
        DType::Int8G32 => {
            values
                .iter_mut()
                .zip(codes)
                .for_each(|(value, &code)| *value = StoredInt8::value(code));
        }
        DType::Int4G128 | DType::Int4G128Zero | DType::Int4G32 => {
            for (pair, &code) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *pair = [f32::from(code & 15), f32::from(code >> 4)];
            }
        }
        DType::F32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::Int8 => {} // they lie in no blocks
    }
}
