//! Tests what `verify` leaves to the gate. Every operand of every op is changed: in one task, in all similar ones, and
//! in all that must agree with it.
//!
//! `AMK_OPERANDS=1` runs this on every family in every element type instead of one model.

use std::collections::{BTreeMap, BTreeSet};

use ir::DType::{Bf16, F16, F32};
use model::{Family, Model, Shape};
use tests::mutant::{Base, LEFT_TO_THE_GATE, Left, Plan, families, left_to_the_gate};

/// Operands whose change is correct: another split of the keys, in all tasks that take part.
const HONEST: &[&str] = &["attention and merge.kv_block"];

/// A model whose tasks read every buffer that they can: biases, and norms of queries and keys.
fn with_everything() -> Model {
    let shape = Shape {
        name: "everything".to_owned(),
        family: Family::Qwen3,
        attention_bias: true,
        hidden: 64,
        layers: 2,
        ffn: 104,
        vocab: 136,
        dtype: F32,
        ..Shape::default()
    };
    Model::random(shape, 9)
}

#[test]
fn verify_refuses_every_other_value_of_what_is_not_left_to_the_gate() {
    let models: Vec<Model> = match std::env::var_os("AMK_OPERANDS") {
        Some(_) => [Bf16, F16, F32].into_iter().flat_map(|dtype| families([dtype; 4])).collect(),
        // The fifth and the sixth have ops and operands of their own.
        None => families([F32; 4]).split_off(4).into_iter().chain([with_everything()]).collect(),
    };
    let mut classes: BTreeMap<String, Left> = BTreeMap::new();
    for model in models {
        let base = Base::new(model, Plan { schedules: 0, seed: 5, as_large: true });
        for (class, left) in left_to_the_gate(&base) {
            let sum = classes.entry(class).or_default();
            sum.tried += left.tried;
            sum.read += left.read;
            sum.ignored += left.ignored;
            sum.not_ignored = sum.not_ignored.take().or(left.not_ignored);
        }
    }
    println!(
        "| operand | changes tried | accepted by `verify` | of words that mean nothing there |"
    );
    println!("|---|---|---|---|");
    for (class, left) in &classes {
        println!("| {class} | {} | {} | {} |", left.tried, left.read, left.ignored);
        assert_eq!(left.not_ignored, None, "{class}: a word that means nothing means something");
    }
    let accepted =
        classes.iter().filter(|(_, left)| left.read > 0).map(|(class, _)| class.as_str());
    let accepted: BTreeSet<&str> = accepted.collect();
    let wanted: BTreeSet<&str> = LEFT_TO_THE_GATE.iter().chain(HONEST).copied().collect();
    assert_eq!(accepted, wanted, "what `verify` accepts, and what is left to the gate");
    assert!(classes.values().all(|left| left.tried >= 4), "too few values tried");
    assert!(classes.len() > 60, "only {} operands", classes.len());
}
