//! The decode thread: it owns the engine, and requests take turns on it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use abi::{Activity, SequenceEnd};
use ir::sampling::{Logprobs, Sampling, Seen, logprobs};
use sessions::{Outcome, Priority, Report, Scheduler, SessionId, Turn};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::{Broken, Engine, How};
use crate::observe::Sequences;

/// New tokens of a turn where the machine chooses them. It gives way between turns, and within one to requests that come.
const SLICE: usize = 16;

/// What a request wants of the model.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) prompt: Vec<u32>,
    /// Tokens to generate at most; one at least.
    pub(super) limit: u32,
    pub(super) sampling: Sampling,
    /// Ids that end the text.
    pub(super) stop: Vec<u32>,
    /// How many likeliest tokens to report beside the chosen one's probability.
    pub(super) logprobs: Option<usize>,
    pub(super) priority: Priority,
}

/// A request on its way to the decode thread. Its place in the queue is free again when it is dropped.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    /// Closed when the client has gone.
    pub(super) to: UnboundedSender<Event>,
    pub(super) admitted: OwnedSemaphorePermit,
}

impl Job {
    /// Places that others may take. Fewer than before: somebody came.
    pub(super) fn free(&self) -> usize {
        self.admitted.semaphore().available_permits()
    }
}

/// What a request hears.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Token {
        id: u32,
        logprobs: Option<Logprobs>,
    },
    /// The text has ended; nothing follows.
    End(Finish),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// With a stop token, which was the last one sent.
    Stop,
    /// As long as was asked for.
    Length,
    /// The machine failed at it.
    Failed(String),
    Leaving,
}

impl Finish {
    fn ending(&self) -> SequenceEnd {
        match self {
            Self::Stop => SequenceEnd::Stop,
            Self::Length => SequenceEnd::Length,
            Self::Failed(_) => SequenceEnd::Failed,
            Self::Leaving => SequenceEnd::Leaving,
        }
    }
}

/// Requests that are in the server, against its limit.
#[derive(Clone, Debug)]
pub(super) struct Admission {
    free: Arc<Semaphore>,
    limit: usize,
}

impl Admission {
    pub(super) fn new(limit: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(limit)), limit }
    }

    /// A place, if one is free. It is free again when it is dropped.
    pub(super) fn enter(&self) -> Option<OwnedSemaphorePermit> {
        self.free.clone().try_acquire_owned().ok()
    }

    pub(super) fn inside(&self) -> usize {
        self.limit - self.free.available_permits()
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}

struct Running {
    job: Job,
    fed: usize,
    /// Tokens that were chosen; the last one is not fed yet.
    chosen: Vec<u32>,
    seen: Seen,
    /// Whether the machine chooses, not the host.
    chosen_there: bool,
}

impl Running {
    fn new(job: Job) -> Self {
        let mut seen = Seen::default();
        seen.extend(job.work.prompt.iter().copied());
        Self { job, fed: 0, chosen: Vec::new(), seen, chosen_there: false }
    }

    fn say(&self, event: Event) {
        // A client that has gone is noticed at the next turn.
        let _ = self.job.to.send(event);
    }

    /// What to feed next, at most `most` tokens.
    fn next(&self, most: u64) -> Vec<u32> {
        let prompt = &self.job.work.prompt;
        match prompt.get(self.fed..) {
            Some(rest) if !rest.is_empty() => rest[..rest.len().min(most as usize)].to_vec(),
            _ => self.chosen.last().copied().into_iter().collect(),
        }
    }

    /// Chooses from a row; says so, and whether that was the last.
    fn choose(&mut self, logits: &[f32]) -> Result<Option<Finish>, String> {
        let work = &self.job.work;
        let position = u32::try_from(self.fed).unwrap_or(u32::MAX);
        let id = work.sampling.choose(logits, &self.seen, position);
        let id = id.ok_or_else(|| "every token is banned or not a number".to_owned())?;
        let stopped = work.stop.contains(&id);
        self.say(Event::Token { id, logprobs: work.logprobs.map(|top| logprobs(logits, id, top)) });
        self.seen.insert(id);
        self.chosen.push(id);
        Ok(self.finish(stopped))
    }

    /// Whether the last token was the last.
    fn finish(&self, stopped: bool) -> Option<Finish> {
        let full = self.chosen.len() >= self.job.work.limit as usize;
        match (stopped, full) {
            (true, _) => Some(Finish::Stop),
            (false, true) => Some(Finish::Length),
            (false, false) => None,
        }
    }

