//! Evaluates a model graph directly, without a schedule or program: the source of all expected values.
//!
//! All arithmetic is on `f32` values; sums of norms are in `f64`, dot products are those of `math.rs`
//! and attention is that of `attention.rs`. Feeding tokens one at a time or all at once gives the same
//! bits; together they share each pass over the weights, and most of the work is matrix products.

mod attention;
mod bind;
mod experts;
mod kept;
mod ops;
mod rounding;
mod routed;
mod routing;

use std::collections::BTreeSet;

use ir::{Clamped, Graph, Linear, TensorId, Weights};
use rayon::prelude::*;

use attention::{Cache, Sees, attend};
use bind::Binder;
use experts::{BoundExperts, clamped_product};
use rounding::Rounding;
use routing::{Router, Routing};

pub use kept::{Followed, Kept, Sharing};
pub(crate) use ops::{Belongs, greatest};

use crate::math::{
    Matrix, activate, argmax, capped, rms_norm, root_mean_square, rotate, rotations,
};
use crate::trap::InputError;

/// Positions per pass over the weights; bounds the memory of a long prompt.
const POSITIONS_PER_PASS: usize = 64;

/// The same of a mixture, whose experts are chosen by few of them: decoding an expert costs as much as multiplying it
/// with 20.
const POSITIONS_PER_PASS_OF_EXPERTS: usize = 192;

/// Why a graph cannot be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// The graph's dimensions contradict each other.
    #[error(
        "the graph has {heads} query heads, {kv_heads} key/value heads, head_dim {head_dim} and {frequencies} rotary frequencies"
    )]
    Heads {
        /// Query heads.
        heads: u32,
        /// Key/value heads.
        kv_heads: u32,
        /// Elements of one head.
        head_dim: u32,
        /// Length of `inv_freq`.
        frequencies: usize,
    },
    /// A router chooses none of its experts, or more than there are.
    #[error("a router chooses {top_k} of {count} experts")]
    Experts {
        /// Experts chosen for a position.
        top_k: u32,
        /// Experts.
        count: usize,
    },
    /// The graph refers to a tensor that it does not have.
    #[error("tensor {tensor} does not exist: the graph has {len}")]
    MissingTensor {
        /// The tensor referred to.
        tensor: TensorId,
        /// Tensors of the graph.
        len: usize,
    },
    /// A tensor does not have the shape that its use requires.
    #[error("tensor {tensor} has shape {got:?} where {want:?} is used")]
    Shape {
        /// The tensor.
        tensor: TensorId,
        /// The required shape.
        want: Vec<u32>,
        /// Its shape.
        got: Vec<u32>,
    },
    /// A matrix has no elements.
    #[error("tensor {0} is used as a matrix and has no elements")]
    Empty(TensorId),
    /// The weights hold a number of bytes that differs from the graph's.
    #[error("tensor {tensor} has {got} bytes instead of {want}")]
    Bytes {
        /// The tensor.
        tensor: TensorId,
        /// Bytes of its shape and type.
        want: usize,
        /// Bytes that the weights hold.
        got: usize,
    },
    /// Invalid tokens, or an invalid cache to resume from.
    #[error(transparent)]
    Input(#[from] InputError),
}

/// The positions of a [`run`](Evaluator::run) whose logits are computed. The vocabulary is often the largest matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Every fed position, in order.
    All,
    /// The last fed position only.
    Last,
    /// None: the run fills the KV cache.
    Skip,
}

/// A graph bound to its weights, with the KV cache of one sequence.
pub struct Evaluator<'a> {
    graph: &'a Graph,
    embed: Matrix<'a>,
    layers: Vec<BoundLayer<'a>>,
    final_norm: Vec<f32>,
    lm_head: BoundLinear<'a>,
    caches: Vec<Cache>,
    positions: usize,
    capacity: usize,
    rounding: Rounding,
    routing: Routing,
    /// Inputs of each layer at all positions fed, `[positions, hidden]`, if they are to be kept.
    inputs: Option<Vec<Vec<f32>>>,
    /// The last position's input to `lm_head`; empty if there is none to continue from.
    last: Vec<f32>,
}

