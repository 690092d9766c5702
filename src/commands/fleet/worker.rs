//! `amk fleet worker`: leases jobs one at a time and runs each through the same function as `amk loop`, so every gate of
//! a search holds here too. A second thread keeps the lease alive, and gives it back when the process is told to end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use fleet::protocol::Terms;
use fleet::{Board, BoardError, Claim, Device, Leased, Recorded, Spec, Worker};
use ir::schedule::ScheduleConfig;
use rand::RngExt;
use search::{Budget, Trial};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::finding::finding;
use super::open;
use crate::cli::{DeviceChoice, FixedTerms, FleetWorkerArgs, LoopArgs, PlaceArgs, SharingArgs};
use crate::commands::runs;
use crate::commands::search_loop::{self, Progress, Watch};
use crate::device::hardware::{Hardware, ThisMachine};
use crate::failure::{Exit, Failure, Outcome};
use crate::{interrupt, report};

/// How often a waiting thread looks around.
const LOOK: Duration = Duration::from_millis(50);
/// How long the current trial may go on after SIGTERM; then the lease is given back without it.
const GRACE: Duration = Duration::from_secs(1);
/// Mean pause between two claims while nothing is free.
const POLL_MS: u64 = 500;
/// How long a request that the board does not take is repeated; pauses grow to 5 s.
const INSISTENCE: Duration = Duration::from_secs(600);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Longest wait of the second thread for the board: with [`GRACE`] less than the 5 s that a worker has after SIGTERM.
const HOLDER_PATIENCE: Duration = Duration::from_secs(2);

/// What became of the jobs of this worker.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    done: u64,
    failed: u64,
    late: u64,
    given_back: u64,
}

/// What each job of a worker runs with.
#[derive(Clone, Copy)]
struct Setup<'a> {
    args: &'a FleetWorkerArgs,
    hardware: &'a dyn Hardware,
}

/// How one job ended here.
enum End {
    Done,
    Failed(Failure),
    /// Another worker has the job; the ledger stays where it is.
    Late(String),
    /// The process is to end.
    Stopped,
}

pub(crate) fn run(args: &FleetWorkerArgs) -> Outcome {
    run_on(args, &ThisMachine)
}

/// The same on given hardware.
pub(super) fn run_on(args: &FleetWorkerArgs, hardware: &dyn Hardware) -> Outcome {
    let latest = match args.time {
        None => None,
        Some(Budget::Time(time)) => Some(Instant::now() + time),
        Some(Budget::Trials(_)) => {
            return Err(Failure::usage("--for takes a time, such as 90s, 10m or 8h"));
        }
    };
    let mut board = open(&args.board.board)?;
    let worker = identity(args, hardware)?;
    interrupt::catch_termination();
    insist(|| board.join(&worker))?;
    report::say(&format!("worker {} on {}", worker.id, board.path().display()));
    let mut counts = Counts::default();
    let setup = Setup { args, hardware };
    let ended = serve(setup, &mut board, &worker, latest, &mut counts);
    board.set_patience(HOLDER_PATIENCE)?;
    let left = board.leave(&worker.id);
    report::document(&document(board.path(), &worker, counts))?;
    ended?;
    left?;
    Ok(Exit::Yes)
}

fn document(board: &Path, worker: &Worker, counts: Counts) -> Value {
    let Counts { done, failed, late, given_back } = counts;
    json!({
        "schema": "amk.fleet_worker.v1", "board": board, "worker": worker.id,
        "done": done, "failed": failed, "late": late, "given_back": given_back,
    })
}

/// Takes jobs until there is a reason to end.
fn serve(
    setup: Setup<'_>,
    board: &mut Board,
    worker: &Worker,
    latest: Option<Instant>,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let mut rng = rand::rng();
    while !interrupt::terminated() && latest.is_none_or(|latest| Instant::now() < latest) {
        let asked = Instant::now();
        let leased = match insist(|| board.claim(worker))? {
            Claim::Drained => return Ok(()),
            Claim::Nothing { open: 0 } if setup.args.until_done => return Ok(()),
            Claim::Nothing { .. } => {
                let pause = rng.random_range(POLL_MS / 2..POLL_MS * 3 / 2);
                let until = asked + Duration::from_millis(pause);
                while Instant::now() < until && !interrupt::terminated() {
                    board.wait(LOOK);
                }
                continue;
            }
            Claim::Leased(leased) => leased,
        };
        let job = leased.id;
        report::say(&format!("job {job}: {}", named(&leased.spec)));
        match attempt(setup, board, worker, &leased, asked, *counts)? {
            End::Done => counts.done += 1,
            End::Late(why) => {
                counts.late += 1;
                report::say(&format!("job {job}: {why}"));
            }
            End::Stopped => {
                counts.given_back +=
                    u64::from(insist(|| board.give_back(job, leased.fence))?.is_ok());
            }
            End::Failed(failure) => {
                counts.failed += 1;
                report::say(&format!("job {job} failed: {}", failure.message));
                // A lost lease leaves nothing to say: another worker has the job.
                let _ = insist(|| board.fail(job, leased.fence, &failure.message))?;
                if failure.exit == Exit::Missing {
                    // The machine lacks something that the next job would need too.
                    return Err(failure);
                }
            }
        }
    }
    Ok(())
}

