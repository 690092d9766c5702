//! Instruction counts of the four benchmarks that criterion times, `import`, `eval`, `lower` and `verify`, on inputs that
//! Valgrind's Callgrind runs within seconds. A count that is [`ROOM`] above the committed one fails.
//!
//! `.ci/run` runs it with the profile of the tests, which compiles nothing again. A count that fell by a gain is committed
//! with it, or the gain may be lost unnoticed.

#![allow(missing_docs, reason = "the macros of gungraun make items without documentation")]

use std::hint::black_box;
use std::path::PathBuf;

use gungraun::prelude::*;
use gungraun::{Callgrind, EventKind};
use ir::program::{Program, Verified, check};
use ir::schedule::{default_config, validate};
use ir::{DType, Graph, ScheduleConfig, Target, TensorId, Valid};
use lower::{Options, lower, predict};
use model::{Model, Shape, import, preset};
use reference_vm::Order;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Outputs};
use tests::build::sized;

/// Per cent above the committed count that a count may be. On one machine, runs differ by 0.5% where hash maps have random
/// seeds, else by nothing. Of another machine the C library may differ, which has up to 22% of a count: `malloc` and `free`.
const ROOM: u64 = 5;

/// A benchmark of about this many instructions.
fn near(committed: u64) -> LibraryBenchmarkConfig {
    let most = committed + committed * ROOM / 100;
    let mut callgrind = Callgrind::with_args(["--cache-sim=no"]);
    callgrind.hard_limits([(EventKind::Ir, most)]);
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(callgrind);
    config
}

fn golden() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus/golden/llama3-rope-bf16"))
}

#[library_benchmark(config = near(1_239_000), setup = golden)]
fn folder(dir: PathBuf) -> Model {
    import(black_box(&dir)).expect("a model")
}

/// A preset. Its weights are generated when they are first read.
fn toy() -> Model {
    preset("toy-2l").expect("a preset")
}

#[library_benchmark(config = near(15_293_000), setup = toy)]
fn weights(model: Model) -> Model {
    generated(model)
}

fn generated(model: Model) -> Model {
    for i in 0..model.graph.tensors.len() {
        black_box(model.weights.bytes(TensorId(i as u32)));
    }
    model
}

/// A model for the rest of the process, with its weights. From here on the products of this process run on this thread
/// alone: which thread takes which part would change the counts.
fn kept(model: Model) -> &'static Model {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
    Box::leak(Box::new(pool.build().expect("a pool")));
    Box::leak(Box::new(generated(model)))
}

fn evaluator(model: &'static Model) -> Evaluator<'static> {
    Evaluator::new(&model.graph, &*model.weights).expect("an evaluator")
}

/// A model without layers: its logits are one product.
fn product_of(dtype: DType) -> Evaluator<'static> {
    let shape =
        Shape { hidden: 1024, vocab: 4096, layers: 0, tied: true, dtype, ..Shape::default() };
    evaluator(kept(Model::random(shape, 1)))
}

#[library_benchmark(setup = product_of)]
#[bench::bf16(args = (DType::Bf16), config = near(17_171_000))]
#[bench::f16(args = (DType::F16), config = near(20_537_000))]
fn product(mut evaluator: Evaluator<'static>) -> Vec<Vec<f32>> {
    evaluator.run(black_box(&[1]), Logits::Last).expect("logits")
}

fn prompt(positions: u32) -> (Evaluator<'static>, Vec<u32>) {
    (evaluator(kept(toy())), (0..positions).collect())
}

#[library_benchmark(setup = prompt)]
#[bench::of_1(args = (1), config = near(896_000))]
#[bench::of_48(args = (48), config = near(32_338_000))]
fn positions((mut evaluator, tokens): (Evaluator<'static>, Vec<u32>)) -> Vec<Vec<f32>> {
    evaluator.run(black_box(&tokens), Logits::All).expect("logits")
}

/// The default schedule of a graph, and how it is lowered.
type Lowering = (Valid<ScheduleConfig>, Graph, Target, Options);

fn lowering(name: &str) -> Lowering {
    let graph = preset(name).expect("a preset").graph;
    let target = Target::by_name("h200").expect("in the table");
    let config = validate(default_config(&graph, &target), &graph, &target).expect("legal");
    (config, graph, target, Options { kv_capacity: 4096 })
}

fn lowered((config, graph, target, options): &Lowering) -> Verified<Program> {
    lower(config, graph, target, *options).expect("lowers")
}

fn machine(order: Order) -> (Machine<'static>, Order) {
    let model = kept(toy());
    let program = Box::leak(Box::new(lowered(&lowering("toy-2l"))));
    (Machine::new(program, &model.graph, &*model.weights).expect("a machine"), order)
}

#[library_benchmark(setup = machine)]
#[bench::waves(args = (Order::Waves), config = near(2_526_000))]
#[bench::queue(args = (Order::Queue), config = near(4_103_000))]
fn step((mut machine, order): (Machine<'static>, Order)) -> Outputs {
    machine.run(black_box(&[1]), order).expect("it runs").finished().expect("logits")
}

const MODEL: &str = "smollm2-135m";

#[library_benchmark(setup = lowering)]
#[bench::smollm2_135m(args = (MODEL), config = near(100_780_000))]
fn lower_and_verify(of: Lowering) -> Verified<Program> {
    lowered(black_box(&of))
}

fn program(name: &str) -> (Lowering, Verified<Program>) {
    let of = lowering(name);
    let program = lowered(&of);
    (of, program)
}

#[library_benchmark(setup = program)]
#[bench::smollm2_135m(args = (MODEL), config = near(65_406_000))]
fn predicted((of, program): (Lowering, Verified<Program>)) -> f64 {
    let (config, _, target, _) = &of;
    predict(black_box(&program), &config.kernel, target, 127).latency_us
}

#[library_benchmark(setup = program)]
#[bench::smollm2_135m(args = (MODEL), config = near(16_400_000))]
fn id((_, program): (Lowering, Verified<Program>)) -> String {
    format!("{:?}", black_box(&program).id())
}

#[library_benchmark(setup = sized)]
#[bench::counter(args = (1000, 16, 0), config = near(15_032_000))]
#[bench::flag_in_data(args = (1000, 16, 0xff), config = near(13_644_000))]
fn checked(program: Program) {
    check(black_box(&program)).expect("it verifies");
}

library_benchmark_group!(name = import_, benchmarks = [folder, weights]);
library_benchmark_group!(name = eval_, benchmarks = [product, positions, step]);
library_benchmark_group!(name = lower_, benchmarks = [lower_and_verify, predicted, id]);
library_benchmark_group!(name = verify_, benchmarks = checked);
gungraun::main!(library_benchmark_groups = [import_, eval_, lower_, verify_]);
