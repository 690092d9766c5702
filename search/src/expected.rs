//! The inputs of the gate and the values that the graph computes from them, without a schedule. Every executor is
//! compared with these.
//!
//! The reference VM runs two segments of positions. The **near** one begins at position zero with an empty cache. The
//! **far** one starts from a cache with synthetic contents, so that it covers many keys, many blocks of them and large
//! angles at the cost of two steps of the weights. Tolerances are computed along with the values: each segment is
//! evaluated a second time with rounded hand-offs (docs/explanation/tolerances.md).

use std::sync::Arc;

use ir::{Graph, KvDtype, Weights};
use rand::RngExt;
use reference_vm::compare::{Agreement, Reference, Tolerance, What, compare, distance};
use reference_vm::eval::{EvalError, Evaluator, Logits};
use reference_vm::machine::{Machine, Outputs, Run};
use reference_vm::routes::Routed;
use reference_vm::{Fired, Order};

use crate::follow::OwnRoutes;
use crate::propose::generator;
use crate::rejection::{ExpectedError, Rejection};

/// Bytes of weights that the reference VM may read per candidate. This limits the number of positions that it runs.
const REFERENCE_BYTES: u64 = 2 << 30;

/// Minimum positions that the reference VM runs. With six, wrong single elements of a last layer whose input is small
/// at all of them passed with nine tenths of a tolerance (docs/explanation/trust.md); with eight none did.
const REFERENCE_POSITIONS_MIN: usize = 8;

/// Maximum positions that any executor runs, if the model allows: more than one block of the default `kv_block`.
pub const POSITIONS_MAX: usize = 144;

/// Multiply-adds of the graph's matrices that the CPU may take for the positions of a device: 144 of a model of nine
/// billion weights. They are evaluated twice, once as the device rounds.
const DEVICE_MACS: u64 = POSITIONS_MAX as u64 * 9_000_000_000;

/// Positions of the far segment: the first ends a block of keys, the second begins one and reads what the first stored.
const FAR_POSITIONS: usize = 2;

/// Maximum keys at the far segment's first position, its own included: a block of the largest `kv_block`.
const FAR_KEYS_MAX: usize = 1024;

/// Minimum of the same, for a model of any size: more than one block of the default `kv_block`.
const FAR_KEYS_MIN: usize = 160;

/// Granularity of these keys: the smallest `kv_block`.
const FAR_KEYS_STEP: usize = 32;

/// Multiply-adds of attention that a far position may cost: a block of the largest `kv_block` for a model of a
/// billion weights.
const FAR_WORK: usize = 36_000_000;

/// Maximum bytes of the keys and values that the far segment starts from; every candidate copies them.
const FAR_BYTES: usize = 64 << 20;

/// Number of the random stream of a search's tokens.
const TOKENS_STREAM: u64 = u64::MAX;

/// Number of the random stream of the far segment's tokens and cache.
const FAR_STREAM: u64 = u64::MAX - 1;

/// Keys and values of each layer.
type Layers = Vec<(Vec<f32>, Vec<f32>)>;

/// The inputs of the gate and the values that the graph computes from them.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Tokens, from position zero.
    pub tokens: Vec<u32>,
    /// Logits of every position.
    pub logits: Vec<Vec<f32>>,
    /// Positions from zero that a candidate runs on the reference VM.
    pub reference_positions: usize,
    /// Tolerance of a device's logits.
    pub on_device: Tolerance,
    /// What is timed, if the search has contexts of its own; by their length.
    pub(crate) timed: Vec<TimedAfter>,
    /// The routes over these tokens, of a model with experts.
    pub(crate) routes: Option<OwnRoutes>,
    pub(crate) near: Segment,
    pub(crate) far: Option<Segment>,
}

/// Tokens that are timed after a context.
#[derive(Clone, Debug)]
pub(crate) struct TimedAfter {
    /// The context, then the timed tokens.
    pub(crate) tokens: Vec<u32>,
    /// First timed position.
    pub(crate) first: usize,
    /// Logits of the last position.
    pub(crate) last: Vec<f32>,
}

