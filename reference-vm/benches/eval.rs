//! Benchmarks of one position on the evaluator and on the machine, of a prompt of 48, and of one large product on one
//! thread.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use ir::schedule::{default_config, validate};
use ir::{DType, Target};
use lower::{Options, lower};
use model::{Model, Shape};
use reference_vm::Order;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::Machine;

/// A model without layers: its logits are one product.
fn product(c: &mut Criterion) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for dtype in [DType::Bf16, DType::F16] {
        let shape =
            Shape { hidden: 4096, vocab: 4096, layers: 0, tied: true, dtype, ..Shape::default() };
        let model = Model::random(shape, 1);
        let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
        c.bench_function(&format!("4096 x 4096 {}, one thread", dtype.name()), |b| {
            pool.install(|| {
                b.iter(|| {
                    evaluator.reset();
                    black_box(evaluator.run(black_box(&[1]), Logits::Last).unwrap())
                });
            });
        });
    }
}

fn smollm2(c: &mut Criterion) {
    let model = model::preset("smollm2-135m").unwrap();
    let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
    for prompt in [1, 48] {
        let tokens: Vec<u32> = (0..prompt).collect();
        c.bench_function(&format!("smollm2-135m, evaluator, {prompt} positions"), |b| {
            b.iter(|| {
                evaluator.reset();
                black_box(evaluator.run(black_box(&tokens), Logits::All).unwrap())
            });
        });
    }

    let target = Target::by_name("h200").unwrap();
    let config = validate(default_config(&model.graph, &target), &model.graph, &target).unwrap();
    let program = lower(&config, &model.graph, &target, Options { kv_capacity: 128 }).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    for order in [Order::Waves, Order::Queue] {
        c.bench_function(
            &format!("smollm2-135m, machine, {} workers, {order:?}", target.sms),
            |b| {
                b.iter(|| {
                    machine.reset();
                    black_box(machine.run(black_box(&[1]), order).unwrap())
                });
            },
        );
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = product, smollm2
}
criterion_main!(benches);
