//! The parent's side: a device in another process, and its supervision.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, SealKey, Verified};
use ir::{BufferId, KernelConfig};
use search::{
    Clocks, Contender, Costs, Device, DeviceError, DeviceInfo, Handle, Plan, ROUND, Ran, Samples,
};

use crate::limits::{Limits, Work};
use crate::process::{Process, describe};
use crate::shared::{Board, Rows, Shared};
use crate::wire::{Answer, Broken, Channel, Reply, Request};

/// How long to wait for the exit status of a process that closed its socket.
const NAME_WITHIN: Duration = Duration::from_secs(1);

/// Pause before a process is restarted.
const START_AGAIN: Duration = Duration::from_millis(100);

/// Makes the command that starts a device process: one that calls [`serve`](crate::serve()).
pub type Launcher<'a> = Box<dyn FnMut() -> Command + 'a>;

/// Reads the clocks of the device.
pub type ReadClocks<'a> = Box<dyn FnMut() -> Option<Clocks> + 'a>;

/// The size of the logits that one request can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Maximum positions of a run; longer runs are split into several requests.
    pub rows: usize,
    /// Logits per position.
    pub vocab: usize,
}

/// A program in the parent, for loading into a new process.
struct Kept {
    program: Arc<Verified<Program>>,
    kernel: KernelConfig,
}

/// A live process.
struct Running {
    process: Process,
    channel: Channel,
    /// Programs loaded in it.
    loaded: BTreeSet<u64>,
    /// Kernels that it has compiled.
    compiled: Vec<KernelConfig>,
    /// Whether the model is on the device.
    booted: bool,
    /// The kernel that runs.
    kernel: Option<KernelConfig>,
}

/// A device in a process of its own.
///
/// The process gets a signal when the thread that started it ends, so requests are best made from one long-lived thread.
pub struct Remote<'a> {
    launcher: Launcher<'a>,
    limits: Limits,
    memory: File,
    rows: Rows,
    board: Board,
    info: DeviceInfo,
    running: Option<Running>,
    programs: BTreeMap<u64, Kept>,
    next: u64,
    number: u32,
    /// The costs of processes that have ended.
    costs_before: Costs,
    costs: Costs,
    clocks: Option<ReadClocks<'a>>,
    /// The key that seals programs for the processes of this device.
    key: SealKey,
}

impl<'a> Remote<'a> {
    /// Starts the first process.
    ///
    /// # Errors
    /// If it has no device ([`DeviceError::Unavailable`]), or cannot be started.
    pub fn open(launcher: Launcher<'a>, limits: Limits, room: Room) -> Result<Self, DeviceError> {
        let unavailable = |error: std::io::Error| DeviceError::Unavailable {
            reason: format!("memory cannot be shared with a device process: {error}"),
        };
        let (shared, memory) = Shared::create(room.rows.max(2), room.vocab).map_err(unavailable)?;
        let shared = Arc::new(shared);
        let mut remote = Self {
            launcher,
            limits,
            memory,
            rows: Rows::new(&shared),
            board: Board::new(&shared),
            info: DeviceInfo::default(),
            running: None,
            programs: BTreeMap::new(),
            next: 0,
            number: 0,
            costs_before: Costs::default(),
            costs: Costs::default(),
            clocks: None,
            key: SealKey::new(rand::random()),
        };
        remote.info = remote.start()?;
        Ok(remote)
    }

