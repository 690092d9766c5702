//! Faults on a real card, through all that a search uses: the parent's side, a device process, the driver, the kernel. In each case the
//! kernel leaves by itself or its process is killed, the report says who waited for what, and the next run gives the right bits.
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
use super::{Gpu, LOGITS_ROWS, SharedLookout, device_error};
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;

/// Set in a device process: what goes wrong in its second run, or `none`.
const FAULT: &str = "AMK_TEST_FAULT";

/// The test in which this binary is a device process.
const PARTS: &str = "device::hang_tests::every_fault_is_reported_and_the_next_run_is_right";

/// Small, and with every op: a run takes a millisecond.
const MODEL: &str = "toy-2l";

/// Longer than a trap and a kernel that does not leave, shorter than anybody's patience.
const ANSWER: Duration = Duration::from_secs(15);

fn context() -> Context {
    let place = PlaceArgs { target: None, device: DeviceChoice::Cuda, kv_capacity: Some(64) };
    Context::load(MODEL, &place).unwrap_or_else(|failure| panic!("{}", failure.message))
}

/// A case: what goes wrong, and what the report must say.
struct Case {
    fault: &'static str,
    says: &'static [&'static str],
    /// Whether the device process is another one afterwards.
    new_process: bool,
}

const CASES: &[Case] = &[
    Case {
        fault: "MissingSignal",
        says: &["trap counter_deadline", "worker", "task", "has", "needs"],
        new_process: false,
    },
    Case {
        fault: "CyclicWait",
        says: &["trap counter_deadline", "worker", "task", "has", "needs"],
        new_process: false,
    },
    Case {
        fault: "WrongThreshold",
        says: &["trap counter_deadline", "worker", "task", "has", "needs"],
        new_process: false,
    },
    Case {
        fault: "StuckLoader",
        // Who waits for the stuck worker's result may report before the worker itself does.
        says: &["_deadline: worker", "task"],
        new_process: false,
    },
    Case { fault: "LostCommand", says: &["no answer within", "poller alive"], new_process: false },
    Case { fault: "ScribbledRing", says: &["trap aborted"], new_process: false },
    Case { fault: "BadAddress", says: &["the kernel died"], new_process: true },
    // The kernel has given up and says so; the process that should pass it on does not.
    Case {
        fault: "asleep",
        says: &["no answer within", "trap counter_deadline", "worker", "needs", "was killed"],
        new_process: true,
    },
    Case { fault: "killed", says: &["ended (signal 9)", "running positions"], new_process: true },
];

/// A GPU that meets a fault in its second run from position zero.
struct Faulty<'a> {
    gpu: Gpu<'a>,
    fault: String,
    runs: u32,
}

