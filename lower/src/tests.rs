//! Tests that every schedule of every graph lowers and verifies, and that every knob has an effect.

use abi::{BufferKind, MatvecParams, Opcode};
use ir::program::{Program, Verified};
use ir::schedule::{
    ActsOn, EmbedGrouping, Evict, Handoff, MergeGrouping, SmAssignment, Value, default_config,
    legal_values, neutral_config,
};
use ir::{DType, FeedForward, Graph, Knob, PhaseClass, Rule, ScheduleConfig, Target};
use model::{Family, Shape, Window};
use proptest::prelude::*;

use super::*;

const OPTIONS: Options = Options { kv_capacity: 1024 };

fn target(name: &str) -> Target {
    Target::by_name(name).expect("in the table")
}

fn preset(name: &str, layers: u32) -> Graph {
    let preset = model::PRESETS.iter().find(|preset| preset.name == name).expect("a preset");
    let shape = preset.shape();
    Shape { layers: layers.min(shape.layers), ..shape }.graph()
}

/// A graph in which nothing divides evenly: vocabulary, widths and MLP are odd, every layer has biases and norms, one
/// layer has a window.
fn awkward() -> Graph {
    let shape = Shape {
        name: "awkward".into(),
        family: Family::Qwen3,
        hidden: 84,
        layers: 3,
        heads: 6,
        kv_heads: 3,
        head_dim: 16,
        ffn: 100,
        vocab: 1003,
        tied: true,
        attention_bias: true,
        dtype: DType::F32,
        window: Window::Layers { window: 40, sliding: vec![false, true, false] },
        ..Shape::default()
    };
    let biased = Shape { family: Family::Llama, mlp_bias: true, ..shape.clone() }.graph();
    let mut graph = shape.graph();
    // Qwen 3 norms and Llama's biases in one graph: no family has both, but lowering supports it.
    graph.tensors.extend(biased.tensors);
    let offset = |id: ir::TensorId| ir::TensorId(id.0 + graph.tensors.len() as u32 / 2);
    for (layer, other) in graph.layers.iter_mut().zip(&biased.layers) {
        let (FeedForward::Gated(gated), Some(other)) = (&mut layer.mlp.body, other.gated()) else {
            continue;
        };
        gated.gate.bias = other.gate.bias.map(offset);
        gated.down.bias = other.down.bias.map(offset);
    }
    graph
}

/// Whether `sample` cannot run before the worker's last task has ended, at any position.
fn joined(worker: &ir::program::Worker) -> bool {
    let Some(last) = worker.tasks.last() else { return false };
    last.opcode == Opcode::Sample || last.signal.is_some()
}

fn lowered(config: ScheduleConfig, graph: &Graph, target: &Target) -> Verified<Program> {
    let config = validate(config, graph, target).unwrap_or_else(|v| panic!("{}: {v}", graph.name));
    let program =
        lower(&config, graph, target, OPTIONS).unwrap_or_else(|e| panic!("{}: {e}", graph.name));
    for (index, worker) in program.workers.iter().enumerate() {
        assert!(joined(worker), "worker {index} of {} may fall behind", graph.name);
    }
    program
}

#[test]
fn every_graph_lowers_for_every_target() {
    let graphs = [
        preset("toy", 1),
        preset("toy-2l", 2),
        preset("smollm2-135m", 2),
        preset("qwen3-0.6b", 2),
        preset("llama-3.2-1b", 2),
        awkward(),
    ];
    for graph in &graphs {
        for target in Target::all() {
            for config in [default_config(graph, &target), neutral_config(graph, &target)] {
                let program = lowered(config, graph, &target);
                assert_eq!(program.workers.len(), target.sms as usize);
            }
        }
    }
}

#[test]
fn every_byte_of_every_matrix_is_streamed_once_and_the_order_is_deterministic() {
    for graph in [preset("llama-3.2-1b", 16), preset("llama-3.1-8b", 2), awkward()] {
        let program = lowered(default_config(&graph, &target("h200")), &graph, &target("h200"));
        let again = lowered(default_config(&graph, &target("h200")), &graph, &target("h200"));
        assert_eq!(program.id(), again.id());
        let all: u64 = program.matrices.iter().map(ir::program::Matrix::bytes).sum();
        // A tied embedding is streamed as the head; an untied one is only looked up.
        let looked_up = if graph.tied() { 0 } else { program.matrices[0].bytes() };
        assert_eq!(program.stream_bytes(), all - looked_up, "{}", graph.name);
    }
}

