//! Tests that the cost of `verify` grows linearly with the size of a program. It measures the thread's CPU time, which
//! is independent of other processes.

use std::hint::black_box;

use ir::program::{Program, accesses, check};
use tests::build::sized;

const WORKERS: u32 = 16;
/// Both sizes far exceed the caches and the allocator's own pages, so that these count alike.
const SMALL: u32 = 5_000;
const LARGE: u32 = 40_000;

/// CPU time of this thread in nanoseconds.
fn worked() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts them");
    text.split(' ').next().and_then(|first| first.parse().ok()).expect("a number")
}

/// CPU time that one measurement takes at least: the kernel counts in ticks of up to 10 ms.
const MEASURED_NS: u64 = 100_000_000;

/// Nanoseconds that the work takes: the least of three means, since other tests take the caches away for a while.
fn least(mut work: impl FnMut()) -> f64 {
    let mut mean = || {
        let before = worked();
        for runs in 1_u32.. {
            work();
            let spent = worked() - before;
            if spent >= MEASURED_NS {
                return spent as f64 / f64::from(runs);
            }
        }
        f64::NAN
    };
    mean().min(mean()).min(mean())
}

/// Growth of the CPU time of `work` for eight times the tasks. Linear is 8 and some, quadratic is 64.
fn growth(flag_in_data: u8, work: impl Fn(&Program)) -> f64 {
    let [small, large] = [SMALL, LARGE].map(|tasks| {
        let program = sized(tasks, WORKERS, flag_in_data);
        least(|| work(&program))
    });
    large / small
}

const GROWTH_MAX: f64 = 24.0;

#[test]
fn verify_grows_about_linearly() {
    for flag_in_data in [0, 0xff] {
        let growth = growth(flag_in_data, |program| check(program).expect("it verifies"));
        println!(
            "flag-in-data {flag_in_data:#x}: eight times the tasks are {growth:.1} times the work"
        );
        assert!(growth < GROWTH_MAX, "flag-in-data {flag_in_data:#x}: {growth:.1}");
    }
}

/// The measure detects a quadratic cost, even if only for every fourth task.
#[test]
fn the_measure_sees_a_square() {
    let pairs = |program: &Program| {
        let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
        let writes: Vec<u32> = tasks
            .step_by(4)
            .filter_map(|task| accesses(program, task).writes.first().map(|r| r.start))
            .collect();
        let same = writes.iter().map(|a| writes.iter().filter(|b| *b == a).count()).sum::<usize>();
        black_box(same);
    };
    let growth = growth(0, pairs);
    assert!(growth > GROWTH_MAX, "{growth:.1}");
}

#[test]
fn large_programs_verify() {
    for (tasks, workers) in [(100, 16), (10_000, 132), (50_000, 132)] {
        for flag_in_data in [0, 0xff] {
            let program = sized(tasks, workers, flag_in_data);
            assert_eq!(check(&program), Ok(()), "{tasks} tasks, {workers} workers");
        }
    }
}
