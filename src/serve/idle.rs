//! The time between requests: the machine works for a search that tunes the server, in tasks, until a request comes.
//!
//! Where clients leave no such time, the search gets turns: further requests wait in the queue until no sequence is open,
//! then it has the machine for a moment. A turn has [`Pace`]: at most a tenth of the time goes to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use abi::Activity;
use telemetry::now_ns;

use super::{EngineLoop, Job};
use crate::engine::Engine;
use crate::serve::tune::TuneFigures;

/// Work for the thread that owns the engine.
pub(in crate::serve) type Task = Box<dyn FnOnce(&mut dyn Engine) + Send>;

/// How long the thread waits for the task after a task, or for a request before it looks for a task.
const TURN: Duration = Duration::from_millis(1);

/// How long no request has to be there before the search has the machine: a client that sends its next one at once
/// keeps it.
const QUIET: Duration = Duration::from_millis(20);

/// How long the search waits for an idle moment before it gets a turn.
pub(in crate::serve) const PATIENCE: Duration = Duration::from_secs(1);

/// How long open sequences may take to end before a turn; otherwise requests go on, and the search waits again.
const DRAIN: Duration = Duration::from_secs(2);

/// How long a turn begins new tasks. The last one is finished: a request waits for this, a task, and the open sequences.
/// A turn costs those sequences' end and, since their requests had the machine, the tokens of the search again, so that
/// a short one leaves no time for the search itself.
const TURN_OF_SEARCH: Duration = Duration::from_millis(500);

/// How long the machine waits at least for the next task of a turn.
const LINGER: Duration = Duration::from_millis(5);

/// After a turn requests have the machine for this many times as long as they were held back.
const REQUESTS_SHARE: u32 = 9;

/// When a search whose server is never idle gets its turns.
pub(in crate::serve) struct Pace {
    patience: Duration,
    /// Since when the search waits.
    waits: Option<Instant>,
    /// Since when requests are held back.
    holds: Option<Instant>,
    /// No request is held back before.
    rests_until: Option<Instant>,
}

impl Pace {
    pub(in crate::serve) fn new(patience: Duration) -> Self {
        Self { patience, waits: None, holds: None, rests_until: None }
    }

    /// Whether requests are held back now for a search that waits.
    fn holds(&mut self, now: Instant) -> bool {
        match self.holds {
            Some(since) if now - since >= DRAIN => {
                self.ended(now);
                false
            }
            Some(_) => true,
            None => {
                let waits = *self.waits.get_or_insert(now);
                let due = now - waits >= self.patience;
                let rests = self.rests_until.is_some_and(|until| now < until);
                self.holds = (due && !rests).then_some(now);
                self.holds.is_some()
            }
        }
    }

    /// How long a turn that begins now waits for a task: as long as it took to begin, which the next turn would take again.
    fn linger(&self, now: Instant) -> Duration {
        self.holds.map_or(LINGER, |since| LINGER.max(now - since))
    }

    /// Requests go on. Returns how long they were held back.
    fn ended(&mut self, now: Instant) -> Duration {
        let held = self.holds.take().map_or(Duration::ZERO, |since| now - since);
        self.waits = None;
        self.rests_until = Some(now + held * REQUESTS_SHARE);
        held
    }
}

/// The tasks of the time between requests.
pub(in crate::serve) struct BetweenRequests {
    tasks: Receiver<Task>,
    /// A task that came while requests ran.
    next: Option<Task>,
    pace: Pace,
    /// Whether the search has a turn: requests that wait do not end its work early.
    has_turn: Arc<AtomicBool>,
    figures: Arc<TuneFigures>,
}

impl BetweenRequests {
    #[cfg(test)]
    pub(in crate::serve) fn patient_for(self, patience: Duration) -> Self {
        Self { pace: Pace::new(patience), ..self }
    }

    pub(in crate::serve) fn new(
        tasks: Receiver<Task>,
        patience: Duration,
        has_turn: Arc<AtomicBool>,
        figures: Arc<TuneFigures>,
    ) -> Self {
        Self { tasks, next: None, pace: Pace::new(patience), has_turn, figures }
    }

