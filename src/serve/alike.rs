//! Prompts that begin alike and run at the same time: one of them runs a page, the others wait for it.

use std::cmp::Reverse;

use sessions::SessionId;

use super::{EngineLoop, Running};

/// Positions of a page.
pub(super) const PAGE: usize = abi::KV_PAGE as usize;

impl Running {
    /// The end of the page of the prompt that runs next, if it is at its beginning and another sequence could run it.
    pub(super) fn next_page(&self) -> Option<usize> {
        let (fed, prompt) = (self.sequence.fed, self.sequence.work.reusable());
        let end = fed + PAGE;
        // The last token of a prompt is its own to run.
        (fed % PAGE == 0 && end < prompt.len()).then_some(end)
    }

    /// Whether it runs a page up to `end` that begins with these tokens, or is about to.
    fn runs(&self, tokens: &[u32]) -> bool {
        self.sequence.fed < tokens.len() && self.sequence.work.reusable().starts_with(tokens)
    }
}

impl EngineLoop<'_> {
    /// Whether a session that is further on, or the first of those that are as far, runs the page that is next for this
    /// session. It gets its turns whatever this one does, so that no two ever wait for each other.
    pub(super) fn is_run_by_another(&self, session: SessionId) -> bool {
        let Some(running) = self.running.get(&session).filter(|_| self.engine.shares()) else {
            return false;
        };
        let Some(end) = running.next_page() else { return false };
        let (tokens, priority) =
            (&running.sequence.work.prompt[..end], running.sequence.work.priority);
        let ahead =
            |session: SessionId, running: &Running| (running.sequence.fed, Reverse(session));
        let this = ahead(session, running);
        self.running.iter().any(|(&other, running)| {
            ahead(other, running) > this
                && running.sequence.work.priority >= priority
                && !running.to.is_closed()
                && running.runs(tokens)
        })
    }
}