fn named(spec: &Spec) -> String {
    format!("{} of {} for {}, seed {}", spec.kind.name(), spec.model, spec.target, spec.seed)
}

/// This worker's name, and what it can do.
fn identity(args: &FleetWorkerArgs, hardware: &dyn Hardware) -> Result<Worker, Failure> {
    let (host, boot) = (hardware.host(), hardware.boot());
    let gpu = match args.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Auto => hardware.live_card(),
        DeviceChoice::Cuda => Some(hardware.live_card().ok_or_else(|| {
            Failure::no_gpu("--device cuda: this worker would take jobs that measure")
        })?),
        DeviceChoice::Eval => {
            return Err(Failure::usage("--device eval runs no schedule; a worker has cpu or cuda"));
        }
    };
    let [target, card, card_name] =
        gpu.map_or_else(Default::default, |card| [card.target.name, card.uuid, card.name]);
    // Process ids repeat between containers.
    let unique: u32 = rand::rng().random();
    Ok(Worker {
        id: format!("{host}-{}-{unique:08x}", std::process::id()),
        host,
        boot,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        target,
        card,
        card_name,
    })
}

/// What the two threads of an attempt tell each other.
#[derive(Default)]
struct Shared {
    /// The search ends before its next trial.
    stop: AtomicBool,
    /// The lease is lost.
    lost: AtomicBool,
}

impl Watch for Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn begins(&self, _: &Progress) {}

    fn trial(&self, _: &Progress, _: &Trial) {}
}

/// Runs a leased job to its end, with a second thread for the lease.
fn attempt(
    setup: Setup<'_>,
    board: &mut Board,
    worker: &Worker,
    leased: &Leased,
    asked: Instant,
    counts: Counts,
) -> Result<End, Failure> {
    let own = insist(|| Board::open(board.path()))?;
    own.set_patience(HOLDER_PATIENCE)?;
    let mut holder =
        LeaseHolder { board: own, terms: board.terms(), leased, worker, asked, counts };
    let shared = Shared::default();
    std::thread::scope(|scope| {
        // Dropping the sender, also by a panic, ends the thread.
        let (over, ends): (Sender<()>, _) = channel();
        let kept = &shared;
        scope.spawn(move || {
            holder.keep(kept, || match ends.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) => false,
                Ok(()) | Err(RecvTimeoutError::Disconnected) => true,
            })
        });
        let end = search(setup, board, worker, leased, &shared);
        drop(over);
        Ok(end)
    })
}

/// Keeps a lease alive from a thread of its own, on a connection of its own.
struct LeaseHolder<'a> {
    board: Board,
    terms: Terms,
    leased: &'a Leased,
    worker: &'a Worker,
    asked: Instant,
    counts: Counts,
}

impl LeaseHolder<'_> {
    fn keep(&mut self, shared: &Shared, over: impl Fn() -> bool) {
        let heartbeat = Duration::from_millis(self.terms.heartbeat_ms);
        let mut next = self.asked + heartbeat;
        let mut deadline = self.terms.own_deadline(self.asked);
        let mut told: Option<Instant> = None;
        while !over() {
            let now = Instant::now();
            if interrupt::terminated() {
                shared.stop.store(true, Ordering::SeqCst);
                if now >= *told.get_or_insert(now) + GRACE {
                    self.end_process(shared);
                }
            }
            if shared.lost.load(Ordering::SeqCst) || now < next {
                continue;
            }
            next = now + heartbeat;
            match self.board.beat(self.leased.id, self.leased.fence) {
                Ok(Ok(())) => deadline = self.terms.own_deadline(now),
                Ok(Err(late)) => self.lose(shared, &late.to_string()),
                Err(_) if now < deadline => {}
                Err(error) => self.lose(shared, &format!("the lease ran out: {error}")),
            }
        }
    }

    fn lose(&self, shared: &Shared, why: &str) {
        report::say(&format!("job {}: {why}; this attempt stops", self.leased.id));
        shared.lost.store(true, Ordering::SeqCst);
        shared.stop.store(true, Ordering::SeqCst);
    }

    /// Gives the lease back and ends the process in the middle of a trial. The ledger is safe at any moment, and a
    /// device process ends with its parent.
    fn end_process(&mut self, shared: &Shared) -> ! {
        let held = !shared.lost.load(Ordering::SeqCst);
        let Leased { id, fence, .. } = *self.leased;
        if held && matches!(self.board.give_back(id, fence), Ok(Ok(()))) {
            self.counts.given_back += 1;
        }
        let _ = self.board.leave(&self.worker.id);
        let _ = report::document(&document(self.board.path(), self.worker, self.counts));
        std::process::exit(Exit::Yes.code());
    }
}

