//! Dot products whose bits do not depend on the CPU or on the number of threads, and the few scalar
//! functions around them.
//!
//! A dot product is 32 independent `f32` running sums of fused multiply-adds, with element `i` in sum `i % 32`, added
//! up by a fixed tree in `f64`. The sums are independent, so they may be vectorised with any width. Each output element
//! is one such dot product: neither the distribution of rows over threads nor the number of positions per pass can
//! change a result.

use ir::{Activation, DType, Scalar, Tensor};
use rayon::prelude::*;

mod blend;
mod blocks;
mod product;
mod vector;

use blocks::InBlocks;
use product::{Plain, Rows};

pub(crate) use blend::{Blend, blend, exp_below};
pub(crate) use product::dot;
pub(crate) use vector::Width;

/// Running sums of a dot product.
pub(crate) const LANES: usize = 32;

/// Least multiply-adds of one parallel task, so that scheduling does not dominate small matrices.
pub(crate) const TASK_MACS: usize = 1 << 16;

/// The storage type of a row's elements.
trait Element {
    /// The stored form; bytes, because rows need not be aligned.
    type Raw: Copy + Sync;

    /// The value, exactly.
    fn value(raw: Self::Raw) -> f32;
}

struct StoredF32;
struct StoredF16;
struct StoredBf16;
struct StoredE4m3;
struct StoredInt8;
/// A row that is already decoded.
struct Decoded;

/// The bits of a small float without its sign: exponent and mantissa are at their places in an f32, but the exponent
/// has this bias. Exact and branch-free, and never by way of a subnormal f32, on which a CPU takes a hundred times as
/// long: one in 16 random codes is subnormal.
#[inline(always)]
fn small_float(magnitude: u32, bias: u32) -> u32 {
    let is_subnormal = u32::from(magnitude >> 23 == 0);
    // A subnormal has the exponent after its own, and is less by a one before the point.
    let exponent = (127 - bias + is_subnormal) << 23;
    let one = f32::from_bits(is_subnormal * exponent);
    (f32::from_bits(magnitude + exponent) - one).to_bits()
}

impl Element for StoredF32 {
    type Raw = [u8; 4];

    #[inline(always)]
    fn value(raw: [u8; 4]) -> f32 {
        f32::from_le_bytes(raw)
    }
}

impl Element for StoredF16 {
    type Raw = [u8; 2];

    /// Branch-free, so that it vectorises; `half` chooses the instruction at run time, per element.
    #[inline(always)]
    fn value(raw: [u8; 2]) -> f32 {
        // Sign, exponent and mantissa at their places in an f32, but the exponent still has bias 15
        // instead of 127.
        let misbiased = (i32::from(i16::from_le_bytes(raw)) << 16 >> 3) as u32 & 0x8fff_e000;
        // Exact, for subnormals too.
        let value = f32::from_bits(misbiased) * f32::from_bits((127 + 112) << 23);
        // Infinities and NaN had an exponent of all ones, and get it back.
        let special = if value.abs() >= 65536.0 { 0x7f80_0000 } else { 0 };
        f32::from_bits(value.to_bits() | special)
    }
}

impl Element for StoredBf16 {
    type Raw = [u8; 2];

    #[inline(always)]
    fn value(raw: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)
    }
}

impl Element for StoredE4m3 {
    type Raw = u8;

    /// Branch-free, as f16. There are no infinities, and NaN is refused when a model is read.
    #[inline(always)]
    fn value(raw: u8) -> f32 {
        let (sign, magnitude) = (u32::from(raw & 0x80) << 24, u32::from(raw & 0x7f) << 20);
        f32::from_bits(small_float(magnitude, 7) | sign)
    }
}

impl Element for StoredInt8 {
    type Raw = u8;

    #[inline(always)]
    fn value(raw: u8) -> f32 {
        f32::from(raw.cast_signed())
    }
}

impl Element for Decoded {
    type Raw = f32;

    #[inline(always)]
    fn value(raw: f32) -> f32 {
        raw
    }
}

/// Adds the running sums: halves onto halves, so lane `i` meets lane `i + 16`, then `i + 8`, and so
/// on.
#[inline(always)]
fn tree(sums: &[f32; LANES]) -> f32 {
    let mut wide = [0f64; LANES];
    for (wide, &sum) in wide.iter_mut().zip(sums) {
        *wide = f64::from(sum);
    }
    let mut sums = wide;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0] as f32
}

