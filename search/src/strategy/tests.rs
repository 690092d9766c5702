//! Strategies on a measured grid given by a formula: deterministic, within the space, and better than random where they
//! should be.

use std::collections::BTreeSet;

use ir::program::{Dims, GraphShape};

use super::*;
use crate::propose::{TrialRecord, changes};

fn search_space(seed: u64) -> SearchSpace {
    let space = Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect();
    SearchSpace { space, seed, sweep: 20, short: false }
}

/// Microseconds per token: every knob outside the ring that is at its default costs 2%, and the ring has no effect.
fn us(config: &ScheduleConfig) -> f64 {
    let knobs = Knob::ALL.iter().filter(|knob| !knob.path().starts_with("pipeline"));
    let bad = |knob: &&Knob| config.get(**knob) == knob.default();
    600.0 * 1.02_f64.powi(knobs.filter(bad).count() as i32)
}

/// The best schedule after `trials` trials in which every proposal is legal.
fn best(
    strategy: &dyn Strategy,
    trials: u64,
    mut incumbent: ScheduleConfig,
    us: impl Fn(&ScheduleConfig) -> f64,
) -> ScheduleConfig {
    let (base, mut least) = (us(&incumbent), incumbent);
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
        if us(&config) < us(&least) {
            least = config;
        }
        if kept {
            incumbent = config;
        }
    }
    least
}

/// On a card a task of 16 rows took less than those of 8 and of 32, and a search whose regression is linear in the number of
/// rows never tried it (docs/lab/2026-11-23-residual-model.md).
#[test]
fn a_value_between_two_worse_ones_is_found() {
    let rows = |config: &ScheduleConfig| config.get(Knob::TilingGateUpRows);
    let bent = |config: &ScheduleConfig| {
        let worse = match rows(config) {
            Value::Number(16) => 1.0,
            Value::Number(8) => 1.06,
            Value::Number(_) | Value::Name(_) => 1.1,
        };
        Slope.us(config).unwrap() * worse
    };
    let eight = with_eight_rows(&ScheduleConfig::default());
    let found = (0..8).filter(|&seed| {
        // Predictions that know nothing of it.
        let known = Known { predictions: Some(Arc::new(Slope)), runs: Vec::new() };
        let strategy = strategy(StrategyName::Residual, search_space(seed), known);
        rows(&best(&*strategy, 64, eight, bent)) == Value::Number(16)
    });
    assert!(found.count() >= 4, "none is found by a regression that is linear in numbers");
}

fn with_eight_rows(config: &ScheduleConfig) -> ScheduleConfig {
    let mut config = *config;
    config.set(Knob::TilingGateUpRows, Value::Number(8)).unwrap();
    config
}

/// Predictions of the plain slope that know nothing of these rows.
#[derive(Debug)]
struct Slope;

impl Predictions for Slope {
    fn us(&self, config: &ScheduleConfig) -> Option<f64> {
        Some(us(&with_eight_rows(config)))
    }
}

/// Two knobs gain only together, and predictions know it: a short search finds it with its first proposal, since a second
/// round starts where the first ended (docs/lab/2026-11-25-sixteen-trials-again.md).
#[test]
fn a_short_search_finds_in_one_trial_what_gains_after_another_change() {
    let later = |config: &ScheduleConfig| {
        let rows = config.get(Knob::TilingGateUpRows) == Value::Number(16);
        let joined = config.get(Knob::TilingQkvRows) != Knob::TilingQkvRows.default();
        us(config)
            * if rows && joined {
                0.8
            } else if rows {
                1.2
            } else {
                1.0
            }
    };
    #[derive(Debug)]
    struct Of(fn(&ScheduleConfig) -> f64);
    impl Predictions for Of {
        fn us(&self, config: &ScheduleConfig) -> Option<f64> {
            Some(self.0(config))
        }
    }
    let first = |short: bool, seed: u64| {
        let known = Known { predictions: Some(Arc::new(Of(later))), runs: Vec::new() };
        let space = SearchSpace { short, ..search_space(seed) };
        later(&best(
            &*strategy(StrategyName::Residual, space, known),
            2,
            ScheduleConfig::default(),
            later,
        ))
    };
    let mean = |short: bool| (0..8).map(|seed| first(short, seed)).sum::<f64>() / 8.0;
    let (short, long) = (mean(true), mean(false));
    assert!(short < 0.95 * long, "{short} after one trial of a short search, {long} of a long one");
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
            let strategy = strategy(name, search_space(seed), Known::default());
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
        let first = ScheduleConfig::default();
        let one =
            |seed| us(&best(&*strategy(name, search_space(seed), Known::default()), 64, first, us));
        (0..4).map(one).sum::<f64>() / 4.0
    };
    let random = ends(StrategyName::Random);
    for name in [StrategyName::HillClimb, StrategyName::Residual] {
        let end = ends(name);
        assert!(end < 0.99 * random, "{} {end}, random {random}", name.name());
    }
}

/// Predictions that are 20% too low for schedules with a knob at one value, and right for all others.
#[derive(Debug)]
struct Wrong(Knob, Value);

impl Predictions for Wrong {
    fn us(&self, config: &ScheduleConfig) -> Option<f64> {
        let off = if config.get(self.0) == self.1 { 0.8 } else { 1.0 };
        Some(us(config) * off)
    }
}

