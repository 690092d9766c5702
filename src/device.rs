//! The GPU behind `search::Device`: the only place where the command line meets the driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::Target;
use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use search::{
    Clocks, Contender, Costs, Device, DeviceError, DeviceInfo, Handle, Plan, ROUND, Samples, Side,
};
use vm_device::Variant;
use vm_host::{BootOptions, HostError, Idle, Loaded, Resident};

use crate::context::Context;
use crate::failure::Failure;
use crate::report;

mod builds;

use builds::Builds;

/// Rows of logits set aside on the device: longer runs are read in pieces.
const LOGITS_ROWS: u32 = 160;
/// How long a worker may wait inside a step.
const DEADLINE: Duration = Duration::from_secs(2);
/// One for each side of a comparison.
const SESSIONS: u32 = 2;
/// Sweeps of the bandwidth measurement.
const BANDWIDTH_RUNS: usize = 9;
/// Untimed positions after a switch of program, before a timed block: the ring of the new program has to fill.
const SETTLE: usize = 2;

/// Opens the GPU for a model. The error says what is missing (exit code 3).
pub(crate) fn open_device(context: &Context) -> Result<Gpu<'_>, Failure> {
    let missing = |error: HostError| Failure::missing(format!("capability missing: {error}"));
    let info = vm_host::device_info().map_err(missing)?;
    vm_host::nvrtc_version().map_err(missing)?;
    if info.sms != context.target.sms {
        return Err(Failure::missing(format!(
            "capability missing: the target {} has {} multiprocessors, {} has {}; leave --target out to schedule for the GPU that is here",
            context.target.name, context.target.sms, info.name, info.sms
        )));
    }
    let bandwidth = vm_host::measure_bandwidth(BANDWIDTH_RUNS).map_err(missing)?;
    Ok(Gpu {
        context,
        info,
        bandwidth,
        machine: Machine::Absent,
        programs: BTreeMap::new(),
        next: 0,
        sequences: [const { None }; SESSIONS as usize],
        leading: None,
        costs: Costs::default(),
        builds: builds(&context.target.arch),
    })
}

/// Compilers that fill the cache; without a cache nothing could be handed over.
fn builds(arch: &str) -> Option<Builds<Variant>> {
    let (cache, arch) = (vm_host::default_cache()?, arch.to_owned());
    Some(Builds::new(move |variant: &Variant| {
        // Whoever needs it compiles it again and gets the error.
        let _ = vm_host::compile(variant, &arch, Some(&cache));
    }))
}

/// The live GPU as a target, if there is one that the kernel runs on.
pub(crate) fn live_target() -> Option<Target> {
    let info = vm_host::device_info().ok()?;
    if info.capability.0 != 9 {
        return None;
    }
    let name = if info.name.contains("H200") { "h200" } else { "h100" };
    let target = Target::by_name(name).ok()?;
    Some(Target {
        sms: info.sms,
        smem_optin_bytes: info.shared_bytes,
        l2_bytes: info.l2_bytes.into(),
        ..target
    })
}

/// Where the machine is in its life. `Absent` before the first program, and again if the kernel could not be ended.
enum Machine {
    Absent,
    Idle(Box<Idle>),
    Running(Box<Resident>),
}

/// A program that was prepared.
struct Prepared {
    program: Arc<Verified<Program>>,
    variant: Variant,
    loaded: Option<Loaded>,
}

/// A GPU that holds one model.
pub(crate) struct Gpu<'a> {
    context: &'a Context,
    info: vm_host::DeviceInfo,
    bandwidth: f64,
    machine: Machine,
    programs: BTreeMap<u64, Prepared>,
    next: u64,
    /// What is in each session's key/value cache: a program's, and the tokens that it was fed.
    sequences: [Option<(Handle, Vec<u32>)>; SESSIONS as usize],
    /// The program that candidates are timed against, whose sequence is to stay.
    leading: Option<Handle>,
    costs: Costs,
    builds: Option<Builds<Variant>>,
}

