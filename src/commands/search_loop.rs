//! `amk loop`: the keep/revert search, with its ledger, its table and its progress.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use corpus::manifest::State;
use corpus::{CorpusError, Ledger, Results};
use indicatif::ProgressBar;
use ir::{KvDtype, Target};
use lower::Rates;
use search::strategy::{CostModel, Known, SearchSpace, Strategy, StrategyName};
use search::{
    Budget, Conditions, Confirmation, Decision, Device, DeviceInfo, LatencyKind, Origin,
    Outcome as End, Row, Search, SearchError, Settings, Step, StoppedBy, Timing, Trial,
    device_positions,
};
use serde_json::{Value, json};

use crate::cli::LoopArgs;
use crate::commands::rerun::{self, Inputs, Place};
use crate::commands::runs::LEDGER;
use crate::commands::runs::recorded::Recorded;
use crate::context::Context;
use crate::device::hardware::{Hardware, ThisMachine};
use crate::device::probe::without_kernel;
use crate::failure::{Exit, Failure, Outcome};
use crate::found;
use crate::report::{self, Answer, Ink};
use crate::schedule_choice::reproducible;
use crate::spinner;

mod cards;
mod document;
mod header;
pub(super) mod store_sink;
pub(crate) use header::MIN_GAIN_MEASURED;
mod proposer;
mod spent;
mod watch;

use cards::Opened;
use header::Header;
use proposer::{OnlyCandidate, Planted, Proposer};
use store_sink::StoreSink;

pub(crate) use document::cards as cards_of;
pub use document::{Card, Found, Kept};
pub(crate) use watch::{Progress, Watch};

const COLUMNS: &[&str] = &[
    "trial",
    "origin",
    "outcome",
    "latency_us",
    "latency_kind",
    "gain_low_pct",
    "gain_high_pct",
    "pct_of_roofline",
    "correct",
    "schedule_id",
    "program_id",
    "kernel_id",
    "changed",
    "why",
    "card",
];

/// The most changed knobs in a line for people; the table has them all.
const CHANGES_SHOWN: usize = 3;

pub(crate) fn run(args: &LoopArgs) -> Outcome {
    crate::library::Search::of(args.clone())
        .watched(&watch::CommandLine::default())
        .answer()?
        .print()
}

/// Searches until the budget is spent or the watcher stops it.
pub(crate) fn answer(args: &LoopArgs, watch: &dyn Watch) -> Result<Answer<Found>, Failure> {
    answer_on(args, watch, &ThisMachine)
}

/// The same on given hardware.
pub(crate) fn answer_on(
    args: &LoopArgs,
    watch: &dyn Watch,
    hardware: &dyn Hardware,
) -> Result<Answer<Found>, Failure> {
    let begun = Begun::new(args)?;
    let context = Context::load(&begun.header.model, &begun.header.place(args))?;
    let context = context.for_steps_of(begun.header.batch.unwrap_or(1))?;
    searched(args, watch, hardware, &context, begun)
}

/// The same with a loaded model, for a server.
pub(crate) fn answer_in(
    args: &LoopArgs,
    watch: &dyn Watch,
    hardware: &dyn Hardware,
    context: &Context,
) -> Result<Answer<Found>, Failure> {
    searched(args, watch, hardware, context, Begun::new(args)?)
}

/// Whether these arguments can begin a search.
pub(crate) fn check(args: &LoopArgs) -> Result<(), Failure> {
    check_folder(args)?;
    Header::fresh(args).map(|_| ())
}

