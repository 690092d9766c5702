//! A search on the GPU of a server, between requests: in pieces, after each of which a request gets the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use remote::Served;
use search::{DeviceError, Handle};
use vm_device::Variant;

use super::builds::Builds;
use super::{Gpu, SLOTS, builds, device_error};
use crate::context::Context;
use crate::engine::{Bench, Preempt};

/// Positions of a piece, as many as are timed at once. It is how long a request waits: 30 ms where a step takes 3.5 ms.
const PIECE: usize = search::TIMED_TOKENS;

/// Ends the work of a search early when a request comes; without a question never.
#[derive(Clone, Default)]
pub(super) struct Preemption {
    asked: Option<Preempt>,
    ended: Arc<AtomicBool>,
}

impl Preemption {
    /// Positions of a command, of at most `most`.
    pub(super) fn piece(&self, most: usize) -> usize {
        if self.asked.is_some() { most.clamp(1, PIECE) } else { most.max(1) }
    }

    /// Between two pieces. The error is of a kind that stops no kernel.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        if !self.asked.as_ref().is_some_and(|asked| asked()) {
            return Ok(());
        }
        self.ended.store(true, Ordering::Relaxed);
        Err(DeviceError::Unavailable { reason: "a request came".to_owned() })
    }
}

impl Gpu<'_> {
    /// Sets what ends the work of a search early: it shares the machine with requests.
    pub(crate) fn preempted_by(&mut self, asked: Preempt) {
        self.preemption.asked = Some(asked);
    }

    /// Whether a search shares the machine with requests.
    pub(super) fn preempts(&self) -> bool {
        self.preemption.asked.is_some()
    }
}

impl Bench for Gpu<'_> {
    fn prepare_searched(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        let seqs = std::mem::replace(&mut self.seqs, self.context.batch);
        let prepared = self.prepare(program, kernel);
        self.seqs = seqs;
        prepared
    }

    fn holds(&self, program: Handle, tokens: &[u32]) -> bool {
        self.slot_with(program, tokens).is_some()
    }

    fn take_preempted(&mut self) -> bool {
        self.preemption.ended.swap(false, Ordering::Relaxed)
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.searched) {
            self.sequences.fill(None);
            (0..SLOTS as u32 * self.context.batch).for_each(|session| self.end_session(session));
        }
    }
}

/// Compiles the kernels of a search on its own thread, so that the thread that drives the GPU finds them in the cache.
pub(crate) struct Compiler<'a> {
    context: &'a Context,
    builds: Option<Builds<Variant>>,
}

impl<'a> Compiler<'a> {
    pub(crate) fn new(context: &'a Context) -> Self {
        Self { context, builds: builds(&context.target.arch) }
    }

    /// Compiles these in the background.
    pub(crate) fn foresee(&mut self, kernels: &[KernelConfig]) {
        let variants =
            kernels.iter().map(|kernel| self.context.variant(kernel, self.context.batch));
        if let Some(builds) = &mut self.builds {
            builds.ask(variants);
        }
    }

    /// Returns when this one is compiled.
    pub(crate) fn compile(&self, kernel: &KernelConfig) -> Result<(), DeviceError> {
        let variant = self.context.variant(kernel, self.context.batch);
        self.builds.iter().for_each(|builds| builds.settle(&variant));
        let cache = vm_host::default_cache();
        let compiled = vm_host::compile(&variant, &self.context.target.arch, cache.as_deref());
        compiled.map(|_| ()).map_err(device_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ends_early_when_asked_and_is_in_pieces_only_then() {
        let mut preemption = Preemption::default();
        assert_eq!(
            (preemption.piece(160), preemption.piece(0), preemption.check()),
            (160, 1, Ok(()))
        );
        let came = Arc::new(AtomicBool::new(false));
        let asked = came.clone();
        preemption.asked = Some(Arc::new(move || asked.load(Ordering::Relaxed)));
        assert_eq!(
            (preemption.piece(160), preemption.piece(3), preemption.check()),
            (PIECE, 3, Ok(()))
        );
        assert!(!preemption.ended.load(Ordering::Relaxed));
        came.store(true, Ordering::Relaxed);
        assert!(matches!(preemption.check(), Err(DeviceError::Unavailable { .. })));
        assert!(preemption.clone().ended.load(Ordering::Relaxed), "copies share it");
    }
}