/// Consecutive positions that the reference VM runs.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) first: usize,
    /// The cache of the positions before.
    pub(crate) before: Layers,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<Vec<f32>>,
    /// Keys and values of these positions.
    pub(crate) cache: Layers,
    /// Routes and their logits, of a model with experts.
    pub(crate) routed: Option<Routed>,
    pub(crate) allowed: Allowed,
}

/// Tolerance of each kind of row.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    logits: Tolerance,
    /// Of the logits that experts are chosen by.
    pub(crate) routes: Tolerance,
    /// Of the keys and of the values of each layer.
    cache: Vec<[Tolerance; 2]>,
}

impl Expected {
    /// Draws tokens from the seed and evaluates the graph on them: as many as the reference VM can afford, or as a
    /// device is to run ([`POSITIONS_MAX`] unless there is a reason).
    ///
    /// # Errors
    /// If the graph cannot be evaluated, or gives no values to compare with.
    pub fn new(
        graph: &Graph,
        weights: &dyn Weights,
        kv_capacity: u32,
        seed: u64,
        on_device: Option<usize>,
    ) -> Result<Self, ExpectedError> {
        Self::within(graph, weights, kv_capacity, seed, on_device, REFERENCE_BYTES)
    }

    /// As [`new`](Self::new), for steps of this many sequences: the kernel of several rounds vectors less where that of one
    /// keeps one half of them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_batch(
        graph: &Graph,
        weights: &dyn Weights,
        kv_capacity: u32,
        (seed, on_device): (u64, Option<usize>),
        sequences: u32,
    ) -> Result<Self, ExpectedError> {
        let on_device = on_device.map(|positions| (positions, sequences));
        Self::compared(graph, weights, kv_capacity, seed, on_device, REFERENCE_BYTES)
    }

    /// As [`new`](Self::new), with an explicit limit of the weight bytes that the reference VM may read per candidate.
    /// A small limit gives the positions that a search of a large model gets.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn within(
        graph: &Graph,
        weights: &dyn Weights,
        kv_capacity: u32,
        seed: u64,
        on_device: Option<usize>,
        reference_bytes: u64,
    ) -> Result<Self, ExpectedError> {
        let on_device = on_device.map(|positions| (positions, 1));
        Self::compared(graph, weights, kv_capacity, seed, on_device, reference_bytes)
    }

    /// `on_device`: positions that the device is to run, and sequences of a step there.
    fn compared(
        graph: &Graph,
        weights: &dyn Weights,
        kv_capacity: u32,
        seed: u64,
        on_device: Option<(usize, u32)>,
        reference_bytes: u64,
    ) -> Result<Self, ExpectedError> {
        let affordable = affordable(graph, kv_capacity, reference_bytes, POSITIONS_MAX);
        let room = kv_capacity.min(graph.max_positions).max(1) as usize;
        let far_first = far_first(graph, room).filter(|&first| first >= affordable);
        let reference_positions = affordable - far_first.map_or(0, |_| FAR_POSITIONS);
        let positions = on_device.map_or(0, |(most, _)| most.min(room)).max(reference_positions);
        let tokens = draw_tokens(seed, graph.vocab, positions);
        let mut expected = Self::of_tokens(graph, weights, tokens, reference_positions)?;
        if let Some((_, sequences)) = on_device {
            expected.on_a_device(graph, weights, sequences)?;
        }
        if let Some(first) = far_first {
            let mut rng = generator(seed, FAR_STREAM);
            let tokens =
                (0..FAR_POSITIONS).map(|_| rng.random_range(0..graph.vocab.max(1))).collect();
            let before = filled(graph, &expected.near.cache, first, &mut rng);
            let mut evaluator = Evaluator::new(graph, weights)?.recording_routes();
            let mut far = Segment::new(&mut evaluator, weights, graph, before, tokens, first)?;
            far.allowed = far.allowed.or(&expected.near.allowed);
            expected.far = Some(far);
        }
        Ok(expected)
    }

    /// Times `timed` tokens after each of these contexts instead of the last of the gate's tokens. All of them begin as
    /// the gate's do. The graph is evaluated once, over the longest.
    ///
    /// # Errors
    /// If the graph cannot be evaluated there.
    pub fn timed_after(
        mut self,
        graph: &Graph,
        weights: &dyn Weights,
        seed: u64,
        contexts: &[u32],
        timed: usize,
    ) -> Result<Self, ExpectedError> {
        let ends: Vec<usize> = contexts.iter().map(|&tokens| tokens as usize + timed).collect();
        let longest = ends.iter().copied().max().unwrap_or(0);
        if self.routes.is_some() && longest > self.tokens.len() {
            return Err(ExpectedError::Routes { most: self.tokens.len().saturating_sub(timed) });
        }
        let tokens = draw_tokens(seed, graph.vocab, longest);
        let last: Vec<usize> = ends.iter().map(|end| end - 1).collect();
        let rows = Evaluator::new(graph, weights)?.run_at(&tokens, &last)?;
        // Rows come in the order of positions.
        let after = |(end, last): (usize, Vec<f32>)| TimedAfter {
            tokens: tokens[..end].to_vec(),
            first: end - timed,
            last,
        };
        let ends: std::collections::BTreeSet<usize> = ends.into_iter().collect();
        self.timed = ends.into_iter().zip(rows).map(after).collect();
        Ok(self)
    }

    /// Evaluates the graph on these tokens, all of which a candidate runs on the reference VM.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn on_tokens(
        graph: &Graph,
        weights: &dyn Weights,
        tokens: Vec<u32>,
    ) -> Result<Self, ExpectedError> {
        let positions = tokens.len();
        Self::of_tokens(graph, weights, tokens, positions)
    }

    /// Evaluates the graph on these tokens; a candidate runs the first `reference_positions` on the reference VM, and no others.
    pub(crate) fn of_tokens(
        graph: &Graph,
        weights: &dyn Weights,
        tokens: Vec<u32>,
        reference_positions: usize,
    ) -> Result<Self, ExpectedError> {
        let mut evaluator = Evaluator::new(graph, weights)?.keeping();
        let (first, rest) = tokens.split_at(reference_positions);
        let near = Segment::new(&mut evaluator, weights, graph, empty(graph), first.to_vec(), 0)?;
        let mut logits = near.logits.clone();
        logits.extend(evaluator.run(rest, Logits::All)?);
        if is_flat(&logits) {
            return Err(ExpectedError::Flat);
        }
        let on_device = Tolerance::device_limit(graph.kv_dtype);
        let routed = evaluator.routed();
        let kept = evaluator.into_kept(&tokens).map(Arc::new);
        let routes = routed.map(|routes| OwnRoutes { routes, on_device, kept });
        let timed = Vec::new();
        Ok(Self { tokens, logits, reference_positions, on_device, timed, routes, near, far: None })
    }

    /// Sets the tolerances of a device over all of these positions: the effect of its roundings on the logits, on the
    /// same routes. All positions are needed, since errors of one position are up to thirteen times those of another
    /// (tests/tests/device_bound.rs).
    fn on_a_device(
        &mut self,
        graph: &Graph,
        weights: &dyn Weights,
        sequences: u32,
    ) -> Result<(), EvalError> {
        let evaluator = Evaluator::new(graph, weights)?;
        let mut rounded = match sequences {
            1 => evaluator.with_device_roundings(),
            _ => evaluator.with_batch_roundings(),
        }
        .with_shifted_codes();
        if let Some(own) = &self.routes {
            rounded = rounded.on_routes(0, own.routes.routes.clone()).recording_routes();
        }
        let logits = rounded.run(&self.tokens, Logits::All)?;
        let (kv, longest) = (graph.kv_dtype, longest(graph));
        let response = distance(rows(&self.logits), rows(&logits));
        self.on_device = Tolerance::of_device(kv, response, longest);
        if let Some((own, rounded)) = self.routes.as_mut().zip(rounded.routed()) {
            own.on_device = Tolerance::of_device(kv, own.routes.distance(&rounded), longest);
        }
        Ok(())
    }

    fn stretches(&self) -> impl DoubleEndedIterator<Item = &Segment> {
        std::iter::once(&self.near).chain(&self.far)
    }

    /// The tokens that a candidate runs on the reference VM.
    pub fn reference_tokens(&self) -> impl Iterator<Item = u32> {
        self.stretches().flat_map(|stretch| &stretch.tokens).copied()
    }

    /// The positions that a candidate runs on the reference VM, for reports.
    #[must_use]
    pub fn reference_scope(&self) -> String {
        let near = format!("{} positions", self.reference_positions);
        match &self.far {
            None => near,
            Some(far) => format!("{near} and {} from position {} on", far.tokens.len(), far.first),
        }
    }

    /// The least and the greatest tolerance of any row on the reference VM, as a fraction of the row's greatest magnitude.
    #[must_use]
    pub fn allowed(&self) -> [f64; 2] {
        let all = self.stretches().flat_map(|stretch| {
            let cache = stretch.allowed.cache.iter().flatten();
            cache.chain([&stretch.allowed.logits]).map(|tolerance| tolerance.rel())
        });
        all.fold([f64::INFINITY, 0.0], |[least, most], rel| [least.min(rel), most.max(rel)])
    }

    /// The most keys that a candidate attends to on the reference VM.
    #[must_use]
    pub fn reference_keys(&self) -> usize {
        self.stretches().map(|stretch| stretch.first + stretch.tokens.len()).max().unwrap_or(0)
    }

    /// Runs a fresh reference VM on the inputs and compares all of its outputs: tokens, logits, keys and values.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn examine(&self, machine: &mut Machine<'_>) -> Result<Agreement<Reference>, Rejection> {
        self.examine_into(machine, &mut Vec::new())
    }

    /// As [`examine`](Self::examine). Appends the token that the program chose at each position that it reached to
    /// `chosen`.
    ///
    /// # Errors
    /// As [`examine`](Self::examine).
    pub fn examine_into(
        &self,
        machine: &mut Machine<'_>,
        chosen: &mut Vec<u32>,
    ) -> Result<Agreement<Reference>, Rejection> {
        let outputs = self.near.run(machine, chosen)?;
        let mut agreement = compare(&self.near.logits, &outputs.logits, self.near.allowed.logits)
            .map_err(|at| Rejection::Disagreed { by: "reference", at })?;
        agreement = self.near.compare_cache(agreement, machine)?;
        if let Some(far) = &self.far {
            machine.resume(far.first, &far.before)?;
            let outputs = far.run(machine, chosen)?;
            let allowed = (What::Logits, far.allowed.logits);
            agreement =
                far.compare(agreement, allowed, rows(&far.logits), rows(&outputs.logits))?;
            agreement = far.compare_cache(agreement, machine)?;
        }
        Ok(agreement)
    }

    /// Runs a fresh reference VM on the inputs, one position at a time up to `until`, and passes the writes of its
    /// tasks to `look`. Ends early if the run does not finish or `look` returns false.
    pub fn each_position<'m>(
        &self,
        machine: &mut Machine<'m>,
        until: Option<usize>,
        mut look: impl FnMut(&Machine<'m>, u32, &[Fired]) -> bool,
    ) {
        for stretch in self.stretches() {
            if stretch.first > 0 && machine.resume(stretch.first, &stretch.before).is_err() {
                return;
            }
            for (position, &token) in (stretch.first..).zip(&stretch.tokens) {
                let Ok((Run::Finished(_), fired)) = machine.traced(token, Order::Waves) else {
                    return;
                };
                if !look(machine, token, &fired) || until.is_some_and(|last| position >= last) {
                    return;
                }
            }
        }
    }
}

