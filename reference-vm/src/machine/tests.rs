mod plan;
mod shared;
mod windows;

use std::path::Path;

use abi::{AttentionParams, MatvecParams, Opcode};
use ir::program::verify;
use model::{Family, Model, Shape, Window};
use plan::Plan;

use super::*;
use crate::compare::{Tolerance, What, compare};
use crate::eval::{Evaluator, Logits};

const ORDERS: [Order; 5] =
    [Order::Waves, Order::Queue, Order::Reverse, Order::Seeded(1), Order::Seeded(2)];

/// Small models that cover all differences between the families.
fn models() -> Vec<Model> {
    let qwen3 =
        Shape { family: Family::Qwen3, attention_bias: true, layers: 2, ..Shape::default() };
    let sliding = Window::Layers { window: 5, sliding: vec![true, false] };
    // Rows, columns and heads that are not multiples of 8, of units or of the number of workers.
    let odd = Shape {
        family: Family::Llama,
        hidden: 60,
        heads: 3,
        kv_heads: 1,
        ffn: 100,
        vocab: 131,
        tied: true,
        mlp_bias: true,
        dtype: ir::DType::F16,
        ..Shape::default()
    };
    let mistral = Shape {
        family: Family::Mistral,
        dtype: ir::DType::F32,
        layers: 2,
        window: sliding,
        ..Shape::default()
    };
    [qwen3, odd, mistral]
        .into_iter()
        .zip(1..)
        .map(|(shape, seed)| Model::random(shape, seed))
        .collect()
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 37 % 131).collect()
}

fn outputs(run: Run) -> Outputs {
    match run {
        Run::Finished(outputs) => outputs,
        other @ (Run::Trapped(_) | Run::Stuck { .. }) => {
            panic!("{other:?}")
        }
    }
}

/// Checks logits, caches and a continuation against the evaluated graph, and returns the logits.
fn agree(model: &Model, plan: Plan, order: Order, n: u32) -> Vec<Vec<f32>> {
    let program = plan::program(&model.graph, plan);
    let program = verify(program).unwrap_or_else(|violations| panic!("{plan:?}: {violations}"));
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
    let expected = evaluator.run(&tokens(n), Logits::All).unwrap();
    let outputs = outputs(machine.run(&tokens(n), order).unwrap());
    let mut agreement = compare(&expected, &outputs.logits, Tolerance::REFERENCE).unwrap();
    let width = model.graph.kv_width() as usize;
    for layer in 0..model.graph.layers.len() {
        let pairs = [
            (What::Keys(layer as u32), evaluator.keys(layer), machine.keys(layer)),
            (What::Values(layer as u32), evaluator.values(layer), machine.values(layer)),
        ];
        for (what, want, got) in pairs {
            let (want, got) = (want.chunks_exact(width), got.chunks_exact(width));
            agreement = agreement.and_values(what, want, got, Tolerance::REFERENCE).unwrap();
        }
    }
    assert!(agreement.summary().max_rel_err < 2e-5, "{plan:?}: {:?}", agreement.summary());
    let greedy = machine.greedy(6, &[], order).unwrap();
    assert_eq!(self::outputs(greedy).tokens, evaluator.greedy(6, &[]).unwrap(), "{plan:?}");
    outputs.logits
}

#[test]
fn every_model_and_edge_agrees_with_the_graph() {
    for model in models() {
        for flag_in_data in [false, true] {
            for (fuse_merge, fuse_embed, workers) in
                [(false, false, 3), (true, true, 1), (true, false, 7)]
            {
                let plan =
                    Plan { flag_in_data, fuse_merge, fuse_embed, workers, ..Plan::default() };
                agree(&model, plan, Order::Waves, 30);
            }
        }
    }
}