impl Gpu<'_> {
    fn variant(&self, kernel: &KernelConfig) -> Variant {
        vm_host::variant(kernel, self.context.graph())
    }

    /// The session that holds tokens which a program was fed, from position zero on.
    fn session_with(&self, handle: Handle, tokens: &[u32]) -> Option<u32> {
        let holds = |sequence: &Option<(Handle, Vec<u32>)>| {
            sequence.as_ref().is_some_and(|(of, fed)| *of == handle && fed.starts_with(tokens))
        };
        self.sequences.iter().position(holds).map(|session| session as u32)
    }

    /// A session for a new sequence of a program: its own, an empty one, or that of a program which does not lead. It is empty then.
    fn take_session(&mut self, handle: Handle) -> u32 {
        let of = |sequence: &Option<(Handle, Vec<u32>)>| sequence.as_ref().map(|(of, _)| *of);
        let find = |test: &dyn Fn(Option<Handle>) -> bool| {
            self.sequences.iter().position(|sequence| test(of(sequence)))
        };
        let own = find(&|of| of == Some(handle));
        let free = || find(&|of| of.is_none());
        let session = own.or_else(free).or_else(|| find(&|of| of != self.leading)).unwrap_or(0);
        self.sequences[session] = None;
        session as u32
    }

    /// Makes a prepared program current, launching or switching as needed. `fresh` loads it anew: its scratch memory is poisoned.
    fn activate(&mut self, handle: Handle, fresh: bool) -> Result<&mut Resident, DeviceError> {
        let Some(prepared) = self.programs.get_mut(&handle.0) else {
            return Err(DeviceError::Fault { reason: "the program was released".into() });
        };
        if !matches!(&self.machine, Machine::Running(running) if running.variant() == prepared.variant)
        {
            let began = Instant::now();
            let idle = match std::mem::replace(&mut self.machine, Machine::Absent) {
                Machine::Absent => boot(self.context, &prepared.program, &prepared.variant)?,
                Machine::Idle(idle) => *idle,
                Machine::Running(running) => running.stop().map_err(lost)?,
            };
            match idle.launch(prepared.variant, &prepared.program) {
                Ok(running) => {
                    prepared.loaded = Some(running.current());
                    self.machine = Machine::Running(Box::new(running));
                    self.costs.launches += 1;
                    self.costs.launch_s += began.elapsed().as_secs_f64();
                }
                Err(refused) => {
                    let (idle, error) = *refused;
                    self.machine = Machine::Idle(Box::new(idle));
                    return Err(device_error(error));
                }
            }
        }
        let Machine::Running(running) = &mut self.machine else {
            return Err(DeviceError::Unavailable { reason: "the kernel is not running".into() });
        };
        let loaded = match prepared.loaded.filter(|&loaded| !fresh && running.holds(loaded)) {
            Some(loaded) => loaded,
            None => {
                let began = Instant::now();
                let loaded = running.load(&prepared.program).map_err(device_error)?;
                self.costs.loads += 1;
                self.costs.load_s += began.elapsed().as_secs_f64();
                loaded
            }
        };
        prepared.loaded = Some(loaded);
        running.switch(loaded).map_err(device_error)?;
        Ok(running)
    }

    /// After a fault: ends the kernel, so that the next program starts on a new launch.
    fn recover<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if matches!(
            result,
            Err(DeviceError::Trapped { .. }
                | DeviceError::TimedOut { .. }
                | DeviceError::Fault { .. })
        ) && let Machine::Running(running) =
            std::mem::replace(&mut self.machine, Machine::Absent)
        {
            // A step that was broken off may have left anything.
            self.sequences = [const { None }; SESSIONS as usize];
            self.machine = Machine::Idle(Box::new(running.stop().map_err(lost)?));
        }
        result
    }

    /// Runs a prompt and generates on the device, the chosen token fed back there. With `keep`, the logits of every position.
    pub(crate) fn generate(
        &mut self,
        handle: Handle,
        prompt: &[u32],
        generate: u32,
        stop: &[u32],
        keep: bool,
    ) -> Result<(Vec<u32>, Vec<Vec<f32>>), DeviceError> {
        self.sequences = [const { None }; SESSIONS as usize];
        let running = self.activate(handle, true)?;
        let mut logits = Vec::new();
        let mut position = 0;
        // The prompt but its last token, in pieces whose logits can be kept.
        let (head, last) = prompt.split_at(prompt.len().saturating_sub(1));
        for piece in head.chunks(running.logits_rows() as usize) {
            let done = running.decode(0, position, piece, 1, &[], keep).map_err(device_error)?;
            if keep {
                logits.extend(running.logits(done.steps).map_err(device_error)?);
            }
            position += done.steps;
        }
        let mut tokens = Vec::new();
        let mut next = last.to_vec();
        while (tokens.len() as u32) < generate {
            let rows = running.logits_rows();
            let count = (generate - tokens.len() as u32).min(rows);
            let done =
                running.decode(0, position, &next, count, stop, keep).map_err(device_error)?;
            if keep {
                logits.extend(running.logits(done.steps).map_err(device_error)?);
            }
            position += done.steps;
            tokens.extend(&done.tokens);
            next = tokens.last().copied().into_iter().collect();
            if done.stopped {
                break;
            }
        }
        Ok((tokens, logits))
    }

    fn run_tokens(
        &mut self,
        handle: Handle,
        tokens: &[u32],
        first: usize,
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        let session = match first {
            0 => self.take_session(handle),
            _ => self.session_with(handle, &tokens[..first]).ok_or_else(|| {
                let reason = format!("no sequence of {first} positions to go on with");
                DeviceError::Fault { reason }
            })?,
        };
        let mut costs = Costs::default();
        let running = self.activate(handle, first == 0)?;
        let rows = running.logits_rows();
        if first == 0 {
            costs.load_s += timed(|| running.poison_session(session))?;
        }
        let mut logits = Vec::with_capacity(tokens.len() - first);
        let mut position = first as u32;
        for piece in tokens[first..].chunks(rows as usize) {
            costs.load_s += timed(|| running.poison_logits(piece.len() as u32))?;
            let done = running.decode(session, position, piece, 1, &[], true);
            let done = done.map_err(device_error)?;
            costs.run_s += done.host_us / 1e6;
            costs.read_s += timed(|| {
                logits.extend(running.logits(done.steps)?);
                Ok(())
            })?;
            position += done.steps;
        }
        self.costs = self.costs + costs;
        self.sequences[session as usize] = Some((handle, tokens.to_vec()));
        Ok(logits)
    }

    /// The session in which a contender is timed, its cache filled with the plan's tokens.
    fn filled(&mut self, handle: Handle, plan: &Plan<'_>) -> Result<u32, DeviceError> {
        if let Some(session) = self.session_with(handle, plan.tokens) {
            return Ok(session);
        }
        let session = self.take_session(handle);
        let running = self.activate(handle, false)?;
        running.decode(session, 0, plan.tokens, 1, &[], false).map_err(device_error)?;
        self.sequences[session as usize] = Some((handle, plan.tokens.to_vec()));
        Ok(session)
    }

    /// One timed block: microseconds a token by this process's clock, ring round trip included.
    fn block(
        &mut self,
        (handle, session): (Handle, u32),
        plan: &Plan<'_>,
        switched: bool,
    ) -> Result<f64, DeviceError> {
        let first = plan.first as u32;
        let running = self.activate(handle, false)?;
        let timed = &plan.tokens[plan.first..];
        if switched {
            let settle = &timed[..timed.len().min(SETTLE)];
            running.decode(session, first, settle, 1, &[], false).map_err(device_error)?;
        }
        let done = running.decode(session, first, timed, 1, &[], false).map_err(device_error)?;
        Ok(done.host_us / f64::from(done.steps.max(1)))
    }

    fn time_pair(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let handles = contenders.map(|c| c.handle());
        self.leading = Some(handles[0]);
        let mut current = None;
        let mut sides = [(handles[0], 0), (handles[1], 0)];
        for side in &mut sides {
            side.1 = self.filled(side.0, plan)?;
            for _ in 0..plan.warmup {
                self.block(*side, plan, false)?;
                current = Some(side.0);
            }
        }
        let mut samples = Samples::default();
        for _ in 0..plan.rounds {
            let mut round = [0.0; 4];
            for (slot, side) in round.iter_mut().zip(ROUND) {
                let index = usize::from(side == Side::Candidate);
                *slot = self.block(sides[index], plan, current != Some(sides[index].0))?;
                current = Some(sides[index].0);
                if samples.rounds.len() + 1 == plan.rounds
                    && let Machine::Running(running) = &mut self.machine
                {
                    let rows = running.logits(1).map_err(device_error)?;
                    samples.last_logits[index] = rows.into_iter().next().unwrap_or_default();
                }
            }
            samples.rounds.push(round);
        }
        Ok(samples)
    }
}