impl Allowed {
    /// The looser of both tolerances: the greatest error of a few rows says little about that of the next few.
    fn or(&self, other: &Self) -> Self {
        let layers = self.cache.iter().zip(&other.cache);
        Self {
            logits: self.logits.or(other.logits),
            routes: self.routes.or(other.routes),
            cache: layers.map(|(a, b)| [a[0].or(b[0]), a[1].or(b[1])]).collect(),
        }
    }
}

impl Segment {
    fn new(
        evaluator: &mut Evaluator<'_>,
        weights: &dyn Weights,
        graph: &Graph,
        before: Layers,
        tokens: Vec<u32>,
        first: usize,
    ) -> Result<Self, EvalError> {
        let (logits, cache) = evaluate(evaluator, graph, first, &before, &tokens)?;
        let routed = evaluator.routed();
        let mut rounded = Evaluator::new(graph, weights)?.with_rounded_handoffs();
        if let Some(own) = &routed {
            rounded = rounded.on_routes(first, own.routes.clone()).recording_routes();
        }
        let (rounded_logits, rounded_cache) =
            evaluate(&mut rounded, graph, first, &before, &tokens)?;
        let longest = longest(graph);
        let width = graph.kv_width() as usize;
        let of = |want: &[f32], got: &[f32]| {
            let response = distance(want.chunks_exact(width), got.chunks_exact(width));
            match graph.kv_dtype {
                KvDtype::F16 => Tolerance::of_response(response, longest),
                KvDtype::E4m3 => Tolerance::CODES,
            }
        };
        let response = distance(rows(&logits), rows(&rounded_logits));
        let pairs = cache.iter().zip(&rounded_cache);
        let allowed = Allowed {
            logits: Tolerance::of_response(response, longest),
            routes: Tolerance::of_response(response_of(&routed, &rounded), longest),
            cache: pairs.map(|(want, got)| [of(&want.0, &got.0), of(&want.1, &got.1)]).collect(),
        };
        Ok(Self { first, before, tokens, logits, cache, routed, allowed })
    }

