//! Evaluations that are kept, so that one on other routes computes only what its routes change.
//!
//! A choice of experts at a position and a layer changes what follows from it: that position from that layer's experts
//! on, and later positions in the layers behind. So at each layer the positions that change are the last ones, and the
//! number of them grows from layer to layer. All others are copied: the same operations on the same bits.

use std::ops::Range;

use super::routing::Choice;
use super::{EvalError, Evaluator};
use crate::eval::attention::Cache;
use crate::routes::{Routed, Routes};
use crate::trap::InputError;

/// What each layer read and made of tokens from position zero on.
#[derive(Clone, Debug)]
pub struct Kept {
    tokens: Vec<u32>,
    /// Inputs of each layer, `[positions, hidden]`.
    inputs: Vec<Vec<f32>>,
    caches: Vec<Cache>,
    routed: Routed,
    /// The number of each layer with experts among all.
    expert_layers: Vec<usize>,
}

/// A kept evaluation with its logits, a row for each position.
#[derive(Clone, Copy, Debug)]
pub struct Sharing<'k> {
    /// The evaluation.
    pub kept: &'k Kept,
    /// The logits.
    pub rows: &'k [Vec<f32>],
}

/// An evaluation that took over what others had.
#[derive(Clone, Debug)]
pub struct Followed {
    /// The logits, a row for each position.
    pub rows: Vec<Vec<f32>>,
    /// What the next one may take over; `None` for a model without experts.
    pub kept: Option<Kept>,
    /// How often a layer was computed at a position.
    pub computed: usize,
}

/// Where a layer begins to differ from a kept evaluation.
#[derive(Clone, Copy)]
struct Start<'k> {
    /// The first position that is computed.
    position: usize,
    /// That of which all positions before it are.
    of: Option<Sharing<'k>>,
}

impl Kept {
    /// The routes, and the logits behind them.
    #[must_use]
    pub fn routed(&self) -> &Routed {
        &self.routed
    }

    /// Of each layer what it read, `[positions, hidden]`.
    #[must_use]
    pub fn inputs(&self) -> &[Vec<f32>] {
        &self.inputs
    }

    /// Bytes in memory, without the weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let inputs: usize = self.inputs.iter().map(Vec::len).sum();
        let caches: usize = self.caches.iter().map(Cache::elements).sum();
        let logits: usize = self.routed.logits.iter().map(Vec::len).sum();
        (inputs + caches + logits) * size_of::<f32>()
    }

    /// Of each layer the first position at which its output on these tokens and routes may be another than here.
    fn fronts(&self, tokens: &[u32], routes: &Routes, layers: usize) -> Vec<usize> {
        let same = tokens.iter().zip(&self.tokens).take_while(|(one, other)| one == other).count();
        let own = &self.routed.routes;
        let mut fronts = vec![if own.layers() == routes.layers() { same } else { 0 }; layers];
        for (routed, &layer) in self.expert_layers.iter().enumerate() {
            let strays = |&p: &usize| own.set(p, routed) != routes.set(p, routed);
            let first = (0..fronts[layer]).find(strays).unwrap_or(fronts[layer]);
            fronts[layer..].iter_mut().for_each(|front| *front = first.min(*front));
        }
        fronts
    }

    /// What was chosen at these positions of a layer with experts.
    fn choices(&self, routed: usize, positions: Range<usize>) -> Vec<Choice> {
        let Routed { routes, logits, .. } = &self.routed;
        let choice = |position: usize| {
            let set = routes.set(position, routed).unwrap_or_default();
            (set.to_vec(), logits[position * routes.layers() + routed].clone())
        };
        positions.map(choice).collect()
    }
}

