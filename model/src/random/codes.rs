//! Random codes: words of the stream, eight or sixteen codes each. Drawing them is compiled once for each width of
//! vectors, since a preset of 70 billion codes would else take longer to make than to copy to a GPU.

use half::f16;
use ir::{CodeBlock, DType, Scalar, Scales};

use super::word;
use crate::parallel;

/// Bytes of a word.
const WORD: usize = 8;

/// Fills a tensor with codes, drawn from the stream of this key; those in blocks have this scale.
pub(super) fn fill(
    dtype: DType,
    scale: f32,
    key: u64,
    out: &mut [u8],
    threads: &dyn Fn() -> usize,
) {
    let is_e4m3 = dtype.scalar() == Scalar::E4m3;
    // Copies of a length that the compiler knows: the others are calls.
    match dtype.block().map(|block| constants(block, scale)).as_deref() {
        None => parallel::fill(out, WORD, threads, |first, out| {
            draw(Codes { key, first, is_e4m3, constants: [] }, out);
        }),
        Some(&[a, b]) => blocks([a, b], (key, is_e4m3), out, threads),
        Some(&[a, b, c, d]) => blocks([a, b, c, d], (key, is_e4m3), out, threads),
        Some(&[a, b, c, d, e, f, g, h]) => {
            blocks([a, b, c, d, e, f, g, h], (key, is_e4m3), out, threads);
        }
        Some(&[a, b, c, d, e, f, g, h, i, j, k, l]) => {
            blocks([a, b, c, d, e, f, g, h, i, j, k, l], (key, is_e4m3), out, threads);
        }
        Some(_) => unreachable!("blocks of {} have constants of another size", dtype.name()),
    }
}

fn blocks<const N: usize>(
    constants: [u8; N],
    (key, is_e4m3): (u64, bool),
    out: &mut [u8],
    threads: &dyn Fn() -> usize,
) {
    parallel::fill(out, CodeBlock::CODE_BYTES + N, threads, |number, out| {
        let first = number * (CodeBlock::CODE_BYTES / WORD);
        draw(Codes { key, first, is_e4m3, constants }, out);
    });
}

/// Scales and zero points of a block, the same for all.
fn constants(block: CodeBlock, scale: f32) -> Vec<u8> {
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let group = match block.scales {
        Scales::Each => half(scale).to_vec(),
        Scales::WithZeros => [half(scale), half(8.0)].concat(),
        Scales::Shared => scale.to_le_bytes().to_vec(),
        Scales::Powers => vec![(scale.to_bits() >> 23) as u8],
        Scales::Factors => return factors(block, scale),
    };
    group.repeat(block.groups())
}

/// Factors of a scale and an offset, about 32 and of each group another, so that a group with another's is noticed. Codes
/// of 4 bits are unsigned: an offset of eight times the scale makes their mean about zero.
fn factors(block: CodeBlock, scale: f32) -> Vec<u8> {
    const FACTORS: [u8; 4] = [32, 27, 36, 30];
    let unsigned = block.codes > CodeBlock::CODE_BYTES as u32;
    let head = [scale / 32.0, if unsigned { scale / 4.0 } else { 0.0 }];
    let each = FACTORS.iter().take(block.groups()).flat_map(|&factor| [factor + 128, factor]);
    head.into_iter().flat_map(|half| f16::from_f32(half).to_le_bytes()).chain(each).collect()
}

/// Codes from word `first` on; in blocks if there are constants to follow each.
#[derive(Clone, Copy)]
struct Codes<const N: usize> {
    key: u64,
    first: usize,
    is_e4m3: bool,
    constants: [u8; N],
}