fn searched(
    args: &LoopArgs,
    watch: &dyn Watch,
    hardware: &dyn Hardware,
    context: &Context,
    Begun { folder, resumed, header, past }: Begun,
) -> Result<Answer<Found>, Failure> {
    context.kv().only_f16("a search")?;
    let (dir, ledger_path) = (folder.path.clone(), folder.path.join(LEDGER));
    let several = cards::are_meant(args, &header)?;
    let header = header.with_start(args, context)?;
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let mut device = if several { None } else { hardware.open(context, args)? };
    std::thread::scope(|scope| {
        let opened = match &device {
            _ if several => Opened::Several(Box::new(cards::open(scope, context, args, &header)?)),
            Some(gpu) => Opened::One(gpu.describe()),
            None => Opened::None,
        };
        let measures = opened.conditions(&header);
        let header = with_known(args, &dir, context, header, measures, several)?;
        let (ledger, results) = open_files(resumed, &dir, &header)?;
        say_start(&header, &dir, past.rows.saturating_sub(1));
        watch.prepares(&resume_command(&dir, &header));
        if let Some(device) = &mut device
            && past.trials.is_empty()
        {
            // Compiled while the graph is evaluated.
            device.foresee(&[header.start(context).kernel]);
        }
        let positions = (opened.count() > 0).then(|| device_positions(context.graph()));
        let gate = context.gate_at(header.seed, positions, &kernel_id, &header.contexts)?;
        let settings = settings(context, &header);
        let strategy = strategy(args, context, &header, &settings)?;
        let (helpers, threads) = helpers(opened.count());
        let search = match opened {
            Opened::Several(pool) => Search::side_by_side(gate, *pool, settings),
            Opened::None | Opened::One(_) => Search::new(
                gate,
                device.as_mut().map(|gpu| &mut **gpu as &mut dyn Device),
                settings,
            ),
        };
        let search = search.with_strategy(strategy).with_clock(spent::clock).until(header.enough);
        let search = search.with_last_gate(Box::new(|trial| watch.accepts(trial)));
        let mut search = search.with_helpers(scope, helpers, threads);
        let began_s = past.trials.iter().map(|trial| trial.ended_s).fold(0.0, f64::max);
        let lines: Vec<Vec<String>> = past.trials.iter().map(cells).collect();
        absorb(&mut search, past.trials)?;
        corpus::manifest::unseal_run(&dir)?;
        let results = results.map_or_else(|| table(&dir, &lines), Ok)?;
        let mut session = Session {
            context,
            found: None,
            keeper: StoreSink::open(args, &dir, &ledger_path),
            ledger,
            results,
            bar: if args.start.is_some() { ProgressBar::hidden() } else { bar(&header) },
            header: &header,
            clock: Instant::now(),
            before: Duration::try_from_secs_f64(began_s).unwrap_or_default(),
            dir,
            watch,
        };
        session.run(&mut search, past.confirmation)
    })
}

/// A search of these arguments: its folder, the ledger to continue, if any, the terms, and the rows so far.
struct Begun {
    folder: header::Folder,
    resumed: Option<Ledger>,
    header: Header,
    past: Recorded,
}

impl Begun {
    fn new(args: &LoopArgs) -> Result<Self, Failure> {
        let _ = spent::clock(); // starts the clock
        let folder = header::folder(args)?;
        let ledger = folder.path.join(LEDGER);
        if args.resume {
            let (held, past) = reopen(&ledger)?;
            let header = Header::resumed(args, &past.header, &ledger)?;
            return Ok(Self { folder, resumed: Some(held), header, past });
        }
        check_folder(args)?;
        let past = Recorded::of(&ledger);
        Ok(Self { folder, resumed: None, header: Header::fresh(args)?, past })
    }
}

/// The terms of a search on these devices. A new one gets the trials in the store, if its strategy uses them.
fn with_known(
    args: &LoopArgs,
    dir: &Path,
    context: &Context,
    header: Header,
    measures: (Option<DeviceInfo>, Vec<Conditions>),
    several: bool,
) -> Result<Header, Failure> {
    let mut header = header.with_kind(context, measures, several)?;
    if let Some(fixed) = &args.fixed {
        header.known.clone_from(&fixed.known);
    } else if header.strategy == StrategyName::Residual && !args.resume {
        header.known = match store_sink::known(args, dir, context, &header) {
            // Nobody asked for the store beside the folder: without it the search begins from nothing.
            Err(error) if args.store.is_none() => {
                report::say(&format!("note: {error}. The search begins without it"));
                Vec::new()
            }
            known => known?,
        };
    }
    Ok(header)
}

