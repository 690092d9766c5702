//! The search: propose, gate, measure or predict, keep or revert. It runs one trial at a time and returns it to the
//! caller, who records it before asking for the next. A search that absorbs the recorded rows continues as if it had
//! never stopped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::Scope;
use std::time::Duration;

use ir::schedule::ScheduleConfig;

use crate::ahead::Helpers;
use crate::audit::{Audit, Terms};
use crate::budget::Budget;
use crate::cpu::Candidate;
use crate::decide::Decision;
use crate::device::{Device, DeviceError};
use crate::device_worker::{Job, LastJob, Lead, Noise};
use crate::enough::Enough;
use crate::gate::Gate;
use crate::history::{Asked, Guess, History, Proposal};
use crate::propose::Origin;
use crate::rejection::Rejection;
use crate::settings::{Clock, Settings, no_clock};
use crate::strategy::{Known, SearchSpace, Strategy, StrategyName, strategy};
use crate::trial::{Confirmation, Outcome, Skipped, Spent, Trial};
use crate::verdict::LatencyKind;
use crate::worker_pool::WorkerPool;

mod finals;
mod fleet;

pub use fleet::WastedSpeculation;
use fleet::{Fleet, Phase};

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum StoppedBy {
    /// The requested number of trials is done.
    Trials,
    /// The time is up.
    Time,
    /// No new schedule was found.
    Exhausted,
    /// The goal of [`Enough`] is reached.
    Goal,
    /// The incumbent is as near to its bound as [`Enough`] asks.
    Bound,
    /// The caller stopped it.
    Interrupted,
}

impl StoppedBy {
    /// The name as in the output.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The result of a call of [`Search::step`].
#[derive(Debug)]
pub enum Step {
    /// One trial.
    Trial(Box<Trial>),
    /// Nothing: the search is over.
    Done(StoppedBy),
}

/// Why a search cannot go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SearchError {
    /// The device is gone.
    #[error("{0}")]
    Device(DeviceError),
    /// A ledger's row does not fit the search that absorbs it.
    #[error("trial {trial} of the ledger does not continue this search: {reason}; start a new one")]
    Foreign {
        /// The row's trial.
        trial: u64,
        /// What does not fit.
        reason: String,
    },
}

/// A gate of the caller for a trial that is to be kept.
pub type LastGate<'a> = Box<dyn FnMut(&Trial) -> Result<(), Rejection> + 'a>;

/// A search under way.
pub struct Search<'a> {
    gate: Gate<'a>,
    /// The devices.
    fleet: Fleet<'a>,
    settings: Arc<Settings>,
    enough: Enough,
    /// Whether that is reached, and which of the two. A race at the end does not change it.
    reached: Option<StoppedBy>,
    strategy: Arc<dyn Strategy>,
    /// The trials so far, with the checks for those of a ledger.
    rows: Audit,
    /// The state that the next proposal follows from.
    history: History,
    /// Program ids of the trials.
    programs: BTreeSet<String>,
    rejected: u64,
    clock: Clock,
    spent: Spent,
    /// Threads that work ahead of the search.
    helpers: Option<Helpers<'a>>,
    last_gate: Option<LastGate<'a>>,
}

