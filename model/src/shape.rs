//! The dimensions of a model, and the graph built from them.

use ir::{DType, Graph, Layer, Linear, Tensor, TensorId};

use crate::error::Problem;
use crate::rope::{Rope, Scaling};

/// Widest residual stream.
pub const HIDDEN_MAX: u32 = 1 << 17;
/// Most layers.
pub const LAYERS_MAX: u32 = 1 << 10;
/// Most query heads.
pub const HEADS_MAX: u32 = 1 << 12;
/// Widest head.
pub const HEAD_DIM_MAX: u32 = 256;
/// A head's width is a multiple of this.
pub const HEAD_DIM_STEP: u32 = 8;
/// The widths of the residual stream and of the MLP are multiples of this: the kernel polls activations four at a time.
pub(crate) const WIDTH_STEP: u32 = 4;
/// Widest MLP.
pub const FFN_MAX: u32 = 1 << 20;
/// Largest vocabulary.
pub const VOCAB_MAX: u32 = 1 << 22;
/// Longest sequence.
pub const POSITIONS_MAX: u32 = 1 << 27;

/// A model family: one `model_type` of Hugging Face's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 1, 2, 3, 3.1, 3.2, and the many models with their layout.
    Llama,
    /// Mistral: Llama with an optional sliding window in every layer.
    Mistral,
    /// Qwen 2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen 3: RMSNorm over each query and key head.
    Qwen3,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The `model_type` of `config.json`.
    #[must_use]
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class in `architectures` of `config.json`.
    #[must_use]
    pub const fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// The layers with a sliding window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Window {
    /// None.
    #[default]
    None,
    /// All of them.
    All(u32),
    /// Those that are `true`.
    Layers {
        /// Positions in such a layer's window.
        window: u32,
        /// One entry per layer, first to last.
        sliding: Vec<bool>,
    },
}

impl Window {
    /// The window of one layer.
    #[must_use]
    pub fn of(&self, layer: usize) -> Option<u32> {
        match self {
            Self::None => None,
            Self::All(window) => Some(*window),
            Self::Layers { window, sliding } => {
                sliding.get(layer).copied().unwrap_or(false).then_some(*window)
            }
        }
    }
}

/// All parameters of a model except its weights. [`Shape::default`] is the `toy` preset.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// The model's display name.
    pub name: String,
    /// The family; `Qwen2` implies biases on q, k and v, `Qwen3` implies q and k norms.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Number of layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads; divides `heads`.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Width of the MLP.
    pub ffn: u32,
    /// Rows of the embedding.
    pub vocab: u32,
    /// Whether `lm_head` reuses the embedding table.
    pub tied: bool,
    /// Biases on q, k, v and o (Llama, Qwen 3).
    pub attention_bias: bool,
    /// Biases on gate, up and down (Llama).
    pub mlp_bias: bool,
    /// Element type of every tensor.
    pub dtype: DType,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Longest sequence.
    pub max_positions: u32,
    /// Sliding windows.
    pub window: Window,
    /// Ids that end a generation.
    pub eos: Vec<u32>,
    /// Id that begins a sequence.
    pub bos: Option<u32>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            name: "toy".to_owned(),
            family: Family::Llama,
            hidden: 64,
            layers: 1,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 128,
            vocab: 256,
            tied: false,
            attention_bias: false,
            mlp_bias: false,
            dtype: DType::Bf16,
            norm_eps: 1e-5,
            rope: Rope::plain(10_000.0),
            max_positions: 2048,
            window: Window::None,
            eos: Vec::new(),
            bos: None,
        }
    }
}