fn tasks(program: &Program, op: Opcode) -> impl Iterator<Item = &ir::program::Task> {
    program.workers.iter().flat_map(|w| &w.tasks).filter(move |task| task.opcode == op)
}

#[test]
fn the_neutral_program_has_the_phases_of_the_contract() {
    let graph = preset("llama-3.2-1b", 16);
    let program = lowered(ScheduleConfig::default(), &graph, &target("h200"));
    assert_eq!(program.counters, 1 + 16 * 6 + 1);
    assert_eq!(tasks(&program, Opcode::Attention).count(), 16 * 8);
    assert_eq!(tasks(&program, Opcode::AttentionMerge).count(), 16 * 32);
    assert_eq!(tasks(&program, Opcode::Sample).count(), 1);
    assert_eq!(tasks(&program, Opcode::Nop).count(), 0);
    let candidates: Vec<u32> = tasks(&program, Opcode::Matvec)
        .filter(|task| task.layer == 16)
        .map(|task| task.params::<MatvecParams>().candidate)
        .collect();
    assert_eq!(candidates, (0..132).collect::<Vec<_>>());
    let names: Vec<&str> = program.matrices.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names[..3], ["embed", "layers.0.qkv", "layers.0.o"]);
}

#[test]
fn a_step_has_the_phases_of_the_table_in_their_order() {
    let graph = preset("toy", 1);
    let config = ScheduleConfig::default();
    let flow = flow::Flow::new(&config, &graph, &PackedModel::new(&graph), 64);
    let classes: Vec<_> = flow.phases.iter().map(|phase| phase.class).collect();
    // Norms of their own are in models that norm the results of their blocks; others are of experts.
    let others = [
        PhaseClass::Norm,
        PhaseClass::Router,
        PhaseClass::Route,
        PhaseClass::SharedUp,
        PhaseClass::SharedDown,
    ];
    let plain: Vec<_> =
        PhaseClass::ALL.iter().copied().filter(|class| !others.contains(class)).collect();
    assert_eq!(classes, plain);
    for (index, phase) in flow.phases.iter().enumerate() {
        assert!(flow.writer(phase.input) < Some(index), "{}", phase.class.name());
    }
    let program = lowered(config, &graph, &target("h200"));
    for class in plain {
        let mut tasks = tasks(&program, class.opcode());
        assert!(tasks.any(|task| program.phase_name(task) == class.name()), "{}", class.name());
    }
}

#[test]
fn norms_of_results_are_parts_of_the_products_that_read_them() {
    let graph = preset("gemma-3-1b", 2);
    let config = default_config(&graph, &target("h200"));
    assert_eq!(config.fusion_grouping.embed, EmbedGrouping::Separate, "the embedding has a factor");
    let flow = flow::Flow::new(&config, &graph, &PackedModel::new(&graph), 64);
    assert!(flow.phases.iter().all(|phase| phase.class != PhaseClass::Norm));
    let readers: Vec<_> = flow.phases.iter().filter(|p| p.reads_whole_residual()).collect();
    let classes: Vec<_> = readers.iter().map(|reader| (reader.class, reader.layer)).collect();
    let (up, qkv, head) = (PhaseClass::GateUp, PhaseClass::Qkv, PhaseClass::LmHead);
    assert_eq!(classes, [(up, 0), (qkv, 1), (up, 1), (head, 2)], "one behind each block");
    for (reader, next) in readers.iter().zip(&readers[1..]) {
        assert_eq!(reader.stream, next.residual, "it stores what the next one adds to");
    }
    assert_eq!(readers[3].stream, None, "nothing reads it");
    let mut fused = config;
    fused.fusion_grouping.embed = EmbedGrouping::Qkv;
    let refused = validate(fused, &graph, &target("h200")).unwrap_err();
    assert!(refused.has(Rule::SEmbed) && refused.to_string().contains("separate"), "{refused}");
}

#[test]
fn fusing_removes_phases() {
    let graph = preset("llama-3.2-1b", 2);
    let mut config = ScheduleConfig::default();
    config.fusion_grouping.embed = EmbedGrouping::Qkv;
    config.fusion_grouping.merge = MergeGrouping::OProj;
    let program = lowered(config, &graph, &target("h200"));
    assert_eq!(program.counters, 2 * 5 + 1);
    assert_eq!(tasks(&program, Opcode::Embed).count(), 0);
    assert_eq!(tasks(&program, Opcode::AttentionMerge).count(), 0);
}

