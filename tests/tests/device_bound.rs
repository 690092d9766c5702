//! Tests a device's tolerance: above the effect of its roundings, whichever of them a program has, and below that of
//! mistakes.
//!
//! `AMK_MUTANTS=4` runs this on every family in every element type and on the golden models, with this many mutants of
//! each class, and prints which of them a device could hide.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ir::DType::{Bf16, F16, F32};
use ir::{DType, Graph};
use model::Model;
use rayon::prelude::*;
use reference_vm::Order;
use reference_vm::compare::{Agreement, Reference, Tolerance, compare, distance};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use search::{Expected, Rejection};
use tests::mutant::{Base, Fate, Mutant, Plan, defects, families, golden, weights};
use tests::rng::Rng;

/// Positions that a device is compared at.
const POSITIONS: usize = 144;

/// Tokens of a device's key/value cache.
const KV_CAPACITY: u32 = 1100;

fn rows(rows: &[Vec<f32>]) -> impl ExactSizeIterator<Item = &[f32]> {
    rows.iter().map(Vec::as_slice)
}

/// The effect of a device's roundings with weights of this type and rounded hand-offs.
fn moved(model: &Model, dtype: DType, expected: &Expected) -> f64 {
    let graph = Graph { dtype, ..model.graph.clone() };
    let mut rounded = Evaluator::new(&graph, &*model.weights).unwrap().with_device_roundings();
    let got = rounded.run(&expected.tokens, Logits::All).unwrap();
    distance(rows(&expected.logits), rows(&got))
}

fn expected(model: &Model, seed: u64) -> Expected {
    let (graph, weights) = (&model.graph, &*model.weights);
    Expected::new(graph, weights, KV_CAPACITY, seed, Some(POSITIONS)).unwrap()
}

/// Compares the largest effect of correct roundings with the tolerance. Correct roundings: each 16-bit type that a
/// vector may be split into; these differ in every element and so in every later rounding.
#[test]
fn a_device_is_allowed_more_than_its_roundings_and_never_more_than_the_constant() {
    let models = [Bf16, F16, F32].into_iter().flat_map(|dtype| families([dtype; 4]));
    println!("| model | roundings of a device | with other halves | allowed |\n|---|---|---|---|");
    let mut capped = Vec::new();
    for model in models.chain(golden()) {
        let name = format!("{} {}", model.graph.name, model.graph.dtype.name());
        let expected = expected(&model, 1);
        let own = moved(&model, model.graph.dtype, &expected);
        let others = [Bf16, F16, F32].map(|dtype| moved(&model, dtype, &expected));
        let other = others.into_iter().fold(0.0, f64::max);
        let allowed = expected.on_device.rel();
        println!("| {name} | {own:.2e} | {other:.2e} | {allowed:.2e} |");
        assert!(allowed <= Tolerance::DEVICE.rel(), "{name}: {allowed}");
        if allowed < Tolerance::DEVICE.rel() {
            assert!(allowed > 1.5 * other, "{name}: honest {other:.2e}, allowed {allowed:.2e}");
        } else {
            capped.push(name);
        }
    }
    // Small models of the corpus whose weights have a large variance: any rounding changes their logits a lot.
    let wide = |name: &String| {
        ["llama-tied-f32", "llama3-rope", "qwen2-bias"].iter().any(|w| name.contains(w))
    };
    assert!(capped.iter().all(wide), "the constant was needed for {capped:?}");
}

/// A gate that compares only logits, as for a device, and returns their distance.
fn logits_within(
    expected: &Expected,
    machine: &mut Machine<'_>,
    apart: &Mutex<f64>,
) -> Result<Agreement<Reference>, Rejection> {
    let mut apart = apart.lock().unwrap();
    *apart = f64::INFINITY;
    match machine.run(&expected.tokens, Order::Waves).map_err(Rejection::Unrunnable)? {
        Run::Finished(outputs) => {
            *apart = distance(rows(&expected.logits), rows(&outputs.logits));
            compare(&expected.logits, &outputs.logits, expected.on_device)
                .map_err(|at| Rejection::Disagreed { by: "device", at })
        }
        halted @ (Run::Trapped(_) | Run::Stuck { .. }) => Err(Rejection::Halted(halted)),
    }
}

