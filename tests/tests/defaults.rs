//! Tests the claims about the rule-based default and schedules of similar shapes.

use ir::program::GraphShape;
use ir::schedule::{ScheduleConfig, default_config, neutral_config, read_config};
use ir::{Graph, Target};
use tests::measured_grid::{Found, MeasuredGrid};

fn target(name: &str) -> Target {
    Target::by_name(name).expect("a target of the table")
}

fn predicted(config: &ScheduleConfig, graph: &Graph, target: &Target) -> f64 {
    let config = ir::schedule::validate(*config, graph, target);
    let config = config.unwrap_or_else(|violations| panic!("{}: {violations}", graph.name));
    let program = lower::lower(&config, graph, target, lower::Options { kv_capacity: 4096 });
    let program = program.unwrap_or_else(|error| panic!("{}: {error}", graph.name));
    lower::predict(&program, &config.kernel, target, 128).latency_us
}

/// Measured microseconds of the rule's point of a grid and of the best one. Knobs that the grid does not vary are the
/// grid's.
fn measured(model: &str) -> [f64; 2] {
    let path = format!("{}/../corpus/grids/h200-{model}-128.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (graph, target) = (model::preset(model).expect("a preset").graph, target("h200"));
    let land = MeasuredGrid::read(&text, &neutral_config(&graph, &target));
    let land = land.unwrap_or_else(|error| panic!("{path}: {error}"));
    let (space, rule) = (land.space(), default_config(&graph, &target));
    let mut config = space.config(0);
    for (knob, _) in space.axes() {
        config.set(*knob, rule.get(*knob)).expect("a value of the knob");
    }
    let us = |config: &ScheduleConfig| match land.at(config) {
        Found::Timed(_, us, _) => Some(us),
        Found::Outside | Found::Illegal | Found::Unrecorded | Found::Failed(_) => None,
    };
    let best = (0..space.points()).filter_map(|point| us(&space.config(point)));
    [us(&config).expect("the rule is a measured point"), best.fold(f64::INFINITY, f64::min)]
}

#[test]
fn the_default_is_within_two_per_cent_of_the_best_measured_points() {
    for model in ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"] {
        let [rule, best] = measured(model);
        let behind = 100.0 * (rule / best - 1.0);
        println!("{model}: {rule} us is {behind:.2} % behind {best}");
        assert!(behind < 2.0, "{model}: {rule} us is {behind:.2} % behind {best}");
    }
}

/// Leave-one-out over the presets: compares the schedule of the nearest other shape, if near enough, with the rule.
#[test]
fn a_similar_shape_is_predicted_no_worse_than_the_rule() {
    let h200 = target("h200");
    let mut taken = 0;
    for preset in model::PRESETS {
        let graph = preset.shape().graph();
        let own = GraphShape::from(&graph);
        let others = corpus::shipped(&own, &h200, 128);
        let Some(other) = others.into_iter().find(|found| !found.same_shape) else { continue };
        let config = read_config(other.shipped.schedule, &graph, &h200).expect("it fits");
        let rule = predicted(&default_config(&graph, &h200), &graph, &h200);
        let similar = predicted(&config, &graph, &h200);
        println!(
            "{} takes {} at distance {:.2}: {similar:.1} us, the rule {rule:.1}",
            preset.name, other.shipped.folder, other.distance
        );
        assert!(similar <= 1.001 * rule, "{}: {similar} us, the rule {rule}", preset.name);
        taken += 1;
    }
    assert_eq!(taken, 6, "shapes with a neighbour");
}
