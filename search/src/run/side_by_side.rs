//! A search on several devices at once.
//!
//! What is tried, and what it is compared with, is what one device would be given: the rows are those of a search that does one trial
//! after the other. While a trial runs on one device, the ones after it are begun on the others, as if it had been reverted. When it ends
//! otherwise, or says something else to the proposals than was assumed, what was begun on a wrong assumption is dropped and costs time only.
//! Which device does a trial follows from the trial's number, so that rows do not depend on who was quicker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Search, SearchError, Step, StoppedBy};
use crate::decide::Decision;
use crate::device::DeviceError;
use crate::device_worker::{Job, LastJob, Lead};
use crate::history::{Guess, Proposal};
use crate::trial::{Beside, Confirmation, LeftOut, Skipped, Spent, Trial, together};
use crate::worker_pool::{Event, WorkerPool};

/// Trials that a device has before it at most, where there are several: the one that it does, and one so that it does not wait for every
/// slower one of another device. Of those still further on most would be dropped: a trial takes long because it is about to be kept.
const AHEAD: usize = 2;

/// A trial that was begun.
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

/// What was begun for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WastedSpeculation {
    /// Trials.
    pub trials: u64,
    /// Seconds of devices.
    pub seconds: f64,
}

impl WastedSpeculation {
    fn add(&mut self, trial: &Trial) {
        self.trials += 1;
        self.seconds += trial.spent.total_s;
    }
}

