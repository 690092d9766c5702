//! What runs the model for the server: sequences in places, tokens in, logits out. The decode thread owns it.

use std::collections::BTreeMap;

use ir::program::{Program, Verified};
use reference_vm::Order;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use search::Handle;

use crate::context::Context;
use crate::device::Gpu;

/// Prompt tokens of a turn where each takes a step.
pub(super) const PROMPT_SLICE: u64 = 16;
/// Prompt tokens of a turn where they are run in chunks: as long as some tens of steps.
const CHUNK_SLICE: u64 = 1024;

/// Why tokens could not be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// This sequence is lost; the others are not touched.
    Sequence(String),
    /// Every sequence is lost. New ones can begin.
    All(String),
}

/// Several sequences of one model.
pub(super) trait Engine {
    /// Begins a sequence in a place, instead of the one that was there.
    fn begin(&mut self, place: usize) -> Result<(), Broken>;

    /// Runs tokens at the next positions of a place's sequence; with `read`, gives the logits after the last of them.
    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken>;

    /// Forgets a place's sequence.
    fn end(&mut self, place: usize);

    /// Prompt tokens of a turn: a long prompt gives way between them.
    fn prompt_slice(&self) -> u64 {
        PROMPT_SLICE
    }
}

/// The graph, with no schedule: `--device eval`.
pub(super) struct Graph<'a> {
    context: &'a Context,
    sequences: BTreeMap<usize, Evaluator<'a>>,
}

impl<'a> Graph<'a> {
    pub(super) fn new(context: &'a Context) -> Self {
        Self { context, sequences: BTreeMap::new() }
    }
}

fn unknown(place: usize) -> Broken {
    Broken::Sequence(format!("there is no sequence in place {place}"))
}

impl Engine for Graph<'_> {
    fn begin(&mut self, place: usize) -> Result<(), Broken> {
        let (graph, weights) = (self.context.graph(), &*self.context.model.weights);
        let evaluator = Evaluator::new(graph, weights);
        let evaluator = evaluator.map_err(|error| Broken::Sequence(error.to_string()))?;
        self.sequences.insert(place, evaluator.with_capacity(self.context.kv_capacity));
        Ok(())
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        let sequence = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        let logits = if read { Logits::Last } else { Logits::Skip };
        let rows = sequence.run(tokens, logits);
        let rows = rows.map_err(|error| Broken::Sequence(error.to_string()))?;
        Ok(rows.into_iter().next_back().unwrap_or_default())
    }

    fn end(&mut self, place: usize) {
        self.sequences.remove(&place);
    }
}

/// The lowered program on the reference machine: `--device cpu`.
pub(super) struct Reference<'a> {
    context: &'a Context,
    program: &'a Verified<Program>,
    sequences: BTreeMap<usize, Machine<'a>>,
}

impl<'a> Reference<'a> {
    pub(super) fn new(context: &'a Context, program: &'a Verified<Program>) -> Self {
        Self { context, program, sequences: BTreeMap::new() }
    }
}

impl Engine for Reference<'_> {
    fn begin(&mut self, place: usize) -> Result<(), Broken> {
        let (graph, weights) = (self.context.graph(), &*self.context.model.weights);
        let machine = Machine::new(self.program, graph, weights);
        self.sequences.insert(place, machine.map_err(|error| Broken::Sequence(error.to_string()))?);
        Ok(())
    }

    fn feed(&mut self, place: usize, tokens: &[u32], _read: bool) -> Result<Vec<f32>, Broken> {
        let sequence = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        match sequence.run(tokens, Order::Waves) {
            Ok(Run::Finished(outputs)) => {
                Ok(outputs.logits.into_iter().next_back().unwrap_or_default())
            }
            Ok(halted @ (Run::Trapped(_) | Run::OutOfFuel { .. } | Run::Stuck { .. })) => {
                Err(Broken::Sequence(search::Dropped::Halted(halted).to_string()))
            }
            Err(error) => Err(Broken::Sequence(error.to_string())),
        }
    }

    fn end(&mut self, place: usize) {
        self.sequences.remove(&place);
    }
}

/// The resident kernel: `--device cuda`. It gives the host a row of logits for each token, and the host chooses.
pub(super) struct Megakernel<'a> {
    gpu: Gpu<'a>,
    program: Handle,
    /// Positions run in each place.
    positions: Vec<u32>,
}

impl<'a> Megakernel<'a> {
    pub(super) fn new(gpu: Gpu<'a>, program: Handle, places: usize) -> Self {
        Self { gpu, program, positions: vec![0; places] }
    }
}

impl Engine for Megakernel<'_> {
    fn begin(&mut self, place: usize) -> Result<(), Broken> {
        *self.positions.get_mut(place).ok_or_else(|| unknown(place))? = 0;
        Ok(())
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        let position = self.positions.get_mut(place).ok_or_else(|| unknown(place))?;
        let (session, first) = (place as u32, *position);
        let row = self.gpu.feed(self.program, session, first, tokens, read);
        // A kernel that stopped in the middle of a step is launched again, with empty caches.
        let row = row.map_err(|error| Broken::All(error.to_string()))?;
        *position += tokens.len() as u32;
        Ok(row)
    }

    fn end(&mut self, place: usize) {
        if let Some(position) = self.positions.get_mut(place) {
            *position = 0;
        }
    }

    fn prompt_slice(&self) -> u64 {
        if self.gpu.takes_chunks(CHUNK_SLICE as usize) { CHUNK_SLICE } else { PROMPT_SLICE }
    }
}