    /// The id of the process, if there is one; for tests that kill it.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.running.as_ref().map(|running| running.process.id())
    }

    /// Sets how many other processes used the device before this one did.
    pub fn set_other_processes(&mut self, count: Option<u32>) {
        self.info.other_processes = count;
    }

    /// Sets how the parent reads the device's clocks: a busy process cannot answer.
    pub fn read_clocks(&mut self, clocks: ReadClocks<'a>) {
        self.clocks = Some(clocks);
    }

    /// Starts a process, with retries. If a process reports that it has no device, that is final.
    fn start(&mut self) -> Result<DeviceInfo, DeviceError> {
        let mut last = String::new();
        for attempt in 0..self.limits.starts.max(1) {
            if attempt > 0 {
                std::thread::sleep(START_AGAIN);
            }
            match self.start_once() {
                Ok(info) => return Ok(info),
                Err(error @ DeviceError::Unavailable { .. }) => return Err(error),
                Err(error) => last = error.to_string(),
            }
        }
        let reason = format!(
            "a device process was started {} times and did not come up: {last}; `amk doctor` says what is missing, and a process that still holds the GPU is seen in nvidia-smi",
            self.limits.starts.max(1)
        );
        Err(DeviceError::Unavailable { reason })
    }

    fn start_once(&mut self) -> Result<DeviceInfo, DeviceError> {
        let unstarted = |error: std::io::Error| DeviceError::Fault {
            reason: format!("a device process cannot be started: {error}"),
        };
        self.end();
        self.board.reset();
        let (process, socket) = Process::start((self.launcher)()).map_err(unstarted)?;
        self.running = Some(Running {
            process,
            channel: Channel::new(socket),
            loaded: BTreeSet::new(),
            compiled: Vec::new(),
            booted: false,
            kernel: None,
        });
        let sent = match &self.running {
            Some(running) => running.channel.send_file(&self.memory),
            None => Ok(()),
        };
        if let Err(error) = sent {
            return Err(self.lose(&error.into(), Duration::ZERO));
        }
        let work = Work { opens: true, ..Work::default() };
        self.ask(&Request::Open { key: self.key.to_bytes() }, &[], work)
    }

    /// Makes sure that a process runs and has these programs loaded.
    fn ready(&mut self, handles: &[Handle]) -> Result<(), DeviceError> {
        if self.running.is_none() {
            let info = self.start()?;
            // Another bandwidth would move the bounds in the middle of a search; another card would change everything.
            if info.name != self.info.name {
                let reason = format!("the device was {} and is {} now", self.info.name, info.name);
                self.end();
                return Err(DeviceError::Unavailable { reason });
            }
        }
        for handle in handles {
            self.load(handle.0)?;
        }
        Ok(())
    }

    /// Loads a program into the process, unless it is loaded.
    fn load(&mut self, handle: u64) -> Result<(), DeviceError> {
        let Some(kept) = self.programs.get(&handle) else {
            return Err(DeviceError::Fault { reason: "the program was released".into() });
        };
        let known = |running: &Running| running.loaded.contains(&handle);
        if self.running.as_ref().is_some_and(known) {
            return Ok(());
        }
        let ((bytes, seal), kernel) = (self.key.seal(&kept.program), kept.kernel);
        let compiled = self.running.as_ref().is_some_and(|r| r.compiled.contains(&kernel));
        let work = Work { compiles: u32::from(!compiled), ..Work::default() };
        self.ask::<()>(&Request::Prepare { handle, kernel, seal }, &bytes, work)?;
        if let Some(running) = &mut self.running {
            running.loaded.insert(handle);
            if !compiled {
                running.compiled.push(kernel);
            }
        }
        Ok(())
    }

    /// The work that the process does for a run of these programs.
    fn work(&self, handles: &[Handle], switches: usize, positions: usize) -> Work {
        let kernel = |handle: &Handle| self.programs.get(&handle.0).map(|kept| kept.kernel);
        let first = handles.first().and_then(kernel);
        let differ = handles.iter().any(|handle| kernel(handle) != first);
        let running = self.running.as_ref().and_then(|running| running.kernel);
        let launches = usize::from(running != first) + if differ { switches } else { 0 };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Work {
            boots: self.running.as_ref().is_none_or(|running| !running.booted),
            launches: count(launches),
            positions: count(positions),
            ..Work::default()
        }
    }

    /// Sends a request and receives its answer within the deadline. Anything else ends the process.
    fn ask<T: TryFrom<Reply>>(
        &mut self,
        request: &Request,
        bytes: &[u8],
        work: Work,
    ) -> Result<T, DeviceError> {
        self.number = self.number.wrapping_add(1);
        let (number, limit) = (self.number, self.limits.of(&work));
        let Some(running) = &mut self.running else {
            return Err(DeviceError::Fault { reason: "there is no device process".into() });
        };
        self.board.begin(number);
        let began = Instant::now();
        let channel = &mut running.channel;
        channel.set_deadline(began + limit);
        let answer = channel
            .send(number, request, bytes)
            .and_then(|()| channel.receive::<Answer>())
            .and_then(|(answered, answer, _)| match answered == number {
                true => Ok(answer),
                false => Err(Broken::Nonsense(format!("an answer to request {answered}"))),
            });
        match answer {
            Ok(Answer { result, lost, costs }) => {
                self.costs = costs;
                if result.is_err()
                    && let Some(running) = &mut self.running
                {
                    running.kernel = None; // a fault ends the kernel
                }
                if lost {
                    self.end();
                }
                T::try_from(result?).map_err(|_| self.confused())
            }
            Err(broken) => Err(self.lose(&broken, began.elapsed())),
        }
    }

    /// The error of an answer to another request.
    fn confused(&mut self) -> DeviceError {
        let what = "an answer to something that was not asked".to_owned();
        self.lose(&Broken::Nonsense(what), Duration::ZERO)
    }

    /// Ends a process and returns the error, with the process's last state and its exit.
    fn lose(&mut self, broken: &Broken, waited: Duration) -> DeviceError {
        let last = self.board.last();
        let status = match (&mut self.running, broken) {
            (Some(running), Broken::Closed | Broken::Socket(_)) => {
                running.process.wait(NAME_WITHIN)
            }
            (Some(_) | None, _) => None,
        };
        let gone = self.end();
        let kept = if gone { "" } else { "; the process was killed and has not ended yet" };
        match broken {
            Broken::Overrun => DeviceError::TimedOut {
                after_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
                status: format!("{last}; the device process was killed{kept}"),
            },
            Broken::Closed | Broken::Socket(_) => DeviceError::Fault {
                reason: format!(
                    "the device process ended ({}) while {last}{kept}",
                    describe(status)
                ),
            },
            Broken::Nonsense(what) => DeviceError::Fault {
                reason: format!(
                    "the device process sent {what}, while {last}; it was killed{kept}"
                ),
            },
        }
    }

    /// Kills the process. False if it has not ended within its time.
    fn end(&mut self) -> bool {
        self.costs_before += std::mem::take(&mut self.costs);
        let Some(mut running) = self.running.take() else { return true };
        running.process.kill(self.limits.leave)
    }

    /// The handle of a program, if the parent has it.
    fn handle_of(&self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) -> Option<u64> {
        let same = |kept: &Kept| Arc::ptr_eq(&kept.program, program) && kept.kernel == *kernel;
        self.programs.iter().find(|(_, kept)| same(kept)).map(|(&handle, _)| handle)
    }

    /// Records that the process has run this program.
    fn ran(&mut self, handle: Handle) {
        let kernel = self.programs.get(&handle.0).map(|kept| kept.kernel);
        if let Some(running) = &mut self.running {
            running.booted = true;
            running.kernel = kernel;
        }
    }
}