impl Shape {
    /// The graph of a model with these dimensions: tensors in checkpoint order, with Hugging Face's names.
    ///
    /// It does not check anything: a shape with [`Shape::problems`] gives a graph that cannot be run.
    #[must_use]
    pub fn graph(&self) -> Graph {
        let mut tensors = Tensors { dtype: self.dtype, list: Vec::new() };
        let embed = tensors.add("model.embed_tokens.weight", &[self.vocab, self.hidden]);
        let layers = (0..self.layers).map(|i| self.layer(i, &mut tensors)).collect();
        let final_norm = tensors.add("model.norm.weight", &[self.hidden]);
        let lm_head = if self.tied {
            embed
        } else {
            tensors.add("lm_head.weight", &[self.vocab, self.hidden])
        };
        Graph {
            name: self.name.clone(),
            family: self.family.model_type().to_owned(),
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            norm_eps: self.norm_eps,
            inv_freq: self.rope.inv_freq(self.head_dim),
            attn_scale: (1.0 / f64::from(self.head_dim).sqrt()) as f32,
            max_positions: self.max_positions,
            dtype: self.dtype,
            tensors: tensors.list,
            embed,
            layers,
            final_norm,
            lm_head,
            lm_head_scale: None,
            eos: self.eos.clone(),
            bos: self.bos,
        }
    }

    fn layer(&self, index: u32, tensors: &mut Tensors) -> Layer {
        let at = format!("model.layers.{index}.");
        let q_width = self.heads * self.head_dim;
        let kv_width = self.kv_heads * self.head_dim;
        let o_bias = self.attention_bias && matches!(self.family, Family::Llama | Family::Qwen3);
        let qkv_bias = o_bias || self.family == Family::Qwen2;
        let mlp_bias = self.mlp_bias && self.family == Family::Llama;
        let qk_norm = self.family == Family::Qwen3;
        let attn_norm = tensors.add(&format!("{at}input_layernorm.weight"), &[self.hidden]);
        let mut linear = |name: &str, rows: u32, cols: u32, bias: bool| Linear {
            weight: tensors.add(&format!("{at}{name}.weight"), &[rows, cols]),
            scale: None,
            bias: bias.then(|| tensors.add(&format!("{at}{name}.bias"), &[rows])),
        };
        let q = linear("self_attn.q_proj", q_width, self.hidden, qkv_bias);
        let k = linear("self_attn.k_proj", kv_width, self.hidden, qkv_bias);
        let v = linear("self_attn.v_proj", kv_width, self.hidden, qkv_bias);
        let o = linear("self_attn.o_proj", self.hidden, q_width, o_bias);
        let gate = linear("mlp.gate_proj", self.ffn, self.hidden, mlp_bias);
        let up = linear("mlp.up_proj", self.ffn, self.hidden, mlp_bias);
        let down = linear("mlp.down_proj", self.hidden, self.ffn, mlp_bias);
        let mut norm = |name: &str, len: u32| tensors.add(&format!("{at}{name}.weight"), &[len]);
        Layer {
            attn_norm,
            q,
            k,
            v,
            q_norm: qk_norm.then(|| norm("self_attn.q_norm", self.head_dim)),
            k_norm: qk_norm.then(|| norm("self_attn.k_norm", self.head_dim)),
            o,
            mlp_norm: norm("post_attention_layernorm", self.hidden),
            gate,
            up,
            down,
            window: self.window.of(index as usize),
        }
    }

