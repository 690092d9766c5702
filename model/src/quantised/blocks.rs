//! The blocks of GGUF: a run of a row's elements with its scales.

use half::f16;
use ir::{DType, decode};

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
        let block = match self {
            Self::Float(dtype) => return decode(dtype, bytes, out),
            Self::Q8_0 => q8_0,
            Self::Q4_0 => |block: &[u8], out: &mut [f32]| {
                nibbles(block, 8.0, None, &block[2..], out);
            },
            Self::Q4_1 => |block: &[u8], out: &mut [f32]| {
                nibbles(block, 0.0, None, &block[4..], out);
                add(half_at(block, 2), out);
            },
            Self::Q5_0 => |block: &[u8], out: &mut [f32]| {
                nibbles(block, 16.0, Some(&block[2..6]), &block[6..], out);
            },
            Self::Q5_1 => |block: &[u8], out: &mut [f32]| {
                nibbles(block, 0.0, Some(&block[4..8]), &block[8..], out);
                add(half_at(block, 2), out);
            },
            Self::Q4K => |block: &[u8], out: &mut [f32]| k_block(block, None, &block[16..], out),
            Self::Q5K => |block: &[u8], out: &mut [f32]| {
                k_block(block, Some(&block[16..48]), &block[48..], out)
            },
            Self::Q6K => q6_k,
        };
        for (bytes, out) in bytes.chunks_exact(self.bytes()).zip(out.chunks_mut(self.len())) {
            block(bytes, out);
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
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (out, code) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(code.cast_signed()) * scale;
    }
}

/// Q4_0, Q4_1, Q5_0 and Q5_1: `(code - zero) * scale`. Byte `j` holds elements `j` (low) and `16 + j`; the fifth bits
/// are in `high`, element by element.
fn nibbles(block: &[u8], zero: f32, high: Option<&[u8]>, codes: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let low = codes[i % 16] >> (i / 16 * 4) & 15;
        let fifth = high.map_or(0, |high| (high[i / 8] >> (i % 8) & 1) << 4);
        *out = (f32::from(low | fifth) - zero) * scale;
    }
}

fn add(least: f32, out: &mut [f32]) {
    out.iter_mut().for_each(|value| *value += least);
}

/// Q4_K and Q5_K: eight sub-blocks of 32 elements, with 6-bit scales and minima; Q5_K has a fifth bit in `high`.
fn k_block(block: &[u8], high: Option<&[u8]>, codes: &[u8], out: &mut [f32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for (i, out) in out.chunks_mut(32).enumerate() {
        let (factor, offset) = six_bits(&block[4..16], i);
        // Each product rounds once, then their difference.
        let (step, offset) = (scale * f32::from(factor), least * f32::from(offset));
        let codes = &codes[i / 2 * 32..];
        for (j, out) in out.iter_mut().enumerate() {
            let low = (codes[j] >> (4 * (i % 2))) & 15;
            let fifth = high.map_or(0, |high| (high[j] >> i & 1) << 4);
            *out = step * f32::from(low | fifth) - offset;
        }
    }
}

/// Scale and minimum of a sub-block, from twelve bytes that hold eight pairs of six bits.
fn six_bits(packed: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (packed[i] & 63, packed[4 + i] & 63);
    }
    let (low, i) = (packed[4 + i], i - 4);
    ((low & 15) | (packed[i] >> 6) << 4, (low >> 4) | (packed[4 + i] >> 6) << 4)
}

/// Two halves of 128 elements, each four rows of 32: low nibbles, then high bits in pairs; an 8-bit scale for 16
/// elements.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 208);
    for (e, out) in out.iter_mut().enumerate() {
        let (half, row, at) = (e / 128, e / 32 % 4, e % 32);
        let low = (block[64 * half + 32 * (row % 2) + at] >> (4 * (row / 2))) & 15;
        let high = (block[128 + 32 * half + at] >> (2 * row)) & 3;
        let step = scale * f32::from(block[192 + e / 16].cast_signed());
        *out = step * (f32::from(low | high << 4) - 32.0);
    }
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
            want[element] + 16.0 * 0.125 * f32::from(six_bits(&four[4..16], 5).0)
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
