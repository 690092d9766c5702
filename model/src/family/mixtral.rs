//! Mixtral: Mistral with experts, whose weights are a softmax over the chosen ones.

use super::{ExpertRow, Row, WindowRule, llama};

pub(super) const MIXTRAL: Row = Row {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    theta: 1_000_000.0,
    norm_eps: 1e-5,
    windows: WindowRule::All { absent: None },
    experts: Some(ExpertRow {
        block: "block_sparse_moe",
        router: "gate",
        parts: Some(["w1", "w3", "w2"]),
        normalised: Some(true),
        width: "intermediate_size",
        count: 8,
        top_k: 2,
        ffn: 14_336,
        shared: None,
        sparse: false,
        clamped: None,
    }),
    ..llama::MISTRAL
};
