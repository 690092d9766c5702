//! Rows of codes that lie in blocks with their scales. This decoder is the reference VM's own: `ir::decode` is another.

use abi::{CodeBlock, Scalar};
use half::f16;
use ir::DType;

use super::{Element, StoredE4m3, StoredInt8};

/// Decodes the first elements of a stored row.
pub(super) fn decode_row(dtype: DType, block: CodeBlock, row: &[u8], out: &mut [f32]) {
    let (scalar, group) = (dtype.scalar(), block.group as usize);
    for (bytes, out) in row.chunks(block.bytes()).zip(out.chunks_mut(block.codes as usize)) {
        let (codes, constants) = bytes.split_at(CodeBlock::CODE_BYTES);
        let groups = out.chunks_mut(group).zip(constants.chunks(block.group_scale_bytes()));
        for (first, (out, own)) in (0..).step_by(group).zip(groups) {
            let half = |at: usize| f16::from_le_bytes([own[at], own[at + 1]]).to_f32();
            let scale = if block.shared {
                f32::from_le_bytes([own[0], own[1], own[2], own[3]])
            } else if block.powers {
                2_f32.powi(i32::from(own[0]) - 127)
            } else {
                half(0)
            };
            let centre = if block.zeros { half(2) } else { centre(scalar) };
            for (at, out) in (first..).zip(out) {
                *out = (code_value(scalar, codes, at) - centre) * scale;
            }
        }
    }
}

/// The number that means zero where there is no zero point: codes of 4 bits are unsigned.
fn centre(scalar: Scalar) -> f32 {
    if scalar == Scalar::Int4 { 8.0 } else { 0.0 }
}

/// What a code of a block is, as a number.
fn code_value(scalar: Scalar, codes: &[u8], at: usize) -> f32 {
    match scalar {
        Scalar::E4m3 => StoredE4m3::value(codes[at]),
        Scalar::Int8 => StoredInt8::value(codes[at]),
        Scalar::Int4 => f32::from(codes[at / 2] >> (4 * (at % 2)) & 15),
        Scalar::E2m1 => {
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            let mantissa = f32::from(code & 1);
            let magnitude = match code >> 1 & 3 {
                0 => mantissa / 2.0,
                1 => 1.0 + mantissa / 2.0,
                2 => 2.0 + mantissa,
                _ => 4.0 + 2.0 * mantissa,
            };
            if code & 8 == 0 { magnitude } else { -magnitude }
        }
        Scalar::F32 | Scalar::F16 | Scalar::Bf16 => unreachable!("only codes lie in blocks"),
    }
}
