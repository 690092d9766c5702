//! Rows of codes that lie in blocks with their scales. This decoder is the reference VM's own: `ir::decode` is another.

use abi::{CodeBlock, Scalar, Scales};
use ir::DType;

use super::product::Rows;
use super::{Element, StoredE4m3, StoredF16, StoredInt8, small_float};

/// Rows whose elements lie in blocks.
pub(super) struct InBlocks<'a> {
    scalar: Scalar,
    block: CodeBlock,
    bytes: &'a [u8],
    row_bytes: usize,
}

impl<'a> InBlocks<'a> {
    pub(super) fn new(dtype: DType, block: CodeBlock, bytes: &'a [u8], cols: usize) -> Self {
        Self { scalar: dtype.scalar(), block, bytes, row_bytes: dtype.row_bytes(cols) }
    }
}

impl Rows for InBlocks<'_> {
    #[inline(always)]
    fn decode(&self, row: usize, first: usize, out: &mut [f32]) {
        let Self { scalar, block, bytes, row_bytes } = *self;
        let codes = block.codes as usize;
        debug_assert!(first.is_multiple_of(codes));
        let row = &bytes[row * row_bytes..][..row_bytes][first / codes * block.bytes()..];
        // The type of the codes is decided once, outside of the loops.
        match scalar {
            Scalar::E4m3 => decode_row::<StoredE4m3>(block, row, out),
            Scalar::Int8 => decode_row::<StoredInt8>(block, row, out),
            Scalar::Int4 => decode_row::<StoredInt4>(block, row, out),
            Scalar::E2m1 => decode_row::<StoredE2m1>(block, row, out),
            Scalar::F32 | Scalar::F16 | Scalar::Bf16 => unreachable!("only codes lie in blocks"),
        }
    }
}

/// Codes of a group.
trait Code {
    /// The code that means zero where there is no zero point.
    const CENTRE: f32;

    /// Decodes and scales as many codes as `out` has room for.
    fn decode(codes: &[u8], scaled: Scaled, out: &mut [f32]);
}

/// Decodes a stored row from its first block on.
///
/// Plain indices and no closures: the compiler leaves iterators over chunks as calls here, at four times the cost.
#[inline(always)]
fn decode_row<C: Code>(block: CodeBlock, row: &[u8], out: &mut [f32]) {
    let (group, groups) = (block.group as usize, block.groups());
    let (codes, constants) = (CodeBlock::CODE_BYTES / groups, block.group_scale_bytes());
    let (mut at, mut number) = (0, 0);
    while at < out.len() {
        let bytes = &row[number / groups * block.bytes()..][..block.bytes()];
        let inner = number % groups;
        let behind = &bytes[CodeBlock::CODE_BYTES..];
        let own = &behind[block.head_bytes() + inner * constants..][..constants];
        let end = out.len().min(at + group);
        let scaled = Scaled::new(block.scales, C::CENTRE, behind, own);
        C::decode(&bytes[inner * codes..][..codes], scaled, &mut out[at..end]);
        (at, number) = (end, number + 1);
    }
}

/// What gives the codes of a group their values.
#[derive(Clone, Copy)]
struct Scaled {
    scale: f32,
    centre: f32,
    offset: f32,
}

impl Scaled {
    #[inline(always)]
    fn new(scales: Scales, centre: f32, behind: &[u8], own: &[u8]) -> Self {
        let half = |bytes: &[u8], at: usize| StoredF16::value([bytes[at], bytes[at + 1]]);
        let plain = |scale| Self { scale, centre, offset: 0.0 };
        match scales {
            Scales::Each => plain(half(own, 0)),
            Scales::WithZeros => Self { centre: half(own, 2), ..plain(half(own, 0)) },
            Scales::Shared => plain(f32::from_le_bytes([own[0], own[1], own[2], own[3]])),
            Scales::Powers => plain(power(own[0])),
            Scales::Factors => Self {
                scale: half(behind, 0) * (f32::from(own[0]) - 128.0),
                centre: 0.0,
                offset: half(behind, 2) * f32::from(own[1]),
            },
        }
    }

    #[inline(always)]
    fn of(self, value: f32) -> f32 {
        (value - self.centre) * self.scale - self.offset
    }
}

/// A power of two by its exponent with bias 127.
#[inline(always)]
fn power(exponent: u8) -> f32 {
    // Zero stands for a subnormal.
    f32::from_bits(if exponent == 0 { 1 << 22 } else { u32::from(exponent) << 23 })
}

impl Code for StoredE4m3 {
    const CENTRE: f32 = 0.0;

    #[inline(always)]
    fn decode(codes: &[u8], scaled: Scaled, out: &mut [f32]) {
        let codes = &codes[..out.len()];
        for at in 0..out.len() {
            out[at] = scaled.of(Self::value(codes[at]));
        }
    }
}

impl Code for StoredInt8 {
    const CENTRE: f32 = 0.0;

    #[inline(always)]
    fn decode(codes: &[u8], scaled: Scaled, out: &mut [f32]) {
        let codes = &codes[..out.len()];
        for at in 0..out.len() {
            out[at] = scaled.of(Self::value(codes[at]));
        }
    }
}

/// Codes of 4 bits, two in a byte. Eight at once, so that they are decoded as vectors.
macro_rules! halves {
    ($code:ident, $centre:literal, $value:expr) => {
        struct $code;

        impl Code for $code {
            const CENTRE: f32 = $centre;

            #[inline(always)]
            fn decode(codes: &[u8], scaled: Scaled, out: &mut [f32]) {
                let words = out.len() / 8;
                let (whole, vectors) = (&codes.as_chunks::<4>().0[..words], &mut out[..8 * words]);
                for word in 0..words {
                    let (bits, out) = (u32::from_le_bytes(whole[word]), &mut vectors[8 * word..]);
                    for at in 0..8 {
                        out[at] = scaled.of($value(bits >> (4 * at) & 15));
                    }
                }
                // A row may end inside of a block.
                for at in 8 * words..out.len() {
                    out[at] = scaled.of($value(u32::from(codes[at / 2]) >> (4 * (at % 2)) & 15));
                }
            }
        }
    };
}

// Unsigned: 8 means zero where there is no zero point.
halves!(StoredInt4, 8.0, int4);
halves!(StoredE2m1, 0.0, e2m1);

#[inline(always)]
fn int4(code: u32) -> f32 {
    code as f32
}

/// The number of an e2m1 code, branch-free: a sign, two bits of exponent, one of mantissa.
#[inline(always)]
fn e2m1(code: u32) -> f32 {
    f32::from_bits(small_float((code & 7) << 22, 1) | (code & 8) << 28)
}
