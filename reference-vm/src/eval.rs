//! Evaluates a model graph directly, with no schedule and no program: the expected values of
//! everything else.
//!
//! All arithmetic is on `f32` values; sums of norms and softmax are in `f64`, and dot products are
//! those of `math.rs`. Feeding tokens one at a time or all at once gives the same bits.

use ir::{DType, Graph, Layer, Linear, TensorId, Weights};
use rayon::prelude::*;

use crate::math::{Matrix, argmax, dot, rms_norm, rotate, rotations, silu, softmax, stored_bytes};

/// Positions that share one pass over the weights; bounds the memory of a long prompt.
const POSITIONS_PER_PASS: usize = 64;

/// Why a graph could not be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// The graph's numbers contradict each other.
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
    /// The graph refers to a tensor that it does not have.
    #[error("tensor {tensor} does not exist: the graph has {len}")]
    MissingTensor {
        /// The tensor referred to.
        tensor: TensorId,
        /// Tensors of the graph.
        len: usize,
    },
    /// A tensor has another shape than its use asks for.
    #[error("tensor {tensor} has shape {got:?} where {want:?} is used")]
    Shape {
        /// The tensor.
        tensor: TensorId,
        /// The shape that its use asks for.
        want: Vec<u32>,
        /// Its shape.
        got: Vec<u32>,
    },
    /// A matrix has no elements.
    #[error("tensor {tensor} is used as a matrix and has no elements")]
    Empty {
        /// The tensor.
        tensor: TensorId,
    },
    /// The weights hold another number of bytes than the graph says.
    #[error("tensor {tensor} has {got} bytes instead of {want}")]
    Bytes {
        /// The tensor.
        tensor: TensorId,
        /// Bytes that its shape and type ask for.
        want: usize,
        /// Bytes that the weights hold.
        got: usize,
    },
    /// A token is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// The sequence would grow past the KV cache.
    #[error("{positions} positions do not fit a KV cache of {capacity}")]
    Capacity {
        /// Positions that the sequence would have.
        positions: usize,
        /// Positions that the KV cache may hold.
        capacity: usize,
    },
    /// A continuation was asked for before any token was fed.
    #[error("there is nothing to continue: feed a token first")]
    NothingFed,
}

/// Which positions of a [`run`](Evaluator::run) get logits. The vocabulary is often the largest
/// matrix.
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
    lm_head: Matrix<'a>,
    caches: Vec<Cache>,
    positions: usize,
    capacity: usize,
    /// The last position's input to `lm_head`; empty when there is none to continue from.
    last: Vec<f32>,
}

/// Keys (after norm and rotation) and values of one layer, `[positions, kv_width]`.
#[derive(Default)]
struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

struct BoundLinear<'a> {
    weight: Matrix<'a>,
    bias: Option<Vec<f32>>,
}

struct BoundLayer<'a> {
    attn_norm: Vec<f32>,
    q: BoundLinear<'a>,
    k: BoundLinear<'a>,
    v: BoundLinear<'a>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    o: BoundLinear<'a>,
    mlp_norm: Vec<f32>,
    gate: BoundLinear<'a>,
    up: BoundLinear<'a>,
    down: BoundLinear<'a>,
    window: Option<u32>,
}

impl<'a> Evaluator<'a> {
    /// Binds the graph to its weights. The KV cache may grow to the graph's `max_positions`.
    ///
    /// # Errors
    /// If the graph contradicts itself or the weights do not have its shapes.
    pub fn new(graph: &'a Graph, weights: &'a dyn Weights) -> Result<Self, EvalError> {
        check_heads(graph)?;
        let bind = Binder { graph, weights };
        let layers: Vec<_> =
            graph.layers.iter().map(|layer| bind.layer(layer)).collect::<Result<_, _>>()?;
        Ok(Self {
            graph,
            embed: bind.matrix(graph.embed, graph.vocab, graph.hidden)?,
            final_norm: bind.vector(graph.final_norm, graph.hidden)?,
            lm_head: bind.matrix(graph.lm_head, graph.vocab, graph.hidden)?,
            caches: layers.iter().map(|_| Cache::default()).collect(),
            layers,
            positions: 0,
            capacity: graph.max_positions as usize,
            last: Vec::new(),
        })
    }

    /// Limits the KV cache to `capacity` positions, as a program with that capacity would.
    #[must_use]
    pub fn with_capacity(mut self, capacity: u32) -> Self {
        self.capacity = capacity as usize;
        self
    }

    /// Positions fed so far.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Keys of a layer after norm and rotation, `[positions, kv_heads * head_dim]`; empty for a
    /// layer that does not exist.
    #[must_use]
    pub fn keys(&self, layer: usize) -> &[f32] {
        self.caches.get(layer).map_or(&[], |cache| &cache.keys)
    }

