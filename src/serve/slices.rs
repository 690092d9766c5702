//! How many steps or layers the decode loop gives to one command, so that no other sequence waits too long.
//!
//! A prompt in chunks and sequences that decode beside it (streams) run in turns: a piece of the prompt, then
//! [`BESIDE_CHUNKS`] steps. So a stream never waits for more than one piece, however many prompts there are; these are
//! read one after the other.

use sessions::SessionId;

use super::{EngineLoop, Running};
use crate::sequence::{BESIDE_CHUNKS, SHARED_SLICE, SLICE};

impl Running {
    /// Whether it decodes, and its client waits for the next token.
    fn streams(&self) -> bool {
        !self.sequence.chosen.is_empty() && !self.to.is_closed()
    }

    /// The tokens of its prompt that are still to run.
    fn unread(&self) -> usize {
        self.sequence.work.prompt.len().saturating_sub(self.sequence.fed)
    }
}

impl EngineLoop<'_> {
    /// The most positions of a turn: a piece of a prompt, or new tokens.
    pub(super) fn slice(&self) -> u64 {
        self.engine.prompt_slice().max(SLICE as u64)
    }

    /// The most steps of a command that this many sequences share.
    pub(super) fn steps_at_once(&self, sequences: usize) -> usize {
        match self.running.len() > sequences {
            true if self.running.values().any(|running| self.in_chunks(running)) => BESIDE_CHUNKS,
            true => SHARED_SLICE,
            false => SLICE,
        }
    }

    /// Whether others than this session decode.
    pub(super) fn streams_beside(&self, session: SessionId) -> bool {
        self.running.iter().any(|(other, running)| *other != session && running.streams())
    }

    /// Whether a session has to wait with its piece of a chunk: for the chunk of another prompt, or for the steps of
    /// streams that have waited for a piece.
    pub(super) fn waits_with_chunk(&self, session: SessionId) -> bool {
        if !self.running.get(&session).is_some_and(|running| self.in_chunks(running)) {
            return false;
        }
        let other = self.engine.interrupted().is_some_and(|place| place != session.place());
        other || self.piece_ran && self.streams_beside(session)
    }

    /// Whether the next piece of its prompt is a chunk, or some layers of one.
    pub(super) fn in_chunks(&self, running: &Running) -> bool {
        let unread = running.unread();
        unread > 0 && !running.to.is_closed() && !self.engine.reads_in_batch(unread)
    }
}
