//! Benchmarks of lowering, verification and prediction for models of practical sizes.

use criterion::{Criterion, criterion_group, criterion_main};
use ir::program::verify;
use ir::schedule::{default_config, validate};
use ir::{Graph, Target};
use lower::{Options, lower, predict};
use model::{PRESETS, Shape};

/// A 70B model's shape: 80 layers of 8192.
fn llama_70b() -> Graph {
    let preset = PRESETS.iter().find(|preset| preset.name == "llama-3.1-8b");
    let eight = preset.expect("a preset").shape();
    let shape = Shape { hidden: 8192, layers: 80, heads: 64, ffn: 28_672, ..eight };
    Shape { name: "llama-70b".into(), ..shape }.graph()
}

fn llama_8b() -> Graph {
    let preset = PRESETS.iter().find(|preset| preset.name == "llama-3.1-8b");
    preset.expect("a preset").shape().graph()
}

fn benches(c: &mut Criterion) {
    let target = Target::by_name("h200").expect("in the table");
    let mut group = c.benchmark_group("lower");
    group.sample_size(10);
    for graph in [llama_8b(), llama_70b()] {
        let config = validate(default_config(&graph, &target), &graph, &target).expect("legal");
        let options = Options { kv_capacity: 4096 };
        group.bench_function(format!("{}/lower_and_verify", graph.name), |b| {
            b.iter(|| lower(&config, &graph, &target, options).expect("lowers"));
        });
        let program = lower(&config, &graph, &target, options).expect("lowers");
        group.bench_function(format!("{}/verify", graph.name), |b| {
            b.iter_with_setup(|| program.clone().into_inner(), |p| verify(p).expect("verifies"));
        });
        group.bench_function(format!("{}/predict", graph.name), |b| {
            b.iter(|| predict(&program, &config.kernel, &target, 127));
        });
        group.bench_function(format!("{}/id", graph.name), |b| b.iter(|| program.id()));
    }
    group.finish();
}

criterion_group!(all, benches);
criterion_main!(all);
