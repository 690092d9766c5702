//! Proposals: which schedule to try next. A proposal is the incumbent with some knobs changed. Whether it is legal is
//! checked before a trial is spent on it.
//!
//! A search first **sweeps**: each move changes knobs that belong together (all hand-offs, all row counts, the ring as
//! a whole), once, starting from the current incumbent. Afterwards three kinds take turns: **steps** change one knob,
//! the knobs with the largest gains so far first; **combinations** merge changes that seemed to help but gained too
//! little alone; **jumps** change a few knobs at random. A change that lost is not proposed again until something that
//! interacts with it has changed.

use ir::schedule::{Knob, ScheduleConfig, Value};
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::strategy::SearchSpace;

mod moves;
mod records;

use moves::Move;
pub(crate) use moves::forms as sweep_forms;
#[cfg(test)]
pub(crate) use moves::group;
pub use records::TrialRecords;
#[cfg(test)]
pub(crate) use records::VISITS;

/// Gain credited to an untried knob: more than noise, less than the gain of a knob that helped.
const UNTRIED: f64 = 0.005;

/// A trial that was not kept is combined with others if its gain is above this.
const PROMISING: f64 = 0.0005;

/// Maximum number of trials whose changes one combination merges.
const COMBINED_MAX: usize = 6;

/// Where a proposal comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The schedule that the search begins with: the first trial.
    #[default]
    Baseline,
    /// A move of the first sweep.
    Sweep,
    /// One knob of the incumbent changed.
    Step,
    /// Several changes that seemed to help, together.
    Combine,
    /// A few knobs of the incumbent changed at random, or all of them.
    Jump,
    /// A proposal of a model fitted to the trials so far.
    Model,
    /// A move that helped in earlier searches, in ledgers of versions that proposed these.
    Prior,
    /// A proposal from outside the search.
    External,
    /// A schedule that was tried before and is raced again at the end of the search.
    Race,
}

impl Origin {
    /// The least gain that makes a trial the incumbent, above the noise. The race at the end chooses among schedules that
    /// are all claimed to be good, so there any gain will do.
    pub(crate) fn min_gain(self, min_gain: f64) -> f64 {
        if self == Self::Race { 0.0 } else { min_gain }
    }
}

/// A knob with its value before and after a change.
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

/// A finished trial as proposals use it.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialRecord {
    /// The schedule.
    pub config: ScheduleConfig,
    /// The knobs that it changed in the incumbent of its time.
    pub changes: Vec<Change>,
    /// Fraction of that incumbent's time that it saved; `None` if it has no latency.
    pub gain: Option<f64>,
    /// It became the incumbent.
    pub kept: bool,
    /// Logarithm of its time over the baseline's, chained through the incumbents in between; `None` if it has no latency.
    pub score: Option<f64>,
}

