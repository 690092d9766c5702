//! The scheduler: which session runs next.
//!
//! A command that becomes ready is stamped with its deadline in turns: now plus the patience of its priority. The
//! earliest stamp runs next; among equals, the first to become ready. A session that has run gets a new stamp, later
//! than all expired ones. So expired sessions run one after another, each before any runs twice. That is the whole
//! proof that nothing starves.

use abi::EntryState::{self, Claimed, Done, Empty, Fault, Published, Requeue, WaitIo, Yield};
use abi::{Side, Transition};

use crate::ring::{Refused, Ring};

/// Priority of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// After others, unless it has waited long.
    Low,
    /// The priority of most sessions.
    Normal,
    /// Before others, unless they have waited long.
    High,
}

impl Priority {
    /// All of them, lowest first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];

    /// Number of turns after which a ready command of this priority goes before all that become ready later.
    #[must_use]
    pub const fn patience(self) -> u64 {
        match self {
            Self::Low => 256,
            Self::Normal => 32,
            Self::High => 0,
        }
    }
}

/// Id of a session. A later session in the same place has another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId {
    place: u32,
    serial: u64,
}

impl SessionId {
    /// Its place among the sessions that can be open at once; also the index of its ring entry and of its caches on a
    /// device.
    #[must_use]
    pub fn place(self) -> usize {
        self.place as usize
    }
}

/// A session's turn on the machine. It must be given back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the session's command stays claimed until the turn is given back"]
pub struct Turn {
    session: SessionId,
    tokens: u64,
}

impl Turn {
    /// The session that has the turn.
    #[must_use]
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Maximum tokens to run in it.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The command has completed.
    Done,
    /// The command has more to do.
    Yield,
    /// The command cannot continue before [`Scheduler::returned`].
    WaitIo,
    /// The session has failed.
    Fault,
}

/// Why a session is in `fault`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its turn ended with a fault.
    Trapped,
    /// It requested something that does not exist.
    Refused,
    /// It ran more tokens than its turn allowed.
    Overran,
    /// Its command wants to continue, but its quota is spent.
    Quota,
    /// What it waited for is lost.
    Io,
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The command is queued again.
    Ready,
    /// It waits for its weights.
    Waiting,
    /// It has completed; [`Scheduler::retire`] makes room for the next one.
    Finished,
    /// It was cancelled while it ran, and is removed.
    Cancelled,
    /// It failed; the session can be closed.
    Failed(Why),
}

/// When a cancellation takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The command is removed.
    Now,
    /// It is running; it is removed when its turn is given back.
    AtTurnEnd,
}

/// Why a request was refused. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// All places are taken.
    #[error("{0} sessions are open already, and there are no more places")]
    Full(usize),
    /// The session was closed.
    #[error("the session was closed")]
    Closed,
    /// Its command is running.
    #[error("the session's command is running; cancel it and give its turn back first")]
    Running,
    /// The state of its command does not allow it.
    #[error(transparent)]
    State(#[from] Refused),
}

/// A session's terms and state.
#[derive(Clone, Debug)]
struct Session {
    serial: u64,
    priority: Priority,
    quota: u64,
    /// The stamp of a ready command: the turn at which its patience ends, and its sequence number among all that became
    /// ready.
    stamp: Option<(u64, u64)>,
    cancelled: bool,
    why: Option<Why>,
}

/// The open sessions, and the states of their commands.
#[derive(Clone, Debug)]
pub struct Scheduler {
    ring: Ring,
    places: Vec<Option<Session>>,
    turns: u64,
    readied: u64,
    opened: u64,
}

