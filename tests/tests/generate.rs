//! Programs that are valid by construction are accepted; programs one edit away are rejected, or do not depend on the order.

use std::collections::BTreeMap;
use std::time::Instant;

use ir::program::{Program, Verified, verify};
use ir::{Graph, Rule};
use reference_vm::Order;
use reference_vm::machine::{Machine, Run};
use tests::build::{Plan, build};
use tests::edit::Edit;
use tests::rng::Rng;
use tests::toy::{SeededWeights, Shape, graph};
use tests::weak;

/// Edits to try; `AMK_EDITS` asks for more.
fn edits() -> u64 {
    std::env::var("AMK_EDITS").ok().and_then(|text| text.parse().ok()).unwrap_or(1200)
}

fn shape(rng: &mut Rng) -> Shape {
    let kv_heads = rng.pick(&[1, 2]);
    Shape {
        hidden: rng.pick(&[16, 24, 48]),
        heads: kv_heads * rng.pick(&[1, 2]),
        kv_heads,
        head_dim: rng.pick(&[4, 8]),
        ffn: rng.pick(&[16, 20, 56]),
        vocab: rng.pick(&[24, 50]),
        layers: rng.pick(&[1, 2, 3]),
        tied: rng.flip(),
        bias: rng.flip(),
        qk_norm: rng.flip(),
        window: rng.pick(&[None, Some(3)]),
    }
}

fn plan(rng: &mut Rng) -> Plan {
    let mixed = rng.next_u64() as u8;
    Plan {
        workers: rng.pick(&[1, 2, 3, 7]),
        tagged: rng.pick(&[0, 0xff, mixed]),
        embed_fused: rng.flip(),
        merge_fused: rng.flip(),
        splits: rng.pick(&[1, 2, 3]),
        kv_block: rng.pick(&[1, 2]),
        block_tiles: rng.pick(&[1, 2]),
        linear: rng.flip(),
        rotate: rng.pick(&[0, 1, 2]),
        kv_capacity: 8,
    }
}

/// The logits' bits after each of a few tokens, in one order.
fn run(
    program: &Verified<Program>,
    graph: &Graph,
    weights: &SeededWeights,
    order: Order,
) -> Result<Vec<u32>, String> {
    let mut machine = Machine::new(program, graph, weights).map_err(|error| error.to_string())?;
    match machine.run(&[3, 1, 4, 1, 5], order).map_err(|error| error.to_string())? {
        Run::Finished(outputs) => {
            Ok(outputs.logits.into_iter().flatten().map(f32::to_bits).collect())
        }
        other @ (Run::Trapped(_) | Run::OutOfFuel { .. } | Run::Stuck { .. }) => {
            Err(format!("{other:?}"))
        }
    }
}

/// Whether these are the same logits up to the rounding of words that got or lost a tag.
fn rounded(before: &[u32], after: &[u32]) -> bool {
    let float = |bits: &u32| f64::from(f32::from_bits(*bits));
    let most = before.iter().map(float).fold(0.0, |most: f64, x| most.max(x.abs()));
    before.iter().zip(after).all(|(a, b)| (float(a) - float(b)).abs() <= 1e-4 * most)
}

/// The bits that all orders agree on.
fn agreed(
    program: &Verified<Program>,
    graph: &Graph,
    weights: &SeededWeights,
) -> Result<Vec<u32>, String> {
    let first = run(program, graph, weights, Order::Queue)?;
    for order in [Order::Reverse, Order::Waves, Order::Seeded(1), Order::Seeded(2)] {
        if run(program, graph, weights, order)? != first {
            return Err(format!("{order:?} gives other bits than Queue"));
        }
    }
    Ok(first)
}

/// Steps and seeds of a run under weak memory. Four steps: the first two splits of attention become active on the way.
const WEAK_STEPS: u32 = 4;
const WEAK_SEEDS: u64 = 4;

/// Under weak memory every read finds the same write, whatever the seed.
fn agreed_when_weak(program: &Program, seeds: u64) -> Result<(), String> {
    let first = weak::run(program, WEAK_STEPS, 0)?;
    for seed in 1..seeds {
        if weak::run(program, WEAK_STEPS, seed)? != first {
            return Err(format!("weak memory: with seed {seed} some read finds another write"));
        }
    }
    Ok(())
}

