//! Sequences beyond the length that a model's plain rotary frequencies are for, on the evaluator and the reference VM.

use std::path::Path;

use ir::Target;
use ir::schedule::{default_config, validate};
use lower::{Options, lower};
use reference_vm::Order;
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use safetensors::SafeTensors;

/// 160 tokens, with transformers' logits of the last 40, where 128 is the original length (transformers 5.24, in f32).
const FILE: &str = "../corpus/families/phi4-longrope-bf16/longer.safetensors";

#[test]
fn longrope_beyond_the_original_length_agrees_with_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    let mut model = model::import(path.parent().unwrap()).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name| file.tensor(name).unwrap().data().to_vec();
    let tokens: Vec<u32> =
        data("tokens").as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect();
    let logits: Vec<f32> =
        data("logits").as_chunks::<4>().0.iter().map(|logit| f32::from_le_bytes(*logit)).collect();
    let logits: Vec<Vec<f32>> =
        logits.chunks_exact(model.graph.vocab as usize).map(<[f32]>::to_vec).collect();
    assert_eq!((tokens.len(), logits.len()), (160, 40));
    model.reach(tokens.len() as u32);

    let (graph, weights) = (&model.graph, &*model.weights);
    let first = tokens.len() - logits.len();
    let evaluated = Evaluator::new(graph, weights).unwrap().run(&tokens, Logits::All).unwrap();
    let agrees = |with: &[Vec<f32>]| compare(&logits, with, Tolerance::REFERENCE).map(|_| ());
    agrees(&evaluated[first..]).unwrap_or_else(|d| panic!("{d}"));

    let target = Target::by_name("h200").unwrap();
    let config = validate(default_config(graph, &target), graph, &target).unwrap();
    let program = lower(&config, graph, &target, Options { kv_capacity: 160 }).unwrap();
    let mut machine = Machine::new(&program, graph, weights).unwrap();
    let Run::Finished(outputs) = machine.run(&tokens, Order::Waves).unwrap() else {
        panic!("the program did not end")
    };
    agrees(&outputs.logits[first..]).unwrap_or_else(|d| panic!("{d}"));

    // The frequencies of the original length are others, and the comparison sees it.
    let short = model::import(path.parent().unwrap()).unwrap();
    let mut wrong = short.graph.clone();
    wrong.max_positions = graph.max_positions;
    let wrong = Evaluator::new(&wrong, &*short.weights).unwrap().run(&tokens, Logits::All).unwrap();
    assert!(agrees(&wrong[first..]).is_err());
}