struct BoundLinear<'a> {
    weight: Matrix<'a>,
    scale: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

/// A layer's blocks with their weights.
struct BoundLayer<'a> {
    attention: Block<BoundAttention<'a>>,
    mlp: Block<BoundFeedForward<'a>>,
}

/// A block's norms and body.
struct Block<B> {
    norm: Option<Vec<f32>>,
    post_norm: Option<Vec<f32>>,
    body: B,
}

struct BoundAttention<'a> {
    q: BoundLinear<'a>,
    k: BoundLinear<'a>,
    v: BoundLinear<'a>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    o: BoundLinear<'a>,
    sinks: Option<Vec<f32>>,
    window: Option<u32>,
    rotary: u32,
}

enum BoundFeedForward<'a> {
    Gated(Box<BoundGated<'a>>),
    Experts(Box<BoundExperts<'a>>),
}

struct BoundGated<'a> {
    gate: BoundLinear<'a>,
    up: BoundLinear<'a>,
    down: BoundLinear<'a>,
}

impl<'a> Evaluator<'a> {
    /// Binds the graph to its weights. The KV cache may grow to the graph's `max_positions`.
    ///
    /// # Errors
    /// If the graph contradicts itself or the weights do not have its shapes.
    pub fn new(graph: &'a Graph, weights: &'a dyn Weights) -> Result<Self, EvalError> {
        check_heads(graph)?;
        let bind = Binder::new(graph, weights);
        let lm_head = Linear { weight: graph.lm_head, scale: graph.lm_head_scale, bias: None };
        let layers: Vec<_> =
            graph.layers.iter().map(|layer| bind.layer(layer)).collect::<Result<_, _>>()?;
        Ok(Self {
            graph,
            embed: bind.matrix(graph.embed, graph.vocab, graph.hidden)?,
            final_norm: bind.vector(graph.final_norm, graph.hidden)?,
            lm_head: bind.linear(lm_head, graph.vocab, graph.hidden)?,
            caches: layers.iter().map(|_| Cache::default()).collect(),
            layers,
            positions: 0,
            capacity: graph.max_positions as usize,
            rounding: Rounding::None,
            routing: Routing::default(),
            inputs: None,
            last: Vec::new(),
        })
    }

    /// Limits the KV cache to `capacity` positions, like a program with that capacity.
    #[must_use]
    pub fn with_capacity(mut self, capacity: u32) -> Self {
        self.capacity = capacity as usize;
        self
    }

    /// Rounds every activation that a program may hand over in flag-in-data words as those words do. The resulting
    /// change bounds that of a correct program (docs/explanation/tolerances.md).
    #[must_use]
    pub fn with_rounded_handoffs(mut self) -> Self {
        self.rounding = Rounding::Handoffs;
        self
    }

    /// Rounds like the device: hand-offs, the vectors that it multiplies with weights, and the stored keys and values.
    /// The queries and the weights of the softmax, of which it multiplies 22 bits, and sums are not rounded
    /// (docs/explanation/tolerances.md).
    #[must_use]
    pub fn with_device_roundings(self) -> Self {
        let one_half = self.graph.vectors().one_half;
        self.with_vectors_of(one_half, true)
    }

    /// The same as the kernel of several sequences, whose vectors have both halves in every model (batch_products.cuh).
    #[must_use]
    pub fn with_batch_roundings(self) -> Self {
        self.with_vectors_of(false, false)
    }

    /// Rounds like the kernels that run a prompt in chunks, whose vectors are one f16 in every model. Their queries, weights of the softmax and
    /// codes are one f16 too: for these, hand-offs are moved by up to half a unit in its last place, differently in each draw.
    #[must_use]
    pub fn with_chunk_roundings(mut self, draw: u32) -> Self {
        self.rounding = Rounding::Chunk { draw };
        self
    }