/// Whether a search can begin, or continue, where the arguments say. A new one needs an empty folder, since it would overwrite files.
pub(crate) fn check_folder(args: &LoopArgs) -> Result<(), Failure> {
    if args.out.is_none() && !args.resume {
        return Ok(()); // a new folder
    }
    let folder = header::folder(args)?;
    let dir = &folder.path;
    if args.resume {
        return Ok(());
    }
    let ledger = dir.join(LEDGER);
    if std::fs::metadata(&ledger).is_ok_and(|file| file.len() > 0) {
        // A search that was killed while it wrote its first row is begun again; the ledger decides.
        let started = std::fs::read(&ledger).is_ok_and(|bytes| !bytes.contains(&b'\n'));
        return if started { Ok(()) } else { Err(CorpusError::Exists(ledger).into()) };
    }
    let ours = |name: &OsStr| [LEDGER, "ledger.head"].iter().any(|file| name == *file);
    let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    match entries.find(|entry| !ours(&entry.file_name())) {
        None => Ok(()),
        Some(other) => Err(Failure::usage(format!(
            "{} is not empty ({}) and holds no search; name a new folder in --out",
            dir.display(),
            other.file_name().display()
        ))),
    }
}

/// The number of helpers of a search, and of threads per helper. Several programs at once use cores better than one
/// program on all of them. Cores are left for the thread that drives each device, and for the system. Without a device,
/// a machine with few cores has none to spare.
fn helpers(devices: usize) -> (usize, usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 4 && devices == 0 {
        return (0, 0);
    }
    let devices = devices.max(1);
    let spare = cores.saturating_sub(1 + devices);
    let helpers = (spare / 3).clamp(1, 4 * devices);
    (helpers, (spare / helpers).max(1))
}

/// Opens a ledger to resume, if its run is valid as in `runs verify`: an altered one would get a new manifest at the end.
fn reopen(path: &Path) -> Result<(Ledger, Recorded), Failure> {
    // Locked first: a running search changes its folder.
    let held = Ledger::hold(path)?;
    let past = Recorded::read(path)?;
    if matches!(past.state, State::Collected(..)) {
        return Err(Failure::usage(format!(
            "the files of {} were given up to make room; start a new search in another --out",
            path.display()
        )));
    }
    Ok((held.resume()?.0, past))
}

/// Begins the ledger and the table of a new search, so that a path that cannot be written fails before anything is
/// computed. The table of a resumed one is left as it is until its rows have been read.
fn open_files(
    resumed: Option<Ledger>,
    dir: &Path,
    header: &Header,
) -> Result<(Ledger, Option<Results>), Failure> {
    if let Some(ledger) = resumed {
        return Ok((ledger, None));
    }
    let ledger = Ledger::create(&dir.join(LEDGER), &json!(header))?;
    match table(dir, &[]) {
        Ok(results) => Ok((ledger, Some(results))),
        Err(error) => {
            // Nothing was searched: restores the folder.
            let _ = ledger.remove();
            Err(error)
        }
    }
}

/// Rewrites the table of trials.
fn table(dir: &Path, rows: &[Vec<String>]) -> Result<Results, Failure> {
    Ok(Results::create(&dir.join("results.tsv"), COLUMNS, rows)?)
}

fn settings(context: &Context, header: &Header) -> Settings {
    Settings {
        seed: header.seed,
        budget: header.budget,
        explore: header.explore,
        min_gain: header.min_gain,
        default: header.start(context),
        space: search::searched_values(
            context.graph(),
            &context.target,
            header.kept_bits(context).as_ref(),
        ),
        timing: Timing::default(),
        finalists: header.finalists,
        simplest: Some(context.default_config()),
    }
}

/// The proposer: the candidate of a race, an external command, or the strategy in the header.
fn strategy(
    args: &LoopArgs,
    context: &Context,
    header: &Header,
    settings: &Settings,
) -> Result<Arc<dyn Strategy>, Failure> {
    if let Some([_, candidate]) = args.fixed.as_ref().and_then(|fixed| fixed.race) {
        return Ok(Arc::new(OnlyCandidate(candidate)));
    }
    if let Some(command) = &header.proposer {
        return Ok(Arc::new(Proposer::start(command, context, header.seed)?));
    }
    let space = settings.space.clone();
    let (seed, sweep, short) = (header.seed, header.explore, settings.budget.is_short());
    let search_space = SearchSpace { space, seed, sweep, short };
    let (graph, positions) = (context.graph(), header.predicted_at(context));
    let model =
        CostModel::new(graph, &context.target, context.kv_capacity, &positions, Rates::shipped());
    let known = Known { predictions: Some(Arc::new(model)), runs: header.known.clone() };
    let then = search::strategy::strategy(header.strategy, search_space, known);
    Ok(match &args.start {
        Some(start) if !start.planted.is_empty() => {
            Arc::new(Planted { first: start.planted.clone(), then })
        }
        Some(_) | None => then,
    })
}

