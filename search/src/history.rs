//! The state that the next proposal follows from, and the choice of that proposal: the first draw that is legal and
//! lowers to something new. The search itself and the guesses of [`ahead`](crate::ahead), which assume that the current
//! trial is reverted, use the same steps.

use std::collections::BTreeSet;
use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use lower::LowerError;
use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};

use crate::budget::Budget;
use crate::cpu::Candidate;
use crate::propose::{Origin, TrialRecord, TrialRecords, changes};
use crate::rejection::Rejection;
use crate::strategy::{Question, Strategy};
use crate::trial::{SKIPPED_SHOWN, Skipped, SkippedProposal, Trial, changed};

/// Maximum draws for one trial, after which the space counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Maximum legal draws that are lowered for one trial, after which the space counts as exhausted.
const LOWERED_MAX: u32 = 256;

/// Number of trials guessed ahead: enough to start early on programs that take the reference VM long.
const GUESSED: u64 = 16;

/// Number of trials guessed for the case that the current one is kept.
const GUESSED_KEPT: u64 = 2;

/// Gain assumed for a guessed trial if it is reverted, and if it is kept. The proposer treats all losses alike.
const GUESSED_GAIN: [f64; 2] = [-0.01, 0.02];

/// The results of the finished trials that the next proposal depends on. It grows by one trial at a time. Copies are
/// cheap: helpers continue from one.
#[derive(Clone)]
pub(crate) struct History {
    /// The schedule that proposals are drawn from: the incumbent, else the default.
    pub(crate) parent: ScheduleConfig,
    pub(crate) past: TrialRecords,
    /// Ids of the schedules that were tried.
    drawn: RedBlackTreeSetSync<String>,
    pub(crate) tried: Tried,
}

/// Trials by the ids of their program and kernel.
pub(crate) type Tried = RedBlackTreeMapSync<(String, String), u64>;

/// A lowered schedule, the trial that it would repeat, or why it cannot be lowered.
pub(crate) type Lowered = Result<Result<Candidate, u64>, Rejection>;

/// A schedule to try, with its lowered form, unless it is to be lowered within its trial so that a failure is recorded.
#[derive(Clone)]
pub(crate) struct Proposal {
    pub(crate) origin: Origin,
    pub(crate) config: ScheduleConfig,
    pub(crate) lowered: Option<Candidate>,
}

impl History {
    /// No trial yet.
    pub(crate) fn new(default: ScheduleConfig) -> Self {
        let (drawn, tried) = (RedBlackTreeSetSync::default(), Tried::default());
        Self { parent: default, past: TrialRecords::default(), drawn, tried }
    }

    /// Adds a finished trial; `incumbent` is the schedule that it was compared with.
    pub(crate) fn learn(&mut self, trial: &Trial, incumbent: Option<&ScheduleConfig>) {
        let Trial { config, verdict, .. } = trial;
        if let Some(incumbent) = incumbent {
            let gain = trial.gain.map(|gain| f64::midpoint(gain.low, gain.high));
            let score = gain.map(|gain| self.past.score(gain)).filter(|score| score.is_finite());
            let (changes, kept) = (changes(incumbent, config), trial.outcome.leads());
            self.past.push(TrialRecord { config: *config, changes, gain, kept, score });
        }
        if trial.outcome.leads() {
            self.parent = *config;
        }
        self.drawn.insert_mut(config.id());
        if let (Some(program), Some(kernel)) = (&verdict.program_id, &verdict.kernel_id) {
            self.try_first((program.clone(), kernel.clone()), trial.trial);
        }
    }

    /// Records the trial of a program and kernel, if it is the first.
    fn try_first(&mut self, key: (String, String), trial: u64) {
        if !self.tried.contains_key(&key) {
            self.tried.insert_mut(key, trial);
        }
    }

    /// The proposal for a trial; `None` if none is found. `lower` returns the lowered schedule, or the trial that it
    /// would repeat.
    pub(crate) fn next(
        &self,
        strategy: &dyn Strategy,
        index: u64,
        skipped: &mut Skipped,
        mut lower: impl FnMut(&ScheduleConfig) -> Lowered,
    ) -> Option<Proposal> {
        let question = Question { trial: index, incumbent: &self.parent, past: &self.past };
        let mut drawn = BTreeSet::new();
        let mut lowered = 0;
        for (origin, config) in strategy.ask(&question).take(DRAWS_MAX) {
            let id = config.id();
            if self.drawn.contains(&id) || !drawn.insert(id) {
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
                // An internal error of the lowering must not be hidden: the schedule is tried and the error recorded.
                Err(Rejection::Unloadable(LowerError::Internal(_))) => {
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

    /// Updates the history as if this trial had been reverted or kept, or had become the baseline.
    pub(crate) fn assume(&mut self, index: u64, candidate: &Candidate, kept: bool) {
        let config = *candidate.config;
        if index > 0 {
            let changes = changes(&self.parent, &config);
            let gain = GUESSED_GAIN[usize::from(kept)];
            let score = Some(self.past.score(gain));
            self.past.push(TrialRecord { config, changes, gain: Some(gain), kept, score });
        }
        if kept {
            self.parent = config;
        }
        self.drawn.insert_mut(config.id());
        self.try_first(candidate.key(), index);
    }
}

/// The strategy to ask for the coming trials, and the budget that limits their number.
pub(crate) struct Asked {
    pub(crate) strategy: Arc<dyn Strategy>,
    pub(crate) budget: Budget,
}

/// A guess at the next trials, and the state to continue it from.
#[derive(Clone)]
pub(crate) struct Guess {
    strategy: Arc<dyn Strategy>,
    history: History,
    /// The next trial.
    index: u64,
    left: u64,
    urgent: bool,
}

impl Guess {
    /// Guesses the trials after this one: after a trial that begins, for the case that it is reverted; after a trial
    /// that was not given up, for the case that it is kept.
    pub(crate) fn after(
        asked: Asked,
        mut history: History,
        index: u64,
        candidate: &Candidate,
        kept: bool,
    ) -> Self {
        history.assume(index, candidate, kept);
        Self::onward(asked, history, index + 1, kept)
    }

    /// Guesses the trials from this one on, assuming that all are reverted.
    pub(crate) fn onward(asked: Asked, history: History, index: u64, urgent: bool) -> Self {
        let most = if urgent { GUESSED_KEPT } else { GUESSED };
        let left = asked.budget.end(index + most).saturating_sub(index);
        Self { strategy: asked.strategy, history, index, left, urgent }
    }

    /// Whether it goes before earlier guesses.
    pub(crate) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// The candidate of the next trial, lowered.
    pub(crate) fn next(
        &mut self,
        lower: impl Fn(&ScheduleConfig, &Tried) -> Lowered,
    ) -> Option<Candidate> {
        self.left = self.left.checked_sub(1)?;
        let lower = |config: &ScheduleConfig| lower(config, &self.history.tried);
        let mut skipped = Skipped::default();
        let proposal = self.history.next(&*self.strategy, self.index, &mut skipped, lower)?;
        let candidate = proposal.lowered?;
        self.history.assume(self.index, &candidate, false);
        self.index += 1;
        Some(candidate)
    }
}

#[cfg(test)]
mod tests;