impl<'a> Search<'a> {
    /// A search without trials yet, on one device. Without a device it compares predictions.
    #[must_use]
    pub fn new(
        gate: Gate<'a>,
        device: Option<&'a mut (dyn Device + 'a)>,
        settings: Settings,
    ) -> Self {
        let kind = device.as_ref().map_or(LatencyKind::Predicted, |_| LatencyKind::MeasuredGpu);
        Self::on(gate, WorkerPool::here(device), kind, settings)
    }

    /// A search on several devices at once, of which at least one is open.
    #[must_use]
    pub fn side_by_side(gate: Gate<'a>, pool: WorkerPool<'a>, settings: Settings) -> Self {
        Self::on(gate, pool, LatencyKind::MeasuredGpu, settings)
    }

    fn on(gate: Gate<'a>, pool: WorkerPool<'a>, kind: LatencyKind, settings: Settings) -> Self {
        let search_space = SearchSpace {
            space: settings.space.clone(),
            seed: settings.seed,
            sweep: settings.explore,
            short: settings.budget.is_short(),
        };
        let Settings { seed, min_gain, timing, default, .. } = settings;
        let terms =
            Terms { seed, min_gain, timing, kind: Some(kind), cache_bytes: pool.cache_bytes() };
        Self {
            gate,
            fleet: Fleet::new(pool),
            strategy: strategy(StrategyName::HillClimb, search_space, Known::default()),
            settings: Arc::new(settings),
            enough: Enough::default(),
            reached: None,
            rows: Audit::new(terms),
            history: History::new(default),
            programs: BTreeSet::new(),
            rejected: 0,
            clock: no_clock,
            spent: Spent::default(),
            helpers: None,
            last_gate: None,
        }
    }

    /// Uses this strategy instead of `hill-climb`.
    #[must_use]
    pub fn with_strategy(self, strategy: Arc<dyn Strategy>) -> Self {
        Self { strategy, ..self }
    }

    /// Lets a trial that is to be kept pass this gate before it leads. One that fails is recorded as a failed trial, and the
    /// search goes on from its incumbent.
    #[must_use]
    pub fn with_last_gate(self, gate: LastGate<'a>) -> Self {
        Self { last_gate: Some(gate), ..self }
    }

    /// Ends the search before its budget is spent, as soon as this is reached. There is no race at its end after a goal, which
    /// asks for enough and not for the best.
    #[must_use]
    pub fn until(self, enough: Enough) -> Self {
        Self { enough, ..self }
    }

    /// Records what trials spend their time on, by this clock. The times decide nothing.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Lowers the schedules that are likely to come next and runs them on the reference VM while a trial runs: on
    /// `helpers` helpers of `threads` threads each, which end with the search. They decide nothing: the trials are the
    /// same without them.
    #[must_use]
    pub fn with_helpers<'scope>(
        mut self,
        scope: &'scope Scope<'scope, '_>,
        helpers: usize,
        threads: usize,
    ) -> Self
    where
        'a: 'scope,
    {
        let ahead = &self.gate.ahead;
        self.helpers = Some(Helpers::start(ahead, scope, helpers, threads, self.clock));
        self
    }

    /// The trials so far.
    #[must_use]
    pub fn trials(&self) -> &[Trial] {
        &self.rows.trials
    }

    /// The incumbent's trial.
    #[must_use]
    pub fn champion(&self) -> Option<&Trial> {
        self.rows.champion.map(|index| &self.rows.trials[index])
    }

    /// Speculative work on several devices that was wasted.
    #[must_use]
    pub fn dropped(&self) -> WastedSpeculation {
        self.fleet.dropped()
    }

    /// Illegal proposals so far. They cost no trial.
    #[must_use]
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// The gate.
    #[must_use]
    pub fn gate(&self) -> &Gate<'a> {
        &self.gate
    }

    /// Adds a finished trial from a ledger.
    ///
    /// # Errors
    /// If it is not the next trial of this search, or its figures do not follow from its samples.
    pub fn absorb(&mut self, trial: Trial) -> Result<(), SearchError> {
        let followed = self.rows.check(&trial);
        followed.map_err(|reason| SearchError::Foreign { trial: trial.trial, reason })?;
        self.record(trial);
        Ok(())
    }

    /// Checks, after the last trial was absorbed, that the incumbent's schedule still lowers to the program in the ledger.
    ///
    /// # Errors
    /// If it does not: the ledger was written by another version, or for another model.
    pub fn check_absorbed(&self) -> Result<(), SearchError> {
        let Some(champion) = self.champion() else { return Ok(()) };
        let foreign = |reason: String| SearchError::Foreign { trial: champion.trial, reason };
        let lowered = self.gate.ahead.lower(&champion.config);
        let candidate = lowered.map_err(|dropped| foreign(dropped.to_string()))?;
        let now = Some(&candidate.program_id);
        if now == champion.verdict.program_id.as_ref() {
            return Ok(());
        }
        Err(foreign(format!("its schedule lowers to program {} now", candidate.program_id)))
    }

    /// Runs one trial. `elapsed` is the time that the search has taken so far, including sessions before a resume.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn step(&mut self, elapsed: Duration) -> Result<Step, SearchError> {
        let budget = self.settings.budget;
        let spent = budget.is_spent(self.trials().len() as u64, elapsed);
        let trial = if spent || self.reached.is_some() {
            None
        } else {
            self.next_trial(Phase::Search, elapsed)?
        };
        let trial = match trial {
            Some(trial) => Some(trial),
            None => self.next_trial(Phase::Finals, elapsed)?,
        };
        let Some(trial) = trial else {
            return Ok(Step::Done(match (self.reached, budget) {
                (Some(enough), _) => enough,
                (None, Budget::Trials(_)) if spent => StoppedBy::Trials,
                (None, Budget::Time(_)) if spent => StoppedBy::Time,
                (None, Budget::Trials(_) | Budget::Time(_)) => StoppedBy::Exhausted,
            }));
        };
        let trial = Trial { left_out: self.fleet.take_left_out(), ..trial };
        let trial = self.past_last_gate(trial)?;
        self.record(trial.clone());
        Ok(Step::Trial(Box::new(trial)))
    }

    /// Runs the caller's gate on a trial that is to be kept.
    fn past_last_gate(&mut self, mut trial: Trial) -> Result<Trial, SearchError> {
        if trial.outcome != Outcome::Kept {
            return Ok(trial);
        }
        match self.last_gate.as_mut().map_or(Ok(()), |gate| gate(&trial)) {
            Ok(()) => {}
            Err(Rejection::Failed(gone @ DeviceError::Unavailable { .. })) => {
                return Err(SearchError::Device(gone));
            }
            Err(why) => trial.fail(&why),
        }
        Ok(trial)
    }

    /// The job for a trial, on one of several cards or on the only device (`None`).
    fn job(
        &self,
        index: u64,
        proposal: Proposal,
        history: &History,
        lead: Option<Lead>,
        card: Option<u32>,
        elapsed: Duration,
    ) -> Job {
        let candidate = proposal.lowered.as_ref();
        let new = proposal.origin != Origin::Race;
        let may = new && lead.is_some() && self.helpers.is_some() && self.strategy.may_be_guessed();
        let guess = |c: &Candidate| Guess::after(self.asked(), history.clone(), index, c, true);
        Job {
            index,
            parent: history.parent,
            skipped: Skipped::default(),
            lead,
            noise: self.noise(card),
            began_s: elapsed.as_secs_f64(),
            spent: self.spent,
            is_known_program: candidate.is_some_and(|c| self.programs.contains(&c.program_id)),
            if_kept: candidate.filter(|_| may).map(guess),
            proposal,
        }
    }

    /// The incumbent in the form that device workers use.
    fn lead(&self) -> Option<Lead> {
        self.champion().map(|trial| Lead { trial: trial.trial, config: trial.config })
    }

    fn noise(&self, card: Option<u32>) -> Noise {
        self.rows.noises.get(&card).copied().unwrap_or_default()
    }

    fn asked(&self) -> Asked {
        Asked { strategy: self.strategy.clone(), budget: self.settings.budget }
    }

    /// A copy of the state that the next proposal follows from.
    fn history(&self) -> History {
        self.history.clone()
    }

    /// The schedules that are still to be raced, if this search has a race.
    fn finals(&self) -> Vec<ScheduleConfig> {
        let measured = self.rows.terms.kind == Some(LatencyKind::MeasuredGpu);
        let races = measured && self.reached != Some(StoppedBy::Goal);
        let finalists = if races { self.settings.finalists } else { 0 };
        finals::remaining(self.trials(), &self.history.past, finalists)
    }

    /// The lowered schedule, if it lowers.
    fn lower_timed(&mut self, config: &ScheduleConfig) -> Option<Candidate> {
        let began = (self.clock)();
        let lowered = self.gate.ahead.lower(config).ok();
        self.spent.lower_s += ((self.clock)() - began).as_secs_f64();
        lowered
    }

    /// The proposal that follows from a history.
    fn next_of(
        &mut self,
        history: &History,
        index: u64,
        skipped: &mut Skipped,
    ) -> Option<Proposal> {
        let (ahead, clock) = (&*self.gate.ahead, self.clock);
        let (began, mut lower_s) = (clock(), 0.0);
        let timed = |config: &ScheduleConfig| {
            let began = clock();
            let lowered = ahead.lower_new(config, &history.tried);
            lower_s += (clock() - began).as_secs_f64();
            lowered
        };
        let proposal = history.next(&*self.strategy, index, skipped, timed);
        self.spent.lower_s += lower_s;
        self.spent.propose_s += (clock() - began).as_secs_f64() - lower_s;
        proposal
    }

    fn record(&mut self, trial: Trial) {
        let incumbent = trial.incumbent.and_then(|index| usize::try_from(index).ok());
        let incumbent = incumbent.and_then(|index| self.rows.trials.get(index));
        self.history.learn(&trial, incumbent.map(|trial| &trial.config));
        self.programs.extend(trial.verdict.program_id.clone());
        self.rejected += trial.skipped.rejected;
        self.rows.push(trial);
        if self.reached.is_none() {
            self.reached = self.enough.reached(self.trials(), self.champion());
        }
    }

    /// Runs the champion again, on longer and fresh tokens and, if there is a device, against the baseline. `None` if
    /// there is no champion.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn confirm(&mut self) -> Result<Option<Confirmation>, SearchError> {
        let (Some(champion), Some(lead)) = (self.champion(), self.lead()) else { return Ok(None) };
        let confirmation = Confirmation {
            trials: self.trials().len() as u64,
            champion: champion.trial,
            decision: Decision::Kept,
            verdict: champion.verdict.clone(),
            ..Confirmation::default()
        };
        let raced = lead.trial > 0 && self.trials()[0].outcome == Outcome::Baseline;
        let baseline = raced.then_some(self.trials()[0].config);
        let noise = self.noise(None);
        let job = LastJob { confirmation, lead, baseline, noise, thorough: true };
        self.confirm_on_fleet(&job).map(Some)
    }
}

#[cfg(test)]
mod tests;
