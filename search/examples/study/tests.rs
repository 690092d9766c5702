//! Simulated searches on a small measured grid with a known best point.

use std::collections::BTreeSet;
use std::fmt::Write;

use ir::ScheduleConfig;
use search::measured_grid::Grid;
use search::strategy::{Known, StrategyName, strategy};
use tests::measured_grid::{BadMeasuredGrid, Found, MeasuredGrid, point_of};

use super::play::{play, search_space};
use super::{ALONE, Land, after, alone, arrivals, ends, with_store};

/// A measured grid in which flag-in-data hand-offs, rows of 8 and no sleep are good, two stages are illegal, and one point failed.
fn measured_grid(latency: &str) -> Result<MeasuredGrid, BadMeasuredGrid> {
    let axes = r#"{"sync.qkv": ["counter", "flag_in_data"], "sync.down": ["counter", "flag_in_data"], "tiling.qkv.rows": [8, 16, 32],
        "tiling.down.rows": [8, 16], "kernel.poll_sleep_ns": [0, 20], "pipeline.stages": [2, 8], "sm_assignment": ["round_robin", "carry"]}"#
        .replace('\n', "");
    let grid = format!(r#"{{"schema": "amk.grid.v1", "base": {{}}, "axes": {axes}}}"#);
    let mut text = format!(
        r#"{{"schema": "amk.measured_grid.v1", "latency_kind": "measured-gpu", "model": "m", "graph_id": "g", "target": "h200", "conditions": null, "kv_capacity": 1, "context": 128, "timed_tokens": 8, "rounds": 2, "seed": 0, "bandwidth": null, "grid": {grid}, "shard": [0, 1]}}"#
    );
    text.push('\n');
    let neutral = ScheduleConfig::default();
    let grid: Grid = serde_json::from_str(&grid).unwrap();
    let space = grid.space(&neutral).unwrap();
    for point in 0..space.points() {
        let config = space.config(point);
        let answer = if config.pipeline.stages == 2 {
            r#""illegal": ["S-RING"]"#.to_owned()
        } else if point == 50 {
            r#""failed": {"outcome": "trapped", "why": "it waited"}"#.to_owned()
        } else {
            let bad = |knob: &&(ir::Knob, Vec<ir::schedule::Value>)| {
                config.get(knob.0) == knob.0.default()
            };
            let us = 100.0 * 1.05_f64.powi(space.axes().iter().filter(bad).count() as i32);
            format!(
                r#""{latency}": {{"program_id": "{point}", "kernel_id": "k", "us": {us}, "blocks_us": [{us}, {us}], "sm_mhz": null}}"#
            )
        };
        writeln!(text, r#"{{"point": {point}, {answer}}}"#).unwrap();
    }
    MeasuredGrid::read(&text, &neutral)
}

#[test]
fn what_was_recorded_is_read_back_and_kinds_do_not_mix() {
    let land = measured_grid("measured").unwrap();
    let (best, us) = land.best().unwrap();
    assert!((us - 105.0).abs() < 1e-9, "the neutral number of stages counts as bad: {us}");
    assert_eq!(land.at(&best), Found::Timed(point_of(land.space(), &best).unwrap(), us, &[us, us]));
    let mut outside = best;
    outside.kernel.poll_sleep_ns = 100;
    assert_eq!(land.at(&outside), Found::Outside);
    assert_eq!(land.counts().iter().sum::<usize>(), land.space().points() as usize);
    assert_eq!(land.counts()[2..], [1, 96, 0]);
    assert!(measured_grid("predicted").is_err());
}

#[test]
fn played_searches_are_deterministic_and_find_the_best_point() {
    let land = measured_grid("measured").unwrap();
    let (_, best) = land.best().unwrap();
    for name in StrategyName::ALL {
        let run = |seed| {
            let strategy = strategy(name, search_space(&land, seed, 64), Known::default());
            play(&land, &*strategy, 64, 0.01, seed).unwrap()
        };
        let played = run(3);
        assert_eq!(played, run(3), "{}", name.name());
        assert_eq!(played.best_us.len(), 64);
        assert!(played.best_us.windows(2).all(|pair| pair[1] <= pair[0]), "{}", name.name());
        // Illegal proposals cost no trial: each of 63 is a point of its own.
        assert_eq!(played.past.len(), 63, "{}", name.name());
        let ids: BTreeSet<_> = played.past.iter().map(|past| past.config.id()).collect();
        assert_eq!(ids.len(), 63);
        if name != StrategyName::Random {
            assert_eq!(played.best_us[63], best, "{}", name.name());
        }
    }
}

/// The measured grids of the corpus.
fn measured() -> Vec<Land> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/grids");
    let read = |name: &str| {
        let graph = model::preset(name).unwrap().graph;
        let target = ir::Target::by_name("h200").unwrap();
        let land = super::read(&folder.join(format!("h200-{name}-128.jsonl")));
        let grid = std::fs::read_to_string(folder.join(format!("{name}.grid.json"))).unwrap();
        assert_eq!(land.terms.grid, serde_json::from_str(&grid).unwrap());
        for point in 0..land.space().points() {
            // The points that were illegal when recorded are illegal now, and no others.
            let config = land.space().config(point);
            let legal = ir::schedule::validate(config, &graph, &target).is_ok();
            assert_eq!(legal, land.at(&config) != Found::Illegal, "{name}, point {point}");
        }
        land
    };
    ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"].map(read).into()
}

/// The first seeds of the study.
const FEW: u64 = 4;

#[test]
fn the_residual_model_leads_and_a_store_of_other_models_saves_three_trials_of_four() {
    let lands = measured();
    let few = |name| alone(&lands, name, 0..FEW);
    let ends: Vec<f64> = ALONE.into_iter().map(|name| ends(&few(name))).collect();
    assert!(ends[2] < ends[1] && ends[1] < ends[0], "random, hill-climb, residual: {ends:?}");
    let stored = with_store(&lands, "store", 1000..1001, 0..FEW);
    for (index, land) in lands.iter().enumerate() {
        let worst = |trials| after(&stored, index, trials, true).pop().unwrap();
        let model = &land.terms.model;
        assert!(worst(16) < 0.01, "{model}: {} after 16 trials", worst(16));
        assert!(worst(64) < 0.005, "{model}: {} after 64 trials", worst(64));
        // The upper of the two in the middle; hill climbing takes 15 to 19.
        let trials = arrivals(&stored, index)[FEW as usize / 2];
        assert!(trials <= 8.0, "{model}: {trials} trials until the incumbent is within 1%");
    }
}
