//! Simulated searches on a small measured grid with a known best point.

use std::collections::BTreeSet;
use std::fmt::Write;

use ir::ScheduleConfig;
use search::measured_grid::Grid;
use search::strategy::{MoveStats, PriorMove, StrategyName, rank, strategy};
use tests::measured_grid::{BadMeasuredGrid, Found, MeasuredGrid, point_of};

use super::play::{play, play_halving, search_space};

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
            let strategy = strategy(name, search_space(&land, seed, 64), Vec::new());
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
    let hill_climb = strategy(StrategyName::HillClimb, search_space(&land, 3, 64), Vec::new());
    let halved = play_halving(&land, &*hill_climb, 64, 0.01, 3).unwrap();
    assert_eq!((halved.best_us.len(), halved.best_us[63]), (64, best));
}

#[test]
fn what_one_search_learned_saves_the_next_one_trials() {
    let land = measured_grid("measured").unwrap();
    let hill_climb = strategy(StrategyName::HillClimb, search_space(&land, 1, 64), Vec::new());
    let first = play(&land, &*hill_climb, 64, 0.01, 1).unwrap();
    let known = rank(first.seen());
    assert!(!known.is_empty());
    let prior = strategy(StrategyName::Prior, search_space(&land, 2, 16), known);
    let second = play(&land, &*prior, 16, 0.01, 2).unwrap();
    let (_, best) = land.best().unwrap();
    assert_eq!(second.best_us[15], best);
    assert!(first.best_us[4] > best, "the first search had to look for it");
}

/// The measured grids of the corpus.
fn measured() -> Vec<MeasuredGrid> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/grids");
    let read = |name: &str| {
        let graph = model::preset(name).unwrap().graph;
        let target = ir::Target::by_name("h200").unwrap();
        let neutral = ir::schedule::neutral_config(&graph, &target);
        let text = std::fs::read_to_string(folder.join(format!("h200-{name}-128.jsonl"))).unwrap();
        let land = MeasuredGrid::read(&text, &neutral).unwrap();
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
    ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"].map(read).to_vec()
}

/// Mean regret over some seeds after `trials` trials.
fn regret(land: &MeasuredGrid, name: StrategyName, known: &[PriorMove], trials: u64) -> f64 {
    let (_, best) = land.best().unwrap();
    let one = |seed| {
        let strategy = strategy(name, search_space(land, seed, trials), known.to_vec());
        let played = play(land, &*strategy, trials, 0.01, seed).unwrap();
        played.best_us.last().unwrap() / best - 1.0
    };
    (0..2).map(one).sum::<f64>() / 2.0
}

#[test]
fn the_default_leads_where_it_was_measured_and_a_full_store_saves_three_trials_of_four() {
    let lands = measured();
    let ends = |name| -> f64 {
        let budgets = |land| [16, 32, 64].map(|trials| regret(land, name, &[], trials));
        lands.iter().flat_map(budgets).sum()
    };
    let default = ends(StrategyName::default());
    for name in [StrategyName::Random, StrategyName::Tpe] {
        assert!(ends(name) > default, "{}", name.name());
    }
    // As in docs/explanation/search.md: five searches of each model.
    let found = |land: &MeasuredGrid| -> Vec<MoveStats> {
        let one = |seed| {
            let hill_climb =
                strategy(StrategyName::HillClimb, search_space(land, seed, 64), Vec::new());
            play(land, &*hill_climb, 64, 0.01, seed).unwrap().seen()
        };
        (1000..1005).flat_map(one).collect()
    };
    let found: Vec<Vec<MoveStats>> = lands.iter().map(found).collect();
    for (held_out, land) in lands.iter().enumerate() {
        let others = found.iter().enumerate().filter(|(index, _)| *index != held_out);
        let known = rank(others.flat_map(|(_, seen)| seen.clone()));
        let full = regret(land, StrategyName::Prior, &known, 16);
        let empty = regret(land, StrategyName::Prior, &[], 64);
        assert!(full <= empty, "{}: {full} with a store, {empty} without", land.terms.model);
    }
}