/// Seconds that a call takes.
fn timed(call: impl FnOnce() -> Result<(), HostError>) -> Result<f64, DeviceError> {
    let began = Instant::now();
    call().map_err(device_error)?;
    Ok(began.elapsed().as_secs_f64())
}

fn boot(
    context: &Context,
    program: &Verified<Program>,
    variant: &Variant,
) -> Result<Idle, DeviceError> {
    let options = BootOptions {
        sessions: SESSIONS,
        logits_rows: LOGITS_ROWS,
        deadline: DEADLINE,
        ..BootOptions::default()
    };
    let idle = Idle::boot(context.graph(), &*context.model.weights, program, variant, options)
        .map_err(device_error)?;
    let load = idle.load_report();
    report::say(&format!(
        "weights: {:.2} GB from {} to the device in {:.2} s ({:.2} GB/s){}",
        load.bytes as f64 / 1e9,
        load.source,
        load.seconds,
        load.bytes as f64 / 1e9 / load.seconds,
        load.fallback.as_ref().map(|why| format!("; {why}")).unwrap_or_default()
    ));
    Ok(idle)
}

/// The kernel did not leave: only a new process gets the device back.
fn lost(error: HostError) -> DeviceError {
    DeviceError::Unavailable {
        reason: format!("the kernel did not leave ({error}); run the command again"),
    }
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
        HostError::Compile { log } => DeviceError::Compile { log },
        HostError::OutOfMemory { needed, free } => DeviceError::OutOfMemory { needed, free },
        HostError::Left => DeviceError::Fault { reason: error.to_string() },
        HostError::Died { .. }
        | HostError::NoDriver
        | HostError::NoDevice
        | HostError::NoNvrtc { .. }
        | HostError::Architecture { .. }
        | HostError::AbiMismatch { .. }
        | HostError::NotCoResident { .. }
        | HostError::Weights { .. } => DeviceError::Unavailable { reason: error.to_string() },
        HostError::Driver { .. } | HostError::Request(_) => {
            DeviceError::Fault { reason: error.to_string() }
        }
    }
}

