//! Random sequences take turns on a device process for a stated time, while requests are cancelled, bad commands sent,
//! and the process killed or stopped. Every sequence's tokens survive the process and continue in the next one; every
//! token is compared with the reference.
//!
//! `AMK_SOAK_SECONDS=3600` sets the time, `AMK_SOAK_SEED` the random seed. `AMK_SOAK_DEVICE=cuda` drives the local GPU
//! through `amk device-child`; otherwise this binary itself is the device, on the reference VM.
#![cfg(unix)]

use std::collections::{BTreeMap, VecDeque};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::Target;
use model::Model;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use remote::{Limits, Remote, Room};
use rustix::process::{Pid, Signal, kill_process};
use search::{Device, DeviceError, Handle, Ran};
use sessions::{Outcome as Ended, Priority, Report, Scheduler, SessionId, Turn};

#[path = "soak_tests/leaks.rs"]
mod leaks;
#[path = "soak_tests/reference.rs"]
mod reference;
#[path = "soak_tests/sequences.rs"]
mod sequences;

use leaks::ResourceUsage;
use sequences::{Found, Script, Sequence, scripts};

/// The model, and the tokens that its key/value cache holds.
const MODEL: &str = "toy";
const KV_CAPACITY: u32 = 64;
/// Sequences that take turns.
const SESSIONS: usize = 8;
/// The most positions that a device process runs at once.
const ROWS: usize = 160;
/// Set for this binary when it is the device.
const CHILD: &str = "AMK_SOAK_CHILD";

/// The model under test, and its device.
struct Subject {
    model: Model,
    target: Target,
    kv_capacity: u32,
    on_gpu: bool,
}

impl Subject {
    fn new() -> Self {
        let on_gpu = std::env::var("AMK_SOAK_DEVICE").is_ok_and(|device| device == "cuda");
        let mut target = Target::by_name("h200").unwrap();
        if on_gpu {
            let card = vm_host::Card::default().info().expect("a GPU");
            target = Target {
                sms: card.sms,
                smem_optin_bytes: card.shared_bytes,
                l2_bytes: card.l2_bytes.into(),
                ..Target::of_card(&card.name)
            };
        }
        Self { model: model::load(MODEL).unwrap(), target, kv_capacity: KV_CAPACITY, on_gpu }
    }

    /// A process that may be killed repeatedly.
    fn device(&self) -> Remote<'_> {
        let room = Room { rows: ROWS, vocab: self.model.graph.vocab as usize };
        let launcher = || {
            if self.on_gpu {
                let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
                command.args(["device-child", "--model", MODEL, "--kv-capacity"]);
                command.arg(KV_CAPACITY.to_string());
                return command;
            }
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "a_soak_loses_no_token_and_holds_nothing", "--nocapture"]);
            command.env(CHILD, "1");
            command
        };
        Remote::open(Box::new(launcher), limits(self.on_gpu), room).unwrap()
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// The most reports of turns in flight that are kept.
const REPORTS: usize = 8;
/// Unanswered requests after which the process counts as failed.
const SETTLE_TRIES: u32 = 4;
/// Events per thousand turns.
const CANCELS: u32 = 20;
const BAD_COMMANDS: u32 = 6;
const KILLS: u32 = 4;

/// The counts of events.
#[derive(Debug, Default)]
struct Tally {
    turns: u64,
    finished: u64,
    cancelled: u64,
    tokens: u64,
    near_ties: u64,
    replays: u64,
    bad_commands: u64,
    kills: u64,
    hangs: u64,
    /// Turns that were lost with their process; their sequences continued.
    in_flight: u64,
    reports: VecDeque<String>,
    wrong: Vec<String>,
}

impl Tally {
    fn wrong(&mut self, what: String) {
        if self.wrong.len() < REPORTS {
            self.wrong.push(what);
        }
    }
}

struct Soak<'a> {
    subject: &'a Subject,
    device: Remote<'a>,
    handle: Handle,
    scripts: Vec<Script>,
    scheduler: Scheduler,
    open: BTreeMap<SessionId, Sequence>,
    /// The session whose sequence the process holds: only one, since a device may forget the others.
    holds: Option<SessionId>,
    rng: Xoshiro256PlusPlus,
    tally: Tally,
}

