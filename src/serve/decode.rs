//! The decode thread: it owns the engine, on which requests take turns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use abi::{Activity, SequenceEnd};
use ir::sampling::Logprobs;
use sessions::{Fair, Outcome, Report, Scheduler, SessionId, Tenant, Turn};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::figures::DraftFigures;
use crate::engine::{Broken, Engine};
use crate::observe::{Command, Sequences, TurnEnd};
pub(super) use crate::sequence::{Finish, Work};
use crate::sequence::{Sequence, Told};
use crate::speculate::{Draft, Sharing};

/// A request on its way to the decode thread. Dropping it frees its place in the queue.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) tenant: Tenant,
    /// Closed when the client has disconnected.
    pub(super) to: UnboundedSender<Event>,
    /// Shared by the choices of one request.
    pub(super) admitted: Arc<OwnedSemaphorePermit>,
    /// When the request arrived, in nanoseconds since 1970.
    pub(super) arrived_ns: u64,
}

/// The events that a request receives.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Token {
        id: u32,
        logprobs: Option<Logprobs>,
    },
    /// The log probability of the prompt's next token, from its second one on; these come before the first token.
    Prompt(Logprobs),
    /// The kernel of the tokens that follow, by its index; at first 0.
    Kernel(usize),
    /// It has a place; this is the first event, unless the request fails before.
    Begun,
    /// This many more tokens of the prompt were in the cache; these come before the first token.
    Reused(usize),
    /// The text has ended; this is the last event.
    End(Finish),
}

/// Counts the requests in the server against its limit.
#[derive(Clone, Debug)]
pub(super) struct Admission {
    free: Arc<Semaphore>,
    limit: usize,
}

impl Admission {
    pub(super) fn new(limit: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(limit)), limit }
    }

    /// A permit, if one is free. Dropping it frees it.
    pub(super) fn enter(&self) -> Option<Arc<OwnedSemaphorePermit>> {
        self.free.clone().try_acquire_owned().ok().map(Arc::new)
    }

    pub(super) fn inside(&self) -> usize {
        self.limit - self.free.available_permits()
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}

/// How often a loop whose sequences all wait for weights looks for them.
const LOOK_EVERY: Duration = Duration::from_millis(1);

struct Running {
    sequence: Sequence,
    tenant: Tenant,
    /// Positions that its tenant has paid for.
    paid: u64,
    to: UnboundedSender<Event>,
    admitted: Arc<OwnedSemaphorePermit>,
}

impl Running {
    fn new(Job { work, tenant, to, admitted, .. }: Job) -> Self {
        let paid = work.positions();
        Self { sequence: Sequence::new(work), tenant, paid, to, admitted }
    }

    /// Tells the client of tokens of the prompt that were in the cache.
    fn reused(&self, tokens: usize) {
        if tokens > 0 {
            let _ = self.to.send(Event::Reused(tokens));
        }
    }

    /// Runs a turn of `most` positions. If the machine samples, it yields when `preempt` says so or this one's client
    /// disconnects.
    fn turn(
        &mut self,
        engine: &mut dyn Engine,
        draft: Option<&mut Draft<'_>>,
        (place, most): (usize, u64),
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let Self { sequence, to, .. } = self;
        let mut preempt = || preempt() || to.is_closed();
        sequence.turn(engine, draft, (place, most), &mut |told| say(to, told), &mut preempt)
    }
}

/// Sends a token. A disconnected client is noticed at the next turn.
fn say(to: &UnboundedSender<Event>, told: Told) {
    let _ = to.send(match told {
        Told::Prompt(logprobs) => Event::Prompt(logprobs),
        Told::Kernel(kernel) => Event::Kernel(kernel),
        Told::Token(id, logprobs) => Event::Token { id, logprobs },
    });
}

fn arrived(waiting: &mut Fair<Job>, job: Job) {
    waiting.push(job.tenant.clone(), job);
}

/// Takes the requests that have come while a command runs. Returns whether the command is to end for them, or for the end
/// of the server.
fn takes(inbox: &Receiver<Job>, waiting: &mut Fair<Job>) -> bool {
    match inbox.try_recv() {
        Ok(job) => {
            arrived(waiting, job);
            true
        }
        Err(TryRecvError::Empty) => false,
        Err(TryRecvError::Disconnected) => true,
    }
}

pub(super) use idle::{BetweenRequests, PATIENCE, Task};

pub(super) struct EngineLoop<'e> {
    /// Guesses for a sequence that is alone. Dropped before the engine: its kernel leaves first.
    draft: Option<Draft<'e>>,
    drafted: DraftFigures,
    engine: Box<dyn Engine + 'e>,
    scheduler: Scheduler,
    running: BTreeMap<SessionId, Running>,
    /// Requests without a session yet.
    waiting: Fair<Job>,
    said: Sequences,
    /// Whether weights may still be on their way.
    streams: bool,
    /// The search that has the machine between requests.
    between: Option<BetweenRequests>,
    /// Who of a batch may guess.
    sharing: Sharing,
    /// Whether the last command was a piece of a prompt in chunks.
    piece_ran: bool,
}

