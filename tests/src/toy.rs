//! Toy models: a graph of any small shape and seeded weights for it.

use ir::{
    Activation, Attention, Block, DType, FeedForward, Gated, Graph, Layer, Linear, Tensor,
    TensorId, Weights,
};

/// The shape of a toy model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Width of the MLP.
    pub ffn: u32,
    /// Rows of the logits.
    pub vocab: u32,
    /// Layers.
    pub layers: u32,
    /// Whether `lm_head` is the embedding.
    pub tied: bool,
    /// Whether q, k and v have biases.
    pub bias: bool,
    /// Whether heads are normalised.
    pub qk_norm: bool,
    /// Sliding window.
    pub window: Option<u32>,
}

struct Tensors(Vec<Tensor>);

impl Tensors {
    fn add(&mut self, name: String, shape: &[u32]) -> TensorId {
        self.0.push(Tensor { name, dtype: DType::F32, shape: shape.to_vec() });
        TensorId(self.0.len() as u32 - 1)
    }

    fn linear(&mut self, name: &str, rows: u32, cols: u32, bias: bool) -> Linear {
        let weight = self.add(format!("{name}.weight"), &[rows, cols]);
        Linear {
            weight,
            scale: None,
            bias: bias.then(|| self.add(format!("{name}.bias"), &[rows])),
        }
    }

    fn layer(&mut self, s: &Shape, index: u32) -> Layer {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let attn_norm = Some(self.add(name("input_layernorm.weight"), &[s.hidden]));
        let attention = Attention {
            q: self.linear(&name("self_attn.q_proj"), q, s.hidden, s.bias),
            k: self.linear(&name("self_attn.k_proj"), kv, s.hidden, s.bias),
            v: self.linear(&name("self_attn.v_proj"), kv, s.hidden, s.bias),
            q_norm: s.qk_norm.then(|| self.add(name("self_attn.q_norm.weight"), &[s.head_dim])),
            k_norm: s.qk_norm.then(|| self.add(name("self_attn.k_norm.weight"), &[s.head_dim])),
            o: self.linear(&name("self_attn.o_proj"), s.hidden, q, false),
            sinks: None,
            window: s.window,
            rotary: 0,
        };
        let mlp_norm = Some(self.add(name("post_attention_layernorm.weight"), &[s.hidden]));
        let gated = Gated {
            gate: self.linear(&name("mlp.gate_proj"), s.ffn, s.hidden, false),
            up: self.linear(&name("mlp.up_proj"), s.ffn, s.hidden, false),
            down: self.linear(&name("mlp.down_proj"), s.hidden, s.ffn, false),
        };
        Layer {
            attention: Block { norm: attn_norm, post_norm: None, body: attention },
            mlp: Block { norm: mlp_norm, post_norm: None, body: FeedForward::Gated(gated) },
        }
    }
}

/// The graph of a shape.
#[must_use]
pub fn graph(s: &Shape) -> Graph {
    let mut tensors = Tensors(Vec::new());
    let embed = tensors.add("model.embed_tokens.weight".into(), &[s.vocab, s.hidden]);
    let layers = (0..s.layers).map(|index| tensors.layer(s, index)).collect();
    let final_norm = tensors.add("model.norm.weight".into(), &[s.hidden]);
    let lm_head =
        if s.tied { embed } else { tensors.add("lm_head.weight".into(), &[s.vocab, s.hidden]) };
    Graph {
        name: "toy".into(),
        family: "llama".into(),
        hidden: s.hidden,
        heads: s.heads,
        kv_heads: s.kv_heads,
        head_dim: s.head_dim,
        ffn: s.ffn,
        vocab: s.vocab,
        norm_eps: 1e-5,
        inv_freq: (0..s.head_dim / 2)
            .map(|i| 10_000_f32.powf(-2.0 * i as f32 / s.head_dim as f32))
            .collect(),
        rotary: Vec::new(),
        embed_scale: 1.0,
        activation: Activation::Silu,
        score_cap: None,
        logit_cap: None,
        kv_dtype: ir::KvDtype::default(),
        attn_scale: (s.head_dim as f32).powf(-0.5),
        max_positions: 64,
        dtype: DType::F32,
        tensors: tensors.0,
        embed,
        layers,
        final_norm,
        lm_head,
        lm_head_scale: None,
        eos: Vec::new(),
        bos: None,
    }
}

/// The same graph with matrices of bf16.
#[must_use]
pub fn in_bf16(mut graph: Graph) -> Graph {
    graph.dtype = DType::Bf16;
    let matrices = graph.tensors.iter_mut().filter(|tensor| tensor.shape.len() == 2);
    matrices.for_each(|tensor| tensor.dtype = DType::Bf16);
    graph
}

/// Weights drawn from a seed; norms are near one.
#[derive(Clone, Debug)]
pub struct SeededWeights(Vec<Vec<u8>>);

impl SeededWeights {
    /// Draws every tensor of `graph`.
    #[must_use]
    pub fn new(graph: &Graph, seed: u64) -> Self {
        let mut state = seed | 1;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        };
        let tensors = graph.tensors.iter().map(|tensor| {
            let (centre, width) = if tensor.shape.len() == 1 {
                (1.0, 0.2)
            } else {
                (0.0, 2.0 / (tensor.shape[1] as f32).sqrt())
            };
            let skipped = 4 - tensor.dtype.bytes(); // a bf16 is the upper half of an f32
            let values = (0..tensor.len()).map(|_| centre + width * draw());
            values.flat_map(|value| value.to_le_bytes().into_iter().skip(skipped)).collect()
        });
        Self(tensors.collect())
    }
}

impl Weights for SeededWeights {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        &self.0[tensor.index()]
    }
}