    /// Logits, keys and values of these positions.
    pub(crate) fn evaluated(
        &self,
        evaluator: &mut Evaluator<'_>,
        graph: &Graph,
    ) -> Result<(Vec<Vec<f32>>, Layers), EvalError> {
        evaluate(evaluator, graph, self.first, &self.before, &self.tokens)
    }

    fn run(&self, machine: &mut Machine<'_>, chosen: &mut Vec<u32>) -> Result<Outputs, Rejection> {
        let run = machine.run(&self.tokens, Order::Waves)?;
        let outputs = match run {
            Run::Finished(outputs) => outputs,
            halted @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                return Err(Rejection::Halted(halted));
            }
        };
        chosen.extend(&outputs.tokens);
        // The chosen tokens must be the most likely ones of the program's own logits.
        for (index, (&got, logits)) in outputs.tokens.iter().zip(&outputs.logits).enumerate() {
            let want = reference_vm::argmax(logits);
            if got != want {
                return Err(Rejection::Sampled { position: self.first + index, got, want });
            }
        }
        Ok(outputs)
    }

    /// Compares the keys and values of the reference VM's last positions, which are this segment's.
    fn compare_cache(
        &self,
        mut agreement: Agreement<Reference>,
        machine: &Machine<'_>,
    ) -> Result<Agreement<Reference>, Rejection> {
        for (layer, ((keys, values), allowed)) in
            self.cache.iter().zip(&self.allowed.cache).enumerate()
        {
            let at = layer as u32;
            let parts = [
                (What::Keys(at), keys, machine.keys(layer)),
                (What::Values(at), values, machine.values(layer)),
            ];
            for ((what, want, all), &allowed) in parts.into_iter().zip(allowed) {
                let got = &all[all.len().saturating_sub(want.len())..];
                let width = (want.len() / self.tokens.len().max(1)).max(1);
                let (want, got) = (want.chunks_exact(width), got.chunks_exact(width));
                agreement = self.compare(agreement, (what, allowed), want, got)?;
            }
        }
        Ok(agreement)
    }

    fn compare<'a>(
        &self,
        agreement: Agreement<Reference>,
        (what, allowed): (What, Tolerance),
        want: impl ExactSizeIterator<Item = &'a [f32]>,
        got: impl ExactSizeIterator<Item = &'a [f32]>,
    ) -> Result<Agreement<Reference>, Rejection> {
        agreement.and_values(what, want, got, allowed).map_err(|at| Rejection::Disagreed {
            by: "reference",
            at: at.from_position(self.first),
        })
    }
}

