//! Strategies on a measured grid given by a formula: deterministic, within the space, and better than random where they
//! should be.

use std::collections::BTreeSet;

use super::*;
use crate::propose::{TrialRecord, changes};

fn search_space(seed: u64) -> SearchSpace {
    let space = Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect();
    SearchSpace { space, seed, sweep: 20 }
}

/// Microseconds per token: every knob outside the ring that is at its default costs 2%, and the ring has no effect.
fn us(config: &ScheduleConfig) -> f64 {
    let knobs = Knob::ALL.iter().filter(|knob| !knob.path().starts_with("pipeline"));
    let bad = |knob: &&Knob| config.get(**knob) == knob.default();
    600.0 * 1.02_f64.powi(knobs.filter(bad).count() as i32)
}

/// The best time after `trials` trials in which every proposal is legal.
fn best(strategy: &dyn Strategy, trials: u64) -> f64 {
    let mut incumbent = ScheduleConfig::default();
    let base = us(&incumbent);
    let mut tried = BTreeSet::from([incumbent.id()]);
    let mut past = TrialRecords::default();
    for trial in 1..trials {
        let question = Question { trial, incumbent: &incumbent, past: &past };
        let mut new = strategy.ask(&question).filter(|(_, config)| tried.insert(config.id()));
        let (_, config) = new.next().unwrap();
        drop(new);
        let gain = 1.0 - us(&config) / us(&incumbent);
        let (kept, score) = (gain > 0.01, Some((us(&config) / base).ln()));
        let changes = changes(&incumbent, &config);
        past.push(TrialRecord { config, changes, gain: Some(gain), kept, score });
        if kept {
            incumbent = config;
        }
    }
    us(&incumbent)
}

#[test]
fn equal_questions_have_equal_answers_and_seeds_tell_searches_apart() {
    let mut other = ScheduleConfig::default();
    other.kernel.poll_sleep_ns = 0;
    let incumbent = ScheduleConfig::default();
    let changed = changes(&incumbent, &other);
    let trial = TrialRecord {
        config: other,
        changes: changed,
        gain: Some(-0.1),
        kept: false,
        score: Some(0.1),
    };
    let past: TrialRecords = std::iter::repeat_n(trial, 24).collect();
    assert!(
        "simulated annealing"
            .parse::<StrategyName>()
            .unwrap_err()
            .to_string()
            .contains("hill-climb")
    );
    for name in StrategyName::ALL {
        let asked = |seed| {
            let strategy = strategy(name, search_space(seed), Vec::new());
            let ask = |trial| {
                let question = Question { trial, incumbent: &incumbent, past: &past };
                strategy.ask(&question).take(30).collect::<Vec<_>>()
            };
            [25, 27].map(ask)
        };
        assert_eq!(asked(1), asked(1), "{}", name.name());
        assert_ne!(asked(1), asked(2), "{}", name.name());
        assert_eq!(name.name().parse(), Ok(name));
    }
}

#[test]
fn every_strategy_beats_chance_on_a_plain_slope() {
    let ends = |name: StrategyName| {
        let one = |seed| best(&*strategy(name, search_space(seed), Vec::new()), 64);
        (0..4).map(one).sum::<f64>() / 4.0
    };
    let random = ends(StrategyName::Random);
    for name in [StrategyName::HillClimb, StrategyName::Tpe] {
        let end = ends(name);
        assert!(end < 0.99 * random, "{} {end}, random {random}", name.name());
    }
}

fn seen(to: &str, tries: f64, gain_sum: f64) -> MoveStats {
    MoveStats { to: serde_json::from_str(to).unwrap(), tries, gain_sum }
}

#[test]
fn what_helped_comes_first_and_one_lucky_trial_does_not_lead() {
    let ranked = rank([
        seen(r#"{"kernel.evict": "first"}"#, 1.0, 0.03),
        seen(r#"{"tiling.qkv.rows": 8}"#, 4.0, 0.10),
        seen(r#"{"tiling.qkv.rows": 8}"#, 4.0, 0.08),
        seen(r#"{"tiling.qkv.rows": 64}"#, 3.0, -2.0),
        seen(r#"{"sync.qkv": "flag_in_data"}"#, 9.0, 0.004),
    ]);
    let names: Vec<_> = ranked.iter().flat_map(|known| known.to.keys()).collect();
    assert_eq!(names, ["tiling.qkv.rows", "kernel.evict"]);
    assert_eq!(ranked[0].to["tiling.qkv.rows"], 8);
    assert!((ranked[0].worth - 0.02).abs() < 1e-12);
}

#[test]
fn a_prior_is_tried_whole_then_in_parts_and_then_the_search_goes_on() {
    let known = rank([
        seen(r#"{"kernel.evict": "first"}"#, 1.0, 0.2),
        seen(r#"{"tiling.qkv.rows": 8}"#, 1.0, 0.1),
        seen(r#"{"no.such.knob": 8}"#, 1.0, 0.1),
    ]);
    let strategy = strategy(StrategyName::Prior, search_space(1), known);
    let incumbent = ScheduleConfig::default();
    let question = Question { trial: 1, incumbent: &incumbent, past: &TrialRecords::default() };
    let asked: Vec<_> = strategy.ask(&question).take(4).collect();
    let changed = |(_, config): &(Origin, ScheduleConfig)| {
        changes(&incumbent, config).iter().map(|c| c.knob.path()).collect::<Vec<_>>()
    };
    assert_eq!(changed(&asked[0]), ["tiling.qkv.rows", "kernel.evict"]);
    assert_eq!(changed(&asked[1]), ["kernel.evict"]);
    assert_eq!(changed(&asked[2]), ["tiling.qkv.rows"]);
    assert!(asked[..3].iter().all(|(origin, _)| *origin == Origin::Prior));
    assert_eq!(asked[3].0, Origin::Sweep);
}
