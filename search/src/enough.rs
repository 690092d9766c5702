//! When a search has found enough, before its budget is spent.

use serde::{Deserialize, Serialize};

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
        if self.goal.is_some_and(|goal| saved(trials) >= goal) {
            return Some(StoppedBy::Goal);
        }
        let above = above_bound(champion)?;
        self.stop_within.is_some_and(|share| above <= share).then_some(StoppedBy::Bound)
    }
}

/// The share of the baseline's time that the incumbent saves at least: each kept trial counts with the low end of its interval.
#[must_use]
pub fn saved(trials: &[Trial]) -> f64 {
    let kept = trials.iter().filter(|trial| trial.outcome == Outcome::Kept);
    let lows = kept.filter_map(|trial| trial.gain).map(|gain| gain.low);
    1.0 - lows.map(|low| 1.0 - low).product::<f64>()
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
    use crate::measure::Interval;
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
        assert!((saved(&trials) - 0.28).abs() < 1e-12);
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
