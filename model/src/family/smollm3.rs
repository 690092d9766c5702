//! SmolLM 3: Llama with some layers that do not rotate.

use super::{Bias, Row, WindowRule, llama};
use crate::fields::Fields;
use crate::shape::{LAYERS_MAX, Shape, Window};

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
        let every = fields.whole("no_rope_layer_interval").unwrap_or(4);
        let layers = shape.layers.min(LAYERS_MAX);
        // One entry per layer: 1 rotates, 0 does not.
        let given = fields.get("no_rope_layers").is_some();
        shape.options.unrotated = match given {
            true => fields.numbers("no_rope_layers").iter().map(|&n| n == 0.0).collect(),
            false => (1..=layers).map(|n| n.is_multiple_of(every)).collect(),
        };
        let entries = shape.options.unrotated.len();
        if entries != layers as usize {
            let reason = format!("has {entries} entries for {layers} layers");
            fields.complain("no_rope_layers", reason);
        }
        if !given && every == 0 {
            fields.complain("no_rope_layer_interval", "is 0; it must be at least 1");
        }
        windows(fields, shape);
    },
    ..llama::LLAMA
};

/// Without `layer_types`, the layers that do not rotate have the window, which has no default.
fn windows(fields: &mut Fields<'_>, shape: &mut Shape) {
    if !fields.flag("use_sliding_window") {
        return;
    }
    let (given, window) = (fields.whole("sliding_window"), shape.window.clone());
    let unrotated = &shape.options.unrotated;
    shape.window = match given {
        _ if fields.get("layer_types").is_some() => window,
        Some(window) if unrotated.contains(&true) => {
            Window::Layers { window, sliding: unrotated.clone() }
        }
        _ => Window::None,
    };
    if given.is_none() && shape.window != Window::None {
        fields.complain("sliding_window", "is missing, but there are layers with a window");
    }
}
