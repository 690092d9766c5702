//! The blocks of GGUF: a run of a row's elements with its scales.

use half::f16;
use ir::{CodeBlock, DType, Scalar, Scales, decode};

/// An element type of GGUF that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockType {
    /// Floats of this type.
    Float(DType),
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl BlockType {
    /// Elements of a block.
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Float(_) => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.bytes(),
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Its name in messages; that of floats is not used.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.name(),
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Dequantises whole blocks.
    pub(crate) fn dequantise(self, bytes: &[u8], out: &mut [f32]) {
        if let Self::Float(dtype) = self {
            return decode(dtype, bytes, out);
        }
        for (bytes, out) in bytes.chunks_exact(self.bytes()).zip(out.chunks_mut(self.len())) {
            self.read(bytes).values(out);
        }
    }

    /// The first block whose scale is infinite or not a number.
    pub(crate) fn unsound(self, bytes: &[u8]) -> Option<usize> {
        let offsets: &[usize] = match self {
            Self::Float(_) => return None,
            Self::Q8_0 | Self::Q4_0 | Self::Q5_0 => &[0],
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => &[0, 2],
            Self::Q6K => &[208],
        };
        let finite = |block: &[u8]| offsets.iter().all(|&at| half_at(block, at).is_finite());
        bytes.chunks_exact(self.bytes()).position(|block| !finite(block))
    }

    /// The types of device blocks that hold its codes and scales exactly, the smallest first.
    pub(crate) const fn coded(self) -> &'static [DType] {
        match self {
            Self::Float(_) | Self::Q4_1 | Self::Q5_1 => &[],
            Self::Q8_0 | Self::Q5_0 => &[DType::Int8G32],
            Self::Q4_0 => &[DType::Int4G32, DType::Int8G32],
            Self::Q4K => &[DType::Int4K, DType::Int8K],
            Self::Q5K | Self::Q6K => &[DType::Int8K],
        }
    }

    /// Writes blocks of a row as those of a type of [`coded`](Self::coded).
    pub(crate) fn recode(self, bytes: &[u8], dtype: DType, out: &mut [u8]) {
        let Some(block) = dtype.block() else { return };
        let (codes, group) = (block.codes as usize, block.group as usize);
        for (number, stored) in bytes.chunks_exact(self.bytes()).enumerate() {
            let read = self.read(stored);
            for n in 0..self.len() / group {
                let column = number * self.len() + n * group;
                let out = &mut out[column / codes * block.bytes()..][..block.bytes()];
                read.put_group(n, (dtype, block), column % codes / group, out);
            }
        }
    }

    /// Takes a block apart.
    fn read(self, block: &[u8]) -> Read {
        let mut read = Read { codes: [0; 256], centre: 0, head: [0; 4], factors: [[1, 0]; 16] };
        let code: &dyn Fn(usize) -> i16 = match self {
            // Nobody asks for these.
            Self::Float(_) => &|_| 0,
            Self::Q8_0 => &|e| block[2 + e].cast_signed().into(),
            Self::Q4_0 => &|e| of_32(e, None, &block[2..]),
            Self::Q4_1 => &|e| of_32(e, None, &block[4..]),
            Self::Q5_0 => &|e| of_32(e, Some(&block[2..6]), &block[6..]),
            Self::Q5_1 => &|e| of_32(e, Some(&block[4..8]), &block[8..]),
            Self::Q4K => &|e| of_256(e, None, &block[16..]),
            Self::Q5K => &|e| of_256(e, Some(&block[16..48]), &block[48..]),
            Self::Q6K => &|e| of_q6_k(e, block),
        };
        let codes = read.codes[..self.len()].iter_mut();
        codes.enumerate().for_each(|(e, out)| *out = code(e));
        match self {
            Self::Float(_) => {}
            Self::Q8_0 | Self::Q4_0 | Self::Q5_0 => read.head[..2].copy_from_slice(&block[..2]),
            Self::Q4_1 | Self::Q5_1 => {
                read.head.copy_from_slice(&block[..4]);
                // What these add, others subtract.
                read.head[3] ^= 0x80;
                read.factors.fill([1, 1]);
            }
            Self::Q4K | Self::Q5K => {
                read.head.copy_from_slice(&block[..4]);
                let factors = read.factors.iter_mut().enumerate();
                factors.for_each(|(n, out)| *out = six_bits(&block[4..16], n / 2));
            }
            Self::Q6K => {
                read.head[..2].copy_from_slice(&block[208..]);
                let factors = read.factors.iter_mut().zip(&block[192..208]);
                factors.for_each(|(out, &scale)| *out = [scale, 0]);
            }
        }
        read.centre = match self {
            Self::Q4_0 => 8,
            Self::Q5_0 => 16,
            Self::Q6K => 32,
            Self::Float(_) | Self::Q8_0 | Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => 0,
        };
        read
    }
}