#[test]
fn orders_do_not_change_bits() {
    for model in models() {
        for flag_in_data in [false, true] {
            let plan = Plan { flag_in_data, workers: 5, splits: 3, kv_block: 4, ..Plan::default() };
            let [first, rest @ ..] = ORDERS.map(|order| agree(&model, plan, order, 12));
            for logits in rest {
                assert_eq!(logits, first);
            }
        }
    }
}

#[test]
fn splits_agree_before_and_after_they_become_active() {
    for model in models() {
        for (splits, kv_block) in [(1, 128), (2, 3), (8, 1), (32, 2)] {
            agree(&model, Plan { splits, kv_block, ..Plan::default() }, Order::Seeded(7), 26);
        }
    }
}

#[test]
fn goldens_agree() {
    for name in [
        "llama-tied-f32",
        "llama3-rope-bf16",
        "mistral-f16",
        "qwen2-bias-bf16",
        "qwen3-qknorm-bf16",
    ] {
        let model = model::import(
            &Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name),
        )
        .unwrap();
        agree(&model, Plan::default(), Order::Waves, 48);
        agree(
            &model,
            Plan { flag_in_data: true, fuse_merge: true, ..Plan::default() },
            Order::Reverse,
            48,
        );
    }
}

#[test]
fn sequences_can_be_cut_and_started_again() {
    let model = &models()[0];
    let program = verify(plan::program(&model.graph, Plan::default())).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let first = outputs(machine.run(&tokens(10), Order::Waves).unwrap());
    machine.truncate(4);
    assert_eq!(machine.positions(), 4);
    assert_eq!(machine.greedy(1, &[], Order::Waves), Err(InputError::NothingFed.into()));
    let again = outputs(machine.run(&tokens(10)[4..], Order::Queue).unwrap());
    assert_eq!(again.logits, first.logits[4..]);
    machine.reset();
    assert_eq!(outputs(machine.run(&tokens(10), Order::Waves).unwrap()), first);
}

#[test]
fn what_cannot_be_run_is_an_error() {
    let models = models();
    let program =
        verify(plan::program(&models[0].graph, Plan { capacity: 8, ..Plan::default() })).unwrap();
    let machine = |model: &'static Model| Machine::new(&program, &model.graph, &*model.weights);
    let models: &'static Vec<Model> = Box::leak(Box::new(models));
    assert_eq!(machine(&models[1]).err(), Some(MachineError::Dims));
    let mut machine = machine(&models[0]).unwrap();
    let vocab = models[0].graph.vocab;
    assert_eq!(
        machine.run(&[vocab], Order::Waves),
        Err(InputError::Token { token: vocab, vocab }.into())
    );
    let full = InputError::Capacity { positions: 9, capacity: 8 }.into();
    assert_eq!(machine.run(&[0; 9], Order::Waves), Err(full));
    assert!(machine.run(&[0], Order::Queue).unwrap().finished().is_some());
}

/// Runs a program that verification would refuse. A machine that stopped in the middle of a step runs nothing until it
/// is reset.
fn broken(edit: impl Fn(&mut Program), plan: Plan, order: Order) -> Run {
    let model = &models()[0];
    let mut program = plan::program(&model.graph, plan);
    edit(&mut program);
    let mut machine = Machine::bind(&program, &model.graph, &*model.weights).unwrap();
    let run = machine.run(&tokens(12), order).unwrap();
    if !matches!(run, Run::Finished(_)) {
        assert_eq!(machine.run(&[0], order), Err(MachineError::Halted));
        machine.reset();
        assert_eq!(machine.run(&tokens(12), order), Ok(run.clone()));
    }
    run
}

fn trapped(run: Run) -> Trap {
    match run {
        Run::Trapped(trap) => trap,
        other @ (Run::Finished(_) | Run::Stuck { .. }) => {
            panic!("{other:?}")
        }
    }
}

fn tasks(program: &mut Program, opcode: Opcode) -> impl Iterator<Item = &mut ir::program::Task> {
    program
        .workers
        .iter_mut()
        .flat_map(|worker| &mut worker.tasks)
        .filter(move |task| task.opcode == opcode)
}

