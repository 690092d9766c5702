//! One device of a search: holds the incumbent and judges candidates against it. A candidate is timed beside the
//! incumbent on the same device and never compared with a figure of another device. So each device assesses the
//! incumbent itself and has a noise floor of its own.

use std::sync::Arc;

use ir::schedule::{ActsOn, Knob, ScheduleConfig, Value};
use reference_vm::compare::{Agreement, Reference};

use crate::assess::{self, Assessed, Screened};
use crate::cpu::Candidate;
use crate::decide::{Decision, decide_measured, decide_predicted, predicted_gain};
use crate::device::{Costs, Device, DeviceError, Samples};
use crate::effort::{Interim, StoppingRule, spread};
use crate::gate::Gate;
use crate::history::{Guess, Proposal};
use crate::measure::{Interval, gain, noise_floor};
use crate::propose::{Origin, changes, mixed};
use crate::rejection::Rejection;
use crate::settings::{Clock, Settings};
use crate::trial::{Confirmation, Outcome, Skipped, Spent, Trial, changed};
use crate::verdict::Verdict;

/// Maximum kernels that are compiled in advance.
const FORESEEN: usize = 12;

/// The note on a candidate whose gain is only an order effect.
const LEFT_BEHIND: &str = "order effect: the gain is gone where each side follows its own kind; the candidate slows what runs after it";

/// The noise of one device, from the trial that raced a program against itself on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Noise {
    pub(crate) floor: f64,
    /// Standard deviation of a block.
    pub(crate) spread: f64,
}

impl Noise {
    pub(crate) fn of(floor: f64, samples_us: &[[f64; 4]]) -> Self {
        let rounds = samples_us.to_vec();
        Self { floor, spread: spread(&Samples { rounds, ..Samples::default() }) }
    }
}

/// The incumbent: the trial that a candidate is compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lead {
    pub(crate) trial: u64,
    pub(crate) config: ScheduleConfig,
}

/// A trial to run.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) index: u64,
    pub(crate) proposal: Proposal,
    /// The schedule that the proposal was drawn from.
    pub(crate) parent: ScheduleConfig,
    pub(crate) skipped: Skipped,
    pub(crate) lead: Option<Lead>,
    /// The noise of the device that runs it.
    pub(crate) noise: Noise,
    /// Seconds of search so far.
    pub(crate) began_s: f64,
    /// Time spent on proposing it.
    pub(crate) spent: Spent,
    /// Whether an earlier trial had the same program.
    pub(crate) is_known_program: bool,
    /// A guess for the helpers to start on if the candidate is not given up.
    pub(crate) if_kept: Option<Guess>,
}

/// The confirmation of the champion.
#[derive(Clone, Debug)]
pub(crate) struct LastJob {
    pub(crate) confirmation: Confirmation,
    pub(crate) lead: Lead,
    /// The schedule that the champion races; `None` if the champion is the baseline, or if there is no baseline.
    pub(crate) baseline: Option<ScheduleConfig>,
    pub(crate) noise: Noise,
    /// Whether to run it on fresh tokens, which needs no device.
    pub(crate) thorough: bool,
}

/// A device with its state in a search. Without a device, predictions are compared.
pub(crate) struct DeviceWorker<'d, 'a> {
    gate: Gate<'a>,
    pub(crate) device: Option<&'d mut (dyn Device + 'd)>,
    settings: Arc<Settings>,
    clock: Clock,
    /// The incumbent with its proofs.
    incumbent: Option<(Lead, Assessed)>,
    /// Candidates that were better than the incumbent here, until the search decides which of them become incumbents.
    better: Vec<(u64, Assessed)>,
    spent: Spent,
}

