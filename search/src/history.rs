//! What the next proposal follows from, and the search for it: the first draw that is legal and lowers to something new. The same steps
//! serve the search itself and the guesses of [`ahead`](crate::ahead), which assume that the trial under way is reverted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use lower::LowerError;

use crate::ahead::Ahead;
use crate::budget::Budget;
use crate::cpu::Candidate;
use crate::gate::Dropped;
use crate::propose::{Origin, Past, Proposer, changes};
use crate::run::Settings;
use crate::trial::{SKIPPED_SHOWN, Skipped, SkippedProposal, changed};

/// Draws for one trial before the space counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Legal draws that are lowered for one trial before the space counts as exhausted.
const LOWERED_MAX: u32 = 256;

/// Trials that are guessed.
const GUESSED: u64 = 4;

/// Gain that a trial under way is guessed to have. The proposer treats all losses alike.
const GUESSED_GAIN: f64 = -0.01;

/// What the finished trials say to the next one.
#[derive(Clone)]
pub(crate) struct History {
    /// What proposals are drawn from: the schedule that leads, else the default.
    pub(crate) parent: ScheduleConfig,
    pub(crate) past: Vec<Past>,
    /// Ids of the schedules that were tried.
    pub(crate) drawn: BTreeSet<String>,
    /// Trials by the ids of their program and kernel.
    pub(crate) tried: BTreeMap<(String, String), u64>,
}

/// A schedule to try. What it lowers to is there already, unless lowering is to fail in the open.
pub(crate) struct Proposal {
    pub(crate) origin: Origin,
    pub(crate) config: ScheduleConfig,
    pub(crate) lowered: Option<Candidate>,
}

impl History {
    /// The proposal for a trial; `None` when none is found. `lower` gives the lowered schedule, or the trial that it would repeat.
    pub(crate) fn next(
        &self,
        settings: &Settings,
        index: u64,
        skipped: &mut Skipped,
        mut lower: impl FnMut(&ScheduleConfig) -> Result<Result<Candidate, u64>, Dropped>,
    ) -> Option<Proposal> {
        let Settings { seed, explore, ref space, .. } = *settings;
        let proposer = Proposer { space, seed, sweep: explore };
        let mut drawn = self.drawn.clone();
        let mut lowered = 0;
        for (origin, config) in proposer.draws(index, &self.parent, &self.past).take(DRAWS_MAX) {
            if !drawn.insert(config.id()) {
                continue;
            }
            let why = match lower(&config) {
                Ok(Ok(candidate)) => {
                    return Some(Proposal { origin, config, lowered: Some(candidate) });
                }
                Ok(Err(twin)) => {
                    skipped.repeated += 1;
                    lowered += 1;
                    format!("lowers to the program and kernel of trial {twin}")
                }
                // Our own mistake must be seen, so it is tried and recorded.
                Err(Dropped::Unloadable(LowerError::Internal(_))) => {
                    return Some(Proposal { origin, config, lowered: None });
                }
                Err(dropped) => {
                    skipped.rejected += 1;
                    dropped.to_string()
                }
            };
            if skipped.examples.len() < SKIPPED_SHOWN {
                let changed = changed(&changes(&self.parent, &config));
                skipped.examples.push(SkippedProposal { changed, why });
            }
            if lowered == LOWERED_MAX {
                break;
            }
        }
        None
    }

    /// As if this trial had been reverted, or had become the baseline that it was to be.
    fn assume(&mut self, index: u64, candidate: &Candidate) {
        let config = *candidate.config;
        if index > 0 {
            let changes = changes(&self.parent, &config);
            self.past.push(Past { config, changes, gain: Some(GUESSED_GAIN), kept: false });
        }
        self.drawn.insert(config.id());
        self.tried.entry(candidate.key()).or_insert(index);
    }
}

/// What the next trials are guessed from.
pub(crate) struct Guess {
    settings: Arc<Settings>,
    history: History,
    /// The next trial.
    index: u64,
    left: u64,
}

impl Guess {
    /// A guess at what comes after a trial that begins.
    pub(crate) fn after(
        settings: Arc<Settings>,
        mut history: History,
        index: u64,
        candidate: &Candidate,
    ) -> Self {
        history.assume(index, candidate);
        let left = match settings.budget {
            Budget::Trials(all) => all.saturating_sub(index + 1).min(GUESSED),
            Budget::Time(_) => GUESSED,
        };
        Self { settings, history, index: index + 1, left }
    }

    /// The candidate of the next trial, lowered.
    pub(crate) fn next(&mut self, ahead: &Ahead<'_>) -> Option<Candidate> {
        self.left = self.left.checked_sub(1)?;
        let tried = &self.history.tried;
        let lower = |config: &ScheduleConfig| ahead.lower_new(config, tried);
        let mut skipped = Skipped::default();
        let proposal = self.history.next(&self.settings, self.index, &mut skipped, lower)?;
        let candidate = proposal.lowered?;
        self.history.assume(self.index, &candidate);
        self.index += 1;
        Some(candidate)
    }
}
