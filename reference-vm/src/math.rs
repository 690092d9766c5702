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
        let raw = u32::from(raw);
        // Sign, exponent and mantissa at their places in an f32, but the exponent has bias 7.
        let misbiased = (raw & 0x80) << 24 | (raw & 0x7f) << 20;
        f32::from_bits(misbiased) * f32::from_bits((127 + 120) << 23)
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

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of some rows.
    fn rows_bytes(&self, first: usize, rows: usize) -> &'a [u8] {
        let size = self.dtype.row_bytes(self.cols);
        &self.bytes[first * size..][..rows * size]
    }

    /// Rows as f32, if their elements lie in blocks: the first `cols` elements of each.
    fn decoded(&self, first: usize, rows: usize, cols: usize) -> Option<Vec<f32>> {
        let block = self.dtype.block()?;
        let mut out = vec![0.0; rows * cols];
        let stored = self.rows_bytes(first, rows).chunks_exact(self.dtype.row_bytes(self.cols));
        for (row, out) in stored.zip(out.chunks_exact_mut(cols.max(1))) {
            blocks::decode_row(self.dtype, block, row, out);
        }
        Some(out)
    }

    pub(crate) fn decode_row(&self, row: usize, start: usize, out: &mut [f32]) {
        if let Some(decoded) = self.decoded(row, 1, start + out.len()) {
            out.copy_from_slice(&decoded[start..]);
            return;
        }
        let size = self.dtype.bytes();
        let bytes = &self.rows_bytes(row, 1)[start * size..][..out.len() * size];
        match self.dtype.scalar() {
            Scalar::F32 => decode::<StoredF32>(bytes.as_chunks().0, out),
            Scalar::F16 => decode::<StoredF16>(bytes.as_chunks().0, out),
            Scalar::Bf16 => decode::<StoredBf16>(bytes.as_chunks().0, out),
            Scalar::E4m3 => decode::<StoredE4m3>(bytes, out),
            Scalar::Int8 => decode::<StoredInt8>(bytes, out),
            Scalar::Int4 | Scalar::E2m1 => unreachable!("{} lies in blocks", self.dtype.name()),
        }
    }

    /// Row `row` times `x`, which may be shorter than the row.
    pub(crate) fn dot_row(&self, row: usize, x: &[f32]) -> f32 {
        if let Some(decoded) = self.decoded(row, 1, x.len()) {
            return dot(&decoded, x);
        }
        let mut out = [0.0];
        self.single(&self.rows_bytes(row, 1)[..x.len() * self.dtype.bytes()], x, &mut out);
        out[0]
    }

    /// Products of `x`, which is as long as a row, with the rows from `first` on; as many as `out` has elements.
    pub(crate) fn dot_rows(&self, first: usize, x: &[f32], out: &mut [f32]) {
        if let Some(decoded) = self.decoded(first, out.len(), self.cols) {
            product::single::<Decoded>(Width::best(), &decoded, x, out);
            return;
        }
        self.single(self.rows_bytes(first, out.len()), x, out);
    }

    fn single(&self, bytes: &[u8], x: &[f32], out: &mut [f32]) {
        let width = Width::best();
        match self.dtype.scalar() {
            Scalar::F32 => product::single::<StoredF32>(width, bytes.as_chunks().0, x, out),
            Scalar::F16 => product::single::<StoredF16>(width, bytes.as_chunks().0, x, out),
            Scalar::Bf16 => product::single::<StoredBf16>(width, bytes.as_chunks().0, x, out),
            Scalar::E4m3 => product::single::<StoredE4m3>(width, bytes, x, out),
            Scalar::Int8 => product::single::<StoredInt8>(width, bytes, x, out),
            Scalar::Int4 | Scalar::E2m1 => unreachable!("{} lies in blocks", self.dtype.name()),
        }
    }

    /// `W x` for each of the vectors in `xs` (`[n, cols]`), as `[n, rows]`.
    pub(crate) fn apply(&self, xs: &[f32]) -> Vec<f32> {
        self.apply_with(Width::best(), xs)
    }

    fn apply_with(&self, width: Width, xs: &[f32]) -> Vec<f32> {
        if self.dtype.block().is_some() {
            return self.apply_decoded(width, xs);
        }
        match self.dtype.scalar() {
            Scalar::F32 => self.apply_stored::<StoredF32>(width, self.bytes.as_chunks().0, xs),
            Scalar::F16 => self.apply_stored::<StoredF16>(width, self.bytes.as_chunks().0, xs),
            Scalar::Bf16 => self.apply_stored::<StoredBf16>(width, self.bytes.as_chunks().0, xs),
            Scalar::E4m3 => self.apply_stored::<StoredE4m3>(width, self.bytes, xs),
            Scalar::Int8 => self.apply_stored::<StoredInt8>(width, self.bytes, xs),
            Scalar::Int4 | Scalar::E2m1 => unreachable!("{} lies in blocks", self.dtype.name()),
        }
    }

    /// The same for elements that lie in blocks: a few rows at a time are decoded.
    fn apply_decoded(&self, width: Width, xs: &[f32]) -> Vec<f32> {
        let n = xs.len() / self.cols;
        let mut by_row = vec![0f32; self.rows * n];
        let rows_per_task = (TASK_MACS / self.cols).max(1);
        let vectors = product::Vectors::new(xs, self.cols);
        let tasks = by_row.par_chunks_mut(rows_per_task * n.max(1)).enumerate();
        tasks.for_each_init(product::Scratch::default, |scratch, (task, out)| {
            let decoded = self.decoded(task * rows_per_task, out.len() / n, self.cols);
            product::panel::<Decoded>(width, &decoded.unwrap_or_default(), &vectors, scratch, out);
        });
        transpose(&by_row, n)
    }

    fn apply_stored<E: Element>(&self, width: Width, raw: &[E::Raw], xs: &[f32]) -> Vec<f32> {
        let (rows, cols) = (self.rows, self.cols);
        let n = xs.len() / cols;
        // `[rows, n]`, so that each parallel task owns a contiguous part of the result.
        let mut by_row = vec![0f32; rows * n];
        if n <= 1 {
            let rows_per_task = (TASK_MACS / cols).max(1);
            by_row
                .par_chunks_mut(rows_per_task)
                .zip(raw.par_chunks(rows_per_task * cols))
                .for_each(|(out, raw)| product::single::<E>(width, raw, xs, out));
            return by_row;
        }
        let vectors = product::Vectors::new(xs, cols);
        let rows_per_task = product::rows_per_panel(rows, rayon::current_num_threads());
        by_row
            .par_chunks_mut(rows_per_task * n)
            .zip(raw.par_chunks(rows_per_task * cols))
            .for_each_init(product::Scratch::default, |scratch, (out, raw)| {
                product::panel::<E>(width, raw, &vectors, scratch, out);
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