/// Sets every knob that acts on the program, except those of the ring, from `pick`.
fn chosen(graph: &Graph, target: &Target, pick: &[usize]) -> ScheduleConfig {
    let mut config = neutral_config(graph, target);
    for (knob, &pick) in Knob::ALL.iter().zip(pick) {
        let ring = knob.path().starts_with("pipeline.") || knob.acts_on() == ActsOn::Kernel;
        let legal = legal_values(*knob, graph, target);
        if !ring && knob.path() != "tiling.attention.kv_block" {
            config.set(*knob, legal[pick % legal.len()]).expect("legal values are in the domain");
        }
    }
    // Sequences long enough to have blocks for every split.
    let blocks = graph.max_positions.div_ceil(config.tiling.attention.kv_split);
    config.tiling.attention.kv_block = config.tiling.attention.kv_block.min(blocks).max(32);
    if validate(config, graph, target).is_err() {
        config.tiling.attention.kv_split = 1;
    }
    config
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_combination_of_knobs_verifies(
        pick in proptest::collection::vec(0_usize..64, Knob::ALL.len()),
        which in 0_usize..5,
        gpu in 0_usize..7,
        layers in 1_u32..5,
    ) {
        let graph = match which {
            0 => preset("toy-2l", layers),
            1 => awkward(),
            2 => preset("smollm2-135m", layers),
            3 => preset("gemma-3-1b", layers),
            _ => preset("llama-3.2-1b", layers),
        };
        let target = &Target::all()[gpu];
        let config = chosen(&graph, target, &pick);
        let program = lowered(config, &graph, target);
        for position in [0, 127, 1000] {
            let prediction = predict(&program, &config.kernel, target, position);
            prop_assert!(prediction.latency_us >= prediction.bound_us);
            prop_assert!(prediction.latency_us.is_finite());
        }
    }
}

/// Tests random mixtures of hand-offs over many layers.
#[test]
fn any_mixture_of_edges_verifies_over_many_layers() {
    let graph = Shape { layers: 24, kv_heads: 4, ..Shape::default() }.graph();
    for kv_split in [1, 4] {
        for merge in MergeGrouping::ALL {
            for flag_in_data in 0..256_u32 {
                let mut config = ScheduleConfig::default();
                config.tiling.attention.kv_split = kv_split;
                config.fusion_grouping.merge = *merge;
                let syncs = Knob::ALL.iter().filter(|knob| knob.path().starts_with("sync."));
                for (bit, knob) in syncs.enumerate() {
                    let handoff = if flag_in_data >> bit & 1 == 1 {
                        Handoff::FlagInData
                    } else {
                        Handoff::Counter
                    };
                    config.set(*knob, Value::Name(handoff.name())).expect("a handoff");
                }
                let mut small = target("h200");
                small.sms = 12;
                lowered(config, &graph, &small);
            }
        }
    }
}

/// Pairs of a base config and one that differs from it in one knob, both legal.
fn variants(knob: Knob, value: Value, graph: &Graph, target: &Target) -> Vec<[ScheduleConfig; 2]> {
    let base = neutral_config(graph, target);
    let mut bases = vec![base];
    // Limits on bytes in flight need rings that hold as much, and small stages.
    let mut deep = base;
    deep.pipeline.stage_bytes = 8192;
    deep.pipeline.stages = 16;
    deep.pipeline.in_flight_bytes = 131_072;
    bases.push(deep);
    // Large stages: few of them, so that the limit and shared memory suffice.
    let mut small = base;
    small.pipeline.stages = 4;
    bases.push(small);
    let mut fine = base;
    fine.pipeline.stage_bytes = 8192;
    bases.push(fine);
    let mut shallow = base;
    shallow.pipeline.in_flight_bytes = 32_768;
    shallow.pipeline.in_flight_before_wait_bytes = 32_768;
    bases.push(shallow);
    let mut low = deep;
    low.pipeline.in_flight_before_wait_bytes = 8192;
    bases.push(low);
    bases
        .into_iter()
        .filter_map(|before| {
            let mut after = before;
            after.set(knob, value).ok()?;
            let legal = |config| validate(config, graph, target).is_ok();
            (before != after && legal(before) && legal(after)).then_some([before, after])
        })
        .collect()
}