    /// A turn of `most` positions in which the host chooses. How many were run, and whether that was all.
    fn turn_here(
        &mut self,
        engine: &mut dyn Engine,
        place: usize,
        most: u64,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let tokens = self.next(most);
        let read = self.fed + tokens.len() >= self.job.work.prompt.len();
        let row = engine.feed(place, &tokens, read)?;
        self.fed += tokens.len();
        let finish = if read { self.choose(&row).map_err(Broken::Sequence)? } else { None };
        Ok((tokens.len(), finish))
    }

    /// The same where the machine chooses. It gives way when a request comes, or when this one's client has gone.
    fn turn_there(
        &mut self,
        engine: &mut dyn Engine,
        place: usize,
        most: u64,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let tokens = self.next(most);
        let work = &self.job.work;
        let read = self.fed + tokens.len() >= work.prompt.len();
        let room = most as usize + 1 - tokens.len();
        let left = work.limit as usize - self.chosen.len();
        let generate = if read { room.min(left).min(SLICE) as u32 } else { 0 };
        let (to, free) = (&self.job.to, self.job.free());
        let mut give_way = || to.is_closed() || self.job.free() < free;
        let done = engine.advance(place, &tokens, generate, &mut give_way)?;
        Ok((done.ran, self.took(done.ran, done.chosen, done.stopped)))
    }
}

pub(super) struct Desk<'e> {
    engine: Box<dyn Engine + 'e>,
    scheduler: Scheduler,
    running: BTreeMap<SessionId, Running>,
    /// Requests without a session yet, first come first served.
    waiting: VecDeque<Job>,
    said: Sequences,
}

impl<'e> Desk<'e> {
    pub(super) fn new(engine: Box<dyn Engine + 'e>, places: usize, said: Sequences) -> Self {
        let scheduler = Scheduler::new(places);
        let (running, waiting) = (BTreeMap::new(), VecDeque::new());
        Self { engine, scheduler, running, waiting, said }
    }

    /// Works until nobody can send any more; what is unfinished then is told so.
    ///
    /// # Errors
    /// Why the machine is lost to this process. Every request has been told.
    pub(super) fn run(mut self, inbox: &Receiver<Job>) -> Result<(), String> {
        loop {
            if self.running.is_empty() && self.waiting.is_empty() {
                self.said.enter(Activity::Idle);
                match inbox.recv() {
                    Ok(job) => self.waiting.push_back(job),
                    Err(_) => return Ok(()),
                }
                self.said.enter(Activity::Between);
            }
            loop {
                match inbox.try_recv() {
                    Ok(job) => self.waiting.push_back(job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        self.leave(&Finish::Leaving);
                        return Ok(());
                    }
                }
            }
            self.admit();
            if let Some(turn) = self.scheduler.next(self.engine.prompt_slice()) {
                let turns = self.joined(turn);
                self.turns(turns);
            }
            if let Some(why) = self.engine.lost() {
                self.leave(&Finish::Failed(why.clone()));
                return Err(why);
            }
        }
    }

    fn leave(self, finish: &Finish) {
        self.said.lost(finish.ending(), self.running.len() + self.waiting.len());
        let running = self.running.into_values().map(|running| running.job);
        for job in running.chain(self.waiting) {
            let _ = job.to.send(Event::End(finish.clone()));
        }
    }

    /// Gives sessions to those who wait, as many as there are places.
    fn admit(&mut self) {
        let waited = self.waiting.len();
        self.waiting.retain(|job| !job.to.is_closed());
        if waited > 0 {
            self.said.lost(SequenceEnd::Cancelled, waited - self.waiting.len());
        }
        self.seat();
        if waited > 0 {
            self.said.waiting(self.waiting.len());
        }
    }

    fn seat(&mut self) {
        while let Some(job) = self.waiting.pop_front() {
            let quota = job.work.prompt.len() as u64 + u64::from(job.work.limit);
            let priority = job.work.priority;
            // The first in line waits for pages that others hold; if nobody does, `begin` says why there are none.
            if !self.running.is_empty() && !self.engine.has_room(quota) {
                return self.waiting.push_front(job);
            }
            let Ok(session) = self.scheduler.open(priority, quota) else {
                return self.waiting.push_front(job);
            };
            let mut running = Running::new(job);
            let begun = self.begin(session.place(), &mut running).and_then(|()| {
                let submitted = self.scheduler.submit(session);
                submitted.map_err(|rejected| Broken::Sequence(rejected.to_string()))
            });
            self.running.insert(session, running);
            self.said.open(session.place(), priority, quota, self.scheduler.ring());
            match begun {
                Ok(()) => {}
                Err(Broken::Sequence(why)) => self.end(session, Finish::Failed(why)),
                Err(Broken::All(why)) => self.end_all(&Finish::Failed(why)),
            }
            if self.engine.lost().is_some() {
                return;
            }
        }
    }