impl SearchSpace {
    /// Proposals for a trial, in the order in which to try them. Equal histories give equal draws. A draw may be
    /// illegal or already tried. The iterator is infinite: random jumps follow the planned draws.
    pub fn draws<'a>(
        &'a self,
        trial: u64,
        incumbent: ScheduleConfig,
        past: &TrialRecords,
    ) -> impl Iterator<Item = (Origin, ScheduleConfig)> + use<'a> {
        let mut rng = generator(self.seed, trial);
        let mut planned = Vec::new();
        if trial <= self.sweep {
            planned.extend(self.sweep(&incumbent, past));
        }
        let steps = self.steps(&incumbent, past, &mut rng);
        let combinations = combinations(&incumbent, past, &mut rng);
        // Of every four trials, one tries a jump first and one tries combinations first.
        match trial % 4 {
            1 if trial > self.sweep => {
                planned.push((Origin::Jump, self.jump(&incumbent, &mut rng)))
            }
            3 => planned.extend(combinations),
            _ => {}
        }
        planned.extend(steps);
        let random =
            std::iter::repeat_with(move || (Origin::Jump, self.jump(&incumbent, &mut rng)));
        planned.into_iter().chain(random)
    }

    /// The moves of the sweep that no trial has made yet, each in all its forms: the first legal one is tried.
    fn sweep(
        &self,
        incumbent: &ScheduleConfig,
        past: &TrialRecords,
    ) -> Vec<(Origin, ScheduleConfig)> {
        // `fit_caps` adjusts the caps of the ring to its size, so a trial may have changed them besides the knobs of
        // the move.
        let follows = |knob: Knob| moves::group(knob) == "pipeline";
        let made = |form: &Vec<(Knob, Value)>| {
            let named = |knob: Knob| form.iter().any(|&(other, _)| other == knob);
            past.iter().any(|past| {
                past.changes.iter().any(|change| named(change.knob))
                    && past.changes.iter().all(|c| named(c.knob) || follows(c.knob))
                    && form.iter().all(|&(knob, value)| past.config.get(knob) == value)
            })
        };
        let open = |mv: &Move| !mv.iter().any(made);
        let with = |form: &Vec<(Knob, Value)>| (Origin::Sweep, edited(incumbent, form));
        let moves = moves::all(&self.space, incumbent);
        moves.iter().filter(|mv| open(mv)).flat_map(|mv| mv.iter().map(with)).collect()
    }

    /// Single-knob changes, the most promising knob first. A value that lost since its group last changed is left out.
    fn steps(
        &self,
        incumbent: &ScheduleConfig,
        past: &TrialRecords,
        rng: &mut Xoshiro256PlusPlus,
    ) -> Vec<(Origin, ScheduleConfig)> {
        let mut steps = Vec::new();
        for (knob, values) in &self.space {
            let at = values.iter().position(|&v| v == incumbent.get(*knob)).unwrap_or(0);
            for (index, &value) in values.iter().enumerate() {
                if index == at || past.is_refuted(*knob, value) {
                    continue;
                }
                let distance = index.abs_diff(at) as f64;
                let worth = past.worth(*knob, value) / distance.sqrt();
                steps.push((worth * rng.random_range(0.5..1.5), *knob, value));
            }
        }
        steps.sort_by(|a, b| b.0.total_cmp(&a.0));
        let with = |(_, knob, value): (f64, Knob, Value)| {
            (Origin::Step, edited(incumbent, &[(knob, value)]))
        };
        steps.into_iter().map(with).collect()
    }

    /// Changes two to four knobs at random: half of the time within one group, half of the values neighbours of the
    /// current one.
    fn jump(&self, incumbent: &ScheduleConfig, rng: &mut Xoshiro256PlusPlus) -> ScheduleConfig {
        let count = rng.random_range(2..=4);
        let first = self.space.choose(rng).map(|(knob, _)| moves::group(*knob));
        let together = rng.random_bool(0.5);
        let near = |knob: Knob| !together || first == Some(moves::group(knob));
        let mut pool: Vec<_> = self.space.iter().filter(|(knob, _)| near(*knob)).collect();
        pool.shuffle(rng);
        let form: Vec<(Knob, Value)> = pool
            .into_iter()
            .take(count)
            .map(|(knob, values)| (*knob, another(values, incumbent.get(*knob), rng)))
            .collect();
        edited(incumbent, &form)
    }
}

/// Combines trials that seemed to help and were not kept: first all of them, then random subsets.
fn combinations(
    incumbent: &ScheduleConfig,
    past: &TrialRecords,
    rng: &mut Xoshiro256PlusPlus,
) -> Vec<(Origin, ScheduleConfig)> {
    let found: Vec<&TrialRecord> = past.promising().iter().collect();
    let together = |parts: &[&TrialRecord]| {
        let form: Vec<_> =
            parts.iter().rev().flat_map(|p| &p.changes).map(|c| (c.knob, c.to)).collect();
        (Origin::Combine, edited(incumbent, &form))
    };
    let mut all = Vec::new();
    if found.len() < 2 {
        return all;
    }
    all.push(together(&found));
    for _ in 0..2 {
        let count = rng.random_range(2..=found.len());
        let mut part: Vec<&TrialRecord> = found.clone();
        part.shuffle(rng);
        part.truncate(count);
        all.push(together(&part));
    }
    all
}

fn another(values: &[Value], current: Value, rng: &mut Xoshiro256PlusPlus) -> Value {
    let at = values.iter().position(|&v| v == current).unwrap_or(0);
    let near = rng.random_bool(0.5);
    let others: Vec<Value> = values
        .iter()
        .enumerate()
        .filter(|&(i, _)| i != at && (!near || i.abs_diff(at) == 1))
        .map(|(_, &value)| value)
        .collect();
    others.choose(rng).copied().unwrap_or(current)
}

/// Sets knobs of a config, then brings the caps of the ring back under their limits ([`fit_caps`]).
pub(crate) fn edited(config: &ScheduleConfig, form: &[(Knob, Value)]) -> ScheduleConfig {
    let mut config = *config;
    for &(knob, value) in form {
        let outcome = config.set(knob, value);
        debug_assert!(outcome.is_ok(), "{knob} takes every value of its own domain");
    }
    fit_caps(&mut config);
    config
}

/// Rounds the caps of the ring down to whole stages (at least one) and clamps them: bytes in flight to the ring's size,
/// bytes in flight before a wait to bytes in flight.
pub fn fit_caps(config: &mut ScheduleConfig) {
    let ring = &mut config.pipeline;
    let whole = |bytes: u32| (bytes / ring.stage_bytes).max(1) * ring.stage_bytes;
    let most = ring.stages * ring.stage_bytes;
    ring.in_flight_bytes = whole(ring.in_flight_bytes.min(most));
    ring.in_flight_before_wait_bytes =
        whole(ring.in_flight_before_wait_bytes.min(ring.in_flight_bytes));
}

/// A random generator for one trial, or for another purpose with a number of its own.
#[must_use]
pub fn generator(seed: u64, trial: u64) -> Xoshiro256PlusPlus {
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
mod tests;