#[test]
fn missing_waits_read_what_is_not_written() {
    let edit =
        |program: &mut Program| tasks(program, Opcode::Matvec).for_each(|task| task.waits.clear());
    let traps = ORDERS
        .map(|order| trapped(broken(edit, Plan { workers: 4, ..Plan::default() }, order)).fault);
    assert!(traps.iter().all(|fault| matches!(fault, Fault::Unwritten { .. })), "{traps:?}");
    // A read of flag-in-data words is its own wait.
    let run = broken(
        edit,
        Plan { flag_in_data: true, fuse_merge: false, splits: 1, ..Plan::default() },
        Order::Seeded(3),
    );
    assert!(run.finished().is_some());
}

#[test]
fn wrong_counts_and_words_that_nobody_writes_are_stuck() {
    let edit = |program: &mut Program| program.workers[1].tasks[2].waits[0].count += 1;
    let Run::Stuck { waiting } = broken(edit, Plan::default(), Order::Queue) else {
        panic!("not stuck")
    };
    assert_eq!(waiting.len(), 3);
    assert!(
        waiting[1].to_string().starts_with("worker w1, task 2 waits for counter c"),
        "{}",
        waiting[1]
    );

    let edit = |program: &mut Program| {
        let words = program.buffers[1].words;
        let other = program
            .buffers
            .iter()
            .rposition(|s| (s.kind, s.words) == (abi::BufferKind::FlagInData, words));
        let other = other.map(|buffer| BufferId(buffer as u32));
        tasks(program, Opcode::Embed).for_each(|task| task.writes[0] = other);
    };
    let Run::Stuck { waiting } =
        broken(edit, Plan { flag_in_data: true, ..Plan::default() }, Order::Waves)
    else {
        panic!("not stuck")
    };
    let on = On::Word { buffer: BufferId(1), word: 0, have: 0, need: 1 };
    assert_eq!(waiting[0], Waiting { worker: WorkerId(0), task: 1, on });
}

#[test]
fn a_step_ends_once_and_last() {
    let fault = |edit: fn(&mut Program), order| trapped(broken(edit, Plan::default(), order)).fault;
    let nop = |program: &mut Program| {
        let nop = ir::program::Task::new(Opcode::Nop, 0, abi::NopParams { reserved: [0; 16] });
        let last = program
            .workers
            .iter()
            .position(|worker| worker.tasks.last().unwrap().opcode == Opcode::Sample);
        program.workers[last.unwrap()].tasks.push(nop);
    };
    assert_eq!(fault(nop, Order::Waves), Fault::EarlyEnd(1));
    let none = |program: &mut Program| {
        tasks(program, Opcode::Sample).for_each(|task| {
            let nop = ir::program::Task::new(Opcode::Nop, 0, abi::NopParams { reserved: [0; 16] });
            *task = ir::program::Task { waits: task.waits.clone(), ..nop };
        });
    };
    assert_eq!(fault(none, Order::Queue), Fault::NoEnd);
}

#[test]
fn caches_are_appended_once() {
    let fault = |edit: fn(&mut Program)| {
        trapped(broken(edit, Plan { splits: 1, ..Plan::default() }, Order::Queue))
    };
    let twice = |program: &mut Program| {
        let task = tasks(program, Opcode::Attention).next().unwrap().clone();
        let signal = task.signal.unwrap();
        program.workers[0].tasks.iter_mut().flat_map(|task| &mut task.waits).for_each(|wait| {
            wait.count += u32::from(wait.counter == signal);
        });
        let at = program.workers[0]
            .tasks
            .iter()
            .position(|task| task.opcode == Opcode::Attention)
            .unwrap();
        program.workers[0].tasks.insert(at, task);
    };
    let trap = fault(twice);
    assert!(matches!(trap.fault, Fault::KeyTwice { position: 0, .. }), "{trap}");
}