impl Faulty<'_> {
    fn meet_fault(&mut self, handle: Handle, tokens: &[u32]) -> Result<(), DeviceError> {
        let program = match self.gpu.programs.get(&handle.0) {
            Some(prepared) => prepared.program.clone(),
            None => panic!("the program is loaded"),
        };
        let killed = self.fault == "killed";
        if killed {
            // While the kernel is at work.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                let (own, signal) = (rustix::process::getpid(), rustix::process::Signal::KILL);
                let _ = rustix::process::kill_process(own, signal);
            });
        }
        let named = Fault::ALL.iter().find(|fault| format!("{fault:?}") == self.fault);
        let fault = named.copied().unwrap_or(Fault::MissingSignal);
        let running = self.gpu.activate(handle, true)?;
        if !killed {
            running.spoil(&program, fault).map_err(device_error)?;
        }
        let mut decode = || running.decode(0, 0, tokens, 1, &[], false).map_err(device_error);
        let result = decode().map(drop);
        if killed {
            loop {
                let _ = decode();
            }
        }
        if self.fault == "asleep" {
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
    ) -> Result<(), DeviceError> {
        self.runs += 1;
        if self.runs == 2 && self.fault != "none" {
            let met = self.meet_fault(program, tokens);
            return self.gpu.recover(met);
        }
        self.gpu.run(program, tokens, first, logits)
    }

    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<Vec<[f64; 4]>, DeviceError> {
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

/// This binary as a device process.
fn be_a_device(fault: String) {
    let context = context();
    let lookout = SharedLookout::default();
    let watch = Kernel(lookout.clone());
    let open = |board: &Board| {
        let mut gpu = Gpu::open(&context, Some(board)).map_err(device_error)?;
        gpu.lookout = lookout;
        Ok(Faulty { gpu, fault, runs: 0 })
    };
    remote::serve(watch, open).unwrap_or_else(|error| panic!("{error}"));
}

/// A device whose first process meets this fault, and no other. With `sources` the first process compiles that kernel.
fn open<'a>(context: &Context, fault: &'a str, sources: Option<&'a Path>) -> Remote<'a> {
    let first = Cell::new(true);
    let launcher = move || {
        let first = first.replace(false);
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", PARTS, "--nocapture", "--test-threads=1"]);
        command.env(FAULT, if first { fault } else { "none" });
        if let Some(sources) = sources.filter(|_| first) {
            command.env("AMK_KERNEL_DIR", sources);
        }
        command
    };
    let limits = Limits { answer: ANSWER, ..Limits::default() };
    let room = Room { rows: LOGITS_ROWS as usize, vocab: context.graph().vocab as usize };
    Remote::open(Box::new(launcher), limits, room).unwrap_or_else(|error| panic!("{error}"))
}

fn program(context: &Context) -> Arc<Verified<Program>> {
    let (graph, target) = (context.graph(), &context.target);
    let valid = ir::schedule::validate(context.default_config(), graph, target).expect("legal");
    Arc::new(lower::lower(&valid, graph, target, context.lower_options()).expect("it lowers"))
}

const TOKENS: [u32; 24] =
    [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 44, 33, 77, 10, 87, 97, 84, 81, 65, 46, 11, 57, 68, 25];

type Rows = Vec<Vec<f32>>;

/// Waits for an error and for the run after it, prints both, and checks what was said.
fn fail_and_go_on(
    device: &mut Remote<'_>,
    handle: Handle,
    case: &Case,
    right: Option<&Rows>,
) -> Vec<String> {
    let process = device.process_id();
    let began = Instant::now();
    let error = device.run(handle, &TOKENS, 0).expect_err(case.fault).to_string();
    let reported = began.elapsed();
    let rows = device.run(handle, &TOKENS, 0).unwrap_or_else(|e| panic!("{}: {e}", case.fault));
    eprintln!(
        "{:14} reported after {:5} ms, next run done after {:5} ms in {} process: {error}",
        case.fault,
        reported.as_millis(),
        began.elapsed().as_millis(),
        if device.process_id() == process { "the same" } else { "another" },
    );
    let mut wrong = Vec::new();
    for part in case.says.iter().filter(|part| !error.contains(**part)) {
        wrong.push(format!("{}: {error:?} does not say {part:?}", case.fault));
    }
    if (device.process_id() != process) != case.new_process {
        wrong.push(format!(
            "{}: a new process was {}expected",
            case.fault,
            if case.new_process { "" } else { "not " }
        ));
    }
    if right.is_some_and(|right| *right != rows) {
        wrong.push(format!("{}: other bits", case.fault));
    }
    wrong
}

#[test]
fn every_fault_is_reported_and_the_next_run_is_right() {
    if let Ok(fault) = std::env::var(FAULT) {
        return be_a_device(fault);
    }
    if let Err(error) = vm_host::device_info() {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required: {error}");
        eprintln!("skipped: {error}");
        return;
    }
    let context = context();
    let (program, kernel) = (program(&context), context.default_config().kernel);
    let (mut right, mut wrong): (Option<Rows>, Vec<String>) = (None, Vec::new());
    for case in CASES {
        let mut device = open(&context, case.fault, None);
        let handle = device.prepare(&program, &kernel).unwrap_or_else(|e| panic!("{e}"));
        let before = device.run(handle, &TOKENS, 0).unwrap_or_else(|e| panic!("{e}"));
        assert!(before.iter().flatten().all(|value| value.is_finite()));
        let right = right.get_or_insert(before);
        wrong.extend(fail_and_go_on(&mut device, handle, case, Some(right)));
    }
    // An op that never ends: a kernel of its own, whose first process has no good run.
    let sources = endless_kernel();
    let mut device = open(&context, "none", Some(sources.path()));
    let handle = device.prepare(&program, &kernel).unwrap_or_else(|e| panic!("{e}"));
    let says = &["trap stalled", "worker", "task", "has", "needs"];
    let case = Case { fault: "endless op", says, new_process: true };
    wrong.extend(fail_and_go_on(&mut device, handle, &case, right.as_ref()));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The sources of a kernel whose `sample` never ends.
fn endless_kernel() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for source in vm_device::SOURCES {
        let path = folder.path().join(source.name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
        std::fs::write(path, endless(source)).expect("it is written");
    }
    folder
}

/// A source file, in which `sample` never ends if it is the one with the switch over ops.
fn endless(source: &vm_device::Source) -> String {
    const CASE: &str = "case AMK_OP_SAMPLE:\n";
    source.text.replace(CASE, &format!("{CASE}    for (;;) {{\n      __nanosleep(1000);\n    }}\n"))
}

#[test]
fn the_endless_kernel_is_another_kernel() {
    let changed = vm_device::SOURCES.iter().filter(|source| endless(source) != source.text);
    let names: Vec<&str> = changed.map(|source| source.name).collect();
    assert_eq!(names, ["cuda/dispatch.cuh"]);
}

#[test]
fn every_fault_of_tables_and_ring_has_a_case() {
    for fault in Fault::ALL {
        let name = format!("{fault:?}");
        assert!(CASES.iter().any(|case| case.fault == name), "{name}");
    }
}
