//! Where an evaluator rounds, as executors do.

use half::bf16;
use ir::{DType, Format, Graph, KvDtype};
use rayon::prelude::*;

use crate::codes::{as_f16, to_e4m3};
use crate::math::{Matrix, make_room};

/// Rounding of values between two ops and at the input of one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
    /// Nowhere.
    None,
    /// The words of hand-offs.
    Handoffs,
    /// Hand-offs, the vectors that the device multiplies with operands of this type, and stored keys and values. A vector
    /// may have one half of each element only, or be integers with `digits`.
    Device { operand: DType, one_half: bool, digits: bool, shifts: bool },
    /// The vectors that a prompt's chunk multiplies, and stored keys and values: one f16 each. Hand-offs are moved by as much, for what is not
    /// simulated; each draw moves them differently.
    Chunk { draw: u32 },
}

/// Relative shifts of keys and values before they become codes: some times what hand-offs of 20 bits and vectors of 17 move them by. A code is
/// another after about ten times as large a part of all shifts, since codes of a binade are an eighth of it apart.
const HANDOFF_SHIFT: f32 = 1.0 / (1 << 17) as f32;
const DEVICE_SHIFT: f32 = 1.0 / (1 << 14) as f32;

impl Rounding {
    /// Rounds words as a hand-off does between writer and reader.
    pub(super) fn handoff(self, words: &mut [f32]) {
        match self {
            Self::None => {}
            Self::Handoffs | Self::Device { .. } => {
                words.iter_mut().for_each(|word| *word = f32::from_bits(make_room(word.to_bits())));
            }
            Self::Chunk { draw } => words.iter_mut().for_each(|word| *word = moved(*word, draw)),
        }
    }

    /// Rounds a factor of a product with a matrix: on the device, to one or two halves of the operands' type
    /// (unit_products.cuh: `x4_store`), or to integers (digits.cuh: `stage_digits`).
    pub(super) fn factor(self, matrix: &Matrix<'_>, words: &mut [f32]) {
        let (operand, one_half, digits) = match self {
            Self::Device { operand, one_half, digits, .. } => (operand, one_half, digits),
            Self::Chunk { .. } => (DType::F16, true, false),
            Self::None | Self::Handoffs => return,
        };
        let format = Format::of(matrix.dtype(), operand);
        if digits && format.has_digits() {
            let unit = format.unit_cols() as usize;
            let rows = words.par_chunks_mut(matrix.cols());
            return rows.for_each(|row| row.chunks_mut(unit).for_each(as_integers));
        }
        let halves = |round: fn(f32) -> f32| {
            move |word: &mut f32| {
                let high = round(*word);
                *word = if one_half { high } else { high + round(*word - high) };
            }
        };
        if operand == DType::F16 {
            // Smaller by a power of two, so that large values are in the range of f16.
            let divisor = abi::F16_VECTOR_DIVISOR as f32;
            let halves = halves(as_f16);
            words.iter_mut().for_each(|word| {
                *word /= divisor;
                halves(word);
                *word *= divisor;
            });
        } else if operand == DType::Bf16 {
            words.iter_mut().for_each(halves(|word| bf16::from_f32(word).to_f32()));
        }
    }

    /// Rounds keys or values for the cache: on the device to f16 (op_attention.cuh: `cache_pair`). The codes of a smaller
    /// type are what the user chose, so they are no rounding of an executor: every executor has the same.
    pub(super) fn cache(self, graph: &Graph, words: &mut [f32]) {
        match graph.kv_dtype {
            KvDtype::E4m3 => {
                let shift = match self {
                    Self::Handoffs => HANDOFF_SHIFT,
                    Self::Device { shifts: true, .. } => DEVICE_SHIFT,
                    Self::Device { shifts: false, .. } | Self::Chunk { .. } | Self::None => 0.0,
                };
                words.iter_mut().for_each(|word| *word *= 1.0 + shift);
                words.chunks_exact_mut(graph.head_dim as usize).for_each(to_e4m3);
            }
            KvDtype::F16 if matches!(self, Self::Device { .. } | Self::Chunk { .. }) => {
                words.iter_mut().for_each(|word| *word = as_f16(*word));
            }
            KvDtype::F16 => {}
        }
    }
}

/// Moved by less than half a unit in the last place of f16, by a hash of the word (the finaliser of MurmurHash3) and the draw.
fn moved(word: f32, draw: u32) -> f32 {
    let mixed = (word.to_bits() ^ draw.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    let mixed = (mixed ^ mixed >> 13).wrapping_mul(0xc2b2_ae35);
    let share = (mixed >> 8) as f32 / (1 << 24) as f32 - 0.5;
    word * (1.0 + share / (1 << 11) as f32)
}

/// To integers of 15 bits and back: of the elements that go with a unit, 1.984375 times a power of two is the factor, so that the largest fits.
fn as_integers(group: &mut [f32]) {
    let most = group.iter().fold(f32::MIN_POSITIVE, |most, word| most.max(word.abs()));
    let power = f32::from_bits(most.to_bits() & 0x7f80_0000).recip();
    let factor = 1.984_375 * 8192.0 * power;
    group.iter_mut().for_each(|word| *word = (*word * factor).round_ties_even() / factor);
}
