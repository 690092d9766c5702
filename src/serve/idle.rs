//! The time between requests: the machine works for a search that tunes the server, in tasks, until a request comes.

use std::sync::Arc;
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

/// The tasks of the time between requests.
pub(in crate::serve) struct BetweenRequests {
    pub(in crate::serve) tasks: Receiver<Task>,
    pub(in crate::serve) figures: Arc<TuneFigures>,
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
            let between = self.between.as_ref().filter(|_| free);
            let task = between.and_then(|between| next_task(between, soon));
            soon = Duration::ZERO;
            match task {
                Some(Ok(task)) => {
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

/// The next task, if one comes within this time; an error if none will come.
fn next_task(between: &BetweenRequests, within: Duration) -> Option<Result<Task, ()>> {
    match between.tasks.recv_timeout(within) {
        Ok(task) => Some(Ok(task)),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Err(())),
    }
}
