//! GPT-OSS: experts with biases and a clamped SwiGLU, attention sinks, windows in every second layer, yarn.

use ir::Clamped;

use super::{Bias, ExpertRow, Row, WindowRule, llama};

/// The limit of an expert's halves, and the factor in its sigmoid, of every published model.
const LIMIT: f64 = 7.0;
const ALPHA: f64 = 1.702;

pub(super) const GPT_OSS: Row = Row {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    max_positions: 131_072,
    kv_heads: Some(8),
    head_dim: Some(64),
    theta: 150_000.0,
    norm_eps: 1e-5,
    qkv_bias: Bias::Always,
    o_bias: Bias::Always,
    windows: WindowRule::Pattern { window: 128, full_every: 2, field: None },
    sinks: true,
    experts: Some(ExpertRow {
        block: "mlp",
        router: "router",
        parts: None,
        normalised: Some(true),
        width: "intermediate_size",
        count: 128,
        top_k: 4,
        ffn: 2880,
        shared: None,
        sparse: false,
        clamped: Some(Clamped { limit: LIMIT as f32, alpha: ALPHA as f32 }),
    }),
    read: |fields, _| {
        if fields.get("attention_bias").is_some() && !fields.flag("attention_bias") {
            fields.complain("attention_bias", "is false; supported: true");
        }
        for (field, only) in [("swiglu_limit", LIMIT), ("swiglu_alpha", ALPHA)] {
            if fields.number(field).is_some_and(|value| value != only) {
                fields.complain(field, format!("differs from {only}; supported: {only}"));
            }
        }
        if fields.get("rope_scaling").or_else(|| fields.get("rope_parameters")).is_none() {
            let reason = "is missing; give that of the published model, which is of type yarn";
            fields.complain("rope_scaling", reason);
        }
    },
    ..llama::LLAMA
};
