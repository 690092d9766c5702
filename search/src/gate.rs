//! The gates of a trial, in order. Each takes the proof that the one before it made; the last hands out what may be timed.
//!
//! The expected values come from the graph, with no schedule, and are computed once. They cover several positions from zero on fresh
//! tokens of the search's seed; how many of them a candidate must show depends on what the model's size allows.

use std::collections::BTreeMap;

use ir::program::{Program, Verified};
use ir::schedule::{KernelConfig, ScheduleConfig};
use ir::{Graph, Target, Valid, Violations, Weights};
use lower::LowerError;
use rand::RngExt;
use reference_vm::compare::{
    Agreement, Device as OnDevice, Disagreement, Reference, Tolerance, What, compare,
};
use reference_vm::eval::{EvalError, Evaluator, Logits};
use reference_vm::machine::{Machine, Outputs, Run};
use reference_vm::{MachineError, Order, Products, argmax};

use crate::device::{Contender, Device, DeviceError, Plan, Samples};
use crate::measure::{BelowFloor, Predicted};
use crate::propose::generator;

/// Weight bytes that the reference machine may read for one candidate: what decides how many positions it runs.
const REFERENCE_BYTES: u64 = 2 << 30;

/// Positions that the reference machine runs at least.
const REFERENCE_POSITIONS_MIN: usize = 6;

/// Positions that any executor runs at most, when the model allows: more than one block of the default `kv_block`.
pub const POSITIONS_MAX: usize = 144;

/// The same for the champion of a search, which is run on longer and fresh tokens.
const THOROUGH_BYTES: u64 = 24 << 30;

/// Tokens that one block times at most. Eight steps of a small model are some milliseconds, of which the command's round trip is a
/// few microseconds, the same for both sides; blocks of one length vary by tenths of a per cent.
const TIMED_TOKENS: usize = 8;

/// Positions of the first stage on the device, after which a candidate that is clearly slower is given up.
const FIRST_STAGE: usize = 24;

/// Bytes of products that the reference machine keeps from one candidate to the next.
const PRODUCTS_BYTES: usize = 512 << 20;

/// Which numbers the tokens of a search are drawn with.
const TOKENS_STREAM: u64 = u64::MAX;

/// Why a candidate is out. Every end but a latency is data for the ledger, not a failure of the search.
#[derive(Clone, Debug, PartialEq)]
pub enum Dropped {
    /// The schedule breaks rules.
    Rejected(Violations),
    /// The schedule is legal and cannot be lowered.
    Unloadable(LowerError),
    /// The reference machine cannot run the lowered program.
    Unrunnable(MachineError),
    /// The graph cannot be evaluated on these tokens.
    Unevaluated(EvalError),
    /// The program trapped, got stuck or used up its fuel on the reference machine.
    Halted(Run),
    /// The program chose another token than its own logits say.
    Sampled {
        /// The position.
        position: usize,
        /// The token chosen.
        got: u32,
        /// The most likely one.
        want: u32,
    },
    /// Values differ from the evaluated graph's.
    Disagreed {
        /// `reference`, `device` or `timed`.
        by: &'static str,
        /// Where.
        at: Disagreement,
    },
    /// The device gave no result.
    Failed(DeviceError),
    /// It was faster than the bytes that it read allow.
    BelowFloor(BelowFloor),
}

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rejected(violations) => {
                let all: Vec<String> = violations.list().iter().map(ToString::to_string).collect();
                f.write_str(&all.join(" | "))
            }
            Self::Unloadable(error) => write!(f, "{error}"),
            Self::Unrunnable(error) => write!(f, "the reference machine cannot run it: {error}"),
            Self::Unevaluated(error) => write!(f, "the graph cannot be evaluated: {error}"),
            Self::Halted(run) => halted(f, run),
            Self::Sampled { position, got, want } => write!(
                f,
                "token {got} was chosen at position {position} where the logits say {want}"
            ),
            Self::Disagreed { by, at } => write!(f, "{by} disagrees with the graph: {at}"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::BelowFloor(error) => write!(f, "{error}"),
        }
    }
}

fn halted(f: &mut std::fmt::Formatter<'_>, run: &Run) -> std::fmt::Result {
    f.write_str("on the reference machine: ")?;
    match run {
        Run::Finished(_) => f.write_str("finished"),
        Run::Trapped(trap) => write!(f, "{trap}"),
        Run::OutOfFuel { fired } => write!(f, "still running after {fired} tasks"),
        Run::Stuck { waiting } => match waiting.first() {
            Some(first) => write!(f, "stuck, {} workers wait: {first}", waiting.len()),
            None => f.write_str("stuck"),
        },
    }
}

