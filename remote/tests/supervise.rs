//! Searches on a device process that works, hangs, dies or sends nonsense. This binary is its own device process: it
//! starts itself again with [`MODE`] set.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::{Status, Trap};
use ir::Target;
use ir::program::{Program, Verified};
use ir::schedule::{Evict, KernelConfig, Knob};
use model::Model;
use remote::{Board, Limits, Phase, Remote, Room, Served, Watch};
use search::{
    Budget, Costs, Device, DeviceError, DeviceInfo, Expected, Gate, Handle, Outcome, Plan, Search,
    SearchError, Settings, Step, Timing, Trial,
};
use tests::scripted::{Behaviour, ScriptedDevice};

/// Set in the device process: its behaviour, such as `hang 5` to hang in its fifth run.
const MODE: &str = "AMK_TEST_DEVICE";

/// A file that exists once the device has misbehaved, which it does only once.
const ONCE: &str = "AMK_TEST_ONCE";

/// Set in a parent that is to be killed: the file to which it writes the id of its device process.
const PARENT: &str = "AMK_TEST_PARENT";

/// The test in which this binary takes its other roles.
const PARTS: &str = "a_search_on_a_device_process_is_a_search";

const KV_CAPACITY: u32 = 24;
const TRIALS: u64 = 9;

/// Limits that are never reached by tests that do not wait for one, however busy the machine is.
fn patient() -> Limits {
    Limits { leave: Duration::from_secs(30), ..Limits::default() }
}

/// Limits for scripted work, which takes no time: only the answer is waited for.
fn impatient() -> Limits {
    Limits {
        answer: Duration::from_secs(4),
        boot: Duration::ZERO,
        launch: Duration::ZERO,
        position: Duration::ZERO,
        ..patient()
    }
}

fn expected(model: &Model) -> Expected {
    Expected::new(&model.graph, &*model.weights, KV_CAPACITY, 1, Some(144)).unwrap()
}

/// With weights evicted first a program is a third faster. Everything else is noise.
fn script(_: &Program, kernel: &KernelConfig) -> Behaviour {
    let us = if kernel.evict == Evict::First { 66.0 } else { 100.0 };
    Behaviour::takes(us).with_noise(0.01)
}

fn scripted(model: &Model) -> ScriptedDevice<'static> {
    ScriptedDevice::new(expected(model).logits, 1, script)
}

fn search(device: &mut dyn Device) -> Result<Vec<Trial>, SearchError> {
    let model = model::preset("toy").unwrap();
    let target = Target::by_name("h200").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected(&model));
    let knobs = [Knob::SyncQkv, Knob::PipelineStages, Knob::KernelPollSleepNs, Knob::KernelEvict];
    let values = |knob| (knob, ir::schedule::legal_values(knob, graph, &target));
    let settings = Settings {
        seed: 5,
        budget: Budget::Trials(TRIALS),
        explore: TRIALS / 3,
        min_gain: 0.01,
        default: ir::schedule::neutral_config(graph, &target),
        space: knobs.into_iter().map(values).collect(),
        timing: Timing { rounds: 12, warmup: 1 },
        finalists: 0,
        simplest: None,
    };
    let mut search = Search::new(gate, Some(device), settings);
    let mut trials = Vec::new();
    while let Step::Trial(trial) = search.step(Duration::ZERO)? {
        trials.push(*trial);
    }
    Ok(trials)
}

fn again(mode: &str, once: Option<&Path>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", PARTS, "--nocapture", "--test-threads=1"]).env(MODE, mode);
    command.env_remove(PARENT).env_remove(ONCE);
    if let Some(once) = once {
        command.env(ONCE, once);
    }
    command
}

fn room() -> Room {
    let model = model::preset("toy").unwrap();
    Room { rows: 16, vocab: model.graph.vocab as usize }
}

fn open<'a>(
    mode: &'a str,
    once: Option<&'a Path>,
    limits: Limits,
) -> Result<Remote<'a>, DeviceError> {
    Remote::open(Box::new(move || again(mode, once)), limits, room())
}