fn absorb(search: &mut Search<'_>, past: Vec<Trial>) -> Result<(), Failure> {
    for trial in past {
        search.absorb(trial).map_err(|error| Failure::integrity(error.to_string()))?;
    }
    search.check_absorbed().map_err(|error| Failure::usage(error.to_string()))
}

fn say_start(header: &Header, dir: &Path, done: usize) {
    let what = match done {
        0 => "search".to_owned(),
        _ => format!("search resumed after {done} rows"),
    };
    report::say(&format!(
        "{what}: {} for {}, {} latencies{}, budget {}, seed {}, {}, in {}",
        header.model,
        header.target,
        header.kind,
        header.at_contexts(),
        header.budget,
        header.seed,
        who(header),
        dir.display()
    ));
    if let Some(note) = Target::by_name(&header.target).ok().and_then(|t| without_kernel(&t)) {
        report::say(&note);
    }
}

fn who(header: &Header) -> String {
    match (&header.proposer, header.known.len()) {
        (Some(command), _) => format!("proposer {command:?}"),
        (None, 0) => format!("strategy {}", header.strategy.name()),
        (None, known) => {
            let searches = if known == 1 { "search" } else { "searches" };
            format!(
                "strategy {} with {known} earlier {searches} of the store",
                header.strategy.name()
            )
        }
    }
}

fn bar(header: &Header) -> ProgressBar {
    let length = match header.budget {
        Budget::Trials(trials) => trials,
        Budget::Time(time) => time.as_secs(),
    };
    // The remaining time: known for a time budget, estimated from the trials so far for a trial budget.
    let template = "  [{bar:30}] {pos}/{len} {elapsed}, {left}; {msg}";
    spinner::shown(ProgressBar::new(length), template)
}

fn resume_command(dir: &Path, header: &Header) -> String {
    let resume = format!("amk loop --resume --out {}", dir.display());
    match &header.proposer {
        None => resume,
        Some(command) => format!("{resume} --proposer {}", rerun::quoted(command)),
    }
}

struct Session<'a> {
    context: &'a Context,
    /// The file of the champion for `generate` and `serve`.
    found: Option<PathBuf>,
    header: &'a Header,
    watch: &'a dyn Watch,
    keeper: StoreSink,
    ledger: Ledger,
    results: Results,
    bar: ProgressBar,
    clock: Instant,
    before: Duration,
    dir: PathBuf,
}

