//! Operations while no kernel is resident: prompts in chunks, and reading the caches.

use std::time::Duration;

use super::{Idle, Memory};
use crate::devices::Cards;
use crate::driver::Stream;
use crate::error::HostError;
use crate::pages::pages_of;
use crate::prefill::{ChunkRoutes, LayersRan, Prefill, PrefillOptions, Prefilled, unpacked};

impl Idle {
    /// Runs a prompt in chunks of many tokens. It writes the keys and values of `tokens`, at the positions of a session from `position` on,
    /// to its caches, and with `logits` those of the last token to the first row, for [`last_logits`](Self::last_logits). The positions
    /// before are unchanged and attended to.
    ///
    /// # Errors
    /// If the request is outside what was booted, the weights are f32 ([`prefill_refused`](crate::prefill_refused)), or the device failed.
    pub fn prefill(
        &mut self,
        session: u32,
        position: u32,
        tokens: &[u32],
        logits: bool,
        options: &PrefillOptions,
    ) -> Result<Prefilled, HostError> {
        self.check_prompt(session, position, tokens, logits)?;
        let mut ready = self.ready_for_chunk(session, position, tokens, options)?;
        let pages = self.memory.pages.rows(session);
        let streams = streams(&self.compute, pages.len(), &self.cards);
        let place = (&pages[..], position, tokens);
        let done = ready.run(&streams, &mut self.memory.copier, place, logits, options);
        self.prefill = Some(ready);
        done
    }

    /// Runs some layers of one chunk of tokens, as many as take no longer than `limit`, one at least. Called again for the same tokens it goes on
    /// with the next layer; meanwhile a kernel may have been resident and have run other sessions. After the last layer the session has the bits
    /// that [`prefill`](Self::prefill) gives.
    ///
    /// # Errors
    /// As of [`prefill`](Self::prefill), and if the tokens are more than a chunk.
    pub fn prefill_within(
        &mut self,
        session: u32,
        position: u32,
        tokens: &[u32],
        limit: Duration,
    ) -> Result<LayersRan, HostError> {
        self.check_prompt(session, position, tokens, false)?;
        let options = PrefillOptions::default();
        let mut ready = self.ready_for_chunk(session, position, tokens, &options)?;
        let pages = self.memory.pages.rows(session);
        let streams = streams(&self.compute, pages.len(), &self.cards);
        let place = (&pages[..], position, tokens);
        let ran = ready.run_within(&streams, &mut self.memory.copier, session, place, limit);
        self.prefill = Some(ready);
        ran
    }

    /// The kernels for chunks, and the session ready for these tokens.
    fn ready_for_chunk(
        &mut self,
        session: u32,
        position: u32,
        tokens: &[u32],
        options: &PrefillOptions,
    ) -> Result<Box<Prefill>, HostError> {
        self.weights_here()?;
        let positions = position..position + tokens.len() as u32;
        self.memory.pages.before(&mut self.memory.copier, session, positions)?;
        // Sampling from this session later reads its tokens there.
        let at = self.memory.tokens_at(session, position);
        self.memory.tokens.write(at, bytemuck::cast_slice(tokens));
        self.memory.sampling.passes_by(session);
        match self.prefill.take().filter(|ready| ready.serves(&self.graph, options)) {
            Some(ready) => Ok(ready),
            None => {
                let (residents, on) = (&self.memory.residents, (&self.cards, &self.info));
                Ok(Box::new(Prefill::new(&self.graph, residents, on, options)?))
            }
        }
    }

    fn check_prompt(
        &self,
        session: u32,
        position: u32,
        tokens: &[u32],
        logits: bool,
    ) -> Result<(), HostError> {
        let (bounds, steps) = (self.bounds(), tokens.len() as u64);
        bounds.check_run(session, position, tokens, steps).map_err(HostError::Request)?;
        if logits && self.memory.residents.logits_rows == 0 {
            return Err(HostError::Request("a row of logits; none was set aside".into()));
        }
        Ok(())
    }

    /// The logits of the last [`prefill`](Self::prefill).
    ///
    /// # Errors
    /// If a copy fails.
    pub fn last_logits(&mut self) -> Result<Vec<f32>, HostError> {
        self.memory.copier.values(self.memory.residents.logits, self.vocab as usize)
    }

    /// The experts that the last chunk of the last [`prefill`](Self::prefill) chose in each layer with experts. It had `tokens` tokens, and logits
    /// were requested.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn chunk_routes(&self, tokens: u32) -> Result<Vec<ChunkRoutes>, HostError> {
        match &self.prefill {
            Some(ready) => ready.routes(&self.memory.copier, tokens),
            None => Ok(Vec::new()),
        }
    }

    /// Keys and values of a session's first `positions` positions in a layer, as stored: each `[positions, kv_heads * head_dim]`.
    ///
    /// # Errors
    /// If there is no such layer, the session has fewer positions, or a copy fails.
    pub fn cached(
        &mut self,
        session: u32,
        layer: u32,
        positions: u32,
    ) -> Result<(Vec<f32>, Vec<f32>), HostError> {
        let Memory { residents, pages, copier, .. } = &self.memory;
        let device = &residents.devices[0];
        let held = pages.pool.held(session).get(..pages_of(positions) as usize);
        let Some(held) = held.filter(|_| (layer as usize) < device.caches.len()) else {
            return Err(HostError::Request(format!(
                "{positions} positions of session {session}, layer {layer}: there are not so many"
            )));
        };
        let mut out = vec![0_u8; held.len() * device.layout.page_bytes() as usize];
        let parts = out.chunks_exact_mut(device.layout.page_bytes() as usize);
        for (&page, part) in held.iter().zip(parts) {
            copier.download(pages.place(layer, page), part)?;
        }
        Ok(unpacked(&out, device.layout, positions))
    }
}

/// The stream of each device.
fn streams<'a>(compute: &'a [Stream], devices: usize, cards: &Cards) -> Vec<&'a Stream> {
    let per_card = cards.per_card() as usize;
    (0..devices).map(|device| &compute[device / per_card]).collect()
}