impl Device for Remote<'_> {
    fn describe(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn clocks(&mut self) -> Option<Clocks> {
        self.clocks.as_mut().and_then(|read| read())
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        let known = self.handle_of(program, kernel);
        let handle = known.unwrap_or(self.next);
        if known.is_none() {
            self.next += 1;
            self.programs.insert(handle, Kept { program: program.clone(), kernel: *kernel });
        }
        let loaded = self.ready(&[Handle(handle)]);
        if loaded.is_err() && known.is_none() {
            self.programs.remove(&handle);
        }
        loaded.map(|()| Handle(handle))
    }

    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        self.ready(&[program])?;
        let mut ran = Ran::default();
        for begin in (first..tokens.len()).step_by(self.rows.len()) {
            let end = tokens.len().min(begin + self.rows.len());
            let request = Request::Run {
                handle: program.0,
                tokens: tokens[..end].to_vec(),
                first: begin as u64,
            };
            let work = self.work(&[program], 0, end - begin);
            let chosen: Vec<u32> = self.ask(&request, &[], work)?;
            if chosen.len() != end - begin {
                return Err(self.confused());
            }
            ran.chosen.extend(chosen);
            self.ran(program);
            ran.logits.extend(self.rows.copy(end - begin));
        }
        Ok(ran)
    }

    fn hand_over(&mut self, from: Handle, to: Handle) -> Result<(), DeviceError> {
        self.ready(&[to])?;
        self.ask(&Request::HandOver { from: from.0, to: to.0 }, &[], Work::default())
    }

    fn buffers(
        &mut self,
        program: Handle,
        which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        // A restarted process has run nothing yet.
        let has = |running: &Running| running.loaded.contains(&program.0);
        if !self.running.as_ref().is_some_and(has) {
            return Ok(None);
        }
        let which = which.iter().map(|id| id.0).collect();
        self.ask(&Request::Buffers { handle: program.0, which }, &[], Work::default())
    }

    fn foresee(&mut self, kernels: &[KernelConfig]) {
        if self.running.is_some() {
            // Only a hint: a process that fails at it is replaced when one is needed.
            let request = Request::Foresee { kernels: kernels.to_vec() };
            let _ = self.ask::<()>(&request, &[], Work::default());
        }
    }

    fn costs(&self) -> Costs {
        self.costs_before + self.costs
    }

    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let handles = contenders.map(|contender| contender.handle());
        self.ready(&handles)?;
        let Plan { tokens, first, rounds, warmup } = *plan;
        let request = Request::Time {
            handles: handles.map(|handle| handle.0),
            tokens: tokens.to_vec(),
            first: first as u64,
            rounds: rounds as u64,
            warmup: warmup as u64,
        };
        let blocks = rounds.saturating_mul(ROUND.len()).saturating_add(warmup.saturating_mul(2));
        // Both programs may have to fill their caches; settling after a switch takes less than a block.
        let block = tokens.len().saturating_sub(first);
        let positions = blocks.saturating_mul(2 * block).saturating_add(2 * tokens.len());
        let work = self.work(&handles, blocks, positions);
        let (timed, last_chosen): (Vec<_>, _) = self.ask(&request, &[], work)?;
        if timed.len() != rounds {
            return Err(self.confused());
        }
        self.ran(handles[1]);
        let mut rows = self.rows.copy(2).into_iter();
        let mut last = || rows.next().unwrap_or_default();
        let last_logits = [last(), last()];
        Ok(Samples { rounds: timed, last_logits, last_chosen, ..Samples::default() })
    }

    fn release(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) {
        let Some(handle) = self.handle_of(program, kernel) else { return };
        self.programs.remove(&handle);
        if self.running.as_mut().is_some_and(|running| running.loaded.remove(&handle)) {
            let _ = self.ask::<()>(&Request::Release { handle }, &[], Work::default());
        }
    }
}

impl Drop for Remote<'_> {
    /// Closes the socket, so that the process ends its kernel; waits; kills a process that does not end.
    fn drop(&mut self) {
        if let Some(Running { mut process, channel, .. }) = self.running.take() {
            drop(channel);
            if process.wait(self.limits.leave).is_none() {
                process.kill(self.limits.leave);
            }
        }
    }
}