impl Session<'_> {
    fn elapsed(&self) -> Duration {
        self.before + self.clock.elapsed()
    }

    /// The whole search, up to its document.
    fn run(
        &mut self,
        search: &mut Search<'_>,
        confirmed: Option<Confirmation>,
    ) -> Result<Answer<Found>, Failure> {
        self.watch.begins(&self.progress(search, None));
        let stopped_by = self.search(search)?;
        let confirmation = self.confirm(search, stopped_by, confirmed)?;
        self.finish(search, stopped_by, confirmation.as_ref())
    }

    /// Runs trials until the budget is spent or the search is interrupted.
    fn search(&mut self, search: &mut Search<'_>) -> Result<StoppedBy, Failure> {
        loop {
            if self.watch.stopped() {
                return Ok(StoppedBy::Interrupted);
            }
            let step = search.step(self.elapsed()).map_err(|error| self.lost(&error))?;
            match step {
                Step::Done(stopped_by) => return Ok(stopped_by),
                Step::Trial(trial) => self.record(*trial, search)?,
            }
        }
    }

    fn record(&mut self, mut trial: Trial, search: &Search<'_>) -> Result<(), Failure> {
        trial.ended_s = self.elapsed().as_secs_f64();
        let header = self.header;
        if let Some(found) = &mut trial.verdict.first_divergence {
            let (config, default) = (&trial.config, self.context.default_config());
            let (target, kv_capacity) = (Some(&*header.target), header.kv_capacity);
            let place = Place { model: &header.model, target, kv_capacity, kv_dtype: KvDtype::F16 };
            let inputs = Inputs::Schedule { config, default, seed: header.seed };
            found.rerun = rerun::command(&place, &inputs, found);
        }
        for out in &trial.left_out {
            report::say(&format!(
                "card {} is left out: {}; the search goes on without it",
                out.card, out.why
            ));
        }
        let line = trial_line(&trial);
        let cells = cells(&trial);
        // The trial is acknowledged from here on: its line is printed only after it is on the disk.
        let leads = trial.outcome.leads().then_some(trial.config);
        let row = Row::Trial(Box::new(trial));
        let link = self.ledger.append(&row);
        self.keeper.row(link.map_err(|error| self.full(error))?);
        if let Some(config) = leads {
            self.keeper.program(search, &config);
        }
        self.results.append(&cells).map_err(|error| self.full(error))?;
        match search.champion() {
            Some(champion) => self.bar.set_message(format!(
                "best {} (trial {})",
                report::maybe(champion.verdict.latency_us, "us"),
                champion.trial
            )),
            None => self.bar.set_message("nothing correct yet"),
        }
        if let Row::Trial(trial) = &row {
            self.watch.trial(&self.progress(search, Some(line.trim().to_owned())), trial);
        }
        self.bar.set_position(match self.header.budget {
            Budget::Trials(_) => search.trials().len() as u64,
            Budget::Time(most) => self.elapsed().min(most).as_secs(),
        });
        if self.bar.is_hidden() {
            report::say(&line);
        } else {
            let ink = if leads.is_some() { Ink::Green } else { Ink::Plain };
            self.bar.println(ink.on(&report::fitting(&report::plain(&line))));
        }
        Ok(())
    }

    /// Measures a measured champion again; an interrupted search is left as it is.
    fn confirm(
        &mut self,
        search: &mut Search<'_>,
        stopped_by: StoppedBy,
        confirmed: Option<Confirmation>,
    ) -> Result<Option<Confirmation>, Failure> {
        let current = |c: &Confirmation| c.trials == search.trials().len() as u64;
        if stopped_by == StoppedBy::Interrupted || confirmed.as_ref().is_some_and(current) {
            return Ok(confirmed);
        }
        self.bar.set_message("confirming the champion");
        let confirmation = search.confirm().map_err(|error| self.lost(&error))?;
        if let Some(confirmation) = &confirmation {
            let row = Row::Confirmation(Box::new(confirmation.clone()));
            let link = self.ledger.append(&row);
            self.keeper.row(link.map_err(|error| self.full(error))?);
            self.keep_found(search, confirmation);
        }
        Ok(confirmation)
    }

    fn lost(&self, error: &SearchError) -> Failure {
        self.bar.finish_and_clear();
        let resume = self.resume_command();
        match error {
            SearchError::Device(error) => Failure::missing(format!(
                "{error}; finished trials are in {}; continue with: {resume}",
                self.ledger.path().display()
            )),
            SearchError::Foreign { .. } => Failure::usage(error.to_string()),
        }
    }

    /// The error for a full disk. Everything acknowledged is on it.
    fn full(&self, error: CorpusError) -> Failure {
        self.bar.finish_and_clear();
        let mut failure = Failure::from(error);
        failure.message +=
            &format!("; finished trials are safe; continue with: {}", self.resume_command());
        failure
    }

    fn progress(&self, search: &Search<'_>, last: Option<String>) -> Progress {
        let (header, champion) = (self.header, search.champion());
        Progress {
            folder: Some(self.dir.clone()),
            model: Some(header.model.clone()),
            target: Some(header.target.clone()),
            device: Some(header.device.clone()),
            latency_kind: Some(header.kind.clone()),
            budget: Some(header.budget),
            trials: search.trials().len() as u64,
            elapsed_s: self.elapsed().as_secs_f64(),
            best_us: champion.and_then(|champion| champion.verdict.latency_us),
            best_trial: champion.map(|champion| champion.trial),
            last,
            resume: Some(self.resume_command()),
        }
    }

    fn resume_command(&self) -> String {
        resume_command(&self.dir, self.header)
    }

    /// Saves a measured champion that was just confirmed, for `generate` and `serve` on this machine.
    fn keep_found(&mut self, search: &Search<'_>, confirmation: &Confirmation) {
        match self.kept_for_others(search, confirmation) {
            None => {}
            Some(Ok(path)) => {
                report::say(&format!("`generate` and `serve` use it here: {}", path.display()));
                self.found = Some(path);
            }
            Some(Err(why)) => {
                report::say(&format!("note: `generate` and `serve` do not use it: {why}"));
            }
        }
    }

    /// `None` if it did not beat the schedule that would run without it, else its file or why it is not saved.
    fn kept_for_others(
        &self,
        search: &Search<'_>,
        confirmation: &Confirmation,
    ) -> Option<Result<PathBuf, String>> {
        let verdict = &confirmation.verdict;
        let measured = verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
        let latency_us = verdict.latency_us.filter(|_| measured)?;
        let stands = confirmation.decision == Decision::Kept && confirmation.champion > 0;
        let champion =
            search.champion().filter(|trial| stands && trial.trial == confirmation.champion)?;
        let (context, header) = (self.context, self.header);
        let positions = header.predicted_at(context);
        if header.start(context) != reproducible(context, positions[0]) {
            let why = "the search did not begin with the schedule that they run; start one without --schedule";
            return Some(Err(why.to_owned()));
        }
        let Some(folder) = found::folder() else {
            return Some(Err("there is no data folder; AMK_DATA names one".to_owned()));
        };
        let [tokens] = *search.gate().timed_positions() else {
            let why = "it was judged at several contexts, and what they run was found at one";
            return Some(Err(why.to_owned()));
        };
        let entry =
            found::Entry::new(context, &header.device, tokens, &champion.config, latency_us);
        Some(found::keep(&folder, &entry).map_err(|failure| failure.message))
    }

    /// Returns the final document, and writes the table of kept trials and the best schedule as a file.
    fn finish(
        &mut self,
        search: &Search<'_>,
        stopped_by: StoppedBy,
        confirmation: Option<&Confirmation>,
    ) -> Result<Answer<Found>, Failure> {
        self.bar.finish_and_clear();
        let trials = search.trials();
        let refuted = confirmation.is_some_and(|c| c.decision == Decision::Reverted);
        let best = if refuted { trials.first() } else { search.champion() };
        let verdict = match confirmation {
            Some(confirmation) if !refuted => Some(&confirmation.verdict),
            Some(_) | None => best.map(|trial| &trial.verdict),
        };
        let count = |test: fn(&Trial) -> bool| trials.iter().filter(|trial| test(trial)).count();
        let kept: Vec<&Trial> = trials.iter().filter(|trial| trial.outcome.leads()).collect();
        let best_path = self.dir.join("best.json");
        if let Some(best) = best {
            let text = serde_json::to_string_pretty(&best.config).unwrap_or_default() + "\n";
            let remedy = "free some space, or choose another --out";
            corpus::files::replace(&best_path, text.as_bytes())
                .map_err(Failure::cannot("write", &best_path, remedy))?;
        }
        say_end(&kept, best, confirmation, &best_path);
        if stopped_by != StoppedBy::Interrupted {
            store_sink::seal(&self.dir, self.ledger.path());
        }
        if search.rejected() > 0 {
            let count = search.rejected();
            report::say(&format!("{count} illegal proposals, which cost no trial"));
        }
        let spent = spent::Sum::of(trials, search.dropped());
        let wall = spent::clock();
        report::say(&spent.line(wall));
        if stopped_by == StoppedBy::Interrupted {
            report::say(&format!("interrupted; continue with: {}", self.resume_command()));
        }
        let raced = trials.iter().filter(|trial| trial.origin == Origin::Race).count();
        let document = Found {
            schema: "amk.loop.v1",
            best_verdict: verdict.cloned(),
            best_config: best.map(|trial| trial.config),
            n_trials: trials.len() - raced,
            n_raced: raced,
            n_valid: count(|trial| trial.verdict.valid),
            n_correct: count(|trial| trial.verdict.correct),
            n_kept: count(|trial| trial.outcome == End::Kept),
            n_rejected: search.rejected(),
            results_tsv: self.results.path().to_path_buf(),
            ledger: self.ledger.path().to_path_buf(),
            store: self.keeper.path().map(Path::to_path_buf),
            stopped_by: stopped_by.name().to_owned(),
            best_config_file: best.map(|_| best_path),
            found_schedule_file: self.found.clone(),
            schedule_source: self.header.source(),
            kept: kept.into_iter().map(Kept::from).collect(),
            confirmation: confirmation.cloned(),
            cards: document::cards(&self.header.cards, trials),
            spent: spent.to_json(wall),
            resume: self.resume_command(),
        };
        let exit = match (stopped_by, best, confirmation.map(|c| c.decision)) {
            (StoppedBy::Interrupted, _, _) => Exit::Interrupted,
            (_, None, _) => Exit::No,
            (_, Some(_), Some(Decision::Inconclusive)) => Exit::Inconclusive,
            (_, Some(_), Some(Decision::Kept | Decision::Reverted) | None) => Exit::Yes,
        };
        Ok(Answer { document, exit })
    }
}

