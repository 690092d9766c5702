//! The GPU: the only place where the command line uses the driver. Searches drive it in a separate process
//! (`device/child.rs`); commands that only run a program once drive it here.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ir::BufferId;
use ir::program::{Buffer, Program, Together, Verified};
use ir::schedule::KernelConfig;
use remote::{Board, Phase, Served};
use schemars::JsonSchema;
use search::{Costs, DeviceError, DeviceInfo, Handle, Plan, ROUND, Side};
use serde::Serialize;
use telemetry::Publisher;
use vm_device::{Architecture, Variant};
use vm_host::{HostError, Idle, KvPool, Link, Loaded, Monitor, Resident, RingTap, Start};

use crate::context::Context;
use crate::observe::SharedMonitor;

mod between;
mod builds;
mod child;
mod chunks;
pub(crate) mod hardware;
// Builds with assertions only, as the faults that it plants.
#[cfg(all(test, debug_assertions))]
mod hang_tests;
mod observed;
mod open;
pub(crate) mod probe;
#[cfg(all(test, debug_assertions))]
mod race_tests;
mod sequences;
mod sharing;
mod slots;
mod weights;

pub(crate) use between::Compiler;
pub(crate) use child::{clocks, serve};

use between::Preemption;
use builds::Builds;
use probe::look_at;
use slots::Slot;
use weights::{Arrival, boot};

/// Rows of logits allocated on the device: longer runs are read in pieces.
const LOGITS_ROWS: u32 = 160;
/// Slots of a search, one for each side of a comparison.
const SLOTS: usize = 2;
/// Sweeps of the bandwidth measurement.
const BANDWIDTH_RUNS: usize = 9;
/// Untimed positions after a switch of program, before a timed block: the ring of the new program has to fill.
const SETTLE: usize = 2;

/// The bandwidth of all GPUs together: each reads its own part of the weights.
fn measured_bandwidth(context: &Context) -> Result<f64, HostError> {
    let of = |&card: &u32| vm_host::Card::new(card).measure_bandwidth(BANDWIDTH_RUNS);
    context.cards.iter().map(of).sum()
}

/// Background compilers that fill the cache; none without a cache, which passes on their results.
fn builds(arch: &str) -> Option<Builds<Variant>> {
    let (cache, arch) = (vm_host::default_cache()?, arch.to_owned());
    Some(Builds::new(move |variant: &Variant| {
        // On an error the caller that needs the kernel compiles it again and gets the error.
        let _ = vm_host::compile(variant, &arch, Some(&cache));
    }))
}

/// The state of the machine. `Absent` before the first program, and again if the kernel could not be stopped.
enum Machine {
    Absent,
    Idle(Box<Idle>),
    Running(Box<Resident>),
}

struct Prepared {
    program: Arc<Verified<Program>>,
    variant: Variant,
    /// Set if sessions may share it.
    together: Option<Arc<Together>>,
    loaded: Option<Loaded>,
}

/// A GPU that holds one model.
pub(crate) struct Gpu<'a> {
    context: &'a Context,
    info: vm_host::DeviceInfo,
    /// Measured, if it was requested.
    bandwidth: Option<f64>,
    machine: Machine,
    programs: BTreeMap<u64, Prepared>,
    next: u64,
    /// The contents of each slot's key/value caches: the program, and the tokens that it was fed.
    sequences: [Option<(Handle, Vec<u32>)>; SLOTS],
    /// Sessions that the machine is booted for.
    sessions: u32,
    /// The pages that sessions allocate from.
    kv_pool: KvPool,
    /// The program that candidates are timed against; its sequence is kept.
    leading: Option<Handle>,
    costs: Costs,
    builds: Option<Builds<Variant>>,
    /// The status board, in a process of its own.
    board: Option<Board>,
    /// The monitor handle of the machine, for the observing thread.
    monitor: SharedMonitor,
    /// A callback for all that goes through the ring.
    tap: Option<RingTap>,
    /// The telemetry page for transfers to the device.
    page: Option<Publisher>,
    /// A kernel did not exit, or took the context with it: only a new process gets the device back.
    lost: bool,
    deadline: Duration,
    /// How the weights are loaded, and the times of their arrival.
    arrival: Arrival,
    /// The least number of tokens for which a prompt is run in chunks.
    chunks_from: Option<usize>,
    /// Compiles the kernels for that.
    compiling_prompts: Option<JoinHandle<Result<(), HostError>>>,
    /// The most sessions that a command runs at once.
    seqs: u32,
    /// Whether kernels have masks.
    masks: bool,
    /// Passes of the resident kernel's program that were not taken yet.
    passes: u64,
    /// What the last launch took.
    launch_time: Duration,
    /// Ends the work of a search early, on the machine of a server.
    preemption: Preemption,
    /// Whether a search has used sessions since they were given to requests.
    searched: bool,
}

