//! Products of stored rows with vectors: the dot product of `math.rs`, for one vector or many.
//!
//! For one vector each row is read once, and the speed is bound by memory. For many, rows are decoded in panels, and
//! tiles of four rows times several vectors keep their running sums in registers. Both add the same products to every
//! running sum in the same order, so both give the same bits.

use super::vector::{Kernel, Vector, Width, dispatch};
use super::{Decoded, Element, LANES, decode, tree};

/// Rows of a tile.
const TILE_ROWS: usize = 4;

/// Columns of a panel: a tile's rows and vectors stay in the first-level cache.
const PANEL_COLS: usize = 1024;

/// Most rows of a panel: the panel stays in the second-level cache.
const PANEL_ROWS: usize = 32;

/// Elements of a row that are decoded at a time for a single vector: they stay in the first-level cache.
const SINGLE_COLS: usize = 512;

/// Panels per thread, so that no thread waits long for the last one.
const PANELS_PER_THREAD: usize = 4;

/// Rows per panel of a matrix with this many rows.
pub(super) fn rows_per_panel(rows: usize, threads: usize) -> usize {
    let even = rows.div_ceil(threads * PANELS_PER_THREAD).next_multiple_of(TILE_ROWS);
    even.min(PANEL_ROWS)
}

/// The rows of a stored matrix, decoded where they are multiplied: so decoding is compiled for each width of vectors.
pub(super) trait Rows: Sync {
    /// Decodes `out.len()` elements of a row from column `first` on, a multiple of [`SINGLE_COLS`].
    fn decode(&self, row: usize, first: usize, out: &mut [f32]);
}

/// Rows of single elements.
pub(super) struct Plain<'a, E: Element> {
    pub(super) raw: &'a [E::Raw],
    pub(super) cols: usize,
}

impl<E: Element> Rows for Plain<'_, E> {
    #[inline(always)]
    fn decode(&self, row: usize, first: usize, out: &mut [f32]) {
        decode::<E>(&self.raw[row * self.cols + first..][..out.len()], out);
    }
}

/// The dot product of the module's description, over as many elements as `x` has; `decoded` is scratch.
///
/// The running sums are registers: with an array of them the compiler processes one element at a time.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices keep the sums in registers, see inside")]
fn lane_dot<R: Rows, V: Vector>(
    rows: &R,
    row: usize,
    x: &[f32],
    decoded: &mut [f32; SINGLE_COLS],
) -> f32 {
    assert!(V::LEN >= 8 && LANES.is_multiple_of(V::LEN) && SINGLE_COLS.is_multiple_of(LANES));
    // Plain indices and no closures: iterators over the sums would keep them in memory.
    let mut sums = [V::splat(0.0); LANES / 8];
    let mut lanes = [0f32; LANES];
    let mut start = 0;
    while start + LANES <= x.len() {
        let count = SINGLE_COLS.min(x.len() - start) / LANES * LANES;
        rows.decode(row, start, &mut decoded[..count]);
        let x = &x[start..start + count];
        for chunk in 0..count / LANES {
            for r in 0..LANES / V::LEN {
                let at = chunk * LANES + r * V::LEN;
                // SAFETY: `at + V::LEN <= count`, which is the length of both.
                let (a, b) =
                    unsafe { (V::load(decoded.as_ptr().add(at)), V::load(x.as_ptr().add(at))) };
                sums[r] = a.mul_add(b, sums[r]);
            }
        }
        start += count;
    }
    for r in 0..LANES / V::LEN {
        // SAFETY: `(r + 1) * V::LEN <= LANES`.
        unsafe { sums[r].store(lanes.as_mut_ptr().add(r * V::LEN)) };
    }
    if start < x.len() {
        // The rest begins in the middle of a block of codes: the part that it ends is decoded again.
        let first = start / SINGLE_COLS * SINGLE_COLS;
        let decoded = &mut decoded[..x.len() - first];
        rows.decode(row, first, decoded);
        for ((sum, &a), &x) in lanes.iter_mut().zip(&decoded[start - first..]).zip(&x[start..]) {
            *sum = a.mul_add(x, *sum);
        }
    }
    tree(&lanes)
}

/// One vector with each of several stored rows, from row `first` on.
struct Single<'a, R: Rows> {
    rows: &'a R,
    first: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl<R: Rows> Kernel for Single<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let mut decoded = [0f32; SINGLE_COLS];
        for (row, out) in self.out.iter_mut().enumerate() {
            *out = lane_dot::<R, V>(self.rows, self.first + row, self.x, &mut decoded);
        }
    }
}

/// `out[row] = rows[first + row] . x`, over as many elements as `x` has.
pub(super) fn single<R: Rows>(width: Width, rows: &R, first: usize, x: &[f32], out: &mut [f32]) {
    dispatch(width, Single { rows, first, x, out });
}

/// Dot product of two decoded vectors of one length.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut out = [0.0];
    single(Width::best(), &Plain::<Decoded> { raw: a, cols: a.len() }, 0, b, &mut out);
    out[0]
}

/// Vectors of one length, each padded with zeros to whole running sums.
pub(super) struct Vectors<'a> {
    data: std::borrow::Cow<'a, [f32]>,
    cols: usize,
    stride: usize,
}

impl<'a> Vectors<'a> {
    /// `[n, cols]`, copied only if `cols` is not a multiple of [`LANES`].
    pub(super) fn new(xs: &'a [f32], cols: usize) -> Self {
        let stride = cols.next_multiple_of(LANES);
        if stride == cols {
            return Self { data: xs.into(), cols, stride };
        }
        let mut data = vec![0f32; xs.len() / cols * stride];
        for (padded, x) in data.chunks_exact_mut(stride).zip(xs.chunks_exact(cols)) {
            padded[..cols].copy_from_slice(x);
        }
        Self { data: data.into(), cols, stride }
    }