    /// Every reason why these dimensions cannot be run, by `config.json`'s field names. Empty means valid.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let mut found = Vec::new();
        self.check_sizes(&mut found);
        self.check_heads(&mut found);
        self.check_numbers(&mut found);
        self.check_ids(&mut found);
        found
    }

    fn check_sizes(&self, found: &mut Vec<Problem>) {
        let sizes = [
            ("hidden_size", self.hidden, HIDDEN_MAX),
            ("num_hidden_layers", self.layers, LAYERS_MAX),
            ("num_attention_heads", self.heads, HEADS_MAX),
            ("num_key_value_heads", self.kv_heads, HEADS_MAX),
            ("head_dim", self.head_dim, HEAD_DIM_MAX),
            ("intermediate_size", self.ffn, FFN_MAX),
            ("vocab_size", self.vocab, VOCAB_MAX),
            ("max_position_embeddings", self.max_positions, POSITIONS_MAX),
        ];
        for (field, value, max) in sizes {
            if value == 0 || value > max {
                found.push(Problem::new(field, format!("is {value}; supported: 1 to {max}")));
            }
        }
        for (field, value) in [("hidden_size", self.hidden), ("intermediate_size", self.ffn)] {
            if !value.is_multiple_of(WIDTH_STEP) {
                let reason = format!("is {value}; supported: multiples of {WIDTH_STEP}");
                found.push(Problem::new(field, reason));
            }
        }
    }

    fn check_heads(&self, found: &mut Vec<Problem>) {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        if head_dim > 0 && head_dim <= HEAD_DIM_MAX && !head_dim.is_multiple_of(HEAD_DIM_STEP) {
            found.push(Problem::new(
                "head_dim",
                format!(
                    "is {head_dim}; supported: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
                ),
            ));
        }
        if heads > 0 && kv_heads > 0 && !heads.is_multiple_of(kv_heads) {
            found.push(Problem::new(
                "num_key_value_heads",
                format!("is {kv_heads}; it must divide num_attention_heads, which is {heads}"),
            ));
        }
    }

    fn check_numbers(&self, found: &mut Vec<Problem>) {
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            let reason = format!("is {:e}; it must be above 0 and below 1", self.norm_eps);
            found.push(Problem::new("rms_norm_eps", reason));
        }
        let theta = self.rope.theta;
        if !(theta.is_finite() && (1.0..=1e15).contains(&theta)) {
            found.push(Problem::new("rope_theta", format!("is {theta}; supported: 1 to 1e15")));
        }
        check_scaling(self.rope.scaling, found);
        if let Window::All(0) | Window::Layers { window: 0, .. } = self.window {
            found.push(Problem::new("sliding_window", "is 0; use null for full attention"));
        }
        if let Window::Layers { sliding, .. } = &self.window
            && sliding.len() != self.layers as usize
        {
            let reason = format!("has {} entries for {} layers", sliding.len(), self.layers);
            found.push(Problem::new("layer_types", reason));
        }
    }

    fn check_ids(&self, found: &mut Vec<Problem>) {
        let named = self.eos.iter().map(|&id| ("eos_token_id", id));
        for (field, id) in named.chain(self.bos.map(|id| ("bos_token_id", id))) {
            if self.vocab > 0 && id >= self.vocab {
                let reason =
                    format!("is {id}; it must be below vocab_size, which is {}", self.vocab);
                found.push(Problem::new(field, reason));
            }
        }
    }
}

fn check_scaling(scaling: Scaling, found: &mut Vec<Problem>) {
    let mut positive = |field: &str, value: f64| {
        let good = value.is_finite() && (1e-6..=1e9).contains(&value);
        if !good {
            let reason = format!("is {value}; it must be positive and at most 1e9");
            found.push(Problem::new(field, reason));
        }
        good
    };
    match scaling {
        Scaling::Default => {}
        Scaling::Linear { factor } => {
            positive("rope factor", factor);
        }
        Scaling::Llama3 { factor, low, high, original } => {
            positive("rope factor", factor);
            let bounded = positive("low_freq_factor", low) & positive("high_freq_factor", high);
            if bounded && high <= low {
                let reason = format!("is {high}; it must be above low_freq_factor, which is {low}");
                found.push(Problem::new("high_freq_factor", reason));
            }
            if original == 0 || original > POSITIONS_MAX {
                let reason = format!("is {original}; supported: 1 to {POSITIONS_MAX}");
                found.push(Problem::new("original_max_position_embeddings", reason));
            }
        }
    }
}

/// The graph's tensor list during construction.
struct Tensors {
    dtype: DType,
    list: Vec<Tensor>,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: &[u32]) -> TensorId {
        let id = TensorId(self.list.len() as u32);
        self.list.push(Tensor { name: name.to_owned(), dtype: self.dtype, shape: shape.to_vec() });
        id
    }
}
