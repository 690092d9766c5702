//! The race at the end of a measured search. What separates the best schedules is less than the least gain that a trial
//! needs, so a search ends with one of them by chance; the race measures them against each other.

use ir::schedule::ScheduleConfig;

use crate::propose::{Origin, TrialRecords};
use crate::trial::{Outcome, Trial};

/// The schedules that are still to be raced against the one that leads: of the `finalists` best by score, those that did
/// not lead when the race began, best first, without those that were raced already.
pub(super) fn remaining(
    trials: &[Trial],
    past: &TrialRecords,
    finalists: usize,
) -> Vec<ScheduleConfig> {
    let raced = trials.iter().rev().take_while(|trial| trial.origin == Origin::Race).count();
    let before = &trials[..trials.len() - raced];
    let Some(champion) = before.iter().rfind(|trial| trial.outcome.leads()) else {
        return Vec::new();
    };
    let baseline = before.first().filter(|trial| trial.outcome == Outcome::Baseline);
    let baseline = baseline.map(|trial| (0.0, trial.config));
    let records = past.iter().take(past.len() - raced.min(past.len()));
    let scored = records.filter_map(|record| Some((record.score?, record.config)));
    let mut scored: Vec<_> = baseline.into_iter().chain(scored).collect();
    scored.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut best: Vec<ScheduleConfig> = Vec::new();
    for (_, config) in scored {
        if config != champion.config && !best.contains(&config) {
            best.push(config);
        }
    }
    best.truncate(finalists.saturating_sub(1));
    best.split_off(raced.min(best.len()))
}