fn say_end(
    kept: &[&Trial],
    best: Option<&Trial>,
    confirmation: Option<&Confirmation>,
    best_path: &Path,
) {
    report::say("kept:");
    for trial in kept {
        report::say(&trial_line(trial));
    }
    if let Some(confirmation) = confirmation {
        let decision = match confirmation.decision {
            Decision::Kept => "confirmed",
            Decision::Reverted => "NOT confirmed",
            Decision::Inconclusive => "neither confirmed nor refuted",
        };
        report::say(&format!("champion {decision}: {}", confirmation.why));
    }
    match best {
        Some(best) => report::say(&format!(
            "best: trial {}, {} {}, {}, schedule in {}",
            best.trial,
            report::maybe(best.verdict.latency_us, "us"),
            best.verdict.latency_kind.map_or("", search::LatencyKind::name),
            report::maybe(best.verdict.pct_of_roofline, "% of the bound"),
            best_path.display()
        )),
        None => report::say("no schedule was correct; see `why` in the table"),
    }
}

fn trial_line(trial: &Trial) -> String {
    let card = trial.card.map_or_else(String::new, |card| format!("card {card}  "));
    format!(
        "  {:>4} {:8} {:12} {:>11} {:>15}  {card}{}",
        trial.trial,
        format!("{:?}", trial.origin).to_lowercase(),
        trial.outcome.name(),
        report::maybe(trial.verdict.latency_us, "us"),
        gain(trial),
        if trial.verdict.correct { changes(trial, CHANGES_SHOWN) } else { trial.why.clone() }
    )
}