/// Whether all values of each row are equal, so that no token is the most likely.
fn is_flat(rows: &[Vec<f32>]) -> bool {
    rows.iter().all(|row| row.iter().all(|value| *value == row[0]))
}

fn rows(rows: &[Vec<f32>]) -> impl ExactSizeIterator<Item = &[f32]> {
    rows.iter().map(Vec::as_slice)
}

/// The effect of roundings on router logits; zero for a model without experts.
fn response_of(own: &Option<Routed>, rounded: &Evaluator<'_>) -> f64 {
    own.as_ref().zip(rounded.routed()).map_or(0.0, |(own, rounded)| own.distance(&rounded))
}

/// Number of products in the longest sum.
fn longest(graph: &Graph) -> usize {
    graph.hidden.max(graph.ffn).max(graph.q_width()) as usize
}

/// A cache without positions.
fn empty(graph: &Graph) -> Layers {
    vec![(Vec::new(), Vec::new()); graph.layers.len()]
}

/// Logits of the tokens after `before`, with their keys and values.
fn evaluate(
    evaluator: &mut Evaluator<'_>,
    graph: &Graph,
    first: usize,
    before: &Layers,
    tokens: &[u32],
) -> Result<(Vec<Vec<f32>>, Layers), EvalError> {
    evaluator.resume(first, before)?;
    let logits = evaluator.run(tokens, Logits::All)?;
    let from = first * graph.kv_width() as usize;
    let own = |layer: usize| {
        (evaluator.keys(layer)[from..].to_vec(), evaluator.values(layer)[from..].to_vec())
    };
    Ok((logits, (0..graph.layers.len()).map(own).collect()))
}

