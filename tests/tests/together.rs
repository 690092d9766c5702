//! Programs that sessions share: each lane is a program like any other, and gives the bits that the session would get alone.

use ir::Rule;
use ir::program::{Program, Together, Verified, check, rotated, verify};
use reference_vm::Order;
use tests::build::build;
use tests::edit::Edit;
use tests::rng::Rng;
use tests::toy::{SeededWeights, graph};

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
    assert!(others > 50, "{others} of {lanes}");
}

/// A program that is accepted for one session and in which some task waits for what only its own split needs: refused for lanes. Those refused
/// go wrong in some sample of weak memory.
#[test]
fn a_program_whose_rotation_is_not_ordered_is_refused() {
    let (mut accepted, mut refused, mut confirmed) = (0, 0, 0);
    let mut rules: Vec<Rule> = Vec::new();
    for seed in 0..6000 {
        let (_, mut program) = drawn(seed);
        let mut rng = Rng::new(seed);
        let edit = [Edit::MoveWait, Edit::DropWait, Edit::RedirectWait, Edit::MoveTask]
            [seed as usize / 2 % 4];
        edit.apply(&mut program, &mut rng);
        let Ok(plain) = verify(program) else { continue };
        accepted += 1;
        let Err(found) = Together::new(plain.clone(), LANES) else { continue };
        refused += 1;
        rules.push(found.list()[0].rule);
        let wrong = (1..LANES).map(|lane| rotated(&plain, lane));
        let wrong = wrong.filter(|lane| check(lane).is_err());
        let goes_wrong = |lane: Program| agreed_when_weak(&lane, 24).is_err();
        confirmed += u32::from(wrong.take(1).any(goes_wrong));
    }
    println!(
        "{accepted} accepted, {refused} of them refused for lanes, {confirmed} go wrong: {rules:?}"
    );
    assert!(refused > 0 && confirmed > 0);
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
