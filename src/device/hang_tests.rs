//! Faults on a real card, through the whole chain of a search: the parent, a device process, the driver, the kernel. In
//! each case the kernel exits by itself or its process is killed, the report names the worker and its wait, and the
//! next run gives the right bits.
//!
//! Without a device the test says `skipped`; with `AMK_REQUIRE_DEVICE=1` that is a failure. This binary is its own device process: it
//! starts itself again with [`FAULT`] set.

use std::cell::Cell;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use remote::{Board, Limits, Remote, Room, Served};
use search::{Costs, Device, DeviceError, DeviceInfo, Handle, Plan};
use vm_host::faults::Fault;

use super::child::Kernel;
use super::{Gpu, LOGITS_ROWS, device_error};
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::observe;

/// Set in a device process: its faults, in order, one in every second run. Empty: no fault.
const FAULT: &str = "AMK_TEST_FAULT";

/// The test in which this binary is a device process.
const PARTS: &str = "device::hang_tests::every_fault_is_reported_and_the_next_run_is_right";

/// Small, and with every op: a run takes a millisecond.
const MODEL: &str = "toy-2l";

/// How long a worker of the device waits here before it traps: a quarter of what a search allows, and hundreds of runs of the model.
const DEADLINE: Duration = Duration::from_millis(500);

/// Longer than the device process takes to give up by itself. Its longest case is a command that never completes: twice
/// the deadline, a tenth of a second for each position, and the end of the kernel.
const ANSWER: Duration = Duration::from_millis(6500);

/// From this position on, `sample` of the endless kernel does not end.
const ENDLESS_FROM: usize = 32;

fn context() -> Context {
    let place =
        PlaceArgs { device: DeviceChoice::Cuda, kv_capacity: Some(64), ..PlaceArgs::default() };
    Context::load(MODEL, &place).unwrap_or_else(|failure| panic!("{}", failure.message))
}

/// A case: the fault, and what the report must contain.
struct Case {
    fault: &'static str,
    says: &'static [&'static str],
}

/// The faults of the device processes, one list per process. Only the last case of a list ends its process; the run
/// after it is the first of the next process.
const LIVES: &[&[Case]] = &[
    &[
        Case { fault: "MissingSignal", says: COUNTER },
        Case { fault: "CyclicWait", says: COUNTER },
        Case { fault: "WrongThreshold", says: COUNTER },
        // A worker that waits for the stuck worker's result may report first.
        Case { fault: "StuckLoader", says: &["_deadline: worker", "task"] },
        Case { fault: "ScribbledRing", says: &["trap aborted"] },
        Case { fault: "LostCommand", says: &["no answer within", "poller alive"] },
        Case { fault: "BadAddress", says: &["the kernel died"] },
    ],
    &[Case { fault: ENDLESS, says: &["trap stalled", "worker", "task", "has", "needs"] }],
    // The kernel has given up and reports it; the process that should pass the report on does not.
    &[Case {
        fault: "asleep",
        says: &["no answer within", "trap counter_deadline", "worker", "needs", "was killed"],
    }],
    &[Case { fault: "killed", says: &["ended (signal 9)", "running positions"] }],
];

const COUNTER: &[&str] = &["trap counter_deadline", "worker", "task", "has", "needs"];

/// An op that never ends. The process of this case has a kernel of its own, and a run that is long enough.
const ENDLESS: &str = "endless op";

/// The faults of the `start`-th device process, in the format of [`FAULT`].
fn faults_of(start: usize) -> String {
    let names: Vec<&str> =
        LIVES.get(start).copied().unwrap_or_default().iter().map(|case| case.fault).collect();
    names.join(",")
}

/// The fault of the `run`-th run of a process, counted from one: none in the first, one in every second run after that.
fn fault_of(faults: &str, run: usize) -> Option<&str> {
    let mut names = faults.split(',').filter(|fault| !fault.is_empty());
    if run >= 2 && run.is_multiple_of(2) { names.nth(run / 2 - 1) } else { None }
}

/// A GPU with a fault in every second run.
struct Faulty<'a> {
    gpu: Gpu<'a>,
    faults: String,
    runs: usize,
}

