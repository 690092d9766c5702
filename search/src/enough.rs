//! When a search has found enough, before its budget is spent.

use serde::{Deserialize, Serialize};

use crate::measure::Interval;
use crate::run::StoppedBy;
use crate::trial::{Outcome, Trial};

/// What is enough for a caller. The default is nothing: the search ends with its budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Enough {
    /// The share of the baseline's time that must be saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<f64>,
    /// How far above its bound the incumbent may be, as a share of the bound: what is left there is not worth a search.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_within: Option<f64>,
}

impl Enough {
    /// Whether the trials so far, of which `champion` is the incumbent, are enough, and of which of the two.
    pub(crate) fn reached(self, trials: &[Trial], champion: Option<&Trial>) -> Option<StoppedBy> {
        let champion = champion?;
        if self.goal.is_some_and(|goal| saved(trials).low >= goal) {
            return Some(StoppedBy::Goal);
        }
        let above = above_bound(champion)?;
        self.stop_within.is_some_and(|share| above <= share).then_some(StoppedBy::Bound)
    }
}

/// The share of the baseline's time that the incumbent saves: the ends of the kept trials' intervals, multiplied.
#[must_use]
pub fn saved(trials: &[Trial]) -> Interval {
    let kept = trials.iter().filter(|trial| trial.outcome == Outcome::Kept);
    let left = kept
        .filter_map(|trial| trial.gain)
        .fold([1.0; 2], |[most, least], gain| [most * (1.0 - gain.low), least * (1.0 - gain.high)]);
    Interval { low: 1.0 - left[0], high: 1.0 - left[1] }
}

/// How far a trial's time is above the larger of its two bounds, bytes and hand-offs, as a share of that bound.
fn above_bound(trial: &Trial) -> Option<f64> {
    let verdict = &trial.verdict;
    let bound = verdict.bound_us?.max(verdict.chain_us.unwrap_or(0.0));
    Some(verdict.latency_us? / bound - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    fn trial(outcome: Outcome, low: f64, us: [f64; 3]) -> Trial {
        let [latency_us, bound_us, chain_us] = us.map(Some);
        Trial {
            outcome,
            gain: Some(Interval { low, high: low + 0.05 }),
            verdict: Verdict { latency_us, bound_us, chain_us, ..Verdict::default() },
            ..Trial::default()
        }
    }

    #[test]
    fn gains_count_with_their_low_ends_and_only_if_kept() {
        let us = [100.0, 50.0, 80.0];
        let trials = [
            trial(Outcome::Baseline, 0.0, us),
            trial(Outcome::Kept, 0.10, us),
            trial(Outcome::Reverted, 0.50, us),
            trial(Outcome::Kept, 0.20, us),
        ];
        let Interval { low, high } = saved(&trials);
        assert!((low - 0.28).abs() < 1e-12 && (high - (1.0 - 0.85 * 0.75)).abs() < 1e-12);
        let enough = |goal| Enough { goal: Some(goal), stop_within: None };
        let reached = |goal: f64| enough(goal).reached(&trials, trials.last());
        assert_eq!((reached(0.27), reached(0.29)), (Some(StoppedBy::Goal), None));
    }

    #[test]
    fn the_larger_bound_is_the_one_to_come_near() {
        let trials = [trial(Outcome::Baseline, 0.0, [100.0, 50.0, 80.0])];
        let reached = |share| {
            Enough { goal: None, stop_within: Some(share) }.reached(&trials, trials.first())
        };
        assert_eq!((reached(0.26), reached(0.24)), (Some(StoppedBy::Bound), None));
        assert_eq!(Enough::default().reached(&trials, trials.first()), None);
        assert_eq!(Enough { goal: Some(0.0), stop_within: None }.reached(&[], None), None);
    }
}
