//! Benchmarks of `verify`, from a hundred tasks to a hundred thousand.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ir::program::check;
use tests::build::sized;

fn benches(c: &mut Criterion) {
    for (workers, sizes) in
        [(16, &[100, 1_000, 10_000, 100_000][..]), (132, &[1_000, 10_000, 100_000])]
    {
        for (handoff, flag_in_data) in [("counter", 0), ("flag_in_data", 0xff)] {
            let mut group = c.benchmark_group(format!("verify/{workers} workers/{handoff}"));
            group.sample_size(10);
            for &size in sizes {
                let program = sized(size, workers, flag_in_data);
                group.throughput(Throughput::Elements(program.task_len() as u64));
                group.bench_with_input(
                    BenchmarkId::from_parameter(program.task_len()),
                    &program,
                    |b, program| b.iter(|| check(program).expect("it verifies")),
                );
            }
        }
    }
}

criterion_group!(verify, benches);
criterion_main!(verify);
