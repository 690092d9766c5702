//! The pages of sessions: promised, allocated before a command, poisoned, returned.

use super::{Idle, Resident};
use crate::error::HostError;
use crate::pages::Occupancy;

impl Idle {
    /// Reserves pages for a session's first `positions` positions, so that no other session can take them before it needs them.
    ///
    /// # Errors
    /// If there is no such session, or too few unreserved pages. The other sessions are unchanged.
    pub fn promise_pages(&mut self, session: u32, positions: u32) -> Result<(), HostError> {
        Ok(self.memory.pages.pool.promise(session, positions)?)
    }

    /// Ends a session: its cache contents are lost, and others may have its pages. Its next command begins at position zero.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.memory.sampling.passes_by(session);
        self.memory.pages.release(&mut self.memory.copier, session)
    }

    /// Occupancy of the caches.
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

    /// As [`Idle::end_session`]. No command can be running: each is waited for.
    ///
    /// # Errors
    /// The same.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.idle().end_session(session)
    }

    /// Occupancy of the caches.
    #[must_use]
    pub fn pages(&self) -> Occupancy {
        self.idle.as_ref().map(Idle::pages).unwrap_or_default()
    }

    /// The pages of a session, in the order of its positions.
    pub fn session_pages(&mut self, session: u32) -> &[u32] {
        self.idle().session_pages(session)
    }

    /// Poisons a session's key/value caches, so that a run which skips work cannot pass as one that did it before: the pages that it has,
    /// and from now on each that it gets. Pages that no command touched since the last time still hold poison and are skipped.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn poison_session(&mut self, session: u32) -> Result<(), HostError> {
        let memory = &mut self.idle().memory;
        memory.pages.poison(&mut memory.copier, session)
    }
}
