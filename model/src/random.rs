//! Seeded random weights: every element is a function of the seed, the tensor's name and the element's index. So a
//! tensor is the same when generated alone, in any order, on any machine and with any number of threads.

use std::borrow::Cow;
use std::sync::OnceLock;

use half::{bf16, f16};
use ir::{Graph, Scalar, Tensor, TensorId, Weights, e2m1, e4m3};

use crate::parallel;

mod codes;

/// Elements from one 64-bit word of a matrix: four bytes are summed for each.
const MATRIX_PER_WORD: usize = 2;
/// Elements from one word of a norm, 16 bits for each.
const NORM_PER_WORD: usize = 4;
/// Sums of four bytes: 0 to 1020.
const SUMS: usize = 4 * 255 + 1;
/// Variance of a sum of four uniform bytes: `4 * (256^2 - 1) / 12`.
const SUM_VARIANCE: f64 = 21_845.0;

/// The weights of a preset. A tensor is generated on first use, or each time that it is read without being kept.
pub(crate) struct Random {
    seed: u64,
    recipes: Vec<Recipe>,
    made: Vec<OnceLock<Vec<u8>>>,
}

impl Random {
    /// Weights for `graph`; nothing is computed yet.
    pub(crate) fn new(graph: &Graph, seed: u64) -> Self {
        let recipes =
            (0..graph.tensors.len()).map(|i| Recipe::of(graph, TensorId(i as u32))).collect();
        Self { seed, recipes, made: graph.tensors.iter().map(|_| OnceLock::new()).collect() }
    }
}

impl Weights for Random {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        let i = tensor.index();
        self.made[i].get_or_init(|| self.recipes[i].drawn(self.seed))
    }

    fn read(&self, tensor: TensorId) -> Cow<'_, [u8]> {
        let i = tensor.index();
        let make = || Cow::Owned(self.recipes[i].drawn(self.seed));
        self.made[i].get().map_or_else(make, |made| Cow::Borrowed(&made[..]))
    }
}

/// One tensor of the preset `graph` with this seed; it is not kept.
pub(crate) fn tensor(graph: &Graph, id: TensorId, seed: u64) -> Vec<u8> {
    Recipe::of(graph, id).drawn(seed)
}

/// The distribution of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Law {
    /// A bell of this standard deviation around zero.
    Bell(f64),
    /// Uniform from 0.5 to 1.5.
    Norm,
    /// Codes, uniform; in blocks with one scale for all, so that their values have about this standard deviation.
    Codes(f64),
    /// This for all: the factors of codes' rows.
    Factor(f64),
}

struct Recipe {
    tensor: Tensor,
    law: Law,
}

impl Recipe {
    fn of(graph: &Graph, id: TensorId) -> Self {
        let tensor = graph.tensor(id).clone();
        let law = match tensor.shape[..] {
            // A tied table is also the output matrix. With deviation 1 each token's own row would win every argmax by
            // far, and the model would repeat its input for ever.
            [_, cols] if tensor.dtype.is_scaled() => Law::Codes(1.0 / f64::from(cols).sqrt()),
            [_] if tensor.name.ends_with(".weight_scale") => Law::Factor(factor(graph, &tensor)),
            [_, _] if id == graph.embed && !graph.tied() => Law::Bell(1.0),
            [_, cols] => Law::Bell(1.0 / f64::from(cols).sqrt()),
            _ if tensor.name.ends_with(".bias") => Law::Bell(0.1),
            _ => Law::Norm,
        };
        Self { tensor, law }
    }

    fn drawn(&self, seed: u64) -> Vec<u8> {
        self.make(seed, &|| parallel::threads_to_draw(self.tensor.bytes(), &parallel::threads))
    }

    fn make(&self, seed: u64, threads: &dyn Fn() -> usize) -> Vec<u8> {
        let mut out = parallel::zeroed(self.tensor.bytes());
        let key = key(seed, &self.tensor.name);
        if let Law::Codes(std) = self.law {
            let dtype = self.tensor.dtype;
            codes::fill(dtype, (std / spread(dtype.scalar())) as f32, key, &mut out, threads);
            return out;
        }
        // Words of matrices and of norms both divide this many elements.
        let unit = MATRIX_PER_WORD * NORM_PER_WORD;
        let bytes = unit * self.tensor.dtype.bytes();
        parallel::fill(&mut out, bytes, threads, |first, out| self.fill(key, first * unit, out));
        out
    }

    /// Writes the elements from `first` on; `first` is a multiple of every word's element count.
    fn fill(&self, key: u64, first: usize, out: &mut [u8]) {
        match self.tensor.dtype.scalar() {
            Scalar::F32 => self.fill_as::<4>(key, first, out, |x| x.to_le_bytes()),
            Scalar::F16 => self.fill_as::<2>(key, first, out, |x| f16::from_f32(x).to_le_bytes()),
            Scalar::Bf16 => self.fill_as::<2>(key, first, out, |x| bf16::from_f32(x).to_le_bytes()),
            Scalar::E4m3 | Scalar::Int8 | Scalar::Int4 | Scalar::E2m1 => {
                unreachable!("codes are filled elsewhere")
            }
        }
    }

