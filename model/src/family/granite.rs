//! Granite 3: Llama with multipliers of embeddings, scores, residuals and logits.

use super::{Row, llama};

pub(super) const GRANITE: Row = Row {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    read: |fields, shape| {
        let mut number = |field| fields.number(field).unwrap_or(1.0) as f32;
        shape.options.embed_scale = number("embedding_multiplier");
        shape.options.residual_scale = number("residual_multiplier");
        shape.options.attn_scale = Some(number("attention_multiplier"));
        shape.options.logit_divisor = number("logits_scaling");
    },
    ..llama::LLAMA
};