impl<'a> Gpu<'a> {
    fn open(context: &'a Context, board: Option<&Board>, measure: bool) -> Result<Self, HostError> {
        let info = look_at(&context.target, context.cards[0])?;
        Ok(Self {
            context,
            info,
            bandwidth: measure.then(|| measured_bandwidth(context)).transpose()?,
            machine: Machine::Absent,
            programs: BTreeMap::new(),
            next: 0,
            sequences: [const { None }; SLOTS],
            sessions: SLOTS as u32 * context.batch,
            kv_pool: KvPool::Full,
            leading: None,
            costs: Costs::default(),
            builds: builds(&context.target.arch),
            board: board.cloned(),
            monitor: SharedMonitor::default(),
            tap: None,
            page: None,
            lost: false,
            deadline: vm_host::deadline(),
            arrival: Arrival::default(),
            chunks_from: None,
            compiling_prompts: None,
            seqs: context.batch,
            masks: false,
            passes: 0,
            launch_time: Duration::ZERO,
            preemption: Preemption::default(),
            searched: false,
        })
    }

    fn enter(&self, phase: Phase) {
        if let Some(board) = &self.board {
            board.enter(phase);
        }
    }

    fn set_monitor(&self, monitor: Option<Monitor>) {
        *self.monitor.lock().unwrap_or_else(PoisonError::into_inner) = monitor;
    }

    /// Stops the kernel. If it does not exit, the device is lost to this process.
    fn stop(&mut self, running: Resident) -> Result<Idle, DeviceError> {
        self.enter(Phase::Stopping);
        let stopped = running.stop().map_err(|error| {
            self.lost = true;
            let reason = format!("the kernel did not leave ({error})");
            DeviceError::Fault { reason }
        });
        self.set_monitor(None); // the old kernel's monitor does not describe the next one
        stopped
    }
}

