//! The finished trials, with aggregates for the proposals that each trial updates: a query costs as much after a
//! million trials as after ten.

use std::collections::BTreeMap;

use ir::schedule::{Knob, Value};
use rpds::RedBlackTreeMapSync;

use super::{COMBINED_MAX, PROMISING, TrialRecord, UNTRIED, moves};

/// The trials after the baseline, in order. Copies are cheap.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrialRecords {
    all: RedBlackTreeMapSync<usize, TrialRecord>,
    knobs: BTreeMap<Knob, Tried>,
    /// By group: the last kept trial that changed a knob of the group.
    kept: BTreeMap<&'static str, usize>,
    /// The trials with the greatest gains among those that were not kept, greatest first.
    promising: Vec<TrialRecord>,
    /// The score of the last trial that was kept.
    leading: Option<f64>,
}

/// Results of the trials that changed one knob. A trial's gain is divided equally among the knobs that it changed.
#[derive(Clone, Debug, PartialEq)]
struct Tried {
    /// By value: the last trial that changed this knob alone and was not kept.
    lost_alone: BTreeMap<Value, usize>,
    /// The best gain among the trials that were not kept.
    lost: f64,
    /// The best gain among the kept trials, by direction (whether the value rose) and value.
    kept: BTreeMap<(bool, Value), f64>,
}

impl TrialRecords {
    /// Number of trials.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.size()
    }

    /// Whether no trial after the baseline has finished.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The trials, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &TrialRecord> {
        self.since(0)
    }

    /// The trials from a number on.
    pub fn since(&self, first: usize) -> impl DoubleEndedIterator<Item = &TrialRecord> {
        self.all.range(first..).map(|(_, record)| record).inspect(|_| count())
    }

    /// Score of a trial with this gain over the incumbent: the last trial that was kept, else the baseline.
    #[must_use]
    pub fn score(&self, gain: f64) -> f64 {
        self.leading.unwrap_or(0.0) + (1.0 - gain).ln()
    }

    /// Adds a trial.
    pub fn push(&mut self, past: TrialRecord) {
        let index = self.len();
        if past.kept {
            self.leading = past.score;
        }
        let alone = past.changes.len() == 1;
        for change in &past.changes {
            let tried = self.knobs.entry(change.knob).or_default();
            if past.kept {
                self.kept.insert(moves::group(change.knob), index);
            } else if alone {
                tried.lost_alone.insert(change.to, index);
            }
            let Some(share) = past.gain.map(|gain| gain / past.changes.len() as f64) else {
                continue;
            };
            let best = match past.kept {
                true => tried
                    .kept
                    .entry((change.to > change.from, change.to))
                    .or_insert(f64::NEG_INFINITY),
                false => &mut tried.lost,
            };
            *best = best.max(share);
        }
        if !past.kept && past.gain.is_some_and(|gain| gain > PROMISING) {
            self.promise(past.clone());
        }
        self.all.insert_mut(index, past);
    }

    /// Adds a promising trial. Of equal gains the older one comes first.
    fn promise(&mut self, past: TrialRecord) {
        let gain = |past: &TrialRecord| past.gain.unwrap_or(0.0);
        let at =
            self.promising.partition_point(|other| gain(other).total_cmp(&gain(&past)).is_ge());
        self.promising.insert(at, past);
        self.promising.truncate(COMBINED_MAX);
    }

    /// The trials with the greatest gains among those that were not kept, greatest first.
    pub(crate) fn promising(&self) -> &[TrialRecord] {
        &self.promising
    }

    /// Whether setting this knob alone to this value lost, and no change to its group was kept since.
    pub(crate) fn is_refuted(&self, knob: Knob, value: Value) -> bool {
        let lost = self.knobs.get(&knob).and_then(|tried| tried.lost_alone.get(&value));
        let kept = self.kept.get(moves::group(knob));
        lost.is_some_and(|lost| kept.is_none_or(|kept| lost > kept))
    }

    /// Gain to expect of a step: the best gain of a trial that changed this knob, divided by the number of knobs that
    /// it changed. It counts double if the step continues in a direction that was kept.
    pub(crate) fn worth(&self, knob: Knob, value: Value) -> f64 {
        let Some(tried) = self.knobs.get(&knob) else { return UNTRIED };
        let kept = tried.kept.iter().map(|(&(rose, to), &share)| {
            let onward = rose == (value > to);
            if onward { 2.0 * share } else { share }
        });
        let best = kept.fold(tried.lost, f64::max);
        if best == f64::NEG_INFINITY { UNTRIED } else { best.clamp(UNTRIED / 4.0, 0.2) }
    }
}

#[cfg(test)]
thread_local! {
    /// Records that this thread has read one after the other.
    pub(crate) static VISITS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn count() {
    #[cfg(test)]
    VISITS.with(|visits| visits.set(visits.get() + 1));
}

impl Default for Tried {
    fn default() -> Self {
        Self { lost_alone: BTreeMap::new(), lost: f64::NEG_INFINITY, kept: BTreeMap::new() }
    }
}