/// Searches, audits the ledger, and offers the verdict to the board.
fn search(
    setup: Setup<'_>,
    board: &mut Board,
    worker: &Worker,
    leased: &Leased,
    shared: &Shared,
) -> End {
    let Setup { args, hardware } = setup;
    let folder = args.out.join(&worker.id).join(format!("{}-{}", leased.id, leased.fence));
    let kept = || format!("its ledger stays in {}", folder.display());
    let found = terms(args, leased, folder.clone())
        .and_then(|terms| search_loop::answer_on(&terms, shared, hardware))
        .and_then(|answer| match answer.document.was_interrupted() {
            true => Ok(None),
            false => result(worker, &leased.spec, &folder.join(runs::LEDGER)).map(Some),
        });
    let lost = shared.lost.load(Ordering::SeqCst);
    match found {
        _ if lost => End::Late(kept()),
        Ok(None) => End::Stopped,
        Err(failure) => End::Failed(failure),
        Ok(Some(result)) => match insist(|| board.finish(leased.id, leased.fence, &result)) {
            Ok(Ok(())) => End::Done,
            Ok(Err(late)) => End::Late(format!("{late}; {}", kept())),
            Err(error) => End::Failed(Failure {
                message: format!("{error}; {}", kept()),
                ..Failure::from(error)
            }),
        },
    }
}

/// Repeats a request that the board could not take: another process may hold it. A commit whose answer was lost is
/// read back, since a repeated request changes nothing.
fn insist<T>(mut request: impl FnMut() -> Result<T, BoardError>) -> Result<T, BoardError> {
    let (latest, mut pause) = (Instant::now() + INSISTENCE, Duration::from_millis(100));
    loop {
        let answer = request();
        let again = answer.as_ref().is_err_and(BoardError::is_passing);
        if !again || interrupt::terminated() || Instant::now() >= latest {
            return answer;
        }
        // Jitter, so that the workers of a fleet do not all come back at once.
        let wait = Instant::now() + pause.mul_f64(rand::rng().random_range(0.5..1.5));
        while Instant::now() < wait && !interrupt::terminated() {
            std::thread::sleep(LOOK);
        }
        pause = (2 * pause).min(PAUSE_MAX);
    }
}

/// The result of a ledger that passes the audit.
fn result(worker: &Worker, spec: &Spec, ledger: &Path) -> Result<Recorded, Failure> {
    let (run, _) = runs::sound(ledger)?;
    let finding = finding(spec, &run)?;
    let card = run.conditions().and_then(|conditions| conditions.uuid).unwrap_or_default();
    let text = |path: &Path| {
        let remedy = "it was there a moment ago";
        std::fs::read_to_string(path).map_err(Failure::cannot("read", path, remedy))
    };
    let (ledger, head) = (text(ledger)?, text(&ledger.with_extension("head"))?);
    let (host, boot) = (worker.host.clone(), worker.boot.clone());
    Ok(Recorded { host, boot, card, finding, ledger, head })
}

/// The arguments of the search that a job is.
fn terms(args: &FleetWorkerArgs, leased: &Leased, folder: PathBuf) -> Result<LoopArgs, Failure> {
    let spec = &leased.spec;
    if spec.protocol != search::PROTOCOL {
        return Err(Failure::usage(format!(
            "the job is of protocol {}, this amk has {}: submit it again with the version that works on it",
            spec.protocol,
            search::PROTOCOL
        )));
    }
    let race = spec.race.as_ref();
    let race = race.map(|race| {
        let both = (schedule(&race.start), schedule(&race.champion));
        Ok::<_, Failure>([both.0?, both.1?])
    });
    let known = if leased.priors.is_empty() { Vec::new() } else { read("priors", &leased.priors)? };
    let device = match spec.device {
        Device::Cpu => DeviceChoice::Cpu,
        Device::Cuda => DeviceChoice::Cuda,
    };
    let unread = |error: String| Failure::usage(format!("the job cannot be read: {error}"));
    Ok(LoopArgs {
        model: Some(spec.model.clone()),
        place: PlaceArgs { target: Some(spec.target.clone()), device, ..PlaceArgs::default() },
        sharing: SharingArgs { shared_gpu: args.sharing.shared_gpu },
        devices: Vec::new(),
        schedule: None,
        context: spec.contexts.clone(),
        batch: None,
        budget: Some(spec.budget.parse().map_err(|e| unread(format!("{e}")))?),
        seed: Some(spec.seed),
        strategy: Some(spec.strategy.parse().map_err(|e| unread(format!("{e}")))?),
        proposer: None,
        min_gain: None,
        goal: None,
        stop_within: None,
        allow_other_bits: false,
        resume: false,
        out: Some(folder),
        store: Some("none".into()),
        fixed: Some(FixedTerms { known, race: race.transpose()? }),
        start: None,
    })
}

fn schedule(config: &Value) -> Result<ScheduleConfig, Failure> {
    read("schedule", &config.to_string())
}

fn read<T: DeserializeOwned>(what: &str, text: &str) -> Result<T, Failure> {
    serde_json::from_str(text).map_err(|error| {
        Failure::usage(format!("the job's {what} cannot be read: {error}; submit it again"))
    })
}