/// A schedule that was validated, lowered and verified.
#[derive(Debug)]
pub struct Candidate {
    /// The schedule.
    pub config: Valid<ScheduleConfig>,
    /// What it lowers to.
    pub program: Verified<Program>,
    /// Hash of the schedule.
    pub schedule_id: String,
    /// Hash of the program.
    pub program_id: String,
    /// Hash of the kernel build.
    pub kernel_id: String,
}

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
    cache: Vec<(Vec<f32>, Vec<f32>)>,
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
    fn of_tokens(
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
fn affordable(graph: &Graph, kv_capacity: u32, bytes: u64, most: usize) -> usize {
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

/// Time since any fixed moment. The search has no clock of its own; it passes this one on to know what it spent on what.
pub type Clock = fn() -> std::time::Duration;

/// Names the kernel build of a kernel config.
pub type KernelId<'a> = &'a dyn Fn(&KernelConfig) -> String;

/// Everything that candidates are judged by.
pub struct Gate<'a> {
    graph: &'a Graph,
    weights: &'a dyn Weights,
    target: &'a Target,
    options: lower::Options,
    kernel_id: KernelId<'a>,
    expected: Expected,
    context: Option<u32>,
    timed_from: usize,
    agreed: BTreeMap<String, Agreement<Reference>>,
    /// What no schedule changes: stored rows times vectors.
    products: Products<'a>,
    /// Seconds of the reference machine so far, by the clock of those who asked for [`first`](Self::first).
    pub(crate) reference_s: f64,
}

impl<'a> Gate<'a> {
    /// The gate of a model, a target and inputs.
    #[must_use]
    pub fn new(
        graph: &'a Graph,
        weights: &'a dyn Weights,
        target: &'a Target,
        options: lower::Options,
        kernel_id: KernelId<'a>,
        expected: Expected,
    ) -> Self {
        let tokens = expected.tokens.len();
        let timed_from = tokens.saturating_sub(TIMED_TOKENS).max(tokens / 2);
        Self {
            graph,
            weights,
            target,
            options,
            kernel_id,
            expected,
            context: None,
            timed_from,
            agreed: BTreeMap::new(),
            products: Products::new(weights, PRODUCTS_BYTES),
            reference_s: 0.0,
        }
    }

    /// Predicts at this many tokens of context instead of those of the gate's tokens.
    #[must_use]
    pub fn with_context(mut self, tokens: u32) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Times the gate's tokens from this one on, instead of the last few. At least one is timed.
    #[must_use]
    pub fn with_timed_from(mut self, first: usize) -> Self {
        self.timed_from = first.min(self.expected.tokens.len().saturating_sub(1));
        self
    }

    /// The model.
    #[must_use]
    pub fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// The target.
    #[must_use]
    pub fn target(&self) -> &'a Target {
        self.target
    }

    /// The inputs and what is expected of them.
    #[must_use]
    pub fn expected(&self) -> &Expected {
        &self.expected
    }

    /// Whether the schedule is legal here: what a proposal must show before a trial is spent on it.
    ///
    /// # Errors
    /// Every violation.
    pub fn validate(&self, config: &ScheduleConfig) -> Result<Valid<ScheduleConfig>, Dropped> {
        ir::schedule::validate(*config, self.graph, self.target).map_err(Dropped::Rejected)
    }

    /// Lowers and verifies.
    ///
    /// # Errors
    /// If it cannot be lowered.
    pub fn lower(&self, config: Valid<ScheduleConfig>) -> Result<Candidate, Dropped> {
        let program = lower::lower(&config, self.graph, self.target, self.options)
            .map_err(Dropped::Unloadable)?;
        Ok(Candidate {
            schedule_id: config.id(),
            program_id: program.id(),
            kernel_id: (self.kernel_id)(&config.kernel),
            program,
            config,
        })
    }

    /// Runs the program on the reference machine. Equal programs are run once.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn reference(&mut self, candidate: &Candidate) -> Result<Agreement<Reference>, Dropped> {
        if let Some(agreement) = self.agreed.get(&candidate.program_id) {
            return Ok(*agreement);
        }
        let agreement = self.interpret(candidate, &self.expected)?;
        self.agreed.insert(candidate.program_id.clone(), agreement);
        Ok(agreement)
    }

    /// Runs the program on fresh tokens, over more than one block of keys if the model's size allows; returns the positions.
    ///
    /// # Errors
    /// If it traps, gets stuck or disagrees.
    pub fn thorough(&self, candidate: &Candidate, seed: u64) -> Result<usize, Dropped> {
        let most = candidate.config.tiling.attention.kv_block as usize + 2;
        let positions = affordable(self.graph, self.options.kv_capacity, THOROUGH_BYTES, most);
        let tokens = draw_tokens(seed, self.graph.vocab, positions);
        let expected = Expected::of_tokens(self.graph, self.weights, tokens, positions)
            .map_err(Dropped::Unevaluated)?;
        let _ = self.interpret(candidate, &expected)?;
        Ok(positions)
    }

    fn interpret(
        &self,
        candidate: &Candidate,
        inputs: &Expected,
    ) -> Result<Agreement<Reference>, Dropped> {
        self.interpreter().run(candidate, inputs)
    }

    fn interpreter(&self) -> Interpreter<'_> {
        Interpreter { graph: self.graph, products: &self.products }
    }

    /// Positions of the first stage on the device.
    #[must_use]
    pub fn first_stage(&self) -> usize {
        FIRST_STAGE.min(self.expected.tokens.len())
    }

    /// Runs the program on the reference machine and, meanwhile, the first positions on the device. Both must agree; the reference
    /// machine is asked first.
    ///
    /// # Errors
    /// If the reference machine refuses it. The inner error is the device's.
    pub fn first(
        &mut self,
        device: &mut dyn Device,
        candidate: &Candidate,
        clock: Clock,
    ) -> Result<(Agreement<Reference>, Result<OnFirst, Dropped>), Dropped> {
        let began = clock();
        let mut reference_s = 0.0;
        let tokens = &self.expected.tokens[..self.first_stage()];
        let known = self.agreed.get(&candidate.program_id).copied();
        let interpreter = self.interpreter();
        let mut reference = known.map(Ok);
        let mut rows = Err(Dropped::Failed(DeviceError::Fault { reason: "nothing ran".into() }));
        rayon::in_place_scope(|scope| {
            if reference.is_none() {
                scope.spawn(|_| {
                    reference = Some(interpreter.run(candidate, &self.expected));
                    reference_s = (clock() - began).as_secs_f64();
                });
            }
            rows = device
                .prepare(&candidate.program, &candidate.config.kernel)
                .and_then(|handle| device.run(handle, tokens, 0))
                .map_err(Dropped::Failed);
        });
        let reference = reference.unwrap_or_else(|| self.interpret(candidate, &self.expected))?;
        self.agreed.insert(candidate.program_id.clone(), reference);
        self.reference_s += reference_s;
        let first = rows.and_then(|rows| {
            let expected = &self.expected.logits[..rows.len()];
            let agreement = disagreed(reference.and_device(expected, &rows, Tolerance::DEVICE))?;
            Ok(OnFirst { rows, agreement })
        });
        Ok((reference, first))
    }

    /// Runs the positions after the first stage, then all of them again on a fresh sequence. Every position must agree both times; the
    /// last value says whether both gave the same bits.
    ///
    /// # Errors
    /// If it traps, hangs or disagrees.
    pub fn rest(
        &self,
        device: &mut dyn Device,
        candidate: &Candidate,
        reference: Agreement<Reference>,
        first: OnFirst,
    ) -> Result<(Agreement<OnDevice>, bool), Dropped> {
        let handle = device
            .prepare(&candidate.program, &candidate.config.kernel)
            .map_err(Dropped::Failed)?;
        let expected = &self.expected;
        let mut rows = first.rows;
        let ran = rows.len();
        if ran < expected.tokens.len() {
            rows.extend(device.run(handle, &expected.tokens, ran).map_err(Dropped::Failed)?);
        }
        let _ = disagreed(reference.and_device(&expected.logits, &rows, Tolerance::DEVICE))?;
        let again = device.run(handle, &expected.tokens, 0).map_err(Dropped::Failed)?;
        let agreement =
            disagreed(reference.and_device(&expected.logits, &again, Tolerance::DEVICE))?;
        let same = rows.iter().flatten().map(|value| value.to_bits());
        Ok((agreement, same.eq(again.iter().flatten().map(|value| value.to_bits()))))
    }

    /// Checks the outputs of timed runs: a program that is only right when nobody times it is wrong.
    ///
    /// # Errors
    /// If a side's last logits disagree.
    pub fn timed(
        &self,
        proof: Agreement<Reference>,
        positions: usize,
        samples: &Samples,
    ) -> Result<(), Dropped> {
        let last = positions.saturating_sub(1).min(self.expected.logits.len());
        let last = &self.expected.logits[last..][..1];
        for actual in &samples.last_logits {
            let _ = proof
                .and_device(last, std::slice::from_ref(actual), Tolerance::DEVICE)
                .map_err(|at| Dropped::Disagreed { by: "timed", at })?;
        }
        Ok(())
    }

    /// What the cost model says, at the position where a device would be timed.
    ///
    /// # Errors
    /// If it is below the floor, which is a fault of the model.
    pub fn predict(
        &self,
        candidate: &Candidate,
        proof: &Agreement<Reference>,
    ) -> Result<Predicted, Dropped> {
        let Candidate { program, config, .. } = candidate;
        let position = self.context.unwrap_or(self.timed_position());
        let cost = lower::predict(program, &config.kernel, self.target, position);
        Predicted::new(proof, cost.latency_us, cost.bound_us).map_err(Dropped::BelowFloor)
    }

    /// Times two contenders on the gate's tokens; the first ones fill the cache, the others are timed.
    ///
    /// # Errors
    /// If the device gives no result.
    pub fn time(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
        rounds: usize,
        warmup: usize,
    ) -> Result<Samples, DeviceError> {
        let tokens = &self.expected.tokens;
        let plan = Plan { tokens, first: self.timed_from, rounds, warmup };
        device.time(contenders, &plan)
    }

    /// Times one round at the last positions of the first stage.
    ///
    /// # Errors
    /// If the device gives no result.
    pub fn time_first(
        &self,
        device: &mut dyn Device,
        contenders: [Contender<'_>; 2],
    ) -> Result<Samples, DeviceError> {
        let tokens = &self.expected.tokens[..self.first_stage()];
        let first = tokens.len().saturating_sub(TIMED_TOKENS).max(tokens.len() / 2);
        let plan = Plan { tokens, first, rounds: 1, warmup: 0 };
        device.time(contenders, &plan)
    }

    /// Position of the middle of the timed tokens: where floors are computed.
    #[must_use]
    pub fn timed_position(&self) -> u32 {
        ((self.timed_from + self.expected.tokens.len()) / 2) as u32
    }
}

