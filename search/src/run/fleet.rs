//! Trials on the devices of a search.
//!
//! With several devices, the trials and their incumbents are those of one: the rows equal those of a search that runs
//! one trial after another. While a trial runs on one device, the next ones start on the others, on the assumption that it is reverted.
//! If it ends otherwise, or with a result that leads to other proposals than assumed, the work started on the wrong
//! assumption is dropped and costs time only. A trial's number determines its device, so rows do not depend on which
//! device was quicker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Search, SearchError};
use crate::decide::Decision;
use crate::device::DeviceError;
use crate::device_worker::{Job, LastJob, Lead};
use crate::history::{Guess, Proposal};
use crate::propose::Origin;
use crate::trial::{Beside, Confirmation, LeftOut, Skipped, Spent, Trial, together};
use crate::worker_pool::{Event, WorkerPool};

/// Maximum trials queued per device, if there are several: the running one, and one so that the device need not wait
/// for a slower trial of another device. Most trials further ahead would be dropped: a trial takes long because it is
/// about to be kept.
const AHEAD: usize = 2;

/// What a trial is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// To find a better schedule: the strategy proposes it.
    Search,
    /// To find the best of those tried.
    Finals,
}

/// A trial that was started.
struct Flight {
    number: u64,
    card: u32,
    job: Job,
    cancelled: Arc<AtomicBool>,
    done: Option<Box<Trial>>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Speculative trials that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WastedSpeculation {
    /// Trials.
    pub trials: u64,
    /// Device seconds.
    pub seconds: f64,
}

impl WastedSpeculation {
    fn add(&mut self, trial: &Trial) {
        self.trials += 1;
        self.seconds += trial.spent.total_s;
    }
}

/// The devices and their trials in flight.
pub(super) struct Fleet<'a> {
    pool: WorkerPool<'a>,
    /// Trials in the order of their numbers, starting with the next one.
    flights: VecDeque<Flight>,
    numbers: u64,
    dropped: WastedSpeculation,
    left_out: Vec<LeftOut>,
    /// The error of the device that was left out last.
    last: Option<DeviceError>,
}

impl<'a> Fleet<'a> {
    pub(super) fn new(pool: WorkerPool<'a>) -> Self {
        let mut left_out = Vec::new();
        let mut last = None;
        for (card, info) in pool.infos().into_iter().enumerate() {
            if let Err(error) = info {
                left_out.push(LeftOut { card: card as u32, why: error.to_string() });
                last = Some(error.clone());
            }
        }
        let (flights, dropped) = (VecDeque::new(), WastedSpeculation::default());
        Self { pool, flights, numbers: 0, dropped, left_out, last }
    }

    pub(super) fn dropped(&self) -> WastedSpeculation {
        self.dropped
    }

    /// The devices that were left out since the last call.
    pub(super) fn take_left_out(&mut self) -> Vec<LeftOut> {
        std::mem::take(&mut self.left_out)
    }

    fn leave_out(&mut self, card: u32, error: DeviceError) {
        if self.pool.leave_out(card) {
            // Discards its unused results: from the row that records its loss on, no row is from this device.
            for flight in self.flights.iter_mut().filter(|flight| flight.card == card) {
                flight.done.take().iter().for_each(|trial| self.dropped.add(trial));
            }
            self.left_out.push(LeftOut { card, why: error.to_string() });
            self.last = Some(error);
        }
    }

    /// The error of a search that has lost all its devices.
    fn lost(&self) -> SearchError {
        let reason = "there is none".to_owned();
        let none = || DeviceError::Unavailable { reason };
        SearchError::Device(self.last.clone().unwrap_or_else(none))
    }

    /// Drops the trials from this place in the queue on.
    fn cut(&mut self, at: usize) {
        for flight in self.flights.drain(at..) {
            flight.done.iter().for_each(|trial| self.dropped.add(trial));
        }
    }

    /// Handles the next event of a device.
    fn recv(&mut self) -> Result<(), SearchError> {
        let Some((card, said)) = self.pool.recv() else { return Err(self.lost()) };
        match said {
            Event::Tried(number, trial) => {
                match self.flights.iter_mut().find(|flight| flight.number == number) {
                    Some(flight) => flight.done = Some(trial),
                    None => self.dropped.add(&trial),
                }
            }
            Event::Lost(error) => self.leave_out(card, error),
            Event::Opened(_) | Event::Confirmed(_) => {}
        }
        if self.pool.cards().is_empty() { Err(self.lost()) } else { Ok(()) }
    }

    /// The result of the first trial in flight, if it is there.
    fn take_first(&mut self) -> Option<Trial> {
        let flight = self.flights.front_mut()?;
        let trial = flight.done.take()?;
        let (skipped, card) = (std::mem::take(&mut flight.job.skipped), flight.card);
        self.flights.pop_front();
        Some(Trial { skipped, card: self.pool.number(card), ..*trial })
    }

