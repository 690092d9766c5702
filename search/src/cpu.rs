//! The part of judging a candidate that needs no device: rules, lowering and the reference VM. It depends on the
//! schedule and the model alone, and any thread of a search may run it.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::{KernelConfig, ScheduleConfig};
use ir::{Graph, Target, Valid, Weights};
use reference_vm::compare::{Agreement, Reference};
use reference_vm::machine::Machine;
use reference_vm::{MachineError, Products};

use crate::device::{Device, DeviceError, Handle, ProgramGuard, Ran};
use crate::expected::{Expected, affordable, draw_tokens};
use crate::rejection::Rejection;

/// Bytes of weights that the reference VM may read for a search's champion, which runs on longer and fresh tokens.
const THOROUGH_BYTES: u64 = 24 << 30;

/// Bytes of products that the reference VM caches from one candidate to the next.
const PRODUCTS_BYTES: usize = 1 << 30;

/// Returns the id of the kernel build for a kernel config.
pub type KernelId<'a> = &'a (dyn Fn(&KernelConfig) -> String + Sync);

/// A schedule that was validated, lowered and verified.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The schedule.
    pub config: Valid<ScheduleConfig>,
    /// The program that it lowers to.
    pub program: Arc<Verified<Program>>,
    /// Hash of the schedule.
    pub schedule_id: String,
    /// Hash of the program.
    pub program_id: String,
    /// Hash of the kernel build.
    pub kernel_id: String,
}

impl Candidate {
    /// A guard that unloads this candidate from the device when dropped.
    pub(crate) fn guard<'d>(&self, device: &'d mut (dyn Device + 'd)) -> ProgramGuard<'d> {
        ProgramGuard::new(device, &self.program, self.config.kernel)
    }

    /// Loads the program on a device, unless it is loaded.
    pub(crate) fn load(&self, device: &mut dyn Device) -> Result<Handle, DeviceError> {
        device.prepare(&self.program, &self.config.kernel)
    }

    /// Runs `tokens[first..]` on a device.
    pub(crate) fn run(
        &self,
        device: &mut dyn Device,
        tokens: &[u32],
        first: usize,
    ) -> Result<Ran, DeviceError> {
        let handle = self.load(device)?;
        crate::device::run(device, (handle, &self.program), tokens, first)
    }

    pub(crate) fn release(&self, device: &mut dyn Device) {
        device.release(&self.program, &self.config.kernel);
    }

    /// The ids of program and kernel: schedules with equal keys need one evaluation.
    pub(crate) fn key(&self) -> (String, String) {
        (self.program_id.clone(), self.kernel_id.clone())
    }
}

/// A model, a target and inputs.
pub(crate) struct Cpu<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) weights: &'a dyn Weights,
    pub(crate) target: &'a Target,
    options: lower::Options,
    kernel_id: KernelId<'a>,
    pub(crate) expected: Expected,
    /// Cached products of stored rows and vectors, which no schedule changes.
    products: Products<'a>,
}

impl<'a> Cpu<'a> {
    pub(crate) fn new(
        graph: &'a Graph,
        weights: &'a dyn Weights,
        target: &'a Target,
        options: lower::Options,
        kernel_id: KernelId<'a>,
        expected: Expected,
    ) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let products = Products::new(weights, PRODUCTS_BYTES).with_crew(threads);
        Self { graph, weights, target, options, kernel_id, expected, products }
    }

    /// Validates a proposal, before a trial is spent on it.
    pub(crate) fn validate(
        &self,
        config: &ScheduleConfig,
    ) -> Result<Valid<ScheduleConfig>, Rejection> {
        ir::schedule::validate(*config, self.graph, self.target).map_err(Rejection::Rejected)
    }

    /// Lowers and verifies.
    pub(crate) fn lower(&self, config: Valid<ScheduleConfig>) -> Result<Candidate, Rejection> {
        let program = lower::lower(&config, self.graph, self.target, self.options)
            .map_err(Rejection::Unloadable)?;
        Ok(Candidate {
            schedule_id: config.id(),
            program_id: program.id(),
            kernel_id: (self.kernel_id)(&config.kernel),
            program: Arc::new(program),
            config,
        })
    }

    /// Runs the program on the gate's inputs.
    pub(crate) fn judge(&self, candidate: &Candidate) -> Result<Agreement<Reference>, Rejection> {
        self.interpret(candidate, &self.expected)
    }

    /// Runs the program on fresh tokens, over more than one block of keys if the model's size allows; returns the
    /// number of positions.
    pub(crate) fn thorough(&self, candidate: &Candidate, seed: u64) -> Result<usize, Rejection> {
        let most = candidate.config.tiling.attention.kv_block as usize + 2;
        let positions = affordable(self.graph, self.options.kv_capacity, THOROUGH_BYTES, most);
        let tokens = draw_tokens(seed, self.graph.vocab, positions);
        let expected = Expected::of_tokens(self.graph, self.weights, tokens, positions)
            .map_err(Rejection::Unevaluated)?;
        let _ = self.interpret(candidate, &expected)?;
        Ok(positions)
    }

    fn interpret(
        &self,
        candidate: &Candidate,
        inputs: &Expected,
    ) -> Result<Agreement<Reference>, Rejection> {
        let examined = inputs.examine(&mut self.machine(&candidate.program)?);
        if !matches!(examined, Err(Rejection::Disagreed { .. })) || inputs.routes.is_none() {
            return examined;
        }
        // A route may be within rounding of the graph's, which is seen by following it.
        let mut machine = self.machine(&candidate.program)?;
        match inputs.on_routes_of(self.graph, self.weights, &mut machine)? {
            Some(inputs) => inputs.examine(&mut self.machine(&candidate.program)?),
            None => examined,
        }
    }

    /// A fresh reference VM that shares the cached products.
    pub(crate) fn machine<'m>(
        &'m self,
        program: &'m Verified<Program>,
    ) -> Result<Machine<'m>, MachineError> {
        Machine::sharing(program, self.graph, &self.products)
    }
}
