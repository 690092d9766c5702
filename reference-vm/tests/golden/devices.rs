//! Schedules with one `numeric_id` give the same bits on any number of workers and devices.

use abi::{BufferKind, Opcode, SampleParams};
use ir::program::{Program, Together, Verified, check, verify};
use ir::schedule::{MergeGrouping, default_config, numeric_id, validate};
use ir::{BufferId, Knob, Rule, ScheduleConfig, Target};
use lower::{Options, lower};
use reference_vm::Order;
use reference_vm::machine::{Machine, Outputs, Run};
use reference_vm::routes::places;

use crate::{EXPERTS_QUANTISED, Golden, each, each_family, each_quantised, each_with_experts};

fn target(sms: u32, devices: u32) -> Target {
    Target { sms, ..Target::by_name("h200").unwrap() }.times(devices)
}

/// Logits and caches bit for bit, and the greedy continuation.
#[derive(PartialEq)]
struct Bits {
    logits: Vec<Vec<u32>>,
    caches: Vec<Vec<u32>>,
    tokens: Vec<u32>,
}

fn bits(golden: &Golden, config: ScheduleConfig, target: &Target, order: Order) -> Bits {
    let Golden { model, tokens, .. } = golden;
    let config = validate(config, &model.graph, target).unwrap_or_else(|v| panic!("{v}"));
    let options = Options { kv_capacity: 96 };
    let program = lower(&config, &model.graph, target, options).unwrap_or_else(|e| panic!("{e}"));
    check_shape(&program, target);
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let mut finished = |run: &dyn Fn(&mut Machine<'_>) -> Run| -> Outputs {
        match run(&mut machine) {
            Run::Finished(outputs) => outputs,
            other @ (Run::Trapped(_) | Run::Stuck { .. }) => panic!("{other:?}"),
        }
    };
    let fed = finished(&|machine| machine.run(&tokens[..tokens.len().min(12)], order).unwrap());
    let greedy = finished(&|machine| machine.greedy(4, &[], order).unwrap());
    let of = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    let layers = 0..model.graph.layers.len();
    Bits {
        logits: fed.logits.iter().map(|row| of(row)).collect(),
        caches: layers.flat_map(|n| [of(machine.keys(n)), of(machine.values(n))]).collect(),
        tokens: [fed.tokens, greedy.tokens].concat(),
    }
}

/// Every sequence of a batch runs the program with its splits on other workers of the same device, and windows are batches of one session: the
/// bits are those of one device, position by position.
#[test]
fn batches_and_windows_have_the_bits_of_one_device_on_two_and_four() {
    each(|name, golden| {
        let (graph, tokens) = (&golden.model.graph, &golden.tokens);
        let tokens = &tokens[..tokens.len().min(12)];
        for merge in [MergeGrouping::OProj, MergeGrouping::Separate] {
            let config = split(golden, merge);
            let lowered = |devices| {
                let target = target(7, devices);
                let config = validate(config, graph, &target).unwrap_or_else(|v| panic!("{v}"));
                lower(&config, graph, &target, Options { kv_capacity: 96 }).unwrap()
            };
            let Ok(alone) = Together::new(lowered(1), 8) else {
                assert_eq!(name, "llama-tied-f32", "the products of a batch are of 16 bits");
                return;
            };
            let logits = |program: &Verified<Program>, widths: &[usize], order| {
                let weights = &*golden.model.weights;
                let mut machine = Machine::new(program, graph, weights).unwrap();
                let (mut rest, mut rows) = (tokens, Vec::new());
                for &width in widths.iter().cycle() {
                    let (window, after) = rest.split_at(width.min(rest.len()));
                    if window.is_empty() {
                        break;
                    }
                    let run = machine.window(1, window, order).unwrap();
                    rows.extend(run.finished().expect("it finishes").logits);
                    rest = after;
                }
                rows
            };
            let one = logits(alone.program(), &[1], Order::Waves);
            for (devices, order) in [(2, Order::Reverse), (4, Order::Seeded(5))] {
                let together = Together::new(lowered(devices), 8).unwrap();
                for seq in [1, 2, 7] {
                    let rotated = together.seq(seq).unwrap();
                    check(&rotated).unwrap_or_else(|v| panic!("{name}, sequence {seq}: {v}"));
                    let bits = logits(&rotated, &[1], order);
                    assert!(bits == one, "{name} on {devices}, sequence {seq}");
                }
                let windows = logits(together.program(), &[5, 1, 3], order);
                assert!(windows == one, "{name} on {devices}, windows");
            }
        }
    });
}

