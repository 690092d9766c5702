//! Between two residencies: prompts in chunks, and what is in the caches.

use super::Idle;
use crate::error::HostError;
use crate::memory::download;
use crate::prefill::{Prefill, PrefillOptions, Prefilled, unpacked};

impl Idle {
    /// Runs a prompt in chunks of many tokens: the keys and values of `tokens`, at the positions of a session from `position` on, into its
    /// caches, and with `logits` those of the last token into the first row, to be read by [`last_logits`](Self::last_logits). What was
    /// at the positions before stays and is attended to.
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
        self.weights_here()?;
        let residents = &self.memory.residents;
        let ready = self.prefill.take().filter(|ready| ready.serves(&self.graph, options));
        let ready = match ready {
            Some(ready) => ready,
            None => {
                let sessions = self.options.sessions;
                Box::new(Prefill::new(&self.graph, residents, &self.info, sessions, options)?)
            }
        };
        let touched = &mut self.memory.touched[session as usize];
        *touched = (*touched).max(position + tokens.len() as u32);
        let place = (session, position, tokens);
        let done = ready.run(&self.compute, &mut self.memory.bounce, place, logits, options);
        self.prefill = Some(ready);
        done
    }

    fn check_prompt(
        &self,
        session: u32,
        position: u32,
        tokens: &[u32],
        logits: bool,
    ) -> Result<(), HostError> {
        let (residents, sessions) = (&self.memory.residents, self.options.sessions);
        let refuse = |what: String| Err(HostError::Request(what));
        if session >= sessions {
            return refuse(format!("session {session} of {sessions}"));
        }
        if tokens.is_empty() {
            return refuse("an empty prompt: there is nothing to run".into());
        }
        if let Some(token) = tokens.iter().find(|&&token| token >= self.vocab) {
            let vocab = self.vocab;
            return refuse(format!("token {token} is outside the vocabulary of {vocab}"));
        }
        let (end, capacity) = (u64::from(position) + tokens.len() as u64, residents.kv_capacity);
        if end > u64::from(capacity) {
            let count = tokens.len();
            return refuse(format!(
                "{count} positions from {position} exceed the key/value capacity of {capacity}"
            ));
        }
        if logits && residents.logits_rows == 0 {
            return refuse("a row of logits; none was set aside".into());
        }
        Ok(())
    }

    /// The logits that the last [`prefill`](Self::prefill) left.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn last_logits(&mut self) -> Result<Vec<f32>, HostError> {
        let mut row = vec![0.0_f32; self.vocab as usize];
        let (source, bounce) = (self.memory.residents.logits, &self.memory.bounce);
        download(&self.copy, bounce, source, bytemuck::cast_slice_mut(&mut row))?;
        Ok(row)
    }

    /// Keys and values of a session's first `positions` positions in a layer, as they are kept: each `[positions, kv_heads * head_dim]`.
    ///
    /// # Errors
    /// If there is no such session, layer or position, or a copy fails.
    pub fn cached(
        &mut self,
        session: u32,
        layer: u32,
        positions: u32,
    ) -> Result<(Vec<f32>, Vec<f32>), HostError> {
        let residents = &self.memory.residents;
        let cache = residents.caches.get(layer as usize).copied();
        let capacity = residents.kv_capacity;
        let known = session < self.options.sessions && positions <= capacity;
        let Some(cache) = cache.filter(|_| known) else {
            return Err(HostError::Request(format!(
                "{positions} positions of session {session}, layer {layer}: there are not so many"
            )));
        };
        let bytes = residents.cache_bytes / u64::from(self.options.sessions);
        let mut out = vec![0_u8; bytes as usize];
        let source = cache + u64::from(session) * bytes;
        download(&self.copy, &self.memory.bounce, source, &mut out)?;
        let (kv_heads, head_dim) = (self.graph.kv_heads, self.graph.head_dim);
        Ok(unpacked(&out, kv_heads, head_dim, capacity, positions))
    }
}
