//! The machine of an engine between its requests, for a search.

use std::sync::Arc;

use ir::KernelConfig;
use ir::program::{Program, Verified};
use remote::Served;
use search::{DeviceError, Handle};

/// Whether a request has come. Whoever uses a machine between requests polls it, and ends early if it is true.
pub(crate) type Preempt = Arc<dyn Fn() -> bool + Send + Sync>;

/// A machine that a search may use between requests. Its calls end early when a request comes.
pub(crate) trait Bench: Served {
    /// As [`Served::prepare`], for commands of as many sequences as the search is about, whatever the batch size of the
    /// machine.
    fn prepare_searched(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.prepare(program, kernel)
    }

    /// Whether a program has a sequence that begins with these tokens, which a run could continue.
    fn holds(&self, program: Handle, tokens: &[u32]) -> bool;

    /// Whether a call since the last question ended early because a request came: its error says nothing about the
    /// program.
    fn take_preempted(&mut self) -> bool;

    /// Forgets the sequences of the search, so that requests have their pages.
    fn leave(&mut self) {}
}