impl Gpu<'_> {
    fn variant(&self, kernel: &KernelConfig) -> Variant {
        Variant { masks: self.masks, ..self.context.variant(kernel, self.seqs) }
    }

    /// The slot that holds tokens which a program was fed, from position zero on.
    fn slot_with(&self, handle: Handle, tokens: &[u32]) -> Option<Slot> {
        let holds = |sequence: &Option<(Handle, Vec<u32>)>| {
            sequence.as_ref().is_some_and(|(of, fed)| *of == handle && fed.starts_with(tokens))
        };
        self.sequences.iter().position(holds).map(|index| self.slot(index))
    }

    fn slot(&self, index: usize) -> Slot {
        Slot { index: index as u32, seqs: self.context.batch }
    }

    /// A slot for a new sequence of a program: its own, an empty one, or that of a program other than the leading one. It is emptied.
    fn take_slot(&mut self, handle: Handle) -> Slot {
        let of = |sequence: &Option<(Handle, Vec<u32>)>| sequence.as_ref().map(|(of, _)| *of);
        let find = |test: &dyn Fn(Option<Handle>) -> bool| {
            self.sequences.iter().position(|sequence| test(of(sequence)))
        };
        let own = find(&|of| of == Some(handle));
        let free = || find(&|of| of.is_none());
        let index = own.or_else(free).or_else(|| find(&|of| of != self.leading)).unwrap_or(0);
        self.sequences[index] = None;
        self.searched = true;
        self.slot(index)
    }

    /// Makes a prepared program current, launching or switching as needed. `fresh` loads it anew: its scratch memory is poisoned.
    fn activate(&mut self, handle: Handle, fresh: bool) -> Result<&mut Resident, DeviceError> {
        let prepared = self.prepared(handle)?;
        let (variant, program) = (prepared.variant, prepared.program.clone());
        let (had, together) = (prepared.loaded, prepared.together.clone());
        let mut had = had.filter(|&loaded| !fresh && self.holds(loaded));
        if !matches!(&self.machine, Machine::Running(running) if running.variant() == variant) {
            let start = match (had, &together) {
                (Some(loaded), _) => Start::Held(loaded),
                (None, Some(together)) => Start::Together(together),
                (None, None) => Start::Alone(&program),
            };
            had = Some(self.launch(variant, &program, start)?);
        }
        let Machine::Running(running) = &mut self.machine else {
            return Err(DeviceError::Unavailable { reason: "the kernel is not running".into() });
        };
        let loaded = match had {
            Some(loaded) => loaded,
            None => {
                let began = Instant::now();
                let loaded = match &together {
                    Some(together) => running.load_together(together),
                    None => running.load(&program),
                };
                let loaded = loaded.map_err(device_error)?;
                self.page.iter().for_each(|page| page.edit(|edit| edit.head().loads += 1));
                self.costs.loads += 1;
                self.costs.load_s += began.elapsed().as_secs_f64();
                loaded
            }
        };
        if let Some(prepared) = self.programs.get_mut(&handle.0) {
            prepared.loaded = Some(loaded);
        }
        running.switch(loaded).map_err(device_error)?;
        Ok(running)
    }

    /// Whether a program is still where it was loaded.
    fn holds(&mut self, loaded: Loaded) -> bool {
        match &mut self.machine {
            Machine::Absent => false,
            Machine::Idle(idle) => idle.holds(loaded),
            Machine::Running(running) => running.holds(loaded),
        }
    }

    /// The machine with no kernel resident; boots it for a program if needed.
    fn idle(
        &mut self,
        program: &Verified<Program>,
        variant: &Variant,
    ) -> Result<Idle, DeviceError> {
        match std::mem::replace(&mut self.machine, Machine::Absent) {
            Machine::Absent => {
                self.enter(Phase::Booting);
                let options = (self.deadline, self.sessions, self.kv_pool);
                let mut idle = boot(self.context, program, variant, options, &mut self.arrival)?;
                idle.show_ring(self.tap.clone());
                Ok(idle)
            }
            Machine::Idle(idle) => Ok(*idle),
            Machine::Running(running) => self.stop(*running),
        }
    }

    /// The program of a handle and the kernel that runs it.
    fn prepared(&self, handle: Handle) -> Result<&Prepared, DeviceError> {
        let released = || DeviceError::Fault { reason: "the program was released".into() };
        self.programs.get(&handle.0).ok_or_else(released)
    }

    /// Launches a kernel with a program; boots the machine if needed.
    fn launch(
        &mut self,
        variant: Variant,
        program: &Verified<Program>,
        start: Start<'_>,
    ) -> Result<Loaded, DeviceError> {
        let began = Instant::now();
        let booted = matches!(self.machine, Machine::Absent);
        let idle = self.idle(program, &variant)?;
        self.enter(Phase::Launching);
        match idle.launch_with(variant, start) {
            Ok(mut running) => {
                let (loaded, monitor) = (running.current(), running.monitor());
                self.set_monitor(Some(monitor));
                self.machine = Machine::Running(Box::new(running));
                self.arrival.resident();
                self.launched(program, booted);
                self.costs.launches += 1;
                self.launch_time = began.elapsed();
                self.costs.launch_s += self.launch_time.as_secs_f64();
                Ok(loaded)
            }
            Err(refused) => {
                let (idle, error) = *refused;
                self.machine = Machine::Idle(Box::new(idle));
                Err(device_error(error))
            }
        }
    }

    /// After a fault: stops the kernel, so that the next program starts on a new launch. Returns the fault.
    fn recover<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if matches!(
            result,
            Err(DeviceError::Trapped { .. }
                | DeviceError::TimedOut { .. }
                | DeviceError::Fault { .. })
        ) {
            self.machine = match std::mem::replace(&mut self.machine, Machine::Absent) {
                Machine::Running(running) => {
                    self.sequences = [const { None }; SLOTS];
                    let stopped = self.stop(*running);
                    stopped.map_or(Machine::Absent, |idle| Machine::Idle(Box::new(idle)))
                }
                machine @ (Machine::Absent | Machine::Idle(_)) => machine,
            };
            // An aborted step may have left anything in the caches.
            if let Machine::Idle(idle) = &mut self.machine {
                idle.forget_pages();
            }
        }
        result
    }

    fn run_tokens(
        &mut self,
        handle: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        let slot = match first {
            0 => self.take_slot(handle),
            _ => self.slot_with(handle, &tokens[..first]).ok_or_else(|| {
                let reason = format!("no sequence of {first} positions to go on with");
                DeviceError::Fault { reason }
            })?,
        };
        let mut costs = Costs::default();
        let (board, vocab) = (self.board.clone(), self.context.graph().vocab as usize);
        let enter = |phase| board.iter().for_each(|board| board.enter(phase));
        enter(Phase::Loading);
        let preemption = self.preemption.clone();
        preemption.check()?;
        let running = self.activate(handle, first == 0)?;
        let rows = preemption.piece(running.logits_rows() as usize);
        if first == 0 {
            costs.load_s += timed(|| slot.poison(running))?;
        }
        let mut position = first as u32;
        let mut chosen = Vec::with_capacity(tokens.len() - first);
        let places = logits.chunks_mut(rows * vocab);
        for (piece, place) in tokens[first..].chunks(rows).zip(places) {
            preemption.check()?;
            costs.load_s += timed(|| slot.poison_logits(running, piece.len() as u32))?;
            enter(Phase::Running);
            let fed = slot.feed(running, position, piece, true).map_err(device_error)?;
            costs.run_s += fed.host_us / 1e6;
            enter(Phase::Reading);
            costs.read_s += timed(|| slot.logits(running, place, vocab))?;
            position += fed.chosen.len() as u32;
            chosen.extend(fed.chosen);
        }
        self.costs += costs;
        self.sequences[slot.index as usize] = Some((handle, tokens.to_vec()));
        Ok(chosen)
    }

    /// The slot in which a contender is timed, its caches filled with the plan's tokens.
    fn filled(&mut self, handle: Handle, plan: &Plan<'_>) -> Result<Slot, DeviceError> {
        if let Some(slot) = self.slot_with(handle, plan.tokens) {
            return Ok(slot);
        }
        let slot = self.take_slot(handle);
        let preemption = self.preemption.clone();
        let running = self.activate(handle, false)?;
        let mut position = 0;
        for piece in plan.tokens.chunks(preemption.piece(plan.tokens.len())) {
            preemption.check()?;
            slot.feed(running, position, piece, false).map_err(device_error)?;
            position += piece.len() as u32;
        }
        self.sequences[slot.index as usize] = Some((handle, plan.tokens.to_vec()));
        Ok(slot)
    }

    /// One timed block: microseconds per step by this process's clock, ring round trip included.
    fn block(
        &mut self,
        (handle, slot): (Handle, Slot),
        plan: &Plan<'_>,
        switched: bool,
    ) -> Result<(f64, u32), DeviceError> {
        self.preemption.check()?;
        let first = plan.first as u32;
        let running = self.activate(handle, false)?;
        let timed = &plan.tokens[plan.first..];
        if switched {
            let settle = &timed[..timed.len().min(SETTLE)];
            slot.feed(running, first, settle, false).map_err(device_error)?;
        }
        let fed = slot.feed(running, first, timed, false).map_err(device_error)?;
        Ok((fed.us_per_step(), fed.chosen.last().copied().unwrap_or_default()))
    }

    fn time_pair(
        &mut self,
        handles: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        self.leading = Some(handles[0]);
        let mut current = None;
        let mut sides = handles.map(|handle| (handle, self.slot(0)));
        for side in &mut sides {
            side.1 = self.filled(side.0, plan)?;
            for _ in 0..plan.warmup {
                self.block(*side, plan, false)?;
                current = Some(side.0);
            }
        }
        let (mut rounds, mut chosen) = (Vec::with_capacity(plan.rounds), [0; 2]);
        let vocab = self.context.graph().vocab as usize;
        for _ in 0..plan.rounds {
            let mut round = [0.0; 4];
            for (buffer, side) in round.iter_mut().zip(ROUND) {
                let index = usize::from(side == Side::Candidate);
                (*buffer, chosen[index]) =
                    self.block(sides[index], plan, current != Some(sides[index].0))?;
                current = Some(sides[index].0);
                if rounds.len() + 1 == plan.rounds
                    && let Machine::Running(running) = &mut self.machine
                {
                    let place = &mut last[index * vocab..(index + 1) * vocab];
                    sides[index].1.last_logits(running, place).map_err(device_error)?;
                }
            }
            rounds.push(round);
        }
        Ok((rounds, chosen))
    }
}