/// The devices, and what they are at.
pub(super) struct Fleet<'a> {
    pool: WorkerPool<'a>,
    /// Trials in the order of their numbers, from the next one on.
    flights: VecDeque<Flight>,
    numbers: u64,
    dropped: WastedSpeculation,
    left_out: Vec<LeftOut>,
    /// Why the last device was left out.
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

    fn leave_out(&mut self, card: u32, error: DeviceError) {
        if self.pool.leave_out(card) {
            // What it measured last is not taken any more: from the row that says so on, no row is its.
            for flight in self.flights.iter_mut().filter(|flight| flight.card == card) {
                flight.done.take().iter().for_each(|trial| self.dropped.add(trial));
            }
            self.left_out.push(LeftOut { card, why: error.to_string() });
            self.last = Some(error);
        }
    }

    /// The error of a search whose devices are all gone.
    fn lost(&self) -> SearchError {
        let reason = "there is none".to_owned();
        let none = || DeviceError::Unavailable { reason };
        SearchError::Device(self.last.clone().unwrap_or_else(none))
    }

    /// Drops what was begun from this place in line on.
    fn cut(&mut self, at: usize) {
        for flight in self.flights.drain(at..) {
            flight.done.iter().for_each(|trial| self.dropped.add(trial));
        }
    }

    /// Takes what a device says.
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

    /// What each of these devices answers, in the order of their numbers; those that are lost meanwhile are left out.
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
    pub(super) fn step_side_by_side(
        &mut self,
        fleet: &mut Fleet<'a>,
        elapsed: Duration,
    ) -> Result<Step, SearchError> {
        fleet.pool.begin(&self.gate, &self.settings, self.clock);
        if self.trials().is_empty() {
            let trial = self.baseline(fleet, elapsed)?;
            return Ok(self.commit(fleet, trial));
        }
        self.keep_measured_cards(fleet);
        loop {
            if fleet.pool.cards().is_empty() {
                return Err(fleet.lost());
            }
            self.plan(fleet, elapsed);
            let Some(head) = fleet.flights.front_mut() else {
                return Ok(Step::Done(StoppedBy::Exhausted));
            };
            if let Some(trial) = head.done.take() {
                let (skipped, card) = (std::mem::take(&mut head.job.skipped), head.card);
                fleet.flights.pop_front();
                let trial = Trial { skipped, card: Some(card), ..*trial };
                return Ok(self.commit(fleet, trial));
            }
            fleet.recv()?;
        }
    }

    fn commit(&mut self, fleet: &mut Fleet<'a>, trial: Trial) -> Step {
        let trial = Trial { left_out: std::mem::take(&mut fleet.left_out), ..trial };
        self.record(trial.clone());
        Step::Trial(Box::new(trial))
    }

    /// The first trial, on every device: it gives each its noise floor.
    fn baseline(&mut self, fleet: &mut Fleet<'a>, elapsed: Duration) -> Result<Trial, SearchError> {
        let config = self.settings.default;
        let lowered = self.lower_timed(&config);
        let proposal = Proposal { origin: crate::Origin::Baseline, config, lowered };
        let cards = fleet.pool.cards();
        for &card in &cards {
            let job = self.job(0, proposal.clone(), &self.history, None, Some(card), elapsed);
            let (number, cancelled) = (fleet.number(), Arc::default());
            fleet.pool.try_out(card, number, job, cancelled);
        }
        let mut found = fleet.collect(cards, |said| match said {
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
            fleet.leave_out(other, DeviceError::Unavailable { reason });
        }
        Ok(Trial { card: Some(card), beside, ..first })
    }

    /// After a resume: a device whose noise was never measured cannot be used.
    fn keep_measured_cards(&self, fleet: &mut Fleet<'a>) {
        let leads = self.champion().is_some();
        let last = self.trials().last().and_then(|trial| trial.card);
        for card in fleet.pool.cards() {
            let why = if leads && !self.rows.noises.contains_key(&Some(card)) {
                "its noise was not measured when the search began"
            } else if !leads && last.is_some_and(|last| last != card) {
                // The device that measured so far goes on alone.
                "no card has a correct baseline"
            } else {
                continue;
            };
            fleet.leave_out(card, DeviceError::Unavailable { reason: why.to_owned() });
        }
    }

    /// Brings what is under way in line with what is known by now: what nobody would try any more is dropped, and devices get what comes
    /// next. The first flight, afterwards, is the trial that one device would do now.
    fn plan(&mut self, fleet: &mut Fleet<'a>, elapsed: Duration) {
        self.reassign(fleet, elapsed);
        let guessed = self.strategy.may_be_guessed();
        if !guessed && !fleet.flights.is_empty() {
            return;
        }
        let first = self.trials().len() as u64;
        let cards = fleet.pool.cards().len();
        let depth = if guessed && cards > 1 { AHEAD * cards } else { 1 } as u64;
        let end = self.settings.budget.end(first + depth);
        let (mut history, mut lead) = (self.history(), self.lead());
        let (mut at, mut new) = (0, false);
        for index in first..end {
            let mut skipped = Skipped::default();
            self.spent = Spent::default();
            let Some(proposal) = self.next_of(&history, index, &mut skipped) else { break };
            let fits = |f: &Flight| f.job.proposal.config == proposal.config && f.job.lead == lead;
            match fleet.flights.get_mut(at) {
                Some(flight) if fits(flight) => flight.job.skipped = skipped,
                Some(_) | None => {
                    fleet.cut(at);
                    let Some(card) = fleet.pool.card_of(index) else { break };
                    let job = self.job(index, proposal, &history, lead, Some(card), elapsed);
                    self.dispatch(fleet, card, Job { skipped, ..job }, elapsed);
                    new = true;
                }
            }
            let flight = &fleet.flights[at];
            at += 1;
            if let Some(trial) = &flight.done {
                history.learn(trial, lead.map(|lead| lead.config).as_ref());
                if trial.outcome.leads() {
                    lead = Some(Lead { trial: index, config: trial.config });
                }
            } else if let Some(candidate) = &flight.job.proposal.lowered {
                history.assume(index, candidate, false);
            } else {
                break; // what does not lower tells nobody what comes next
            }
        }
        fleet.cut(at);
        if new && guessed && self.helpers.is_some() {
            let next = first + at as u64;
            self.gate.ahead.guess(Guess::onward(self.asked(), history, next, false));
        }
    }

    /// Gives a trial to a device, and puts it in line.
    fn dispatch(&self, fleet: &mut Fleet<'a>, card: u32, mut job: Job, elapsed: Duration) {
        (job.noise, job.began_s) = (self.noise(Some(card)), elapsed.as_secs_f64());
        let (number, cancelled) = (fleet.number(), Arc::<AtomicBool>::default());
        fleet.pool.try_out(card, number, job.clone(), cancelled.clone());
        job.if_kept = None;
        fleet.flights.push_back(Flight { number, card, job, cancelled, done: None });
    }

    /// Gives flights of a device that was left out, and those whose turns have moved, to those that are there.
    fn reassign(&self, fleet: &mut Fleet<'a>, elapsed: Duration) {
        let cards = fleet.pool.cards();
        if fleet.flights.iter().all(|flight| cards.contains(&flight.card)) {
            return;
        }
        for flight in std::mem::take(&mut fleet.flights) {
            let card = fleet.pool.card_of(flight.job.index);
            match card.filter(|&card| flight.done.is_none() && card != flight.card) {
                Some(card) => self.dispatch(fleet, card, flight.job.clone(), elapsed),
                None => fleet.flights.push_back(flight),
            }
        }
    }

    /// The champion once more, on every device that is there.
    pub(super) fn confirm_side_by_side(
        &mut self,
        fleet: &mut Fleet<'a>,
        job: &LastJob,
    ) -> Result<Confirmation, SearchError> {
        fleet.pool.begin(&self.gate, &self.settings, self.clock);
        self.keep_measured_cards(fleet);
        fleet.cut(0);
        let mut cards = fleet.pool.cards();
        if job.baseline.is_none() {
            cards.truncate(1); // there is nothing to race
        }
        for &card in &cards {
            let noise = self.noise(Some(card));
            let thorough = cards.first() == Some(&card);
            fleet.pool.confirm(card, LastJob { noise, thorough, ..job.clone() });
        }
        let mut found = fleet.collect(cards, |said| match said {
            Event::Confirmed(confirmation) => Some(*confirmation),
            Event::Opened(_) | Event::Tried(..) | Event::Lost(_) => None,
        })?;
        let (card, mut first) = found.remove(0);
        let ran = found.iter().map(|(_, c)| c.positions).chain([first.positions]).max();
        first.positions = ran.unwrap_or(0);
        if first.positions == 0 && first.decision != Decision::Reverted {
            // The card that was to run fresh tokens is gone: nothing is confirmed, and a resumed search does it again.
            return Err(fleet.lost());
        }
        let beside: Vec<Beside> =
            found.iter().map(|(other, c)| Beside::of_confirmation(*other, c)).collect();
        let decision = together(found.iter().map(|(_, c)| c.decision).chain([first.decision]));
        let mut why = first.why.clone();
        for other in beside.iter().filter(|other| !other.why.is_empty()) {
            why += &format!("; card {}: {}", other.card, other.why);
        }
        for LeftOut { card, why: reason } in std::mem::take(&mut fleet.left_out) {
            why += &format!("; card {card} was left out: {reason}");
        }
        // Where nothing was raced the figures are still those of the champion's trial.
        let own = job.baseline.is_some();
        let card = if own { Some(card) } else { self.champion().and_then(|trial| trial.card) };
        Ok(Confirmation { card, beside, decision, why, ..first })
    }
}
