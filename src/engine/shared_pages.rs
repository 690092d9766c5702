//! Pages that sequences on the host share: the same pool as on the GPU decides, and the contents lie beside it.

use std::collections::BTreeMap;

use reference_vm::Order;
use reference_vm::eval::Evaluator;
use reference_vm::machine::{Machine, Run};
use vm_host::{NoPages, PagePool};

/// Positions of a page.
const PAGE: usize = abi::KV_PAGE as usize;

/// Keys and values of some positions, per layer.
type Layers = Vec<(Vec<f32>, Vec<f32>)>;

/// A sequence whose cache can be read and set.
pub(super) trait Cached {
    fn positions(&self) -> usize;

    /// Keys and values of all positions of a layer, each `[positions, width]`.
    fn layer(&self, layer: usize) -> (Vec<f32>, Vec<f32>);

    fn resume(&mut self, positions: usize, layers: &Layers) -> Result<(), String>;

    /// The most positions of a window; 1 if there are none.
    const WINDOW: usize = 1;

    /// Runs tokens at the next positions in one step, and returns the logits of each.
    fn window(&mut self, _tokens: &[u32]) -> Result<Vec<Vec<f32>>, String> {
        Err("the graph has no windows".to_owned())
    }

    /// Drops all but the first positions.
    fn truncate(&mut self, _positions: usize) {}
}

impl Cached for Evaluator<'_> {
    fn positions(&self) -> usize {
        Self::positions(self)
    }

    fn layer(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        (self.keys(layer), self.values(layer))
    }

    fn resume(&mut self, positions: usize, layers: &Layers) -> Result<(), String> {
        Self::resume(self, positions, layers).map_err(|error| error.to_string())
    }
}

impl Cached for Machine<'_> {
    fn positions(&self) -> usize {
        Self::positions(self)
    }

    fn layer(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        (self.keys(layer).to_vec(), self.values(layer).to_vec())
    }

    fn resume(&mut self, positions: usize, layers: &Layers) -> Result<(), String> {
        Self::resume(self, positions, layers).map_err(|error| error.to_string())
    }

    const WINDOW: usize = abi::SEQS_MAX;

    fn window(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, String> {
        match Self::window(self, 0, tokens, Order::Waves).map_err(|error| error.to_string())? {
            Run::Finished(outputs) => Ok(outputs.logits),
            halted @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                Err(search::Rejection::Halted(halted).to_string())
            }
        }
    }

    fn truncate(&mut self, positions: usize) {
        Self::truncate(self, positions);
    }
}

/// The pages of all sequences, and what is in the known ones.
pub(crate) struct SharedPages {
    pool: PagePool,
    layers: usize,
    contents: BTreeMap<u32, Layers>,
}

impl SharedPages {
    /// For `places` sequences of `capacity` positions.
    pub(crate) fn new(places: usize, capacity: u32, layers: usize) -> Self {
        let places = u32::try_from(places).unwrap_or(u32::MAX);
        let pages = places.saturating_mul(vm_host::pages_of(capacity));
        Self { pool: PagePool::new(places, pages), layers, contents: BTreeMap::new() }
    }

    pub(super) fn has_room(&self, positions: u32, prompt: &[u32]) -> bool {
        self.pool.has_room(positions, prompt)
    }

    /// Begins a place's sequence; returns how many positions it has to get by [`restore`](Self::restore).
    pub(super) fn begin(
        &mut self,
        place: usize,
        positions: u32,
        prompt: &[u32],
    ) -> Result<usize, NoPages> {
        self.pool.release(place as u32);
        Ok(self.pool.begin(place as u32, positions, prompt)? as usize)
    }

    pub(super) fn reuse(&mut self, place: usize, ran: usize, prompt: &[u32]) -> usize {
        self.pool.reuse(place as u32, ran as u32, prompt) as usize
    }

    /// Appends what the pages of a place hold to its sequence, up to `positions`.
    pub(super) fn restore(
        &self,
        place: usize,
        sequence: &mut impl Cached,
        positions: usize,
    ) -> Result<(), String> {
        let first = sequence.positions() / PAGE;
        let pages = self.pool.held(place as u32).get(first..positions / PAGE).unwrap_or_default();
        let mut layers: Layers = (0..self.layers).map(|layer| sequence.layer(layer)).collect();
        for page in pages {
            let parts = self.contents.get(page).ok_or("a known page has no contents")?;
            for ((keys, values), (more_keys, more_values)) in layers.iter_mut().zip(parts) {
                keys.extend(more_keys);
                values.extend(more_values);
            }
        }
        sequence.resume(positions, &layers)
    }

    /// Notes that a place's sequence has run `tokens` in all; others may have its full pages.
    pub(super) fn ran(
        &mut self,
        place: usize,
        sequence: &impl Cached,
        tokens: &[u32],
    ) -> Result<(), NoPages> {
        self.pool.grow(place as u32, tokens.len() as u32)?;
        let new = self.pool.publish(place as u32, tokens);
        if new.is_empty() {
            return Ok(());
        }
        let layers: Layers = (0..self.layers).map(|layer| sequence.layer(layer)).collect();
        for (page, first) in new {
            let part = |all: &[f32]| {
                let width = all.len() / tokens.len();
                all[first as usize * width..(first as usize + PAGE) * width].to_vec()
            };
            let parts = layers.iter().map(|(keys, values)| (part(keys), part(values)));
            self.contents.insert(page, parts.collect());
        }
        Ok(())
    }

    pub(super) fn end(&mut self, place: usize) {
        self.pool.release(place as u32);
    }
}