/// The gain over the incumbent; an interval when it was measured.
pub(crate) fn gain(trial: &Trial) -> String {
    let percent = |share: f64| format!("{:+.1}", 100.0 * share);
    match trial.gain {
        None => String::new(),
        Some(gain) if gain.low == gain.high => format!("{} %", percent(gain.low)),
        Some(gain) => format!("{}..{} %", percent(gain.low), percent(gain.high)),
    }
}

/// `path before -> after` of the changed knobs, at most `most` of them.
fn changes(trial: &Trial, most: usize) -> String {
    let one = |(path, pair): (&String, &Value)| {
        format!("{path} {} -> {}", report::word(pair.get(0)), report::word(pair.get(1)))
    };
    let mut shown: Vec<String> = trial.changed.iter().take(most).map(one).collect();
    if trial.changed.len() > most {
        shown.push(format!("and {} more", trial.changed.len() - most));
    }
    shown.join(", ")
}

fn cells(trial: &Trial) -> Vec<String> {
    let verdict = &trial.verdict;
    let number = |value: Option<f64>| value.map_or_else(String::new, |v| format!("{v:.3}"));
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    vec![
        trial.trial.to_string(),
        format!("{:?}", trial.origin).to_lowercase(),
        trial.outcome.name().to_owned(),
        number(verdict.latency_us),
        verdict.latency_kind.map_or("", search::LatencyKind::name).to_owned(),
        number(trial.gain.map(|gain| 100.0 * gain.low)),
        number(trial.gain.map(|gain| 100.0 * gain.high)),
        number(verdict.pct_of_roofline),
        verdict.correct.to_string(),
        text(&verdict.schedule_id),
        text(&verdict.program_id),
        text(&verdict.kernel_id),
        changes(trial, usize::MAX),
        trial.why.clone(),
        trial.card.map_or_else(String::new, |card| card.to_string()),
    ]
}