    fn with_vectors_of(mut self, one_half: bool, digits: bool) -> Self {
        let operand = self.graph.dtype;
        self.rounding = Rounding::Device { operand, one_half, digits, shifts: false };
        self
    }

    /// Also shifts keys and values that become codes by more than a device's sums differ, so that more codes are others: the resulting change
    /// bounds that of a device whatever codes happen to lie at the boundaries of its own. Nothing changes for caches of 16 bits.
    #[must_use]
    pub fn with_shifted_codes(mut self) -> Self {
        if let Rounding::Device { shifts, .. } = &mut self.rounding {
            *shifts = true;
        }
        self
    }

    /// Positions fed so far.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Resumes after these keys and values, as those of the first `positions` positions; one pair per layer, in the
    /// layout of [`keys`](Self::keys). A continuation then needs a fed token first.
    ///
    /// # Errors
    /// If they are not those of `positions` positions in every layer, or do not fit the KV cache.
    pub fn resume(
        &mut self,
        positions: usize,
        layers: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<(), EvalError> {
        let width = self.graph.kv_width() as usize;
        let whole = |(keys, values): &(Vec<f32>, Vec<f32>)| {
            [keys.len(), values.len()] == [positions * width; 2]
        };
        if layers.len() != self.caches.len() || !layers.iter().all(whole) {
            return Err(InputError::Cache(positions).into());
        }
        InputError::check(&[], 0, positions, self.capacity)?;
        for (cache, (keys, values)) in self.caches.iter_mut().zip(layers) {
            *cache = Cache::default();
            cache.extend(keys, values, width);
        }
        self.positions = positions;
        self.last.clear();
        Ok(())
    }

    /// Keys of a layer after norm and rotation, `[positions, kv_heads * head_dim]`; empty for a
    /// layer that does not exist.
    #[must_use]
    pub fn keys(&self, layer: usize) -> Vec<f32> {
        let width = self.graph.kv_width() as usize;
        self.caches.get(layer).map_or_else(Vec::new, |cache| cache.keys(width))
    }

    /// Values of a layer, `[positions, kv_heads * head_dim]`; empty for a layer that does not
    /// exist.
    #[must_use]
    pub fn values(&self, layer: usize) -> Vec<f32> {
        self.caches.get(layer).map_or_else(Vec::new, |cache| cache.values().to_vec())
    }

    /// Clears the sequence.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Drops all but the first `positions` positions. A continuation then needs a fed token first.
    pub fn truncate(&mut self, positions: usize) {
        if positions >= self.positions {
            return;
        }
        let width = self.graph.kv_width() as usize;
        for cache in &mut self.caches {
            cache.truncate(positions, width);
        }
        self.positions = positions;
        self.last.clear();
    }

    /// Feeds tokens at the next positions and returns the logits that `logits` selects, one row per position.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or the KV cache is full; nothing was fed then.
    pub fn run(&mut self, tokens: &[u32], logits: Logits) -> Result<Vec<Vec<f32>>, EvalError> {
        let last = self.positions + tokens.len().saturating_sub(1);
        self.feed(tokens, |position| match logits {
            Logits::All => true,
            Logits::Last => position == last,
            Logits::Skip => false,
        })
    }

    /// Feeds tokens at the next positions and returns logits at those of `positions` that were fed, in the order of
    /// positions. Memory for logits is only needed at these positions.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or the KV cache is full; nothing was fed then.
    pub fn run_at(
        &mut self,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<Vec<Vec<f32>>, EvalError> {
        let positions: BTreeSet<_> = positions.iter().copied().collect();
        self.feed(tokens, |position| positions.contains(&position))
    }

    fn feed(
        &mut self,
        tokens: &[u32],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<Vec<f32>>, EvalError> {
        let vocab = self.graph.vocab;
        InputError::check(tokens, vocab, self.positions, self.capacity)?;
        let hidden = self.graph.hidden as usize;
        let mut rows = Vec::new();
        for tokens in tokens.chunks(self.positions_per_pass()) {
            let first = self.positions;
            let x = self.pass(tokens);
            self.last = x[x.len() - hidden..].to_vec();
            let fed = x.chunks_exact(hidden).zip(first..);
            let asked: Vec<f32> = fed
                .filter(|(_, position)| wanted(*position))
                .flat_map(|(x, _)| x.iter().copied())
                .collect();
            rows.extend(self.rows(&asked));
        }
        Ok(rows)
    }

    /// Continues the sequence with the most likely token, up to `n` of them. A token of `stop` is
    /// the last one returned.
    ///
    /// The last token returned is chosen but not fed.
    ///
    /// # Errors
    /// If nothing was fed since the start or the last [`truncate`](Self::truncate), or the KV cache
    /// is full.
    pub fn greedy(&mut self, n: usize, stop: &[u32]) -> Result<Vec<u32>, EvalError> {
        if self.last.is_empty() {
            return Err(InputError::NothingFed.into());
        }
        let mut tokens = Vec::new();
        while tokens.len() < n {
            if let Some(&token) = tokens.last() {
                self.run(&[token], Logits::Skip)?;
            }
            let token = argmax(&self.logits(&self.last));
            tokens.push(token);
            if stop.contains(&token) {
                break;
            }
        }
        Ok(tokens)
    }

    fn positions_per_pass(&self) -> usize {
        if self.expert_layers().next().is_some() {
            POSITIONS_PER_PASS_OF_EXPERTS
        } else {
            POSITIONS_PER_PASS
        }
    }

    /// The layers with experts.
    fn expert_layers(&self) -> impl Iterator<Item = (usize, &BoundExperts<'a>)> {
        self.layers.iter().enumerate().filter_map(|(index, layer)| match &layer.mlp.body {
            BoundFeedForward::Gated(_) => None,
            BoundFeedForward::Experts(experts) => Some((index, &**experts)),
        })
    }

    /// A row of logits for each normed position.
    fn rows(&self, normed: &[f32]) -> Vec<Vec<f32>> {
        // Bounds the memory: a vocabulary is wide.
        let parts = normed.chunks(POSITIONS_PER_PASS * self.graph.hidden as usize);
        let rows = parts.flat_map(|part| {
            let logits = self.logits(part);
            let rows = logits.chunks_exact(self.graph.vocab as usize);
            rows.map(<[f32]>::to_vec).collect::<Vec<_>>()
        });
        rows.collect()
    }

    /// The logits of normed positions.
    fn logits(&self, normed: &[f32]) -> Vec<f32> {
        let mut logits = self.lm_head.apply(normed);
        let cap = self.graph.logit_cap;
        logits.iter_mut().for_each(|logit| *logit = capped(cap, *logit));
        logits
    }

    /// One pass over the weights for checked tokens; returns the inputs to `lm_head`, `[tokens, hidden]`.
    fn pass(&mut self, tokens: &[u32]) -> Vec<f32> {
        let first = self.positions;
        let mut x = self.residual(tokens);
        let rotations = self.rotations(first, tokens.len());
        for layer in 0..self.layers.len() {
            if let Some(inputs) = &mut self.inputs {
                inputs[layer].extend_from_slice(&x);
            }
            self.layer(layer, &rotations, &mut x);
        }
        self.positions += tokens.len();
        self.head_inputs(&x)
    }

    /// The residual stream before the first layer, `[tokens, hidden]`.
    fn residual(&self, tokens: &[u32]) -> Vec<f32> {
        let graph = self.graph;
        let hidden = graph.hidden as usize;
        let mut x = vec![0f32; tokens.len() * hidden];
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(hidden)) {
            self.embed.decode_row(token as usize, 0, x);
            x.iter_mut().for_each(|x| *x *= graph.embed_scale);
        }
        self.rounding.handoff(&mut x);
        x
    }

    /// Of each table of frequencies, the rotations of `len` positions.
    fn rotations(&self, first: usize, len: usize) -> Vec<Vec<Rotations>> {
        let graph = self.graph;
        let of_table = |table: &Vec<f32>| -> Vec<_> {
            let rotation = |i| rotations((first + i) as u32, table, graph.head_dim);
            (0..len).into_par_iter().map(rotation).collect()
        };
        std::iter::once(&graph.inv_freq).chain(&graph.rotary).map(of_table).collect()
    }

    /// One layer at the positions after those in its cache, to which their keys and values are appended. `x` is their
    /// residual stream, and the last of `rotations` are theirs.
    fn layer(&mut self, index: usize, rotations: &[Vec<Rotations>], x: &mut [f32]) {
        let routed = self.expert_layers().take_while(|(layer, _)| *layer < index).count();
        let (graph, rounding) = (self.graph, self.rounding);
        let (layer, cache) = (&self.layers[index], &mut self.caches[index]);
        let first = cache.positions();
        let rotations = &rotations[layer.attention.body.rotary as usize];
        let rotations = &rotations[rotations.len() - x.len() / graph.hidden as usize..];
        let add = Adding { graph, rounding };
        add.block(&layer.attention, x, |attention, h| {
            attention.attend(graph, cache, rotations, rounding, &h)
        });
        let routing = &mut self.routing;
        add.block(&layer.mlp, x, |mlp, h| match mlp {
            BoundFeedForward::Gated(mlp) => mlp.feed_forward(graph, None, rounding, &h),
            BoundFeedForward::Experts(experts) => {
                experts.feed_forward(graph, rounding, &h, Router { routing, layer: routed, first })
            }
        });
    }

    /// The inputs to `lm_head` of a residual stream behind the last layer.
    fn head_inputs(&self, x: &[f32]) -> Vec<f32> {
        let (graph, hidden) = (self.graph, self.graph.hidden as usize);
        let mut normed = norm_rows(x, Some(&self.final_norm), graph.norm_eps, hidden);
        self.rounding.factor(&self.lm_head.weight, &mut normed);
        normed
    }
}

/// Cosine and sine of each pair of a head's elements at a position.
type Rotations = Vec<(f32, f32)>;

impl BoundLinear<'_> {
    fn apply(&self, xs: &[f32]) -> Vec<f32> {
        let mut out = self.weight.apply(xs);
        if let Some(scale) = &self.scale {
            for row in out.chunks_exact_mut(self.weight.rows()) {
                row.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
            }
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.weight.rows()) {
                add(row, bias);
            }
        }
        out
    }
}

