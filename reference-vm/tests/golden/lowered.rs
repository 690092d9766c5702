//! Tests of lowered programs on the machine.

use ir::schedule::{
    ActsOn, MergeGrouping, SmAssignment, default_config, legal_values, neutral_config, validate,
};
use ir::{DType, FeedForward, Knob, ScheduleConfig, Target, TensorId, Weights};
use lower::{Options, lower};
use model::{
    ExpertShape, Family, Format, Model, Quantisation, Shape, import, import_dequantised, quantise,
};
use reference_vm::Order;
use reference_vm::compare::{Summary, Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Outputs, Run};

use crate::{EXPERTS_QUANTISED, Golden, each, each_family, each_quantised, each_with_experts};

fn finished(run: Run) -> Outputs {
    match run {
        Run::Finished(outputs) => outputs,
        other @ (Run::Trapped(_) | Run::Stuck { .. }) => {
            panic!("{other:?}")
        }
    }
}

/// Lowers, runs and compares: first all tokens, then the greedy continuation.
fn check(golden: &Golden, config: ScheduleConfig, target: &Target, order: Order) {
    let summary = checked(golden, config, target, order);
    assert!(summary.max_rel_err < 1e-5, "{summary:?}");
}

/// The same, and within how much.
pub(crate) fn checked(
    golden: &Golden,
    config: ScheduleConfig,
    target: &Target,
    order: Order,
) -> Summary {
    let Golden { model, tokens, logits, greedy } = golden;
    let config = validate(config, &model.graph, target).unwrap();
    let program = lower(&config, &model.graph, target, Options { kv_capacity: 96 }).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let outputs = finished(machine.run(tokens, order).unwrap());
    let agreement =
        compare(logits, &outputs.logits, Tolerance::REFERENCE).unwrap_or_else(|d| panic!("{d}"));
    let continuation = finished(machine.greedy(greedy.len(), &[], order).unwrap());
    assert_eq!(&continuation.tokens, greedy);
    agreement.summary()
}

#[test]
fn goldens_agree_on_as_many_workers_as_a_gpu_has() {
    let target = Target::by_name("h200").unwrap();
    each(|_, golden| {
        let graph = &golden.model.graph;
        check(golden, default_config(graph, &target), &target, Order::Waves);
        check(golden, neutral_config(graph, &target), &target, Order::Waves);
    });
}

/// Runs a model with six schedules; none uses more than this part of the gate's tolerance.
fn check_schedules(name: &str, golden: &Golden, most: f64) {
    let (gpu, small) = (Target::by_name("h200").unwrap(), Target::by_name("h200").unwrap());
    let small = Target { sms: 5, ..small };
    let check = |config, target: &Target, order| {
        let summary = checked(golden, config, target, order);
        println!("{name}: {summary:?}");
        assert!(summary.max_tolerance_used < most, "{name}: {summary:?}");
    };
    let graph = &golden.model.graph;
    check(default_config(graph, &gpu), &gpu, Order::Waves);
    check(neutral_config(graph, &small), &small, Order::Seeded(3));
    let mut split = default_config(graph, &small);
    split.tiling.attention.kv_block = 32;
    split.tiling.attention.kv_split = 2;
    for merge in [MergeGrouping::OProj, MergeGrouping::Separate] {
        split.fusion_grouping.merge = merge;
        check(split, &small, Order::Reverse);
    }
    // A worker's rows end within an expert's, and those of two slots are in one task.
    for &assignment in SmAssignment::ALL {
        split.sm_assignment = assignment;
        split.tiling.gate_up.rows = 8;
        split.tiling.down.rows = 8;
        let few = Target { sms: 3, ..small.clone() };
        check(split, &few, Order::Seeded(7));
    }
}

#[test]
fn families_agree_with_every_kind_of_schedule() {
    // Large scores and caps amplify the rounding of flag-in-data words: most of the gate's tolerance is left.
    each_family(|name, golden| check_schedules(name, golden, 0.2));
}

#[test]
fn experts_agree_with_every_kind_of_schedule() {
    // The halves of a clamped expert are multiplied without a sigmoid's saturation, and amplify the same rounding more.
    each_with_experts(|name, golden| check_schedules(name, golden, 0.5));
}

