//! Gemma 2 and 3 (text): norms of `1 + w` before and after the blocks, scaled embeddings, GELU, alternating windows.

use super::{Bias, Norms, QkNorm, Row, WindowRule, llama};
use crate::fields::Fields;
use crate::shape::Shape;

pub(super) const GEMMA2: Row = Row {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    max_positions: 8192,
    kv_heads: Some(4),
    head_dim: Some(256),
    tied: true,
    activation_field: "hidden_activation",
    activation: "gelu_pytorch_tanh",
    mlp_bias: Bias::Never,
    norms: Norms {
        attn: Some("input_layernorm"),
        attn_post: Some("post_attention_layernorm"),
        mlp: Some("pre_feedforward_layernorm"),
        mlp_post: Some("post_feedforward_layernorm"),
    },
    norm_add: 1.0,
    windows: WindowRule::Pattern { window: 4096, full_every: 2, field: None },
    read: |fields, shape| {
        scalars(fields, shape);
        // Fields that a file lacks have these values; null is none.
        let mut cap = |field, absent| {
            let given = fields.number(field).map(|cap| cap as f32);
            given.or((!fields.is_null(field)).then_some(absent))
        };
        shape.options.score_cap = cap("attn_logit_softcapping", 50.0);
        shape.options.logit_cap = cap("final_logit_softcapping", 30.0);
    },
    ..llama::LLAMA
};

pub(super) const GEMMA3: Row = Row {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    max_positions: 131_072,
    heads: Some(8),
    vocab: Some(262_208),
    theta: 1_000_000.0,
    sliding_theta: Some(("rope_local_base_freq", 10_000.0)),
    qk_norm: QkNorm::Head,
    windows: WindowRule::Pattern {
        window: 4096,
        full_every: 6,
        field: Some("sliding_window_pattern"),
    },
    // transformers has `attn_logit_softcapping` in the configuration and does not apply it: it is refused.
    read: |fields, shape| {
        scalars(fields, shape);
        shape.options.logit_cap = fields.number("final_logit_softcapping").map(|cap| cap as f32);
    },
    ..GEMMA2
};

fn scalars(fields: &mut Fields<'_>, shape: &mut Shape) {
    let scalar = fields.number("query_pre_attn_scalar").unwrap_or(256.0);
    if scalar > 0.0 {
        shape.options.attn_scale = Some(scalar.powf(-0.5) as f32);
    } else {
        fields.complain("query_pre_attn_scalar", format!("is {scalar}; it must be above 0"));
    }
    shape.options.embed_scale = (f64::from(shape.hidden)).sqrt() as f32;
    if fields.flag("use_bidirectional_attention") {
        fields.complain("use_bidirectional_attention", "is true; supported: false, null");
    }
}