impl Evaluator<'_> {
    /// Keeps what [`into_kept`](Self::into_kept) needs of all positions fed from now on: the routes, and what layers read
    /// if some of them have experts.
    #[must_use]
    pub fn keeping(self) -> Self {
        let experts = self.expert_layers().next().is_some();
        let inputs = experts.then(|| vec![Vec::new(); self.layers.len()]);
        Self { inputs, ..self }.recording_routes()
    }

    /// What was kept of these tokens, which were fed from position zero on; `None` if that was not asked for, and for a
    /// model without experts.
    #[must_use]
    pub fn into_kept(self, tokens: &[u32]) -> Option<Kept> {
        let routed = self.routed()?;
        let expert_layers = self.expert_layers().map(|(layer, _)| layer).collect();
        let fits = routed.routes.positions() == tokens.len() && self.positions == tokens.len();
        let (inputs, caches) = (self.inputs.filter(|_| fits)?, self.caches);
        Some(Kept { tokens: tokens.to_vec(), inputs, caches, routed, expert_layers })
    }

    /// Evaluates these tokens from position zero on, on these routes. What a kept evaluation of the same graph and weights
    /// has of it is taken over, to the bit.
    ///
    /// # Errors
    /// If a token is outside the vocabulary or the KV cache is full.
    pub fn run_sharing(
        mut self,
        tokens: &[u32],
        routes: &Routes,
        kept: &[Sharing<'_>],
    ) -> Result<Followed, EvalError> {
        InputError::check(tokens, self.graph.vocab, 0, self.capacity)?;
        self.reset();
        self = self.on_routes(0, routes.clone()).keeping();
        let starts = self.starts(tokens, routes, kept);
        let begin = starts.first().map_or(0, |start| start.position);
        let hidden = self.graph.hidden as usize;
        let rotations = self.rotations(0, tokens.len());
        let mut before = Start { position: begin, of: None };
        let mut x = self.residual(&tokens[begin..]);
        let mut computed = 0;
        for (layer, &start) in starts.iter().enumerate() {
            if let Some(Sharing { kept, .. }) = before.of {
                let joining = start.position * hidden..before.position * hidden;
                x.splice(..0, kept.inputs[layer][joining].iter().copied());
            }
            self.take_over(layer, start);
            if let Some(inputs) = &mut self.inputs {
                inputs[layer].extend_from_slice(&x);
            }
            if !x.is_empty() {
                self.layer(layer, &rotations, &mut x);
                computed += tokens.len() - start.position;
            }
            before = start;
        }
        self.positions = tokens.len();
        let shared = before.of.map_or(&[][..], |of| &of.rows[..before.position]);
        let mut rows = shared.to_vec();
        rows.extend(self.rows(&self.head_inputs(&x)));
        Ok(Followed { rows, kept: self.into_kept(tokens), computed })
    }

    /// Of each layer the first position to compute, by that of the kept evaluations which has most of it.
    fn starts<'k>(&self, tokens: &[u32], routes: &Routes, kept: &[Sharing<'k>]) -> Vec<Start<'k>> {
        let layers = self.layers.len();
        let fits = |of: &&Sharing<'_>| {
            of.kept.inputs.len() == layers && of.rows.len() >= of.kept.tokens.len()
        };
        let fronts: Vec<_> = kept
            .iter()
            .filter(fits)
            .map(|&of| (of, of.kept.fronts(tokens, routes, layers)))
            .collect();
        let start = |layer: usize| {
            let best = fronts.iter().max_by_key(|(_, fronts)| fronts[layer]);
            let most = best.map(|(of, fronts)| Start { position: fronts[layer], of: Some(*of) });
            most.unwrap_or(Start { position: 0, of: None })
        };
        (0..layers).map(start).collect()
    }

    /// Takes what a layer read and made at the positions before its start.
    fn take_over(&mut self, layer: usize, Start { position, of }: Start<'_>) {
        let Some(Sharing { kept, .. }) = of else { return };
        let (hidden, width) = (self.graph.hidden as usize, self.graph.kv_width() as usize);
        if let Some(inputs) = &mut self.inputs {
            inputs[layer] = kept.inputs[layer][..position * hidden].to_vec();
        }
        self.caches[layer] = kept.caches[layer].clone();
        self.caches[layer].truncate(position, width);
        let routed = kept.expert_layers.iter().position(|&expert| expert == layer);
        if let (Some(routed), Some(record)) = (routed, &mut self.routing.record) {
            record.resize_with(record.len().max(routed + 1), Vec::new);
            record[routed] = kept.choices(routed, 0..position);
        }
    }
}
