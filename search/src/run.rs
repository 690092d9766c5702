//! The search: propose, gate, measure or predict, keep or revert. It does one trial at a time and hands it to the caller, who writes
//! it down before asking for the next; a search that absorbs those rows again goes on as if it had never stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::Scope;
use std::time::Duration;

use ir::schedule::{ActsOn, Knob, ScheduleConfig, Value};

use crate::ahead::Helpers;
use crate::assess::{self, Assessed, Screened, Timing};
use crate::audit::{Audit, Terms};
use crate::budget::Budget;
use crate::cpu::Candidate;
use crate::decide::{Decision, decide_measured, decide_predicted, predicted_gain};
use crate::device::{Device, DeviceError, Samples};
use crate::effort::{Bar, Look, spread};
use crate::gate::{Clock, Dropped, Gate, no_clock};
use crate::history::{Asked, Guess, History, Proposal, score};
use crate::measure::{Interval, gain, noise_floor};
use crate::propose::{Origin, Past, changes, mixed};
use crate::strategy::{Ground, Strategy, StrategyName, strategy};
use crate::trial::{Confirmation, Outcome, Skipped, Spent, Trial, changed};
use crate::verdict::{LatencyKind, Verdict};

/// Kernels that are compiled before anything asks for them.
const FORESEEN: usize = 12;

/// What is noted of a candidate that only seems to win.
const LEFT_BEHIND: &str = "order effect: the gain is gone where each side follows its own kind; the candidate slows what runs after it";

/// How a search goes about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What proposals, tokens and intervals are drawn with.
    pub seed: u64,
    /// When to end.
    pub budget: Budget,
    /// Trials, after the baseline, that the sweep over the knobs may take.
    pub explore: u64,
    /// The least gain worth keeping.
    pub min_gain: f64,
    /// The neutral default.
    pub default: ScheduleConfig,
    /// The knobs to vary, with the values to draw from.
    pub space: Vec<(Knob, Vec<Value>)>,
    /// How a device is timed.
    pub timing: Timing,
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoppedBy {
    /// As many trials as were asked for.
    Trials,
    /// The time is up.
    Time,
    /// Nothing new was found to try.
    Exhausted,
    /// Somebody stopped it.
    Interrupted,
}

impl StoppedBy {
    /// The name as in the output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Trials => "trials",
            Self::Time => "time",
            Self::Exhausted => "exhausted",
            Self::Interrupted => "interrupted",
        }
    }
}

/// What a call of [`Search::step`] did.
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
    /// A ledger's row does not fit the search that reads it.
    #[error("trial {trial} of the ledger does not continue this search: {reason}; start a new one")]
    Foreign {
        /// The row's trial.
        trial: u64,
        /// What does not fit.
        reason: String,
    },
}

/// A search under way.
pub struct Search<'a> {
    gate: Gate<'a>,
    device: Option<&'a mut (dyn Device + 'a)>,
    settings: Arc<Settings>,
    strategy: Arc<dyn Strategy>,
    trials: Vec<Trial>,
    /// Trials by the ids of their program and kernel.
    tried: BTreeMap<(String, String), u64>,
    rejected: u64,
    noise_floor: f64,
    /// Standard deviation of a block, from the trial that measured the noise.
    spread: f64,
    clock: Clock,
    spent: Spent,
    /// What checks the trials of a ledger.
    audit: Option<Audit>,
    /// Threads that work ahead.
    helpers: Option<Helpers<'a>>,
    /// The trial that leads, with its proofs once they are needed.
    incumbent: Option<(usize, Option<Assessed>)>,
}

/// What comparing a candidate with the incumbent gave.
#[derive(Default)]
struct Judgement {
    outcome: Option<Outcome>,
    why: String,
    gain: Option<Interval>,
    threshold: Option<f64>,
    noise_floor: Option<f64>,
    samples_us: Vec<[f64; 4]>,
}