/// Codes that a factor is for.
const FACTOR_CODES: usize = 16;

/// A block, taken apart: `(scale * factor) * (code - centre) - (offset * factor)`.
struct Read {
    codes: [i16; 256],
    centre: i16,
    /// Scale and offset, f16.
    head: [u8; 4],
    /// Of each 16 codes the factors of the scale, signed, and of the offset.
    factors: [[u8; 2]; 16],
}

impl Read {
    fn values(&self, out: &mut [f32]) {
        let (scale, offset) = (half_at(&self.head, 0), half_at(&self.head, 2));
        let codes = self.codes.chunks(FACTOR_CODES).zip(self.factors);
        for (out, (codes, [factor, other])) in out.chunks_mut(FACTOR_CODES).zip(codes) {
            // Each product rounds once, then their difference.
            let (step, less) = (scale * f32::from(factor.cast_signed()), offset * f32::from(other));
            for (out, code) in out.iter_mut().zip(codes) {
                *out = step * f32::from(code - self.centre) - less;
            }
        }
    }

    /// Writes group `n` as group `inner` of a device block.
    fn put_group(
        &self,
        n: usize,
        (dtype, block): (DType, CodeBlock),
        inner: usize,
        out: &mut [u8],
    ) {
        let group = block.group as usize;
        let codes = &self.codes[n * group..][..group];
        let (elements, scales) = out.split_at_mut(CodeBlock::CODE_BYTES);
        if dtype.scalar() == Scalar::Int4 {
            let out = &mut elements[inner * group / 2..][..group / 2];
            for (out, pair) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
                *out = pair[0] as u8 | (pair[1] as u8) << 4;
            }
        } else {
            let out = &mut elements[inner * group..][..group];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = (code - self.centre) as u8;
            }
        }
        let (head, scales) = scales.split_at_mut(block.head_bytes());
        let own = &mut scales[inner * block.group_scale_bytes()..][..2];
        if block.scales == Scales::Factors {
            head.copy_from_slice(&self.head);
            let [scale, offset] = self.factors[n * group / FACTOR_CODES];
            own.copy_from_slice(&[scale ^ 0x80, offset]);
        } else {
            own.copy_from_slice(&self.head[..2]);
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// A code of Q4_0, Q4_1, Q5_0 or Q5_1. Byte `j` holds elements `j` (low) and `16 + j`; the fifth bits are in `high`,
/// element by element.
fn of_32(e: usize, high: Option<&[u8]>, codes: &[u8]) -> i16 {
    let low = codes[e % 16] >> (e / 16 * 4) & 15;
    i16::from(low | high.map_or(0, |high| (high[e / 8] >> (e % 8) & 1) << 4))
}

/// A code of Q4_K or Q5_K: eight sub-blocks of 32; Q5_K has a fifth bit in `high`.
fn of_256(e: usize, high: Option<&[u8]>, codes: &[u8]) -> i16 {
    let (i, j) = (e / 32, e % 32);
    let low = codes[i / 2 * 32 + j] >> (4 * (i % 2)) & 15;
    i16::from(low | high.map_or(0, |high| (high[j] >> i & 1) << 4))
}

/// Factors of scale and minimum of a sub-block, from twelve bytes that hold eight pairs of six bits.
fn six_bits(packed: &[u8], i: usize) -> [u8; 2] {
    if i < 4 {
        return [packed[i] & 63, packed[4 + i] & 63];
    }
    let (low, i) = (packed[4 + i], i - 4);
    [low & 15 | (packed[i] >> 6) << 4, low >> 4 | (packed[4 + i] >> 6) << 4]
}

/// A code of Q6_K: two halves of 128 elements, each four rows of 32: low nibbles, then high bits in pairs.
fn of_q6_k(e: usize, block: &[u8]) -> i16 {
    let (half, row, at) = (e / 128, e / 32 % 4, e % 32);
    let low = block[64 * half + 32 * (row % 2) + at] >> (4 * (row / 2)) & 15;
    i16::from(low | (block[128 + 32 * half + at] >> (2 * row) & 3) << 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Q5_K block with one fifth bit is a Q4_K block with 16 more at that element.
    #[test]
    fn the_fifth_bit_adds_sixteen() {
        let mut four = vec![0; BlockType::Q4K.bytes()];
        for (i, byte) in four.iter_mut().enumerate() {
            *byte = (i * 37 % 251) as u8;
        }
        four[..4].copy_from_slice(&[0, 0x30, 0, 0x2c]); // 0.125 and 0.0625
        let mut five = four[..16].to_vec();
        five.extend([0; 32]);
        five.extend(&four[16..]);
        five[16 + 7] = 1 << 5;
        let (mut want, mut got) = ([0.0; 256], [0.0; 256]);
        BlockType::Q4K.dequantise(&four, &mut want);
        BlockType::Q5K.dequantise(&five, &mut got);
        let element = 5 * 32 + 7;
        assert_eq!(
            got[element],
            want[element] + 16.0 * 0.125 * f32::from(six_bits(&four[4..16], 5)[0])
        );
        got[element] = want[element];
        assert_eq!(got, want);
    }

    /// A type, a block in hexadecimal, and the bits of its values.
    const REFERENCE: [(BlockType, &str, [u32; 32]); 4] = [
        (
            BlockType::Q4_0,
            "3f32497a2846278549aea7870b7a9996497c",
            [
                0x3e47e000, 0x3ec7e000, 0x00000000, 0xbec7e000, 0xbe47e000, 0xbf15e800, 0x3e47e000,
                0x3f95e800, 0xbe47e000, 0xbe47e000, 0x3f15e800, 0x3ec7e000, 0x3e47e000, 0xbec7e000,
                0x3e47e000, 0x3f47e000, 0xbf47e000, 0xbe47e000, 0xbf95e800, 0xbf47e000, 0xbf95e800,
                0x00000000, 0xbf47e000, 0x3ec7e000, 0x3ec7e000, 0x00000000, 0xbfc7e000, 0xbe47e000,
                0x3e47e000, 0x3e47e000, 0xbf47e000, 0xbe47e000,
            ],
        ),
        (
            BlockType::Q4_1,
            "c2313fbe5a8b295638965abfa8970c8baaa64a8c",
            [
                0x3e738000, 0x3ed5e000, 0x3d6d0000, 0xbef6c000, 0xbdfa0000, 0xbef6c000, 0x3e738000,
                0x3f919800, 0xbdfa0000, 0xbe9aa000, 0x3f190000, 0x3ed5e000, 0x3e738000, 0xbef6c000,
                0x3e738000, 0x3f190000, 0xbf297000, 0xbdfa0000, 0xbf99d000, 0xbf297000, 0xbf82c800,
                0x3d6d0000, 0xbf297000, 0x3ed5e000, 0x3e738000, 0x3d6d0000, 0xbfc7e000, 0xbdfa0000,
                0x3e738000, 0x3e738000, 0xbf578000, 0xbdfa0000,
            ],
        ),
        (
            BlockType::Q5_0,
            "3f2ec7dca03382f4409c5f0b924c3f1e06e5233b72f7",
            [
                0x3e47e000, 0x3ec7e000, 0x00000000, 0xbec7e000, 0xbdc7e000, 0xbef9d800, 0x3e47e000,
                0x3f95e800, 0xbdc7e000, 0xbe47e000, 0x3f15e800, 0x3ef9d800, 0x3e95e800, 0xbef9d800,
                0x3e47e000, 0x3f2ee400, 0xbf47e000, 0xbdc7e000, 0xbf95e800, 0xbf2ee400, 0xbf896a00,
                0x00000000, 0xbf2ee400, 0x3ec7e000, 0x3e95e800, 0x3dc7e000, 0xbfc7e000, 0xbe47e000,
                0x3e47e000, 0x3e95e800, 0xbf60dc00, 0xbdc7e000,
            ],
        ),
        (
            BlockType::Q5_1,
            "932d3fbed7dda2bb941752ad512ca56f503f0807455d840a",
            [
                0x3e38c000, 0x3ee22800, 0x3bcc0000, 0xbedbc800, 0xbda5a000, 0xbf043000, 0x3e88f800,
                0x3f91ba00, 0xbe2c0000, 0xbe829800, 0x3f076000, 0x3ee22800, 0x3e88f800, 0xbedbc800,
                0x3e38c000, 0x3f33f800, 0xbf471400, 0xbda5a000, 0xbf902200, 0xbf30c800, 0xbf902200,
                0x3bcc0000, 0xbf30c800, 0x3eb59000, 0x3e88f800, 0x3dbf2000, 0xbfc7e000, 0xbe2c0000,
                0x3e38c000, 0x3e88f800, 0xbf5d6000, 0xbe2c0000,
            ],
        ),
    ];

    /// Blocks of the gguf package's quantiser (0.19), and the bits that its dequantiser makes of them.
    #[test]
    fn types_of_32_elements_have_the_bits_of_the_reference_library() {
        for (kind, block, want) in REFERENCE {
            let bytes: Vec<u8> = block
                .as_bytes()
                .chunks(2)
                .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect();
            assert_eq!(bytes.len(), kind.bytes());
            let mut out = [0.0; 32];
            kind.dequantise(&bytes, &mut out);
            assert_eq!(out.map(f32::to_bits), want, "{}", kind.name());
        }
    }

    /// Codes in device blocks mean what they meant in every type that holds them, to the bit.
    #[test]
    fn recoded_blocks_have_the_same_values() {
        let kinds = [
            BlockType::Q8_0,
            BlockType::Q4_0,
            BlockType::Q5_0,
            BlockType::Q4K,
            BlockType::Q5K,
            BlockType::Q6K,
        ];
        for kind in kinds {
            let cols = 512;
            let mut bytes: Vec<u8> = (0..cols / kind.len() * kind.bytes())
                .map(|i| (i * 89 + i / 7 * 31) as u8)
                .collect();
            for block in bytes.chunks_exact_mut(kind.bytes()) {
                // Scales that are numbers, of either sign.
                let places: &[usize] = if kind == BlockType::Q6K { &[209] } else { &[1, 3] };
                places.iter().for_each(|&at| block[at] &= 0xbf);
            }
            assert_eq!(kind.unsound(&bytes), None, "{}", kind.name());
            let mut want = vec![0.0; cols];
            kind.dequantise(&bytes, &mut want);
            assert!(!kind.coded().is_empty());
            for &dtype in kind.coded() {
                let mut coded = vec![0; dtype.row_bytes(cols)];
                kind.recode(&bytes, dtype, &mut coded);
                let mut got = vec![0.0; cols];
                decode(dtype, &coded, &mut got);
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got), bits(&want), "{} as {}", kind.name(), dtype.name());
            }
        }
    }

    #[test]
    fn infinite_scales_are_found_in_their_block() {
        // Where each type has its scales: (the block's, and its least value's).
        for (kind, places) in [
            (BlockType::Q8_0, &[0][..]),
            (BlockType::Q4_0, &[0]),
            (BlockType::Q4_1, &[0, 2]),
            (BlockType::Q5_0, &[0]),
            (BlockType::Q5_1, &[0, 2]),
            (BlockType::Q4K, &[0, 2]),
            (BlockType::Q5K, &[0, 2]),
            (BlockType::Q6K, &[208]),
        ] {
            for at in places {
                let mut bytes = vec![0; 3 * kind.bytes()];
                assert_eq!(kind.unsound(&bytes), None);
                bytes[2 * kind.bytes() + at + 1] = 0x7c;
                assert_eq!(kind.unsound(&bytes), Some(2), "{}", kind.name());
            }
        }
    }
}