#[test]
fn every_value_of_every_knob_changes_the_program_or_the_kernel() {
    // Buffers that two layers share alternate, which only shows with three layers.
    let graphs = [preset("llama-3.2-1b", 3), preset("smollm2-135m", 3), preset("toy", 1)];
    let target = target("h200");
    for &knob in Knob::ALL {
        for value in knob.values().into_iter().filter(|value| *value != knob.default()) {
            let mut tried = 0;
            let live = graphs.iter().any(|graph| {
                variants(knob, value, graph, &target).into_iter().any(|[before, after]| {
                    tried += 1;
                    match knob.acts_on() {
                        ActsOn::Kernel => {
                            before.kernel != after.kernel && before.kernel.id() != after.kernel.id()
                        }
                        ActsOn::Program => {
                            let id = |config| lowered(config, graph, &target).id();
                            id(before) != id(after)
                        }
                    }
                })
            });
            assert!(live, "{knob} = {value} changes nothing in {tried} pairs");
        }
    }
}

#[test]
fn kernel_knobs_leave_the_program_alone() {
    let graph = preset("llama-3.2-1b", 1);
    let before = neutral_config(&graph, &target("h200"));
    let mut after = before;
    after.kernel.evict = Evict::First;
    after.kernel.poll_sleep_ns = 0;
    let id = |config| lowered(config, &graph, &target("h200")).id();
    assert_eq!(id(before), id(after));
}

#[test]
fn limits_and_foreign_configs_are_refused_with_numbers() {
    let graph = preset("llama-3.2-1b", 1);
    let h200 = target("h200");
    let config = validate(neutral_config(&graph, &h200), &graph, &h200).expect("legal");
    for kv_capacity in [0, abi::KV_CAPACITY_MAX + 1] {
        let error = lower(&config, &graph, &h200, Options { kv_capacity }).expect_err("refused");
        let max = u64::from(abi::KV_CAPACITY_MAX);
        let actual = u64::from(kv_capacity);
        assert_eq!(error, LowerError::LimitExceeded { limit: Limit::KvCapacity, max, actual });
    }
    let mut deep = neutral_config(&graph, &h200);
    deep.pipeline.stages = 11;
    let deep = validate(deep, &graph, &h200).expect("fits an h200");
    let error = lower(&deep, &graph, &target("l40s"), OPTIONS).expect_err("does not fit an l40s");
    assert!(matches!(error, LowerError::NotValidHere(_)), "{error}");
}

fn latency(config: ScheduleConfig, graph: &Graph) -> f64 {
    let program = lowered(config, graph, &target("h200"));
    predict(&program, &config.kernel, &target("h200"), 127).latency_us
}

/// A schedule that is expected to be good on an H200.
fn tuned() -> ScheduleConfig {
    let mut config = ScheduleConfig::default();
    config.pipeline.stages = 10;
    config.pipeline.in_flight_bytes = 49_152;
    config.pipeline.in_flight_before_wait_bytes = 32_768;
    config.sm_assignment = SmAssignment::ByteBalance;
    config
}

#[test]
fn predictions_rank_as_measurements_did() {
    let graph = preset("llama-3.2-1b", 16);
    let base = latency(tuned(), &graph);
    let with = |change: &dyn Fn(&mut ScheduleConfig)| {
        let mut config = tuned();
        change(&mut config);
        latency(config, &graph)
    };
    let deep = with(&|c| {
        c.pipeline.in_flight_bytes = 131_072;
        c.pipeline.in_flight_before_wait_bytes = 131_072;
    });
    let starved = with(&|c| {
        c.pipeline.in_flight_bytes = 16_384;
        c.pipeline.in_flight_before_wait_bytes = 16_384;
    });
    let shallow = with(&|c| {
        c.pipeline.stages = 4;
    });
    let round_robin = with(&|c| c.sm_assignment = SmAssignment::RoundRobin);
    let flag_in_data = with(&|c| {
        c.sync.o_proj = Handoff::FlagInData;
        c.sync.down = Handoff::FlagInData;
    });
    println!(
        "base {base:.0} deep {deep:.0} starved {starved:.0} shallow {shallow:.0} rr {round_robin:.0} flag-in-data {flag_in_data:.0}"
    );
    assert!(deep > 0.99 * base, "more in flight than needed is no better: {deep} {base}");
    assert!(starved > base, "{starved} {base}");
    assert!(shallow >= base, "{shallow} {base}");
    assert!(round_robin >= base, "{round_robin} {base}");
    assert!(flag_in_data < base, "{flag_in_data} {base}");
    assert!((529.0..2000.0).contains(&base), "{base}");
}