impl Device for Gpu<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.info.name.clone(),
            bandwidth: Some(self.bandwidth),
            cache_bytes: u64::from(self.info.l2_bytes),
            conditions: vec![
                format!("uuid {}", self.info.uuid),
                format!("driver CUDA {}.{}", self.info.driver / 1000, self.info.driver % 1000 / 10),
                format!("{} multiprocessors", self.info.sms),
            ],
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
        if let Some(builds) = &self.builds {
            builds.settle(&variant);
        }
        vm_host::compile(&variant, &self.context.target.arch, vm_host::default_cache().as_deref())
            .map_err(device_error)?;
        self.costs.compiles += 1;
        self.costs.compile_s += began.elapsed().as_secs_f64();
        let handle = self.next;
        self.next += 1;
        self.programs.insert(handle, Prepared { program: program.clone(), variant, loaded: None });
        Ok(Handle(handle))
    }

    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        let result = self.run_tokens(program, tokens, first);
        self.recover(result)
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

    fn clocks(&mut self) -> Option<Clocks> {
        let clocks = vm_host::card_clocks(&self.info.uuid)?;
        let throttled = clocks.throttled.into_iter().map(str::to_owned).collect();
        Some(Clocks { sm_mhz: clocks.sm_mhz, memory_mhz: clocks.memory_mhz, throttled })
    }

    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let result = self.time_pair(contenders, plan);
        self.recover(result)
    }

    fn release(&mut self, program: Handle) {
        self.programs.remove(&program.0);
        for sequence in &mut self.sequences {
            sequence.take_if(|(of, _)| *of == program);
        }
    }
}

/// One thing that driving a GPU needs.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    pub(crate) found: String,
    pub(crate) remedy: Option<String>,
}

/// What driving a GPU needs, and whether it is here. Where all of it is, the bandwidth is measured too.
pub(crate) fn checks() -> Vec<Check> {
    let info = vm_host::device_info();
    let nvrtc = vm_host::nvrtc_version();
    let driver = !matches!(info, Err(HostError::NoDriver));
    let hopper = info.as_ref().is_ok_and(|info| info.capability.0 == 9);
    let mut checks = vec![
        Check {
            name: "driver",
            ok: driver,
            found: match &info {
                Ok(info) => format!("CUDA {}.{}", info.driver / 1000, info.driver % 1000 / 10),
                Err(error) => error.to_string(),
            },
            remedy: Some("install the NVIDIA driver; in a container, run with --gpus all".into()),
        },
        Check {
            name: "nvrtc",
            ok: nvrtc.is_ok(),
            found: match &nvrtc {
                Ok((major, minor)) => format!("{major}.{minor}"),
                Err(error) => error.to_string(),
            },
            remedy: Some("install the CUDA toolkit, or: pip install nvidia-cuda-nvrtc, and point AMK_NVRTC at its lib folder".into()),
        },
        Check {
            name: "gpu",
            ok: hopper,
            found: match &info {
                Ok(info) => format!(
                    "{}, {} multiprocessors, {:.1} of {:.1} GiB free, compute capability {}.{}",
                    info.name,
                    info.sms,
                    gib(info.free_bytes),
                    gib(info.memory_bytes),
                    info.capability.0,
                    info.capability.1
                ),
                Err(_) => "none".into(),
            },
            remedy: Some("the megakernel needs compute capability 9.0 (H100, H200)".into()),
        },
    ];
    if hopper && nvrtc.is_ok() {
        let bandwidth = vm_host::measure_bandwidth(BANDWIDTH_RUNS);
        checks.push(Check {
            name: "bandwidth",
            ok: bandwidth.is_ok(),
            found: match &bandwidth {
                Ok(rate) => format!(
                    "{:.3} TB/s read by bulk copies (median of {BANDWIDTH_RUNS})",
                    rate / 1e12
                ),
                Err(error) => error.to_string(),
            },
            remedy: None,
        });
    }
    checks
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}