    /// Values of a layer, `[positions, kv_heads * head_dim]`; empty for a layer that does not
    /// exist.
    #[must_use]
    pub fn values(&self, layer: usize) -> &[f32] {
        self.caches.get(layer).map_or(&[], |cache| &cache.values)
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Forgets all but the first `positions` positions. A continuation then needs a fed token
    /// first.
    pub fn truncate(&mut self, positions: usize) {
        if positions >= self.positions {
            return;
        }
        let width = self.graph.kv_width() as usize;
        for cache in &mut self.caches {
            cache.keys.truncate(positions * width);
            cache.values.truncate(positions * width);
        }
        self.positions = positions;
        self.last.clear();
    }

    /// Feeds tokens at the next positions and returns the logits that `logits` asks for, one row a
    /// position.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or the KV cache is full; nothing was fed then.
    pub fn run(&mut self, tokens: &[u32], logits: Logits) -> Result<Vec<Vec<f32>>, EvalError> {
        let vocab = self.graph.vocab;
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocab) {
            return Err(EvalError::Token { token, vocab });
        }
        let positions = self.positions + tokens.len();
        if positions > self.capacity {
            return Err(EvalError::Capacity { positions, capacity: self.capacity });
        }
        let hidden = self.graph.hidden as usize;
        let mut rows = Vec::new();
        for tokens in tokens.chunks(POSITIONS_PER_PASS) {
            let x = self.pass(tokens);
            self.last = x[x.len() - hidden..].to_vec();
            if logits == Logits::All {
                let all = self.lm_head.apply(&x);
                rows.extend(all.chunks_exact(vocab as usize).map(<[f32]>::to_vec));
            }
        }
        if logits == Logits::Last && !tokens.is_empty() {
            rows.push(self.lm_head.apply(&self.last));
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
            return Err(EvalError::NothingFed);
        }
        let mut tokens = Vec::new();
        while tokens.len() < n {
            if let Some(&token) = tokens.last() {
                self.run(&[token], Logits::Skip)?;
            }
            let token = argmax(&self.lm_head.apply(&self.last));
            tokens.push(token);
            if stop.contains(&token) {
                break;
            }
        }
        Ok(tokens)
    }

    /// One pass over the weights for tokens that were checked; returns the inputs to `lm_head`,
    /// `[tokens, hidden]`.
    fn pass(&mut self, tokens: &[u32]) -> Vec<f32> {
        let graph = self.graph;
        let hidden = graph.hidden as usize;
        let mut x = vec![0f32; tokens.len() * hidden];
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(hidden)) {
            self.embed.decode_row(token as usize, 0, x);
        }
        let rotations: Vec<_> = (0..tokens.len())
            .map(|i| rotations((self.positions + i) as u32, &graph.inv_freq))
            .collect();
        for (layer, cache) in self.layers.iter().zip(&mut self.caches) {
            layer.attend(graph, cache, &rotations, &mut x);
            layer.feed_forward(graph, &mut x);
        }
        self.positions += tokens.len();
        norm_rows(&x, &self.final_norm, graph.norm_eps)
    }
}

impl BoundLinear<'_> {
    fn apply(&self, xs: &[f32]) -> Vec<f32> {
        let mut out = self.weight.apply(xs);
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.weight.rows()) {
                add(row, bias);
            }
        }
        out
    }
}

impl BoundLayer<'_> {
    /// Attention and its residual; appends the new positions' keys and values to the cache.
    fn attend(
        &self,
        graph: &Graph,
        cache: &mut Cache,
        rotations: &[Vec<(f32, f32)>],
        x: &mut [f32],
    ) {
        let h = norm_rows(x, &self.attn_norm, graph.norm_eps);
        let mut q = self.q.apply(&h);
        let mut k = self.k.apply(&h);
        let v = self.v.apply(&h);
        shape_heads(graph, &mut q, graph.q_width(), self.q_norm.as_deref(), rotations);
        shape_heads(graph, &mut k, graph.kv_width(), self.k_norm.as_deref(), rotations);
        let first = cache.keys.len() / graph.kv_width() as usize;
        cache.keys.extend_from_slice(&k);
        cache.values.extend_from_slice(&v);

        let (heads, head_dim, group) =
            (graph.heads as usize, graph.head_dim as usize, graph.group() as usize);
        let mut mixed = vec![0f32; q.len()];
        mixed.par_chunks_mut(head_dim).zip(q.par_chunks(head_dim)).enumerate().for_each(
            |(index, (out, q))| {
                let (position, head) = (first + index / heads, index % heads);
                let start =
                    self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
                attend_head(graph, cache, q, head / group, start..position + 1, out);
            },
        );
        add(x, &self.o.apply(&mixed));
    }

    /// The MLP and its residual.
    fn feed_forward(&self, graph: &Graph, x: &mut [f32]) {
        let h = norm_rows(x, &self.mlp_norm, graph.norm_eps);
        let mut gate = self.gate.apply(&h);
        let up = self.up.apply(&h);
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = silu(*gate) * up;
        }
        add(x, &self.down.apply(&gate));
    }
}