impl<'a> Search<'a> {
    /// A search that has done nothing yet. Without a device it compares predictions.
    #[must_use]
    pub fn new(
        gate: Gate<'a>,
        device: Option<&'a mut (dyn Device + 'a)>,
        settings: Settings,
    ) -> Self {
        let ground =
            Ground { space: settings.space.clone(), seed: settings.seed, sweep: settings.explore };
        Self {
            gate,
            device,
            strategy: strategy(StrategyName::default(), ground, Vec::new()),
            settings: Arc::new(settings),
            trials: Vec::new(),
            tried: BTreeMap::new(),
            rejected: 0,
            noise_floor: 0.0,
            spread: 0.0,
            clock: no_clock,
            spent: Spent::default(),
            audit: None,
            helpers: None,
            incumbent: None,
        }
    }

    /// Has this strategy propose instead of the default one.
    #[must_use]
    pub fn with_strategy(self, strategy: Arc<dyn Strategy>) -> Self {
        Self { strategy, ..self }
    }

    /// Notes what trials spend their time on, by this clock. It decides nothing.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Lowers the schedules that are likely to come next, and runs them on the reference machine, beside the trial under way: with so many
    /// helpers, of so many threads each, which end with the search. They decide nothing: the trials are the same without them.
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
        &self.trials
    }

    /// The trial that leads.
    #[must_use]
    pub fn champion(&self) -> Option<&Trial> {
        self.incumbent.as_ref().map(|&(index, _)| &self.trials[index])
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

    /// Takes a finished trial from a ledger.
    ///
    /// # Errors
    /// If it is not the next trial of this search, or its figures do not follow from its samples.
    pub fn absorb(&mut self, trial: Trial) -> Result<(), SearchError> {
        let kind = match self.device {
            Some(_) => LatencyKind::MeasuredGpu,
            None => LatencyKind::Predicted,
        };
        let Settings { seed, min_gain, timing, .. } = *self.settings;
        let cache_bytes = self.device.as_deref().map_or(0, |device| device.describe().cache_bytes);
        let terms = Terms { seed, min_gain, timing, kind: Some(kind), cache_bytes };
        let audit = self.audit.get_or_insert_with(|| Audit::new(terms));
        let followed = audit.trial(&trial);
        followed.map_err(|reason| SearchError::Foreign { trial: trial.trial, reason })?;
        self.record(trial, None);
        Ok(())
    }

    /// Checks, after the last trial was absorbed, that the leading schedule still lowers to what the ledger says.
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

    /// Does one trial. `elapsed` is the time that the search has taken so far, sessions before a resume included.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn step(&mut self, elapsed: Duration) -> Result<Step, SearchError> {
        let index = self.trials.len() as u64;
        if self.settings.budget.is_spent(index, elapsed) {
            return Ok(Step::Done(match self.settings.budget {
                Budget::Trials(_) => StoppedBy::Trials,
                Budget::Time(_) => StoppedBy::Time,
            }));
        }
        let mut skipped = Skipped::default();
        self.spent = Spent::default();
        let (began, costs) = ((self.clock)(), self.costs());
        let Some(proposal) = self.propose(index, &mut skipped) else {
            return Ok(Step::Done(StoppedBy::Exhausted));
        };
        self.spent.propose_s = ((self.clock)() - began).as_secs_f64() - self.spent.lower_s;
        let (mut trial, assessed) = self.try_out(index, proposal, skipped, elapsed)?;
        trial.spent = Spent {
            device: self.costs() - costs,
            total_s: ((self.clock)() - began).as_secs_f64(),
            ..self.spent
        };
        self.record(trial.clone(), assessed);
        Ok(Step::Trial(Box::new(trial)))
    }

    fn costs(&self) -> crate::device::Costs {
        self.device.as_deref().map_or_else(Default::default, Device::costs)
    }

    fn asked(&self) -> Asked {
        Asked { strategy: self.strategy.clone(), budget: self.settings.budget }
    }

    /// What the finished trials say to the next one.
    fn history(&self) -> History {
        let mut past: Vec<Past> = Vec::new();
        for trial in &self.trials {
            let incumbent = trial.incumbent.and_then(|index| usize::try_from(index).ok());
            let Some(incumbent) = incumbent.and_then(|index| self.trials.get(index)) else {
                continue;
            };
            let gain = trial.gain.map(|gain| f64::midpoint(gain.low, gain.high));
            past.push(Past {
                config: trial.config,
                changes: changes(&incumbent.config, &trial.config),
                gain,
                kept: trial.outcome.leads(),
                score: gain.map(|gain| score(&past, gain)).filter(|score| score.is_finite()),
            });
        }
        History {
            parent: self.parent(),
            past,
            drawn: self.trials.iter().map(|trial| trial.config.id()).collect(),
            tried: self.tried.clone(),
        }
    }

    /// What proposals are drawn from: the schedule that leads, else the default.
    fn parent(&self) -> ScheduleConfig {
        self.champion().map_or(self.settings.default, |champion| champion.config)
    }

    /// The next schedule that is legal and lowers to something new; `None` when none is found. Helpers go on with those after it.
    fn propose(&mut self, index: u64, skipped: &mut Skipped) -> Option<Proposal> {
        let history = self.history();
        let (ahead, clock) = (&*self.gate.ahead, self.clock);
        let mut lower_s = 0.0;
        let mut timed = |config: &ScheduleConfig| {
            let began = clock();
            let lowered = ahead.lower_new(config, &history.tried);
            lower_s += (clock() - began).as_secs_f64();
            lowered
        };
        let proposal = if index == 0 {
            // The baseline is tried whatever comes of it.
            let config = history.parent;
            let lowered = timed(&config).ok().and_then(Result::ok);
            Some(Proposal { origin: Origin::Baseline, config, lowered })
        } else {
            history.next(&*self.strategy, index, skipped, timed)
        };
        self.spent.lower_s += lower_s;
        let candidate = proposal.as_ref().and_then(|proposal| proposal.lowered.as_ref());
        if let (Some(_), Some(candidate)) = (&self.helpers, candidate)
            && self.strategy.may_be_guessed()
        {
            ahead.guess(Guess::reverted(self.asked(), history, index, candidate));
        }
        proposal
    }

    fn try_out(
        &mut self,
        index: u64,
        proposal: Proposal,
        skipped: Skipped,
        elapsed: Duration,
    ) -> Result<(Trial, Option<Assessed>), SearchError> {
        let Proposal { origin, config, lowered } = proposal;
        let incumbent = self.champion().map(|champion| champion.trial);
        let changed = changed(&changes(&self.parent(), &config));
        let shared = self.device.as_deref().map(|device| device as &dyn Device);
        let mut verdict = assess::begin(&self.gate, shared, &config);
        let judged = self.judge(&config, lowered, &mut verdict);
        let (judgement, assessed) = match judged {
            Ok(judged) => judged,
            Err(Dropped::Failed(error @ DeviceError::Unavailable { .. })) => {
                return Err(SearchError::Device(error));
            }
            Err(dropped) => {
                assess::refuse(&mut verdict, &dropped);
                let device = self.device.as_deref_mut();
                assess::locate(&self.gate, device, &config, &dropped, &mut verdict);
                let outcome = Some(Outcome::from(&dropped));
                (Judgement { outcome, why: dropped.to_string(), ..Judgement::default() }, None)
            }
        };
        let trial = Trial {
            trial: index,
            origin,
            incumbent,
            outcome: judgement.outcome.unwrap_or(Outcome::Inconclusive),
            why: judgement.why,
            changed,
            config,
            gain: judgement.gain.filter(|gain| gain.low.is_finite() && gain.high.is_finite()),
            threshold: judgement.threshold.filter(|threshold| threshold.is_finite()),
            noise_floor: judgement.noise_floor.filter(|noise| noise.is_finite()),
            samples_us: judgement.samples_us,
            verdict,
            skipped,
            spent: Spent::default(),
            began_s: elapsed.as_secs_f64(),
            ended_s: elapsed.as_secs_f64(),
        };
        Ok((trial, assessed))
    }

    /// The gates, then the comparison with the incumbent. Nothing is assessed in full that was given up before.
    fn judge(
        &mut self,
        config: &ScheduleConfig,
        lowered: Option<Candidate>,
        verdict: &mut Verdict,
    ) -> Result<(Judgement, Option<Assessed>), Dropped> {
        let candidate = match lowered {
            Some(candidate) => {
                verdict.passed("validate", "every rule of schedules holds");
                assess::describe(&candidate, verdict);
                candidate
            }
            None => assess::lower(&self.gate, config, verdict)?,
        };
        self.ready_incumbent()?;
        if self.device.is_some() {
            return self.judge_on_device(candidate, verdict);
        }
        let (began, program_id) = ((self.clock)(), candidate.program_id.clone());
        let _ = self.gate.ahead.judge(&candidate, self.clock);
        self.spent.gates_s += ((self.clock)() - began).as_secs_f64();
        self.spent.reference_s = self.reference_s(&program_id);
        let assessed = assess::assess(&mut self.gate, None, candidate, verdict)?;
        let judgement = self.judge_predicted(&assessed, verdict);
        Ok((judgement, Some(assessed)))
    }

    /// Lets helpers begin with what comes next if a candidate is kept that was not given up.
    fn guess_kept(&self, candidate: &Candidate) {
        let guessed = self.strategy.may_be_guessed();
        if let (Some(_), Some(_), true) = (&self.helpers, &self.incumbent, guessed) {
            let index = self.trials.len() as u64;
            let guess = Guess::kept(self.asked(), self.history(), index, candidate);
            self.gate.ahead.guess(guess);
        }
    }

    /// Seconds that the reference machine took for this trial's program, ahead or now; none if an earlier trial had the same one.
    fn reference_s(&self, program_id: &str) -> f64 {
        let before = self.tried.keys().any(|(program, _)| program == program_id);
        if before { 0.0 } else { self.gate.ahead.seconds(program_id) }
    }

    /// The first stage, which may end it; then the rest of the gate, and the race.
    fn judge_on_device(
        &mut self,
        candidate: Candidate,
        verdict: &mut Verdict,
    ) -> Result<(Judgement, Option<Assessed>), Dropped> {
        let (clock, waited_s) = (self.clock, self.gate.waited_s);
        let began = clock();
        let device = device_of(&mut self.device)?;
        let program_id = candidate.program_id.clone();
        let screened = assess::screen(&mut self.gate, device, candidate, verdict, clock);
        self.spent.reference_s = self.reference_s(&program_id);
        self.spent.waiting_s = self.gate.waited_s - waited_s;
        self.spent.gates_s += (clock() - began).as_secs_f64();
        let screened = self.extend_if_needed(screened?, verdict)?;
        let began = clock();
        let given_up = self.give_up(&screened, verdict);
        self.spent.timing_s += (clock() - began).as_secs_f64();
        if let Some(judgement) = given_up? {
            return Ok((judgement, None));
        }
        self.guess_kept(&screened.candidate);
        let began = clock();
        let device = device_of(&mut self.device)?;
        let assessed = assess::complete(&self.gate, device, screened, verdict);
        self.spent.gates_s += (clock() - began).as_secs_f64();
        let assessed = assessed?;
        let began = clock();
        let judgement = self.judge_measured(&assessed, verdict);
        self.spent.timing_s += (clock() - began).as_secs_f64();
        Ok((judgement?, Some(assessed)))
    }

    /// How attention is split shows at later positions only: where it differs from the incumbent's, all positions are run before
    /// anything is timed.
    fn extend_if_needed(
        &mut self,
        screened: Screened,
        verdict: &mut Verdict,
    ) -> Result<Screened, Dropped> {
        let Some((_, Some(incumbent))) = &self.incumbent else { return Ok(screened) };
        if attend_alike(&incumbent.candidate, &screened.candidate) {
            return Ok(screened);
        }
        let began = (self.clock)();
        let device = device_of(&mut self.device)?;
        let screened = assess::extend(&self.gate, device, screened, verdict);
        self.spent.gates_s += ((self.clock)() - began).as_secs_f64();
        screened
    }

    /// Times a candidate once at the end of what was run and gives it up if it is clearly not better than the incumbent.
    fn give_up(
        &mut self,
        screened: &Screened,
        verdict: &mut Verdict,
    ) -> Result<Option<Judgement>, Dropped> {
        let (bar, seed) = (self.bar(), self.seed_of_trial());
        let Some((_, Some(incumbent))) = &self.incumbent else { return Ok(None) };
        let device = device_of(&mut self.device)?;
        let Some((samples, look)) =
            assess::glance(&self.gate, device, incumbent, screened, &bar, seed)?
        else {
            return Ok(None);
        };
        assess::given_up(&self.gate, screened, verdict);
        let at = screened.once.positions() as u32;
        let floors = assess::floors(&self.gate, device, &screened.candidate, at);
        let agreement = &screened.once.agreement;
        assess::set_measured(verdict, agreement, &samples, floors, seed)?;
        Ok(Some(compared(verdict, look, samples, bar.threshold)))
    }

    fn bar(&self) -> Bar {
        let Settings { min_gain, timing, .. } = *self.settings;
        let threshold = self.noise_floor.max(min_gain);
        Bar { threshold, spread: self.spread, rounds: timing.rounds }
    }

    fn seed_of_trial(&self) -> u64 {
        mixed(self.settings.seed, self.trials.len() as u64)
    }

    /// After a resume the incumbent's proofs are gone; it passes the gates again before anything is compared with it.
    fn ready_incumbent(&mut self) -> Result<(), Dropped> {
        let Some((index, None)) = self.incumbent else { return Ok(()) };
        let candidate = self.lower_again(index)?;
        let mut verdict = self.trials[index].verdict.clone();
        let device = self.device.as_deref_mut();
        let assessed = assess::assess(&mut self.gate, device, candidate, &mut verdict)?;
        self.incumbent = Some((index, Some(assessed)));
        Ok(())
    }

    fn lower_again(&self, index: usize) -> Result<Candidate, Dropped> {
        self.gate.ahead.lower(&self.trials[index].config)
    }

    fn judge_predicted(&self, assessed: &Assessed, verdict: &mut Verdict) -> Judgement {
        assess::set_predicted(verdict, &assessed.predicted);
        let us = assessed.predicted.us();
        let Some((_, Some(incumbent))) = &self.incumbent else {
            return self.first(format!("{us:.1} us predicted"));
        };
        let decision =
            decide_predicted(&incumbent.predicted, &assessed.predicted, self.settings.min_gain);
        let gain = predicted_gain(&incumbent.predicted, &assessed.predicted);
        Judgement {
            outcome: Some(decision.into()),
            why: format!(
                "{us:.1} us predicted, {:+.2} % against {:.1} us of the incumbent",
                -100.0 * gain,
                incumbent.predicted.us()
            ),
            gain: Some(Interval { low: gain, high: gain }),
            threshold: Some(self.settings.min_gain),
            ..Judgement::default()
        }
    }

    fn judge_measured(
        &mut self,
        assessed: &Assessed,
        verdict: &mut Verdict,
    ) -> Result<Judgement, Dropped> {
        let (bar, seed) = (self.bar(), self.seed_of_trial());
        let timing = self.settings.timing;
        let Some(agreement) = &assessed.on_device else {
            return Ok(self.judge_predicted(assessed, verdict));
        };
        let device = device_of(&mut self.device)?;
        let at = self.gate.timed_position();
        let floors = assess::floors(&self.gate, device, &assessed.candidate, at);
        let Some((_, Some(incumbent))) = &self.incumbent else {
            let itself = [assessed, assessed];
            let fixed = assess::fixed(timing.rounds);
            let samples = assess::race(&self.gate, device, itself, timing, fixed)?;
            let latency = assess::set_measured(verdict, agreement, &samples, floors, seed)?;
            let noise = noise_floor(&samples, seed);
            let why =
                format!("{:.1} us measured, noise {:.2} %", latency.median_us(), 100.0 * noise);
            let first = self.first(why);
            return Ok(Judgement { noise_floor: Some(noise), samples_us: samples.rounds, ..first });
        };
        let enough = |samples: &Samples| bar.enough(samples, seed);
        let sides = [incumbent, assessed];
        let samples = assess::race(&self.gate, device, sides, timing, enough)?;
        assess::set_measured(verdict, agreement, &samples, floors, seed)?;
        let look = bar.look(&samples, seed);
        if look.decision == Some(Decision::Inconclusive)
            && bar.is_left_behind(&samples)
            && look.gain.low > bar.threshold
        {
            verdict.notes.push(LEFT_BEHIND.to_owned());
        }
        Ok(compared(verdict, look, samples, bar.threshold))
    }

    /// The first correct candidate leads whatever its latency.
    fn first(&self, why: String) -> Judgement {
        let outcome = if self.trials.is_empty() { Outcome::Baseline } else { Outcome::Kept };
        Judgement { outcome: Some(outcome), why, ..Judgement::default() }
    }

    fn record(&mut self, trial: Trial, assessed: Option<Assessed>) {
        if let Some(key) = key_of(&trial.verdict) {
            self.tried.entry(key).or_insert(trial.trial);
        }
        self.rejected += trial.skipped.rejected;
        if let Some(noise) = trial.noise_floor {
            self.noise_floor = noise;
            let rounds = trial.samples_us.clone();
            self.spread = spread(&Samples { rounds, ..Samples::default() });
        }
        if trial.outcome.leads() {
            if let (Some((_, Some(old))), Some(device)) = (&self.incumbent, &mut self.device) {
                release(&mut **device, &old.candidate);
            }
            self.incumbent = Some((self.trials.len(), assessed));
            self.foresee(&trial.config);
        } else if let (Some(assessed), Some(device)) = (&assessed, &mut self.device) {
            release(&mut **device, &assessed.candidate);
        }
        self.trials.push(trial);
    }

    /// Tells the device which kernels may be asked for next: the leading schedule's with its kernel knobs changed, one change first.
    fn foresee(&mut self, leading: &ScheduleConfig) {
        let Some(device) = &mut self.device else { return };
        let kernel = |(knob, _): &&(Knob, Vec<Value>)| knob.acts_on() == ActsOn::Kernel;
        let mut soon = vec![(0, *leading)];
        for (knob, values) in self.settings.space.iter().filter(kernel) {
            let others = values.iter().filter(|&&value| value != leading.get(*knob));
            for value in others.copied() {
                let changed = |&(changes, mut config): &(u32, ScheduleConfig)| {
                    let is_new = config.get(*knob) == leading.get(*knob);
                    (is_new && config.set(*knob, value).is_ok()).then_some((changes + 1, config))
                };
                let more: Vec<_> = soon.iter().filter_map(changed).collect();
                soon.extend(more);
            }
        }
        soon.sort_by_key(|&(changes, _)| changes);
        let kernels: Vec<_> = soon[1..].iter().take(FORESEEN).map(|(_, c)| c.kernel).collect();
        device.foresee(&kernels);
    }

    /// Runs the champion again, on longer and fresh tokens and, where there is a device, against the baseline. `None` when there is no
    /// champion.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn confirm(&mut self) -> Result<Option<Confirmation>, SearchError> {
        let Some(champion) = self.champion() else { return Ok(None) };
        let mut confirmation = Confirmation {
            trials: self.trials.len() as u64,
            champion: champion.trial,
            decision: Decision::Kept,
            why: String::new(),
            positions: 0,
            gain: None,
            threshold: None,
            samples_us: Vec::new(),
            verdict: champion.verdict.clone(),
        };
        match self.confirm_into(&mut confirmation) {
            Ok(()) => Ok(Some(confirmation)),
            Err(Dropped::Failed(error @ DeviceError::Unavailable { .. })) => {
                Err(SearchError::Device(error))
            }
            Err(dropped) => {
                confirmation.decision = Decision::Reverted;
                confirmation.why = dropped.to_string();
                assess::refuse(&mut confirmation.verdict, &dropped);
                Ok(Some(confirmation))
            }
        }
    }

    fn confirm_into(&mut self, confirmation: &mut Confirmation) -> Result<(), Dropped> {
        self.ready_incumbent()?;
        let Some((index, Some(champion))) = &self.incumbent else { return Ok(()) };
        let (index, seed) = (*index, mixed(self.settings.seed, u64::MAX - 1));
        confirmation.positions = self.gate.thorough(&champion.candidate, seed)?;
        confirmation.why = format!("agrees at {} positions", confirmation.positions);
        if self.device.is_none() || index == 0 || self.trials[0].outcome != Outcome::Baseline {
            return Ok(());
        }
        let candidate = self.lower_again(0)?;
        let mut ignored = self.trials[0].verdict.clone();
        let device = self.device.as_deref_mut();
        let baseline = assess::assess(&mut self.gate, device, candidate, &mut ignored)?;
        self.race_baseline(&baseline, seed, confirmation)
    }

    fn race_baseline(
        &mut self,
        baseline: &Assessed,
        seed: u64,
        confirmation: &mut Confirmation,
    ) -> Result<(), Dropped> {
        let (Some((_, Some(champion))), Some(device)) =
            (&self.incumbent, self.device.as_deref_mut())
        else {
            return Ok(());
        };
        let Some(agreement) = &champion.on_device else { return Ok(()) };
        let Settings { min_gain, timing, .. } = *self.settings;
        let at = self.gate.timed_position();
        let floors = assess::floors(&self.gate, device, &champion.candidate, at);
        let fixed = assess::fixed(2 * timing.rounds);
        let samples = assess::race(&self.gate, device, [baseline, champion], timing, fixed)?;
        assess::set_measured(&mut confirmation.verdict, agreement, &samples, floors, seed)?;
        let interval = gain(&samples, seed);
        confirmation.decision = decide_measured(interval, self.noise_floor, min_gain);
        confirmation.why += &format!(
            ", gain {:+.2} to {:+.2} % against the baseline",
            100.0 * interval.low,
            100.0 * interval.high
        );
        confirmation.gain = Some(interval).filter(|gain| gain.low.is_finite());
        confirmation.threshold = Some(self.noise_floor.max(min_gain));
        confirmation.samples_us = samples.rounds;
        Ok(())
    }
}

