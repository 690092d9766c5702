//! Measures the cost of a trial on this machine without a device:
//! `cargo run --release -p search --example trial_cost -- llama-3.2-1b 8`.

use std::time::Instant;

use ir::Target;
use ir::schedule::{KernelConfig, Knob};
use search::strategy::SearchSpace;
use search::{Expected, Gate, TrialRecords};

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "smollm2-135m".to_owned());
    let trials: usize = args.next().and_then(|n| n.parse().ok()).unwrap_or(8);
    let model = model::preset(&name).expect("the first argument names a preset");
    let target = Target::by_name("h200").expect("a target of the table");
    let (graph, weights) = (&model.graph, &*model.weights);
    let begin = Instant::now();
    let expected = Expected::new(graph, weights, 4096, 1, None).expect("a preset evaluates");
    let [least, most] = expected.allowed();
    println!(
        "expected values: {:.3} s, {}, allowed {least:.1e} to {most:.1e}",
        begin.elapsed().as_secs_f64(),
        expected.reference_scope(),
    );
    let options = lower::Options { kv_capacity: 4096 };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected);
    let default = ir::schedule::default_config(graph, &target);
    let values = |&knob: &Knob| (knob, ir::schedule::legal_values(knob, graph, &target));
    let space: Vec<_> = Knob::ALL.iter().map(values).collect();
    let search_space = SearchSpace { space, seed: 3, sweep: 40, short: false };
    let draws = search_space.draws(1, default, &TrialRecords::default()).map(|(_, config)| config);
    let mut done = 0;
    for config in std::iter::once(default).chain(draws) {
        let begin = Instant::now();
        let Ok(candidate) = gate.lower(&config) else { continue };
        let lowered = begin.elapsed();
        let agrees = gate.reference(&candidate).is_ok();
        let changed: Vec<_> =
            search::changes(&default, &config).iter().map(|c| c.knob.path()).collect();
        println!(
            "lower and verify {:5.1} ms, reference VM {:7.1} ms, agrees: {agrees}, {changed:?}",
            lowered.as_secs_f64() * 1e3,
            (begin.elapsed() - lowered).as_secs_f64() * 1e3,
        );
        done += 1;
        if done == trials {
            break;
        }
    }
}
