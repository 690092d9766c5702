//! Rows of codes that lie in blocks with their scales. This decoder is the reference VM's own: `ir::decode` is another.

use std::array::from_fn;

use abi::{CodeBlock, Scalar};
use half::f16;
use ir::DType;

use super::{Element, StoredE4m3, StoredInt8};

/// Decodes the first elements of a stored row.
pub(super) fn decode_row(dtype: DType, block: CodeBlock, row: &[u8], out: &mut [f32]) {
    let (scalar, group) = (dtype.scalar(), block.group as usize);
    let code_bytes = group * scalar.bits() as usize / 8;
    for (bytes, out) in row.chunks(block.bytes()).zip(out.chunks_mut(block.codes as usize)) {
        let (codes, constants) = bytes.split_at(CodeBlock::CODE_BYTES);
        let groups = out.chunks_mut(group).zip(constants.chunks(block.group_scale_bytes()));
        for ((out, own), codes) in groups.zip(codes.chunks(code_bytes)) {
            let half = |at: usize| f16::from_le_bytes([own[at], own[at + 1]]).to_f32();
            let scale = if block.shared {
                f32::from_le_bytes([own[0], own[1], own[2], own[3]])
            } else if block.powers {
                2_f32.powi(i32::from(own[0]) - 127)
            } else {
                half(0)
            };
            let centre = if block.zeros { half(2) } else { centre(scalar) };
            decode_group(scalar, codes, |value| (value - centre) * scale, out);
        }
    }
}

/// The number that means zero where there is no zero point: codes of 4 bits are unsigned.
fn centre(scalar: Scalar) -> f32 {
    if scalar == Scalar::Int4 { 8.0 } else { 0.0 }
}

/// Decodes codes that have one scale.
fn decode_group(scalar: Scalar, codes: &[u8], scaled: impl Fn(f32) -> f32, out: &mut [f32]) {
    let bytes = |value: fn(u8) -> f32, out: &mut [f32]| {
        out.iter_mut().zip(codes).for_each(|(out, &code)| *out = scaled(value(code)));
    };
    match scalar {
        Scalar::E4m3 => bytes(StoredE4m3::value, out),
        Scalar::Int8 => bytes(StoredInt8::value, out),
        Scalar::Int4 => halves(codes, &from_fn(|code| scaled(code as f32)), out),
        Scalar::E2m1 => halves(codes, &E2M1.map(&scaled), out),
        Scalar::F32 | Scalar::F16 | Scalar::Bf16 => unreachable!("only codes lie in blocks"),
    }
}

/// The numbers of the codes of 4 bits e2m1: a sign, two bits of exponent, one of mantissa.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Decodes codes of 4 bits, two in a byte, by a table: random codes make every branch on their bits a wrong guess.
fn halves(codes: &[u8], values: &[f32; 16], out: &mut [f32]) {
    let (pairs, last) = out.as_chunks_mut::<2>();
    for (pair, &code) in pairs.iter_mut().zip(codes) {
        *pair = [values[usize::from(code & 15)], values[usize::from(code >> 4)]];
    }
    if let ([last], Some(&code)) = (last, codes.get(pairs.len())) {
        *last = values[usize::from(code & 15)];
    }
}