/// First position of the far segment: as many keys as work and memory allow, in whole blocks including the first
/// position's own.
fn far_first(graph: &Graph, room: usize) -> Option<usize> {
    let work = (2 * graph.layers.len() * graph.q_width() as usize).max(1);
    let workable = (FAR_WORK / work).clamp(FAR_KEYS_MIN, FAR_KEYS_MAX);
    let bytes = 2 * graph.layers.len() * graph.kv_width() as usize * size_of::<f32>();
    let storable = FAR_BYTES / bytes.max(1);
    let keys = workable.min(storable).min((room + 1).saturating_sub(FAR_POSITIONS));
    (keys / FAR_KEYS_STEP * FAR_KEYS_STEP).checked_sub(1)
}

/// Keys and values for `positions` positions of the same magnitude as the model's own: repeats `made`, each element
/// with a random sign and scaled by 0.5 to 1.5.
fn filled(graph: &Graph, made: &Layers, positions: usize, rng: &mut impl RngExt) -> Layers {
    let words = positions * graph.kv_width() as usize;
    let mut varied = |values: &[f32]| -> Vec<f32> {
        let vary = |&value: &f32| {
            let factor: f32 = rng.random_range(0.5..1.5);
            if rng.random_bool(0.5) { value * factor } else { -value * factor }
        };
        values.iter().cycle().take(words).map(vary).collect()
    };
    made.iter().map(|(keys, values)| (varied(keys), varied(values))).collect()
}

