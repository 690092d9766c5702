//! The cost of a history, and that its incremental updates give the same answers as reading all trials again.

use std::sync::Arc;

use ir::Target;
use ir::schedule::{Knob, Value, default_config, legal_values, validate};
use rand::RngExt;

use super::*;
use crate::Interval;
use crate::propose::VISITS;
use crate::propose::{TrialRecords, generator, mixed};
use crate::strategy::{Known, SearchSpace, StrategyName, strategy};
use crate::trial::{Outcome, Spent};
use crate::verdict::Verdict;

/// A model with everything that trials need except gates: each schedule counts as a program of its own, and a trial's
/// number decides its result.
struct Bench {
    model: model::Model,
    target: Target,
    one: Candidate,
}

impl Bench {
    fn new() -> Self {
        let model = model::preset("toy").unwrap();
        let target = Target::by_name("h200").unwrap();
        let config = default_config(&model.graph, &target);
        let valid = validate(config, &model.graph, &target).unwrap();
        let options = lower::Options { kv_capacity: 16 };
        let program = Arc::new(lower::lower(&valid, &model.graph, &target, options).unwrap());
        let (schedule_id, program_id, kernel_id) = (config.id(), program.id(), String::new());
        let one = Candidate { config: valid, program, schedule_id, program_id, kernel_id };
        Self { model, target, one }
    }

    fn space(&self) -> Vec<(Knob, Vec<Value>)> {
        let values = |&knob: &Knob| (knob, legal_values(knob, &self.model.graph, &self.target));
        Knob::ALL.iter().map(values).collect()
    }

    fn lower(&self, config: &ScheduleConfig) -> Result<Result<Candidate, u64>, Rejection> {
        let valid = validate(*config, &self.model.graph, &self.target);
        let valid = valid.map_err(Rejection::Rejected)?;
        let id = config.id();
        Ok(Ok(Candidate {
            config: valid,
            schedule_id: id.clone(),
            program_id: id,
            ..self.one.clone()
        }))
    }

    /// Entries that were read or moved in a search of `trials` trials that copies the history for helpers in each.
    fn visits(&self, trials: u64, name: StrategyName) -> usize {
        let search_space = SearchSpace { space: self.space(), seed: 3, sweep: 40, short: false };
        let strategy = strategy(name, search_space, Known::default());
        let mut history = History::new(*self.one.config);
        let before = VISITS.get();
        let mut helpers = history.clone();
        for index in 0..trials {
            let mut skipped = Skipped::default();
            let lower = |config: &ScheduleConfig| self.lower(config);
            let proposal = match index {
                0 => Proposal {
                    origin: Origin::Baseline,
                    config: history.parent,
                    lowered: Some(self.one.clone()),
                },
                _ => history.next(&*strategy, index, &mut skipped, lower).unwrap(),
            };
            helpers = history.clone();
            helpers.assume(index, proposal.lowered.as_ref().unwrap(), false);
            let parent = (index > 0).then_some(history.parent);
            history.learn(&trial(index, proposal.config), parent.as_ref());
        }
        assert_eq!(
            (history.past.len(), helpers.past.len()),
            (trials as usize - 1, trials as usize - 1)
        );
        let visits = VISITS.get() - before;
        // The count sees a scan.
        assert_eq!((history.past.iter().count(), VISITS.get() - before - visits), {
            (trials as usize - 1, trials as usize - 1)
        });
        visits
    }
}

/// A trial whose number decides its result; about one in a hundred is kept.
fn trial(index: u64, config: ScheduleConfig) -> Trial {
    let mut rng = generator(11, index);
    let gain = rng.random_range(-0.2..0.002);
    let outcome = match index {
        0 => Outcome::Baseline,
        _ if rng.random_bool(0.01) => Outcome::Kept,
        _ => Outcome::Reverted,
    };
    let mut verdict = Verdict::new("toy", "h200", "none");
    verdict.program_id = Some(config.id());
    verdict.kernel_id = Some(String::new());
    Trial {
        trial: index,
        origin: Origin::Jump,
        incumbent: None,
        outcome,
        why: String::new(),
        changed: serde_json::Map::new(),
        config,
        gain: (index > 0).then_some(Interval { low: gain, high: gain }),
        threshold: None,
        noise_floor: None,
        predicted_us: None,
        simpler: None,
        samples_us: Vec::new(),
        card: None,
        beside: Vec::new(),
        left_out: Vec::new(),
        verdict,
        skipped: Skipped::default(),
        spent: Spent::default(),
        began_s: 0.0,
        ended_s: 0.0,
    }
}