impl Faulty<'_> {
    fn meet_fault(
        &mut self,
        fault: &str,
        handle: Handle,
        tokens: &[u32],
    ) -> Result<(), DeviceError> {
        let program = match self.gpu.programs.get(&handle.0) {
            Some(prepared) => prepared.program.clone(),
            None => panic!("the program is loaded"),
        };
        let killed = fault == "killed";
        if killed {
            // While the kernel runs.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                let (own, signal) = (rustix::process::getpid(), rustix::process::Signal::KILL);
                let _ = rustix::process::kill_process(own, signal);
            });
        }
        let named = Fault::ALL.iter().find(|known| format!("{known:?}") == fault);
        let spoiled = named.copied().unwrap_or(Fault::MissingSignal);
        let running = self.gpu.activate(handle, true)?;
        if !killed {
            running.spoil(&program, spoiled).map_err(device_error)?;
        }
        let mut decode = || running.decode(0, 0, tokens, 1, &[], false).map_err(device_error);
        let result = decode().map(drop);
        if killed {
            loop {
                let _ = decode();
            }
        }
        if fault == "asleep" {
            std::thread::sleep(ANSWER * 20);
        }
        result
    }
}

impl Served for Faulty<'_> {
    fn describe(&self) -> DeviceInfo {
        self.gpu.describe()
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.gpu.prepare(program, kernel)
    }

    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        self.runs += 1;
        // The endless kernel needs no injected fault.
        if let Some(fault) = fault_of(&self.faults, self.runs).filter(|fault| *fault != ENDLESS) {
            let fault = fault.to_owned();
            let met = self.meet_fault(&fault, program, tokens);
            return self.gpu.recover(met.map(|()| Vec::new()));
        }
        self.gpu.run(program, tokens, first, logits)
    }

    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        self.gpu.time(programs, plan, last)
    }

    fn costs(&self) -> Costs {
        self.gpu.costs()
    }

    fn release(&mut self, program: Handle) {
        self.gpu.release(program);
    }

    fn lost(&self) -> bool {
        self.gpu.lost()
    }
}

/// Runs this binary as a device process, with what `wrap` makes of its GPU.
pub(super) fn serve_gpu<'a, D: Served + 'a>(context: &'a Context, wrap: impl Fn(Gpu<'a>) -> D) {
    let monitor = observe::SharedMonitor::default();
    let page = observe::publisher(context, ("test", "cuda"), 0).expect("memory for a page");
    let watch = Kernel::new(monitor.clone(), page);
    let open = |board: &Board| {
        let mut gpu = Gpu::open(context, Some(board), true).map_err(device_error)?;
        gpu.monitor = monitor;
        Ok(wrap(gpu))
    };
    remote::serve(watch, open).unwrap_or_else(|error| panic!("{error}"));
}

fn be_a_device(faults: String) {
    serve_gpu(&context(), |mut gpu| {
        gpu.deadline = DEADLINE;
        Faulty { gpu, faults: faults.clone(), runs: 0 }
    });
}

/// A device whose processes have the faults above, and then none. The process of the endless op compiles the kernel in `endless`.
fn open<'a>(context: &Context, endless: &'a Path) -> Remote<'a> {
    let starts = Cell::new(0);
    let launcher = move || {
        let faults = faults_of(starts.replace(starts.get() + 1));
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", PARTS, "--nocapture", "--test-threads=1"]);
        if faults == ENDLESS {
            command.env("AMK_KERNEL_DIR", endless);
        }
        command.env(FAULT, faults);
        command
    };
    let position = Duration::from_millis(20);
    let limits = Limits { answer: ANSWER, position, ..Limits::default() };
    let room = Room { rows: LOGITS_ROWS as usize, vocab: context.graph().vocab as usize };
    Remote::open(Box::new(launcher), limits, room).unwrap_or_else(|error| panic!("{error}"))
}

fn program(context: &Context) -> Arc<Verified<Program>> {
    let (graph, target) = (context.graph(), &context.target);
    let valid = ir::schedule::validate(context.neutral_config(), graph, target).expect("legal");
    Arc::new(lower::lower(&valid, graph, target, context.lower_options()).expect("it lowers"))
}

const TOKENS: [u32; 24] =
    [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 44, 33, 77, 10, 87, 97, 84, 81, 65, 46, 11, 57, 68, 25];

type Rows = Vec<Vec<f32>>;

/// Enough tokens to reach the position where `sample` of the endless kernel does not end.
fn long_run() -> Vec<u32> {
    TOKENS.iter().cycle().take(ENDLESS_FROM + 8).copied().collect()
}

