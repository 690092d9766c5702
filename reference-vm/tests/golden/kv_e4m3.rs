//! Key/value caches of e4m3: both executors keep the same codes, and what these cost against a cache of 16 bits.

use ir::schedule::{default_config, validate};
use ir::{Graph, KvDtype, Target};
use lower::{Options, lower};
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::{Tolerance, compare, distance};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use reference_vm::{MachineError, Order, argmax};

use crate::{Golden, each, each_family, each_with_experts};

/// The graph with a cache of e4m3.
fn coded(golden: &Golden) -> Graph {
    Graph { kv_dtype: KvDtype::E4m3, ..golden.model.graph.clone() }
}

fn rows(logits: &[Vec<f32>]) -> impl ExactSizeIterator<Item = &[f32]> {
    logits.iter().map(Vec::as_slice)
}

/// What a cache of e4m3 costs: the divergence of the logits from those of 16 bits in nats, and the part of the positions with the same best
/// token. The goldens are small random models, whose flat attention averages the errors of few keys; these figures are an arithmetic check.
fn costs(name: &str, golden: &Golden, most: f64) {
    let graph = coded(golden);
    let weights = &*golden.model.weights;
    let logits = |evaluator: Evaluator<'_>| {
        let mut evaluator = evaluator;
        evaluator.run(&golden.tokens, Logits::All).unwrap()
    };
    let wide = Evaluator::new(&golden.model.graph, weights).unwrap().with_device_roundings();
    let (wide, got) = (logits(wide), logits(Evaluator::new(&graph, weights).unwrap()));
    let figures = Accuracy::of(&wide, &got, Tolerance::DEVICE).unwrap();
    let same = wide.iter().zip(&got).filter(|(a, b)| argmax(a) == argmax(b)).count();
    let moved = |rounded: Evaluator<'_>| {
        let other = logits(rounded);
        distance(rows(&got), rows(&other))
    };
    let device = || Evaluator::new(&graph, weights).unwrap().with_device_roundings();
    let (response, shifted) = (moved(device()), moved(device().with_shifted_codes()));
    println!(
        "{name}: KL {:.1e}, relative error {:.1e}, top-1 {same} of {}; device roundings move {response:.1e}, with shifted codes {shifted:.1e}",
        figures.kl_mean,
        figures.rel_worst,
        got.len()
    );
    assert!(figures.kl_mean > 0.0 && figures.kl_mean < most, "{name}: {figures:?}");
    assert!(10 * same >= 7 * got.len(), "{name}: the same best token at {same} positions");
    // A correct device is allowed what its roundings move, and the limit is below what codes cost.
    let limit = Tolerance::DEVICE_CODES.rel();
    assert!(response < limit && limit < figures.rel_worst, "{name}: {response}, {figures:?}");
}

#[test]
fn a_cache_of_codes_moves_logits_a_little() {
    each(|name, golden| costs(name, golden, 5e-2));
    each_family(|name, golden| costs(name, golden, 1e-1));
    each_with_experts(|name, golden| costs(name, golden, 2e-1));
}

/// The tolerance stays that of a cache of 16 bits.
#[test]
fn the_machine_keeps_the_codes_of_the_graph() {
    let target = Target { sms: 5, ..Target::by_name("h200").unwrap() };
    each(|name, golden| {
        let (graph, weights) = (coded(golden), &*golden.model.weights);
        let mut config = default_config(&graph, &target);
        (config.tiling.attention.kv_block, config.tiling.attention.kv_split) = (32, 2);
        let config = validate(config, &graph, &target).unwrap();
        let program = lower(&config, &graph, &target, Options { kv_capacity: 96 }).unwrap();
        let mut evaluator = Evaluator::new(&graph, weights).unwrap();
        let want = evaluator.run(&golden.tokens, Logits::All).unwrap();
        let mut machine = Machine::new(&program, &graph, weights).unwrap();
        let Run::Finished(got) = machine.run(&golden.tokens, Order::Seeded(5)).unwrap() else {
            panic!("{name} does not finish")
        };
        let agreement = compare(&want, &got.logits, Tolerance::DEVICE);
        let summary = agreement.unwrap_or_else(|d| panic!("{name}: {d}")).summary();
        println!("{name}: {summary:?}");
        // Kept rows are those of the graph but for flips: elements that a rounding of a hand-off takes to the next code.
        for layer in 0..graph.layers.len() {
            let (want, got) = (evaluator.keys(layer), machine.keys(layer));
            let other = want.iter().zip(got).filter(|(a, b)| a != b).count();
            assert!(other * 100 <= want.len(), "{name}: {other} of {}", want.len());
        }
        let refused = Machine::new(&program, &golden.model.graph, weights).err();
        assert_eq!(refused, Some(MachineError::Dims), "{name}: a program of codes for 16 bits");
    });
}