impl<'d, 'a> DeviceWorker<'d, 'a> {
    pub(crate) fn new(
        gate: Gate<'a>,
        device: Option<&'d mut (dyn Device + 'd)>,
        settings: Arc<Settings>,
        clock: Clock,
    ) -> Self {
        let (incumbent, better, spent) = (None, Vec::new(), Spent::default());
        let gate = gate.with_clock(clock);
        Self { gate, device, settings, clock, incumbent, better, spent }
    }

    fn costs(&self) -> Costs {
        self.device.as_deref().map_or_else(Default::default, Device::costs)
    }

    /// Runs a trial.
    ///
    /// # Errors
    /// If the device is lost, or the incumbent fails on it. Then no candidate can be judged there, and this one was not
    /// tried.
    pub(crate) fn try_out(&mut self, mut job: Job) -> Result<Trial, DeviceError> {
        if let Some(lead) = job.lead {
            self.follow(lead).map_err(|dropped| failed_there(lead, dropped))?;
        }
        let (began, costs) = ((self.clock)(), self.costs());
        let evaluating_s = self.gate.evaluating.seconds();
        self.spent = job.spent;
        let config = job.proposal.config;
        let shared = self.device.as_deref().map(|device| device as &dyn Device);
        let mut trial = Trial {
            trial: job.index,
            origin: job.proposal.origin,
            incumbent: job.lead.map(|lead| lead.trial),
            changed: changed(&changes(&job.parent, &config)),
            config,
            verdict: assess::begin(&self.gate, shared, &config),
            skipped: std::mem::take(&mut job.skipped),
            began_s: job.began_s,
            ended_s: job.began_s,
            ..Trial::default()
        };
        match self.judge(&mut job, &mut trial) {
            Ok(()) => {}
            Err(Rejection::Failed(error @ DeviceError::Unavailable { .. })) => return Err(error),
            Err(dropped) => {
                assess::refuse(&mut trial.verdict, &dropped);
                let device = self.device.as_deref_mut();
                assess::locate(&self.gate, device, &config, &dropped, &mut trial.verdict);
                (trial.outcome, trial.why) = (Outcome::from(&dropped), dropped.to_string());
            }
        }
        let here = ((self.clock)() - began).as_secs_f64();
        let total_s = job.spent.propose_s + job.spent.lower_s + here;
        let evaluating_s = self.gate.evaluating.seconds() - evaluating_s;
        let device = self.costs() - costs;
        trial.spent = Spent { device, total_s, evaluating_s, ..self.spent };
        trial.gain = trial.gain.filter(|gain| gain.low.is_finite() && gain.high.is_finite());
        trial.threshold = trial.threshold.filter(|threshold| threshold.is_finite());
        trial.noise_floor = trial.noise_floor.filter(|noise| noise.is_finite());
        Ok(trial)
    }

    /// Runs the gates, then compares with the incumbent. A candidate that was given up early is not assessed in full.
    fn judge(&mut self, job: &mut Job, trial: &mut Trial) -> Result<(), Rejection> {
        let verdict = &mut trial.verdict;
        let candidate = match job.proposal.lowered.take() {
            Some(candidate) => {
                assess::describe(&candidate, verdict);
                candidate
            }
            None => assess::lower(&self.gate, &job.proposal.config, verdict)?,
        };
        if let Some(device) = self.device.take() {
            let judged = self.judge_on_device(&mut *device, job, candidate, trial);
            self.device = Some(device);
            return judged;
        }
        let (began, program_id) = ((self.clock)(), candidate.program_id.clone());
        let _ = self.gate.ahead.judge(&candidate, self.clock);
        self.spent.gates_s += ((self.clock)() - began).as_secs_f64();
        self.spent.reference_s = self.reference_s(job, &program_id);
        let assessed = assess::assess(&mut self.gate, None, candidate, verdict)?;
        self.judge_predicted(&assessed, trial);
        if trial.outcome.leads() {
            self.better.push((job.index, assessed));
        }
        Ok(())
    }

    /// Makes this trial the incumbent of this device. If it was not judged here, or after a resume, it must pass the
    /// gates before anything is compared with it.
    ///
    /// # Errors
    /// If it does not pass the gates.
    fn follow(&mut self, lead: Lead) -> Result<(), Rejection> {
        if self.incumbent.as_ref().is_some_and(|(here, _)| *here == lead) {
            return Ok(());
        }
        if let Some((_, old)) = self.incumbent.take() {
            self.release(&old.candidate);
        }
        self.foresee(&lead.config);
        let mut found = None;
        for (trial, assessed) in std::mem::take(&mut self.better) {
            let same = *assessed.candidate.config == lead.config;
            if trial == lead.trial && same {
                found = Some(assessed);
            } else if trial > lead.trial {
                // Judged ahead of the search: it may still become the incumbent.
                self.better.push((trial, assessed));
            } else {
                self.release(&assessed.candidate);
            }
        }
        let assessed = match found {
            Some(assessed) => assessed,
            None => self.assess_again(&lead.config)?,
        };
        self.incumbent = Some((lead, assessed));
        Ok(())
    }

    fn assess_again(&mut self, config: &ScheduleConfig) -> Result<Assessed, Rejection> {
        let candidate = self.gate.ahead.lower(config)?;
        let shared = self.device.as_deref().map(|device| device as &dyn Device);
        let mut ignored = assess::begin(&self.gate, shared, config);
        let Some(device) = self.device.as_deref_mut() else {
            return assess::assess(&mut self.gate, None, candidate, &mut ignored);
        };
        let mut guard = candidate.guard(device);
        let device = Some(guard.device());
        let assessed = assess::assess(&mut self.gate, device, candidate, &mut ignored)?;
        guard.keep();
        Ok(assessed)
    }

    fn release(&mut self, candidate: &Candidate) {
        if let Some(device) = self.device.as_deref_mut() {
            candidate.release(device);
        }
    }

    /// Seconds that the reference VM took for this trial's program, ahead or now; zero if an earlier trial had the same
    /// program.
    fn reference_s(&self, job: &Job, program_id: &str) -> f64 {
        if job.is_known_program { 0.0 } else { self.gate.ahead.seconds(program_id) }
    }

    /// Runs the first stage, which may end the trial; then the rest of the gate, and the race. The candidate stays on
    /// the device if it may become the incumbent.
    fn judge_on_device(
        &mut self,
        device: &mut dyn Device,
        job: &mut Job,
        candidate: Candidate,
        trial: &mut Trial,
    ) -> Result<(), Rejection> {
        let (clock, waited_s) = (self.clock, self.gate.waited_s);
        let began = clock();
        let program_id = candidate.program_id.clone();
        let mut guard = candidate.guard(device);
        let verdict = &mut trial.verdict;
        let screened = assess::screen(&mut self.gate, guard.device(), candidate, verdict, clock);
        self.spent.reference_s = self.reference_s(job, &program_id);
        self.spent.waiting_s = self.gate.waited_s - waited_s;
        self.spent.gates_s += (clock() - began).as_secs_f64();
        let screened = self.extend_if_needed(guard.device(), screened?, verdict)?;
        let began = clock();
        let given_up = self.give_up(guard.device(), job, &screened, trial);
        self.spent.timing_s += (clock() - began).as_secs_f64();
        if given_up? {
            let at = [screened.positions() as u32];
            trial.predicted_us = self.predicted_us(&screened.candidate, &screened.reference, &at);
            return Ok(());
        }
        if let Some(guess) = job.if_kept.take() {
            self.gate.ahead.guess(guess);
        }
        let began = clock();
        let assessed = assess::complete(&self.gate, guard.device(), screened, &mut trial.verdict);
        self.spent.gates_s += (clock() - began).as_secs_f64();
        let assessed = assessed?;
        let began = clock();
        let judged = self.judge_measured(guard.device(), job, &assessed, trial);
        self.spent.timing_s += (clock() - began).as_secs_f64();
        judged?;
        let at = self.gate.timed_positions();
        trial.predicted_us = self.predicted_us(&assessed.candidate, &assessed.reference, &at);
        if trial.outcome.leads() {
            self.better.push((job.index, assessed));
            guard.keep();
        }
        Ok(())
    }

    /// The cost model's prediction for a program at the position where it was timed, to learn from its errors.
    fn predicted_us(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
        at: &[u32],
    ) -> Option<f64> {
        self.gate.predict_at(candidate, proof, at).ok().map(|predicted| predicted.us())
    }

    /// Runs all positions before timing if attention is split otherwise than in the incumbent, since that affects later
    /// positions only.
    fn extend_if_needed(
        &mut self,
        device: &mut dyn Device,
        screened: Screened,
        verdict: &mut Verdict,
    ) -> Result<Screened, Rejection> {
        let Some((_, incumbent)) = &self.incumbent else { return Ok(screened) };
        if attend_alike(&incumbent.candidate, &screened.candidate) {
            return Ok(screened);
        }
        let began = (self.clock)();
        let screened = assess::extend(&self.gate, device, screened, verdict);
        self.spent.gates_s += ((self.clock)() - began).as_secs_f64();
        screened
    }

    /// Times a candidate once at the end of the positions run so far, and gives it up if it is clearly not better than
    /// the incumbent.
    fn give_up(
        &mut self,
        device: &mut dyn Device,
        job: &Job,
        screened: &Screened,
        trial: &mut Trial,
    ) -> Result<bool, Rejection> {
        let (bar, seed) = (self.stopping_rule(job), self.seed_of(job.index));
        let Some((_, incumbent)) = &self.incumbent else { return Ok(false) };
        // A simpler schedule need not be faster.
        if self.simpler(job).is_some() {
            return Ok(false);
        }
        let (gate, verdict) = (&self.gate, &mut trial.verdict);
        let found = assess::quick_look(gate, device, incumbent, screened, &bar, seed, verdict)?;
        let given_up = found.is_some();
        if let Some((samples, look)) = found {
            compared(trial, look, samples, bar.threshold);
        }
        Ok(given_up)
    }

    fn stopping_rule(&self, job: &Job) -> StoppingRule {
        let Settings { min_gain, timing, .. } = *self.settings;
        let threshold = job.noise.floor.max(job.proposal.origin.min_gain(min_gain));
        StoppingRule { threshold, spread: job.noise.spread, rounds: timing.rounds }
    }

    fn seed_of(&self, index: u64) -> u64 {
        mixed(self.settings.seed, index)
    }

    fn judge_predicted(&self, assessed: &Assessed, trial: &mut Trial) {
        assess::set_predicted(&mut trial.verdict, &assessed.predicted);
        let us = assessed.predicted.us();
        let Some((_, incumbent)) = &self.incumbent else {
            return first(trial, format!("{us:.1} us predicted"));
        };
        let min_gain = self.settings.min_gain;
        trial.outcome =
            decide_predicted(&incumbent.predicted, &assessed.predicted, min_gain).into();
        let gain = predicted_gain(&incumbent.predicted, &assessed.predicted);
        trial.why = format!(
            "{us:.1} us predicted, {:+.2} % against {:.1} us of the incumbent",
            -100.0 * gain,
            incumbent.predicted.us()
        );
        trial.gain = Some(Interval { low: gain, high: gain });
        trial.threshold = Some(min_gain);
    }

    fn judge_measured(
        &mut self,
        device: &mut dyn Device,
        job: &Job,
        assessed: &Assessed,
        trial: &mut Trial,
    ) -> Result<(), Rejection> {
        let (bar, seed) = (self.stopping_rule(job), self.seed_of(job.index));
        let timing = self.settings.timing;
        let Some(agreement) = &assessed.on_device else {
            self.judge_predicted(assessed, trial);
            return Ok(());
        };
        let at = self.gate.timed_positions();
        let bounds = assess::bounds(&self.gate, device, &assessed.candidate, &at);
        let verdict = &mut trial.verdict;
        let Some((_, incumbent)) = &self.incumbent else {
            let itself = [assessed, assessed];
            let fixed = assess::fixed(timing.rounds);
            let samples = assess::race(&self.gate, device, itself, timing, fixed)?;
            let latency = assess::set_measured(verdict, agreement, &samples, bounds, seed)?;
            let noise = noise_floor(&samples, seed);
            let us = latency.median_us();
            first(trial, format!("{us:.1} us measured, noise {:.2} %", 100.0 * noise));
            (trial.noise_floor, trial.samples_us) = (Some(noise), samples.rounds);
            return Ok(());
        };
        // A tie takes all rounds to see.
        let (simpler, mut fixed) = (self.simpler(job), assess::fixed(timing.rounds));
        let enough = |samples: &Samples| match simpler {
            Some(_) => fixed(samples),
            None => bar.enough(samples, seed),
        };
        let sides = [incumbent, assessed];
        let samples = assess::race(&self.gate, device, sides, timing, enough)?;
        assess::set_measured(verdict, agreement, &samples, bounds, seed)?;
        let look = bar.look(&samples, seed);
        if look.decision == Some(Decision::Inconclusive)
            && bar.is_left_behind(&samples)
            && look.gain.low > bar.threshold
        {
            verdict.notes.push(LEFT_BEHIND.to_owned());
        }
        compared(trial, look, samples, bar.threshold);
        trial.simpler = simpler;
        if let Some([own, other]) = simpler
            && trial.outcome != Outcome::Kept
            && is_equal(look.gain, bar.threshold)
        {
            trial.outcome = Outcome::Kept;
            trial.why += &format!(
                "; no difference, and {own} instead of {other} knobs depart from the default"
            );
        }
        Ok(())
    }

    /// The number of knobs in which a raced candidate and the incumbent depart from the default, if the candidate does in
    /// fewer.
    fn simpler(&self, job: &Job) -> Option<[usize; 2]> {
        let plain = self.settings.simplest.filter(|_| job.proposal.origin == Origin::Race)?;
        let departures = |config| changes(&plain, config).len();
        let found = [departures(&job.proposal.config), departures(&job.lead?.config)];
        (found[0] < found[1]).then_some(found)
    }

    /// Announces likely kernels to the device: the incumbent's with its kernel knobs changed, single changes first.
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

    /// Runs the champion again.
    ///
    /// # Errors
    /// If the device is lost.
    pub(crate) fn confirm(&mut self, job: LastJob) -> Result<Confirmation, DeviceError> {
        let mut confirmation = job.confirmation.clone();
        match self.confirm_into(&job, &mut confirmation) {
            Ok(()) => Ok(confirmation),
            Err(Rejection::Failed(error @ DeviceError::Unavailable { .. })) => Err(error),
            Err(dropped) => {
                confirmation.decision = Decision::Reverted;
                confirmation.why = dropped.to_string();
                assess::refuse(&mut confirmation.verdict, &dropped);
                Ok(confirmation)
            }
        }
    }

    fn confirm_into(
        &mut self,
        job: &LastJob,
        confirmation: &mut Confirmation,
    ) -> Result<(), Rejection> {
        self.follow(job.lead)?;
        let Some((_, champion)) = &self.incumbent else { return Ok(()) };
        let seed = mixed(self.settings.seed, u64::MAX - 1);
        if job.thorough {
            confirmation.positions = self.gate.ahead.cpu.thorough(&champion.candidate, seed)?;
            confirmation.why = format!("agrees at {} positions", confirmation.positions);
        }
        let Some(baseline) = job.baseline.filter(|_| self.device.is_some()) else { return Ok(()) };
        // A failure of the baseline is not the champion's.
        let baseline = self.assess_again(&baseline).map_err(|dropped| {
            Rejection::Failed(assess::incumbent_failed("the baseline (trial 0)", dropped))
        })?;
        let raced = self.race_baseline(&baseline, seed, job.noise, confirmation);
        self.release(&baseline.candidate);
        raced
    }

    fn race_baseline(
        &mut self,
        baseline: &Assessed,
        seed: u64,
        noise: Noise,
        confirmation: &mut Confirmation,
    ) -> Result<(), Rejection> {
        let (Some((_, champion)), Some(device)) = (&self.incumbent, self.device.as_deref_mut())
        else {
            return Ok(());
        };
        let Some(agreement) = &champion.on_device else { return Ok(()) };
        let Settings { min_gain, timing, .. } = *self.settings;
        let at = self.gate.timed_positions();
        let bounds = assess::bounds(&self.gate, device, &champion.candidate, &at);
        let fixed = assess::fixed(2 * timing.rounds);
        let samples = assess::race(&self.gate, device, [baseline, champion], timing, fixed)?;
        assess::set_measured(&mut confirmation.verdict, agreement, &samples, bounds, seed)?;
        let interval = gain(&samples, seed);
        confirmation.decision = decide_measured(interval, noise.floor, min_gain);
        let comma = if confirmation.why.is_empty() { "" } else { ", " };
        confirmation.why += &format!(
            "{comma}gain {:+.2} to {:+.2} % against the baseline",
            100.0 * interval.low,
            100.0 * interval.high
        );
        confirmation.gain = Some(interval).filter(|gain| gain.low.is_finite());
        confirmation.threshold = Some(noise.floor.max(min_gain));
        confirmation.samples_us = samples.rounds;
        Ok(())
    }
}

