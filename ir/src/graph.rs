//! The model graph: a decoder-only transformer before any scheduling.
//!
//! A graph is structured rather than a bag of nodes: a layer is two blocks (`block.rs`). No family is known here. It
//! holds everything that the arithmetic needs, including the rotary frequencies, so that both executors in
//! `reference-vm` and the device read the same numbers. It holds no weights; see [`Weights`](crate::Weights).

use serde::{Deserialize, Serialize};

pub use abi::{Activation, DType};

use crate::block::{Experts, FeedForward, Gated, Layer};
use crate::format::Format;
use crate::id::TensorId;
use crate::kv::KvDtype;
use crate::program::Dims;
use crate::program::smem::Vectors;

/// A stored tensor: its name in the checkpoint, element type and shape (row-major).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tensor {
    /// Checkpoint name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// `[rows, cols]` for a matrix, `[len]` for a vector.
    pub shape: Vec<u32>,
}

impl Tensor {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().map(|&d| d as usize).product()
    }

    /// Whether the tensor has no elements. Never true in a valid graph.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the stored tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let Some((&cols, rows)) = self.shape.split_last() else { return 0 };
        let rows: usize = rows.iter().map(|&side| side as usize).product();
        rows * self.dtype.row_bytes(cols as usize)
    }
}

/// A linear map `y = s (W x) (+ b)`, with `W` of shape `[rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Linear {
    /// `[rows, cols]`.
    pub weight: TensorId,
    /// `[rows]`, f32, if the weight is of codes: the factor of each row, besides scales that lie among the codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<TensorId>,
    /// `[rows]`, if the family has biases.
    pub bias: Option<TensorId>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_one(value: &f32) -> bool {
    *value == 1.0
}

fn one() -> f32 {
    1.0
}

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// The model's display name: a preset's name or the folder's.
    pub name: String,
    /// Hugging Face `model_type`, for display.
    pub family: String,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads; divides `heads`.
    pub kv_heads: u32,
    /// Elements of one head; `heads * head_dim` may differ from `hidden`.
    pub head_dim: u32,
    /// Width of the MLP.
    pub ffn: u32,
    /// Rows of the embedding and of the logits.
    pub vocab: u32,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary inverse frequencies, `[head_dim / 2]`, scaling already applied: the angle at position `p` is `p * inv_freq[i]`.
    /// Element `i` of a head is rotated with element `i + head_dim / 2`. As many factors of cosine and sine may follow.
    pub inv_freq: Vec<f32>,
    /// Rotary tables of other layers, in the form of `inv_freq`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rotary: Vec<Vec<f32>>,
    /// Factor of the embedding.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embed_scale: f32,
    /// The function between the halves of the MLP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub activation: Activation,
    /// Soft cap of attention scores: `cap * tanh(score / cap)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_cap: Option<f32>,
    /// Soft cap of the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_cap: Option<f32>,
    /// Element type of keys and values. A choice of the run, not of the checkpoint.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_dtype: KvDtype,
    /// Factor on q.k before the softmax, usually `head_dim ** -0.5`.
    pub attn_scale: f32,
    /// Longest sequence that the checkpoint was made for.
    pub max_positions: u32,
    /// Element type that all matrices are multiplied in; that which they are stored in is their tensors'.
    pub dtype: DType,
    /// Every stored tensor; [`TensorId`] indexes it.
    pub tensors: Vec<Tensor>,
    /// `[vocab, hidden]`.
    pub embed: TensorId,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// RMSNorm before `lm_head`, `[hidden]`.
    pub final_norm: TensorId,
    /// `[vocab, hidden]`; equals `embed` when embeddings are tied.
    pub lm_head: TensorId,
    /// `[vocab]`, f32, if `lm_head` is of codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lm_head_scale: Option<TensorId>,
    /// Ids that end a generation, from the checkpoint.
    pub eos: Vec<u32>,
    /// Id that begins a sequence, from the checkpoint.
    pub bos: Option<u32>,
}