/// The samples of weak memory find what `verify` refuses, and nothing in what it accepts.
#[test]
fn weak_memory_and_verify_are_of_one_mind() {
    let mut seen = [0, 0];
    for file in crate::filetest::all() {
        let folder = |name: &str| file.path.parent().is_some_and(|p| p.ends_with(name));
        let (formal, accept) = (folder("verify/formal"), folder("verify/accept"));
        if !formal && !accept {
            continue;
        }
        let program = ir::text::parse(&file.text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(ir::program::check(&program).is_ok(), accept, "{}", file.path.display());
        let result = agreed_when_weak(&program, 400);
        println!("{}: {result:?}", file.path.display());
        assert_eq!(result.is_ok(), accept, "{}: {result:?}", file.path.display());
        seen[usize::from(accept)] += 1;
    }
    assert!(seen[0] >= 4 && seen[1] >= 4, "{seen:?}");
}

#[test]
fn built_programs_agree_in_every_order() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let (graph, plan) = (graph(&shape(&mut rng)), plan(&mut rng));
        let program = verify(build(&graph, &plan))
            .unwrap_or_else(|violations| panic!("seed {seed}, {plan:?}\n{violations}"));
        let result = agreed(&program, &graph, &SeededWeights::new(&graph, seed));
        if let Err(problem) = result.and_then(|_| agreed_when_weak(&program, WEAK_SEEDS)) {
            panic!("seed {seed}, {plan:?}: {problem}");
        }
    }
}

/// What became of the edits of one class.
#[derive(Default)]
struct Tally {
    rejected: BTreeMap<Rule, u32>,
    same: u32,
    changed: u32,
}

#[test]
fn edited_programs_are_rejected_or_do_not_depend_on_the_order() {
    let mut tallies: BTreeMap<Edit, Tally> = BTreeMap::new();
    let mut failures = Vec::new();
    let (mut done, edits) = (0, edits());
    for seed in 0.. {
        if done == edits {
            break;
        }
        let mut rng = Rng::new(seed);
        let (graph, plan) = (graph(&shape(&mut rng)), plan(&mut rng));
        let original = build(&graph, &plan);
        let edit = Edit::ALL[seed as usize % Edit::ALL.len()];
        let mut edited = original.clone();
        edit.apply(&mut edited, &mut rng);
        if edited == original {
            continue;
        }
        done += 1;
        let tally = tallies.entry(edit).or_default();
        let edited = match verify(edited) {
            Ok(edited) => edited,
            Err(violations) => {
                *tally.rejected.entry(violations.list()[0].rule).or_default() += 1;
                continue;
            }
        };
        let weights = SeededWeights::new(&graph, seed);
        let original =
            verify(original).unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
        let before = run(&original, &graph, &weights, Order::Queue)
            .unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
        match agreed(&edited, &graph, &weights) {
            Ok(after) if after == before => tally.same += 1,
            Ok(after) if edit == Edit::FlipKind && rounded(&before, &after) => tally.same += 1,
            Ok(_) if !edit.keeps_meaning() => tally.changed += 1,
            Ok(_) => failures.push(format!(
                "seed {seed}, {}: accepted, and computes something else",
                edit.name()
            )),
            Err(problem) => {
                failures.push(format!("seed {seed}, {}: accepted, and {problem}", edit.name()))
            }
        }
    }
    for (edit, tally) in &tallies {
        let rules: Vec<String> =
            tally.rejected.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
        let rejected: u32 = tally.rejected.values().sum();
        println!(
            "{:34} rejected {rejected:3}, same {:3}, changed {:3}   {}",
            edit.name(),
            tally.same,
            tally.changed,
            rules.join(", ")
        );
    }
    assert!(failures.is_empty(), "{} of {done}\n{}", failures.len(), failures.join("\n"));
    assert_eq!(tallies.len(), Edit::ALL.len(), "every class of edits must occur");
}

/// The order that `verify` works with is the one that its edges imply, seen from the outside: queues and counters, and no tagged words.
#[test]
fn order_follows_queues_and_counters() {
    let mut rng = Rng::new(11);
    let (graph, plan) =
        (graph(&shape(&mut rng)), Plan { tagged: 0b0101_1010, workers: 3, ..plan(&mut rng) });
    let program = verify(build(&graph, &plan)).unwrap_or_else(|violations| panic!("{violations}"));
    let order = ir::program::Order::of(&program);
    let tasks: Vec<&ir::program::Task> =
        program.workers.iter().flat_map(|worker| &worker.tasks).collect();
    assert_eq!(order.len(), tasks.len());
    // Reachability by brute force, in the order's own sequence.
    let mut after: Vec<Vec<bool>> = vec![vec![false; tasks.len()]; tasks.len()];
    for &b in order.sequence() {
        for a in 0..tasks.len() {
            let (place_a, place_b) = (order.place(a as u32), order.place(b));
            let queue = place_a.0 == place_b.0 && place_a.1 + 1 == place_b.1;
            let counter = tasks[a]
                .signal
                .is_some_and(|c| tasks[b as usize].waits.iter().any(|wait| wait.counter == c));
            if queue || counter {
                let before_a = after[a].clone();
                let row = &mut after[b as usize];
                row[a] = true;
                row.iter_mut().zip(before_a).for_each(|(mine, theirs)| *mine |= theirs);
            }
        }
    }
    let mut apart = 0;
    for (b, row) in after.iter().enumerate() {
        for (a, &reached) in row.iter().enumerate() {
            assert_eq!(order.released_to(a as u32, b as u32), reached, "{a} before {b}");
            let (place_a, place_b) = (order.place(a as u32), order.place(b as u32));
            let neighbours = place_a.0 == place_b.0 && place_a.1 + 1 == place_b.1;
            let barrier = tasks[a].signal.is_some() || !tasks[b].waits.is_empty();
            let before = reached && (!neighbours || barrier);
            assert_eq!(order.happens_before(a as u32, b as u32), before, "{a} before {b}");
            apart += u32::from(reached && !before);
        }
    }
    assert!(apart > 0, "some neighbours have no barrier between them");
}

