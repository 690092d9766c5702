//! Blocks: what a layer is made of. No family is known here; `model` maps configurations to blocks.

use serde::{Deserialize, Serialize};

use crate::graph::Linear;
use crate::id::TensorId;

/// One transformer layer: two blocks, each of which adds its result to the residual stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct Layer {
    /// Attention, which has the layer's key/value cache.
    pub attention: Block<Attention>,
    /// What works on each position alone.
    pub mlp: Block<FeedForward>,
}

/// A block: `x + post_norm(body(norm(x)))`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Block<B> {
    /// RMSNorm before the body, `[hidden]`.
    pub norm: Option<TensorId>,
    /// RMSNorm of what the block adds to the residual stream, `[hidden]`.
    pub post_norm: Option<TensorId>,
    /// What is computed.
    pub body: B,
}

/// Attention over the positions so far.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// `[heads * head_dim, hidden]`.
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub k: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub v: Linear,
    /// RMSNorm over each query head, `[head_dim]`, or over all of them, `[heads * head_dim]`.
    pub q_norm: Option<TensorId>,
    /// RMSNorm over each key head, `[head_dim]`, or over all of them, `[kv_heads * head_dim]`.
    pub k_norm: Option<TensorId>,
    /// `[hidden, heads * head_dim]`.
    pub o: Linear,
    /// Sliding window: position `p` attends to `p - window + 1 ..= p`. `None` is full attention.
    pub window: Option<u32>,
    /// Rotary table: 0 is [`Graph::inv_freq`](crate::Graph::inv_freq), `n` is `Graph::rotary[n - 1]`.
    pub rotary: u32,
}

/// The body of a layer's second block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FeedForward {
    /// One MLP for every position.
    Gated(Gated),
}

/// A gated MLP: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Gated {
    /// `[ffn, hidden]`.
    pub gate: Linear,
    /// `[ffn, hidden]`.
    pub up: Linear,
    /// `[hidden, ffn]`.
    pub down: Linear,
}

/// A layer as it is written: a flat record. The ids of graphs, to which stored results are bound, are hashes of it.
#[derive(Clone, Serialize, Deserialize)]
struct Stored {
    attn_norm: Option<TensorId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attn_post_norm: Option<TensorId>,
    q: Linear,
    k: Linear,
    v: Linear,
    q_norm: Option<TensorId>,
    k_norm: Option<TensorId>,
    o: Linear,
    mlp_norm: Option<TensorId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mlp_post_norm: Option<TensorId>,
    #[serde(flatten)]
    mlp: Gated,
    window: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    rotary: u32,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Layer {
    /// The MLP, if every position has the same one.
    #[must_use]
    pub fn gated(&self) -> Option<&Gated> {
        let FeedForward::Gated(gated) = &self.mlp.body;
        Some(gated)
    }

    /// Every linear map, to be changed.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Attention { q, k, v, o, .. } = &mut self.attention.body;
        let FeedForward::Gated(Gated { gate, up, down }) = &mut self.mlp.body;
        [q, k, v, o, gate, up, down].into_iter()
    }
}

impl From<Layer> for Stored {
    fn from(layer: Layer) -> Self {
        let Layer { attention, mlp } = layer;
        let Attention { q, k, v, q_norm, k_norm, o, window, rotary } = attention.body;
        let FeedForward::Gated(gated) = mlp.body;
        Self {
            attn_norm: attention.norm,
            attn_post_norm: attention.post_norm,
            q,
            k,
            v,
            q_norm,
            k_norm,
            o,
            mlp_norm: mlp.norm,
            mlp_post_norm: mlp.post_norm,
            mlp: gated,
            window,
            rotary,
        }
    }
}

impl From<Stored> for Layer {
    fn from(stored: Stored) -> Self {
        let Stored { q, k, v, q_norm, k_norm, o, window, rotary, .. } = stored;
        let attention = Attention { q, k, v, q_norm, k_norm, o, window, rotary };
        Self {
            attention: Block {
                norm: stored.attn_norm,
                post_norm: stored.attn_post_norm,
                body: attention,
            },
            mlp: Block {
                norm: stored.mlp_norm,
                post_norm: stored.mlp_post_norm,
                body: FeedForward::Gated(stored.mlp),
            },
        }
    }
}