/// Draws codes with the widest vectors of this CPU.
fn draw<const N: usize>(codes: Codes<N>, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the CPU has the instructions.
            return unsafe { with_avx512(codes, out) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { with_avx2(codes, out) };
        }
    }
    codes.draw(out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn with_avx512<const N: usize>(codes: Codes<N>, out: &mut [u8]) {
    codes.draw(out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<const N: usize>(codes: Codes<N>, out: &mut [u8]) {
    codes.draw(out);
}

impl<const N: usize> Codes<N> {
    #[inline(always)]
    fn draw(self, out: &mut [u8]) {
        if self.is_e4m3 { self.draw_as(out, without_nan) } else { self.draw_as(out, |word| word) }
    }

    #[inline(always)]
    fn draw_as(self, out: &mut [u8], of: impl Fn(u64) -> u64) {
        let drawn = |index: usize| of(word(self.key, index as u64)).to_le_bytes();
        if N == 0 {
            let (words, rest) = out.as_chunks_mut::<WORD>();
            let behind = self.first + words.len();
            for (out, index) in words.iter_mut().zip(self.first..) {
                *out = drawn(index);
            }
            rest.copy_from_slice(&drawn(behind)[..rest.len()]);
            return;
        }
        let mut index = self.first;
        for block in out.chunks_exact_mut(CodeBlock::CODE_BYTES + N) {
            if let Some((codes, rest)) = block.split_first_chunk_mut::<{ CodeBlock::CODE_BYTES }>()
            {
                for (at, out) in codes.as_chunks_mut::<WORD>().0.iter_mut().enumerate() {
                    *out = drawn(index + at);
                }
                rest.copy_from_slice(&self.constants);
            }
            index += CodeBlock::CODE_BYTES / WORD;
        }
    }
}

/// Eight codes of e4m3 in which each NaN, 0x7f or 0xff, is the code before it.
#[inline(always)]
fn without_nan(codes: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // Seven ones and a one carry into the eighth bit, and no further.
    let is_nan = ((codes & (0x7f * ONES)) + ONES) >> 7 & ONES;
    codes ^ is_nan
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code by code, as they were first drawn: results on presets are stored.
    #[test]
    fn codes_keep_their_values() {
        let code = |byte: u8, is_e4m3| if is_e4m3 && byte & 0x7f == 0x7f { byte ^ 1 } else { byte };
        let stream = |first: usize, bytes: usize, is_e4m3| -> Vec<u8> {
            let words = (first..).flat_map(|index| word(77, index as u64).to_le_bytes());
            words.take(bytes).map(|byte| code(byte, is_e4m3)).collect()
        };
        for (dtype, is_e4m3) in [(DType::Int8, false), (DType::E4m3, true)] {
            // No multiple of a word.
            let mut out = vec![0; 4099];
            fill(dtype, 1.0, 77, &mut out, &|| 1);
            assert_eq!(out, stream(0, 4099, is_e4m3), "{dtype:?}");
        }
        for (dtype, is_e4m3, constants) in [
            (DType::E4m3G64, true, 1.5_f32.to_le_bytes().to_vec()),
            (DType::Int4G128, false, f16::from_f32(1.5).to_le_bytes().to_vec()),
            (DType::Int4G32, false, f16::from_f32(1.5).to_le_bytes().repeat(4)),
            (DType::Mxfp4, false, vec![127; 4]),
        ] {
            let bytes = 64 + constants.len();
            let mut out = vec![0; 40 * bytes];
            fill(dtype, 1.5, 77, &mut out, &|| 1);
            for (number, block) in out.chunks_exact(bytes).enumerate() {
                assert_eq!(block[..64], stream(8 * number, 64, is_e4m3), "{dtype:?} {number}");
                assert_eq!(block[64..], constants, "{dtype:?} {number}");
            }
        }
    }

    #[test]
    fn any_width_of_vectors_draws_the_same_codes() {
        let codes = Codes { key: 9, first: 3, is_e4m3: true, constants: [1, 2, 3, 4] };
        let (mut one, mut other) = (vec![0; 68 * 33], vec![0; 68 * 33]);
        draw(codes, &mut one);
        codes.draw(&mut other);
        assert_eq!(one, other);
    }

    #[test]
    fn any_number_of_threads_gives_the_same_blocks() {
        for (dtype, bytes) in [(DType::E4m3, 1_000_001), (DType::Int4G128, 66 * 9001)] {
            let made = |threads| {
                let mut out = vec![0; bytes];
                fill(dtype, 0.1, 5, &mut out, &|| threads);
                out
            };
            assert!(made(5) == made(1), "{dtype:?}");
        }
    }
}