#[test]
fn ten_thousand_trials_cost_so_much_each_as_a_thousand() {
    let bench = Bench::new();
    for name in [StrategyName::HillClimb, StrategyName::Random] {
        let [few, many] = [1_000, 10_000].map(|trials| bench.visits(trials, name));
        assert!(many <= 11 * few, "{}: {few} visits of 1 000, {many} of 10 000", name.name());
    }
}

/// The same queries, answered by reading all trials.
mod scan {
    use super::*;
    use crate::propose::group;

    pub(super) fn refuted(knob: Knob, value: Value, past: &[TrialRecord]) -> bool {
        for past in past.iter().rev() {
            let alone = past.changes.len() == 1;
            if alone && past.changes[0].knob == knob && past.changes[0].to == value && !past.kept {
                return true;
            }
            if past.kept && past.changes.iter().any(|c| group(c.knob) == group(knob)) {
                return false;
            }
        }
        false
    }

    pub(super) fn worth(knob: Knob, value: Value, past: &[TrialRecord]) -> f64 {
        let with = past.iter().filter_map(|past| {
            let change = past.changes.iter().find(|change| change.knob == knob)?;
            let share = past.gain? / past.changes.len() as f64;
            let onward = past.kept && (change.to > change.from) == (value > change.to);
            Some(if onward { 2.0 * share } else { share })
        });
        let best = with.fold(f64::NEG_INFINITY, f64::max);
        if best == f64::NEG_INFINITY { 0.005 } else { best.clamp(0.00125, 0.2) }
    }

    pub(super) fn promising(past: &[TrialRecord]) -> Vec<TrialRecord> {
        let promising =
            |past: &&TrialRecord| !past.kept && past.gain.is_some_and(|gain| gain > 0.0005);
        let mut found: Vec<&TrialRecord> = past.iter().filter(promising).collect();
        found.sort_by(|a, b| b.gain.unwrap_or(0.0).total_cmp(&a.gain.unwrap_or(0.0)));
        found.into_iter().take(6).cloned().collect()
    }

    pub(super) fn score(past: &[TrialRecord], gain: f64) -> f64 {
        let leading = past.iter().rev().find(|past| past.kept).and_then(|past| past.score);
        leading.unwrap_or(0.0) + (1.0 - gain).ln()
    }
}

#[test]
fn what_is_kept_up_to_date_is_what_a_scan_finds() {
    let bench = Bench::new();
    let space = bench.space();
    let proposer = SearchSpace { space: space.clone(), seed: 5, sweep: 20, short: false };
    let mut parent = *bench.one.config;
    let (mut all, mut kept_up) = (Vec::new(), TrialRecords::default());
    for index in 1..500_u64 {
        let mut rng = generator(17, index);
        let mut draws = proposer.draws(index, parent, &kept_up);
        let (_, config) = draws.nth(rng.random_range(0..3)).unwrap();
        drop(draws);
        // Equal gains, no gains and gains of either sign.
        let gain = rng.random_bool(0.9).then(|| f64::from(rng.random_range(-20..4)) / 500.0);
        let kept = gain.is_some() && rng.random_bool(0.05);
        let score = gain.map(|gain| scan::score(&all, gain));
        assert_eq!(score, gain.map(|gain| kept_up.score(gain)));
        let past = TrialRecord { config, changes: changes(&parent, &config), gain, kept, score };
        all.push(past.clone());
        kept_up.push(past);
        if kept {
            parent = config;
        }
        for (knob, values) in &space {
            for &value in values {
                assert_eq!(kept_up.is_refuted(*knob, value), scan::refuted(*knob, value, &all));
                let worth = [kept_up.worth(*knob, value), scan::worth(*knob, value, &all)];
                assert_eq!(worth[0].to_bits(), worth[1].to_bits(), "{knob} {value:?}: {worth:?}");
            }
        }
        assert_eq!(kept_up.promising(), scan::promising(&all));
        assert!(kept_up.iter().eq(&all));
    }
    assert!(all.iter().filter(|past| past.kept).count() > 5, "seed {}", mixed(17, 0));
}