impl<'e> EngineLoop<'e> {
    pub(super) fn new(engine: Box<dyn Engine + 'e>, places: usize, said: Sequences) -> Self {
        let scheduler = Scheduler::new(places);
        let (running, waiting) = (BTreeMap::new(), Fair::default());
        let (streams, between, piece_ran) = (true, None, false);
        let sharing = Sharing::default();
        let (draft, drafted) = (None, DraftFigures::default());
        Self {
            draft,
            drafted,
            engine,
            scheduler,
            running,
            waiting,
            said,
            streams,
            between,
            sharing,
            piece_ran,
        }
    }

    /// With a draft model, and where its guesses are counted.
    pub(super) fn with_draft(self, draft: Option<Draft<'e>>, drafted: DraftFigures) -> Self {
        Self { draft, drafted, ..self }
    }

    /// Runs until all senders are dropped; unfinished requests then receive [`Finish::Leaving`].
    ///
    /// # Errors
    /// Why the machine is lost to this process. Every request has received its end.
    pub(super) fn run(mut self, inbox: &Receiver<Job>) -> Result<(), String> {
        loop {
            if self.running.is_empty() && self.waiting.is_empty() {
                self.said.enter(Activity::Idle);
                match self.next_job(inbox) {
                    Some(job) => arrived(&mut self.waiting, job),
                    None => return self.engine.lost().map_or(Ok(()), Err),
                }
                self.said.enter(Activity::Between);
            }
            loop {
                match inbox.try_recv() {
                    Ok(job) => arrived(&mut self.waiting, job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        self.leave(&Finish::Leaving);
                        return Ok(());
                    }
                }
            }
            if !self.holds_requests() {
                self.admit();
            } else if self.running.is_empty() {
                self.turn_of_search();
            }
            self.weights();
            match self.scheduler.next(self.slice()) {
                Some(turn) if self.streams => self.wait_io(turn),
                Some(turn) => self.turns(turn, inbox),
                // All wait for weights, or have left.
                None if self.running.is_empty() => {}
                None => {
                    let job = inbox.recv_timeout(LOOK_EVERY);
                    job.into_iter().for_each(|job| arrived(&mut self.waiting, job));
                }
            }
            if let Some(why) = self.engine.lost() {
                self.leave(&Finish::Failed(why.clone()));
                return Err(why);
            }
        }
    }

    fn leave(mut self, finish: &Finish) {
        self.said.lost(finish.ending(), self.running.len() + self.waiting.len());
        let running = self.running.into_values().map(|running| running.to);
        for to in running.chain(self.waiting.drain().map(|job| job.to)) {
            let _ = to.send(Event::End(finish.clone()));
        }
    }

    /// Gives sessions to waiting requests while there are places.
    fn admit(&mut self) {
        let waited = self.waiting.len();
        self.waiting.retain(|job| !job.to.is_closed());
        if waited > 0 {
            self.said.lost(SequenceEnd::Cancelled, waited - self.waiting.len());
        }
        self.slot();
        if waited > 0 {
            self.said.waiting(self.waiting.len());
        }
    }

    fn slot(&mut self) {
        while let Some(job) = self.waiting.first() {
            let (quota, priority) = (job.work.positions(), job.work.priority);
            // The first in line waits until other sequences free pages; if there are none, `begin` returns the reason.
            if !self.running.is_empty() && !self.engine.has_room(quota, job.work.reusable()) {
                return;
            }
            let Ok(session) = self.scheduler.open(priority, quota) else { return };
            let Some((_, job)) = self.waiting.admit(quota) else { return };
            let arrived_ns = job.arrived_ns;
            let mut running = Running::new(job);
            let _ = running.to.send(Event::Begun);
            let started = running.sequence.begin(&mut *self.engine, session.place());
            let started = started.and_then(|()| {
                let submitted = self.scheduler.submit(session);
                submitted.map_err(|rejected| Broken::Sequence(rejected.to_string()))
            });
            running.reused(running.sequence.fed);
            self.running.insert(session, running);
            let ring = self.scheduler.ring();
            self.said.open(session.place(), (priority, quota), arrived_ns, ring);
            match started {
                Ok(()) => {}
                Err(Broken::Sequence(why)) => self.end(session, Finish::Failed(why)),
                Err(Broken::All(why)) => self.end_all(&Finish::Failed(why)),
            }
            if self.engine.lost().is_some() {
                return;
            }
        }
    }

