//! The device as the search sees it: something that holds programs, runs them and times them.
//!
//! Programs are loaded beside each other and switched between, so that a candidate and the incumbent can alternate. The search
//! asks for a program again before each use; a device that still has it answers at once, one that was restarted after a
//! fault loads it anew. No method may take the candidate's word for a time: the implementation owns the clock.

use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use reference_vm::compare::{Agreement, Device as OnDevice};
use serde::{Deserialize, Serialize};

/// What kind of device this is, and the conditions under which it measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// Bytes a second that reading device memory reached on this device, in this process.
    pub bandwidth: Option<f64>,
    /// Bytes of the last-level cache, which a small model's weights may stay in.
    pub cache_bytes: u64,
    /// Driver, compiler and clocks, for the record.
    pub conditions: Vec<String>,
}

/// A program that is loaded on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

/// A loaded program with the proof that it agrees: the only thing that can be timed.
#[derive(Clone, Copy, Debug)]
pub struct Contender<'a> {
    handle: Handle,
    agreement: &'a Agreement<OnDevice>,
}

impl<'a> Contender<'a> {
    /// A program that may be timed.
    #[must_use]
    pub fn new(handle: Handle, agreement: &'a Agreement<OnDevice>) -> Self {
        Self { handle, agreement }
    }

    /// Where the program is loaded.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The proof.
    pub fn agreement(&self) -> &Agreement<OnDevice> {
        self.agreement
    }
}

/// What to time: one block decodes `tokens[first..]`, after `tokens[..first]` have filled the key/value cache untimed.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan<'a> {
    /// The forced tokens, from position zero.
    pub tokens: &'a [u32],
    /// First timed position.
    pub first: usize,
    /// Rounds of four blocks: incumbent, candidate, candidate, incumbent.
    pub rounds: usize,
    /// Untimed blocks of each contender before the first round.
    pub warmup: usize,
}

/// Which of the two contenders a block ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The first contender.
    Incumbent,
    /// The second contender.
    Candidate,
}

/// The order of a round, so that drift hits both alike.
pub const ROUND: [Side; 4] = [Side::Incumbent, Side::Candidate, Side::Candidate, Side::Incumbent];

/// What timing two contenders gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// Microseconds a token of each block, four a round in the order of [`ROUND`].
    pub rounds: Vec<[f64; 4]>,
    /// Logits of the last position of the last timed block of the incumbent and the candidate.
    pub last_logits: [Vec<f32>; 2],
}

/// Why a device gave no result. What a search does next depends on the kind.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// There is no device, or it is lost for good. The search cannot go on.
    #[error("the device is not available: {reason}")]
    Unavailable {
        /// What is missing and what to do.
        reason: String,
    },
    /// The kernel variant does not compile or load.
    #[error("the kernel does not compile: {log}")]
    Compile {
        /// The compiler's log.
        log: String,
    },
    /// A worker gave up and said who waits for what.
    #[error(
        "trap {trap}: worker {worker}, task {task}, counter {counter} has {have} and needs {need}"
    )]
    Trapped {
        /// The trap's name.
        trap: String,
        /// The worker.
        worker: u32,
        /// Its task.
        task: u32,
        /// The counter (or slot word) waited for.
        counter: u32,
        /// What it held.
        have: u32,
        /// What was needed.
        need: u32,
    },
    /// The host gave up waiting and stopped the device.
    #[error("no answer within {after_ms} ms; last status: {status}")]
    TimedOut {
        /// Milliseconds waited.
        after_ms: u64,
        /// What the device's status block said last.
        status: String,
    },
    /// Program, weights or cache do not fit.
    #[error("out of device memory: {needed} bytes needed, {free} free")]
    OutOfMemory {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The driver reported a fault; the device was restarted.
    #[error("device fault: {reason}")]
    Fault {
        /// The driver's message.
        reason: String,
    },
}

/// A device that runs verified programs.
pub trait Device {
    /// What it is.
    fn describe(&self) -> DeviceInfo;

    /// Loads a program for a kernel variant, beside those already loaded. A program that is still loaded is returned at once.
    ///
    /// # Errors
    /// If it cannot be compiled, loaded or held.
    fn prepare(
        &mut self,
        program: &Verified<Program>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError>;

    /// Runs tokens from position zero of a fresh sequence, with scratch memory poisoned, and returns the logits of each.
    ///
    /// # Errors
    /// If the device trapped, hung or was lost.
    fn run(&mut self, program: Handle, tokens: &[u32]) -> Result<Vec<Vec<f32>>, DeviceError>;

    /// Times two contenders in alternation; the same one twice measures the noise.
    ///
    /// # Errors
    /// If the device trapped, hung or was lost.
    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError>;

    /// Lets go of a program. Unknown handles are ignored.
    fn release(&mut self, program: Handle);
}
