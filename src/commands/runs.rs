//! `amk runs`: the searches that are on the disk, and whether their ledgers hold.

use std::path::{Path, PathBuf};

use corpus::manifest::{self, State};
use corpus::{Contents, CorpusError};
use ir::Target;
use schemars::JsonSchema;
use search::{Audit, Floor, LatencyKind, Row, StepBytes, Terms, Timing};
use serde::Serialize;
use serde_json::Value;

use crate::cli::RunsArgs;
use crate::failure::{Exit, Failure};
use crate::report::{self, Answer};
use crate::working::Working;

pub(crate) mod compare;
pub(crate) mod export;
pub(crate) mod gc;
pub(super) mod recorded;
pub(crate) mod replay;
pub(crate) mod show;

/// The file that makes a folder a search.
const LEDGER: &str = "ledger.jsonl";

/// Folder of the searches when none is named.
const RUNS: &str = "runs";

/// Searches on the disk.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Runs {
    #[schemars(extend("const" = "amk.runs.v1"))]
    schema: &'static str,
    /// One for each ledger.
    runs: Vec<Run>,
}

/// One of them.
#[derive(Debug, Serialize, JsonSchema)]
struct Run {
    /// Its file.
    ledger: PathBuf,
    /// Whether the chain is whole and every row follows from its samples.
    holds: bool,
    /// The first line that does not hold, from one.
    line: Option<usize>,
    /// Why it does not.
    reason: Option<String>,
    /// Trials up to there.
    trials: usize,
    /// Whether an unfinished row at its end was left out.
    torn: bool,
    /// open (it can be resumed), sealed or collected.
    state: &'static str,
    /// The command that proposed, if the search had one. Nothing runs it but `loop --resume --proposer` with the same text.
    proposer: Option<Value>,
    model: Option<Value>,
    target: Option<Value>,
    device: Option<Value>,
    latency_kind: Option<Value>,
    /// Latency of the schedule that leads, in microseconds a token.
    best_us: Option<f64>,
}

impl Runs {
    fn of(found: &[Found]) -> Self {
        Self { schema: "amk.runs.v1", runs: found.iter().map(Found::document).collect() }
    }
}

/// What is wrong with a ledger.
struct Finding {
    /// The line, from one, if it is about one.
    line: Option<usize>,
    reason: String,
    exit: Exit,
}

/// What a ledger holds, as far as it could be read.
struct Found {
    path: PathBuf,
    header: Value,
    trials: usize,
    best_us: Option<f64>,
    /// The champion that was refuted last.
    refuted: Option<u64>,
    torn: bool,
    /// Whether the run is sealed.
    state: State,
    finding: Option<Finding>,
}

/// Checks ledgers: the chain, the head, and that every row follows from its samples.
pub(crate) fn verify(args: &RunsArgs) -> Result<Answer<Runs>, Failure> {
    let mut exit = Exit::Yes;
    let mut all = Vec::new();
    let paths = ledgers(&args.paths)?;
    let working = Working::through(paths.len(), "checking");
    for path in paths {
        let found = look(&path);
        say(&found);
        working.done();
        if let Some(finding) = &found.finding
            && exit != Exit::Integrity
        {
            exit = finding.exit;
        }
        all.push(found);
    }
    Ok(Answer { document: Runs::of(&all), exit })
}

/// Lists ledgers, whole or not.
pub(crate) fn list(args: &RunsArgs) -> Result<Answer<Runs>, Failure> {
    let paths = ledgers(&args.paths)?;
    let working = Working::through(paths.len(), "reading");
    let looked = |path: &PathBuf| {
        let found = look(path);
        working.done();
        found
    };
    let found: Vec<Found> = paths.iter().map(looked).collect();
    drop(working);
    let rows: Vec<(String, String)> =
        found.iter().map(|found| (found.path.display().to_string(), found.line())).collect();
    report::table(&rows);
    Ok(Answer { document: Runs::of(&found), exit: Exit::Yes })
}

/// The ledgers that are meant: files, folders of one search, folders of many.
pub(crate) fn ledgers(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let all = [PathBuf::from(RUNS)];
    let mut found = Vec::new();
    for path in if paths.is_empty() { &all } else { paths } {
        let before = found.len();
        if path.join(LEDGER).is_file() {
            found.push(path.join(LEDGER));
        } else if path.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|e| {
                Failure::usage(format!("cannot read {}: {e}; check the path", path.display()))
            })?;
            let inside = entries.filter_map(|entry| Some(entry.ok()?.path().join(LEDGER)));
            found.extend(inside.filter(|ledger| ledger.is_file()));
            found[before..].sort();
        } else if path.is_file() {
            found.push(path.clone());
        }
        if found.len() == before {
            return Err(Failure::usage(format!(
                "there is no search in {} (no {LEDGER}); name a ledger, or the folder of a search",
                path.display()
            )));
        }
    }
    Ok(found)
}

