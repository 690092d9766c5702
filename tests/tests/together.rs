//! Programs that sessions share: each lane is a program like any other, and gives the bits that the session would get alone.

use abi::{AttentionParams, Opcode};
use ir::Rule;
use ir::program::{Access, Program, Task, Together, Verified, check, rotated, verify};
use reference_vm::Order;
use tests::build::{Plan, build};
use tests::rng::Rng;
use tests::toy::{SeededWeights, Shape, graph};

use crate::generate::{agreed_when_weak, lowered, plan, run, shape};

const LANES: u32 = abi::LANES_MAX as u32;

/// A program for a schedule drawn at random, or one that is built without `lower`.
fn drawn(seed: u64) -> (ir::Graph, Program) {
    let mut rng = Rng::new(seed);
    let graph = graph(&shape(&mut rng));
    let program = match seed % 2 {
        0 => lowered(&graph, &mut rng),
        _ => build(&graph, &plan(&mut rng)),
    };
    (graph, program)
}

fn verified(program: Program, seed: u64) -> Verified<Program> {
    verify(program).unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"))
}

/// In any order of its tasks, too.
#[test]
fn every_lane_gives_the_bits_of_a_session_alone() {
    let (mut lanes, mut others) = (0, 0);
    for seed in 0..60 {
        let (graph, program) = drawn(seed);
        let weights = SeededWeights::new(&graph, seed);
        let plain = verified(program, seed);
        let alone = run(&plain, &graph, &weights, Order::Queue).expect("it runs");
        let together = Together::new(plain.clone(), LANES)
            .unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
        assert_eq!(together.lane(0).as_ref(), Some(&plain));
        assert_eq!(together.lane(LANES), None);
        for lane in 1..4 {
            let mine = together.lane(lane).expect("a lane");
            let order = [Order::Reverse, Order::Waves, Order::Seeded(seed)][lane as usize - 1];
            let bits = run(&mine, &graph, &weights, order);
            assert_eq!(bits.as_ref(), Ok(&alone), "seed {seed}, lane {lane}");
            lanes += 1;
            others += u32::from(mine != plain);
        }
    }
    println!("{lanes} lanes, {others} of them with splits on other workers");
    assert!(others >= 30, "{others} of {lanes}");
}

/// A program whose partials of the last split lie where the queries of head 0 were, and whose queue has that split behind all who read them.
/// Right for one session; in lane 1 the same bytes are written by the task that comes first.
fn borrowed() -> (ir::Graph, Program) {
    let shape = Shape {
        hidden: 16,
        heads: 8,
        kv_heads: 2,
        head_dim: 8,
        ffn: 16,
        vocab: 24,
        layers: 1,
        tied: true,
        bias: false,
        qk_norm: false,
        window: None,
    };
    let plan = Plan {
        workers: 1,
        tagged: 0,
        embed_fused: false,
        merge_fused: false,
        splits: 2,
        kv_block: 1,
        block_tiles: 1,
        linear: false,
        rotate: 0,
        kv_capacity: 8,
    };
    let graph = graph(&shape);
    let mut program = build(&graph, &plan);
    let queue = &mut program.workers[0].tasks;
    let is_attention = |task: &Task| task.opcode == Opcode::Attention;
    let first = queue.iter().position(is_attention).expect("attention");
    let attention = &mut queue[first..first + 4];
    assert!(attention.iter().all(is_attention));
    attention.sort_by_key(|task| {
        let p: AttentionParams = task.params();
        [(1, 0), (0, 0), (0, 1), (1, 1)].iter().position(|part| *part == (p.kv_head, p.split))
    });
    let slot = |access: Option<Access>| access.expect("a slot").slot.index();
    let (queries, partials) = (slot(attention[0].reads[0]), slot(attention[0].writes[0]));
    let of_head_0 = u64::from(shape.heads / shape.kv_heads * shape.head_dim) * 4;
    let bytes = u64::from(program.slots[partials].words) * 4;
    let base = program.arena_bytes.next_multiple_of(1024);
    program.slots[partials].offset = base;
    program.slots[queries].offset = base + bytes - of_head_0;
    program.arena_bytes =
        (base + bytes + u64::from(program.slots[queries].words) * 4).next_multiple_of(1024);
    (graph, program)
}

#[test]
fn a_program_whose_rotation_is_not_ordered_is_refused() {
    let (graph, program) = borrowed();
    let plain = verify(program).unwrap_or_else(|violations| panic!("{violations}"));
    let weights = SeededWeights::new(&graph, 1);
    let alone = run(&plain, &graph, &weights, Order::Queue).expect("it runs");
    assert!(Together::new(plain.clone(), 1).is_ok());
    let found = Together::new(plain.clone(), 2).expect_err("lane 1 overwrites what lane 1 reads");
    println!("{found}");
    let rules: Vec<Rule> = found.list().iter().map(|violation| violation.rule).collect();
    assert!(rules.contains(&Rule::MPage), "head 0 reads queries that are gone: {found}");
    // Each lane by itself is what the verifier is asked about, and nothing else: lane 1 is not a program, lane 0 is one in any order.
    assert!(check(&rotated(&plain, 1)).is_err());
    assert!(agreed_when_weak(&plain, 4).is_ok());
    assert_eq!(run(&plain, &graph, &weights, Order::Waves), Ok(alone));
}

#[test]
fn lanes_are_as_many_as_a_command_has() {
    let (_, program) = drawn(0);
    let plain = verified(program, 0);
    for (lanes, good) in [(0, false), (1, true), (LANES, true), (LANES + 1, false)] {
        let together = Together::new(plain.clone(), lanes);
        assert_eq!(together.is_ok(), good, "{lanes}");
        if let Err(found) = together {
            assert_eq!(found.list()[0].rule, Rule::PLimit);
        }
    }
}
