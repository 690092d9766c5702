//! Products of two short `f32` matrices, for attention.
//!
//! Each element is one chain of fused multiply-adds over the depth, first to last, starting from zero. Tiles of rows
//! and columns affect the speed and cannot change a chain.

use super::vector::{Kernel, Vector, Width, dispatch};

/// `out[row][col] = sum over d of a[row][d] * b[d][col]`; each matrix has its own row stride.
pub(crate) struct Blend<'a> {
    /// `[rows, depth]` and its stride.
    pub(crate) a: (&'a [f32], usize),
    /// `[depth, cols]` and its stride.
    pub(crate) b: (&'a [f32], usize),
    /// `[rows, cols]` and its stride.
    pub(crate) out: (&'a mut [f32], usize),
    /// Rows of `a` and `out`.
    pub(crate) rows: usize,
    /// Columns of `a`, rows of `b`.
    pub(crate) depth: usize,
    /// Columns of `b` and `out`.
    pub(crate) cols: usize,
}

pub(crate) fn blend(width: Width, product: Blend<'_>) {
    dispatch(width, product);
}

/// Registers of one row of a tile.
const ROW_REGISTERS: usize = 4;

impl Kernel for Blend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { a: (a, a_stride), b: (b, b_stride), out: (out, out_stride), rows, depth, cols } =
            self;
        if rows == 0 || depth == 0 || cols == 0 {
            return;
        }
        assert!(a.len() >= (rows - 1) * a_stride + depth);
        assert!(b.len() >= (depth - 1) * b_stride + cols);
        assert!(out.len() >= (rows - 1) * out_stride + cols);
        for first in (0..rows).step_by(V::GROUPS) {
            let count = V::GROUPS.min(rows - first);
            let a = &a[first * a_stride..];
            let out = &mut out[first * out_stride..];
            let mut col = 0;
            while col < cols {
                let (b, out) = (&b[col..], &mut out[col..]);
                let tile = Tile { a, a_stride, b, b_stride, out, out_stride, depth };
                if cols - col >= ROW_REGISTERS * V::LEN {
                    tile.rows_of::<V, ROW_REGISTERS>(count);
                    col += ROW_REGISTERS * V::LEN;
                } else if cols - col >= V::LEN {
                    tile.rows_of::<V, 1>(count);
                    col += V::LEN;
                } else {
                    tile.one_column(count);
                    col += 1;
                }
            }
        }
    }
}

/// Pointers to a tile's first elements.
struct Tile<'a> {
    a: &'a [f32],
    a_stride: usize,
    b: &'a [f32],
    b_stride: usize,
    out: &'a mut [f32],
    out_stride: usize,
    depth: usize,
}

impl Tile<'_> {
    /// A separate instance per count, so that the sums are kept in registers.
    #[inline(always)]
    fn rows_of<V: Vector, const C: usize>(self, count: usize) {
        match count {
            1 => self.run::<V, 1, C>(),
            2 => self.run::<V, 2, C>(),
            3 => self.run::<V, 3, C>(),
            4 => self.run::<V, 4, C>(),
            5 => self.run::<V, 5, C>(),
            _ => self.run::<V, 6, C>(),
        }
    }

    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "indices keep the sums in registers, see inside"
    )]
    fn run<V: Vector, const R: usize, const C: usize>(self) {
        let Self { a, a_stride, b, b_stride, out, out_stride, depth } = self;
        assert!(a.len() >= (R - 1) * a_stride + depth);
        assert!(b.len() >= (depth - 1) * b_stride + C * V::LEN);
        assert!(out.len() >= (R - 1) * out_stride + C * V::LEN);
        // Plain indices and no closures: iterators over the sums would keep them in memory.
        let mut sums = [[V::splat(0.0); C]; R];
        for d in 0..depth {
            let mut row = [V::splat(0.0); C];
            for c in 0..C {
                // SAFETY: `d < depth` and `c < C`; the length was asserted.
                row[c] = unsafe { V::load(b.as_ptr().add(d * b_stride + c * V::LEN)) };
            }
            for r in 0..R {
                // SAFETY: `d < depth` and `r < R`; the length was asserted.
                let factor = V::splat(unsafe { *a.as_ptr().add(r * a_stride + d) });
                for c in 0..C {
                    sums[r][c] = factor.mul_add(row[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                // SAFETY: `r < R` and `c < C`; the length was asserted.
                unsafe { sums[r][c].store(out.as_mut_ptr().add(r * out_stride + c * V::LEN)) };
            }
        }
    }

    /// The remaining columns of a width that is not a multiple of a register's.
    #[inline(always)]
    fn one_column(self, count: usize) {
        for row in 0..count {
            let a = &self.a[row * self.a_stride..][..self.depth];
            let column = self.b.iter().step_by(self.b_stride);
            let mut chain = 0f32;
            for (a, &b) in a.iter().zip(column) {
                chain = a.mul_add(b, chain);
            }
            self.out[row * self.out_stride] = chain;
        }
    }
}

/// Turns each score into `exp(score - greatest)` and returns the sum. No score may exceed `greatest`. Below `exp(-87)`
/// the result is clamped, as `f32` does not go much lower.
pub(crate) fn exp_below(width: Width, scores: &mut [f32], greatest: f32) -> f64 {
    dispatch(width, ExpBelow { scores, greatest })
}

struct ExpBelow<'a> {
    scores: &'a mut [f32],
    greatest: f32,
}

/// Running sums of [`exp_below`].
const SUMS: usize = 16;

impl Kernel for ExpBelow<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: Vector>(self) -> f64 {
        let mut sums = [0f32; SUMS];
        let (chunks, rest) = self.scores.as_chunks_mut::<SUMS>();
        for chunk in chunks {
            for (score, sum) in chunk.iter_mut().zip(&mut sums) {
                *score = exp(*score - self.greatest);
                *sum += *score;
            }
        }
        for (score, sum) in rest.iter_mut().zip(&mut sums) {
            *score = exp(*score - self.greatest);
            *sum += *score;
        }
        sums.iter().map(|&sum| f64::from(sum)).sum()
    }
}

/// `exp(x)` for `x` of zero and below, to about one unit in the last place: a power of two times a polynomial on
/// -ln(2)/2..ln(2)/2. The library's function differs from system to system.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Written so that NaN stays NaN.
    let x = if x < -87.0 { -87.0 } else { x };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = rounded - ROUND;
    let rest = power.mul_add(-LN2_LOW, power.mul_add(-LN2_HIGH, x));
    let mut value: f32 = 1.0 / 5040.0;
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        value = value.mul_add(rest, term);
    }
    value * f32::from_bits(rounded.to_bits().wrapping_add(127) << 23)
}
