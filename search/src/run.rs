//! The search: propose, gate, measure or predict, keep or revert. It does one trial at a time and hands it to the caller, who writes
//! it down before asking for the next; a search that absorbs those rows again goes on as if it had never stopped.

use std::collections::BTreeSet;
use std::time::Duration;

use ir::schedule::{Knob, ScheduleConfig, Value};
use lower::LowerError;

use crate::assess::{self, Assessed, Timing};
use crate::budget::Budget;
use crate::decide::{Decision, decide_measured, decide_predicted, predicted_gain};
use crate::device::{Device, DeviceError};
use crate::gate::{Candidate, Dropped, Gate};
use crate::measure::{Interval, gain, noise_floor};
use crate::propose::{Origin, Proposer, changes, mixed};
use crate::trial::{
    Confirmation, Outcome, SKIPPED_SHOWN, Skipped, SkippedProposal, Trial, changed,
};
use crate::verdict::Verdict;

/// Draws for one trial before the space counts as exhausted.
const DRAWS_MAX: u32 = 20_000;

/// Legal draws that are lowered for one trial before the space counts as exhausted.
const LOWERED_MAX: u32 = 256;

/// How a search goes about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What proposals, tokens and intervals are drawn with.
    pub seed: u64,
    /// When to end.
    pub budget: Budget,
    /// Trials, after the baseline, that are drawn around the default.
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
    settings: Settings,
    trials: Vec<Trial>,
    tried: BTreeSet<(String, String)>,
    rejected: u64,
    noise_floor: f64,
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
        Self {
            gate,
            device,
            settings,
            trials: Vec::new(),
            tried: BTreeSet::new(),
            rejected: 0,
            noise_floor: 0.0,
            incumbent: None,
        }
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
    /// If it is not the next trial of this search.
    pub fn absorb(&mut self, trial: Trial) -> Result<(), SearchError> {
        let foreign = |reason: &str| {
            Err(SearchError::Foreign { trial: trial.trial, reason: reason.to_owned() })
        };
        if trial.trial != self.trials.len() as u64 {
            return foreign("its number is not the next one");
        }
        if trial.incumbent != self.champion().map(|champion| champion.trial) {
            return foreign("it was compared with another incumbent");
        }
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
        let lowered = self.gate.validate(&champion.config).and_then(|v| self.gate.lower(v));
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
        let origin = self.origin(index);
        let Some(config) = self.propose(index, origin, &mut skipped) else {
            return Ok(Step::Done(StoppedBy::Exhausted));
        };
        let (trial, assessed) = self.try_out(index, origin, &config, skipped, elapsed)?;
        self.record(trial.clone(), assessed);
        Ok(Step::Trial(Box::new(trial)))
    }

    fn origin(&self, index: u64) -> Origin {
        if index == 0 {
            Origin::Baseline
        } else if index <= self.settings.explore || self.incumbent.is_none() {
            Origin::Explore
        } else {
            Origin::Mutate
        }
    }

    /// What a proposal is drawn from: the incumbent's schedule for mutations, else the default.
    fn parent(&self, origin: Origin) -> ScheduleConfig {
        let champion = self.champion().filter(|_| origin == Origin::Mutate);
        champion.map_or(self.settings.default, |champion| champion.config)
    }

    /// The next schedule that is legal and lowers to something new; `None` when none is found.
    fn propose(&self, index: u64, origin: Origin, skipped: &mut Skipped) -> Option<ScheduleConfig> {
        if origin == Origin::Baseline {
            return Some(self.settings.default);
        }
        let parent = self.parent(origin);
        let default = &self.settings.default;
        let mut proposer = Proposer::new(&self.settings.space, self.settings.seed, index);
        let mut drawn = BTreeSet::new();
        let mut lowered = 0;
        for _ in 0..DRAWS_MAX {
            let config = proposer.draw(origin, default, &parent);
            if !drawn.insert(config.id()) {
                continue;
            }
            let why = match self.is_new(&config) {
                Ok(None) => return Some(config),
                Ok(Some(twin)) => {
                    skipped.repeated += 1;
                    lowered += 1;
                    format!("lowers to the program and kernel of trial {twin}")
                }
                // Our own mistake must be seen, so it is tried and recorded.
                Err(Dropped::Unloadable(LowerError::Internal(_))) => return Some(config),
                Err(dropped) => {
                    skipped.rejected += 1;
                    dropped.to_string()
                }
            };
            if skipped.examples.len() < SKIPPED_SHOWN {
                let changed = changed(&changes(&parent, &config));
                skipped.examples.push(SkippedProposal { changed, why });
            }
            if lowered == LOWERED_MAX {
                break;
            }
        }
        None
    }

    /// The trial that this schedule would repeat, if there is one.
    fn is_new(&self, config: &ScheduleConfig) -> Result<Option<u64>, Dropped> {
        let candidate = self.gate.lower(self.gate.validate(config)?)?;
        let key = (candidate.program_id, candidate.kernel_id);
        if !self.tried.contains(&key) {
            return Ok(None);
        }
        let same = |trial: &&Trial| key_of(&trial.verdict).as_ref() == Some(&key);
        Ok(self.trials.iter().find(same).map(|trial| trial.trial))
    }

    fn try_out(
        &mut self,
        index: u64,
        origin: Origin,
        config: &ScheduleConfig,
        skipped: Skipped,
        elapsed: Duration,
    ) -> Result<(Trial, Option<Assessed>), SearchError> {
        let incumbent = self.champion().map(|champion| champion.trial);
        let changed = changed(&changes(&self.parent(origin), config));
        let shared = self.device.as_deref().map(|device| device as &dyn Device);
        let mut verdict = assess::begin(&self.gate, shared, config);
        let judged = self.judge(config, &mut verdict);
        let (judgement, assessed) = match judged {
            Ok((judgement, assessed)) => (judgement, Some(assessed)),
            Err(Dropped::Failed(error @ DeviceError::Unavailable { .. })) => {
                return Err(SearchError::Device(error));
            }
            Err(dropped) => {
                assess::refuse(&mut verdict, &dropped);
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
            config: *config,
            gain: judgement.gain.filter(|gain| gain.low.is_finite() && gain.high.is_finite()),
            threshold: judgement.threshold.filter(|threshold| threshold.is_finite()),
            noise_floor: judgement.noise_floor.filter(|noise| noise.is_finite()),
            samples_us: judgement.samples_us,
            verdict,
            skipped,
            began_s: elapsed.as_secs_f64(),
            ended_s: elapsed.as_secs_f64(),
        };
        Ok((trial, assessed))
    }

    /// The gates, then the comparison with the incumbent.
    fn judge(
        &mut self,
        config: &ScheduleConfig,
        verdict: &mut Verdict,
    ) -> Result<(Judgement, Assessed), Dropped> {
        let candidate = assess::lower(&self.gate, config, verdict)?;
        let assessed =
            assess::assess(&mut self.gate, self.device.as_deref_mut(), candidate, verdict)?;
        self.ready_incumbent()?;
        let judgement = match self.device.is_some() {
            true => self.judge_measured(&assessed, verdict)?,
            false => self.judge_predicted(&assessed, verdict),
        };
        Ok((judgement, assessed))
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
        self.gate.lower(self.gate.validate(&self.trials[index].config)?)
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
        let (Some(device), Some(agreement)) = (self.device.as_deref_mut(), &assessed.on_device)
        else {
            return Ok(self.judge_predicted(assessed, verdict));
        };
        let Settings { seed, min_gain, timing, .. } = self.settings;
        let seed = mixed(seed, self.trials.len() as u64);
        let floors = assess::floors(&self.gate, device, &assessed.candidate);
        let Some((_, Some(incumbent))) = &self.incumbent else {
            let samples = assess::race(&self.gate, device, assessed, assessed, timing)?;
            let latency = assess::set_measured(verdict, agreement, &samples, floors, seed)?;
            let noise = noise_floor(&samples, seed);
            let why =
                format!("{:.1} us measured, noise {:.2} %", latency.median_us(), 100.0 * noise);
            let first = self.first(why);
            return Ok(Judgement { noise_floor: Some(noise), samples_us: samples.rounds, ..first });
        };
        let mut samples = assess::race(&self.gate, device, incumbent, assessed, timing)?;
        let mut interval = gain(&samples, seed);
        let mut decision = decide_measured(interval, self.noise_floor, min_gain);
        if decision == Decision::Inconclusive {
            let longer = Timing { rounds: 2 * timing.rounds, ..timing };
            samples.extend(assess::race(&self.gate, device, incumbent, assessed, longer)?);
            interval = gain(&samples, seed);
            decision = decide_measured(interval, self.noise_floor, min_gain);
        }
        let latency = assess::set_measured(verdict, agreement, &samples, floors, seed)?;
        let threshold = self.noise_floor.max(min_gain);
        Ok(Judgement {
            outcome: Some(decision.into()),
            why: format!(
                "{:.1} us measured, gain {:+.2} to {:+.2} % against the incumbent, {:.2} % needed",
                latency.median_us(),
                100.0 * interval.low,
                100.0 * interval.high,
                100.0 * threshold
            ),
            gain: Some(interval),
            threshold: Some(threshold),
            noise_floor: None,
            samples_us: samples.rounds,
        })
    }

    /// The first correct candidate leads whatever its latency.
    fn first(&self, why: String) -> Judgement {
        let outcome = if self.trials.is_empty() { Outcome::Baseline } else { Outcome::Kept };
        Judgement { outcome: Some(outcome), why, ..Judgement::default() }
    }

    fn record(&mut self, trial: Trial, assessed: Option<Assessed>) {
        self.tried.extend(key_of(&trial.verdict));
        self.rejected += trial.skipped.rejected;
        if let Some(noise) = trial.noise_floor {
            self.noise_floor = noise;
        }
        if trial.outcome.leads() {
            if let (Some((_, Some(old))), Some(device)) = (&self.incumbent, &mut self.device)
                && let Ok(handle) =
                    device.prepare(&old.candidate.program, &old.candidate.config.kernel)
            {
                device.release(handle);
            }
            self.incumbent = Some((self.trials.len(), assessed));
        }
        self.trials.push(trial);
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
        let Settings { min_gain, timing, .. } = self.settings;
        let longer = Timing { rounds: 2 * timing.rounds, ..timing };
        let floors = assess::floors(&self.gate, device, &champion.candidate);
        let samples = assess::race(&self.gate, device, baseline, champion, longer)?;
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

/// What makes two trials one evaluation.
fn key_of(verdict: &Verdict) -> Option<(String, String)> {
    Some((verdict.program_id.clone()?, verdict.kernel_id.clone()?))
}