#[test]
fn a_soak_loses_no_token_and_holds_nothing() {
    let subject = Subject::new();
    if std::env::var_os(CHILD).is_some() {
        return reference::serve(&subject);
    }
    let (seconds, seed) = (number("AMK_SOAK_SECONDS", 5), number("AMK_SOAK_SEED", 1));
    let free = subject.on_gpu.then(|| vm_host::Card::default().free_memory()).and_then(Result::ok);
    let (began, limit) = (Instant::now(), Duration::from_secs(seconds));
    let mut soak = Soak::open(&subject, seed);
    soak.settle();
    let mut warm = None;
    let mut hang = seconds >= 4;
    while began.elapsed() < limit && soak.tally.wrong.is_empty() {
        if warm.is_none() && began.elapsed() > limit / 4 {
            soak.settle();
            warm = Some(ResourceUsage::now());
        }
        if hang && began.elapsed() > limit / 2 {
            hang = false;
            soak.stop_the_process();
        }
        soak.step();
    }
    soak.settle();
    let mut leaks = leaks::between(warm.as_ref(), &ResourceUsage::now());
    leaks.extend(soak.close());
    let Soak { device, tally, .. } = soak;
    drop(device);
    leaks.extend(leaks::device(free));
    println!("{tally:#?}\n{leaks:?}");
    assert_eq!((&tally.wrong, &leaks), (&Vec::new(), &Vec::new()), "{tally:?}");
    for count in [tally.finished, tally.cancelled, tally.bad_commands, tally.kills, tally.replays] {
        assert!(count > 0, "{tally:?}");
    }
    assert_eq!(tally.hangs, u64::from(seconds >= 4));
    assert!(tally.in_flight > 0 && !tally.reports.is_empty(), "{tally:?}");
    assert!(tally.reports.iter().all(|report| report.contains("tokens kept")), "{tally:?}");
}

impl<'a> Soak<'a> {
    fn open(subject: &'a Subject, seed: u64) -> Self {
        let (graph, target) = (&subject.model.graph, &subject.target);
        let config = ir::schedule::default_config(graph, target);
        let valid = ir::schedule::validate(config, graph, target).unwrap();
        let options = lower::Options { kv_capacity: subject.kv_capacity };
        let program = Arc::new(lower::lower(&valid, graph, target, options).unwrap());
        let mut device = subject.device();
        let handle = device.prepare(&program, &config.kernel).unwrap();
        Self {
            subject,
            device,
            handle,
            scripts: scripts(subject, seed),
            scheduler: Scheduler::new(SESSIONS),
            open: BTreeMap::new(),
            holds: None,
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            tally: Tally::default(),
        }
    }

    /// Waits until the process answers. The first request detects the failure of the previous process.
    fn settle(&mut self) {
        let prompt = self.scripts[0].prompt.clone();
        self.holds = None;
        let mut last = String::new();
        for _ in 0..SETTLE_TRIES {
            match self.device.run(self.handle, &prompt, 0) {
                Ok(_) => return,
                Err(error) => last = error.to_string(),
            }
        }
        panic!("the device does not come up again: {last}");
    }

    fn step(&mut self) {
        self.fill();
        match self.rng.random_range(0..1000) {
            0..CANCELS => self.cancel(),
            n if n < CANCELS + BAD_COMMANDS => self.bad_command(),
            n if n < CANCELS + BAD_COMMANDS + KILLS => self.kill(Signal::KILL),
            _ => {}
        }
        let Some(turn) = self.scheduler.next(1) else { return };
        // A few turns per thousand are killed while they run.
        let hit = self.rng.random_range(0..1000) < KILLS;
        self.turn(turn, hit);
    }

    /// Opens a sequence in every place.
    fn fill(&mut self) {
        loop {
            let script = self.rng.random_range(0..self.scripts.len());
            let priority = Priority::ALL[self.rng.random_range(0..Priority::ALL.len())];
            let quota = self.scripts[script].expected.len() as u64 + 1;
            let Ok(session) = self.scheduler.open(priority, quota) else { return };
            let limit = self.rng.random_range(1..=self.scripts[script].expected.len());
            let sequence = Sequence::new(script, &self.scripts[script], limit);
            self.open.insert(session, sequence);
            let submitted = self.scheduler.submit(session);
            debug_assert!(submitted.is_ok(), "a new session has no command: {submitted:?}");
        }
    }

    fn turn(&mut self, turn: Turn, hit: bool) {
        self.tally.turns += 1;
        let session = turn.session();
        let Some(sequence) = self.open.get(&session) else {
            unreachable!("every open session has a sequence")
        };
        let held = if self.holds == Some(session) { sequence.held } else { 0 };
        self.tally.replays += u64::from(held == 0 && sequence.held > 0);
        let tokens = sequence.tokens.clone();
        let ran =
            if hit { self.hit(&tokens, held) } else { self.device.run(self.handle, &tokens, held) };
        let outcome = match ran {
            Ok(ran) => self.take(session, held, &tokens, &ran),
            Err(error) => {
                self.lost(session, &error);
                Ended::Yield
            }
        };
        match self.scheduler.give_back(turn, u64::from(outcome == Ended::Done), outcome) {
            Ok(Report::Ready) => {}
            Ok(Report::Finished) => self.leave(session),
            other => self.tally.wrong(format!("a turn ended with {other:?}")),
        }
    }

