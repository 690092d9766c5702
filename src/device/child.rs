//! The GPU in a process of its own: how a search starts the process, and what it does.

use std::process::Command;
use std::sync::PoisonError;

use abi::Activity;
use remote::{Board, Limits, Phase, Remote, Room, Watch};
use search::{Clocks, DeviceError};
use telemetry::{Publisher, now_ns};
use vm_host::HostError;

use super::{Gpu, LOGITS_ROWS, device_error, sharing};
use crate::child_process::this_program;
use crate::cli::{DeviceChildArgs, DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::observe::{self, KernelWatch, SharedMonitor};

/// Starts a process that drives the GPU for a model. This process does not touch the device, so that the child is alone
/// on it. With `shared` other processes may use it, and with `named` the child sees only this GPU. The error names what
/// is missing, or the other processes (exit code 3).
pub(crate) fn open_process<'a>(
    context: &'a Context,
    info: &vm_host::DeviceInfo,
    shared: bool,
    named: bool,
) -> Result<Remote<'a>, Failure> {
    let other_processes =
        if named { sharing::count(&info.uuid, shared)? } else { context.count_others(shared)? };
    let visible = if named { vm_host::visible_name(&info.uuid) } else { None };
    let graph = context.graph();
    let room = Room { rows: LOGITS_ROWS as usize, vocab: graph.vocab as usize };
    let limits = Limits::for_weights(graph.weight_bytes() as u64);
    let opened = Remote::open(Box::new(move || command(context, visible.as_deref())), limits, room);
    let mut remote = opened.map_err(|error| {
        Failure::missing(format!("capability missing: {}", super::reason(&error)))
    })?;
    remote.set_other_processes(other_processes);
    let uuid = info.uuid.clone();
    remote.read_clocks(Box::new(move || clocks(&uuid)));
    Ok(remote)
}

/// The current clocks of the card. NVML works here too: it needs no context.
pub(crate) fn clocks(uuid: &str) -> Option<Clocks> {
    let state = vm_host::gpu_state(uuid)?;
    Some(Clocks {
        sm_mhz: state.sm_mhz,
        memory_mhz: state.memory_mhz,
        throttled: state.held_down().map(str::to_owned).collect(),
        power_w: state.power_w,
        temperature_c: state.temperature_c,
    })
}

/// The command `amk device-child ..`, which runs [`serve`]. A GPU that is made visible alone is number 0 there.
fn command(context: &Context, visible: Option<&str>) -> Command {
    let mut command = this_program();
    command.args(["device-child", "--model", &context.name, "--kv-capacity"]);
    command.args([context.kv_capacity.to_string(), "--batch".into(), context.batch.to_string()]);
    command.args(["--kv-dtype", context.graph().kv_dtype.name()]);
    command.args(crate::log::arguments());
    if context.target.devices > 1 {
        command.args(["--target", &context.target.name]);
    } else if let Some(target) = &context.named_target {
        command.args(["--target", target]);
    }
    if context.cards.len() > 1 {
        let cards: Vec<String> = context.cards.iter().map(ToString::to_string).collect();
        command.args(["--gpus", &cards.join(",")]);
    }
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    command
}

/// Drives the GPU for the parent that started this process.
pub(crate) fn serve(args: &DeviceChildArgs) -> Outcome {
    let place = PlaceArgs {
        target: args.target.clone(),
        device: DeviceChoice::Cuda,
        kv_capacity: args.kv_capacity,
        gpus: args.gpus,
        kv: args.kv,
        ..PlaceArgs::default()
    };
    let context = Context::open(&args.model, &place)?.for_steps_of(args.batch)?;
    let monitor = SharedMonitor::default();
    let page = observe::publisher(&context, ("search", "cuda"), 0)?;
    let watch = Kernel::new(monitor.clone(), page.clone());
    let open = |board: &Board| {
        let mut gpu = Gpu::open(&context, Some(board), true).map_err(unopened)?;
        let _ = gpu.observed(&monitor, &page); // the parent reads the card's state with each measurement
        Ok(gpu)
    };
    remote::serve(watch, open).map_err(|error| Failure::usage(error.to_string()))?;
    Ok(Exit::Yes)
}

/// The error of a device that cannot be opened. A transient reason is tried again; a missing requirement is final.
fn unopened(error: HostError) -> DeviceError {
    if matches!(error, HostError::Driver { .. } | HostError::OutOfMemory { .. }) {
        return device_error(error);
    }
    DeviceError::Unavailable { reason: error.to_string() }
}

/// The kernel, as observed by the watching thread.
pub(super) struct Kernel {
    monitor: SharedMonitor,
    page: Publisher,
    watch: KernelWatch,
    activity: Activity,
}

impl Kernel {
    pub(super) fn new(monitor: SharedMonitor, page: Publisher) -> Self {
        Self { monitor, page, watch: KernelWatch::default(), activity: Activity::Idle }
    }
}

/// A phase as an activity of the telemetry page.
fn activity(phase: Option<Phase>) -> Activity {
    match phase {
        Some(Phase::Waiting) | None => Activity::Idle,
        Some(Phase::Running | Phase::Timing) => Activity::Running,
        Some(Phase::Reading | Phase::Stopping) => Activity::Between,
        Some(
            Phase::Starting
            | Phase::Opening
            | Phase::Unsealing
            | Phase::Compiling
            | Phase::Booting
            | Phase::Launching
            | Phase::Loading,
        ) => Activity::Loading,
    }
}

impl Watch for Kernel {
    fn look(&mut self, board: &Board) {
        let activity = activity(board.last().phase);
        let changed = std::mem::replace(&mut self.activity, activity) != activity;
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        let suspect = self.page.edit(|edit| {
            let now = now_ns();
            if changed {
                observe::enter_at(edit.head(), activity, now);
            }
            monitor.as_ref().and_then(|monitor| self.watch.look(monitor, edit, now))
        });
        if let Some(monitor) = &*monitor {
            board.kernel(monitor.heartbeat(), monitor.status().as_ref());
        }
        board.suspect(suspect.as_ref());
    }

    fn leave(&mut self) {
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(monitor) = &*monitor {
            monitor.abort();
        }
    }
}
