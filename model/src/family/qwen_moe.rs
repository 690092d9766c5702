//! Qwen 2 and 3 with experts.

use super::{Bias, ExpertRow, QkNorm, Row, WindowRule, llama};
use crate::fields::Fields;

pub(super) const QWEN2_MOE: Row = Row {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    kv_heads: Some(16),
    qkv_bias: Bias::Asked,
    windows: WindowRule::None,
    experts: Some(ExpertRow {
        block: "mlp",
        router: "gate",
        parts: Some(["gate_proj", "up_proj", "down_proj"]),
        normalised: None,
        width: "moe_intermediate_size",
        count: 60,
        top_k: 4,
        ffn: 1408,
        shared: Some(5632),
        sparse: true,
        clamped: None,
    }),
    read: |fields, shape| {
        shape.attention_bias = fields.get("qkv_bias").is_none() || fields.flag("qkv_bias");
        no_windows(fields);
    },
    ..llama::QWEN2
};

pub(super) const QWEN3_MOE: Row = Row {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    kv_heads: Some(4),
    o_bias: Bias::Asked,
    qk_norm: QkNorm::Head,
    experts: Some(ExpertRow {
        block: "mlp",
        router: "gate",
        parts: Some(["gate_proj", "up_proj", "down_proj"]),
        normalised: None,
        width: "moe_intermediate_size",
        count: 128,
        top_k: 8,
        ffn: 768,
        shared: None,
        sparse: true,
        clamped: None,
    }),
    read: |fields, _| no_windows(fields),
    ..QWEN2_MOE
};

/// Each of the two has a rule of its own for the layers with windows, and no published model uses it.
fn no_windows(fields: &mut Fields<'_>) {
    if fields.flag("use_sliding_window") {
        fields.complain("use_sliding_window", "is true; supported: false");
    }
}
