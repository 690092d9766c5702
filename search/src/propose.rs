//! What to try next. Proposing is drawing from the knob table; whether a draw is legal is asked before a trial is spent on it.

use ir::schedule::{Knob, ScheduleConfig, Value};
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

/// Where a proposal comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The neutral default: the first trial.
    Baseline,
    /// Drawn at random around the default.
    Explore,
    /// The incumbent with one or two knobs changed.
    Mutate,
}

/// One knob with its value in the config compared with and in the proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The knob.
    pub knob: Knob,
    /// Its value before.
    pub from: Value,
    /// Its value after.
    pub to: Value,
}

/// The knobs in which two configs differ, in table order.
#[must_use]
pub fn changes(from: &ScheduleConfig, to: &ScheduleConfig) -> Vec<Change> {
    let change = |&knob: &Knob| Change { knob, from: from.get(knob), to: to.get(knob) };
    Knob::ALL.iter().map(change).filter(|change| change.from != change.to).collect()
}

/// Draws configs. Each trial has its own generator, made from the search's seed and the trial's number alone, so that a
/// search that was cut off continues with the very proposals that it would have made.
#[derive(Debug)]
pub struct Proposer<'a> {
    space: &'a [(Knob, Vec<Value>)],
    rng: Xoshiro256PlusPlus,
}

impl<'a> Proposer<'a> {
    /// The proposer of one trial, which varies these knobs over these values.
    #[must_use]
    pub fn new(space: &'a [(Knob, Vec<Value>)], seed: u64, trial: u64) -> Self {
        Self { space, rng: generator(seed, trial) }
    }

    /// The next draw. It may be illegal, and it may have been tried.
    pub fn draw(
        &mut self,
        origin: Origin,
        default: &ScheduleConfig,
        incumbent: &ScheduleConfig,
    ) -> ScheduleConfig {
        match origin {
            Origin::Baseline => *default,
            Origin::Explore => self.explore(default),
            Origin::Mutate => self.mutate(incumbent),
        }
    }

    /// Redraws a random share of the knobs: some draws stay near the default, some go far.
    fn explore(&mut self, default: &ScheduleConfig) -> ScheduleConfig {
        let share = self.rng.random_range(0.15..0.75);
        let mut config = *default;
        for (knob, values) in self.space {
            if self.rng.random_bool(share)
                && let Some(&value) = values.choose(&mut self.rng)
            {
                set(&mut config, *knob, value);
            }
        }
        config
    }

    /// Changes one or two knobs, half of the time to a neighbouring value.
    fn mutate(&mut self, incumbent: &ScheduleConfig) -> ScheduleConfig {
        let mut config = *incumbent;
        let count = self.rng.random_range(1..=2);
        for _ in 0..count {
            if let Some((knob, values)) = self.space.choose(&mut self.rng) {
                let value = self.another(values, config.get(*knob));
                set(&mut config, *knob, value);
            }
        }
        config
    }

    fn another(&mut self, values: &[Value], current: Value) -> Value {
        let at = values.iter().position(|&v| v == current).unwrap_or(0);
        let near = self.rng.random_bool(0.5);
        let others: Vec<Value> = values
            .iter()
            .enumerate()
            .filter(|&(i, _)| i != at && (!near || i.abs_diff(at) == 1))
            .map(|(_, &value)| value)
            .collect();
        others.choose(&mut self.rng).copied().unwrap_or(current)
    }
}

/// Sets a knob to a value of its own domain.
fn set(config: &mut ScheduleConfig, knob: Knob, value: Value) {
    let outcome = config.set(knob, value);
    debug_assert!(outcome.is_ok(), "{knob} takes every value of its own domain");
}

/// A generator for one purpose of one trial.
pub(crate) fn generator(seed: u64, trial: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(mixed(seed, trial))
}

/// A seed that depends on both numbers in every bit (the finaliser of SplitMix64, twice).
pub(crate) fn mixed(seed: u64, trial: u64) -> u64 {
    let finish = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    finish(finish(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ trial)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Vec<(Knob, Vec<Value>)> {
        Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect()
    }

    #[test]
    fn a_mutation_changes_one_or_two_knobs_and_is_repeatable() {
        let (space, incumbent) = (whole(), ScheduleConfig::default());
        for trial in 0..200 {
            let draw =
                || Proposer::new(&space, 7, trial).draw(Origin::Mutate, &incumbent, &incumbent);
            let config = draw();
            assert_eq!(config, draw());
            assert!((0..=2).contains(&changes(&incumbent, &config).len()));
        }
    }

    #[test]
    fn exploring_reaches_every_value_of_every_knob() {
        let (space, default) = (whole(), ScheduleConfig::default());
        let mut seen = std::collections::BTreeSet::new();
        for trial in 0..2000 {
            let config = Proposer::new(&space, 1, trial).draw(Origin::Explore, &default, &default);
            seen.extend(Knob::ALL.iter().map(|&knob| (knob, config.get(knob))));
        }
        let all: usize = space.iter().map(|(_, values)| values.len()).sum();
        assert_eq!(seen.len(), all);
    }

    #[test]
    fn only_the_given_knobs_vary() {
        let default = ScheduleConfig::default();
        let space = [(Knob::PipelineStages, Knob::PipelineStages.values())];
        for trial in 0..50 {
            for origin in [Origin::Explore, Origin::Mutate] {
                let config = Proposer::new(&space, 3, trial).draw(origin, &default, &default);
                let changed = changes(&default, &config);
                assert!(changed.iter().all(|change| change.knob == Knob::PipelineStages));
            }
        }
    }
}