/// One query head over the positions in `range`.
fn attend_head(
    graph: &Graph,
    cache: &Cache,
    q: &[f32],
    kv_head: usize,
    range: std::ops::Range<usize>,
    out: &mut [f32],
) {
    let (width, head_dim) = (graph.kv_width() as usize, graph.head_dim as usize);
    let at = |position: usize| position * width + kv_head * head_dim;
    let score =
        |position| f64::from(dot(q, &cache.keys[at(position)..][..head_dim]) * graph.attn_scale);
    let mut weights: Vec<f64> = range.clone().map(score).collect();
    softmax(&mut weights);
    let mut sums = vec![0f64; head_dim];
    for (position, weight) in range.zip(weights) {
        for (sum, &value) in sums.iter_mut().zip(&cache.values[at(position)..][..head_dim]) {
            *sum += weight * f64::from(value);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum as f32;
    }
}

/// Norms (where the family does) and rotates every head of `[positions, width]`.
fn shape_heads(
    graph: &Graph,
    x: &mut [f32],
    width: u32,
    norm: Option<&[f32]>,
    rotations: &[Vec<(f32, f32)>],
) {
    let head_dim = graph.head_dim as usize;
    for (row, rotations) in x.chunks_exact_mut(width as usize).zip(rotations) {
        for head in row.chunks_exact_mut(head_dim) {
            if let Some(weight) = norm {
                let plain = head.to_vec();
                rms_norm(&plain, weight, graph.norm_eps, head);
            }
            rotate(head, rotations);
        }
    }
}

fn norm_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0f32; x.len()];
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        rms_norm(x, weight, eps, out);
    }
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

fn check_heads(graph: &Graph) -> Result<(), EvalError> {
    let Graph { heads, kv_heads, head_dim, .. } = *graph;
    let frequencies = graph.inv_freq.len();
    let divides = kv_heads > 0 && heads > 0 && heads % kv_heads == 0;
    let widths_fit = heads.checked_mul(head_dim).is_some_and(|width| width > 0);
    if divides && widths_fit && frequencies * 2 == head_dim as usize {
        return Ok(());
    }
    Err(EvalError::Heads { heads, kv_heads, head_dim, frequencies })
}

/// Looks tensors up, and checks their shapes against the use at hand.
struct Binder<'a> {
    graph: &'a Graph,
    weights: &'a dyn Weights,
}

impl<'a> Binder<'a> {
    fn layer(&self, layer: &Layer) -> Result<BoundLayer<'a>, EvalError> {
        let graph = self.graph;
        let (hidden, ffn) = (graph.hidden, graph.ffn);
        let head_norm =
            |norm: Option<TensorId>| norm.map(|id| self.vector(id, graph.head_dim)).transpose();
        Ok(BoundLayer {
            attn_norm: self.vector(layer.attn_norm, hidden)?,
            q: self.linear(layer.q, graph.q_width(), hidden)?,
            k: self.linear(layer.k, graph.kv_width(), hidden)?,
            v: self.linear(layer.v, graph.kv_width(), hidden)?,
            q_norm: head_norm(layer.q_norm)?,
            k_norm: head_norm(layer.k_norm)?,
            o: self.linear(layer.o, hidden, graph.q_width())?,
            mlp_norm: self.vector(layer.mlp_norm, hidden)?,
            gate: self.linear(layer.gate, ffn, hidden)?,
            up: self.linear(layer.up, ffn, hidden)?,
            down: self.linear(layer.down, hidden, ffn)?,
            window: layer.window,
        })
    }

    fn linear(&self, linear: Linear, rows: u32, cols: u32) -> Result<BoundLinear<'a>, EvalError> {
        let bias = linear.bias.map(|id| self.vector(id, rows)).transpose()?;
        Ok(BoundLinear { weight: self.matrix(linear.weight, rows, cols)?, bias })
    }

    fn matrix(&self, tensor: TensorId, rows: u32, cols: u32) -> Result<Matrix<'a>, EvalError> {
        let (dtype, bytes) = self.stored(tensor, &[rows, cols])?;
        Matrix::new(dtype, rows as usize, cols as usize, bytes).ok_or(EvalError::Empty { tensor })
    }

    fn vector(&self, tensor: TensorId, len: u32) -> Result<Vec<f32>, EvalError> {
        let (dtype, bytes) = self.stored(tensor, &[len])?;
        let mut out = vec![0f32; len as usize];
        ir::decode(dtype, bytes, &mut out);
        Ok(out)
    }

    fn stored(&self, tensor: TensorId, shape: &[u32]) -> Result<(DType, &'a [u8]), EvalError> {
        let len = self.graph.tensors.len();
        let stored = self
            .graph
            .tensors
            .get(tensor.index())
            .ok_or(EvalError::MissingTensor { tensor, len })?;
        if stored.shape != shape {
            return Err(EvalError::Shape {
                tensor,
                want: shape.to_vec(),
                got: stored.shape.clone(),
            });
        }
        let bytes = self.weights.bytes(tensor);
        let want = stored_bytes(stored).unwrap_or(usize::MAX);
        if bytes.len() != want {
            return Err(EvalError::Bytes { tensor, want, got: bytes.len() });
        }
        Ok((stored.dtype, bytes))
    }
}
