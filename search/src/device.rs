//! The device interface of the search: it holds programs, runs them and times them.
//!
//! Programs are loaded beside each other and switched between, so that a candidate and the incumbent can alternate. The
//! search requests a program again before each use: a device that still has it returns at once, one that was restarted
//! after a fault loads it again. The implementation owns the clock; no method may rely on a time that the candidate
//! reports.

use std::sync::Arc;

use derive_more::{Add, AddAssign, Sub};
use ir::BufferId;
use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use reference_vm::compare::{Agreement, Device as OnDevice};
use reference_vm::routes::{RoutePlace, Routes, places};
use serde::{Deserialize, Serialize};

use crate::clocks::{ClockReadings, Clocks};

/// The device's identity, and the conditions under which it measures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Bytes per second that reading device memory reached, in this process: of all GPUs that run a step together.
    pub bandwidth: Option<f64>,
    /// Bytes of their last-level caches, which a small model's weights may stay in.
    pub cache_bytes: u64,
    /// Identifies the card among others of its name.
    pub uuid: Option<String>,
    /// Number of SMs.
    pub sms: Option<u32>,
    /// CUDA version of its driver.
    pub cuda: Option<String>,
    /// Number of other processes that used it when it was opened; `None` if unknown.
    pub other_processes: Option<u32>,
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
    /// Makes a contender of a loaded program and its proof.
    #[must_use]
    pub fn new(handle: Handle, agreement: &'a Agreement<OnDevice>) -> Self {
        Self { handle, agreement }
    }

    /// The handle of the program.
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
/// A device that still has the sequence of the contender's last run need not fill it again.
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

/// The contender that a block ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The first contender.
    Incumbent,
    /// The second contender.
    Candidate,
}

/// The order of a round: drift affects both sides equally.
pub const ROUND: [Side; 4] = [Side::Incumbent, Side::Candidate, Side::Candidate, Side::Incumbent];

/// The result of timing two contenders.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// Microseconds per token of each block, four per round in the order of [`ROUND`].
    pub rounds: Vec<[f64; 4]>,
    /// Logits of the last position of the last timed block of the incumbent and the candidate.
    pub last_logits: [Vec<f32>; 2],
    /// The token that was chosen by each of them.
    pub last_chosen: [u32; 2],
    /// The card's clocks before and after, where they could be read.
    pub clocks: ClockReadings,
}

/// The outputs of a run of positions, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// The logits of each position.
    pub logits: Vec<Vec<f32>>,
    /// The token that the device chose from each. A sequence continues with it, and no other check covers it.
    pub chosen: Vec<u32>,
    /// The experts of each position, for a model that has some, if the device can say.
    pub routes: Option<Routes>,
}