    /// Runs a turn, and with it the turns that can be batched.
    fn turns(&mut self, turn: Turn, inbox: &Receiver<Job>) {
        let session = turn.session();
        let Some(running) = self.running.get_mut(&session) else {
            unreachable!("every open session has its request")
        };
        if running.to.is_closed() {
            return self.gone(turn);
        }
        match running.sequence.reuse(&mut *self.engine, session.place()) {
            Ok(tokens) => running.reused(tokens),
            Err(broken) => return self.settle(turn, 0, 0, Err(broken)),
        }
        // Who has begun a chunk waits for no other prompt: they wait for it.
        let begun = self.engine.interrupted() == Some(session.place());
        if self.waits_with_chunk(session) || !begun && self.is_run_by_another(session) {
            return self.settle(turn, 0, 0, Ok(None));
        }
        let turns = self.joined(turn);
        self.together(turns, inbox);
    }

    /// One turn alone: a piece of a prompt, or new tokens.
    fn turn(&mut self, turn: Turn, inbox: &Receiver<Job>) {
        let (session, place) = (turn.session(), turn.session().place());
        let (others, steps) = (self.running.len() > 1, self.steps_at_once(1));
        self.piece_ran = self.running.get(&session).is_some_and(|running| self.in_chunks(running));
        if self.piece_ran {
            self.engine.beside_streams(self.streams_beside(session));
        }
        let Some(running) = self.running.get_mut(&session) else { return };
        let sequence = &running.sequence;
        let (first, chosen) = (sequence.fed, sequence.chosen.len());
        let piece = self.engine.prompt_slice();
        let most = match sequence.work.prompt.len().saturating_sub(first) as u64 {
            rest if rest > piece => piece,
            // Once its prompt is read it joins the batch of the others, which wait for this turn.
            rest @ 1.. if others && self.engine.seqs() > 1 => rest,
            rest if others => rest.max(steps as u64),
            rest => rest + steps as u64,
        };
        let most = turn.tokens().min(most);
        self.said.begin(&[(place, first)], sequence.next(most).len());
        let began = Instant::now();
        let mut preempt = || takes(inbox, &mut self.waiting);
        // It has one sequence: in turns of several it would read each text again.
        let draft = self.draft.as_mut().filter(|_| !others);
        let done = running.turn(&mut *self.engine, draft, (place, most), &mut preempt);
        let took = began.elapsed();
        let positions = done.as_ref().map_or(0, |(ran, _)| *ran);
        let tokens = running.sequence.chosen.len() - chosen;
        let command = Command { place, first, sequences: 1, positions, tokens, took };
        self.said.ran(&command, &self.engine.account());
        self.settle(turn, positions, tokens, done.map(|(_, finish)| finish));
    }

    /// Cancels a session whose client has disconnected; the session has the turn.
    fn gone(&mut self, turn: Turn) {
        let session = turn.session();
        let _ = self.scheduler.cancel(session);
        let _ = self.scheduler.give_back(turn, 0, Outcome::Yield);
        drop(self.forget(session, SequenceEnd::Cancelled));
    }

    /// Ends a turn in which `ran` positions were run and `chosen` tokens sampled.
    fn settle(
        &mut self,
        turn: Turn,
        ran: usize,
        chosen: usize,
        done: Result<Option<Finish>, Broken>,
    ) {
        let session = turn.session();
        let sequence = self.running.get_mut(&session).map(|running| &mut running.sequence);
        let (fed, guesses) =
            sequence.map_or_else(Default::default, |of| (of.fed, of.unpublished()));
        self.drafted.add(&guesses);
        let end = TurnEnd {
            place: session.place(),
            first: fed.saturating_sub(ran),
            positions: ran,
            tokens: chosen,
            guesses,
        };
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
        self.said.turn(&end, self.scheduler.ring());
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

    /// Ends every sequence: the machine lost them all.
    fn end_all(&mut self, finish: &Finish) {
        let sessions: Vec<SessionId> = self.running.keys().copied().collect();
        for session in sessions {
            let _ = self.scheduler.refuse(session);
            self.end(session, finish.clone());
        }
    }

    fn end(&mut self, session: SessionId, finish: Finish) {
        if let Some(Running { to, admitted, .. }) = self.forget(session, finish.ending()) {
            // Freed first: a client that receives the end may send the next request at once.
            drop(admitted);
            let _ = to.send(Event::End(finish));
        }
    }

    /// Removes a request, whatever its ending.
    fn forget(&mut self, session: SessionId, ending: SequenceEnd) -> Option<Running> {
        self.engine.end(session.place());
        let closed = self.scheduler.close(session);
        debug_assert_eq!(closed, Ok(()), "no turn is out");
        self.said.close(session.place(), ending, self.scheduler.ring());
        let running = self.running.remove(&session)?;
        self.waiting.left(&running.tenant, running.paid, running.sequence.fed as u64);
        Some(running)
    }
}

#[path = "alike.rs"]
mod alike;
#[path = "idle.rs"]
mod idle;
#[path = "slices.rs"]
mod slices;
#[path = "together.rs"]
mod together;
#[path = "weights.rs"]
mod weights;

#[cfg(test)]
#[path = "device_tests.rs"]
mod device_tests;
#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
