//! Programs that are valid by construction are accepted; programs one edit away are rejected, or do not depend on the order.

use std::collections::BTreeMap;
use std::time::Instant;

use abi::{AttentionMergeParams, AttentionParams, MatvecParams, Opcode};
use ir::program::{Program, Verified, check, verify};
use ir::schedule::{ActsOn, legal_values, neutral_config, validate};
use ir::{Graph, Knob, Rule, Target};
use lower::{Options, lower};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Fault, Order, Trap};
use tests::build::{Plan, build};
use tests::edit::Edit;
use tests::rng::Rng;
use tests::toy::{SeededWeights, Shape, graph};
use tests::weak;

/// Number of edits to try; `AMK_EDITS` sets more.
fn edits() -> u64 {
    std::env::var("AMK_EDITS").ok().and_then(|text| text.parse().ok()).unwrap_or(1200)
}

pub(crate) fn shape(rng: &mut Rng) -> Shape {
    let kv_heads = rng.pick(&[1, 2]);
    Shape {
        hidden: rng.pick(&[16, 24, 48]),
        heads: kv_heads * rng.pick(&[1, 2, 5, 9]),
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

pub(crate) fn plan(rng: &mut Rng) -> Plan {
    let mixed = rng.next_u64() as u8;
    Plan {
        workers: rng.pick(&[1, 2, 3, 7]),
        flag_in_data: rng.pick(&[0, 0xff, mixed]),
        embed_fused: rng.flip(),
        merge_fused: rng.flip(),
        splits: rng.pick(&[1, 2, 3]),
        kv_block: rng.pick(&[1, 2]),
        block_tiles: rng.pick(&[1, 2]),
        rotate: rng.pick(&[0, 1, 2]),
        kv_capacity: 8,
    }
}

/// A program that `lower` made for a schedule drawn at random. Blocks of keys are cut to one or two keys, so that several splits have
/// some after a few tokens.
pub(crate) fn lowered(graph: &Graph, rng: &mut Rng) -> Program {
    let mut target = Target::by_name("h200").expect("a target of the table");
    target.sms = rng.pick(&[1, 2, 3, 7]);
    let mut config = neutral_config(graph, &target);
    for &knob in Knob::ALL.iter().filter(|knob| knob.acts_on() == ActsOn::Program) {
        let values = legal_values(knob, graph, &target);
        if !knob.path().starts_with("pipeline.") && rng.flip() {
            config.set(knob, values[rng.below(values.len())]).expect("a legal value");
        }
    }
    let config = validate(config, graph, &target)
        .or_else(|_| validate(neutral_config(graph, &target), graph, &target))
        .expect("the neutral schedule is legal");
    let options = Options { kv_capacity: 8 };
    let program = lower(&config, graph, &target, options).unwrap_or_else(|error| panic!("{error}"));
    let (mut program, kv_block) = (program.into_inner(), rng.pick(&[1, 2]));
    for task in program.workers.iter_mut().flat_map(|worker| &mut worker.tasks) {
        match task.opcode {
            Opcode::Attention => {
                task.params = bytemuck::cast(AttentionParams { kv_block, ..task.params() });
            }
            Opcode::AttentionMerge => {
                task.params = bytemuck::cast(AttentionMergeParams { kv_block, ..task.params() });
            }
            Opcode::Matvec => {
                let mut p: MatvecParams = task.params();
                p.kv_block = p.kv_block.min(kv_block);
                task.params = bytemuck::cast(p);
            }
            Opcode::Nop | Opcode::Embed | Opcode::Sample | Opcode::Norm | Opcode::Route => {}
        }
    }
    program
}

/// The logits' bits after each of a few tokens, in one order. If an absurd number from an edit leaves logits without a
/// greatest, the step at which `sample` reports that.
pub(crate) fn run(
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
        Run::Trapped(Trap { fault: Fault::BadToken { .. }, epoch, .. }) => Ok(vec![epoch]),
        other @ (Run::Trapped(_) | Run::Stuck { .. }) => Err(format!("{other:?}")),
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

/// Steps and seeds of a run under weak memory. Four steps: the first two splits of attention become active meanwhile.
const WEAK_STEPS: u32 = 4;
const WEAK_SEEDS: u64 = 4;

/// Under weak memory every read finds the same write, whatever the seed.
pub(crate) fn agreed_when_weak(program: &Program, seeds: u64) -> Result<(), String> {
    let first = weak::run(program, WEAK_STEPS, 0)?;
    for seed in 1..seeds {
        if weak::run(program, WEAK_STEPS, seed)? != first {
            return Err(format!("weak memory: with seed {seed} some read finds another write"));
        }
    }
    Ok(())
}

/// Sampled weak memory finds errors in what `verify` refuses, and none in what it accepts.
#[test]
fn weak_memory_and_verify_are_of_one_mind() {
    let mut seen = [0, 0];
    for file in tests::filetest::all() {
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

#[test]
fn lowered_programs_agree_in_every_order() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let graph = graph(&shape(&mut rng));
        let program = verify(lowered(&graph, &mut rng))
            .unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
        let result = agreed(&program, &graph, &SeededWeights::new(&graph, seed));
        if let Err(problem) = result.and_then(|_| agreed_when_weak(&program, WEAK_SEEDS)) {
            panic!("seed {seed}: {problem}");
        }
    }
}

/// Results of the edits of one class.
#[derive(Default)]
struct Tally {
    rejected: BTreeMap<Rule, u32>,
    /// Number rejected for their order, and of those the number in which a sample of weak memory fails.
    order: u32,
    confirmed: u32,
    same: u32,
    changed: u32,
}

/// Rules about the order of tasks. A program that breaks one of these has a failing execution, as far as the rule is no
/// stricter than necessary.
const ORDER_RULES: &[Rule] = &[
    Rule::CSatisfiable,
    Rule::CAlljoin,
    Rule::OAcyclic,
    Rule::OStep,
    Rule::RHappens,
    Rule::RWriter,
];
const REFUSED_SEEDS: u64 = 24;

/// The class of an edit, and whether the program was lowered or built.
type Class = (Edit, &'static str);

/// Tries an edit; `Err` if it is accepted and should not be.
fn try_edit(seed: u64, tallies: &mut BTreeMap<Class, Tally>) -> Result<bool, String> {
    let mut rng = Rng::new(seed);
    let graph = graph(&shape(&mut rng));
    let edit = Edit::ALL[seed as usize % Edit::ALL.len()];
    let (base, original) = if (seed as usize / Edit::ALL.len()).is_multiple_of(2) {
        ("built", build(&graph, &plan(&mut rng)))
    } else {
        ("lowered", lowered(&graph, &mut rng))
    };
    let mut edited = original.clone();
    edit.apply(&mut edited, &mut rng);
    if edited == original {
        return Ok(false);
    }
    let tally = tallies.entry((edit, base)).or_default();
    if let Err(violations) = check(&edited) {
        let rule = violations.list()[0].rule;
        *tally.rejected.entry(rule).or_default() += 1;
        if ORDER_RULES.contains(&rule) {
            tally.order += 1;
            tally.confirmed += u32::from(agreed_when_weak(&edited, REFUSED_SEEDS).is_err());
        }
        return Ok(true);
    }
    let edited = verify(edited).unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
    let weights = SeededWeights::new(&graph, seed);
    let original =
        verify(original).unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
    let before = run(&original, &graph, &weights, Order::Queue)
        .unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
    let after = agreed(&edited, &graph, &weights)
        .and_then(|after| agreed_when_weak(&edited, WEAK_SEEDS).map(|()| after))
        .map_err(|problem| {
            format!("seed {seed}, {} ({base}): accepted, and {problem}", edit.name())
        })?;
    if after == before || edit == Edit::FlipKind && rounded(&before, &after) {
        tally.same += 1;
    } else if edit.keeps_meaning() {
        let name = edit.name();
        return Err(format!("seed {seed}, {name} ({base}): accepted, and computes something else"));
    } else {
        tally.changed += 1;
    }
    Ok(true)
}

#[test]
fn edited_programs_are_rejected_or_do_not_depend_on_the_order() {
    let mut tallies = BTreeMap::new();
    let mut failures = Vec::new();
    let (mut done, edits) = (0, edits());
    for seed in 0.. {
        if done == edits {
            break;
        }
        match try_edit(seed, &mut tallies) {
            Ok(edited) => done += u64::from(edited),
            Err(problem) => {
                done += 1;
                failures.push(problem);
            }
        }
    }
    let (mut order, mut confirmed) = (0, 0);
    for ((edit, base), tally) in &tallies {
        (order, confirmed) = (order + tally.order, confirmed + tally.confirmed);
        let rules: Vec<String> =
            tally.rejected.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
        let rejected: u32 = tally.rejected.values().sum();
        println!(
            "| {} | {base} | {rejected} | {} | {} | {} of {} | {} |",
            edit.name(),
            tally.same,
            tally.changed,
            tally.confirmed,
            tally.order,
            rules.join(", ")
        );
    }
    assert!(failures.is_empty(), "{} of {done}\n{}", failures.len(), failures.join("\n"));
    println!(
        "{done} edits; of {order} refused for their order {confirmed} go wrong in {REFUSED_SEEDS} samples"
    );
    // The check of accepted programs does detect wrong ones.
    assert!(2 * confirmed > order, "only {confirmed} of {order} refused programs go wrong");
    assert_eq!(tallies.len(), 2 * Edit::ALL.len(), "every class of edits must occur");
}

/// The order in `verify` is the one that its edges imply: queues and counters, and no flag-in-data words.
#[test]
fn order_follows_queues_and_counters() {
    let mut rng = Rng::new(11);
    let (graph, plan) =
        (graph(&shape(&mut rng)), Plan { flag_in_data: 0b0101_1010, workers: 3, ..plan(&mut rng) });
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

/// Absurd numbers.
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

/// Absurd numbers give violations or, if they have no meaning, a program that still runs. Nothing panics and nothing
/// takes long.
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
