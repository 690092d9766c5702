//! Times the evaluator on a prompt: `cargo run --release -p reference-vm --example prompt -- MODEL POSITIONS
//! [EARLIER]`.
//!
//! Logits are computed at the last 32 positions. With `EARLIER`, this many positions are fed first and not timed.

use std::time::Instant;

use reference_vm::eval::Evaluator;

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "smollm2-135m".to_owned());
    let mut number = |default| args.next().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (positions, earlier): (usize, usize) = (number(160), number(0));
    let model = model::preset(&name).expect("a preset's name");
    let graph = &model.graph;
    let mut evaluator = Evaluator::new(graph, &*model.weights).expect("a preset can be evaluated");
    let token = |i: usize| (i * 7919 % graph.vocab as usize) as u32;
    let tokens: Vec<u32> = (0..earlier + positions).map(token).collect();
    evaluator.run_at(&tokens[..earlier], &[]).expect("the prompt fits");
    let wanted: Vec<usize> = (0..earlier + positions).rev().take(32).collect();
    let start = Instant::now();
    let rows = evaluator.run_at(&tokens[earlier..], &wanted).expect("the prompt fits");
    let seconds = start.elapsed().as_secs_f64();
    let matrices: usize =
        graph.tensors.iter().filter(|t| t.shape.len() == 2).map(ir::Tensor::len).sum();
    let head = graph.vocab as usize * graph.hidden as usize;
    let tables = if graph.tied() { head } else { 2 * head };
    let products = (matrices - tables) * positions + head * rows.len();
    let keys: usize = (earlier..earlier + positions).map(|p| p + 1).sum();
    let attention = 2 * keys * graph.q_width() as usize * graph.layers.len();
    println!(
        "{name}: {positions} positions after {earlier} in {seconds:.2} s; {:.1} GFLOP/s ({:.1} % of it attention)",
        2.0 * (products + attention) as f64 / seconds / 1e9,
        100.0 * attention as f64 / (products + attention) as f64
    );
}