    /// Begins a request's sequence, and finds out who chooses.
    fn begin(&mut self, place: usize, running: &mut Running) -> Result<(), Broken> {
        let work = &running.job.work;
        self.engine.begin(place, work.prompt.len() as u64 + u64::from(work.limit))?;
        // Probabilities are the host's to compute, from rows.
        if work.logprobs.is_none() {
            let how = How { sampling: &work.sampling, stop: &work.stop };
            running.chosen_there = self.engine.choose_by(place, &how)?;
        }
        Ok(())
    }

    /// One turn: a piece of a prompt, or new tokens.
    fn turn(&mut self, turn: Turn) {
        let session = turn.session();
        let Some(running) = self.running.get_mut(&session) else {
            unreachable!("every open session has its request")
        };
        if running.job.to.is_closed() {
            return self.gone(turn);
        }
        let (engine, place) = (&mut *self.engine, session.place());
        let chosen = running.chosen.len();
        self.said.begin(place, running.fed, running.next(turn.tokens()).len());
        let began = Instant::now();
        let done = match running.chosen_there {
            true => running.turn_there(engine, place, turn.tokens()),
            false => running.turn_here(engine, place, turn.tokens()),
        };
        let ran = done.as_ref().map_or(0, |(ran, _)| *ran);
        self.said.ran(place, ran, began.elapsed());
        let chosen = (running.chosen.len() - chosen) as u64;
        self.settle(turn, ran, chosen, done.map(|(_, finish)| finish));
    }

    /// The client of a session that has its turn has gone.
    fn gone(&mut self, turn: Turn) {
        let session = turn.session();
        let _ = self.scheduler.cancel(session);
        let _ = self.scheduler.give_back(turn, 0, Outcome::Yield);
        drop(self.forget(session, SequenceEnd::Cancelled));
    }

    /// Gives a turn back in which so many positions were run and tokens chosen.
    fn settle(
        &mut self,
        turn: Turn,
        ran: usize,
        chosen: u64,
        done: Result<Option<Finish>, Broken>,
    ) {
        let session = turn.session();
        let (all, finish) = match done {
            Ok(finish) => (false, finish),
            Err(Broken::Sequence(why)) => (false, Some(Finish::Failed(why))),
            Err(Broken::All(why)) => (true, Some(Finish::Failed(why))),
        };
        let outcome = match &finish {
            None => Outcome::Yield,
            Some(Finish::Stop | Finish::Length) => Outcome::Done,
            Some(Finish::Failed(_) | Finish::Leaving) => Outcome::Fault,
        };
        let report = self.scheduler.give_back(turn, ran as u64, outcome);
        self.said.turn(session.place(), chosen, self.scheduler.ring());
        match (report, finish) {
            (Ok(Report::Ready), _) => {}
            (Ok(Report::Finished | Report::Failed(_)), Some(finish)) => {
                self.end(session, finish.clone());
                if all {
                    self.end_all(&finish);
                }
            }
            (report, _) => self.end(session, Finish::Failed(format!("it stopped: {report:?}"))),
        }
    }

    /// The machine lost every sequence.
    fn end_all(&mut self, finish: &Finish) {
        let sessions: Vec<SessionId> = self.running.keys().copied().collect();
        for session in sessions {
            let _ = self.scheduler.refuse(session);
            self.end(session, finish.clone());
        }
    }

    fn end(&mut self, session: SessionId, finish: Finish) {
        if let Some(Job { to, admitted, .. }) = self.forget(session, finish.ending()) {
            // Whoever hears of the end may send the next request at once.
            drop(admitted);
            let _ = to.send(Event::End(finish));
        }
    }

    /// Takes a request from the desk, whatever became of it.
    fn forget(&mut self, session: SessionId, ending: SequenceEnd) -> Option<Job> {
        self.engine.end(session.place());
        let closed = self.scheduler.close(session);
        debug_assert_eq!(closed, Ok(()), "no turn is out");
        self.said.close(session.place(), ending, self.scheduler.ring());
        self.running.remove(&session).map(|running| running.job)
    }
}

#[path = "together.rs"]
mod together;

#[cfg(test)]
#[path = "device_tests.rs"]
mod device_tests;
#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