/// The one ledger that a path means.
pub(crate) fn one_ledger(path: &Path) -> Result<PathBuf, Failure> {
    let mut found = ledgers(&[path.to_path_buf()])?;
    match (found.pop(), found.len()) {
        (Some(ledger), 0) => Ok(ledger),
        (_, more) => Err(Failure::usage(format!(
            "{} holds {} runs; name one of them",
            path.display(),
            more + 1
        ))),
    }
}

/// Whether a path can only mean a run: a folder, or a file that is called as ledgers are.
pub(crate) fn names_run(path: &Path) -> bool {
    path.is_dir() || path.file_name().is_some_and(|name| name == LEDGER)
}

/// The rows of a run that holds, and whether it is sealed. Whatever reads a run or goes on with it begins here, so that nothing takes what
/// `runs verify` refuses.
pub(super) fn sound(ledger: &Path) -> Result<(Contents, State), Failure> {
    let (found, contents) = examined(ledger);
    match (found.finding, contents) {
        (None, Some(contents)) => Ok((contents, found.state)),
        (finding, _) => {
            let (line, reason, exit) = finding.map_or_else(
                || (None, "it cannot be read".to_owned(), Exit::Usage),
                |finding| (finding.line, finding.reason, finding.exit),
            );
            let line = line.map_or_else(String::new, |line| format!(" line {line}"));
            let message = format!("{}{line} does not hold: {reason}", ledger.display());
            Err(Failure { exit, message })
        }
    }
}

fn look(path: &Path) -> Found {
    examined(path).0
}

/// What is wrong with a run, and its rows as far as they are a chain.
fn examined(path: &Path) -> (Found, Option<Contents>) {
    let mut found = Found::of(path.to_path_buf());
    match corpus::read(path) {
        Ok(contents) => {
            found.torn = contents.torn;
            found.finding = audit(&contents.header, &contents.records, &mut found);
            found.header = contents.header.clone();
            if found.finding.is_none() {
                found.finding = seal(path, &mut found.state);
            }
            return (found, Some(contents));
        }
        Err(error) => {
            let (line, exit) = match &error {
                CorpusError::Tampered { line, .. } => (Some(*line), Exit::Integrity),
                CorpusError::Io { .. }
                | CorpusError::Exists { .. }
                | CorpusError::Locked { .. }
                | CorpusError::Schema { .. }
                | CorpusError::Store { .. }
                | CorpusError::NoStore { .. }
                | CorpusError::NewerStore { .. }
                | CorpusError::Diverged { .. }
                | CorpusError::Foreign { .. } => (None, Exit::Usage),
            };
            found.finding = Some(Finding { line, reason: error.to_string(), exit });
        }
    }
    (found, None)
}

/// What does not fit a sealed run's manifest.
fn seal(ledger: &Path, state: &mut State) -> Option<Finding> {
    let folder = recorded::folder(ledger)?;
    match manifest::look(folder) {
        Ok(looked) => {
            *state = looked.state;
            let reason = looked.problems.join("; ");
            let exit = Exit::Integrity;
            (!reason.is_empty()).then_some(Finding { line: None, reason, exit })
        }
        Err(error) => {
            let exit = if error.is_integrity() { Exit::Integrity } else { Exit::Usage };
            Some(Finding { line: None, reason: error.to_string(), exit })
        }
    }
}

/// The rows of a ledger.
pub(crate) fn rows(contents: &Contents, path: &Path) -> Result<Vec<Row>, Failure> {
    let row = |(index, record): (usize, &Value)| {
        serde_json::from_value(record.clone()).map_err(|error| {
            Failure::usage(format!(
                "{} line {}: written by another version of amk ({error}); start a new search",
                path.display(),
                index + 2
            ))
        })
    };
    contents.records.iter().enumerate().map(row).collect()
}

/// The first row that does not follow from its samples and the rows before it.
fn audit(header: &Value, records: &[Value], found: &mut Found) -> Option<Finding> {
    let at =
        |index: usize, reason: String, exit| Some(Finding { line: Some(index + 2), reason, exit });
    let Some(terms) = terms(header) else {
        let reason = "the header is that of another version of amk".to_owned();
        return Some(Finding { line: Some(1), reason, exit: Exit::Usage });
    };
    let mut audit = Audit::new(terms).with_floor(floor(header));
    let mut leads = Vec::new();
    for (index, record) in records.iter().enumerate() {
        let row: Row = match serde_json::from_value(record.clone()) {
            Ok(row) => row,
            Err(e) => {
                return at(index, format!("written by another version of amk ({e})"), Exit::Usage);
            }
        };
        if let Err(reason) = audit.row(&row) {
            return at(index, format!("the row does not follow: {reason}"), Exit::Integrity);
        }
        match row {
            Row::Trial(trial) => {
                found.trials += 1;
                if trial.outcome.leads() {
                    leads.push(trial);
                }
            }
            Row::Confirmation(last) => found.refuted = recorded::refuted(&last),
        }
    }
    let best = recorded::leading(leads.iter().map(|trial| &**trial), found.refuted);
    found.best_us = best.and_then(|trial| trial.verdict.latency_us);
    None
}