/// The bits of an f32, rounded so that its lowest `TAG_BITS` are free, as in a flag-in-data buffer: to nearest, ties
/// away from zero. NaN stays NaN.
pub(crate) fn make_room(bits: u32) -> u32 {
    let tag = (1_u32 << abi::TAG_BITS) - 1;
    if f32::from_bits(bits).is_nan() {
        return f32::NAN.to_bits() & !tag;
    }
    bits.wrapping_add(tag.div_ceil(2)) & !tag
}

/// Bytes of a stored tensor, unless they overflow.
pub(crate) fn stored_bytes(tensor: &Tensor) -> Option<usize> {
    let (&cols, rows) = tensor.shape.split_last()?;
    let most = usize::MAX / 16;
    // No element takes more than four bytes, and no block more than twice that.
    let row = ((cols as usize) < most).then(|| tensor.dtype.row_bytes(cols as usize))?;
    rows.iter().try_fold(row, |bytes, &len| bytes.checked_mul(len as usize))
}

/// A stored matrix: row-major, little-endian, any alignment.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A view of `bytes`, or `None` if they are not `rows * cols` elements or the matrix is empty.
    pub(crate) fn new(dtype: DType, rows: usize, cols: usize, bytes: &'a [u8]) -> Option<Self> {
        rows.checked_mul(cols)?.checked_mul(size_of::<f32>())?;
        let expected = rows * dtype.row_bytes(cols);
        (expected > 0 && bytes.len() == expected).then_some(Self { dtype, rows, cols, bytes })
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Passes the rows to `to` as what they are.
    fn rows_to<T: ToRows>(&self, to: T) -> T::Output {
        let (bytes, cols) = (self.bytes, self.cols);
        if let Some(block) = self.dtype.block() {
            return to.run(&InBlocks::new(self.dtype, block, bytes, cols));
        }
        match self.dtype.scalar() {
            Scalar::F32 => to.run(&Plain::<StoredF32> { raw: bytes.as_chunks().0, cols }),
            Scalar::F16 => to.run(&Plain::<StoredF16> { raw: bytes.as_chunks().0, cols }),
            Scalar::Bf16 => to.run(&Plain::<StoredBf16> { raw: bytes.as_chunks().0, cols }),
            Scalar::E4m3 => to.run(&Plain::<StoredE4m3> { raw: bytes, cols }),
            Scalar::Int8 => to.run(&Plain::<StoredInt8> { raw: bytes, cols }),
            Scalar::Int4 | Scalar::E2m1 => unreachable!("{} lies in blocks", self.dtype.name()),
        }
    }

    pub(crate) fn decode_row(&self, row: usize, start: usize, out: &mut [f32]) {
        let mut from_zero = vec![0.0; start + out.len()];
        self.rows_to(DecodeRow { row, out: &mut from_zero });
        out.copy_from_slice(&from_zero[start..]);
    }

    /// Row `row` times `x`, which may be shorter than the row.
    pub(crate) fn dot_row(&self, row: usize, x: &[f32]) -> f32 {
        let mut out = [0.0];
        self.dot_rows(row, x, &mut out);
        out[0]
    }

    /// Products of `x`, which is not longer than a row, with the rows from `first` on; as many as `out` has elements.
    pub(crate) fn dot_rows(&self, first: usize, x: &[f32], out: &mut [f32]) {
        assert!(x.len() <= self.cols && first + out.len() <= self.rows);
        self.rows_to(DotRows { first, x, out });
    }

    /// `W x` for each of the vectors in `xs` (`[n, cols]`), as `[n, rows]`.
    pub(crate) fn apply(&self, xs: &[f32]) -> Vec<f32> {
        self.apply_with(Width::best(), xs)
    }

    fn apply_with(&self, width: Width, xs: &[f32]) -> Vec<f32> {
        self.rows_to(Apply { width, rows: self.rows, cols: self.cols, xs })
    }
}

/// Work on the rows of a matrix, whatever they are.
trait ToRows {
    type Output;

    fn run<R: Rows>(self, rows: &R) -> Self::Output;
}

/// The first elements of a row.
struct DecodeRow<'a> {
    row: usize,
    out: &'a mut [f32],
}

impl ToRows for DecodeRow<'_> {
    type Output = ();

    fn run<R: Rows>(self, rows: &R) {
        rows.decode(self.row, 0, self.out);
    }
}

/// [`Matrix::dot_rows`].
struct DotRows<'a> {
    first: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl ToRows for DotRows<'_> {
    type Output = ();

    fn run<R: Rows>(self, rows: &R) {
        product::single(Width::best(), rows, self.first, self.x, self.out);
    }
}

/// [`Matrix::apply`] with registers of a width.
struct Apply<'a> {
    width: Width,
    rows: usize,
    cols: usize,
    xs: &'a [f32],
}