/// Numbers that nobody expects.
const ABSURD: &[u64] = &[
    0,
    1,
    2,
    7,
    8,
    255,
    256,
    65_535,
    65_536,
    1 << 20,
    1 << 28,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 63,
    u64::MAX,
];

/// The text with some of its numbers replaced.
fn absurd(text: &str, rng: &mut Rng) -> String {
    let bytes = text.as_bytes();
    let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    let starts: Vec<usize> = (1..bytes.len()).filter(|&i| digit(i) && !digit(i - 1)).collect();
    let mut chosen: Vec<usize> = (0..=rng.below(3)).map(|_| rng.pick(&starts)).collect();
    chosen.sort_unstable();
    chosen.dedup();
    let mut text = text.to_owned();
    for start in chosen.into_iter().rev() {
        let end = (start..bytes.len()).find(|&i| !digit(i)).unwrap_or(bytes.len());
        text.replace_range(start..end, &rng.pick(ABSURD).to_string());
    }
    text
}

/// Absurd numbers give violations or, where they mean nothing, a program that still runs. Nothing panics and nothing takes long.
#[test]
fn absurd_numbers_are_violations() {
    let (mut unread, mut refused, mut accepted) = (0, 0, 0);
    for seed in 0..4000 {
        let mut rng = Rng::new(seed);
        let (graph, plan) = (graph(&shape(&mut rng)), plan(&mut rng));
        let text = absurd(&ir::text::print(&build(&graph, &plan)), &mut rng);
        let Ok(program) = ir::text::parse(&text) else {
            unread += 1;
            continue;
        };
        let saved = ir::text::load(&ir::text::save(&program));
        assert_eq!(saved.as_ref(), Ok(&program), "seed {seed}");
        let start = Instant::now();
        match verify(program) {
            Ok(program) => {
                accepted += 1;
                // It may still not fit the graph; that is an error too.
                let _ = run(&program, &graph, &SeededWeights::new(&graph, seed), Order::Reverse);
            }
            Err(violations) => {
                assert!(!violations.to_string().is_empty());
                refused += 1;
            }
        }
        assert!(start.elapsed().as_secs() < 5, "seed {seed} took {:?}", start.elapsed());
    }
    println!("absurd numbers: {unread} unreadable, {refused} refused, {accepted} accepted");
    assert!(refused > 1000);
}

#[test]
fn large_programs_verify_quickly() {
    for (layers, workers, heads) in [(1, 8, 16), (2, 64, 64), (15, 132, 64), (80, 132, 64)] {
        for tagged in [0, 0xff] {
            let shape = Shape {
                hidden: 8192,
                heads,
                kv_heads: 8,
                head_dim: 128,
                ffn: 28672,
                vocab: 128_256,
                layers,
                tied: false,
                bias: false,
                qk_norm: false,
                window: None,
            };
            let plan = Plan {
                workers,
                tagged,
                embed_fused: false,
                merge_fused: true,
                splits: 16,
                kv_block: 128,
                block_tiles: 2,
                linear: true,
                rotate: 1,
                kv_capacity: 4096,
            };
            let program = build(&graph(&shape), &plan);
            let tasks = program.task_len();
            let start = Instant::now();
            if let Err(violations) = verify(program) {
                panic!("{violations}");
            }
            let took = start.elapsed();
            println!("{tasks} tasks, {workers} workers, tagged {tagged:#x}: {took:?}");
            // Generous, since tests share the machine; the release build on a quiet core is far below.
            assert!(took.as_secs() < 10, "{tasks} tasks took {took:?}");
        }
    }
}
