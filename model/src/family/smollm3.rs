//! SmolLM 3: Llama with some layers that do not rotate.

use super::{Bias, Row, WindowRule, llama};

pub(super) const SMOLLM3: Row = Row {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    max_positions: 32_768,
    kv_heads: Some(4),
    tied: true,
    theta: 2_000_000.0,
    qkv_bias: Bias::Asked,
    windows: WindowRule::Switched,
    read: |fields, shape| {
        let every = fields.whole("no_rope_layer_interval").unwrap_or(4).max(1);
        let layers = shape.layers.min(crate::shape::LAYERS_MAX);
        // One entry per layer: 1 rotates, 0 does not.
        let given = fields.numbers("no_rope_layers");
        shape.options.unrotated = match given.is_empty() {
            true => (1..=layers).map(|n| n.is_multiple_of(every)).collect(),
            false => given.iter().map(|&n| n == 0.0).collect(),
        };
        if shape.options.unrotated.len() != layers as usize {
            let reason = format!("has {} entries for {layers} layers", given.len());
            fields.complain("no_rope_layers", reason);
        }
    },
    ..llama::LLAMA
};
