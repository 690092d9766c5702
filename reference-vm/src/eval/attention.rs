//! Causal attention of several positions over one key/value cache.
//!
//! Keys are processed in blocks of [`BLOCK`] positions counted from zero, however many were fed together. In a block,
//! scores and mixed values are chains of fused multiply-adds in `f32`; the greatest score so far rescales the earlier
//! blocks, and blocks are joined in `f64`. So neither batching positions in a pass nor grouping rows in a task changes
//! a bit.

use ir::Graph;
use rayon::prelude::*;

use crate::math::{Blend, Width, blend, capped, exp_below};

/// Positions of a block of keys.
const BLOCK: usize = 64;

/// Query rows per walk over the keys: a block is read from memory once for all of them.
const TASK_ROWS: usize = 24;

/// Keys (after norm and rotation) and values of one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache {
    /// `[blocks, kv_width, BLOCK]`: one dimension of all keys of a block is contiguous.
    keys: Vec<f32>,
    /// `[positions, kv_width]`.
    values: Vec<f32>,
    positions: usize,
}

impl Cache {
    /// Appends positions; both are `[positions, width]`.
    pub(super) fn extend(&mut self, keys: &[f32], values: &[f32], width: usize) {
        self.values.extend_from_slice(values);
        for key in keys.chunks_exact(width) {
            let (block, at) = (self.positions / BLOCK, self.positions % BLOCK);
            self.keys.resize((block + 1) * width * BLOCK, 0.0);
            let column = self.keys[block * width * BLOCK..].iter_mut().skip(at).step_by(BLOCK);
            for (place, &element) in column.zip(key) {
                *place = element;
            }
            self.positions += 1;
        }
    }

    pub(super) fn truncate(&mut self, positions: usize, width: usize) {
        self.positions = self.positions.min(positions);
        self.values.truncate(positions * width);
        self.keys.truncate(positions.div_ceil(BLOCK) * width * BLOCK);
    }

    pub(super) fn positions(&self) -> usize {
        self.positions
    }

    /// Numbers in memory.
    pub(super) fn elements(&self) -> usize {
        self.keys.len() + self.values.len()
    }

    /// `[positions, width]`.
    pub(super) fn keys(&self, width: usize) -> Vec<f32> {
        let key = |position: usize| {
            let block = &self.keys[position / BLOCK * width * BLOCK..][..width * BLOCK];
            block.iter().skip(position % BLOCK).step_by(BLOCK)
        };
        (0..self.positions).flat_map(key).copied().collect()
    }

    /// `[positions, width]`.
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }
}

/// What a query attends to beside all keys before it.
#[derive(Clone, Copy)]
pub(super) struct Sees<'a> {
    /// Only this many of the last positions.
    pub(super) window: Option<u32>,
    /// For each query head a score with a value of zero.
    pub(super) sinks: Option<&'a [f32]>,
}

/// Attention at the cache's last positions, whose rotated queries are `[positions, heads * head_dim]`; returns the
/// mixed values in the same shape.
pub(super) fn attend(graph: &Graph, cache: &Cache, q: &[f32], sees: Sees<'_>) -> Vec<f32> {
    let (head_dim, group) = (graph.head_dim as usize, graph.group() as usize);
    let (width, kv_heads) = (graph.q_width() as usize, graph.kv_heads as usize);
    let n = q.len() / width;
    let first = cache.positions - n;
    // `[kv_heads, positions, group, head_dim]`: rows that share keys are adjacent.
    let place = |kv_head: usize, i: usize| (i * width + kv_head * group * head_dim)..;
    let mut by_head = vec![0f32; q.len()];
    let rows_of = group * head_dim;
    for (index, rows) in by_head.chunks_exact_mut(rows_of).enumerate() {
        rows.copy_from_slice(&q[place(index / n, index % n)][..rows_of]);
    }
    by_head.par_chunks_mut(n * rows_of).enumerate().for_each(|(kv_head, rows)| {
        rows.par_chunks_mut(TASK_ROWS * head_dim).enumerate().for_each(|(task, rows)| {
            let ranges = (0..rows.len() / head_dim).map(|row| {
                let end = first + (task * TASK_ROWS + row) / group + 1;
                (sees.window.map_or(0, |window| end.saturating_sub(window as usize)), end)
            });
            let ranges: Vec<_> = ranges.collect();
            let sink = |row| kv_head * group + (task * TASK_ROWS + row) % group;
            let mut walk = Walk::new(graph, cache, kv_head, ranges);
            if let Some(sinks) = sees.sinks {
                walk.begin_with((0..walk.ranges.len()).map(|row| sinks[sink(row)]).collect());
            }
            walk.run(rows);
        });
    });
    let mut mixed = vec![0f32; q.len()];
    debug_assert_eq!(by_head.len(), kv_heads * n * rows_of);
    for (index, rows) in by_head.chunks_exact(rows_of).enumerate() {
        mixed[place(index / n, index % n)][..rows_of].copy_from_slice(rows);
    }
    mixed
}

