//! GLM 4: half of each head is rotated, neighbours as pairs; norms before and after the blocks.

use super::{Bias, Norms, Row, llama};

pub(super) const GLM4: Row = Row {
    model_type: "glm4",
    architecture: "Glm4ForCausalLM",
    max_positions: 131_072,
    kv_heads: Some(2),
    head_dim: Some(128),
    norm_eps: 1.5625e-7,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norms: Norms {
        attn: Some("input_layernorm"),
        attn_post: Some("post_self_attn_layernorm"),
        mlp: Some("post_attention_layernorm"),
        mlp_post: Some("post_mlp_layernorm"),
    },
    fused_gate_up: true,
    rotated: Some(0.5),
    neighbours: true,
    ..llama::LLAMA
};