/// Why a device gave no result. The kind determines what the search does next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
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
    /// A worker trapped and reported which task waits for what.
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
        /// The counter (or buffer word) waited for.
        counter: u32,
        /// Its value.
        have: u32,
        /// The value that the task needs.
        need: u32,
    },
    /// The host stopped waiting and ended the device's work.
    #[error("no answer within {after_ms} ms; last status: {status}")]
    TimedOut {
        /// Milliseconds waited.
        after_ms: u64,
        /// The last contents of the device's status block.
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

/// The cost of making programs run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, Add, AddAssign, Sub)]
pub struct Costs {
    /// Kernels that were compiled, or taken from a cache.
    pub compiles: u64,
    /// Seconds of waiting for them.
    pub compile_s: f64,
    /// Launches of a resident kernel.
    pub launches: u64,
    /// Seconds of stopping and launching.
    pub launch_s: f64,
    /// Programs that were uploaded.
    pub loads: u64,
    /// Seconds of uploading and poisoning.
    pub load_s: f64,
    /// Seconds of the steps that gates ran.
    #[serde(default)]
    pub run_s: f64,
    /// Seconds of reading their logits.
    #[serde(default)]
    pub read_s: f64,
}

/// A device that runs verified programs.
pub trait Device {
    /// Describes the device.
    fn describe(&self) -> DeviceInfo;

    /// Loads a program for a kernel variant, beside those already loaded. A program that is still loaded returns at
    /// once. Programs are identified by their allocation.
    ///
    /// # Errors
    /// If it cannot be compiled, loaded or held.
    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError>;

    /// Runs `tokens[first..]` and returns, for each, the logits and the token chosen from them. From position zero it
    /// starts a fresh sequence with poisoned scratch memory; from a later one it continues the sequence of this
    /// program's last run, which must have had the same tokens.
    ///
    /// # Errors
    /// If the device trapped, hung or was lost, or has no such sequence.
    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError>;

    /// Lets one program continue the sequence of another. Caches have the same layout in all programs of a model, so a
    /// context need not be filled again for each.
    ///
    /// # Errors
    /// If the device has no such sequence, or cannot share sequences between programs.
    fn hand_over(&mut self, _from: Handle, _to: Handle) -> Result<(), DeviceError> {
        Err(DeviceError::Fault { reason: "this device keeps sequences apart".to_owned() })
    }

    /// The contents of these buffers of a program after its last step; empty for those that are not activations. `None`
    /// if the device cannot read them.
    ///
    /// # Errors
    /// If the device trapped, hung or was lost, or has run something else since.
    fn buffers(
        &mut self,
        _program: Handle,
        _which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        Ok(None)
    }

    /// Announces kernel builds that are likely to be needed soon. A device may compile them while it does other things.
    fn foresee(&mut self, _kernels: &[KernelConfig]) {}

    /// The total cost of making programs run so far, as opposed to running them.
    fn costs(&self) -> Costs {
        Costs::default()
    }

    /// The current clocks; `None` if they cannot be read.
    fn clocks(&mut self) -> Option<Clocks> {
        None
    }

    /// Times two contenders in alternation. The same one twice measures the noise.
    ///
    /// # Errors
    /// If the device trapped, hung or was lost.
    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError>;

    /// Unloads a program; does nothing if it is not loaded. Its handle is invalid afterwards.
    fn release(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig);
}

/// A device with a program that is unloaded when this guard is dropped, unless it is kept: a candidate can be rejected
/// in many places, and none of them may leave it loaded.
pub(crate) struct ProgramGuard<'d> {
    device: &'d mut (dyn Device + 'd),
    program: Arc<Verified<Program>>,
    kernel: KernelConfig,
    is_kept: bool,
}

impl<'d> ProgramGuard<'d> {
    /// Guards a program, which need not be loaded yet.
    pub(crate) fn new(
        device: &'d mut (dyn Device + 'd),
        program: &Arc<Verified<Program>>,
        kernel: KernelConfig,
    ) -> Self {
        Self { device, program: program.clone(), kernel, is_kept: false }
    }

    pub(crate) fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// Leaves the program on the device.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.device.release(&self.program, &self.kernel);
        }
    }
}

/// As [`Device::run`]. A program with routes runs step by step, and the experts of each step are read after it.
///
/// # Errors
/// As [`Device::run`].
pub fn run(
    device: &mut dyn Device,
    (handle, program): (Handle, &Program),
    tokens: &[u32],
    first: usize,
) -> Result<Ran, DeviceError> {
    let routes: Vec<BufferId> = places(program).iter().map(|place| place.buffer).collect();
    if routes.is_empty() {
        return device.run(handle, tokens, first);
    }
    let mut ran = Ran { routes: Some(Routes::new(routes.len())), ..Ran::default() };
    for position in first..tokens.len() {
        let step = device.run(handle, &tokens[..=position], position)?;
        ran.logits.extend(step.logits);
        ran.chosen.extend(step.chosen);
        let words = device.buffers(handle, &routes)?;
        ran.routes = ran.routes.zip(words).map(|(mut routes, words)| {
            routes.push(words.iter().map(|words| RoutePlace::experts(words)));
            routes
        });
    }
    Ok(ran)
}

/// Times two contenders and reads the clocks before and after.
///
/// # Errors
/// As [`Device::time`].
pub fn time(
    device: &mut dyn Device,
    contenders: [Contender<'_>; 2],
    plan: &Plan<'_>,
) -> Result<Samples, DeviceError> {
    let before = device.clocks();
    let mut samples = device.time(contenders, plan)?;
    samples.clocks.all = before.into_iter().chain(device.clocks()).collect();
    Ok(samples)
}