/// A group of query rows during the walk over the keys of one head.
struct Walk<'a> {
    cache: &'a Cache,
    scale: f32,
    cap: Option<f32>,
    head_dim: usize,
    /// Elements of all keys of a position.
    width: usize,
    kv_head: usize,
    /// Range of keys that each row attends to.
    ranges: Vec<(usize, usize)>,
    /// Greatest score of each row so far.
    greatest: Vec<f32>,
    /// Sum of each row's weights so far.
    total: Vec<f64>,
    /// `[rows, head_dim]`: weighted values so far.
    sums: Vec<f64>,
    /// `[rows, BLOCK]`: scores, then weights, of a block.
    weights: Vec<f32>,
    /// `[rows, head_dim]`: weighted values of a block.
    part: Vec<f32>,
    /// Factor of each row's earlier sums, from the current block.
    rescale: Vec<f64>,
}

impl<'a> Walk<'a> {
    fn new(graph: &Graph, cache: &'a Cache, kv_head: usize, ranges: Vec<(usize, usize)>) -> Self {
        let (rows, head_dim) = (ranges.len(), graph.head_dim as usize);
        Self {
            cache,
            scale: graph.attn_scale,
            cap: graph.score_cap,
            head_dim,
            width: graph.kv_width() as usize,
            kv_head,
            ranges,
            greatest: vec![f32::NEG_INFINITY; rows],
            total: vec![0.0; rows],
            sums: vec![0.0; rows * head_dim],
            weights: vec![0.0; rows * BLOCK],
            part: vec![0.0; rows * head_dim],
            rescale: vec![1.0; rows],
        }
    }

    /// Begins with one score for each row, whose values are zero.
    fn begin_with(&mut self, scores: Vec<f32>) {
        self.greatest = scores;
        self.total.fill(1.0);
    }

    /// Replaces the queries `[rows, head_dim]` by the mixed values.
    fn run(mut self, rows: &mut [f32]) {
        let width = Width::best();
        let from = self.ranges.iter().map(|range| range.0).min().unwrap_or(0);
        let to = self.ranges.iter().map(|range| range.1).max().unwrap_or(0);
        for block in from / BLOCK..to.div_ceil(BLOCK) {
            self.scores(width, block, rows);
            for row in 0..self.ranges.len() {
                self.weigh(width, block, row);
            }
            self.mix(width, block, to.min((block + 1) * BLOCK) - block * BLOCK);
        }
        let sums = self.sums.chunks_exact(self.head_dim).zip(&self.total);
        for (row, (sums, total)) in rows.chunks_exact_mut(self.head_dim).zip(sums) {
            for (out, sum) in row.iter_mut().zip(sums) {
                *out = (sum / total) as f32;
            }
        }
    }

    fn scores(&mut self, width: Width, block: usize, queries: &[f32]) {
        let keys = &self.cache.keys[(block * self.width + self.kv_head * self.head_dim) * BLOCK..];
        let product = Blend {
            a: (queries, self.head_dim),
            b: (keys, BLOCK),
            out: (&mut self.weights, BLOCK),
            rows: self.ranges.len(),
            depth: self.head_dim,
            cols: BLOCK,
        };
        blend(width, product);
    }

    /// Turns a row's scores into weights relative to its greatest score so far. Keys that it does not attend to get
    /// weight zero.
    fn weigh(&mut self, width: Width, block: usize, row: usize) {
        let (start, end) = self.ranges[row];
        let within = |position: usize| position.saturating_sub(block * BLOCK).min(BLOCK);
        let (low, high) = (within(start), within(end));
        let weights = &mut self.weights[row * BLOCK..][..BLOCK];
        weights[..low].fill(0.0);
        weights[high.max(low)..].fill(0.0);
        self.rescale[row] = 1.0;
        if low >= high {
            return;
        }
        let scores = &mut weights[low..high];
        for score in scores.iter_mut() {
            *score = capped(self.cap, *score * self.scale);
        }
        let before = self.greatest[row];
        let greatest = scores.iter().fold(before, |best, &s| if s > best { s } else { best });
        if greatest > before {
            self.rescale[row] = (f64::from(before) - f64::from(greatest)).exp();
            self.greatest[row] = greatest;
        }
        let sum = exp_below(width, scores, greatest);
        self.total[row] = self.total[row] * self.rescale[row] + sum;
    }

    /// Adds the block's first `depth` values.
    fn mix(&mut self, width: Width, block: usize, depth: usize) {
        let values =
            &self.cache.values[block * BLOCK * self.width + self.kv_head * self.head_dim..];
        let product = Blend {
            a: (&self.weights, BLOCK),
            b: (values, self.width),
            out: (&mut self.part, self.head_dim),
            rows: self.ranges.len(),
            depth,
            cols: self.head_dim,
        };
        blend(width, product);
        let parts = self.part.chunks_exact(self.head_dim).zip(&self.rescale);
        for (sums, (part, rescale)) in self.sums.chunks_exact_mut(self.head_dim).zip(parts) {
            for (sum, &part) in sums.iter_mut().zip(part) {
                *sum = *sum * rescale + f64::from(part);
            }
        }
    }
}
