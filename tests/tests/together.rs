//! Programs that sessions share: each sequence is a program like any other, and gives the bits of a session alone.

use abi::{AttentionParams, Epilogue, MatvecParams, Opcode, Prologue};
use ir::Rule;
use ir::program::{Program, Together, Verified, check, check_seqs, verify, window_reads};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Order, WindowDefect};
use tests::build::build;
use tests::rng::Rng;
use tests::toy::{SeededWeights, graph, in_bf16};

use crate::generate::{lowered, plan, run, shape};

const SEQS: u32 = abi::SEQS_MAX as u32;

/// A program for a schedule drawn at random, or one that is built without `lower`.
fn drawn(seed: u64) -> (ir::Graph, Program) {
    let mut rng = Rng::new(seed);
    let graph = in_bf16(graph(&shape(&mut rng)));
    let program = match seed % 2 {
        0 => lowered(&graph, &mut rng),
        _ => build(&graph, &plan(&mut rng)),
    };
    (graph, program)
}

fn verified(program: Program, seed: u64) -> Verified<Program> {
    verify(program).unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"))
}

/// Every sequence gives the bits of a session alone, in any order of its tasks.
#[test]
fn every_sequence_gives_the_bits_of_a_session_alone() {
    let (mut seqs, mut others) = (0, 0);
    for seed in 0..60 {
        let (graph, program) = drawn(seed);
        let weights = SeededWeights::new(&graph, seed);
        let plain = verified(program, seed);
        let alone = run(&plain, &graph, &weights, Order::Queue).expect("it runs");
        let together = Together::new(plain.clone(), SEQS)
            .unwrap_or_else(|violations| panic!("seed {seed}\n{violations}"));
        assert_eq!(together.seq(0).as_ref(), Some(&plain));
        assert_eq!(together.seq(SEQS), None);
        for seq in 1..4 {
            let mine = together.seq(seq).expect("a sequence");
            check(&mine)
                .unwrap_or_else(|violations| panic!("seed {seed}, sequence {seq}\n{violations}"));
            let order = [Order::Reverse, Order::Waves, Order::Seeded(seed)][seq as usize - 1];
            let bits = run(&mine, &graph, &weights, order);
            assert_eq!(bits.as_ref(), Ok(&alone), "seed {seed}, sequence {seq}");
            seqs += 1;
            others += u32::from(mine != plain);
        }
    }
    println!("{seqs} sequences, {others} of them with splits on other workers");
    assert!(others >= 30, "{others} of {seqs}");
}

/// A machine's logits of three tokens one by one, then of windows, each behind so many sequences of other sessions.
fn windowed(
    machine: &mut Machine<'_>,
    tokens: &[u32],
    (widths, others): (&[usize], u32),
    order: Order,
) -> Vec<Vec<f32>> {
    let logits = |run| match run {
        Ok(Run::Finished(outputs)) => outputs.logits,
        other => panic!("{other:?}"),
    };
    let (head, mut rest) = tokens.split_at(3);
    let mut all = logits(machine.run(head, order));
    for &width in widths {
        let (window, after) = rest.split_at(width.min(rest.len()));
        all.extend(logits(machine.window(others, window, order)));
        rest = after;
    }
    all
}

/// Windows of schedules drawn at random give the bits of the same positions one by one, in any order of the tasks and behind
/// any number of other sessions' sequences; and every mistake of a window is noticed.
#[test]
fn every_window_gives_the_bits_of_its_positions_one_by_one() {
    let mut noticed = [0; WindowDefect::ALL.len()];
    for seed in 0..40 {
        let (graph, program) = drawn(seed);
        let weights = SeededWeights::new(&graph, seed);
        let program = verified(program, seed);
        assert!(Together::new(program.clone(), SEQS).expect("it is proven").window_seqs() > 1);
        let machine = || Machine::new(&program, &graph, &weights).expect("it fits");
        let n = 17.min(program.kv_capacity);
        let tokens: Vec<u32> = (0..n).map(|i| (i * 7 + 3) % graph.vocab).collect();
        let alone = windowed(&mut machine(), &tokens, (&[1; 14], 0), Order::Queue);
        let orders = [Order::Waves, Order::Reverse, Order::Seeded(seed)];
        let windows = [(&[2; 7][..], 5), (&[8, 6], 0), (&[4, 1, 5, 4], 3)];
        for (widths, order) in windows.into_iter().zip(orders) {
            let got = windowed(&mut machine(), &tokens, widths, order);
            assert_eq!(got, alone, "seed {seed}, {widths:?}, {order:?}");
        }
        for (defect, noticed) in WindowDefect::ALL.into_iter().zip(&mut noticed) {
            let mut wrong = machine().with_window_defect(defect);
            *noticed +=
                u32::from(windowed(&mut wrong, &tokens, (&[4, 5, 5], 3), Order::Waves) != alone);
        }
    }
    assert_eq!(noticed, [40; WindowDefect::ALL.len()]);
}

