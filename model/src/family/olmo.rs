//! OLMo 2 and 3: no norm before a block, one after it, and norms over all queries and all keys. OLMoE: a llama with
//! such norms of queries and keys, and experts.

use super::{Bias, ExpertRow, Norms, QkNorm, Row, WindowRule, llama};

pub(super) const OLMO2: Row = Row {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    norm_eps: 1e-5,
    norms: Norms {
        attn: None,
        attn_post: Some("post_attention_layernorm"),
        mlp: None,
        mlp_post: Some("post_feedforward_layernorm"),
    },
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::All,
    ..llama::LLAMA
};

pub(super) const OLMO3: Row = Row {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    max_positions: 2048,
    windows: WindowRule::Pattern { window: 4096, full_every: 4, field: None },
    // Frequencies are scaled where attention is full.
    theta: 500_000.0,
    sliding_theta: Some(("rope_theta", 500_000.0)),
    ..OLMO2
};

pub(super) const OLMOE: Row = Row {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    max_positions: 4096,
    norm_eps: 1e-5,
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::All,
    experts: Some(ExpertRow {
        block: "mlp",
        router: "gate",
        parts: Some(["gate_proj", "up_proj", "down_proj"]),
        normalised: None,
        width: "intermediate_size",
        count: 64,
        top_k: 8,
        ffn: 2048,
        shared: None,
        sparse: false,
        clamped: None,
    }),
    ..llama::LLAMA
};