impl Scheduler {
    /// A scheduler with `capacity` places, at most the entries of a ring.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let ring = Ring::new(capacity);
        let places = vec![None; ring.len()];
        Self { ring, places, turns: 0, readied: 0, opened: 0 }
    }

    /// Maximum turns of others between the moment a command becomes ready and its turn.
    #[must_use]
    pub fn longest_wait(&self, priority: Priority) -> u64 {
        priority.patience() + (self.places.len() as u64).saturating_sub(1)
    }

    /// Turns given so far.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// The states of all commands.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Opens a session that may run `quota` tokens in its life.
    ///
    /// # Errors
    /// If every place is taken.
    pub fn open(&mut self, priority: Priority, quota: u64) -> Result<SessionId, Rejected> {
        let free = self.places.iter().position(Option::is_none);
        let place = free.ok_or(Rejected::Full(self.places.len()))?;
        self.opened += 1;
        let serial = self.opened;
        self.places[place] =
            Some(Session { serial, priority, quota, stamp: None, cancelled: false, why: None });
        Ok(SessionId { place: place as u32, serial })
    }

    /// Queues a command of the session.
    ///
    /// # Errors
    /// If the session has one already, or was closed.
    pub fn submit(&mut self, session: SessionId) -> Result<(), Rejected> {
        self.find(session)?;
        self.ring.change(Side::Host, session.place(), Published)?;
        self.ready(session)
    }

    /// The next turn, of at most `slice` tokens; `None` if no command is ready.
    pub fn next(&mut self, slice: u64) -> Option<Turn> {
        let turn = self.claim(slice, &mut |_| true)?;
        self.turns += 1;
        Some(turn)
    }

    /// Adds a session to the latest turn, for a machine that runs several sequences at once; it does not count as a
    /// turn. It is the earliest of the ready sessions that `suits` accepts. It gets a new stamp like every session that
    /// has run, so no session waits longer because of it: [`longest_wait`](Self::longest_wait) holds in turns of
    /// [`next`](Self::next).
    pub fn join(&mut self, slice: u64, suits: &mut dyn FnMut(SessionId) -> bool) -> Option<Turn> {
        self.claim(slice, suits)
    }

    fn claim(&mut self, slice: u64, suits: &mut dyn FnMut(SessionId) -> bool) -> Option<Turn> {
        let places = self.places.iter().zip(0_u32..);
        let ready = places.filter_map(|(held, place)| {
            let held = held.as_ref()?;
            Some((held.stamp?, SessionId { place, serial: held.serial }))
        });
        let (_, session) = ready.filter(|(_, session)| suits(*session)).min()?;
        let held = self.places[session.place()].as_mut()?;
        held.stamp = None;
        let tokens = held.quota.min(slice);
        let claimed = self.ring.change(Side::Device, session.place(), Claimed);
        debug_assert_eq!(claimed, Ok(()), "a stamp is on ready commands only");
        Some(Turn { session, tokens })
    }

    /// Ends a turn in which `used` tokens were run.
    ///
    /// # Errors
    /// If the turn is not from this scheduler.
    pub fn give_back(
        &mut self,
        turn: Turn,
        used: u64,
        outcome: Outcome,
    ) -> Result<Report, Rejected> {
        let (session, place) = (turn.session, turn.session.place());
        let held = self.find(session)?;
        let over = used > turn.tokens;
        held.quota = held.quota.saturating_sub(used);
        let (cancelled, quota) = (held.cancelled, held.quota);
        let outcome = if over { Outcome::Fault } else { outcome };
        match outcome {
            Outcome::Done => {
                self.ring.change(Side::Device, place, Done)?;
                Ok(Report::Finished)
            }
            Outcome::Fault => {
                self.ring.change(Side::Device, place, Fault)?;
                self.failed(session, if over { Why::Overran } else { Why::Trapped })
            }
            Outcome::WaitIo | Outcome::Yield if cancelled => {
                let preempted = if outcome == Outcome::Yield { Yield } else { WaitIo };
                self.ring.change(Side::Device, place, preempted)?;
                self.ring.change(Side::Host, place, Empty)?;
                self.find(session)?.cancelled = false;
                Ok(Report::Cancelled)
            }
            Outcome::WaitIo => {
                self.ring.change(Side::Device, place, WaitIo)?;
                Ok(Report::Waiting)
            }
            Outcome::Yield => {
                self.ring.change(Side::Device, place, Yield)?;
                if quota == 0 {
                    self.ring.change(Side::Host, place, Fault)?;
                    return self.failed(session, Why::Quota);
                }
                self.ring.change(Side::Host, place, Requeue)?;
                self.ready(session)?;
                Ok(Report::Ready)
            }
        }
    }

    /// What a command waited for has arrived: queues it again.
    ///
    /// # Errors
    /// If it does not wait.
    pub fn returned(&mut self, session: SessionId) -> Result<(), Rejected> {
        self.expect(session, &[WaitIo], Claimed)?;
        match self.find(session)?.stamp {
            Some(_) => Ok(()), // already reported
            None => self.ready(session),
        }
    }

    /// What a command waited for is lost: it fails.
    ///
    /// # Errors
    /// If it does not wait.
    pub fn lost(&mut self, session: SessionId) -> Result<(), Rejected> {
        self.expect(session, &[WaitIo], Fault)?;
        self.ring.change(Side::Host, session.place(), Fault)?;
        self.failed(session, Why::Io)?;
        Ok(())
    }

    /// A queued command requests something that does not exist: it fails without a turn.
    ///
    /// # Errors
    /// If it is not queued.
    pub fn refuse(&mut self, session: SessionId) -> Result<(), Rejected> {
        if self.state(session)? == Claimed {
            return Err(Rejected::Running);
        }
        self.ring.change(Side::Device, session.place(), Fault)?;
        self.failed(session, Why::Refused)?;
        Ok(())
    }

    /// Cancels a session's command.
    ///
    /// # Errors
    /// If there is none, or it has ended.
    pub fn cancel(&mut self, session: SessionId) -> Result<Cancelled, Rejected> {
        if self.state(session)? == Claimed {
            self.find(session)?.cancelled = true;
            return Ok(Cancelled::AtTurnEnd);
        }
        self.expect(session, &[Published, WaitIo, Yield, Requeue], Empty)?;
        self.ring.change(Side::Host, session.place(), Empty)?;
        self.find(session)?.stamp = None;
        Ok(Cancelled::Now)
    }

    /// Takes the result of a command that has ended: the session may submit the next one.
    ///
    /// # Errors
    /// If no command has ended.
    pub fn retire(&mut self, session: SessionId) -> Result<(), Rejected> {
        self.expect(session, &[Done, Fault], Empty)?;
        self.ring.change(Side::Host, session.place(), Empty)?;
        let held = self.find(session)?;
        (held.why, held.cancelled) = (None, false);
        Ok(())
    }

    /// Closes a session. A command that is not running is removed.
    ///
    /// # Errors
    /// If its command is running.
    pub fn close(&mut self, session: SessionId) -> Result<(), Rejected> {
        match self.state(session)? {
            Empty => {}
            Claimed => return Err(Rejected::Running),
            Published | Done | WaitIo | Yield | Requeue | Fault => {
                self.ring.change(Side::Host, session.place(), Empty)?;
            }
        }
        self.places[session.place()] = None;
        Ok(())
    }

    /// Why a session's command failed, if it did.
    #[must_use]
    pub fn why(&self, session: SessionId) -> Option<Why> {
        let held = self.places.get(session.place())?.as_ref()?;
        held.why.filter(|_| held.serial == session.serial)
    }

    fn find(&mut self, session: SessionId) -> Result<&mut Session, Rejected> {
        let held = self.places.get_mut(session.place()).and_then(Option::as_mut);
        held.filter(|held| held.serial == session.serial).ok_or(Rejected::Closed)
    }

    /// The state of a session's command.
    fn state(&mut self, session: SessionId) -> Result<EntryState, Rejected> {
        self.find(session)?;
        Ok(self.ring.state(session.place()))
    }

    /// Refuses unless a command's state is one of `states`; `to` is for the error.
    fn expect(
        &mut self,
        session: SessionId,
        states: &[EntryState],
        to: EntryState,
    ) -> Result<(), Rejected> {
        let (entry, from) = (session.place(), self.state(session)?);
        let transition = Transition { from, to };
        let illegal = Refused::Illegal { entry, transition };
        if states.contains(&from) { Ok(()) } else { Err(illegal.into()) }
    }

    /// Queues a command behind those whose patience ends sooner.
    fn ready(&mut self, session: SessionId) -> Result<(), Rejected> {
        let (now, number) = (self.turns, self.readied);
        self.readied += 1;
        let held = self.find(session)?;
        held.stamp = Some((now + held.priority.patience(), number));
        Ok(())
    }

    fn failed(&mut self, session: SessionId, why: Why) -> Result<Report, Rejected> {
        let held = self.find(session)?;
        (held.stamp, held.why) = (None, Some(why));
        Ok(Report::Failed(why))
    }
}