impl Graph {
    /// The stable id of the graph: 16 hex digits. It depends on neither the model's name nor the weights.
    #[must_use]
    pub fn id(&self) -> String {
        let nameless = Self { name: String::new(), ..self.clone() };
        crate::schedule::content_id("graph", &nameless)
    }

    /// The tensor with this id.
    ///
    /// # Panics
    /// If the id is not of this graph.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn kv_width(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Why the attention of the kernel does not take heads of this width, if it does not. The reference VM takes any.
    #[must_use]
    pub fn heads_refused(&self) -> Option<String> {
        let (width, step, most) = (self.head_dim, abi::HEAD_DIM_STEP, abi::HEAD_DIM_MAX);
        let taken = width.is_multiple_of(step) && (step..=most).contains(&width);
        (!taken).then(|| {
            format!("heads of {width} elements run on a CPU only: a GPU takes multiples of {step} to {most}")
        })
    }

    /// Element type of the matrices that are codes, if some are: of several, the last in the table of element types.
    #[must_use]
    pub fn codes(&self) -> Option<DType> {
        let codes =
            self.tensors.iter().map(|tensor| tensor.dtype).filter(|dtype| dtype.is_scaled());
        codes.max_by_key(|&dtype| dtype as u32)
    }

    /// Whether some layer has experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.layers.iter().any(|layer| layer.gated().is_none())
    }

    /// The type that matrices of these floats are multiplied in ([`Dims::operand`]).
    #[must_use]
    pub fn operand(&self, stored: DType) -> DType {
        Dims::from(self).operand(stored, self.has_experts())
    }

    /// The longest vectors that its matrices are multiplied with on a device.
    #[must_use]
    pub fn vectors(&self) -> Vectors {
        let matrices = self.tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        let of = |tensor: &Tensor| {
            let cols = tensor.shape.last().copied().unwrap_or(0);
            (cols, Format::of(tensor.dtype, self.dtype))
        };
        Vectors::new(&Dims::from(self), self.has_experts(), matrices.map(of))
    }

    /// Bytes of the keys and values of one token on the device.
    #[must_use]
    pub fn kv_token_bytes(&self) -> u64 {
        let row = self.kv_dtype.row_bytes(self.head_dim);
        2 * self.layers.len() as u64 * u64::from(self.kv_heads) * u64::from(row)
    }

    /// Query heads that share one key/value head.
    #[must_use]
    pub fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Bytes of the longest unit of its matrices.
    #[must_use]
    pub fn unit_bytes(&self) -> u32 {
        let units = self.tensors.iter().filter(|tensor| tensor.shape.len() == 2);
        let bytes = units.map(|tensor| Format::of(tensor.dtype, self.dtype).unit_bytes());
        bytes.max().unwrap_or(abi::UNIT_BYTES)
    }

    /// Width of the widest MLP. Experts that are chosen together count as one, and each has whole units.
    #[must_use]
    pub fn ffn_width(&self) -> u32 {
        let width = |layer: &Layer| match &layer.mlp.body {
            FeedForward::Gated(_) => self.ffn,
            FeedForward::Experts(experts) => {
                let routed = experts.top_k.saturating_mul(self.expert_width(experts));
                routed.max(experts.shared.map_or(0, |shared| shared.ffn))
            }
        };
        self.layers.iter().map(width).max().unwrap_or(self.ffn)
    }

    /// Width of an expert in whole units, so that a product with several experts at once has a whole number of units of
    /// each.
    #[must_use]
    pub fn expert_width(&self, experts: &Experts) -> u32 {
        let stored =
            experts.experts.first().and_then(|expert| self.tensors.get(expert.down.weight.index()));
        let dtype = stored.map_or(self.dtype, |tensor| tensor.dtype);
        experts.ffn.next_multiple_of(Format::of(dtype, self.dtype).unit_cols())
    }

    /// A layer's rotary table; empty if there is none of its number.
    #[must_use]
    pub fn rotary_of(&self, layer: &Layer) -> &[f32] {
        let other = |n: u32| self.rotary.get(n as usize).map_or(&[][..], Vec::as_slice);
        layer.attention.body.rotary.checked_sub(1).map_or(&self.inv_freq, other)
    }

    /// Whether a layer's q and k norms are over all heads together.
    #[must_use]
    pub fn norms_all_heads(&self, layer: &Layer) -> bool {
        let width = |norm: TensorId| self.tensors.get(norm.index()).map(Tensor::len);
        layer.attention.body.q_norm.and_then(width).is_some_and(|len| len != self.head_dim as usize)
    }

    /// Whether a layer normalises each of its query and key heads.
    #[must_use]
    pub fn norms_each_head(&self, layer: &Layer) -> bool {
        layer.attention.body.q_norm.is_some() && !self.norms_all_heads(layer)
    }

    /// Whether `lm_head` reuses the embedding table.
    #[must_use]
    pub fn tied(&self) -> bool {
        self.embed == self.lm_head
    }

    /// Bytes of the weights that a step of one sequence reads: of experts those that are chosen with the scales that all
    /// share, and of an embedding that is not the output matrix one row, which is not counted.
    #[must_use]
    pub fn step_bytes(&self) -> usize {
        // Eight rows have one copy of a scale that they share.
        let streamed = |tensor: &Tensor| match tensor.dtype.block().filter(|block| block.shared()) {
            Some(block) => {
                let unit = abi::UNIT_BYTES as usize + block.unit_scale_bytes();
                tensor.bytes() / block.bytes() * unit / abi::UNIT_ROWS as usize
            }
            None => tensor.bytes(),
        };
        let bytes = |linear: &Linear| {
            let parts = [Some(linear.weight), linear.bias];
            parts.into_iter().flatten().map(|id| streamed(self.tensor(id))).sum::<usize>()
        };
        let idle = |layer: &Layer| match &layer.mlp.body {
            FeedForward::Gated(_) => 0,
            FeedForward::Experts(experts) => {
                let all = experts.experts.iter();
                // They have equal shapes: those beyond the number that is chosen stand for the idle ones.
                let idle = all.skip(experts.top_k as usize);
                idle.flat_map(|Gated { gate, up, down }| [gate, up, down]).map(bytes).sum()
            }
        };
        let embed = if self.tied() { 0 } else { streamed(self.tensor(self.embed)) };
        let all = self.tensors.iter().map(streamed).sum::<usize>();
        all - embed - self.layers.iter().map(idle).sum::<usize>()
    }

    /// Multiply-adds of the matrices that a step of one sequence takes: of experts those that are chosen.
    #[must_use]
    pub fn step_macs(&self) -> u64 {
        let len = |linear: &Linear| self.tensor(linear.weight).len() as u64;
        let gated = |mlp: &Gated| [mlp.gate, mlp.up, mlp.down].iter().map(len).sum::<u64>();
        let layer = |layer: &Layer| {
            let attention = &layer.attention.body;
            let heads = [attention.q, attention.k, attention.v, attention.o];
            let mlp = match &layer.mlp.body {
                FeedForward::Gated(mlp) => gated(mlp),
                FeedForward::Experts(experts) => {
                    let chosen = experts.experts.iter().take(experts.top_k as usize);
                    let shared = experts.shared.iter().map(|shared| gated(&shared.mlp));
                    len(&experts.router) + chosen.map(gated).chain(shared).sum::<u64>()
                }
            };
            heads.iter().map(len).sum::<u64>() + mlp
        };
        self.tensor(self.lm_head).len() as u64 + self.layers.iter().map(layer).sum::<u64>()
    }

    /// Bytes of all stored tensors.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.tensors.iter().map(Tensor::bytes).sum()
    }
}