    pub(super) fn len(&self) -> usize {
        self.data.len() / self.stride
    }
}

/// Scratch memory of a panel, reused from panel to panel.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[rows, columns of a panel]`.
    panel: Vec<f32>,
    /// `[tiles, vectors, rows of a tile, LANES]`.
    sums: Vec<f32>,
}

/// Several vectors with each of several stored rows, from row `first_row` on.
struct Panel<'a, R: Rows> {
    stored: &'a R,
    first_row: usize,
    xs: &'a Vectors<'a>,
    scratch: &'a mut Scratch,
    out: &'a mut [f32],
}

/// `out[row][n] = rows[first_row + row] . xs[n]`, for the rows of one panel.
pub(super) fn panel<R: Rows>(
    width: Width,
    (stored, first_row): (&R, usize),
    xs: &Vectors<'_>,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    dispatch(width, Panel { stored, first_row, xs, scratch, out });
}

impl<R: Rows> Kernel for Panel<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { stored, first_row, xs, scratch, out } = self;
        let (n, cols) = (xs.len(), xs.cols);
        let rows = out.len() / n.max(1);
        let tiles = rows.div_ceil(TILE_ROWS);
        scratch.panel.resize(tiles * TILE_ROWS * PANEL_COLS, 0.0);
        scratch.sums.clear();
        scratch.sums.resize(tiles * n * TILE_ROWS * LANES, 0.0);
        for first in (0..cols).step_by(PANEL_COLS) {
            let len = PANEL_COLS.min(cols - first);
            for (row, panel) in
                (first_row..).zip(scratch.panel.chunks_exact_mut(PANEL_COLS).take(rows))
            {
                stored.decode(row, first, &mut panel[..len]);
                panel[len..len.next_multiple_of(LANES)].fill(0.0);
            }
            let steps = len.div_ceil(LANES);
            for start in (0..n).step_by(V::GROUPS) {
                let count = V::GROUPS.min(n - start);
                let x = &xs.data[start * xs.stride + first..];
                for tile in 0..tiles {
                    let panel = &scratch.panel[tile * TILE_ROWS * PANEL_COLS..];
                    let sums = &mut scratch.sums[(tile * n + start) * TILE_ROWS * LANES..];
                    tile_of::<V>(panel, x, xs.stride, steps, count, sums);
                }
            }
        }
        for (index, sums) in scratch.sums.as_chunks::<LANES>().0.iter().enumerate() {
            let (row, x) =
                (index / TILE_ROWS / n * TILE_ROWS + index % TILE_ROWS, index / TILE_ROWS % n);
            if row < rows {
                out[row * n + x] = tree(sums);
            }
        }
    }
}

/// A tile of `count` vectors; a separate instance per count, so that the sums are kept in registers.
#[inline(always)]
fn tile_of<V: Vector>(
    panel: &[f32],
    x: &[f32],
    stride: usize,
    steps: usize,
    count: usize,
    sums: &mut [f32],
) {
    match count {
        1 => tile::<V, 1>(panel, x, stride, steps, sums),
        2 => tile::<V, 2>(panel, x, stride, steps, sums),
        3 => tile::<V, 3>(panel, x, stride, steps, sums),
        4 => tile::<V, 4>(panel, x, stride, steps, sums),
        5 => tile::<V, 5>(panel, x, stride, steps, sums),
        _ => tile::<V, 6>(panel, x, stride, steps, sums),
    }
}

/// Adds `steps` products each to the running sums of four rows of a panel times `N` vectors. One register's worth of
/// running sums at a time.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices keep the sums in registers, see inside")]
fn tile<V: Vector, const N: usize>(
    panel: &[f32],
    x: &[f32],
    stride: usize,
    steps: usize,
    sums: &mut [f32],
) {
    assert!(steps > 0 && V::LEN <= LANES);
    assert!(panel.len() >= (TILE_ROWS - 1) * PANEL_COLS + steps * LANES);
    assert!(x.len() >= (N - 1) * stride + steps * LANES);
    assert!(sums.len() >= N * TILE_ROWS * LANES);
    // Plain indices and no closures: iterators over the sums would keep them in memory.
    for lane in (0..LANES).step_by(V::LEN) {
        let mut acc = [[V::splat(0.0); TILE_ROWS]; N];
        for n in 0..N {
            for row in 0..TILE_ROWS {
                let at = (n * TILE_ROWS + row) * LANES + lane;
                // SAFETY: `n < N`, `row < TILE_ROWS`, `lane + V::LEN <= LANES`; the length was asserted.
                acc[n][row] = unsafe { V::load(sums.as_ptr().add(at)) };
            }
        }
        for step in 0..steps {
            let at = step * LANES + lane;
            let mut rows = [V::splat(0.0); TILE_ROWS];
            for row in 0..TILE_ROWS {
                // SAFETY: `at + V::LEN <= steps * LANES`; the length was asserted.
                rows[row] = unsafe { V::load(panel.as_ptr().add(row * PANEL_COLS + at)) };
            }
            for n in 0..N {
                // SAFETY: as above, and `n < N`.
                let x = unsafe { V::load(x.as_ptr().add(n * stride + at)) };
                for row in 0..TILE_ROWS {
                    acc[n][row] = rows[row].mul_add(x, acc[n][row]);
                }
            }
        }
        for n in 0..N {
            for row in 0..TILE_ROWS {
                let at = (n * TILE_ROWS + row) * LANES + lane;
                // SAFETY: as for reading them.
                unsafe { acc[n][row].store(sums.as_mut_ptr().add(at)) };
            }
        }
    }
}