/// Every device has the workers of one GPU, and tasks for them.
fn check_shape(program: &Program, target: &Target) {
    assert_eq!(program.topology.devices, target.devices);
    assert_eq!(program.workers.len(), (target.sms * target.devices) as usize);
    assert_eq!(program.topology.replicated.is_empty(), target.devices == 1);
    let routes: Vec<BufferId> = places(program).iter().map(|place| place.buffer).collect();
    assert!(
        program.each_has_whole(&routes),
        "a gate reads the experts that the first device chose"
    );
    let parts: Vec<BufferId> = (0..program.buffers.len() as u32).map(BufferId).collect();
    assert_eq!(program.each_has_whole(&parts), target.devices == 1);
    let queues = program.workers.chunks(target.sms as usize);
    for queue in queues {
        let mut tasks = queue.iter().flat_map(|worker| &worker.tasks);
        assert!(tasks.any(|task| task.opcode == Opcode::Matvec));
    }
}

fn split(golden: &Golden, merge: MergeGrouping) -> ScheduleConfig {
    let mut config = default_config(&golden.model.graph, &target(5, 1));
    config.tiling.attention.kv_block = 32;
    config.tiling.attention.kv_split = 2;
    config.fusion_grouping.merge = merge;
    config
}

/// The condition for everything else: the order in which a row is added up does not depend on what else its worker has.
#[test]
fn a_row_has_the_same_bits_whatever_its_worker_has_beside_it() {
    each(|name, golden| {
        let config = default_config(&golden.model.graph, &target(132, 1));
        let one = bits(golden, config, &target(132, 1), Order::Waves);
        for sms in [66, 7, 1] {
            let other = bits(golden, config, &target(sms, 1), Order::Waves);
            assert!(one == other, "{name} on {sms} workers");
        }
    });
}

#[test]
fn goldens_have_the_same_bits_on_one_two_and_four_devices() {
    each(|name, golden| {
        let whole = default_config(&golden.model.graph, &target(7, 1));
        let [fused, separate] =
            [MergeGrouping::OProj, MergeGrouping::Separate].map(|merge| split(golden, merge));
        for config in [whole, fused, separate] {
            let one = bits(golden, config, &target(7, 1), Order::Waves);
            let orders = [Order::Waves, Order::Reverse, Order::Seeded(3)];
            for (devices, order) in [2, 4, 8].into_iter().zip(orders) {
                let other = bits(golden, config, &target(7, devices), order);
                assert!(one == other, "{name} on {devices} devices, {config:?}");
            }
        }
    });
}

/// Norms of results and of all heads, windows, codes with scales.
#[test]
fn families_and_codes_have_the_same_bits_on_two_devices() {
    let check = |name: &str, golden: &Golden| {
        let config = split(golden, MergeGrouping::Separate);
        let one = bits(golden, config, &target(5, 1), Order::Waves);
        let two = bits(golden, config, &target(5, 2), Order::Seeded(1));
        assert!(one == two, "{name}");
    };
    each_family(check);
    each_quantised(check);
}

/// Each device ranks the experts by logits of all devices, and has the same rows of every expert.
#[test]
fn experts_have_the_same_bits_on_two_and_four_devices() {
    let check = |name: &str, golden: &Golden| {
        for merge in [MergeGrouping::OProj, MergeGrouping::Separate] {
            let config = split(golden, merge);
            let one = bits(golden, config, &target(5, 1), Order::Waves);
            for devices in [2, 4] {
                let other = bits(golden, config, &target(5, devices), Order::Seeded(1));
                assert!(one == other, "{name} on {devices} devices");
            }
        }
    };
    each_with_experts(check);
    for (name, _) in EXPERTS_QUANTISED {
        check(name, &Golden::open("quantised", name));
    }
}

#[test]
fn what_all_devices_read_is_never_handed_over_by_a_counter() {
    each(|_, golden| {
        let graph = &golden.model.graph;
        for path in ["sync.attention", "sync.o_proj", "sync.gate_up", "sync.down"] {
            let mut config = default_config(graph, &target(5, 2));
            let knob = Knob::from_path(path).unwrap();
            config.set(knob, knob.default()).unwrap();
            assert!(validate(config, graph, &target(5, 1)).is_ok());
            let refused = validate(config, graph, &target(5, 2)).unwrap_err();
            assert!(refused.has(Rule::SRemote), "{refused}");
            assert!(refused.to_string().contains(&format!("try {path} = flag_in_data")));
        }
    });
}

