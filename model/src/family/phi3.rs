//! Phi 3, 3.5 and 4: fused projections, longrope, and in phi-4-mini a rotation of part of each head.

use super::{Bias, Row, WindowRule, llama};
use crate::fields::Fields;
use crate::shape::{Longer, Shape};

/// Types of `rope_scaling` that mean longrope: old folders, and transformers, call it by the other two names as well.
pub(crate) const LONGROPE: [&str; 3] = ["longrope", "su", "yarn"];

pub(super) const PHI3: Row = Row {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    max_positions: 4096,
    norm_eps: 1e-5,
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    rotated: Some(1.0),
    longrope: true,
    fused_qkv: true,
    fused_gate_up: true,
    windows: WindowRule::All { absent: None },
    read: longrope,
    ..llama::LLAMA
};

/// Longrope has frequencies for sequences up to the original length and others for longer ones. A program's positions
/// have one set, which its capacity decides ([`Shape::reach`]).
fn longrope(fields: &mut Fields<'_>, shape: &mut Shape) {
    let inside = fields.object("rope_scaling").or_else(|| fields.object("rope_parameters"));
    let Some(object) = inside else { return };
    let mut scaling = Fields::new(object, "rope_scaling.");
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
    if !kind.is_some_and(|kind| LONGROPE.iter().any(|name| kind == name)) {
        return;
    }
    let inner = scaling.whole("original_max_position_embeddings");
    let original = fields.whole("original_max_position_embeddings").or(inner).unwrap_or(4096);
    let pairs = shape.rotated_dims() as usize / 2;
    let [short, long] = ["short_factor", "long_factor"].map(|name| {
        let divisors = scaling.numbers(name);
        if divisors.len() != pairs {
            let reason = format!("has {} numbers; {pairs} are rotated", divisors.len());
            scaling.complain(name, reason);
        }
        let divisors: Vec<f32> = divisors.into_iter().map(|n| n as f32).collect();
        if let Some(wrong) = divisors.iter().find(|n| !(1e-6..=1e9).contains(*n)) {
            scaling.complain(name, format!("has {wrong:e}; supported: 1e-6 to 1e9"));
        }
        divisors
    });
    let longer = f64::from(shape.max_positions) / f64::from(original.max(1));
    let given = scaling.number("attention_factor");
    let factor = scaling.number("factor").unwrap_or(longer);
    let default = || match factor > 1.0 {
        true => (1.0 + factor.ln() / f64::from(original.max(2)).ln()).sqrt(),
        false => 1.0,
    };
    shape.options.rotary_factor = given.unwrap_or_else(default);
    shape.options.rotary_divisors = short;
    if shape.max_positions > original {
        let max_positions = shape.max_positions;
        shape.options.longer = Some(Longer { max_positions, divisors: long });
        shape.max_positions = original;
        shape.options.notes.push(format!(
            "longrope: a capacity beyond {original} positions, up to {max_positions}, rotates all of them with the frequencies for longer sequences"
        ));
    }
    fields.adopt(scaling.into_problems());
}