/// A path where no file exists yet.
fn marker(name: &str) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{name}-{}-{count}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// The status that the kernel reports before the device hangs.
const SAID: Status = Status {
    trap: Trap::CounterDeadline as u32,
    worker: 17,
    task: 41,
    opcode: 2,
    object: 6,
    have: 131,
    need: 132,
    epoch: 3,
    waited_ns: 2_000_000_000,
    left: 0,
    reserved: [0; 4],
    valid: 1,
};

/// The encoding of "done, not lost, no costs".
const DONE: [u8; 46] = {
    let mut bytes = [0; 46];
    bytes[1] = 1;
    bytes
};

/// The device process of these tests: a scripted device that misbehaves when its mode says so.
struct Misbehaving {
    device: ScriptedDevice<'static>,
    board: Board,
    socket: UnixStream,
    mode: String,
    /// Runs until it misbehaves.
    runs_left: Option<u32>,
    lost: bool,
}

fn forever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

impl Misbehaving {
    fn misbehave(&mut self) -> Result<(), DeviceError> {
        let mut raw = |bytes: &[u8]| self.socket.write_all(bytes).unwrap();
        let head = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
        let magic = u32::from_le_bytes(*b"AMKR");
        match self.mode.as_str() {
            "hang" => {
                self.board.kernel(1, Some(&SAID));
                forever()
            }
            "die" => {
                let _ = rustix::process::kill_process(
                    rustix::process::getpid(),
                    rustix::process::Signal::KILL,
                );
                forever()
            }
            "panic" => panic!("a bug"),
            "babble" => raw(b"Segmentation fault (core dumped)"),
            "oversize" => raw(&head([magic, 1, u32::MAX, 0])),
            "half" => raw(&head([magic, 1, 64, 0])[..10]),
            "empty" => raw(&head([magic, 1, 0, 0])),
            "stale" => raw(&[head([magic, 1, DONE.len() as u32, 0]), DONE.to_vec()].concat()),
            "lose" => {
                self.lost = true;
                return Err(DeviceError::Trapped {
                    trap: "stalled".into(),
                    worker: 1,
                    task: 2,
                    counter: 3,
                    have: 4,
                    need: 5,
                });
            }
            mode => panic!("no such mode: {mode}"),
        }
        forever()
    }

    /// Whether to misbehave in this run.
    fn due(&mut self) -> bool {
        let Some(left) = &mut self.runs_left else { return false };
        *left = left.saturating_sub(1);
        *left == 0 && first_time()
    }
}

/// Whether no process has misbehaved before this one.
fn first_time() -> bool {
    std::env::var_os(ONCE)
        .is_none_or(|path| OpenOptions::new().write(true).create_new(true).open(path).is_ok())
}

impl Served for Misbehaving {
    fn describe(&self) -> DeviceInfo {
        self.device.describe()
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.device.prepare(program, kernel)
    }

    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        if self.due() {
            self.misbehave()?;
        }
        let ran = self.device.run(program, tokens, first)?;
        logits.copy_from_slice(&ran.logits.concat());
        Ok(ran.chosen)
    }

    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        let samples = self.device.time_programs(programs, plan)?;
        last.copy_from_slice(&samples.last_logits.concat());
        Ok((samples.rounds, samples.last_chosen))
    }

    fn costs(&self) -> Costs {
        self.device.costs()
    }

    fn release(&mut self, _program: Handle) {}

    fn lost(&self) -> bool {
        self.lost
    }
}

struct NoKernel;

impl Watch for NoKernel {
    fn look(&mut self, _board: &Board) {}

    fn leave(&mut self) {}
}

/// Runs this binary as a device process.
fn be_a_device(mode: &str) {
    let (mode, at) = mode.split_once(' ').map_or((mode, None), |(m, n)| (m, n.parse().ok()));
    match mode {
        "exit" if first_time() => std::process::exit(7),
        "mute" if first_time() => forever(),
        _ => {}
    }
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    remote::serve(NoKernel, |board| {
        if mode == "no-driver" {
            return Err(DeviceError::Unavailable { reason: "no CUDA driver".into() });
        }
        board.enter(Phase::Booting);
        let model = model::preset("toy").unwrap();
        let (device, board, mode) = (scripted(&model), board.clone(), mode.to_owned());
        Ok(Misbehaving { device, board, socket, mode, runs_left: at, lost: false })
    })
    .unwrap();
}