#[test]
fn the_numeric_id_is_of_what_decides_the_bits() {
    let config = ScheduleConfig::default();
    let mut other = config;
    other.tiling.down.rows = 64;
    other.pipeline.stages = 5;
    other.kernel.poll_sleep_ns = 100;
    assert_eq!(numeric_id(&config), numeric_id(&other));
    other.tiling.attention.kv_split = 4;
    assert_ne!(numeric_id(&config), numeric_id(&other));
}

/// The logits of a changed program, if it verifies and runs.
fn ran(golden: &Golden, program: Program) -> Option<Vec<Vec<f32>>> {
    let program = verify(program).ok()?;
    let mut machine = Machine::new(&program, &golden.model.graph, &*golden.model.weights).unwrap();
    let run = machine.run(&golden.tokens[..3], Order::Seeded(2)).unwrap();
    Some(run.finished().unwrap_or_else(|| panic!("a verified program does not finish")).logits)
}

/// Changes of what makes a program one of several devices. Each is refused or changes nothing.
fn mutants(right: &Program) -> Vec<(String, Program)> {
    let mut all = Vec::new();
    let mut push = |what: String, change: &dyn Fn(&mut Program)| {
        let mut program = right.clone();
        change(&mut program);
        if program != *right {
            all.push((what, program));
        }
    };
    for index in 0..right.topology.replicated.len() {
        push(format!("replica {index} is local"), &|p| {
            p.topology.replicated.remove(index);
        });
    }
    for buffer in (0..right.buffers.len() as u32).map(BufferId) {
        push(format!("{buffer} is replicated"), &|p| {
            p.topology.replicated.push(buffer);
            p.topology.replicated.sort_unstable();
            p.topology.replicated.dedup();
        });
        push(format!("{buffer} is plain"), &|p| p.buffers[buffer.index()].kind = BufferKind::Plain);
    }
    for devices in [0, 1, 3, 4, 9] {
        push(format!("{devices} devices"), &|p| p.topology.devices = devices);
    }
    let per = right.workers_per_device();
    for worker in 0..right.workers.len() {
        let other = (worker + per) % right.workers.len();
        push(format!("w{worker} and w{other} change places"), &|p| p.workers.swap(worker, other));
        for task in 0..right.workers[worker].tasks.len() {
            push(format!("w{worker}.{task} on another device"), &|p| {
                let moved = p.workers[worker].tasks.remove(task);
                let at = task.min(p.workers[other].tasks.len());
                p.workers[other].tasks.insert(at, moved);
            });
            push(format!("w{worker}.{task} is done by another device too"), &|p| {
                let twice = p.workers[worker].tasks[task].clone();
                let at = task.min(p.workers[other].tasks.len());
                p.workers[other].tasks.insert(at, twice);
            });
            push(format!("w{worker}.{task} does not wait"), &|p| {
                p.workers[worker].tasks[task].waits.clear();
            });
            push(format!("w{worker}.{task} signals nothing"), &|p| {
                p.workers[worker].tasks[task].signal = None;
            });
            push(format!("w{worker}.{task} takes a candidate less"), &|p| {
                let task = &mut p.workers[worker].tasks[task];
                if task.opcode == Opcode::Sample {
                    let SampleParams { candidates, reserved } = task.params();
                    let fewer = SampleParams { candidates: candidates - 1, reserved };
                    task.params = bytemuck::cast(fewer);
                }
            });
        }
    }
    all
}

#[test]
fn what_verify_accepts_of_changed_devices_has_the_same_bits() {
    let golden = Golden::open("golden", "qwen3-qknorm-bf16");
    let target = target(2, 2);
    for merge in [MergeGrouping::OProj, MergeGrouping::Separate] {
        let config = validate(split(&golden, merge), &golden.model.graph, &target).unwrap();
        let options = Options { kv_capacity: 96 };
        let right = lower(&config, &golden.model.graph, &target, options).unwrap().into_inner();
        let bits = ran(&golden, right.clone()).unwrap();
        let (mut accepted, mutants) = (0, mutants(&right));
        for (what, program) in &mutants {
            if let Some(logits) = ran(&golden, program.clone()) {
                accepted += 1;
                assert!(logits == bits, "{merge:?}: {what}");
            }
        }
        println!("{merge:?}: {accepted} of {} accepted", mutants.len());
        assert!(mutants.len() > 100 && accepted < mutants.len() / 4, "{accepted}");
    }
}