/// Changes of one knob of a shipped schedule, measured on an H200 (corpus/checks): by how many percent the step is slower.
#[test]
fn changes_that_were_measured_are_predicted() {
    let qwen = include_str!("../../corpus/schedules/h200/qwen3-0.6b/128.json");
    let llama = include_str!("../../corpus/schedules/h200/llama-3.2-1b/128.json");
    let smol = include_str!("../../corpus/schedules/h200/smollm2-135m/128.json");
    let slower = |graph: &Graph, text: &str, change: &dyn Fn(&mut ScheduleConfig)| {
        let base: ScheduleConfig = serde_json::from_str(text).expect("a schedule");
        let mut changed = base;
        change(&mut changed);
        100.0 * (latency(changed, graph) / latency(base, graph) - 1.0)
    };
    // Splits without keys wait for nothing: 11.5. It was 22.
    let graph = preset("qwen3-0.6b", 28);
    let splits = slower(&graph, qwen, &|c| c.tiling.attention.kv_split = 32);
    assert!((5.0..16.0).contains(&splits), "{splits}");
    // Warps free a stage before they multiply: 2.1. It was 8.
    let graph = preset("llama-3.2-1b", 16);
    let stages = slower(&graph, llama, &|c| c.pipeline.stages = 4);
    assert!((0.0..4.0).contains(&stages), "{stages}");
    // A merge in front of the output projection waits for its splits in turn: 25.1. It was 1.1.
    let graph = preset("smollm2-135m", 30);
    let merge = slower(&graph, smol, &|c| c.tiling.attention.kv_block = 32);
    assert!((15.0..35.0).contains(&merge), "{merge}");
}

/// A group of ten query heads is attended in parts of four, four and two, on workers of their own; one of them keeps the key.
#[test]
fn wide_groups_are_attended_in_parts() {
    let shape =
        Shape { heads: 20, kv_heads: 2, head_dim: 16, hidden: 64, layers: 1, ..Shape::default() };
    let (graph, h200) = (shape.graph(), target("h200"));
    let mut config = default_config(&graph, &h200);
    config.tiling.attention.kv_split = 2;
    let config = ir::schedule::validate(config, &graph, &h200).expect("it is legal");
    let program = lower(&config, &graph, &h200, OPTIONS).expect("it lowers");
    let attention_tasks = |worker: &ir::program::Worker| {
        let tasks = worker.tasks.iter().filter(|task| task.opcode == Opcode::Attention);
        tasks.map(|task| task.params::<abi::AttentionParams>()).collect::<Vec<_>>()
    };
    let per_worker: Vec<_> = program.workers.iter().map(attention_tasks).collect();
    assert!(per_worker.iter().all(|tasks| tasks.len() <= 1));
    let mut parts: Vec<_> =
        per_worker.concat().iter().map(|p| (p.kv_head, p.part, p.split)).collect();
    parts.sort_unstable();
    let all = (0..2).flat_map(|head| (0..3).map(move |part| (head, part)));
    let all: Vec<_> =
        all.flat_map(|(head, part)| (0..2).map(move |split| (head, part, split))).collect();
    assert_eq!(parts, all);
    assert_eq!([0, 1, 2].map(|part| ir::program::part_heads(10, part)), [0..4, 4..8, 8..10]);
}

/// One half of a vector's elements is enough for long vectors of dense models, whose floats are multiplied in f16, and the ring gets the room.
#[test]
fn long_vectors_have_one_half() {
    let of = |name: &str| model::preset(name).expect("a preset").graph;
    let halves = |name| of(name).vectors().one_half;
    for one in ["qwen3-32b", "qwen3-32b-fp8", "llama-3.1-70b", "llama-3.1-70b-int4-g128"] {
        assert!(halves(one), "{one}");
    }
    for both in ["llama-3.1-8b", "llama-3.1-8b-fp8", "qwen3-30b-a3b-fp8-block", "gpt-oss-20b"] {
        assert!(!halves(both), "{both}");
    }
    let graph = of("llama-3.1-70b");
    assert_eq!((graph.dtype, graph.tensor(graph.lm_head).dtype), (DType::F16, DType::Bf16));
    let ring = |name| default_config(&of(name), &target("h200")).pipeline;
    for name in ["qwen3-32b-fp8", "qwen3-32b"] {
        assert_eq!([ring(name).stage_bytes, ring(name).stages], [32 * 1024, 5], "{name}");
    }
}

