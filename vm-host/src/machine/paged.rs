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

    /// Whether a session without pages could begin with `prompt` and have `positions` positions.
    #[must_use]
    pub fn has_room(&self, positions: u32, prompt: &[u32]) -> bool {
        self.memory.pages.pool.has_room(positions, prompt)
    }

    /// Begins a session: reserves pages for its first `positions` positions, and gives it those that hold the beginning of `prompt`. Returns the
    /// number of positions that it has, less than the prompt's; its first command begins there.
    ///
    /// # Errors
    /// If there is no such session, or too few unreserved pages. The other sessions are unchanged.
    pub fn begin_session(
        &mut self,
        session: u32,
        positions: u32,
        prompt: &[u32],
    ) -> Result<u32, HostError> {
        let capacity = self.memory.residents.kv_capacity;
        if positions > capacity {
            let message =
                format!("{positions} positions exceed the key/value capacity of {capacity}");
            return Err(HostError::Request(message));
        }
        let prompt = &prompt[..prompt.len().min(positions as usize)];
        let has = self.memory.pages.pool.begin(session, positions, prompt)?;
        self.inherit(session, 0, &prompt[..has as usize]);
        Ok(has)
    }

    /// Gives a session whose first `ran` positions are there the pages of `prompt` that others have filled since. Returns its positions.
    pub fn reuse_pages(&mut self, session: u32, ran: u32, prompt: &[u32]) -> u32 {
        let has = self.memory.pages.pool.reuse(session, ran, prompt);
        if let Some(tokens) = prompt.get(ran as usize..has as usize) {
            self.inherit(session, ran, tokens);
        }
        if has > ran {
            self.prefill.iter_mut().for_each(|prefill| prefill.forget(session));
        }
        has
    }

    /// Writes tokens that a session did not run itself, since sampling reads them later.
    fn inherit(&mut self, session: u32, position: u32, tokens: &[u32]) {
        if !tokens.is_empty() {
            self.memory.sampling.passes_by(session);
            let at = self.memory.tokens_at(session, position);
            self.memory.tokens.write(at, bytemuck::cast_slice(tokens));
        }
    }

    /// Lets later sessions have the full pages of a session whose first positions hold `tokens`. Nothing may write to them again.
    pub fn publish_pages(&mut self, session: u32, tokens: &[u32]) {
        self.memory.pages.pool.publish(session, tokens);
    }

    /// Forgets which pages hold the beginnings of prompts: a command that did not end may have left anything in them.
    pub fn forget_pages(&mut self) {
        self.memory.pages.pool.forget();
        self.prefill.iter_mut().for_each(|prefill| prefill.forget_all());
    }

    /// Ends a session: its cache contents are lost, and others may have its pages. Its next command begins at position zero.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.memory.sampling.passes_by(session);
        self.prefill.iter_mut().for_each(|prefill| prefill.forget(session));
        self.memory.pages.release(&mut self.memory.copier, session)
    }

    /// The session whose chunk has run some of its layers ([`prefill_within`](Self::prefill_within)).
    #[must_use]
    pub fn chunk_begun(&self) -> Option<u32> {
        self.prefill.as_ref().and_then(|prefill| prefill.begun_by())
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

    /// As [`Idle::has_room`].
    #[must_use]
    pub fn has_room(&self, positions: u32, prompt: &[u32]) -> bool {
        self.idle.as_ref().is_some_and(|idle| idle.has_room(positions, prompt))
    }

    /// As [`Idle::begin_session`].
    ///
    /// # Errors
    /// The same.
    pub fn begin_session(
        &mut self,
        session: u32,
        positions: u32,
        prompt: &[u32],
    ) -> Result<u32, HostError> {
        self.idle().begin_session(session, positions, prompt)
    }

    /// As [`Idle::reuse_pages`].
    pub fn reuse_pages(&mut self, session: u32, ran: u32, prompt: &[u32]) -> u32 {
        self.idle().reuse_pages(session, ran, prompt)
    }

    /// As [`Idle::publish_pages`].
    pub fn publish_pages(&mut self, session: u32, tokens: &[u32]) {
        self.idle().publish_pages(session, tokens);
    }

    /// As [`Idle::end_session`]. No command can be running: each is waited for.
    ///
    /// # Errors
    /// The same.
    pub fn end_session(&mut self, session: u32) -> Result<(), HostError> {
        self.idle().end_session(session)
    }

    /// As [`Idle::chunk_begun`].
    #[must_use]
    pub fn chunk_begun(&self) -> Option<u32> {
        self.idle.as_ref().and_then(Idle::chunk_begun)
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
