//! Prompts in chunks, run while the kernel is not resident.

use std::time::Duration;

use search::{DeviceError, Handle};
use vm_host::{ChunkRoutes, LayersRan, PrefillOptions, Prefilled};

use super::{Gpu, Machine, device_error};
use crate::cli::PrefillChoice;
use crate::failure::Failure;
use crate::report;

/// The least number of tokens for which a prompt is run in chunks. Below, stopping the kernel, a short chunk and the
/// next launch take longer than the steps: 9 steps of llama-3.2-1b, some 15 of small models
/// (docs/explanation/performance.md).
const CHUNKS_FROM: usize = 16;

/// What was run of tokens in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunked {
    /// Nothing: they are still to be run, token by token.
    Not,
    /// Some layers: the same call goes on.
    Layers,
    All,
}

impl Gpu<'_> {
    /// Sets how later prompts are run. The default is token by token.
    pub(crate) fn set_prefill(&mut self, choice: PrefillChoice) -> Result<(), Failure> {
        let devices = self.context.target.devices;
        let refused = vm_host::prefill_refused(self.context.graph(), devices);
        // Those of mixtures on several GPUs were never compared on cards: only who asks for them has them.
        let unproven = devices > 1 && self.context.graph().has_experts();
        self.chunks_from = match (choice, refused) {
            (PrefillChoice::Chunks, Some(why)) => {
                return Err(Failure::usage(format!("--prefill chunks: {why}")));
            }
            (PrefillChoice::Steps, _) | (PrefillChoice::Auto, Some(_)) => None,
            (PrefillChoice::Auto, None) if unproven => None,
            (PrefillChoice::Auto, None) => Some(CHUNKS_FROM),
            (PrefillChoice::Chunks, None) => Some(1),
        };
        if self.chunks_from.is_some() {
            let compile = vm_host::compile_prompts(self.context.graph(), devices, &self.info);
            self.compiling_prompts = Some(std::thread::spawn(compile));
        }
        Ok(())
    }

    /// Waits until the kernels for chunks have been compiled, so that no prompt has to. A failure comes again with the first
    /// prompt.
    pub(crate) fn await_prompt_kernels(&mut self) {
        if let Some(compiling) = self.compiling_prompts.take()
            && let Ok(Err(error)) = compiling.join()
        {
            report::say(&format!("note: no kernels for prompts in chunks: {error}"));
        }
    }

    /// Whether this many tokens of a prompt are run in chunks.
    pub(crate) fn takes_chunks(&self, tokens: usize) -> bool {
        self.chunks_from.is_some_and(|from| tokens >= from)
    }

    /// Runs tokens at the next positions of a session in chunks; with `logits`, returns those of the last token. The
    /// kernel is not resident afterwards.
    pub(crate) fn prefill(
        &mut self,
        handle: Handle,
        (session, position): (u32, u32),
        tokens: &[u32],
        logits: bool,
        options: &PrefillOptions,
    ) -> Result<(Prefilled, Vec<f32>), DeviceError> {
        self.await_prompt_kernels();
        let prepared = self.prepared(handle)?;
        let (variant, program) = (prepared.variant, prepared.program.clone());
        let mut idle = self.idle(&program, &variant)?;
        let done = idle.prefill(session, position, tokens, logits, options);
        let done = done.and_then(|done| {
            let row = if logits { idle.last_logits()? } else { Vec::new() };
            Ok((done, row))
        });
        self.machine = Machine::Idle(Box::new(idle));
        done.map_err(device_error)
    }

    /// The experts that the last chunk chose; it had `tokens` tokens and gave logits. The kernel is not resident.
    pub(crate) fn chunk_routes(&self, tokens: u32) -> Result<Vec<ChunkRoutes>, DeviceError> {
        match &self.machine {
            Machine::Idle(idle) => idle.chunk_routes(tokens).map_err(device_error),
            Machine::Absent | Machine::Running(_) => Ok(Vec::new()),
        }
    }

    /// Runs a prompt, or a part of it, in chunks, if it is long enough and the model's values are in their range; with
    /// a limit, some layers of it.
    pub(super) fn prefilled(
        &mut self,
        handle: Handle,
        (session, position): (u32, u32),
        tokens: &[u32],
        limit: Option<Duration>,
    ) -> Result<Chunked, DeviceError> {
        if !self.takes_chunks(tokens.len()) {
            return Ok(Chunked::Not);
        }
        let ran = match limit {
            Some(limit) => self.layers(handle, (session, position), tokens, limit)?,
            None => {
                let options = PrefillOptions::default();
                let place = (session, position);
                let (done, _) = self.prefill(handle, place, tokens, false, &options)?;
                LayersRan { done: true, clamped: done.clamped, us: done.device_us }
            }
        };
        if ran.clamped {
            report::say("prompt: values exceed the range of f16; its tokens run one by one");
            return Ok(Chunked::Not);
        }
        if !ran.done {
            return Ok(Chunked::Layers);
        }
        report::say(&format!("prompt: {} tokens in chunks, {:.1} ms", tokens.len(), ran.us / 1e3));
        Ok(Chunked::All)
    }

    /// Runs some layers of a chunk.
    fn layers(
        &mut self,
        handle: Handle,
        (session, position): (u32, u32),
        tokens: &[u32],
        limit: Duration,
    ) -> Result<LayersRan, DeviceError> {
        self.await_prompt_kernels();
        let prepared = self.prepared(handle)?;
        let (variant, program) = (prepared.variant, prepared.program.clone());
        let mut idle = self.idle(&program, &variant)?;
        let ran = idle.prefill_within(session, position, tokens, limit);
        self.machine = Machine::Idle(Box::new(idle));
        ran.map_err(device_error)
    }

    /// What the last launch took: how long sequences that decode wait for the kernel to come back.
    pub(crate) fn launch_time(&self) -> Duration {
        self.launch_time
    }

    /// The session whose chunk has run some of its layers.
    pub(crate) fn chunk_begun(&self) -> Option<u32> {
        match &self.machine {
            Machine::Absent => None,
            Machine::Idle(idle) => idle.chunk_begun(),
            Machine::Running(running) => running.chunk_begun(),
        }
    }
}
