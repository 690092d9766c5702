//! Blocks: what a layer is made of. No family is known here; `model` maps configurations to blocks.

use serde::{Deserialize, Serialize};

use crate::graph::Linear;
use crate::id::TensorId;

/// One transformer layer: two blocks, each of which adds its result to the residual stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct Layer {
    /// Attention, which has the layer's key/value cache.
    pub attention: Block<Attention>,
    /// What works on each position alone.
    pub mlp: Block<FeedForward>,
}

/// A block: `x + post_norm(body(norm(x)))`.
#[derive(Clone, Debug, PartialEq)]
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
    /// A score of each head beside those of its keys, with a value of zero: `[heads]`.
    pub sinks: Option<TensorId>,
    /// Sliding window: position `p` attends to `p - window + 1 ..= p`. `None` is full attention.
    pub window: Option<u32>,
    /// Rotary table: 0 is [`Graph::inv_freq`](crate::Graph::inv_freq), `n` is `Graph::rotary[n - 1]`.
    pub rotary: u32,
}

/// The body of a layer's second block.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    /// One MLP for every position.
    Gated(Gated),
    /// A router chooses some of many MLPs for each position.
    Experts(Box<Experts>),
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

/// Experts: the sum of those that are chosen, each times its weight, and of the shared one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// `[experts, hidden]`: the logits that experts are chosen by. Of equal ones the first is chosen.
    pub router: Linear,
    /// Experts chosen for a position.
    pub top_k: u32,
    /// Whether weights are a softmax over the chosen experts' logits; otherwise over those of all.
    pub normalised: bool,
    /// Width of an expert.
    pub ffn: u32,
    /// The experts.
    pub experts: Vec<Gated>,
    /// What is done to both halves of an expert, in place of the graph's activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamped: Option<Clamped>,
    /// An expert that every position has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
}

/// `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit` and up within `-limit..=limit`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clamped {
    /// The limit of both.
    pub limit: f32,
    /// The factor in the sigmoid.
    pub alpha: f32,
}

/// An expert that every position has, times the sigmoid of its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// `[1, hidden]`.
    pub gate: Linear,
    /// Its width.
    pub ffn: u32,
    /// The expert.
    pub mlp: Gated,
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
    mlp: StoredMlp,
    window: Option<u32>,
    #[serde(default, skip_serializing_if = "is_zero")]
    rotary: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sinks: Option<TensorId>,
}

/// The second block's fields.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum StoredMlp {
    Gated(Gated),
    Experts { experts: Box<Experts> },
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Layer {
    /// The MLP, if every position has the same one.
    #[must_use]
    pub fn gated(&self) -> Option<&Gated> {
        match &self.mlp.body {
            FeedForward::Gated(gated) => Some(gated),
            FeedForward::Experts(_) => None,
        }
    }

    /// Every linear map, to be changed.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Attention { q, k, v, o, .. } = &mut self.attention.body;
        let [mut router, mut shared_gate] = [None, None];
        let mut mlps = Vec::new();
        match &mut self.mlp.body {
            FeedForward::Gated(gated) => mlps.push(gated),
            FeedForward::Experts(experts) => {
                let experts = &mut **experts;
                router = Some(&mut experts.router);
                mlps.extend(&mut experts.experts);
                if let Some(shared) = &mut experts.shared {
                    shared_gate = Some(&mut shared.gate);
                    mlps.push(&mut shared.mlp);
                }
            }
        }
        let of_mlps = mlps.into_iter().flat_map(|Gated { gate, up, down }| [gate, up, down]);
        [q, k, v, o].into_iter().chain(of_mlps).chain(router).chain(shared_gate)
    }
}

impl From<Layer> for Stored {
    fn from(layer: Layer) -> Self {
        let Layer { attention, mlp } = layer;
        let Attention { q, k, v, q_norm, k_norm, o, sinks, window, rotary } = attention.body;
        let stored = match mlp.body {
            FeedForward::Gated(gated) => StoredMlp::Gated(gated),
            FeedForward::Experts(experts) => StoredMlp::Experts { experts },
        };
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
            mlp: stored,
            window,
            rotary,
            sinks,
        }
    }
}

impl From<Stored> for Layer {
    fn from(stored: Stored) -> Self {
        let Stored { q, k, v, q_norm, k_norm, o, sinks, window, rotary, .. } = stored;
        let attention = Attention { q, k, v, q_norm, k_norm, o, sinks, window, rotary };
        let mlp = match stored.mlp {
            StoredMlp::Gated(gated) => FeedForward::Gated(gated),
            StoredMlp::Experts { experts } => FeedForward::Experts(experts),
        };
        Self {
            attention: Block {
                norm: stored.attn_norm,
                post_norm: stored.attn_post_norm,
                body: attention,
            },
            mlp: Block { norm: stored.mlp_norm, post_norm: stored.mlp_post_norm, body: mlp },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(weight: u32) -> Linear {
        Linear { weight: TensorId(weight), scale: None, bias: None }
    }

    fn layer(mlp: FeedForward) -> Layer {
        let [q, k, v, o] = [1, 2, 3, 4].map(linear);
        let (q_norm, k_norm, window, rotary) = (None, None, Some(8), 1);
        let sinks = matches!(mlp, FeedForward::Experts(_)).then_some(TensorId(5));
        let attention = Attention { q, k, v, q_norm, k_norm, o, sinks, window, rotary };
        Layer {
            attention: Block { norm: Some(TensorId(0)), post_norm: None, body: attention },
            mlp: Block { norm: None, post_norm: Some(TensorId(6)), body: mlp },
        }
    }

    #[test]
    fn a_layer_is_written_as_a_flat_record_and_reads_back() {
        let [gate, up, down] = [7, 8, 9].map(linear);
        let gated = Gated { gate, up, down };
        let experts = Experts {
            router: linear(10),
            top_k: 1,
            normalised: true,
            ffn: 48,
            experts: vec![gated; 2],
            clamped: Some(Clamped { limit: 7.0, alpha: 1.702 }),
            shared: Some(Shared { gate: linear(11), ffn: 40, mlp: gated }),
        };
        let dense = layer(FeedForward::Gated(gated));
        let routed = layer(FeedForward::Experts(Box::new(experts)));
        for layer in [&dense, &routed] {
            let text = serde_json::to_string(layer).expect("a record");
            assert_eq!(serde_json::from_str::<Layer>(&text).expect("a layer"), *layer);
        }
        let text = serde_json::to_string(&dense).expect("a record");
        let before = r#"{"attn_norm":0,"q":{"weight":1,"bias":null},"k":{"weight":2,"bias":null},"v":{"weight":3,"bias":null},"q_norm":null,"k_norm":null,"o":{"weight":4,"bias":null},"mlp_norm":null,"mlp_post_norm":6,"gate":{"weight":7,"bias":null},"up":{"weight":8,"bias":null},"down":{"weight":9,"bias":null},"window":8,"rotary":1}"#;
        assert_eq!(text, before);
        let linears = |mut layer: Layer| layer.linears_mut().count();
        assert_eq!([linears(dense), linears(routed)], [7, 4 + 3 * 3 + 2]);
    }
}