/// Weights whose routers' biases decide alone.
struct Forced<'w> {
    base: &'w dyn Weights,
    routers: Vec<TensorId>,
    bias: Vec<u8>,
}

impl Weights for Forced<'_> {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        if self.routers.contains(&tensor) { &self.bias } else { self.base.bytes(tensor) }
    }
}

/// One program, every set of experts: nothing in it depends on the route.
#[test]
fn a_program_is_right_for_every_route() {
    let Golden { model, tokens, .. } = Golden::open("families", "gpt-oss-bf16");
    let (graph, target) = (&model.graph, Target::by_name("h200").unwrap());
    let target = Target { sms: 5, ..target };
    // Counters: the logits are large, and words that are flag-in-data lose four bits of them.
    let config = validate(neutral_config(graph, &target), graph, &target).unwrap();
    let program = lower(&config, graph, &target, Options { kv_capacity: 16 }).unwrap();
    let experts = graph.layers.iter().map(|layer| match &layer.mlp.body {
        FeedForward::Experts(experts) => (**experts).clone(),
        FeedForward::Gated(_) => panic!("every layer has experts"),
    });
    let experts: Vec<_> = experts.collect();
    let (count, top_k) = (experts[0].experts.len(), experts[0].top_k);
    let mut routes = 0;
    for set in (0_u32..1 << count).filter(|set| set.count_ones() == top_k) {
        // Apart by little, so that each of the chosen has a weight that counts.
        let bias = |expert| if set >> expert & 1 == 1 { 16.0 + 0.125 * expert as f32 } else { 0.0 };
        let bits = (0..count).map(bias).map(|bias: f32| (bias.to_bits() >> 16) as u16);
        let weights = Forced {
            base: &*model.weights,
            routers: experts.iter().filter_map(|experts| experts.router.bias).collect(),
            bias: bits.flat_map(u16::to_le_bytes).collect(),
        };
        let mut machine = Machine::new(&program, graph, &weights).unwrap();
        let run = finished(machine.run(&tokens[..3], Order::Seeded(u64::from(set))).unwrap());
        let mut evaluator = Evaluator::new(graph, &weights).unwrap();
        let logits = evaluator.run(&tokens[..3], Logits::All).unwrap();
        let agreement = compare(&logits, &run.logits, Tolerance::REFERENCE);
        let summary = agreement.unwrap_or_else(|d| panic!("{d}")).summary();
        assert!(summary.max_tolerance_used < 0.5, "{set:b}: {summary:?}");
        for (layer, _) in experts.iter().enumerate() {
            let name = format!("layers.{layer}.route");
            let found = program.buffers.iter().position(|buffer| buffer.name == name).unwrap();
            let words = machine.buffer(ir::BufferId(found as u32)).unwrap();
            let chosen =
                words[..top_k as usize].iter().fold(0, |all, &word| all | 1 << word as u32);
            assert_eq!(chosen, set, "{words:?}");
        }
        routes += 1;
    }
    assert_eq!(routes, 20, "3 of 6");
}

/// One expert for each position, whose columns are no whole units.
#[test]
fn one_expert_of_any_width_is_enough() {
    let target = Target { sms: 5, ..Target::by_name("h200").unwrap() };
    for (count, ffn) in [(5, 72), (2, 40), (3, 64)] {
        let mut shape = Shape { family: Family::Mixtral, ..Shape::default() };
        shape.options.experts = Some(ExpertShape {
            count,
            top_k: 1,
            ffn,
            shared: None,
            normalised: true,
            dense: Vec::new(),
        });
        let model = Model::random(shape, 11);
        let tokens: Vec<u32> = (0..12).map(|i| i * 37 % 256).collect();
        let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
        let logits = evaluator.run(&tokens, Logits::All).unwrap();
        let greedy = evaluator.greedy(4, &[]).unwrap();
        let golden = Golden { model, tokens, logits, greedy };
        check(&golden, default_config(&golden.model.graph, &target), &target, Order::Waves);
    }
}