/// Number of positions that may be run for `bytes` bytes of weights, at most `most`.
pub(crate) fn affordable(graph: &Graph, kv_capacity: u32, bytes: u64, most: usize) -> usize {
    let room = kv_capacity.min(graph.max_positions).max(1) as usize;
    let positions = bytes / (graph.weight_bytes() as u64).max(1);
    let most = most.max(REFERENCE_POSITIONS_MIN);
    usize::try_from(positions).unwrap_or(most).clamp(REFERENCE_POSITIONS_MIN, most).min(room)
}

/// Positions that a device runs and is compared at: [`POSITIONS_MAX`], fewer for models beyond nine billion weights
/// that a step multiplies.
#[must_use]
pub fn device_positions(graph: &Graph) -> usize {
    let positions = DEVICE_MACS / graph.step_macs().max(1);
    usize::try_from(positions).unwrap_or(usize::MAX).clamp(REFERENCE_POSITIONS_MIN, POSITIONS_MAX)
}

/// Why a device is compared at fewer positions than [`POSITIONS_MAX`], for verdicts; `None` if it is not.
#[must_use]
pub fn why_fewer_positions(graph: &Graph) -> Option<String> {
    let (positions, billions) = (device_positions(graph), graph.step_macs() as f64 / 1e9);
    (positions < POSITIONS_MAX).then(|| {
        format!(
            "compared at {positions} positions, not {POSITIONS_MAX}: each is {billions:.1} billion multiply-adds on the CPU"
        )
    })
}

/// Tokens that depend on the seed alone.
#[must_use]
pub fn draw_tokens(seed: u64, vocab: u32, count: usize) -> Vec<u32> {
    let mut rng = generator(seed, TOKENS_STREAM);
    (0..count).map(|_| rng.random_range(0..vocab.max(1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_models_are_compared_at_fewer_positions_and_the_verdict_says_so() {
        for preset in model::PRESETS {
            let graph = preset.shape().graph();
            let expected = match preset.name {
                "mixtral-8x7b" => 101,
                "qwen3-32b" => 40,
                "llama-3.1-70b" => 18,
                _ => POSITIONS_MAX,
            };
            assert_eq!(device_positions(&graph), expected, "{}", preset.name);
            assert_eq!(why_fewer_positions(&graph).is_some(), expected < POSITIONS_MAX);
        }
        // The format of the weights changes nothing about what the CPU multiplies.
        let graph = model::preset("llama-3.1-70b-int4-g128").expect("a preset").graph;
        let why = why_fewer_positions(&graph).expect("it is large");
        assert!(why.contains("18 positions, not 144") && why.contains("69.5 billion"), "{why}");
        assert_eq!(graph.step_macs(), 69_501_714_432);
    }

    /// A kernel of one sequence multiplies one half of long vectors, that of several both halves: so a batch is allowed
    /// less.
    #[test]
    fn a_batch_is_held_to_vectors_of_both_halves() {
        let coded = model::CODED.iter().find(|(name, _)| *name == "fp8").map(|(_, coded)| *coded);
        let options = model::Options { coded, ..model::Options::default() };
        let shape =
            model::Shape { ffn: 17_408, layers: 2, vocab: 128, options, ..model::Shape::default() };
        let model = model::Model::random(shape, 1);
        let (graph, weights) = (&model.graph, &*model.weights);
        assert!(graph.vectors().one_half);
        let allowed = |sequences| {
            let on = (1, Some(16));
            Expected::of_batch(graph, weights, 64, on, sequences).unwrap().on_device.rel()
        };
        let alone = Expected::new(graph, weights, 64, 1, Some(16)).unwrap().on_device.rel();
        assert_eq!(allowed(1), alone);
        assert!(allowed(8) < alone, "{} and {alone}", allowed(8));
    }
}