fn timed(call: impl FnOnce() -> Result<(), HostError>) -> Result<f64, DeviceError> {
    let began = Instant::now();
    call().map_err(device_error)?;
    Ok(began.elapsed().as_secs_f64())
}

/// The words of an activation buffer as read by tasks: without tags.
fn words_of(buffer: &Buffer, arena: &[u32]) -> Vec<f32> {
    let first = buffer.offset as usize / size_of::<u32>();
    let words = buffer.arena_bytes() as usize / size_of::<u32>();
    let tag = if buffer.kind == abi::BufferKind::FlagInData { (1 << abi::TAG_BITS) - 1 } else { 0 };
    let held = arena.get(first..first + words).unwrap_or_default();
    held.iter().map(|&word| f32::from_bits(word & !tag)).collect()
}

/// Why a device cannot be used, without a preface.
pub(crate) fn reason(error: &DeviceError) -> String {
    if let DeviceError::Unavailable { reason } = error {
        return reason.clone();
    }
    error.to_string()
}

fn device_error(error: HostError) -> DeviceError {
    match error {
        HostError::Trapped(status) => DeviceError::Trapped {
            trap: abi::Trap::new(status.trap).map_or("unknown", abi::Trap::name).to_owned(),
            worker: status.worker,
            task: status.task,
            counter: status.object,
            have: status.have,
            need: status.need,
        },
        HostError::TimedOut { waited, alive } => DeviceError::TimedOut {
            after_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            status: format!("poller {}", if alive { "alive" } else { "silent" }),
        },
        HostError::Compile(log) => DeviceError::Compile { log },
        HostError::OutOfMemory { needed, free } => DeviceError::OutOfMemory { needed, free },
        HostError::NoDriver
        | HostError::NoDevice
        | HostError::NoSuchDevice { .. }
        | HostError::NoPeerAccess { .. }
        | HostError::NoNvrtc(_)
        | HostError::Architecture { .. }
        | HostError::AbiMismatch { .. }
        | HostError::NotCoResident { .. }
        | HostError::Weights { .. } => DeviceError::Unavailable { reason: error.to_string() },
        // A process that lost its context cannot stop its machine either, which is detected next.
        HostError::Left | HostError::Died(_) | HostError::Driver { .. } | HostError::Request(_) => {
            DeviceError::Fault { reason: error.to_string() }
        }
    }
}