    /// The answers of these devices, in the order of their numbers. Devices that are lost meanwhile are left out.
    fn collect<T>(
        &mut self,
        mut cards: Vec<u32>,
        answer: impl Fn(Event) -> Option<T>,
    ) -> Result<Vec<(u32, T)>, SearchError> {
        let mut found = Vec::new();
        while found.len() < cards.len() {
            let Some((card, said)) = self.pool.recv() else { return Err(self.lost()) };
            if let Event::Lost(error) = said {
                cards.retain(|&other| other != card);
                found.retain(|&(other, _)| other != card);
                self.leave_out(card, error);
            } else if let Some(answer) = answer(said) {
                found.push((card, answer));
            }
        }
        found.sort_by_key(|&(card, _)| card);
        if found.is_empty() { Err(self.lost()) } else { Ok(found) }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

impl<'a> Search<'a> {
    pub(super) fn next_trial(
        &mut self,
        phase: Phase,
        elapsed: Duration,
    ) -> Result<Option<Trial>, SearchError> {
        self.fleet.pool.begin(&self.gate, &self.settings, self.clock);
        if self.trials().is_empty() {
            return self.baseline(elapsed).map(Some);
        }
        self.keep_measured_cards();
        loop {
            if self.fleet.pool.cards().is_empty() {
                return Err(self.fleet.lost());
            }
            self.plan(phase, elapsed);
            if self.fleet.flights.is_empty() {
                return Ok(None);
            }
            if let Some(trial) = self.fleet.take_first() {
                return Ok(Some(trial));
            }
            self.fleet.recv()?;
            // What else arrived changes nothing of the first one, so there is no need to plan again.
            if let Some(trial) = self.fleet.take_first() {
                return Ok(Some(trial));
            }
        }
    }

    /// Runs the first trial on every device, which gives each its noise floor.
    fn baseline(&mut self, elapsed: Duration) -> Result<Trial, SearchError> {
        let config = self.settings.default;
        self.spent = Spent::default();
        let lowered = self.lower_timed(&config);
        if let (Some(_), Some(candidate)) = (&self.helpers, &lowered)
            && self.strategy.may_be_guessed()
        {
            let history = self.history.clone();
            self.gate.ahead.guess(Guess::after(self.asked(), history, 0, candidate, false));
        }
        let proposal = Proposal { origin: Origin::Baseline, config, lowered };
        let cards = self.fleet.pool.cards();
        for &card in &cards {
            let name = self.fleet.pool.number(card);
            let job = self.job(0, proposal.clone(), &self.history, None, name, elapsed);
            let (number, cancelled) = (self.fleet.number(), Arc::default());
            self.fleet.pool.try_out(card, number, job, cancelled);
        }
        let mut found = self.fleet.collect(cards, |said| match said {
            Event::Tried(_, trial) => Some(*trial),
            Event::Opened(_) | Event::Confirmed(_) | Event::Lost(_) => None,
        })?;
        let leading = found.iter().position(|(_, trial)| trial.outcome.leads());
        let (card, first) = found.remove(leading.unwrap_or(0));
        let mut beside = Vec::new();
        for (other, trial) in found {
            if leading.is_some() && trial.outcome.leads() {
                beside.push(Beside::of_trial(other, &trial));
                continue;
            }
            let reason = match leading {
                Some(_) => format!("the baseline is {} there: {}", trial.outcome.name(), trial.why),
                None => "no card has a correct baseline, so that each would have another first schedule: the search goes on with one card".to_owned(),
            };
            self.fleet.leave_out(other, DeviceError::Unavailable { reason });
        }
        Ok(Trial { card: self.fleet.pool.number(card), beside, ..first })
    }

    /// After a resume, leaves out devices whose noise was never measured.
    fn keep_measured_cards(&mut self) {
        let leads = self.champion().is_some();
        let last = self.trials().last().and_then(|trial| trial.card);
        for card in self.fleet.pool.cards() {
            let Some(number) = self.fleet.pool.number(card) else { continue };
            let why = if leads && !self.rows.noises.contains_key(&Some(number)) {
                "its noise was not measured when the search began"
            } else if !leads && last.is_some_and(|last| last != number) {
                // The device that measured so far continues alone.
                "no card has a correct baseline"
            } else {
                continue;
            };
            self.fleet.leave_out(card, DeviceError::Unavailable { reason: why.to_owned() });
        }
    }

    /// Updates the trials in flight to the results so far: drops trials that would no longer be proposed, and
    /// dispatches the next ones. Afterwards the first flight is the trial that a single device would run now.
    fn plan(&mut self, phase: Phase, elapsed: Duration) {
        self.reassign(elapsed);
        let finals = if phase == Phase::Finals { self.finals() } else { Vec::new() };
        let guessed = phase == Phase::Finals || self.strategy.may_be_guessed();
        if !guessed && !self.fleet.flights.is_empty() {
            return;
        }
        let first = self.trials().len() as u64;
        let cards = self.fleet.pool.cards().len();
        let depth = if guessed && cards > 1 { AHEAD * cards } else { 1 } as u64;
        let end = match phase {
            Phase::Search => self.settings.budget.end(first + depth),
            Phase::Finals => first + depth.min(finals.len() as u64),
        };
        let (mut history, mut lead) = (self.history(), self.lead());
        let (mut at, mut new) = (0, false);
        for index in first..end {
            let mut skipped = Skipped::default();
            self.spent = Spent::default();
            let proposal = match finals.get((index - first) as usize).copied() {
                Some(config) => {
                    let lowered = self.lower_timed(&config);
                    Some(Proposal { origin: Origin::Race, config, lowered })
                }
                None => self.next_of(&history, index, &mut skipped),
            };
            let Some(proposal) = proposal else { break };
            let fits = |f: &Flight| f.job.proposal.config == proposal.config && f.job.lead == lead;
            match self.fleet.flights.get_mut(at) {
                Some(flight) if fits(flight) => flight.job.skipped = skipped,
                Some(_) | None => {
                    self.fleet.cut(at);
                    let Some(card) = self.fleet.pool.card_of(index) else { break };
                    let name = self.fleet.pool.number(card);
                    let job = self.job(index, proposal, &history, lead, name, elapsed);
                    self.dispatch(card, Job { skipped, ..job }, elapsed);
                    new = true;
                }
            }
            let flight = &self.fleet.flights[at];
            at += 1;
            if let Some(trial) = &flight.done {
                history.learn(trial, lead.map(|lead| lead.config).as_ref());
                if trial.outcome.leads() {
                    lead = Some(Lead { trial: index, config: trial.config });
                }
            } else if let Some(candidate) = &flight.job.proposal.lowered {
                history.assume(index, candidate, false);
            } else {
                break; // a schedule that does not lower gives no basis for guessing the next one
            }
        }
        self.fleet.cut(at);
        if new && phase == Phase::Search && guessed && self.helpers.is_some() {
            let next = first + at as u64;
            self.gate.ahead.guess(Guess::onward(self.asked(), history, next, false));
        }
    }

    /// Dispatches a trial to a device and queues it.
    fn dispatch(&mut self, card: u32, mut job: Job, elapsed: Duration) {
        (job.noise, job.began_s) =
            (self.noise(self.fleet.pool.number(card)), elapsed.as_secs_f64());
        let (number, cancelled) = (self.fleet.number(), Arc::<AtomicBool>::default());
        self.fleet.pool.try_out(card, number, job.clone(), cancelled.clone());
        job.if_kept = None;
        self.fleet.flights.push_back(Flight { number, card, job, cancelled, done: None });
    }

    /// Reassigns the flights of a device that was left out, and those whose device changes with it, to the remaining
    /// devices.
    fn reassign(&mut self, elapsed: Duration) {
        let cards = self.fleet.pool.cards();
        if self.fleet.flights.iter().all(|flight| cards.contains(&flight.card)) {
            return;
        }
        for flight in std::mem::take(&mut self.fleet.flights) {
            let card = self.fleet.pool.card_of(flight.job.index);
            match card.filter(|&card| flight.done.is_none() && card != flight.card) {
                Some(card) => self.dispatch(card, flight.job.clone(), elapsed),
                None => self.fleet.flights.push_back(flight),
            }
        }
    }

    /// Confirms the champion on every remaining device.
    pub(super) fn confirm_on_fleet(&mut self, job: &LastJob) -> Result<Confirmation, SearchError> {
        self.fleet.pool.begin(&self.gate, &self.settings, self.clock);
        self.keep_measured_cards();
        self.fleet.cut(0);
        let mut cards = self.fleet.pool.cards();
        if job.baseline.is_none() {
            cards.truncate(1); // there is nothing to race
        }
        for &card in &cards {
            let noise = self.noise(self.fleet.pool.number(card));
            let thorough = cards.first() == Some(&card);
            self.fleet.pool.confirm(card, LastJob { noise, thorough, ..job.clone() });
        }
        let mut found = self.fleet.collect(cards, |said| match said {
            Event::Confirmed(confirmation) => Some(*confirmation),
            Event::Opened(_) | Event::Tried(..) | Event::Lost(_) => None,
        })?;
        let (card, mut first) = found.remove(0);
        let ran = found.iter().map(|(_, c)| c.positions).chain([first.positions]).max();
        first.positions = ran.unwrap_or(0);
        if first.positions == 0 && first.decision != Decision::Reverted {
            // The card that was to run fresh tokens is lost: nothing is confirmed, and a resumed search repeats it.
            return Err(self.fleet.lost());
        }
        let beside: Vec<Beside> =
            found.iter().map(|(other, c)| Beside::of_confirmation(*other, c)).collect();
        let decision = together(found.iter().map(|(_, c)| c.decision).chain([first.decision]));
        let mut why = first.why.clone();
        for other in beside.iter().filter(|other| !other.why.is_empty()) {
            why += &format!("; card {}: {}", other.card, other.why);
        }
        for LeftOut { card, why: reason } in self.fleet.take_left_out() {
            why += &format!("; card {card} was left out: {reason}");
        }
        // Without a race the figures are still those of the champion's trial.
        let own = job.baseline.is_some();
        let card = if own {
            self.fleet.pool.number(card)
        } else {
            self.champion().and_then(|trial| trial.card)
        };
        Ok(Confirmation { card, beside, decision, why, ..first })
    }
}