    /// The next task, if one comes within this time; an error if none will come.
    fn task(&mut self, within: Duration) -> Option<Result<Task, ()>> {
        let task = match self.next.take() {
            Some(task) => Ok(task),
            None => self.tasks.recv_timeout(within),
        };
        match task {
            Ok(task) => {
                self.pace.waits = None;
                Some(Ok(task))
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(())),
        }
    }
}

impl EngineLoop<'_> {
    /// Lets a search have the machine between requests.
    pub(in crate::serve) fn tuned(self, between: BetweenRequests) -> Self {
        Self { between: Some(between), ..self }
    }

    /// Waits for a request; until it comes, the machine works for the search. `None` after the last one, or if the
    /// machine is lost.
    pub(super) fn next_job(&mut self, inbox: &Receiver<Job>) -> Option<Job> {
        // One task often follows another.
        let (idle, mut soon) = (Instant::now(), Duration::ZERO);
        while self.between.is_some() {
            match inbox.try_recv() {
                Ok(job) => return Some(job),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => {}
            }
            if self.streams {
                self.weights();
                self.said.enter(Activity::Idle);
            }
            let free = !self.streams && idle.elapsed() >= QUIET;
            let between = self.between.as_mut().filter(|_| free);
            let task = between.and_then(|between| between.task(soon));
            soon = Duration::ZERO;
            match task {
                Some(Ok(task)) => {
                    self.between.iter_mut().for_each(|between| between.pace.holds = None);
                    if let Some(job) = self.work(task, inbox) {
                        return Some(job);
                    }
                    if self.engine.lost().is_some() {
                        return None;
                    }
                    soon = TURN;
                }
                Some(Err(())) => {
                    // The search has ended.
                    self.between = None;
                    self.engine.bench().into_iter().for_each(|bench| bench.leave());
                }
                None => match inbox.recv_timeout(TURN) {
                    Ok(job) => return Some(job),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return None,
                },
            }
        }
        inbox.recv().ok()
    }

    /// Whether waiting requests get no places, for the search that waits for the machine.
    pub(super) fn holds_requests(&mut self) -> bool {
        let Some(between) = self.between.as_mut().filter(|_| !self.streams) else { return false };
        if between.next.is_none() {
            between.next = between.tasks.try_recv().ok();
        }
        let (now, since) = (Instant::now(), between.pace.holds);
        let holds = between.next.is_some() && between.pace.holds(now);
        if let Some(since) = since.filter(|_| !holds) {
            between.figures.waited((now - since).as_nanos() as u64);
        }
        holds
    }

    /// A turn of the search: no sequence is open, and waiting requests are held back.
    pub(super) fn turn_of_search(&mut self) {
        let Some(between) = &mut self.between else { return };
        self.said.enter(Activity::Running);
        between.has_turn.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let linger = between.pace.linger(began);
        while let Some(left) = TURN_OF_SEARCH.checked_sub(began.elapsed())
            && self.engine.lost().is_none()
        {
            let Some(Ok(task)) = between.task(linger.min(left)) else { break };
            task(&mut *self.engine);
        }
        between.has_turn.store(false, Ordering::Relaxed);
        let held = between.pace.ended(Instant::now());
        between.figures.waited(held.as_nanos() as u64);
        self.said.enter(Activity::Between);
    }

    /// Does a task. Returns the request that came meanwhile.
    fn work(&mut self, task: Task, inbox: &Receiver<Job>) -> Option<Job> {
        self.said.enter(Activity::Running);
        let began = now_ns();
        task(&mut *self.engine);
        self.said.enter(Activity::Idle);
        let job = inbox.try_recv().ok()?;
        let waited = now_ns().saturating_sub(job.arrived_ns.max(began));
        self.between.iter().for_each(|between| between.figures.waited(waited));
        Some(job)
    }
}

#[cfg(test)]
#[path = "idle_tests.rs"]
mod tests;