/// Runs this binary as a search that is killed while its device hangs.
fn be_a_parent(path: &Path) {
    let mut remote = open("hang 1", None, patient()).unwrap();
    std::fs::write(path, remote.process_id().unwrap().to_string()).unwrap();
    let _ = search(&mut remote);
}

#[test]
fn a_search_on_a_device_process_is_a_search() {
    if let Some(path) = std::env::var_os(PARENT) {
        return be_a_parent(Path::new(&path));
    }
    if let Ok(mode) = std::env::var(MODE) {
        return be_a_device(&mode);
    }
    let model = model::preset("toy").unwrap();
    let mut here = scripted(&model);
    let mut there = open("normal", None, patient()).unwrap();
    assert_eq!(there.describe(), here.describe());
    let one = search(&mut here).unwrap();
    let other = search(&mut there).unwrap();
    assert!(one.iter().any(|trial| trial.outcome == Outcome::Kept));
    assert_eq!(rows(&one), rows(&other), "the same ledger, to the last digit");
}

/// The rows of a ledger. The search has no clock, so they contain no times.
fn rows(trials: &[Trial]) -> Vec<String> {
    trials.iter().map(|trial| serde_json::to_string(trial).unwrap()).collect()
}

/// Searches on a device that fails once: one trial ends with `outcome` and these words; the others are unaffected.
fn one_bad_trial(mode: &str, outcome: Outcome, says: &[&str]) {
    let once = marker("once");
    let limits = if outcome == Outcome::TimedOut { impatient() } else { patient() };
    let mut device = open(mode, Some(&once), limits).unwrap();
    let first = device.process_id();
    let began = Instant::now();
    let trials = search(&mut device).unwrap();
    assert!(once.exists(), "{mode}: it never misbehaved");
    assert_ne!(device.process_id(), first, "{mode}: another process");
    let bad: Vec<&Trial> = trials
        .iter()
        .filter(|trial| {
            let ends = [Outcome::TimedOut, Outcome::Fault, Outcome::Trapped];
            ends.contains(&trial.outcome)
        })
        .collect();
    assert_eq!(bad.len(), 1, "{mode}: {:?}", rows(&trials));
    assert_eq!(bad[0].outcome, outcome, "{mode}: {}", bad[0].why);
    eprintln!("{mode}: {} ({} ms in all)", bad[0].why, began.elapsed().as_millis());
    for part in says {
        assert!(bad[0].why.contains(part), "{mode}: {} does not say {part}", bad[0].why);
    }
    assert_eq!(trials.len() as u64, TRIALS);
    let next = &trials[bad[0].trial as usize + 1..];
    assert!(!next.is_empty(), "{mode}: nothing came after it");
    assert!(next.iter().all(|trial| trial.verdict.correct), "{mode}: {:?}", rows(next));
    let _ = std::fs::remove_file(&once);
}

const NAMED: &str = "worker 17, task 41 (matvec), counter 6 has 131 and needs 132";

#[test]
fn a_process_that_hangs_is_killed_and_the_report_names_who_waits() {
    one_bad_trial(
        "hang 5",
        Outcome::TimedOut,
        &["no answer within", "running positions", "counter_deadline", NAMED, "was killed"],
    );
}

#[test]
fn a_process_that_dies_is_replaced() {
    one_bad_trial("die 4", Outcome::Fault, &["ended (signal 9)", "running positions"]);
    one_bad_trial("panic 4", Outcome::Fault, &["ended (exit code"]);
}

#[test]
fn a_process_that_talks_nonsense_is_killed() {
    one_bad_trial("babble 3", Outcome::Fault, &["what is no message", "killed"]);
    one_bad_trial("oversize 3", Outcome::Fault, &["too long"]);
    one_bad_trial("empty 3", Outcome::Fault, &["does not decode"]);
    one_bad_trial("stale 3", Outcome::Fault, &["an answer to request 1"]);
}

#[test]
fn half_a_message_is_no_answer() {
    one_bad_trial("half 3", Outcome::TimedOut, &["no answer within", "running positions"]);
}

