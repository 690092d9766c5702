//! The effect of each knob in a search: trials that changed it alone, and the share of the leader's time they saved.

use ir::schedule::Knob;
use search::{Outcome, Trial};

pub(super) struct Effect {
    pub(super) path: &'static str,
    /// Trials that changed it, alone or with others.
    pub(super) trials: usize,
    /// Of these, those that were kept.
    pub(super) kept: usize,
    /// Gains, in percent, of the trials that changed nothing else, smallest first; of an interval its midpoint.
    pub(super) alone: Vec<f64>,
}

impl Effect {
    pub(super) fn median(&self) -> Option<f64> {
        self.alone.get(self.alone.len() / 2).copied()
    }
}

/// The midpoint of a trial's gain, in percent.
pub(super) fn gain_of(trial: &Trial) -> Option<f64> {
    trial.gain.map(|gain| 50.0 * (gain.low + gain.high)).filter(|gain| gain.is_finite())
}

/// Every knob that some trial changed, sorted by the best gain of a change of it alone.
pub(super) fn effects(trials: &[Trial]) -> Vec<Effect> {
    let of = |knob: &Knob| {
        let path = knob.path();
        let changed = || trials.iter().filter(move |trial| trial.changed.contains_key(path));
        let mut alone: Vec<f64> =
            changed().filter(|trial| trial.changed.len() == 1).filter_map(gain_of).collect();
        alone.sort_by(f64::total_cmp);
        let kept = changed().filter(|trial| trial.outcome == Outcome::Kept).count();
        Effect { path, trials: changed().count(), kept, alone }
    };
    let mut found: Vec<Effect> =
        Knob::ALL.iter().map(of).filter(|effect| effect.trials > 0).collect();
    let best = |effect: &Effect| effect.alone.last().copied().unwrap_or(f64::NEG_INFINITY);
    found.sort_by(|a, b| best(b).total_cmp(&best(a)).then(a.path.cmp(b.path)));
    found
}