#[test]
fn quantised_experts_agree_with_the_default_schedule() {
    let target = Target::by_name("h200").unwrap();
    for (name, _) in EXPERTS_QUANTISED {
        let golden = Golden::open("quantised", name);
        let config = default_config(&golden.model.graph, &target);
        let summary = checked(&golden, config, &target, Order::Waves);
        assert!(summary.max_tolerance_used < 0.5, "{name}: {summary:?}");
    }
}

#[test]
fn quantised_goldens_agree_with_the_default_schedule() {
    let target = Target::by_name("h200").unwrap();
    each_quantised(|_, golden| {
        let config = default_config(&golden.model.graph, &target);
        check(golden, config, &target, Order::Waves);
    });
}

/// Biases lie behind the scales of a matrix of codes, and `lm_head` may be of codes too; no golden folder has either.
#[test]
fn codes_with_biases_and_a_head_of_codes_mean_their_values() {
    let target = Target::by_name("h200").unwrap();
    for format in [Format::Fp8, Format::Int8] {
        let shape = Shape {
            family: Family::Qwen2,
            hidden: 128,
            heads: 4,
            ffn: 192,
            vocab: 300,
            dtype: DType::Bf16,
            ..Shape::default()
        };
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("codes");
        let everything = Quantisation { format, lm_head: Some(format) };
        quantise(&Model::random(shape, 5), everything, &folder).unwrap();
        let (codes, values) = (import(&folder).unwrap(), import_dequantised(&folder).unwrap());
        assert_eq!((codes.graph.dtype, values.graph.dtype), (DType::F16, DType::F32));
        assert!(
            codes.graph.layers[0].attention.body.q.bias.is_some()
                && codes.graph.lm_head_scale.is_some()
        );
        let tokens: Vec<u32> = (0..16).map(|i| i * 37 % 300).collect();
        let evaluated = |model: &Model| {
            let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
            let logits = evaluator.run(&tokens, Logits::All).unwrap();
            (logits, evaluator.greedy(8, &[]).unwrap())
        };
        let ((logits, greedy), (of_codes, same)) = (evaluated(&values), evaluated(&codes));
        let agreement = compare(&logits, &of_codes, Tolerance::REFERENCE).unwrap();
        assert!(agreement.summary().max_rel_err < 1e-5, "{:?}", agreement.summary());
        assert_eq!(greedy, same);
        let golden = Golden { model: codes, tokens, logits, greedy };
        let config = default_config(&golden.model.graph, &target);
        check(&golden, config, &target, Order::Waves);
    }
}

#[test]
fn goldens_agree_whatever_a_knob_says() {
    let target = Target { sms: 5, ..Target::by_name("h200").unwrap() };
    each(|_, golden| {
        let graph = &golden.model.graph;
        for &knob in Knob::ALL.iter().filter(|knob| knob.acts_on() == ActsOn::Program) {
            let values = legal_values(knob, graph, &target);
            for value in [values.first(), values.last()].into_iter().flatten() {
                let mut config = default_config(graph, &target);
                config.set(knob, *value).unwrap();
                if validate(config, graph, &target).is_ok() {
                    check(golden, config, &target, Order::Seeded(11));
                }
            }
        }
    });
}

#[test]
fn goldens_agree_with_every_edge_flag_in_data_and_splits_that_become_active() {
    let target = Target { sms: 7, ..Target::by_name("h200").unwrap() };
    each(|_, golden| {
        let mut config = default_config(&golden.model.graph, &target);
        for (path, value) in [("tiling.attention.kv_block", 0), ("tiling.attention.kv_split", 2)] {
            let knob = Knob::from_path(path).unwrap();
            config.set(knob, knob.values()[value]).unwrap();
        }
        for &knob in Knob::ALL {
            let path = knob.path();
            if ["sync.", "fusion_grouping."].iter().any(|start| path.starts_with(start)) {
                config.set(knob, *knob.values().last().unwrap()).unwrap();
            }
        }
        for order in [Order::Waves, Order::Reverse, Order::Seeded(5)] {
            check(golden, config, &target, order);
        }
    });
}
