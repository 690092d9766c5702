//! `amk soak`: for a stated time random sequences take turns on a device process, and are cancelled, asked for nonsense, killed and stopped.
//! Whatever becomes of the process, every sequence's tokens are kept and go on in the next one; every token is held against the reference.

mod leaks;
mod reference;
mod sequences;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use remote::{Limits, Remote};
use rustix::process::{Pid, Signal, kill_process};
use search::{Device, DeviceError, Handle, Ran};
use serde_json::json;
use sessions::{Outcome as Ended, Priority, Report, Scheduler, SessionId, Turn};

use crate::cli::SoakArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::{report, schedule_choice};

use leaks::Held;
pub(crate) use reference::serve_reference;
use sequences::{Found, Script, Sequence, scripts};

/// Reports of what was in flight that are kept.
const REPORTS: usize = 8;
/// Questions after which a process that answers none is not up.
const SETTLE_TRIES: u32 = 4;
/// Of a thousand turns, how many are something else.
const CANCELS: u32 = 20;
const BAD_COMMANDS: u32 = 6;
const KILLS: u32 = 4;

/// What happened.
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
    /// Turns that were lost with their process; their sequences went on.
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
    context: &'a Context,
    device: Remote<'a>,
    program: Arc<Verified<Program>>,
    kernel: ir::KernelConfig,
    handle: Handle,
    scripts: Vec<Script>,
    scheduler: Scheduler,
    open: BTreeMap<SessionId, Sequence>,
    /// Whose sequence the process holds: one, as any device may forget the others.
    holds: Option<SessionId>,
    rng: Xoshiro256PlusPlus,
    tally: Tally,
}

/// Runs until its time is over.
pub(crate) fn run(args: &SoakArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let config = schedule_choice::reproducible(&context, context.kv_capacity);
    let program = Arc::new(context.lowered(&config)?);
    let scripts = scripts(&context, args.seed)?;
    let free =
        context.has_device()?.then(|| vm_host::Card::default().free_memory()).and_then(Result::ok);
    let began = Instant::now();
    let mut soak = Soak::open(&context, args, program, config.kernel, scripts)?;
    let limit = Duration::from_secs(args.seconds);
    soak.settle()?;
    let mut warm = None;
    let mut hang = args.seconds >= 4;
    while began.elapsed() < limit {
        if warm.is_none() && began.elapsed() > limit / 4 {
            soak.settle()?;
            warm = Some(Held::now());
        }
        if hang && began.elapsed() > limit / 2 {
            hang = false;
            soak.stop_the_process();
        }
        soak.step();
        if !soak.tally.wrong.is_empty() {
            break;
        }
    }
    soak.settle()?;
    let leaks = leaks::between(warm.as_ref(), &Held::now());
    let taken = soak.close();
    let Soak { device, tally, .. } = soak;
    drop(device);
    let leaks: Vec<String> = leaks.into_iter().chain(leaks::device(free)).chain(taken).collect();
    let good = tally.wrong.is_empty() && leaks.is_empty();
    report::say(&format!("{} turns, {} tokens", tally.turns, tally.tokens));
    for fault in tally.wrong.iter().chain(&leaks) {
        report::say(&format!("  {fault}"));
    }
    report::document(&json!({
        "schema": "amk.soak.v1",
        "model": context.graph().name,
        "seed": args.seed,
        "seconds": began.elapsed().as_secs_f64(),
        "turns": tally.turns, "finished": tally.finished, "cancelled": tally.cancelled, "tokens": tally.tokens,
        "near_ties": tally.near_ties, "replays": tally.replays, "bad_commands": tally.bad_commands,
        "kills": tally.kills, "hangs": tally.hangs, "in_flight": tally.in_flight, "reports": tally.reports,
        "wrong": tally.wrong, "leaks": leaks,
    }))?;
    Ok(if good { Exit::Yes } else { Exit::No })
}

impl<'a> Soak<'a> {
    fn open(
        context: &'a Context,
        args: &SoakArgs,
        program: Arc<Verified<Program>>,
        kernel: ir::KernelConfig,
        scripts: Vec<Script>,
    ) -> Result<Self, Failure> {
        let device = crate::device::open_for_soak(context, limits(context.has_device()?))?;
        let mut soak = Self {
            context,
            device,
            program,
            kernel,
            handle: Handle(0),
            scripts,
            scheduler: Scheduler::new(args.sessions),
            open: BTreeMap::new(),
            holds: None,
            rng: Xoshiro256PlusPlus::seed_from_u64(args.seed),
            tally: Tally::default(),
        };
        let prepared = soak.device.prepare(&soak.program, &soak.kernel);
        soak.handle = prepared.map_err(|error| Failure::refused(error.to_string()))?;
        Ok(soak)
    }

    /// Something that only a process which is up can answer. What is wrong with the one before is found by the first question.
    fn settle(&mut self) -> Result<(), Failure> {
        let prompt = self.scripts[0].prompt.clone();
        self.holds = None;
        let mut last = String::new();
        for _ in 0..SETTLE_TRIES {
            match self.device.run(self.handle, &prompt, 0) {
                Ok(_) => return Ok(()),
                Err(error) => last = error.to_string(),
            }
        }
        Err(Failure::refused(format!("the device does not come up again: {last}")))
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
        // One in some hundred is hit while it runs.
        let hit = self.rng.random_range(0..1000) < KILLS;
        self.turn(turn, hit);
    }

    /// A sequence in every place.
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

    /// Takes a token in.
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

    /// The process is gone or gave up; the sequence has its tokens still.
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

    /// Asks for what cannot be had. It must be refused, and nobody else may notice.
    fn bad_command(&mut self) {
        let vocab = self.context.graph().vocab;
        let too_long = vec![1; self.context.kv_capacity as usize + 1];
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

    /// Runs while the process is killed, at some moment within a few milliseconds.
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

    /// A process that says nothing any more and does not end.
    fn stop_the_process(&mut self) {
        self.tally.hangs += 1;
        self.kill(Signal::STOP);
        if let Some(turn) = self.scheduler.next(1) {
            self.turn(turn, false);
        }
    }

    /// Ends every sequence. Says which places stay taken.
    fn close(&mut self) -> Option<String> {
        let sessions: Vec<SessionId> = self.open.keys().copied().collect();
        for session in sessions {
            let _ = self.scheduler.cancel(session); // in line, all of them
            self.leave(session);
        }
        let occupancy = self.scheduler.ring().occupancy();
        let places = self.scheduler.ring().len() as u32;
        (occupancy[0] != places)
            .then(|| format!("entries of the ring that stay taken: {occupancy:?}"))
    }
}

/// A process that is stopped is given up after these. A card needs its time to boot; the reference machine has nothing to bring anywhere.
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
