//! Compares rotary frequencies with those of the reference implementation (`rope.json` names it).
//!
//! Its power function is vectorised and sometimes rounds the other way. Only the last bit may differ, and it does not
//! at the bases and widths of most published models.

use model::{Rope, Scaling};
use serde_json::Value;

/// Base and head width of Llama 1 to 3.2, Mistral, Qwen 2 and SmolLM 2.
const PUBLISHED: [(f64, u32); 6] = [
    (10_000.0, 64),
    (10_000.0, 128),
    (100_000.0, 64),
    (500_000.0, 64),
    (500_000.0, 128),
    (1_000_000.0, 64),
];

#[test]
fn frequencies_are_those_of_the_reference() {
    let cases: Value = serde_json::from_str(include_str!("rope.json")).expect("rope.json");
    let (mut checked, mut unequal) = (0, 0);
    for case in cases["cases"].as_array().expect("cases") {
        let scaling = &case["scaling"];
        let number = |field: &str| scaling[field].as_f64().expect("a number");
        let scaling = match scaling["rope_type"].as_str() {
            None => Scaling::Default,
            Some("linear") => Scaling::Linear { factor: number("factor") },
            Some(_) => Scaling::Llama3 {
                factor: number("factor"),
                low: number("low_freq_factor"),
                high: number("high_freq_factor"),
                original: number("original_max_position_embeddings") as u32,
            },
        };
        let rope = Rope { theta: case["theta"].as_f64().expect("a base"), scaling };
        let head_dim = case["head_dim"].as_u64().expect("a width") as u32;
        let bits: Vec<u32> = rope.inv_freq(head_dim).into_iter().map(f32::to_bits).collect();
        let expected: Vec<u32> = case["bits"]
            .as_array()
            .expect("bits")
            .iter()
            .map(|b| b.as_u64().expect("bits") as u32)
            .collect();
        assert_eq!(bits.len(), expected.len());
        if PUBLISHED.contains(&(rope.theta, head_dim)) {
            assert_eq!(bits, expected, "{rope:?} {head_dim}");
        }
        for (have, want) in bits.iter().zip(&expected) {
            // The smooth transition of llama3 subtracts, which turns an error of a last bit into a few.
            let allowed = if matches!(scaling, Scaling::Llama3 { .. }) { 4 } else { 1 };
            assert!(have.abs_diff(*want) <= allowed, "{rope:?} {head_dim}: {have} for {want}");
            unequal += usize::from(have != want);
        }
        checked += bits.len();
    }
    assert!(checked > 6000 && unequal * 100 < checked, "{unequal} of {checked}");
}