impl Served for Gpu<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.info.name.clone(),
            bandwidth: self.bandwidth,
            cache_bytes: u64::from(self.info.l2_bytes) * self.context.cards.len() as u64,
            uuid: Some(self.info.uuid.clone()),
            sms: Some(self.info.sms),
            cuda: Some(format!("{}.{}", self.info.driver / 1000, self.info.driver % 1000 / 10)),
            other_processes: None,
        }
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        let variant = self.variant(kernel);
        let same = |p: &Prepared| Arc::ptr_eq(&p.program, program) && p.variant == variant;
        let known = self.programs.iter().find(|(_, prepared)| same(prepared));
        if let Some((&handle, _)) = known {
            return Ok(Handle(handle));
        }
        let began = Instant::now();
        self.enter(Phase::Compiling);
        if let Some(builds) = &self.builds {
            builds.settle(&variant);
        }
        vm_host::compile(&variant, &self.context.target.arch, vm_host::default_cache().as_deref())
            .map_err(device_error)?;
        self.costs.compiles += 1;
        self.costs.compile_s += began.elapsed().as_secs_f64();
        let together = self.prove(program)?.map(Arc::new);
        let handle = self.next;
        self.next += 1;
        let prepared = Prepared { program: program.clone(), variant, together, loaded: None };
        self.programs.insert(handle, prepared);
        Ok(Handle(handle))
    }

    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        let result = self.run_tokens(program, tokens, first, logits);
        self.recover(result)
    }

    fn hand_over(&mut self, from: Handle, to: Handle) -> Result<(), DeviceError> {
        let known = self.programs.contains_key(&to.0);
        let held = self.sequences.iter_mut().flatten().find(|(of, _)| *of == from && known);
        let Some(sequence) = held else {
            let reason = "there is no sequence to hand over".to_owned();
            return Err(DeviceError::Fault { reason });
        };
        sequence.0 = to;
        Ok(())
    }

    fn buffers(
        &mut self,
        program: Handle,
        which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        let Some(prepared) = self.programs.get(&program.0) else { return Ok(None) };
        // The arena is the first device's.
        if !prepared.program.each_has_whole(which) {
            return Ok(None);
        }
        let (Machine::Running(running), Some(loaded)) = (&mut self.machine, prepared.loaded) else {
            return Ok(None);
        };
        if !running.holds(loaded) {
            return Ok(None);
        }
        let arena = running.arena(loaded).map_err(device_error)?;
        let buffers = which.iter().filter_map(|id| prepared.program.buffers.get(id.index()));
        Ok(Some(buffers.map(|buffer| words_of(buffer, &arena)).collect()))
    }

    fn foresee(&mut self, kernels: &[KernelConfig]) {
        let variants: Vec<Variant> = kernels.iter().map(|kernel| self.variant(kernel)).collect();
        if let Some(builds) = &mut self.builds {
            builds.ask(variants.into_iter());
        }
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        let result = self.time_pair(programs, plan, last);
        self.recover(result)
    }

    fn lost(&self) -> bool {
        self.lost
    }

    fn release(&mut self, program: Handle) {
        self.programs.remove(&program.0);
        for sequence in &mut self.sequences {
            sequence.take_if(|(of, _)| *of == program);
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    /// Whether what works here works without it.
    pub(crate) optional: bool,
    pub(crate) found: String,
    remedy: Option<String>,
}

impl Check {
    pub(crate) fn new(name: &'static str, ok: bool, found: impl Into<String>) -> Self {
        Self { name, ok, optional: false, found: found.into(), remedy: None }
    }

    pub(crate) fn or(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    pub(crate) fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// The remedy, if there is one.
    pub(crate) fn to_do(&self) -> Option<&str> {
        self.remedy.as_deref().filter(|_| !self.ok)
    }
}

/// The requirements for driving a GPU, and whether they are met. If all are, also measures the bandwidth.
pub(crate) fn checks() -> Vec<Check> {
    let info = vm_host::Card::default().info();
    let nvrtc = vm_host::nvrtc_version();
    let fits = info.as_ref().is_ok_and(|info| Architecture::of(info.capability).is_some());
    let no_driver = matches!(info, Err(HostError::NoDriver));
    let driver = match &info {
        Ok(info) => format!("CUDA {}.{}", info.driver / 1000, info.driver % 1000 / 10),
        Err(HostError::NoDriver) => "none (libcuda.so.1)".to_owned(),
        Err(error) => error.to_string(),
    };
    let file = || vm_host::nvrtc_file().map(|file| file.display().to_string()).unwrap_or_default();
    let compiler = match &nvrtc {
        Ok((major, minor)) => format!("{major}.{minor} ({})", file()),
        Err(HostError::NoNvrtc(places)) => format!("none (libnvrtc.so.13 in {places})"),
        Err(error) => error.to_string(),
    };
    let gpu = info.as_ref().map_or_else(|_| "none".to_owned(), in_words);
    let mut checks = vec![
        Check::new("driver", !no_driver, driver)
            .or("install the NVIDIA driver; in a container, run with --gpus all"),
        Check::new("nvrtc", nvrtc.is_ok(), compiler).or(
            "install the CUDA toolkit, or: pip install nvidia-cuda-nvrtc in the active virtual environment (elsewhere, point AMK_NVRTC at its lib folder)",
        ),
        Check::new("gpu", fits, gpu).or(format!("there are kernels for {}", Architecture::all())),
    ];
    // Without a driver the one thing to say is that there is none.
    for check in checks.iter_mut().skip(1).filter(|_| no_driver) {
        check.optional = true;
    }
    if fits && nvrtc.is_ok() {
        let bandwidth = vm_host::Card::default().measure_bandwidth(BANDWIDTH_RUNS);
        let found = match &bandwidth {
            Ok(rate) => {
                format!("{:.3} TB/s read by bulk copies (median of {BANDWIDTH_RUNS})", rate / 1e12)
            }
            Err(error) => error.to_string(),
        };
        checks.push(Check::new("bandwidth", bandwidth.is_ok(), found));
        checks.extend(info.ok().and_then(|info| vm_host::gpu_state(&info.uuid)).map(state));
        checks.extend(links());
    }
    checks
}

/// What the driver tells of the GPU. Held down right after the bandwidth was measured, it would be so in every measurement.
fn state(gpu: abi::GpuState) -> Check {
    let well = gpu.throttled.is_empty() && gpu.ecc_errors.unwrap_or(0) == 0;
    Check::new("state", well, gpu.line()).or(
        "nvidia-smi -q says more: a power cap or heat slows every measurement down, memory errors ask for a reset of the GPU",
    )
}

/// The links between the GPUs, if there are several.
fn links() -> Option<Check> {
    let in_words = |link: &Link| {
        let [a, b] = link.cards;
        let hop = link.hop_us.map(|us| format!("{us:.2} us from a kernel to a kernel"));
        format!("GPUs {a} and {b}: {}", hop.unwrap_or_else(|| "no peer access".to_owned()))
    };
    let (ok, found) = match vm_host::links() {
        Ok(links) if links.is_empty() => return None,
        Ok(links) => {
            let found: Vec<String> = links.iter().map(in_words).collect();
            (links.iter().all(|link| link.hop_us.is_some()), found.join("; "))
        }
        Err(error) => (false, error.to_string()),
    };
    let remedy =
        "one step on several GPUs needs peer access between all of them (--gpus 0,1 names some)";
    Some(Check::new("links", ok, found).or(remedy))
}

fn in_words(info: &vm_host::DeviceInfo) -> String {
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    let free = vm_host::Card::default().free_memory();
    let free = free.map_or_else(|_| "unknown".to_owned(), |free| format!("{:.1}", gib(free)));
    let (major, minor) = info.capability;
    format!(
        "{}, {} multiprocessors, {free} of {:.1} GiB free, compute capability {major}.{minor}",
        info.name,
        info.sms,
        gib(info.memory_bytes)
    )
}