impl BoundAttention<'_> {
    /// What attention adds to the residual stream for normed inputs `h`; appends the new positions' keys and values to
    /// the cache.
    fn attend(
        &self,
        graph: &Graph,
        cache: &mut Cache,
        rotations: &[Vec<(f32, f32)>],
        rounding: Rounding,
        h: &[f32],
    ) -> Vec<f32> {
        let [mut q, mut k, mut v] = self.qkv(h);
        for qkv in [&mut q, &mut k, &mut v] {
            rounding.handoff(qkv);
        }
        if self.norms_all_heads(graph) {
            (q, k) = self.norm_heads(graph, &q, &k);
            rounding.handoff(&mut q);
            rounding.handoff(&mut k);
        }
        self.shape_heads(graph, &mut q, &mut k, rotations);
        rounding.cache(graph, &mut k);
        rounding.cache(graph, &mut v);
        cache.extend(&k, &v, graph.kv_width() as usize);
        let mut mixed = attend(graph, cache, &q, self.sees());
        rounding.handoff(&mut mixed);
        self.project(rounding, mixed)
    }

    /// Whether the norms of queries and keys are over all heads together, before heads are shaped.
    fn norms_all_heads(&self, graph: &Graph) -> bool {
        self.q_norm.as_ref().is_some_and(|norm| norm.len() != graph.head_dim as usize)
    }

    fn norm_heads(&self, graph: &Graph, q: &[f32], k: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let norm = |x: &[f32], weight: &Option<Vec<f32>>| {
            norm_rows(x, weight.as_deref(), graph.norm_eps, weight.as_ref().map_or(1, Vec::len))
        };
        (norm(q, &self.q_norm), norm(k, &self.k_norm))
    }

    /// Norms (if the model has norms of each head) and rotates the heads.
    fn shape_heads(
        &self,
        graph: &Graph,
        q: &mut [f32],
        k: &mut [f32],
        rotations: &[Vec<(f32, f32)>],
    ) {
        let each = !self.norms_all_heads(graph);
        let norm = |norm: &'_ Option<Vec<f32>>| norm.clone().filter(|_| each);
        shape_heads(graph, q, graph.q_width(), norm(&self.q_norm).as_deref(), rotations);
        shape_heads(graph, k, graph.kv_width(), norm(&self.k_norm).as_deref(), rotations);
    }

    /// Queries, keys and values before the norms of heads and rotation.
    fn qkv(&self, h: &[f32]) -> [Vec<f32>; 3] {
        [&self.q, &self.k, &self.v].map(|linear| linear.apply(h))
    }

    /// What each query attends to beside all keys before it.
    fn sees(&self) -> Sees<'_> {
        Sees { window: self.window, sinks: self.sinks.as_deref() }
    }

    /// The output projection.
    fn project(&self, rounding: Rounding, mut mixed: Vec<f32>) -> Vec<f32> {
        rounding.factor(&self.o.weight, &mut mixed);
        self.o.apply(&mixed)
    }
}