#[test]
fn workers_that_run_attention_get_fewer_tiles_in_wide_dense_models() {
    let assignment = |name: &str, devices: u32| {
        let graph = model::preset(name).unwrap_or_else(|| panic!("no {name}")).graph;
        default_config(&graph, &Target { devices, ..target("h200") }).sm_assignment
    };
    for name in ["llama-3.1-8b", "llama-3.1-8b-q4-k-m", "qwen3-32b-int4-g128", "qwen3-4b"] {
        assert_eq!(assignment(name, 1), SmAssignment::AroundAttention, "{name}");
    }
    assert_eq!(assignment("llama-3.1-8b", 2), SmAssignment::Carry, "two devices have less each");
    for name in ["llama-3.2-1b", "smollm2-135m", "qwen3-30b-a3b-fp8-block", "gpt-oss-20b"] {
        assert_eq!(assignment(name, 1), SmAssignment::Carry, "{name}");
    }
}

/// Measured in a skeleton of the kernel: 7, 9, 11 and 13 stages took 748, 739, 728 and 720 us. The rates are those of the kernel.
#[test]
fn deeper_rings_are_predicted_a_little_faster() {
    let graph = preset("llama-3.2-1b", 16);
    let mut config = tuned();
    config.fusion_grouping.embed = EmbedGrouping::Qkv;
    config.fusion_grouping.merge = MergeGrouping::OProj;
    config.sync.qkv = Handoff::FlagInData;
    config.sync.o_proj = Handoff::FlagInData;
    config.pipeline.in_flight_before_wait_bytes = 49_152;
    let times = [4, 7, 9, 11].map(|stages| {
        config.pipeline.stages = stages;
        latency(config, &graph)
    });
    assert!(times.is_sorted_by(|a, b| a > b), "{times:?}");
    assert!((600.0..900.0).contains(&times[3]), "{times:?}");
}

/// The models and hand-offs that cost the verifier most.
#[test]
fn large_models_lower() {
    let eight = model::PRESETS.iter().find(|preset| preset.name == "llama-3.1-8b");
    let eight = eight.expect("a preset").shape();
    let shape = Shape { hidden: 8192, layers: 80, heads: 64, ffn: 28_672, ..eight };
    let graph = shape.graph();
    let mut config = neutral_config(&graph, &target("h200"));
    lowered(config, &graph, &target("h200"));
    for knob in Knob::ALL.iter().filter(|knob| knob.path().starts_with("sync.")) {
        config.set(*knob, Value::Name(Handoff::FlagInData.name())).expect("a hand-off");
    }
    config.tiling.attention.kv_split = 32;
    lowered(config, &graph, &target("b200"));
}

#[test]
fn predictions_add_up_and_know_the_position() {
    let graph = preset("llama-3.2-1b", 16);
    let program = lowered(tuned(), &graph, &target("h200"));
    let at = |position| predict(&program, &tuned().kernel, &target("h200"), position);
    let (near, far) = (at(127), at(1000));
    let sum: f64 = near.phases.iter().map(|phase| phase.us).sum();
    assert!((sum - near.latency_us).abs() < 0.01 * near.latency_us, "{sum} {}", near.latency_us);
    assert!(far.latency_us > near.latency_us && far.kv_bytes > near.kv_bytes);
    assert_eq!(near.stream_bytes, program.stream_bytes());
    assert_eq!(near.kv_bytes, program.kv_bytes(127));
    let streamed: u64 = near.phases.iter().map(|phase| phase.stream_bytes).sum();
    assert_eq!(streamed, near.stream_bytes);
    assert!(near.handoffs >= 81, "{}", near.handoffs);
    assert!((near.bound_us - 529.0).abs() < 5.0, "{}", near.bound_us);
}

/// Tests the extra wait for a residual. A worker without tiles of q, k and v has not waited for the residual that its
/// output projection adds to, and the flag-in-data words in between do not order it. So it waits for the counter of the
/// residual itself, unless it wrote those rows.
#[test]
fn a_worker_waits_for_a_residual_that_it_does_not_know() {
    let mut config = ScheduleConfig::default();
    for (path, value) in [
        ("sync.qkv", "flag_in_data"),
        ("sync.attention", "flag_in_data"),
        ("sync.merge", "flag_in_data"),
        ("sync.down", "counter"),
    ] {
        let knob = Knob::ALL.iter().find(|knob| knob.path() == path).expect("a knob");
        config.set(*knob, Value::Name(value)).expect("a hand-off");
    }
    config.tiling.qkv.rows = 64; // 48 shares for 132 workers
    config.sm_assignment = SmAssignment::Carry;
    let program = lowered(config, &preset("llama-3.2-1b", 3), &target("h200"));
    let of = |task: &ir::program::Task, matrix: &str| {
        task.opcode == Opcode::Matvec
            && program.matrices[task.params::<MatvecParams>().matrix as usize].name == matrix
    };
    let mut late = 0;
    for worker in &program.workers {
        let Some(task) = worker.tasks.iter().find(|task| of(task, "layers.1.o")) else { continue };
        let knows = worker.tasks.iter().any(|task| of(task, "layers.1.qkv"));
        assert!(!knows || task.waits.is_empty());
        late += task.waits.len();
    }
    assert!(late > 10, "{late}");
    // Without these waits verification refuses the program.
    let mut racing = Program::clone(&program);
    for task in racing.workers.iter_mut().flat_map(|w| &mut w.tasks) {
        if of(task, "layers.1.o") {
            task.waits.clear();
        }
    }
    let found = ir::program::check(&racing).expect_err("the residual may be stale");
    assert!(found.has(ir::Rule::RHappens), "{found}");
}