/// The device of a search that has one.
fn device_of<'d, 'a>(
    device: &'d mut Option<&'a mut (dyn Device + 'a)>,
) -> Result<&'d mut (dyn Device + 'a), Dropped> {
    let none = || {
        let reason = "there is none; leave the device out to compare predictions".to_owned();
        Dropped::Failed(DeviceError::Unavailable { reason })
    };
    device.as_deref_mut().ok_or_else(none)
}

fn release(device: &mut (dyn Device + '_), candidate: &Candidate) {
    if let Ok(handle) = device.prepare(&candidate.program, &candidate.config.kernel) {
        device.release(handle);
    }
}

/// Whether two candidates attend in the same way, so that their times at early positions say what those at late ones would.
fn attend_alike(one: &Candidate, other: &Candidate) -> bool {
    let shape = |candidate: &Candidate| {
        let config = &candidate.config;
        let attention = config.tiling.attention;
        let handoffs = (config.sync.attention, config.sync.merge);
        (attention, config.fusion_grouping.merge, handoffs)
    };
    shape(one) == shape(other)
}

/// A comparison as a trial keeps it.
fn compared(verdict: &Verdict, look: Look, samples: Samples, threshold: f64) -> Judgement {
    let Look { gain, decision } = look;
    Judgement {
        outcome: decision.map(Outcome::from),
        why: format!(
            "{:.1} us measured, gain {:+.2} to {:+.2} % against the incumbent, {:.2} % needed, {} rounds",
            verdict.latency_us.unwrap_or(f64::NAN),
            100.0 * gain.low,
            100.0 * gain.high,
            100.0 * threshold,
            samples.rounds.len()
        ),
        gain: Some(gain),
        threshold: Some(threshold),
        noise_floor: None,
        samples_us: samples.rounds,
    }
}

/// What makes two trials one evaluation.
fn key_of(verdict: &Verdict) -> Option<(String, String)> {
    Some((verdict.program_id.clone()?, verdict.kernel_id.clone()?))
}

#[cfg(test)]
mod tests;