    fn fill_as<const N: usize>(
        &self,
        key: u64,
        first: usize,
        out: &mut [u8],
        encode: fn(f32) -> [u8; N],
    ) {
        let (elements, _) = out.as_chunks_mut::<N>();
        match self.law {
            Law::Bell(std) => {
                let unit = std / SUM_VARIANCE.sqrt();
                let table: Vec<[u8; N]> =
                    (0..SUMS).map(|sum| encode(((sum as f64 - 510.0) * unit) as f32)).collect();
                let start = (first / MATRIX_PER_WORD) as u64;
                for (pair, index) in elements.chunks_mut(MATRIX_PER_WORD).zip(start..) {
                    let sums = byte_sums(word(key, index));
                    for (element, sum) in pair.iter_mut().zip(sums) {
                        *element = table[sum];
                    }
                }
            }
            Law::Factor(factor) => elements.fill(encode(factor as f32)),
            Law::Codes(_) => unreachable!("filled elsewhere"),
            Law::Norm => {
                let start = (first / NORM_PER_WORD) as u64;
                for (four, index) in elements.chunks_mut(NORM_PER_WORD).zip(start..) {
                    let word = word(key, index);
                    for (i, element) in four.iter_mut().enumerate() {
                        let uniform = (word >> (16 * i)) as u16;
                        *element = encode(0.5 + f32::from(uniform) / 65536.0);
                    }
                }
            }
        }
    }
}

/// The factor of the rows of the matrix that `scale` belongs to: 1 if its codes lie in blocks, which have their own scales.
fn factor(graph: &Graph, scale: &Tensor) -> f64 {
    let name = scale.name.strip_suffix("_scale").unwrap_or_default();
    let matrix = graph.tensors.iter().find(|tensor| tensor.name == name);
    let in_rows = matrix.filter(|matrix| matrix.dtype.block().is_none());
    in_rows.map_or(1.0, |matrix| {
        let cols = matrix.shape.last().copied().unwrap_or(1);
        1.0 / (f64::from(cols).sqrt() * spread(matrix.dtype.scalar()))
    })
}

/// Root of the mean square of all codes.
fn spread(scalar: Scalar) -> f64 {
    let codes: u8 = if scalar.bits() == 8 { u8::MAX } else { 15 };
    let value = |code| match scalar {
        Scalar::E2m1 => e2m1(code),
        Scalar::Int4 => f32::from(code) - 8.0,
        // Those of NaN are replaced by the ones before.
        Scalar::E4m3 => e4m3(if code & 0x7f == 0x7f { code ^ 1 } else { code }),
        Scalar::F32 | Scalar::F16 | Scalar::Bf16 | Scalar::Int8 => f32::from(code.cast_signed()),
    };
    let squares = (0..=codes).map(|code| f64::from(value(code)).powi(2)).sum::<f64>();
    (squares / (f64::from(codes) + 1.0)).sqrt()
}

/// The sums of the low four and of the high four bytes of a word.
fn byte_sums(word: u64) -> [usize; 2] {
    const EVEN: u64 = 0x00ff_00ff_00ff_00ff;
    let pairs = (word & EVEN) + ((word >> 8) & EVEN);
    let fours = pairs + (pairs >> 16);
    [(fours & 0xffff) as usize, ((fours >> 32) & 0xffff) as usize]
}

/// The key of a tensor's stream: seed and name, mixed.
fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed), |state, byte| mix(state ^ u64::from(byte)))
}

/// The stream's word at `index`: the index spread over 64 bits, then mixed.
fn word(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// A bijection of 64-bit words in which every input bit affects every output bit: xor-shifts and odd multipliers.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::DType;

    use crate::shape::Shape;

    #[test]
    fn any_number_of_threads_gives_the_same_bytes() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            // An odd vocabulary of odd rows, so that parts do not divide evenly.
            let graph = Shape { vocab: 8191, hidden: 72, dtype, ..Shape::default() }.graph();
            let recipe = Recipe::of(&graph, graph.embed);
            let one = recipe.make(3, &|| 1);
            for threads in [2, 3, 7, 16, 64] {
                assert!(recipe.make(3, &|| threads) == one, "{threads} threads, {dtype:?}");
            }
        }
    }

    #[test]
    fn sums_are_of_the_bytes() {
        assert_eq!(byte_sums(0xff01_0203_0405_0607), [22, 261]);
        assert_eq!(byte_sums(u64::MAX), [1020, 1020]);
    }
}