/// A graph whose layers are codes with a scale per row; `q`, `k` and `v` have biases.
fn of_codes(stored: DType) -> Graph {
    let shape =
        Shape { hidden: 128, ffn: 192, heads: 4, family: Family::Qwen2, ..Shape::default() };
    let mut graph = shape.graph();
    let mut tensors = std::mem::take(&mut graph.tensors);
    for layer in &mut graph.layers {
        for linear in layer.linears_mut() {
            let weight = &mut tensors[linear.weight.index()];
            weight.dtype = stored;
            let (name, shape) = (format!("{}_scale", weight.name), vec![weight.shape[0]]);
            linear.scale = Some(ir::TensorId(tensors.len() as u32));
            tensors.push(ir::Tensor { name, dtype: DType::F32, shape });
        }
    }
    Graph { tensors, dtype: DType::F16, ..graph }
}

/// The violations of a program that was changed in one place, as text.
fn refused(program: &Program, change: impl FnOnce(&mut Program)) -> String {
    let mut edited = program.clone();
    change(&mut edited);
    ir::program::verify(edited).expect_err("it is refused").to_string()
}

#[test]
fn rows_of_codes_have_scales() {
    let target = target("h200");
    for &stored in DType::ALL.iter().filter(|dtype| dtype.is_scaled()) {
        let graph = of_codes(stored);
        let program = lowered(neutral_config(&graph, &target), &graph, &target);
        let of = |class: PhaseClass| {
            let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
            let mut tasks = tasks.filter(|task| program.phase_name(task) == class.name());
            tasks.next().expect("a task of every phase")
        };
        let words = |class| {
            let buffer = of(class).reads[2].map(|buffer| &program.buffers[buffer.index()]);
            buffer.map_or(0, |buffer| buffer.words)
        };
        // Scales, and behind them the biases; a 16-bit matrix has neither.
        let qkv = graph.q_width() + 2 * graph.kv_width();
        assert_eq!(words(PhaseClass::Qkv), 2 * qkv);
        assert_eq!(words(PhaseClass::GateUp), 2 * graph.ffn);
        assert_eq!(words(PhaseClass::Down), graph.hidden);
        assert_eq!(words(PhaseClass::LmHead), 0);
        // Half as many units as in 16 bits, or a quarter.
        let params: MatvecParams = of(PhaseClass::Down).params();
        let codes = stored.block().map_or(64, |block| block.codes);
        assert_eq!(params.units, graph.ffn.div_ceil(codes));
        // A stage has room for the scales that lie behind its units.
        let behind = stored.block().map_or(0, |block| block.unit_scale_bytes() as u32);
        assert_eq!(program.stage_bytes(), program.pipeline.stage_units * (512 + behind));

        let without = refused(&program, |program| {
            let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
            tasks
                .filter(|task| task.opcode == Opcode::Matvec)
                .for_each(|task| task.reads[2] = None);
        });
        assert!(without.contains("the scales"), "{without}");
        let short = refused(&program, |program| {
            let buffer = of(PhaseClass::GateUp).reads[2].expect("scales");
            let buffer = &mut program.buffers[buffer.index()];
            let ir::program::BufferSource::Vector(map) = &mut buffer.source else {
                panic!("a vector")
            };
            map.parts.pop();
            buffer.words = map.rows();
        });
        assert!(
            short.contains("the scales are layers.0.gate_up_scale with 192 words, expected 384"),
            "{short}"
        );
        let table = refused(&program, |program| program.matrices[0].format = ir::Format::Int8);
        assert!(table.contains("an embedding is read without scales"), "{table}");
        ir::program::check_seqs(&program, 8).expect("sequences share codes");
    }
}