/// Sets every parameter of every op to an impossible value: the result is a trap, a disagreement or an error, never a
/// panic.
#[test]
fn absurd_parameters_never_panic() {
    let model = &models()[0];
    let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
    let expected = evaluator.run(&tokens(12), Logits::All).unwrap();
    let whole = plan::program(&model.graph, Plan { fuse_merge: false, ..Plan::default() });
    let mut accepted = 0;
    for opcode in Opcode::ALL {
        for word in 0..16 {
            for value in [0, 1, 3, 1 << 16, u32::MAX - 1, u32::MAX] {
                let mut program = whole.clone();
                let Some(task) = tasks(&mut program, *opcode).last() else { continue };
                if task.params[word] == value {
                    continue;
                }
                task.params[word] = value;
                let mut machine = Machine::bind(&program, &model.graph, &*model.weights).unwrap();
                let run = machine.run(&tokens(12), Order::Queue).unwrap();
                let same = run.finished().is_some_and(|outputs| {
                    compare(&expected, &outputs.logits, Tolerance::REFERENCE).is_ok()
                });
                accepted += usize::from(same);
            }
        }
    }
    // Accepted: parameters of another prologue, windows and splits that a short sequence does not reach, a tiny
    // epsilon.
    assert!(accepted < 40, "{accepted} edits change nothing");
}

#[test]
fn parameters_that_verification_lets_through_change_the_result() {
    let model = &models()[0];
    let expected = Evaluator::new(&model.graph, &*model.weights)
        .unwrap()
        .run(&tokens(12), Logits::All)
        .unwrap();
    let differs = |edit: &dyn Fn(&mut Program)| {
        let Run::Finished(outputs) = broken(edit, Plan::default(), Order::Waves) else {
            panic!("did not finish")
        };
        assert!(compare(&expected, &outputs.logits, Tolerance::REFERENCE).is_err());
    };
    differs(&|program| {
        tasks(program, Opcode::Attention).for_each(|task| {
            let p: AttentionParams = task.params();
            task.params = bytemuck::cast(AttentionParams { scale: p.scale * 1.01, ..p });
        });
    });
    differs(&|program| {
        tasks(program, Opcode::Matvec).for_each(|task| {
            let p: MatvecParams = task.params();
            task.params = bytemuck::cast(MatvecParams { eps: p.eps + 0.01, ..p });
        });
    });
    differs(&|program| {
        tasks(program, Opcode::Attention).for_each(|task| task.reads[1] = task.reads[2])
    });
    differs(&|program| tasks(program, Opcode::Matvec).for_each(|task| task.reads[2] = None));
}

/// `verify` orders the accesses that `ir::program::accesses` lists. No task may access more.
#[test]
fn tasks_touch_what_verification_orders() {
    for model in models() {
        for (flag_in_data, fuse_merge) in [(false, true), (true, false)] {
            let plan = Plan { flag_in_data, fuse_merge, splits: 3, kv_block: 2, ..Plan::default() };
            let program = plan::program(&model.graph, plan);
            let mut machine = Machine::bind(&program, &model.graph, &*model.weights).unwrap();
            for position in 0..9 {
                let step = Step {
                    token: position,
                    position,
                    epoch: position + 1,
                    device: 0,
                    seq: 0,
                    before: 0,
                };
                machine.epoch = step.epoch;
                machine.memory.begin(step, 1);
                fire_all(&mut machine, step, &|task, inputs, effects| {
                    let declared = ir::program::accesses(&program, task);
                    let within = |regions: &[ir::program::Region],
                                  buffer: BufferId,
                                  start: u32,
                                  len: usize| {
                        let inside = |region: &ir::program::Region| {
                            region.buffer == buffer
                                && region.start <= start
                                && start as usize + len <= region.end as usize
                        };
                        assert!(
                            regions.iter().any(inside),
                            "{task:?}: {start}..+{len} of {buffer}"
                        );
                    };
                    for span in inputs {
                        let kind = program.buffers[span.buffer.index()].kind;
                        if kind != abi::BufferKind::Embedding {
                            within(&declared.reads, span.buffer, span.start, span.len as usize);
                        }
                    }
                    for (buffer, start, words) in &effects.writes {
                        within(&declared.writes, *buffer, *start, words.len());
                    }
                });
            }
        }
    }
}