/// The tokens that the program chose must be those of its own logits.
fn check_tokens(outputs: &Outputs) -> Result<(), Dropped> {
    for (position, (&got, logits)) in outputs.tokens.iter().zip(&outputs.logits).enumerate() {
        let want = argmax(logits);
        if got != want {
            return Err(Dropped::Sampled { position, got, want });
        }
    }
    Ok(())
}

/// What the first stage on the device gave.
#[derive(Debug)]
pub struct OnFirst {
    rows: Vec<Vec<f32>>,
    /// It agrees at the positions of the first stage.
    pub agreement: Agreement<OnDevice>,
}

fn disagreed(
    compared: Result<Agreement<OnDevice>, Disagreement>,
) -> Result<Agreement<OnDevice>, Dropped> {
    compared.map_err(|at| Dropped::Disagreed { by: "device", at })
}

/// What the reference machine needs of a gate, which other threads may hold too.
#[derive(Clone, Copy)]
struct Interpreter<'g> {
    graph: &'g Graph,
    products: &'g Products<'g>,
}

impl Interpreter<'_> {
    fn run(
        self,
        candidate: &Candidate,
        inputs: &Expected,
    ) -> Result<Agreement<Reference>, Dropped> {
        let positions = inputs.reference_positions;
        let mut machine = Machine::sharing(&candidate.program, self.graph, self.products)
            .map_err(Dropped::Unrunnable)?;
        let run =
            machine.run(&inputs.tokens[..positions], Order::Waves).map_err(Dropped::Unrunnable)?;
        let outputs = match run {
            Run::Finished(outputs) => outputs,
            halted @ (Run::Trapped(_) | Run::OutOfFuel { .. } | Run::Stuck { .. }) => {
                return Err(Dropped::Halted(halted));
            }
        };
        check_tokens(&outputs)?;
        let expected = &inputs.logits[..positions];
        let mut agreement = compare(expected, &outputs.logits, Tolerance::REFERENCE)
            .map_err(|at| Dropped::Disagreed { by: "reference", at })?;
        for layer in 0..self.graph.layers.len() {
            agreement = self.compare_cache(agreement, &machine, inputs, layer)?;
        }
        Ok(agreement)
    }

    /// Compares a layer's key/value cache after the last position.
    fn compare_cache(
        self,
        agreement: Agreement<Reference>,
        machine: &Machine<'_>,
        inputs: &Expected,
        layer: usize,
    ) -> Result<Agreement<Reference>, Dropped> {
        let width = self.graph.kv_width() as usize;
        let at = layer as u32;
        let disagreed = |at| Dropped::Disagreed { by: "reference", at };
        let (keys, values) = &inputs.cache[layer];
        agreement
            .and_values(
                What::Keys { layer: at },
                keys.chunks_exact(width),
                machine.keys(layer).chunks_exact(width),
                Tolerance::REFERENCE,
            )
            .map_err(disagreed)?
            .and_values(
                What::Values { layer: at },
                values.chunks_exact(width),
                machine.values(layer).chunks_exact(width),
                Tolerance::REFERENCE,
            )
            .map_err(disagreed)
    }
}