/// A small model that norms the results of its blocks, and its program with every hand-off of this kind.
fn with_post_norms(handoff: &'static str) -> Program {
    let graph = Shape { family: Family::Gemma3, layers: 3, ..Shape::default() }.graph();
    let target = Target { sms: 8, ..target("h200") };
    let mut config = neutral_config(&graph, &target);
    for knob in Knob::ALL.iter().filter(|knob| knob.path().starts_with("sync.")) {
        config.set(*knob, Value::Name(handoff)).expect("a hand-off");
    }
    config.set(Knob::SyncEmbed, Value::Name("counter")).expect("a hand-off");
    config.tiling.qkv.rows = 64; // two shares for eight workers
    lowered(config, &graph, &target).into_inner()
}

/// The products of this phase in a layer.
fn products(
    program: &mut Program,
    class: PhaseClass,
    layer: u16,
) -> impl Iterator<Item = &mut ir::program::Task> {
    let matrix: Vec<bool> = program
        .matrices
        .iter()
        .map(|matrix| matrix.name.rsplit('.').next() == class.matrix())
        .collect();
    let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
    tasks.filter(move |task| {
        task.opcode == Opcode::Matvec
            && task.layer == layer
            && matrix[task.params::<MatvecParams>().matrix as usize]
    })
}

#[test]
fn readers_of_a_normed_result_read_and_store_the_stream_in_order() {
    let program = with_post_norms("flag_in_data");
    let one = |change: &dyn Fn(&mut ir::program::Task)| {
        refused(&program, |program| {
            products(program, PhaseClass::GateUp, 1).take(1).for_each(change)
        })
    };
    let says = |found: String, what: &str| assert!(found.contains(what), "{what:?}: {found}");
    says(one(&|task| task.writes[1] = None), "no task writes words 0..");
    says(one(&|task| task.reads[4] = task.reads[0]), "read 4 is not used by this matvec");
    says(one(&|task| task.reads[3] = None), "the residual stream is missing");
    says(one(&|task| task.reads[1] = task.reads[0]), "the norm weights is");
    says(one(&|task| task.writes[1] = task.reads[0]), "are written by");
    let residual = refused(&program, |program| {
        products(program, PhaseClass::Qkv, 1).for_each(|task| {
            let p = MatvecParams { epilogue: abi::Epilogue::Residual as u32, ..task.params() };
            task.params = ir::program::Task::new(Opcode::Matvec, 1, p).params;
        });
    });
    says(residual, "adds another");
    let weights = refused(&program, |program| {
        let mut norms = None;
        products(program, PhaseClass::GateUp, 1).for_each(|task| norms = task.reads[1]);
        let buffer = &mut program.buffers[norms.expect("norms").index()];
        let ir::program::BufferSource::Vector(map) = &mut buffer.source else { panic!("a vector") };
        map.parts[1].1 -= 8;
        buffer.words = map.rows();
    });
    says(weights, "norm weights, expected");
    // A stream that is stored as plain words is ordered by nothing.
    let plain = refused(&program, |program| {
        let mut stored = None;
        products(program, PhaseClass::GateUp, 1)
            .for_each(|task| stored = stored.or(task.writes[1]));
        program.buffers[stored.expect("it stores the stream").index()].kind = BufferKind::Plain;
    });
    says(plain, "R-HAPPENS");
    // A worker without tiles of q, k and v learns from no other counter that the embedding is there.
    let early = refused(&program, |program| {
        products(program, PhaseClass::GateUp, 0).for_each(|task| task.waits.clear());
    });
    says(early, "R-HAPPENS");
    let counters = with_post_norms("counter").counters;
    assert!(counters > 3 * 4, "{counters}");
}

/// Every element of the stream is stored by one task, whatever the shapes.
#[test]
fn parts_of_the_stream_cover_it() {
    for (rows, k_len) in [(16, 2560), (20480, 2560), (4096, 64), (24, 20), (8, 4), (1000, 36)] {
        let tiles = u32::div_ceil(rows, 8);
        let mut next = 0;
        for tile0 in 0..tiles {
            let p = MatvecParams { rows, k_len, tile0, tiles: 1, ..MatvecParams::default() };
            let part = ir::program::stream_part(&p);
            assert_eq!(part.start, next, "{rows} rows, {k_len} elements, tile {tile0}");
            next = part.end;
        }
        assert_eq!(next, k_len, "{rows} rows");
    }
}
