//! Llama and its nearest relatives.

use super::{Bias, Norms, QkNorm, Row, WindowRule};

const WINDOW: u32 = 4096;

pub(super) const LLAMA: Row = Row {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    max_positions: 2048,
    heads: None,
    vocab: None,
    kv_heads: None,
    head_dim: None,
    tied: false,
    theta: 10_000.0,
    sliding_theta: None,
    norm_eps: 1e-6,
    activation_field: "hidden_act",
    activation: "silu",
    qkv_bias: Bias::Asked,
    o_bias: Bias::Asked,
    mlp_bias: Bias::Asked,
    norms: Norms {
        attn: Some("input_layernorm"),
        attn_post: None,
        mlp: Some("post_attention_layernorm"),
        mlp_post: None,
    },
    qk_norm: QkNorm::None,
    norm_add: 0.0,
    fused_qkv: false,
    fused_gate_up: false,
    rotated: None,
    longrope: false,
    neighbours: false,
    windows: WindowRule::None,
    sinks: false,
    experts: None,
    read: |_, _| {},
};

pub(super) const MISTRAL: Row = Row {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    max_positions: 131_072,
    kv_heads: Some(8),
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: WindowRule::All { absent: Some(WINDOW) },
    ..LLAMA
};

pub(super) const MINISTRAL: Row = Row {
    model_type: "ministral",
    architecture: "MinistralForCausalLM",
    max_positions: 32_768,
    windows: WindowRule::Pattern { window: WINDOW, full_every: 0, field: None },
    ..MISTRAL
};

pub(super) const QWEN2: Row = Row {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    max_positions: 32_768,
    kv_heads: Some(32),
    qkv_bias: Bias::Always,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: WindowRule::Switched,
    ..LLAMA
};

pub(super) const QWEN3: Row = Row {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    head_dim: Some(128),
    qkv_bias: Bias::Asked,
    o_bias: Bias::Asked,
    qk_norm: QkNorm::Head,
    ..QWEN2
};