impl ToRows for Apply<'_> {
    type Output = Vec<f32>;

    fn run<R: Rows>(self, stored: &R) -> Vec<f32> {
        let Self { width, rows, cols, xs } = self;
        let n = xs.len() / cols;
        // `[rows, n]`, so that each parallel task owns a contiguous part of the result.
        let mut by_row = vec![0f32; rows * n];
        if n <= 1 {
            let rows_per_task = (TASK_MACS / cols).max(1);
            let tasks = by_row.par_chunks_mut(rows_per_task).enumerate();
            tasks.for_each(|(task, out)| {
                product::single(width, stored, task * rows_per_task, xs, out);
            });
            return by_row;
        }
        let vectors = product::Vectors::new(xs, cols);
        let rows_per_task = product::rows_per_panel(rows, rayon::current_num_threads());
        let tasks = by_row.par_chunks_mut(rows_per_task * n).enumerate();
        tasks.for_each_init(product::Scratch::default, |scratch, (task, out)| {
            product::panel(width, (stored, task * rows_per_task), &vectors, scratch, out);
        });
        transpose(&by_row, n)
    }
}

#[inline(always)]
fn decode<E: Element>(raw: &[E::Raw], out: &mut [f32]) {
    debug_assert_eq!(raw.len(), out.len());
    for (out, &raw) in out.iter_mut().zip(raw) {
        *out = E::value(raw);
    }
}

/// `[len / cols, cols]` to `[cols, len / cols]`.
fn transpose(matrix: &[f32], cols: usize) -> Vec<f32> {
    if cols == 0 {
        return Vec::new();
    }
    let rows = matrix.len() / cols;
    let mut out = vec![0f32; matrix.len()];
    out.par_chunks_mut(rows.max(1)).enumerate().for_each(|(col, out)| {
        for (out, row) in out.iter_mut().zip(matrix.chunks_exact(cols)) {
            *out = row[col];
        }
    });
    out
}

/// `sqrt(mean(x^2) + eps)`, in `f64`.
pub(crate) fn root_mean_square(x: &[f32], eps: f32) -> f64 {
    let sum: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    (sum / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `x * weight / sqrt(mean(x^2) + eps)`.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / root_mean_square(x, eps);
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = (f64::from(x) * scale * f64::from(weight)) as f32;
    }
}

/// Turns scores into `exp(score - greatest)`, in place, and returns the greatest and the sum.
pub(crate) fn softmax_parts(scores: &mut [f64]) -> (f64, f64) {
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - greatest).exp();
        sum += *score;
    }
    (greatest, sum)
}

/// `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `x * Phi(x)`, the normal distribution in its `tanh` form.
fn gelu_tanh(x: f32) -> f32 {
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    (0.5 * x * (1.0 + inner.tanh())) as f32
}

/// The function between the halves of an MLP.
pub(crate) fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => gelu_tanh(x),
        Activation::ClampedSilu => (f64::from(x) / (1.0 + (-1.702 * f64::from(x)).exp())) as f32,
    }
}

/// `cap * tanh(x / cap)`, or `x` without a cap.
pub(crate) fn capped(cap: Option<f32>, x: f32) -> f32 {
    let cap = cap.map(f64::from);
    cap.map_or(x, |cap| (cap * (f64::from(x) / cap).tanh()) as f32)
}

/// Cosine and sine of each rotary angle at a position, times the factors that may follow the frequencies in a table.
///
/// The angle is the `f32` product, as every implementation has it; at large positions a wider
/// product is a different rotation.
pub(crate) fn rotations(position: u32, table: &[f32], head_dim: u32) -> Vec<(f32, f32)> {
    let (inv_freq, factors) = table.split_at(table.len().min(head_dim as usize / 2));
    let factors = factors.iter().copied().chain(std::iter::repeat(1.0));
    let rotation = |(&frequency, factor): (&f32, f32)| {
        let angle = f64::from(position as f32 * frequency);
        (angle.cos() as f32 * factor, angle.sin() as f32 * factor)
    };
    inv_freq.iter().zip(factors).map(rotation).collect()
}

/// Rotates element `i` of a head with element `i + head_dim / 2`.
pub(crate) fn rotate(head: &mut [f32], rotations: &[(f32, f32)]) {
    let (low, high) = head.split_at_mut(rotations.len());
    for ((low, high), &(cos, sin)) in low.iter_mut().zip(high).zip(rotations) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

/// Index of the largest value; the first of equals. NaN never wins, and an empty slice gives 0.
#[must_use]
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    for (index, &value) in values.iter().enumerate() {
        if value > largest {
            (best, largest) = (index, value);
        }
    }
    best as u32
}

#[cfg(test)]
mod tests;