fn fire_all(
    machine: &mut Machine<'_>,
    step: Step,
    check: &dyn Fn(&ir::program::Task, &[Span], &Effects),
) {
    let program = machine.program;
    let mut workers: Vec<Progress> = program.workers.iter().map(|_| Progress::default()).collect();
    let mut left = program.task_len();
    while left > 0 {
        for worker in 0..workers.len() {
            if !machine.poll(worker, &mut workers[worker], &[step]).is_ok_and(|ready| ready) {
                continue;
            }
            let fired =
                machine.fire(&[worker], &workers, &[step]).ok().and_then(|mut all| all.pop());
            let (_, effects) = fired.expect("a verified program does not trap");
            let progress = &mut workers[worker];
            let task = &program.workers[worker].tasks[progress.task];
            check(task, progress.inputs.as_deref().unwrap_or_default(), &effects[0]);
            assert!(machine.commit(worker, progress, &effects, &[step]).is_ok());
            left -= 1;
        }
    }
}

/// Resuming from a cache gives the same bits as filling it.
#[test]
fn resuming_goes_on_with_the_same_bits() {
    for model in &models() {
        let program = verify(plan::program(&model.graph, Plan::default())).unwrap();
        let new = || Machine::new(&program, &model.graph, &*model.weights).unwrap();
        let mut whole = new();
        outputs(whole.run(&tokens(9), Order::Waves).unwrap());
        let layers = 0..model.graph.layers.len();
        let cache: Vec<_> =
            layers.map(|l| (whole.keys(l).to_vec(), whole.values(l).to_vec())).collect();
        let want = outputs(whole.run(&tokens(3), Order::Waves).unwrap());
        let mut other = new();
        outputs(other.run(&tokens(2), Order::Waves).unwrap());
        other.resume(9, &cache).unwrap();
        assert_eq!(other.positions(), 9);
        assert_eq!(other.greedy(1, &[], Order::Waves), Err(InputError::NothingFed.into()));
        assert_eq!(outputs(other.run(&tokens(3), Order::Waves).unwrap()), want);
        assert_eq!(other.resume(8, &cache), Err(InputError::Cache(8).into()));
        assert_eq!(other.resume(9, &cache[1..]), Err(InputError::Cache(9).into()));
        let capacity = program.kv_capacity as usize;
        let full = InputError::Capacity { positions: capacity + 1, capacity }.into();
        assert_eq!(other.resume(capacity + 1, &cache), Err(full));
    }
}

/// A defect affects only its layer, and only if requested.
#[test]
fn a_defect_is_in_its_layer() {
    let model = &models()[0];
    let program = verify(plan::program(&model.graph, Plan::default())).unwrap();
    let values = |defect: Option<(Defect, Option<u16>)>| {
        let machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
        let mut machine = match defect {
            Some((defect, layer)) => machine.with_defect(defect, layer),
            None => machine,
        };
        outputs(machine.run(&tokens(4), Order::Waves).unwrap());
        [0, 1].map(|layer| machine.values(layer).to_vec())
    };
    let right = values(None);
    for (layer, spoiled) in
        [(Some(0), [true, true]), (Some(1), [false, true]), (Some(7), [false; 2])]
    {
        let wrong = values(Some((Defect::TurnedValues, layer)));
        assert_eq!([0, 1].map(|l| wrong[l] != right[l]), spoiled, "{layer:?}");
    }
}