/// Refuses rows that do not follow from each other and their samples. `from` is where they are.
pub(super) fn require_sound(
    header: &Value,
    records: &[Value],
    from: &dyn std::fmt::Display,
) -> Result<(), Failure> {
    match audit(header, records, &mut Found::of(PathBuf::new())) {
        None => Ok(()),
        Some(Finding { line, reason, exit }) => Err(Failure {
            exit,
            message: format!(
                "{from}, row {}: {reason}; nothing of it was taken",
                line.unwrap_or(1) - 1
            ),
        }),
    }
}

/// What the header says that rows depend on.
fn terms(header: &Value) -> Option<Terms> {
    let kinds = [LatencyKind::MeasuredGpu, LatencyKind::Predicted];
    let name = header.get("latency_kind")?.as_str()?;
    Some(Terms {
        seed: header.get("seed")?.as_u64()?,
        min_gain: header.get("min_gain")?.as_f64()?,
        timing: Timing::default(),
        kind: Some(kinds.into_iter().find(|kind| kind.name() == name)?),
        cache_bytes: header.get("cache_bytes").and_then(Value::as_u64).unwrap_or(0),
    })
}

/// What a step of the search's model reads on its card: from the tables of this build where they have them, never from the rows. A model
/// in a folder is not opened for this, since the ledger is what says where it is.
fn floor(header: &Value) -> Floor {
    let text = |key: &str| header.get(key).and_then(Value::as_str).unwrap_or("");
    let Ok(target) = Target::by_name(text("target")) else { return Floor::default() };
    let predicted = text("latency_kind") == LatencyKind::Predicted.name();
    let device = text("device").to_lowercase().replace(' ', "");
    let card = (predicted || device.contains(&target.name)).then(|| target.clone());
    let named = |preset: &&model::Preset| preset.name == text("model");
    let preset = model::PRESETS.iter().find(named);
    let capacity = header.get("kv_capacity").and_then(Value::as_u64);
    let capacity = capacity.and_then(|tokens| u32::try_from(tokens).ok());
    let bytes = preset.and_then(|preset| {
        let graph = model::preset(preset.name)?.graph;
        let capacity = capacity.unwrap_or(u32::MAX).clamp(1, graph.max_positions);
        StepBytes::of(&graph, &target, capacity.min(abi::KV_CAPACITY_MAX))
    });
    Floor { bytes, card }
}

fn say(found: &Found) {
    let path = found.path.display();
    match &found.finding {
        None => report::say(&format!("{path}: holds, {}", found.line())),
        Some(Finding { line, reason, .. }) => {
            let line = line.map_or_else(String::new, |line| format!(" line {line}"));
            report::say(&format!("{path}: DOES NOT HOLD:{line} {reason}"));
        }
    }
}

impl Found {
    fn of(path: PathBuf) -> Self {
        let header = Value::Null;
        Self {
            path,
            header,
            trials: 0,
            best_us: None,
            refuted: None,
            torn: false,
            state: State::Open,
            finding: None,
        }
    }

    fn word(&self, key: &str) -> &str {
        self.header.get(key).and_then(Value::as_str).unwrap_or("?")
    }

    /// One line for people.
    fn line(&self) -> String {
        if let Some(finding) = &self.finding {
            return format!("does not hold: {}", finding.reason);
        }
        let torn = if self.torn { ", an unfinished row at its end" } else { "" };
        let command = self.header.get("proposer").and_then(Value::as_str);
        let proposer = command.map_or_else(String::new, |c| format!(", proposer {c:?}"));
        format!(
            "{}, {} trials of {} on {}, best {}, {}{torn}{proposer}",
            recorded::state_name(&self.state),
            self.trials,
            self.word("model"),
            self.word("device"),
            report::maybe(self.best_us, "us"),
            self.word("latency_kind")
        )
    }

    fn document(&self) -> Run {
        let said = |key: &str| self.header.get(key).cloned();
        Run {
            ledger: self.path.clone(),
            holds: self.finding.is_none(),
            line: self.finding.as_ref().and_then(|finding| finding.line),
            reason: self.finding.as_ref().map(|finding| finding.reason.clone()),
            trials: self.trials,
            torn: self.torn,
            state: recorded::state_name(&self.state),
            proposer: said("proposer").filter(|command| !command.is_null()),
            model: said("model"),
            target: said("target"),
            device: said("device"),
            latency_kind: said("latency_kind"),
            best_us: self.best_us,
        }
    }
}
