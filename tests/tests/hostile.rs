//! Hostile input: runs every fuzz body on earlier findings and on newly mutated valid files.
//!
//! A default run takes a few seconds. `AMK_FUZZ_SECONDS=3600` sets the time per target, `AMK_FUZZ_TARGET=chat_template`
//! selects one target, `AMK_FUZZ_SEED=7` sets another seed.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tests::fuzz::guard::Guarded;
use tests::fuzz::memory::{self, Counting};
use tests::fuzz::{TARGETS, Target, execute, mutate, target};
use tests::rng::Rng;

#[global_allocator]
static ALLOCATOR: Guarded<Counting> = Guarded(Counting);

/// Mutated inputs per target of a default run.
const SMOKE: u64 = 300;

/// Most milliseconds per target of a default run: some inputs cost a hundred times as much as others.
const SMOKE_MS: u64 = 1500;

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
}

/// Runs an input; a failure prints its bytes.
fn run(target: &Target, input: &[u8], what: &str) {
    let result = std::panic::catch_unwind(|| execute(target, input));
    if result.is_err() {
        let path =
            std::env::temp_dir().join(format!("hostile-{}-{}", target.name, std::process::id()));
        let _ = std::fs::write(&path, input);
        panic!("{}: {what}; the input is in {}", target.name, path.display());
    }
}

fn found_before(target: &Target) -> Vec<PathBuf> {
    let folder = tests::root().join("tests/fuzz-corpus").join(target.name);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths
}

#[test]
fn what_was_found_before_stays_fixed() {
    let mut inputs = 0;
    for target in TARGETS {
        for path in found_before(target) {
            let input = std::fs::read(&path).unwrap();
            run(target, &input, &path.display().to_string());
            inputs += 1;
        }
    }
    assert!(inputs >= TARGETS.len(), "only {inputs} inputs in tests/fuzz-corpus");
}

#[test]
fn damaged_files_are_refused_or_read() {
    let only = std::env::var("AMK_FUZZ_TARGET").ok();
    let seed = number("AMK_FUZZ_SEED").unwrap_or(1);
    let limit = number("AMK_FUZZ_SECONDS").map(Duration::from_secs);
    if let Some(name) = &only {
        assert!(target(name).is_some(), "there is no target {name}");
    }
    for target in
        TARGETS.iter().filter(|target| only.as_deref().is_none_or(|name| name == target.name))
    {
        let seeds = (target.seeds)();
        for input in &seeds {
            run(target, input, "a valid input");
        }
        let mut rng = Rng::new(seed);
        let began = Instant::now();
        let mut runs = 0;
        let more = |runs: u64| match limit {
            Some(limit) => began.elapsed() < limit,
            None => runs < SMOKE && began.elapsed() < Duration::from_millis(SMOKE_MS),
        };
        while more(runs) {
            let input = mutate::damaged(target, &seeds, &mut rng);
            run(target, &input, &format!("run {runs} of seed {seed}"));
            runs += 1;
        }
        println!("{}: {runs} runs in {:.1} s", target.name, began.elapsed().as_secs_f64());
        assert!(runs >= 10, "{} runs only {runs} times", target.name);
    }
}

/// Tests the checks that the bodies rely on.
#[test]
fn greed_slowness_and_panics_are_noticed() {
    let ((), peak) = memory::peak(|| drop(std::hint::black_box(vec![1_u8; 3 << 20])));
    assert!((3 << 20..4 << 20).contains(&peak), "{peak}");
    let refused = Vec::<u8>::new().try_reserve(memory::REQUEST_MAX + 1);
    assert!(refused.is_err(), "a request beyond the limit was served");
    let greedy = Target {
        name: "greedy",
        run: |_| drop(std::hint::black_box(vec![0_u8; 100_000])),
        seeds: Vec::new,
        words: &[],
        memory: 1000,
        memory_per_byte: 10,
    };
    assert!(std::panic::catch_unwind(|| execute(&greedy, b"x")).is_err());
    assert!(std::panic::catch_unwind(|| execute(&greedy, &[0; 9901])).is_ok());
    let panics = Target { run: |_| panic!("as asked"), ..greedy };
    assert!(std::panic::catch_unwind(|| execute(&panics, b"x")).is_err());
}
