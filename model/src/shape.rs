//! The dimensions of a model, and the graph built from them.

use ir::{
    Activation, Attention, Block, DType, FeedForward, GROUP_MAX, Gated, Graph, Layer, UNIT_ROWS,
};

use crate::coded::Coded;
use crate::error::Problem;
pub use crate::family::Family;
use crate::family::{ExpertShape, QkNorm};
use crate::pieces::{HeadOrder, Piece, Tensors};
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

/// How sequences beyond [`Shape::max_positions`] are rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct Longer {
    /// Positions of such a sequence, at most.
    pub max_positions: u32,
    /// Divisors of the rotary frequencies, of all its positions.
    pub divisors: Vec<f32>,
}

/// What few families need. [`Options::default`] is a llama's.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The function between the halves of the MLP.
    pub activation: Activation,
    /// Factor of the embedding.
    pub embed_scale: f32,
    /// Factor of what a block adds to the residual stream.
    pub residual_scale: f32,
    /// Divisor of the logits.
    pub logit_divisor: f32,
    /// Factor of scores, if not `head_dim ** -0.5`.
    pub attn_scale: Option<f32>,
    /// Soft cap of scores.
    pub score_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
    /// Fraction of a head that is rotated.
    pub rotated: f64,
    /// Factor of cosines and sines.
    pub rotary_factor: f64,
    /// Divisors of the rotary frequencies; empty for none.
    pub rotary_divisors: Vec<f32>,
    /// Other divisors for sequences beyond `max_positions`, if there are such.
    pub longer: Option<Longer>,
    /// Rotary embedding of layers with a sliding window, if it is another.
    pub sliding_rope: Option<Rope>,
    /// Layers that do not rotate: `true` for each of them; empty for none.
    pub unrotated: Vec<bool>,
    /// Experts, in families that have them.
    pub experts: Option<ExpertShape>,
    /// Matrices that are codes. An imported model has those of its files.
    pub coded: Option<Coded>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            activation: Activation::Silu,
            embed_scale: 1.0,
            residual_scale: 1.0,
            logit_divisor: 1.0,
            attn_scale: None,
            score_cap: None,
            logit_cap: None,
            rotated: 1.0,
            rotary_factor: 1.0,
            rotary_divisors: Vec::new(),
            longer: None,
            sliding_rope: None,
            unrotated: Vec::new(),
            experts: None,
            coded: None,
            notes: Vec::new(),
        }
    }
}