/// The first correct candidate leads, whatever its latency.
fn first(trial: &mut Trial, why: String) {
    trial.outcome = if trial.trial == 0 { Outcome::Baseline } else { Outcome::Kept };
    trial.why = why;
}

/// The error of a device on which the incumbent fails.
fn failed_there(lead: Lead, dropped: Rejection) -> DeviceError {
    assess::incumbent_failed(&format!("the schedule that leads (trial {})", lead.trial), dropped)
}

/// Whether two candidates split attention in the same way, so that their times at early positions are representative of
/// late ones.
fn attend_alike(one: &Candidate, other: &Candidate) -> bool {
    let shape = |candidate: &Candidate| {
        let config = &candidate.config;
        let attention = config.tiling.attention;
        let handoffs = (config.sync.attention, config.sync.merge);
        (attention, config.fusion_grouping.merge, handoffs)
    };
    shape(one) == shape(other)
}

/// Whether a gain is no difference: its interval includes zero, and reaches below it by at most twice the threshold,
/// which in a race is the noise of the device.
pub(crate) fn is_equal(gain: Interval, threshold: f64) -> bool {
    gain.low <= 0.0 && gain.high >= 0.0 && gain.low >= -2.0 * threshold
}

/// Records a comparison in a trial.
fn compared(trial: &mut Trial, look: Interim, samples: Samples, threshold: f64) {
    let Interim { gain, decision } = look;
    trial.outcome = decision.map_or(Outcome::Inconclusive, Outcome::from);
    trial.why = format!(
        "{:.1} us measured, gain {:+.2} to {:+.2} % against the incumbent, {:.2} % needed, {} rounds",
        trial.verdict.latency_us.unwrap_or(f64::NAN),
        100.0 * gain.low,
        100.0 * gain.high,
        100.0 * threshold,
        samples.rounds.len()
    );
    (trial.gain, trial.threshold) = (Some(gain), Some(threshold));
    trial.samples_us = samples.rounds;
}
