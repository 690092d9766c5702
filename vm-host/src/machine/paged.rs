//! The pages of sessions: promised, given before a command, poisoned, given back.

use super::{Idle, Resident};
use crate::error::HostError;
use crate::pages::Occupancy;

impl Idle {
    /// Sets pages aside for a session's first so many positions, so that no other session can take them before it comes to need them.
    ///
    /// # Errors
    /// If there is no such session, or not so many pages that nobody was promised. The other sessions are as they were.
    pub fn promise_pages(&mut self, session: u32, positions: u32) -> Result<(), HostError> {
        Ok(self.memory.pages.pool.promise(session, positions)?)
    }

    /// A session is over: what it has in the caches is gone, and others may have its pages. Its next command begins at position zero.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.memory.sampling.passes_by(session);
        self.memory.pages.release(&mut self.memory.copier, session)
    }

    /// How full the caches are.
    #[must_use]
    pub fn pages(&self) -> Occupancy {
        self.memory.pages.pool.occupancy()
    }

    /// The pages of a session, in the order of its positions.
    #[must_use]
    pub fn session_pages(&self, session: u32) -> &[u32] {
        self.memory.pages.pool.held(session)
    }
}

impl Resident {
    /// As [`Idle::promise_pages`].
    ///
    /// # Errors
    /// The same.
    pub fn promise_pages(&mut self, session: u32, positions: u32) -> Result<(), HostError> {
        self.idle().promise_pages(session, positions)
    }

    /// As [`Idle::end_session`]. No command is under way: each is waited for.
    ///
    /// # Errors
    /// The same.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.idle().end_session(session)
    }

    /// How full the caches are.
    #[must_use]
    pub fn pages(&self) -> Occupancy {
        self.idle.as_ref().map(Idle::pages).unwrap_or_default()
    }

    /// The pages of a session, in the order of its positions.
    pub fn session_pages(&mut self, session: u32) -> &[u32] {
        self.idle().session_pages(session)
    }

    /// Fills a session's key/value caches with what no key or value is, so that a run which skips work cannot pass for one that did it
    /// before: the pages that it has, and from now on each that it gets. Those that no command touched since the last time still hold it, and are left out.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn poison_session(&mut self, session: u32) -> Result<(), HostError> {
        let memory = &mut self.idle().memory;
        memory.pages.poison(&mut memory.copier, session)
    }
}
