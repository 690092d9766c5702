//! A chunk in several parts, some layers each, between which the resident kernel runs steps of other sessions.
//!
//! What a layer leaves for the next one stays in the memory of chunks, which no kernel but those for chunks uses. The kernels and their order are
//! those of a chunk that runs at once, so the results have the same bits however it is divided.

use std::time::{Duration, Instant};

use super::{Prefill, PrefillOptions, Prompt, wait};
use crate::driver::Stream;
use crate::error::HostError;
use crate::memory::Copier;

/// A chunk of which the layers before `layer` have run.
pub(super) struct Begun {
    session: u32,
    position: u32,
    tokens: Vec<u32>,
    layer: usize,
    /// Microseconds that they took.
    us: f64,
}

/// What [`Idle::prefill_within`](crate::Idle::prefill_within) has done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayersRan {
    /// Whether the last layer has run: else the same call goes on.
    pub done: bool,
    /// As in [`Prefilled`](crate::Prefilled): the chunk is not continued.
    pub clamped: bool,
    /// Microseconds that all of the chunk's layers took so far, by the host's clock.
    pub us: f64,
}

impl Begun {
    fn is(&self, session: u32, (_, position, tokens): Prompt<'_>) -> bool {
        self.session == session && self.position == position && self.tokens == tokens
    }
}

/// Whether another layer fits: it takes as long as the one before, and one runs in any case.
fn fits(ran: usize, spent: Duration, last: Duration, limit: Duration) -> bool {
    ran == 0 || spent + last <= limit
}

impl Prefill {
    /// The session of the chunk of which some layers have run.
    pub(crate) fn begun_by(&self) -> Option<u32> {
        self.begun.as_ref().map(|begun| begun.session)
    }

    /// Forgets a session's chunk.
    pub(crate) fn forget(&mut self, session: u32) {
        self.begun.take_if(|begun| begun.session == session);
    }

    /// Forgets any session's chunk.
    pub(crate) fn forget_all(&mut self) {
        self.begun = None;
    }

    /// Runs layers of a chunk without logits, from the first one that the last call for the same chunk left: as many as the limit allows.
    pub(crate) fn run_within(
        &mut self,
        streams: &[&Stream],
        copier: &mut Copier,
        session: u32,
        prompt: Prompt<'_>,
        limit: Duration,
    ) -> Result<LayersRan, HostError> {
        let (pages, position, tokens) = prompt;
        let count = tokens.len() as u32;
        if count > self.chunk {
            let most = self.chunk;
            return Err(HostError::Request(format!("{count} tokens at once; a chunk has {most}")));
        }
        let began = Instant::now();
        let from = self.begun.take().filter(|begun| begun.is(session, prompt));
        let (from, before) = from.map_or((0, 0.0), |begun| (begun.layer, begun.us));
        let mut runs = self.runs(streams, pages, &PrefillOptions::default())?;
        if from == 0 {
            self.clear_clamped(streams, copier)?;
            self.upload_tokens(streams, copier, tokens)?;
            runs.embed(count)?;
        }
        let (mut layer, mut last) = (from, Duration::ZERO);
        while layer < runs.layers() && fits(layer - from, began.elapsed(), last, limit) {
            let began = Instant::now();
            runs.layer(layer, (position, count), false)?;
            runs.streams().try_for_each(wait)?;
            (layer, last) = (layer + 1, began.elapsed());
        }
        let (done, clamped) = (layer == runs.layers(), self.clamped(copier)?);
        let (tokens, us) = (tokens.to_vec(), before + began.elapsed().as_secs_f64() * 1e6);
        self.begun = (!done && !clamped).then_some(Begun { session, position, tokens, layer, us });
        Ok(LayersRan { done, clamped, us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_run_until_the_next_one_would_be_too_late() {
        let ms = Duration::from_millis;
        let layers = |each: u64, limit: u64| {
            let fits = |ran: &usize| fits(*ran, ms(*ran as u64 * each), ms(each), ms(limit));
            (0..100).take_while(fits).count()
        };
        assert_eq!([layers(1, 3), layers(2, 3), layers(3, 3)], [3, 1, 1]);
        assert_eq!([layers(4, 3), layers(3, 0)], [1, 1], "else a prompt would never be read");
    }

    #[test]
    fn a_chunk_goes_on_where_its_session_its_position_and_its_tokens_are_the_same() {
        let begun = Begun { session: 1, position: 128, tokens: vec![4, 5], layer: 3, us: 0.0 };
        assert!(begun.is(1, (&[], 128, &[4, 5])));
        let others: [(u32, Prompt<'_>); 3] =
            [(2, (&[], 128, &[4, 5])), (1, (&[], 0, &[4, 5])), (1, (&[], 128, &[4, 6]))];
        assert!(others.iter().all(|&(session, prompt)| !begun.is(session, prompt)));
    }
}
