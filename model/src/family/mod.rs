//! Families: what each does differently from a llama. A family is a [`Row`], most in a file of its own; what follows
//! from a configuration's values is read by its `read`.

mod experts;
mod gemma;
mod glm4;
mod gpt_oss;
mod granite;
mod llama;
mod mixtral;
mod olmo;
mod phi3;
mod qwen_moe;
mod smollm3;

use crate::fields::Fields;
use crate::shape::Shape;
pub(crate) use experts::ExpertRow;
pub use experts::ExpertShape;
pub(crate) use phi3::LONGROPE;

macro_rules! families {
    ($($(#[doc = $doc:literal])+ $variant:ident = $row:path,)+) => {
        /// A model family: one `model_type` of Hugging Face's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Family { $($(#[doc = $doc])+ $variant,)+ }

        impl Family {
            /// Every family.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            pub(crate) const fn row(self) -> &'static Row {
                match self { $(Self::$variant => &$row,)+ }
            }
        }
    };
}

families! {
    /// Llama 1, 2, 3, 3.1, 3.2, and the many models with their layout.
    Llama = llama::LLAMA,
    /// Mistral: Llama with an optional sliding window in every layer.
    Mistral = llama::MISTRAL,
    /// Ministral: Mistral with windows in some layers.
    Ministral = llama::MINISTRAL,
    /// Qwen 2 and 2.5: biases on q, k and v.
    Qwen2 = llama::QWEN2,
    /// Qwen 3: RMSNorm over each query and key head.
    Qwen3 = llama::QWEN3,
    /// Phi 3, 3.5 and 4: fused projections, longrope, partial rotation.
    Phi3 = phi3::PHI3,
    /// Granite 3: four multipliers.
    Granite = granite::GRANITE,
    /// SmolLM 3: layers without rotation.
    SmolLm3 = smollm3::SMOLLM3,
    /// OLMo 2: norms after the blocks, q and k norms over all heads.
    Olmo2 = olmo::OLMO2,
    /// OLMo 3: OLMo 2 with windows, and other frequencies in layers without.
    Olmo3 = olmo::OLMO3,
    /// Gemma 2: soft caps, norms before and after the blocks, alternating windows.
    Gemma2 = gemma::GEMMA2,
    /// Gemma 3: two rotary bases, q and k norms.
    Gemma3 = gemma::GEMMA3,
    /// GLM 4: neighbours rotated as pairs in half of each head, norms before and after the blocks.
    Glm4 = glm4::GLM4,
    /// Mixtral: Mistral with experts.
    Mixtral = mixtral::MIXTRAL,
    /// OLMoE: experts, q and k norms over all heads.
    Olmoe = olmo::OLMOE,
    /// Qwen 2 with experts: one of them shared, with a gate.
    Qwen2Moe = qwen_moe::QWEN2_MOE,
    /// Qwen 3 with experts.
    Qwen3Moe = qwen_moe::QWEN3_MOE,
    /// GPT-OSS: experts with biases, attention sinks, alternating windows.
    GptOss = gpt_oss::GPT_OSS,
}

impl Family {
    /// The `model_type` of `config.json`.
    #[must_use]
    pub const fn model_type(self) -> &'static str {
        self.row().model_type
    }

    /// The class in `architectures` of `config.json`.
    #[must_use]
    pub const fn architecture(self) -> &'static str {
        self.row().architecture
    }
}

/// Whether linear maps have biases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    Never,
    Always,
    /// If this flag of the configuration is true: `attention_bias` or `mlp_bias`.
    Asked,
}

impl Bias {
    pub(crate) fn applies(self, asked: bool) -> bool {
        self == Self::Always || self == Self::Asked && asked
    }
}

/// Norms of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorm {
    None,
    /// Over each head.
    Head,
    /// Over all heads together.
    All,
}

/// Names of a layer's norms, where it has them.
#[derive(Clone, Copy)]
pub(crate) struct Norms {
    pub(crate) attn: Option<&'static str>,
    pub(crate) attn_post: Option<&'static str>,
    pub(crate) mlp: Option<&'static str>,
    pub(crate) mlp_post: Option<&'static str>,
}

/// Which layers have a sliding window, and the default of `sliding_window`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRule {
    /// None has.
    None,
    /// Every layer if `sliding_window` is a number.
    All { absent: Option<u32> },
    /// Off unless `use_sliding_window`; then by `layer_types`, or from layer `max_window_layers` on.
    Switched,
    /// By `layer_types`, else all but every n-th layer, n being the value of `field`, if there is one, or this default.
    Pattern { window: u32, full_every: u32, field: Option<&'static str> },
}

/// What a family does.
pub(crate) struct Row {
    pub(crate) model_type: &'static str,
    pub(crate) architecture: &'static str,
    /// Defaults of fields that a configuration may leave out; `None`: as many as `num_attention_heads`, and the quotient
    /// of the widths.
    pub(crate) max_positions: u32,
    pub(crate) heads: Option<u32>,
    pub(crate) vocab: Option<u32>,
    pub(crate) kv_heads: Option<u32>,
    pub(crate) head_dim: Option<u32>,
    pub(crate) tied: bool,
    pub(crate) theta: f64,
    /// The field of the base of layers with a window, and its default, where they have a rotary embedding of their own.
    pub(crate) sliding_theta: Option<(&'static str, f64)>,
    pub(crate) norm_eps: f64,
    pub(crate) activation_field: &'static str,
    pub(crate) activation: &'static str,
    pub(crate) qkv_bias: Bias,
    pub(crate) o_bias: Bias,
    pub(crate) mlp_bias: Bias,
    pub(crate) norms: Norms,
    pub(crate) qk_norm: QkNorm,
    /// What is added to stored norm weights.
    pub(crate) norm_add: f32,
    /// Queries, keys and values are stored as one matrix `qkv_proj`.
    pub(crate) fused_qkv: bool,
    /// Gate and up are stored as one matrix `gate_up_proj`.
    pub(crate) fused_gate_up: bool,
    /// Default of `partial_rotary_factor`; `None` if heads are always rotated as a whole.
    pub(crate) rotated: Option<f64>,
    /// Whether `longrope` is read.
    pub(crate) longrope: bool,
    /// Elements `2 i` and `2 i + 1` are rotated together, not `i` and `i + n / 2`.
    pub(crate) neighbours: bool,
    pub(crate) windows: WindowRule,
    /// Whether each head has an attention sink.
    pub(crate) sinks: bool,
    /// Experts in place of the MLP.
    pub(crate) experts: Option<ExpertRow>,
    /// Reads what else the family's configurations say.
    pub(crate) read: fn(&mut Fields<'_>, &mut Shape),
}