impl BoundFeedForward<'_> {
    /// The MLP of a layer of a program, which has no others.
    fn gated(&self) -> Option<&BoundGated<'_>> {
        match self {
            Self::Gated(mlp) => Some(mlp),
            Self::Experts(_) => None,
        }
    }
}

impl BoundGated<'_> {
    /// What the MLP adds to the residual stream for normed inputs `h`.
    fn feed_forward(
        &self,
        graph: &Graph,
        clamped: Option<Clamped>,
        rounding: Rounding,
        h: &[f32],
    ) -> Vec<f32> {
        let [mut gate, up] = self.gate_up(h);
        let ffn = self.gate.weight.rows();
        gate.par_chunks_mut(ffn).zip(up.par_chunks(ffn)).for_each(|(gate, up)| {
            for (gate, &up) in gate.iter_mut().zip(up) {
                *gate = match clamped {
                    Some(clamped) => clamped_product(clamped, *gate, up),
                    None => activate(graph.activation, *gate) * up,
                };
            }
        });
        rounding.handoff(&mut gate);
        self.contract(rounding, gate)
    }

    /// Both products of the MLP's first half.
    fn gate_up(&self, h: &[f32]) -> [Vec<f32>; 2] {
        [&self.gate, &self.up].map(|linear| linear.apply(h))
    }

    /// The down projection.
    fn contract(&self, rounding: Rounding, mut hidden: Vec<f32>) -> Vec<f32> {
        rounding.factor(&self.down.weight, &mut hidden);
        self.down.apply(&hidden)
    }
}