#[test]
fn an_error_of_the_cost_model_is_learned_from_the_trials_and_from_another_search() {
    let knob = Knob::KernelEvict;
    let wrong = knob.default();
    let first = |runs: Vec<KnownRun>, past: &TrialRecords| {
        let predictions: Option<Arc<dyn Predictions>> = Some(Arc::new(Wrong(knob, wrong)));
        let strategy =
            strategy(StrategyName::Residual, search_space(1), Known { predictions, runs });
        let incumbent = ScheduleConfig::default();
        let question = Question { trial: 1, incumbent: &incumbent, past };
        strategy.ask(&question).next().unwrap().1
    };
    // Half of these trials have the knob at the value whose predictions are wrong.
    let mut rng = generator(7, 7);
    let mut drawn = || {
        let any =
            |(knob, values): &(Knob, Vec<Value>)| Some((*knob, values.choose(&mut rng).copied()?));
        edited(
            &ScheduleConfig::default(),
            &search_space(0).space.iter().filter_map(any).collect::<Form>(),
        )
    };
    let tried: Vec<ScheduleConfig> = (0..60).map(|_| drawn()).collect();
    let predictions = Wrong(knob, wrong);
    let trials = tried
        .iter()
        .map(|config| KnownTrial::new(config, us(config), predictions.us(config).unwrap()))
        .collect();
    let run = KnownRun { graph: "g".to_owned(), weight: 1.0, trials };
    let (wrongly, rightly) = (ScheduleConfig::default(), {
        let mut other = ScheduleConfig::default();
        other.kernel.evict = ir::schedule::Evict::First;
        other
    });
    let gain = |known: &[KnownRun]| {
        let with = |config| (config, predictions.us(config).unwrap());
        Learned::new(known).gain_pct(with(&wrongly), with(&rightly))
    };
    let ([before, ..], [after, low, high]) = (gain(&[]), gain(std::slice::from_ref(&run)));
    assert!(before < -10.0, "{before}: a loss, as predicted");
    assert!(
        low < after && after < high && low > 0.0,
        "{low} {after} {high}: the store says a gain"
    );
    let incumbent = ScheduleConfig::default();
    let record = |config: &ScheduleConfig| TrialRecord {
        config: *config,
        changes: changes(&incumbent, config),
        gain: Some(1.0 - us(config) / us(&incumbent)),
        kept: false,
        score: Some((us(config) / us(&incumbent)).ln()),
    };
    let past: TrialRecords = tried.iter().map(record).collect();
    assert_eq!(first(Vec::new(), &TrialRecords::default()).get(knob), wrong, "as predicted");
    assert_ne!(first(Vec::new(), &past).get(knob), wrong, "learned from the trials");
    assert_ne!(first(vec![run], &TrialRecords::default()).get(knob), wrong, "from the store");
}

fn shape(layers: u32, dtype: ir::DType) -> GraphShape {
    let (hidden, heads, kv_heads, head_dim, ffn, vocab) = (1024, 16, 8, 64, 3072, 1000);
    let dims = Dims { hidden, heads, kv_heads, head_dim, ffn, vocab, layers, dtype };
    GraphShape { dims, codes: None, experts: false }
}

#[test]
fn a_trial_of_another_kernel_shape_or_format_counts_for_less() {
    let here = shape(8, ir::DType::Bf16);
    let counts = |same_kernel, there| weight(same_kernel, &here, &there);
    assert!((counts(true, here) - 1.0).abs() < f64::EPSILON);
    let other_kernel = counts(false, here);
    assert!(other_kernel > 0.0 && other_kernel < 1.0, "{other_kernel}");
    let other_shape = counts(false, shape(64, ir::DType::Bf16));
    assert!(other_shape > 0.0 && other_shape < other_kernel, "{other_shape}");
    assert!(counts(true, shape(8, ir::DType::F16)) == 0.0, "another format");
}

/// A search of 16 trials kept what was best for two other models: the residuals that they had left counted fully
/// (docs/lab/2026-11-25-cost-model-of-today.md).
#[test]
fn what_does_not_hold_for_this_shape_is_unlearned_sooner() {
    let rows = [Knob::TilingQkvRows, Knob::TilingGateUpRows, Knob::TilingDownRows];
    // Elsewhere other rows cost 4%; here they gain 2% each, as all knobs do.
    let there = |config: &ScheduleConfig| {
        let other = rows.iter().filter(|&&knob| config.get(knob) != knob.default()).count();
        us(config) * 1.06_f64.powi(other as i32)
    };
    let mut rng = generator(1, 0);
    let neutral = ScheduleConfig::default();
    let mut drawn = || {
        let set = |knob: &Knob| Some((*knob, knob.values().choose(&mut rng).copied()?));
        edited(&neutral, &Knob::ALL.iter().filter_map(set).collect::<Form>())
    };
    let trials: Vec<KnownTrial> =
        (0..128).map(|_| drawn()).map(|c| KnownTrial::new(&c, there(&c), 1.0)).collect();
    let (here, other) = (shape(8, ir::DType::Bf16), shape(64, ir::DType::Bf16));
    let least = 600.0;
    let ends = |weight: f64| {
        let run = KnownRun { graph: String::new(), weight, trials: trials.clone() };
        let end = |seed: u64| {
            let known = Known { predictions: None, runs: vec![run.clone()] };
            let strategy = strategy(StrategyName::Residual, search_space(seed), known);
            us(&best(&*strategy, 16, neutral, us)) / least - 1.0
        };
        (0..100).map(end).sum::<f64>() / 100.0
    };
    let (fully, counted) = (ends(1.0), ends(weight(false, &here, &other)));
    assert!(counted < 0.7 * fully, "{counted} above the best, {fully} with full weight");
}
