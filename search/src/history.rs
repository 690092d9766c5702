//! What the next proposal follows from, and the search for it: the first draw that is legal and lowers to something new. The same steps
//! serve the search itself and the guesses of [`ahead`](crate::ahead), which assume that the trial under way is reverted.

use std::collections::BTreeSet;
use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use lower::LowerError;

use crate::budget::Budget;
use crate::cpu::Candidate;
use crate::growing::Growing;
use crate::propose::{Origin, TrialRecord, TrialRecords, changes};
use crate::rejection::Rejection;
use crate::strategy::{Question, Strategy};
use crate::trial::{SKIPPED_SHOWN, Skipped, SkippedProposal, Trial, changed};

/// Draws for one trial before the space counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Legal draws that are lowered for one trial before the space counts as exhausted.
const LOWERED_MAX: u32 = 256;

/// Trials that are guessed: far enough that what the reference VM takes long for is begun early.
const GUESSED: u64 = 16;

/// Trials that are guessed for the case that the one under way is kept.
const GUESSED_KEPT: u64 = 2;

/// Gain that a trial under way is guessed to have if it is reverted, and if it is kept. The proposer treats all losses alike.
const GUESSED_GAIN: [f64; 2] = [-0.01, 0.02];

/// What the finished trials say to the next one. It grows by a trial at a time, and copies of it are cheap: helpers go on from one.
#[derive(Clone)]
pub(crate) struct History {
    /// What proposals are drawn from: the schedule that leads, else the default.
    pub(crate) parent: ScheduleConfig,
    pub(crate) past: TrialRecords,
    /// Ids of the schedules that were tried.
    drawn: Growing<String, ()>,
    pub(crate) tried: Tried,
}

/// Trials by the ids of their program and kernel.
pub(crate) type Tried = Growing<(String, String), u64>;

/// A lowered schedule, the trial that it would repeat, or why it cannot be lowered.
pub(crate) type Lowered = Result<Result<Candidate, u64>, Rejection>;

/// A schedule to try. What it lowers to is there already, unless lowering is to fail in the open.
#[derive(Clone)]
pub(crate) struct Proposal {
    pub(crate) origin: Origin,
    pub(crate) config: ScheduleConfig,
    pub(crate) lowered: Option<Candidate>,
}

impl History {
    /// No trial yet.
    pub(crate) fn new(default: ScheduleConfig) -> Self {
        let (past, drawn, tried) =
            (TrialRecords::default(), Growing::default(), Growing::default());
        Self { parent: default, past, drawn, tried }
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
        self.drawn.insert(config.id(), ());
        if let (Some(program), Some(kernel)) = (&verdict.program_id, &verdict.kernel_id) {
            self.tried.insert((program.clone(), kernel.clone()), trial.trial);
        }
    }

    /// The proposal for a trial; `None` when none is found. `lower` gives the lowered schedule, or the trial that it would repeat.
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
            if self.drawn.get(&id).is_some() || !drawn.insert(id) {
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

    /// As if this trial had been reverted or kept, or had become the baseline that it was to be.
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
        self.drawn.insert(config.id(), ());
        self.tried.insert(candidate.key(), index);
    }
}

/// Who is asked for the trials to come, and how many there can be.
pub(crate) struct Asked {
    pub(crate) strategy: Arc<dyn Strategy>,
    pub(crate) budget: Budget,
}

/// What the next trials are guessed from.
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
    /// A guess at what comes after a trial: of one that begins, if it is reverted, and of one that was not given up, if it is kept.
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

    /// A guess at what comes from a trial on: all are reverted.
    pub(crate) fn onward(asked: Asked, history: History, index: u64, urgent: bool) -> Self {
        let most = if urgent { GUESSED_KEPT } else { GUESSED };
        let left = asked.budget.end(index + most).saturating_sub(index);
        Self { strategy: asked.strategy, history, index, left, urgent }
    }

    /// Whether it goes before what was guessed earlier.
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