/// What a block does behind its norm.
trait Body<'a> {
    /// A matrix of its first products.
    fn first(&self) -> &Matrix<'a>;
}

impl<'a> Body<'a> for BoundAttention<'a> {
    fn first(&self) -> &Matrix<'a> {
        &self.q.weight
    }
}

impl<'a> Body<'a> for BoundFeedForward<'a> {
    fn first(&self) -> &Matrix<'a> {
        match self {
            Self::Gated(mlp) => &mlp.gate.weight,
            Self::Experts(experts) => &experts.router.weight,
        }
    }
}

impl<'a, B: Body<'a>> Block<B> {
    /// The inputs of the body's first products. A device rounds them before it knows the norm's factor, which it
    /// multiplies sums with.
    fn normed(&self, graph: &Graph, rounding: Rounding, x: &[f32]) -> Vec<f32> {
        let width = graph.hidden as usize;
        let (Rounding::Device { .. }, Some(norm)) = (rounding, &self.norm) else {
            return norm_rows(x, self.norm.as_deref(), graph.norm_eps, width);
        };
        let mut h: Vec<f32> = x.iter().zip(norm.iter().cycle()).map(|(x, norm)| x * norm).collect();
        rounding.factor(self.body.first(), &mut h);
        h.par_chunks_mut(width).zip(x.par_chunks(width)).for_each(|(h, x)| {
            let factor = (1.0 / root_mean_square(x, graph.norm_eps)) as f32;
            h.iter_mut().for_each(|h| *h *= factor);
        });
        h
    }
}