/// All parameters of a model except its weights. [`Shape::default`] is the `toy` preset.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// The model's display name.
    pub name: String,
    /// The family: its norms, biases and tensors' names.
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
    /// Biases on q, k, v and perhaps o, where the family has the choice.
    pub attention_bias: bool,
    /// Biases on gate, up and down, where the family has the choice.
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
    /// What few families need.
    pub options: Options,
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
            options: Options::default(),
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
        let mut graph = self.described().0;
        if let Some(coded) = self.options.coded {
            coded.apply(&mut graph);
        }
        graph
    }

    /// The graph, and for each tensor how it is made of what is stored; `None` if it is stored so, under its name.
    pub(crate) fn described(&self) -> (Graph, Vec<Option<Piece>>) {
        let (options, norm_add) = (&self.options, self.family.row().norm_add);
        let mut tensors = Tensors::new(self.dtype);
        let embed = tensors.add("model.embed_tokens.weight", &[self.vocab, self.hidden]);
        let layers = (0..self.layers).map(|i| self.layer(i, &mut tensors)).collect();
        let final_norm =
            tensors.norm("model.norm.weight", self.hidden, norm_add, 1.0 / options.logit_divisor);
        let lm_head = if self.tied {
            embed
        } else {
            tensors.add("lm_head.weight", &[self.vocab, self.hidden])
        };
        let sliding = options.sliding_rope.map(|rope| self.rotary_table(rope));
        let unrotated = options.unrotated.contains(&true);
        let still = unrotated.then(|| vec![0.0; self.head_dim as usize / 2]);
        // A residual stream divided by its factor has the same norms, if epsilon is divided by the square.
        let scale = options.residual_scale;
        let mut graph = Graph {
            name: self.name.clone(),
            family: self.family.model_type().to_owned(),
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            norm_eps: self.norm_eps / (scale * scale),
            inv_freq: self.rotary_table(self.rope),
            rotary: sliding.into_iter().chain(still).collect(),
            embed_scale: options.embed_scale / scale,
            activation: options.activation,
            score_cap: options.score_cap,
            logit_cap: options.logit_cap,
            kv_dtype: ir::KvDtype::default(),
            attn_scale: options
                .attn_scale
                .unwrap_or((1.0 / f64::from(self.head_dim).sqrt()) as f32),
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
        };
        graph.dtype = graph.operand(self.dtype);
        (graph, tensors.pieces)
    }

    /// The most positions of a sequence, with the frequencies for longer ones if there are such.
    #[must_use]
    pub fn farthest(&self) -> u32 {
        self.options.longer.as_ref().map_or(self.max_positions, |longer| longer.max_positions)
    }

    /// Makes room for sequences of `positions`. Beyond `max_positions`, a model that has frequencies for longer sequences
    /// gets those for all positions. Returns whether it did; other models stay as they are.
    pub fn reach(&mut self, positions: u32) -> bool {
        let most = self.max_positions;
        let Some(longer) = self.options.longer.take_if(|_| positions > most) else { return false };
        self.max_positions = longer.max_positions;
        self.options.rotary_divisors = longer.divisors;
        true
    }

    /// Elements of a head that are rotated.
    pub(crate) fn rotated_dims(&self) -> u32 {
        (f64::from(self.head_dim) * self.options.rotated) as u32 / 2 * 2
    }

    /// Frequencies of a head's pairs, and their factors if there are any. Pairs that are not rotated have frequency zero.
    fn rotary_table(&self, rope: Rope) -> Vec<f32> {
        let (options, half) = (&self.options, self.head_dim as usize / 2);
        let mut table = rope.inv_freq_divided(self.rotated_dims(), &options.rotary_divisors);
        let (pairs, factor) = (table.len(), options.rotary_factor * rope.scaling.factor());
        table.resize(half, 0.0);
        if factor != 1.0 {
            table.extend((0..half).map(|i| if i < pairs { factor as f32 } else { 1.0 }));
        }
        table
    }

    /// The number of a layer's rotary table.
    fn rotary(&self, index: usize) -> u32 {
        let sliding = u32::from(self.options.sliding_rope.is_some());
        if self.options.unrotated.get(index) == Some(&true) {
            1 + sliding
        } else if self.window.of(index).is_some() {
            sliding
        } else {
            0
        }
    }

    fn layer(&self, index: u32, tensors: &mut Tensors) -> Layer {
        let at = format!("model.layers.{index}.");
        let norms = self.family.row().norms;
        let norm = |tensors: &mut Tensors, name: Option<&str>| {
            let name = name.map(|name| format!("{at}{name}.weight"));
            name.map(|name| tensors.norm(&name, self.hidden, self.family.row().norm_add, 1.0))
        };
        // Ids of graphs depend on this order of the tensors.
        let attn_norm = norm(tensors, norms.attn);
        let mut attention = self.attention(&at, index as usize, tensors);
        let mlp = self.feed_forward(&at, index as usize, tensors);
        self.head_norms(&at, &mut attention, tensors);
        let mlp_norm = norm(tensors, norms.mlp);
        let attn_post = norm(tensors, norms.attn_post);
        let mlp_post = norm(tensors, norms.mlp_post);
        Layer {
            attention: Block { norm: attn_norm, post_norm: attn_post, body: attention },
            mlp: Block { norm: mlp_norm, post_norm: mlp_post, body: mlp },
        }
    }

    /// Attention without what belongs to heads.
    fn attention(&self, at: &str, index: usize, tensors: &mut Tensors) -> Attention {
        let (row, hidden) = (self.family.row(), self.hidden);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let qkv_bias = row.qkv_bias.applies(self.attention_bias);
        let o_bias = row.o_bias.applies(self.attention_bias);
        let order = HeadOrder::new(self.head_dim, self.rotated_dims(), row.neighbours);
        let mut linear = |name: &str, size, first, order| {
            let fused =
                row.fused_qkv.then(|| (format!("{at}self_attn.qkv_proj"), first, q + 2 * kv));
            tensors.linear(&format!("{at}self_attn.{name}"), size, qkv_bias, fused, order)
        };
        Attention {
            q: linear("q_proj", (q, hidden), 0, order.as_ref()),
            k: linear("k_proj", (kv, hidden), q, order.as_ref()),
            v: linear("v_proj", (kv, hidden), q + kv, None),
            q_norm: None,
            k_norm: None,
            o: tensors.linear(&format!("{at}self_attn.o_proj"), (hidden, q), o_bias, None, None),
            sinks: None,
            window: self.window.of(index),
            rotary: self.rotary(index),
        }
    }

    fn head_norms(&self, at: &str, attention: &mut Attention, tensors: &mut Tensors) {
        let row = self.family.row();
        let mut norm = |name: &str, heads| {
            let len = match row.qk_norm {
                QkNorm::None => return None,
                QkNorm::Head => self.head_dim,
                QkNorm::All => heads * self.head_dim,
            };
            let name = format!("{at}self_attn.{name}.weight");
            Some(tensors.norm(&name, len, row.norm_add, 1.0))
        };
        attention.q_norm = norm("q_norm", self.heads);
        attention.k_norm = norm("k_norm", self.kv_heads);
        if row.sinks {
            attention.sinks = Some(tensors.add(&format!("{at}self_attn.sinks"), &[self.heads]));
        }
    }

    fn feed_forward(&self, at: &str, index: usize, tensors: &mut Tensors) -> FeedForward {
        let (row, hidden, ffn) = (self.family.row(), self.hidden, self.ffn);
        let experts = self.options.experts.as_ref().filter(|experts| experts.in_layer(index));
        if let (Some(row), Some(experts)) = (&row.experts, experts) {
            return row.layer(at, hidden, experts, tensors);
        }
        let bias = row.mlp_bias.applies(self.mlp_bias);
        let mut linear = |name: &str, size, first: Option<u32>| {
            let fused = first.filter(|_| row.fused_gate_up);
            let fused = fused.map(|first| (format!("{at}mlp.gate_up_proj"), first, 2 * ffn));
            tensors.linear(&format!("{at}mlp.{name}"), size, bias, fused, None)
        };
        FeedForward::Gated(Gated {
            gate: linear("gate_proj", (ffn, hidden), Some(0)),
            up: linear("up_proj", (ffn, hidden), Some(ffn)),
            down: linear("down_proj", (hidden, ffn), None),
        })
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
        } else if kv_heads > 0 && heads / kv_heads > GROUP_MAX {
            let each = heads / kv_heads;
            let reason = format!(
                "is {kv_heads} for {heads} heads, {each} for each; supported: up to {GROUP_MAX}"
            );
            found.push(Problem::new("num_key_value_heads", reason));
        }
    }

    fn check_numbers(&self, found: &mut Vec<Problem>) {
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            let reason = format!("is {:e}; it must be above 0 and below 1", self.norm_eps);
            found.push(Problem::new("rms_norm_eps", reason));
        }
        check_rope("rope_theta", self.rope, found);
        if let Some(rope) = self.options.sliding_rope {
            let field = self.family.row().sliding_theta.map_or("rope_theta", |(field, _)| field);
            check_rope(field, rope, found);
        }
        self.check_options(found);
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

    fn check_options(&self, found: &mut Vec<Problem>) {
        let options = &self.options;
        let factors = [
            ("embedding_multiplier", Some(options.embed_scale)),
            ("residual_multiplier", Some(options.residual_scale)),
            ("logits_scaling", Some(options.logit_divisor)),
            ("attention_multiplier", options.attn_scale),
            ("attn_logit_softcapping", options.score_cap),
            ("final_logit_softcapping", options.logit_cap),
            ("attention_factor", Some((options.rotary_factor * self.rope.scaling.factor()) as f32)),
        ];
        for (field, value) in factors {
            if value.is_some_and(|value| !(1e-6..=1e6).contains(&value)) {
                let value = value.unwrap_or(f32::NAN);
                found.push(Problem::new(field, format!("is {value}; supported: 1e-6 to 1e6")));
            }
        }
        if let Some(experts) = &options.experts {
            let row = self.family.row().experts.as_ref();
            experts.check(row.map_or("intermediate_size", |row| row.width), self.layers, found);
            if !self.hidden.is_multiple_of(UNIT_ROWS) {
                let reason = format!("is {}; with experts: multiples of {UNIT_ROWS}", self.hidden);
                found.push(Problem::new("hidden_size", reason));
            }
        }
        let none = self.head_dim > 0 && self.rotated_dims() == 0;
        if !(options.rotated > 0.0 && options.rotated <= 1.0) || none {
            let reason = format!("is {}; it must be above 0 and at most 1", options.rotated);
            found.push(Problem::new("partial_rotary_factor", reason));
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

fn check_rope(base: &str, rope: Rope, found: &mut Vec<Problem>) {
    let Rope { theta, scaling } = rope;
    // The logarithm of a base is a divisor.
    if !(theta > 1.0 && theta <= 1e15) {
        let reason = format!("is {theta}; supported: above 1 and up to 1e15");
        found.push(Problem::new(base, reason));
    }
    check_scaling(scaling, found);
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
        Scaling::Yarn { factor, original, fast, slow, .. } => {
            positive("rope factor", factor);
            positive("beta_fast", fast);
            positive("beta_slow", slow);
            if original == 0 || original > POSITIONS_MAX {
                let reason = format!("is {original}; supported: 1 to {POSITIONS_MAX}");
                found.push(Problem::new("original_max_position_embeddings", reason));
            }
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
