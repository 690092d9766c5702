//! The inputs of the gate and what the graph makes of them, with no schedule: what every executor is compared with.

use ir::{Graph, Weights};
use rand::RngExt;
use reference_vm::eval::{EvalError, Evaluator, Logits};

use crate::propose::generator;

/// Weight bytes that the reference machine may read for one candidate: what decides how many positions it runs.
const REFERENCE_BYTES: u64 = 2 << 30;

/// Positions that the reference machine runs at least.
const REFERENCE_POSITIONS_MIN: usize = 6;

/// Positions that any executor runs at most, when the model allows: more than one block of the default `kv_block`.
pub const POSITIONS_MAX: usize = 144;

/// Which numbers the tokens of a search are drawn with.
const TOKENS_STREAM: u64 = u64::MAX;

/// The inputs of the gate and what the graph makes of them.
#[derive(Debug)]
pub struct Expected {
    /// Tokens, from position zero.
    pub tokens: Vec<u32>,
    /// Logits of every position.
    pub logits: Vec<Vec<f32>>,
    /// Positions that a candidate runs on the reference machine.
    pub reference_positions: usize,
    /// Keys and values of each layer after that many positions.
    pub(crate) cache: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Expected {
    /// Draws tokens from the seed and evaluates the graph on them: as many as the reference machine can afford, or as a device is to
    /// run ([`POSITIONS_MAX`] unless there is a reason).
    ///
    /// # Errors
    /// If the graph cannot be evaluated.
    pub fn new(
        graph: &Graph,
        weights: &dyn Weights,
        kv_capacity: u32,
        seed: u64,
        on_device: Option<usize>,
    ) -> Result<Self, EvalError> {
        let reference_positions = affordable(graph, kv_capacity, REFERENCE_BYTES, POSITIONS_MAX);
        let room = kv_capacity.min(graph.max_positions).max(1) as usize;
        let positions = on_device.map_or(0, |most| most.min(room)).max(reference_positions);
        Self::of_tokens(
            graph,
            weights,
            draw_tokens(seed, graph.vocab, positions),
            reference_positions,
        )
    }

    /// Evaluates the graph on these tokens; a candidate runs the first `reference_positions` on the reference machine.
    pub(crate) fn of_tokens(
        graph: &Graph,
        weights: &dyn Weights,
        tokens: Vec<u32>,
        reference_positions: usize,
    ) -> Result<Self, EvalError> {
        let mut evaluator = Evaluator::new(graph, weights)?;
        let mut logits = evaluator.run(&tokens[..reference_positions], Logits::All)?;
        let cache = (0..graph.layers.len())
            .map(|layer| (evaluator.keys(layer).to_vec(), evaluator.values(layer).to_vec()))
            .collect();
        logits.extend(evaluator.run(&tokens[reference_positions..], Logits::All)?);
        Ok(Self { tokens, logits, reference_positions, cache })
    }
}

/// Positions that may be run for so many weight bytes, at most `most`.
pub(crate) fn affordable(graph: &Graph, kv_capacity: u32, bytes: u64, most: usize) -> usize {
    let room = kv_capacity.min(graph.max_positions).max(1) as usize;
    let positions = bytes / (graph.weight_bytes() as u64).max(1);
    let most = most.max(REFERENCE_POSITIONS_MIN);
    usize::try_from(positions).unwrap_or(most).clamp(REFERENCE_POSITIONS_MIN, most).min(room)
}

/// Tokens that depend on the seed alone.
#[must_use]
pub fn draw_tokens(seed: u64, vocab: u32, count: usize) -> Vec<u32> {
    let mut rng = generator(seed, TOKENS_STREAM);
    (0..count).map(|_| rng.random_range(0..vocab.max(1))).collect()
}