/// A program whose attention would read other words of a window than it waits for.
#[test]
fn a_window_whose_words_no_order_covers_is_refused() {
    for edit in [
        (|p: &mut AttentionParams| p.group += 1) as fn(&mut AttentionParams),
        |p| p.kv_heads += 1,
        |p| p.head_dim *= 2,
    ] {
        let mut program = edited("o_proj", |_| true);
        let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
        let task = tasks.into_iter().find(|task| task.opcode == Opcode::Attention);
        let task = task.expect("a task of attention");
        let mut p: AttentionParams = task.params();
        edit(&mut p);
        task.params = bytemuck::cast(p);
        let found = check_seqs(&program, SEQS).expect_err("another place").to_string();
        assert!(found.contains("a window reads words"), "{found}");
        assert!(check_seqs(&program, 1).is_ok());
    }
    let program = edited("o_proj", |_| true);
    let tasks = || program.workers.iter().flat_map(|worker| &worker.tasks);
    let of = |task| window_reads(&program, task).is_some();
    assert!(tasks().any(of) && tasks().all(|task| of(task) == (task.opcode == Opcode::Attention)));
}

#[test]
fn sequences_are_as_many_as_a_command_has() {
    let (_, program) = drawn(0);
    let plain = verified(program, 0);
    for (seqs, good) in [(0, false), (1, true), (SEQS, true), (SEQS + 1, false)] {
        let together = Together::new(plain.clone(), seqs);
        assert_eq!(together.is_ok(), good, "{seqs}");
        if let Err(found) = together {
            assert_eq!(found.list()[0].rule, Rule::PLimit);
        }
    }
}

/// A program of `toy-2l`, its merge fused or not, with a change in the first matvec that `edit` accepts.
fn edited(merge: &str, edit: impl Fn(&mut MatvecParams) -> bool) -> Program {
    let graph = in_bf16(model::preset("toy-2l").expect("a preset").graph.clone());
    let target = ir::Target { sms: 8, ..ir::Target::by_name("h200").expect("a known target") };
    let config = format!(r#"{{"fusion_grouping": {{"merge": "{merge}"}}}}"#);
    let neutral = ir::schedule::neutral_config(&graph, &target);
    let config = ir::schedule::read_config_over(neutral, &config, &graph, &target);
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    let options = lower::Options { kv_capacity: 64 };
    let mut program =
        lower::lower(&config, &graph, &target, options).expect("it lowers").into_inner();
    let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
    let mut matvecs = tasks.filter(|task| task.opcode == Opcode::Matvec);
    let found = matvecs.any(|task| {
        let mut p: MatvecParams = task.params();
        let found = edit(&mut p);
        task.params = bytemuck::cast(p);
        found
    });
    assert!(found, "there is such a task");
    program
}

#[test]
fn what_the_sequences_would_read_wrong_is_refused() {
    for merge in ["o_proj", "separate"] {
        check_seqs(&edited(merge, |_| true), SEQS).unwrap_or_else(|e| panic!("{merge}: {e}"));
    }
    let refused = |program: &Program, says: &str| {
        let found = check_seqs(program, SEQS).expect_err(says).to_string();
        assert!(found.contains(says), "{found} does not say {says:?}");
        assert!(check_seqs(program, 1).is_ok());
    };
    // Values read as halves; halves read as values; halves written where others write values.
    let copies = |from: Prologue| {
        let to = if from == Prologue::Copy { Prologue::Rms } else { Prologue::Copy };
        move |p: &mut MatvecParams| {
            let found = p.prologue == from as u32;
            p.prologue = if found { to as u32 } else { p.prologue };
            found
        }
    };
    refused(&edited("o_proj", copies(Prologue::Rms)), "halves of 16 bits");
    refused(&edited("separate", copies(Prologue::Copy)), "halves of 16 bits");
    let silu = |p: &mut MatvecParams| {
        let found = p.epilogue == Epilogue::SiluMul as u32;
        p.epilogue = if found { Epilogue::Store as u32 } else { p.epilogue };
        found
    };
    refused(&edited("o_proj", silu), "halves of 16 bits");
    let mut f32 = edited("o_proj", |_| true);
    f32.matrices[1].format = ir::Format::F32;
    refused(&f32, &format!("{} is f32: run one sequence", f32.matrices[1].name));
    let mut experts = edited("o_proj", |_| true);
    experts.matrices[1].experts = 4;
    refused(&experts, &format!("{} has experts: run one sequence", experts.matrices[1].name));
    // Codes are shared as 16-bit weights are.
    for &format in ir::Format::ALL.iter().filter(|format| format.is_scaled()) {
        let mut codes = edited("o_proj", |_| true);
        codes.matrices[1].format = format;
        check_seqs(&codes, SEQS).unwrap_or_else(|e| panic!("{}: {e}", format.name()));
    }
}