/// Adds results of blocks to the residual stream.
struct Adding<'a> {
    graph: &'a Graph,
    rounding: Rounding,
}

impl Adding<'_> {
    /// `x + post_norm(body(norm(x)))`.
    fn block<'a, B: Body<'a>>(
        &self,
        block: &Block<B>,
        x: &mut [f32],
        body: impl FnOnce(&B, Vec<f32>) -> Vec<f32>,
    ) {
        let Self { graph, rounding } = *self;
        let mut sums = body(&block.body, block.normed(graph, rounding, x));
        if block.post_norm.is_some() {
            rounding.handoff(&mut sums);
        }
        let width = graph.hidden as usize;
        add(x, &norm_rows(&sums, block.post_norm.as_deref(), graph.norm_eps, width));
        rounding.handoff(x);
    }
}

/// Norms (if the family has them) and rotates every head of `[positions, width]`.
fn shape_heads(
    graph: &Graph,
    x: &mut [f32],
    width: u32,
    norm: Option<&[f32]>,
    rotations: &[Vec<(f32, f32)>],
) {
    let head_dim = graph.head_dim as usize;
    x.par_chunks_mut(width as usize).zip(rotations).for_each(|(row, rotations)| {
        for head in row.chunks_exact_mut(head_dim) {
            if let Some(weight) = norm {
                let plain = head.to_vec();
                rms_norm(&plain, weight, graph.norm_eps, head);
            }
            rotate(head, rotations);
        }
    });
}

/// Norms rows of `width` elements; without weights it copies them.
fn norm_rows(x: &[f32], weight: Option<&[f32]>, eps: f32, width: usize) -> Vec<f32> {
    let Some(weight) = weight else { return x.to_vec() };
    let mut out = vec![0f32; x.len()];
    let rows = x.par_chunks(width).zip(out.par_chunks_mut(width));
    rows.for_each(|(x, out)| rms_norm(x, weight, eps, out));
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

fn check_heads(graph: &Graph) -> Result<(), EvalError> {
    let Graph { heads, kv_heads, head_dim, .. } = *graph;
    let half = head_dim as usize / 2;
    let wrong = |table: &&[f32]| ![half, 2 * half].contains(&table.len()) || table.is_empty();
    let mut tables = graph.layers.iter().map(|layer| graph.rotary_of(layer));
    let wrong = tables.find(wrong).or_else(|| Some(&graph.inv_freq[..]).filter(|t| wrong(t)));
    let frequencies = wrong.map_or(half, <[f32]>::len);
    let divides = kv_heads > 0 && heads > 0 && heads % kv_heads == 0;
    let widths_fit = heads.checked_mul(head_dim).is_some_and(|width| width > 0);
    if divides && widths_fit && wrong.is_none() && head_dim.is_multiple_of(2) {
        return Ok(());
    }
    Err(EvalError::Heads { heads, kv_heads, head_dim, frequencies })
}