    /// Records a token.
    fn take(&mut self, session: SessionId, held: usize, tokens: &[u32], ran: &Ran) -> Ended {
        self.holds = Some(session);
        let Some(sequence) = self.open.get_mut(&session) else {
            unreachable!("every open session has a sequence")
        };
        sequence.held = tokens.len();
        let script = &self.scripts[sequence.script];
        self.tally.tokens += 1;
        match sequence.next(script, held, ran) {
            Ok(Found::More) => return Ended::Yield,
            Ok(Found::Last) => self.tally.finished += 1,
            Ok(Found::NearTie) => self.tally.near_ties += 1,
            Err(what) => {
                let sequence = &self.open[&session].tokens;
                self.tally.wrong(format!("{what} after {sequence:?}"));
            }
        }
        Ended::Done
    }

    /// The process ended or gave up; the sequence keeps its tokens.
    fn lost(&mut self, session: SessionId, error: &DeviceError) {
        self.holds = None;
        self.tally.in_flight += 1;
        let kept = self.open.get(&session).map_or(0, |sequence| sequence.tokens.len());
        if self.tally.reports.len() == REPORTS {
            self.tally.reports.pop_front();
        }
        let place = session.place();
        self.tally.reports.push_back(format!("place {place}, {kept} tokens kept: {error}"));
    }

    fn leave(&mut self, session: SessionId) {
        self.open.remove(&session);
        let closed = self.scheduler.close(session);
        if closed.is_err() {
            self.tally.wrong(format!("a session cannot be closed: {closed:?}"));
        }
    }

    fn cancel(&mut self) {
        let count = self.open.len();
        let chosen = self.rng.random_range(0..count.max(1));
        let Some(&session) = self.open.keys().nth(chosen) else { return };
        match self.scheduler.cancel(session) {
            Ok(_) => {
                self.tally.cancelled += 1;
                self.leave(session);
            }
            Err(error) => self.tally.wrong(format!("a cancellation was refused: {error}")),
        }
    }

    /// Sends an invalid command. It must be refused without any effect on others.
    fn bad_command(&mut self) {
        let vocab = self.subject.model.graph.vocab;
        let too_long = vec![1; self.subject.kv_capacity as usize + 1];
        let refused = match self.rng.random_range(0..3) {
            0 => self.device.run(self.handle, &[vocab + 7], 0).is_err(),
            1 => self.device.run(self.handle, &too_long, 0).is_err(),
            _ => self.device.run(Handle(u64::MAX), &[1], 0).is_err(),
        };
        self.holds = None;
        self.tally.bad_commands += 1;
        if !refused {
            self.tally.wrong("a command that cannot be carried out was answered".to_owned());
        }
    }

    fn process(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.device.process_id()?).ok()?)
    }

    fn kill(&mut self, signal: Signal) {
        if let Some(process) = self.process() {
            self.tally.kills += u64::from(signal == Signal::KILL);
            let _ = kill_process(process, signal); // it may have ended
        }
    }

    /// Runs a turn while the process is killed at a random moment within a few milliseconds.
    fn hit(&mut self, tokens: &[u32], held: usize) -> Result<Ran, DeviceError> {
        let pause = Duration::from_micros(self.rng.random_range(0..3000));
        let Some(process) = self.process() else {
            return self.device.run(self.handle, tokens, held);
        };
        self.tally.kills += 1;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(pause);
                let _ = kill_process(process, Signal::KILL); // it may have ended
            });
            self.device.run(self.handle, tokens, held)
        })
    }

    /// Stops the process, so that it hangs without ending.
    fn stop_the_process(&mut self) {
        self.tally.hangs += 1;
        self.kill(Signal::STOP);
        if let Some(turn) = self.scheduler.next(1) {
            self.turn(turn, false);
        }
    }

    /// Ends every sequence. Returns the ring's occupancy if entries are still taken.
    fn close(&mut self) -> Option<String> {
        let sessions: Vec<SessionId> = self.open.keys().copied().collect();
        for session in sessions {
            let _ = self.scheduler.cancel(session); // waiting in line, all of them
            self.leave(session);
        }
        let occupancy = self.scheduler.ring().occupancy();
        let places = self.scheduler.ring().len() as u32;
        (occupancy[0] != places)
            .then(|| format!("entries of the ring that stay taken: {occupancy:?}"))
    }
}

/// The time limits after which a stopped process is given up. A card needs time to boot; the reference VM has nothing to upload.
fn limits(card: bool) -> Limits {
    let limits = Limits::default();
    if card {
        return Limits { answer: Duration::from_secs(8), ..limits };
    }
    let short = Duration::from_millis(100);
    let answer = Duration::from_millis(1500);
    let position = Duration::from_millis(5);
    Limits { answer, boot: short, compile: short, launch: short, position, ..limits }
}
