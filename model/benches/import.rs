//! Benchmarks of importing a folder and of generating a preset's weights.

use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use ir::TensorId;
use model::{import, preset};

fn folder(c: &mut Criterion) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden/llama3-rope-bf16");
    c.bench_function("import golden folder", |b| {
        b.iter(|| import(black_box(&dir)).expect("a model"))
    });
    let model = import(&dir).expect("a model");
    c.bench_function("load golden tokenizer", |b| {
        b.iter(|| model.tokenizer().expect("a tokenizer"))
    });
}

fn weights(c: &mut Criterion) {
    let mut group = c.benchmark_group("preset");
    let graph = preset("smollm2-135m").expect("a preset").graph;
    group.throughput(Throughput::Bytes(graph.weight_bytes() as u64)).sample_size(10);
    group.bench_function("smollm2-135m weights", |b| {
        b.iter_batched(
            || preset("smollm2-135m").expect("a preset"),
            |model| {
                for i in 0..model.graph.tensors.len() {
                    black_box(model.weights.bytes(TensorId(i as u32)));
                }
                model
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, folder, weights);
criterion_main!(benches);