#[test]
fn a_device_that_is_lost_keeps_its_report_and_gets_a_new_process() {
    one_bad_trial("lose 4", Outcome::Trapped, &["trap stalled: worker 1, task 2, counter 3"]);
}

#[test]
fn a_process_that_does_not_come_up_is_started_again_and_then_given_up() {
    let began = Instant::now();
    for (mode, says) in [("exit", "exit code 7"), ("mute", "no answer within")] {
        let limits = Limits {
            open: Duration::ZERO,
            answer: Duration::from_millis(500),
            starts: 2,
            ..impatient()
        };
        let error = open(mode, None, limits).err().unwrap();
        assert!(matches!(error, DeviceError::Unavailable { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("started 2 times") && said.contains(says), "{said}");
        // One failed start is not final.
        let once = marker("start");
        let limits = Limits { open: Duration::ZERO, starts: 2, ..impatient() };
        assert!(open(mode, Some(&once), limits).is_ok(), "{mode}");
        let _ = std::fs::remove_file(once);
    }
    assert!(began.elapsed() < Duration::from_secs(30));
    let error = open("no-driver", None, patient()).err().unwrap();
    assert_eq!(error, DeviceError::Unavailable { reason: "no CUDA driver".into() });
}

#[test]
fn a_process_that_is_killed_between_requests_is_replaced() {
    let mut device = open("normal", None, patient()).unwrap();
    let model = model::preset("toy").unwrap();
    let target = Target::by_name("h200").unwrap();
    let config = ir::schedule::neutral_config(&model.graph, &target);
    let valid = ir::schedule::validate(config, &model.graph, &target).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let program = Arc::new(lower::lower(&valid, &model.graph, &target, options).unwrap());
    let expected = expected(&model);
    let handle = device.prepare(&program, &config.kernel).unwrap();
    let before = device.run(handle, &expected.tokens, 0).unwrap();
    assert_eq!(before.logits, expected.logits[..before.logits.len()]);
    assert!(before.logits.len() > room().rows, "in pieces");
    let first = device.process_id().unwrap();
    kill(first);
    assert!(matches!(device.run(handle, &expected.tokens, 0), Err(DeviceError::Fault { .. })));
    // The same handle: the program is loaded again.
    assert_eq!(device.run(handle, &expected.tokens, 0).unwrap(), before);
    let second = device.process_id().unwrap();
    assert_ne!(first, second);
    assert_eq!(device.costs().loads, 2);
    device.release(&program, &config.kernel);
    assert!(matches!(device.run(handle, &expected.tokens, 0), Err(DeviceError::Fault { .. })));
    let began = Instant::now();
    drop(device);
    assert!(began.elapsed() < patient().leave / 2, "it left when the parent hung up");
    assert!(gone(second), "a search that ends takes its device process with it");
}

#[test]
fn a_device_process_ends_with_its_parent() {
    let path = marker("parent");
    let mut parent = again("hang 1", None)
        .env(PARENT, &path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let device = number_in(&path, &mut parent);
    // Wait until it is in the middle of a request that never ends.
    std::thread::sleep(Duration::from_millis(300));
    assert!(!gone(device));
    // A stopped process cannot end by itself: only the system's signal ends it, not its own watch of the parent.
    let process = rustix::process::Pid::from_raw(device.cast_signed()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let began = Instant::now();
    while !gone(device) {
        assert!(began.elapsed() < Duration::from_secs(30), "{device} is still there");
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = std::fs::remove_file(path);
}

/// Waits for a process id that another process writes.
fn number_in(path: &Path, writer: &mut Child) -> u32 {
    let began = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Ok(number) = text.parse() {
            return number;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "no number");
        assert_eq!(writer.try_wait().unwrap(), None, "it ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(process: u32) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
}

/// Whether a process has ended. A zombie counts as ended.
fn gone(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_none_or(|rest| rest.trim().is_empty() || rest.trim().starts_with('Z'))
}

#[test]
fn nobody_else_is_served() {
    let output = again("normal", None).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    let all = format!("{said}{}", String::from_utf8_lossy(&output.stdout));
    assert!(all.contains("NotAChild"), "{all}");
}