/// Some mutants of each class of the model and of the machine.
fn some(base: &Base, of_a_class: usize) -> Vec<Mutant<'_>> {
    let mut all = weights(base, 11);
    all.extend(defects(base));
    let mut rng = Rng::new(17);
    let mut drawn: BTreeMap<String, Vec<Mutant<'_>>> = BTreeMap::new();
    while !all.is_empty() {
        let mutant = all.swap_remove(rng.below(all.len()));
        let class = drawn.entry(mutant.class.clone()).or_default();
        if class.len() < of_a_class {
            class.push(mutant);
        }
    }
    drawn.into_values().flatten().collect()
}

/// Mutants refused within the constant, and within the bound from the roundings; and the number that change the output.
type Count = [usize; 3];

fn judge(
    model: Model,
    of_a_class: usize,
    classes: &mut BTreeMap<String, Count>,
    hidden: &mut Vec<String>,
) {
    let expected = expected(&model, 1);
    let base = Base::new(model, Plan { schedules: 3, seed: 5, as_large: false });
    let mutants = some(&base, of_a_class);
    let verdict = |mutant: &Mutant<'_>| {
        let apart = Mutex::new(0.0);
        let outcome = mutant.judge_by(&base, &|_: &Expected, machine: &mut Machine<'_>| {
            logits_within(&expected, machine, &apart)
        });
        (outcome, apart.into_inner().unwrap())
    };
    let judged: Vec<_> = mutants.par_iter().map(verdict).collect();
    for (outcome, apart) in judged.iter().filter(|(outcome, _)| outcome.changes()) {
        let count = classes.entry(outcome.class.clone()).or_default();
        count[0] += usize::from(*apart > Tolerance::DEVICE.rel());
        count[1] += usize::from(outcome.fate != Fate::Survived);
        count[2] += 1;
        if outcome.fate == Fate::Survived {
            hidden
                .push(format!("{} {}: {}, {apart:.1e}", outcome.base, outcome.class, outcome.what));
        }
    }
}

/// Classes whose mutants a device cannot hide, in any of the models: mistakes of a kernel that affect a whole operand.
const SEEN: &[&str] =
    &["head mapping", "machine: cache index", "machine: norm", "machine: residual"];

#[test]
fn what_a_device_could_hide_is_less_than_within_the_constant_and_no_whole_operand() {
    let asked = std::env::var("AMK_MUTANTS").ok().and_then(|text| text.parse().ok());
    let models: Vec<Model> = if asked.is_some() {
        let families = [Bf16, F16, F32].into_iter().flat_map(|dtype| families([dtype; 4]));
        families.chain(golden()).collect()
    } else {
        vec![families([Bf16; 4]).swap_remove(0)]
    };
    let (mut classes, mut hidden) = (BTreeMap::new(), Vec::new());
    for model in models {
        judge(model, asked.unwrap_or(5), &mut classes, &mut hidden);
    }
    println!("{}", hidden.join("\n"));
    println!("| class | refused within 5e-3 | within what follows | of |\n|---|---|---|---|");
    let mut sum = [0; 3];
    for (class, count) in &classes {
        println!("| {class} | {} | {} | {} |", count[0], count[1], count[2]);
        sum.iter_mut().zip(count).for_each(|(sum, count)| *sum += count);
        assert!(count[1] >= count[0], "{class}: the narrower bound refuses less");
    }
    println!("{sum:?}");
    assert!(sum[1] > sum[0], "nothing was gained by a narrower bound: {sum:?}");
    for class in SEEN {
        assert!(classes[*class][1] == classes[*class][2], "{class}: {:?}", classes[*class]);
    }
    // Conversely, the bound is not so narrow that it refuses everything.
    assert!(sum[1] < sum[2], "even single elements were seen");
}