/// Waits for an error and for the run after it, prints both, and checks the report.
fn fail_and_go_on(
    device: &mut Remote<'_>,
    handle: Handle,
    (case, new_process): (&Case, bool),
    right: &Rows,
) -> Vec<String> {
    let process = device.process_id();
    let began = Instant::now();
    let tokens = if case.fault == ENDLESS { &long_run()[..] } else { &TOKENS };
    let error = device.run(handle, tokens, 0).expect_err(case.fault).to_string();
    let reported = began.elapsed();
    let rows =
        device.run(handle, &TOKENS, 0).unwrap_or_else(|e| panic!("{}: {e}", case.fault)).logits;
    let same = device.process_id() == process;
    eprintln!(
        "{:14} reported after {:5} ms, next run done after {:5} ms in {} process: {error}",
        case.fault,
        reported.as_millis(),
        began.elapsed().as_millis(),
        if same { "the same" } else { "another" },
    );
    let mut wrong = Vec::new();
    for part in case.says.iter().filter(|part| !error.contains(**part)) {
        wrong.push(format!("{}: {error:?} does not say {part:?}", case.fault));
    }
    if same == new_process {
        let expected = if new_process { "" } else { "not " };
        wrong.push(format!("{}: a new process was {expected}expected", case.fault));
    }
    if *right != rows {
        wrong.push(format!("{}: other bits", case.fault));
    }
    wrong
}

#[test]
fn every_fault_is_reported_and_the_next_run_is_right() {
    if let Ok(faults) = std::env::var(FAULT) {
        return be_a_device(faults);
    }
    if let Err(error) = vm_host::Card::default().info() {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required: {error}");
        eprintln!("skipped: {error}");
        return;
    }
    let context = context();
    let (program, kernel) = (program(&context), context.neutral_config().kernel);
    let sources = changed_kernel(endless);
    let mut device = open(&context, sources.path());
    let handle = device.prepare(&program, &kernel).unwrap_or_else(|e| panic!("{e}"));
    let right = device.run(handle, &TOKENS, 0).unwrap_or_else(|e| panic!("{e}")).logits;
    assert!(right.iter().flatten().all(|value| value.is_finite()));
    let mut wrong: Vec<String> = Vec::new();
    for life in LIVES {
        for (index, case) in life.iter().enumerate() {
            let last = index + 1 == life.len();
            wrong.extend(fail_and_go_on(&mut device, handle, (case, last), &right));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The sources of a kernel with a change, for `AMK_KERNEL_DIR`.
pub(super) fn changed_kernel(change: fn(&vm_device::Source) -> String) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for source in vm_device::SOURCES {
        let path = folder.path().join(source.name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
        std::fs::write(path, change(source)).expect("it is written");
    }
    folder
}

/// A source file; `sample` does not end in the file that has the switch over ops.
fn endless(source: &vm_device::Source) -> String {
    const CASE: &str = "case AMK_OP_SAMPLE:\n";
    let endless = format!(
        "    while (w.shared->step.position >= {ENDLESS_FROM}) {{\n      __nanosleep(1000);\n    }}\n"
    );
    source.text.replace(CASE, &format!("{CASE}{endless}"))
}

#[test]
fn the_endless_kernel_is_another_kernel_and_is_reached() {
    let changed = vm_device::SOURCES.iter().filter(|source| endless(source) != source.text);
    let names: Vec<&str> = changed.map(|source| source.name).collect();
    assert_eq!(names, ["cuda/dispatch.cuh"]);
    assert!(TOKENS.len() < ENDLESS_FROM && long_run().len() > ENDLESS_FROM);
}

#[test]
fn every_fault_of_tables_and_ring_has_a_case() {
    for fault in Fault::ALL {
        let name = format!("{fault:?}");
        assert!(LIVES.iter().flat_map(|life| life.iter()).any(|case| case.fault == name), "{name}");
    }
}

#[test]
fn a_fault_is_met_in_every_second_run_of_its_life() {
    let first = faults_of(0);
    assert_eq!(fault_of(&first, 1), None);
    assert_eq!(fault_of(&first, 2), Some("MissingSignal"));
    assert_eq!(fault_of(&first, 3), None);
    assert_eq!(fault_of(&first, 2 * LIVES[0].len()), Some("BadAddress"));
    assert_eq!(faults_of(1), ENDLESS);
    assert_eq!(faults_of(LIVES.len()), "");
    assert!((1..9).all(|run| fault_of("", run).is_none()));
}
