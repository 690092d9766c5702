//! `amk runs`: the searches on the disk, and whether their ledgers are valid.

use std::path::{Path, PathBuf};

use corpus::Contents;
use corpus::manifest::{self, State};
use ir::Target;
use schemars::JsonSchema;
use search::{LatencyKind, RooflineBound, StepBytes, Terms, Timing};
use serde::Serialize;
use serde_json::Value;

use crate::cli::RunsArgs;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::report::{self, Answer};
use crate::spinner::Spinner;

use recorded::Recorded;

pub(crate) mod compare;
pub(crate) mod export;
pub(crate) mod gc;
pub(super) mod recorded;
pub(crate) mod replay;
pub(crate) mod show;

/// The file whose presence marks a folder as a search.
pub(crate) const LEDGER: &str = "ledger.jsonl";

/// Folder of the searches if none is named.
pub(crate) const RUNS: &str = "runs";

const SCHEMA: &str = "amk.runs.v1";

/// Searches on the disk.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Runs {
    #[schemars(extend("const" = "amk.runs.v1"))]
    schema: &'static str,
    /// One entry per ledger.
    runs: Vec<Run>,
}

/// One of them.
#[derive(Debug, Serialize, JsonSchema)]
struct Run {
    /// Its file.
    ledger: PathBuf,
    /// Whether the chain is complete and every row follows from its samples.
    holds: bool,
    /// The first invalid line, from one.
    line: Option<usize>,
    /// Why the line is invalid.
    reason: Option<String>,
    /// Trials up to that line.
    trials: usize,
    /// Whether an unfinished row at its end was left out.
    torn: bool,
    /// open (it can be resumed), sealed or collected.
    state: &'static str,
    /// The command that proposed, if the search had one. It is only run by `loop --resume --proposer` with the same text.
    proposer: Option<Value>,
    model: Option<Value>,
    target: Option<Value>,
    device: Option<Value>,
    latency_kind: Option<Value>,
    /// Latency of the champion, in microseconds per token.
    best_us: Option<f64>,
}

pub(super) struct Finding {
    /// The line, from one, if the finding is about one.
    line: Option<usize>,
    reason: String,
    exit: Exit,
}

/// Checks ledgers: the chain, the tip record, and that every row follows from its samples.
pub(crate) fn verify(args: &RunsArgs) -> Result<Answer<Runs>, Failure> {
    let mut exit = Exit::Yes;
    let document = look_at_each(args, "checking", |found| {
        say(found);
        let finding = found.finding.as_ref().filter(|_| exit != Exit::Integrity);
        exit = finding.map_or(exit, |finding| finding.exit);
    })?;
    Ok(Answer { document, exit })
}

pub(crate) fn list(args: &RunsArgs) -> Result<Answer<Runs>, Failure> {
    let mut lines = Vec::new();
    let document = look_at_each(args, "reading", |found| {
        lines.push((found.ledger.display().to_string(), line(found)));
    })?;
    report::table(&lines);
    Ok(Answer { document, exit: Exit::Yes })
}

fn look_at_each(
    args: &RunsArgs,
    what: &str,
    mut look: impl FnMut(&Recorded),
) -> Result<Runs, Failure> {
    let paths = ledgers(&args.paths)?;
    let working = Spinner::through(paths.len(), what);
    let one = |path: PathBuf| {
        let found = Recorded::look(&path);
        look(&found);
        working.done();
        document(&found)
    };
    Ok(Runs { schema: SCHEMA, runs: paths.into_iter().map(one).collect() })
}

/// The ledgers named by paths: files, folders of one search, folders of many.
pub(crate) fn ledgers(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let all = [PathBuf::from(RUNS)];
    let mut found = Vec::new();
    for path in if paths.is_empty() { &all } else { paths } {
        let before = found.len();
        if path.join(LEDGER).is_file() {
            found.push(path.join(LEDGER));
        } else if path.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|e| files::unreadable(path, e))?;
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

/// The only ledger that a path names.
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

/// Whether a path can only mean a run: a folder, or a file with the name of a ledger.
pub(crate) fn names_run(path: &Path) -> bool {
    path.is_dir() || path.file_name().is_some_and(|name| name == LEDGER)
}

/// A valid run, and its rows as written. Every command that reads or resumes a run starts here, so that none accepts
/// what `runs verify` refuses.
pub(super) fn sound(ledger: &Path) -> Result<(Recorded, Contents), Failure> {
    let (mut found, contents) = Recorded::examined(ledger);
    if let (None, Some(contents)) = (&found.finding, contents) {
        return Ok((found, contents));
    }
    let finding = found.finding.take();
    let Finding { line, reason, exit } = finding.unwrap_or_else(|| Finding {
        line: None,
        reason: "it cannot be read".to_owned(),
        exit: Exit::Usage,
    });
    let line = line.map_or_else(String::new, |line| format!(" line {line}"));
    let message = format!(
        "{}{line} does not hold: {reason}; restore the file from a copy, or start again in another --out",
        ledger.display()
    );
    Err(Failure { exit, message })
}

/// The first mismatch between a sealed run and its manifest.
pub(super) fn seal(ledger: &Path, state: &mut State) -> Option<Finding> {
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

/// Refuses rows that do not follow from each other and their samples. `from` is their origin, for the error.
pub(super) fn require_sound(
    header: &Value,
    records: &[Value],
    from: &dyn std::fmt::Display,
) -> Result<(), Failure> {
    let held = Recorded::of(Path::new("")).take(header, records);
    held.map_err(|Finding { line, reason, exit }| {
        let row = line.unwrap_or(1) - 1;
        Failure { exit, message: format!("{from}, row {row}: {reason}; nothing of it was taken") }
    })
}

/// The terms in the header that rows depend on.
pub(super) fn terms(header: &Value) -> Option<Terms> {
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

/// The roofline bound of the search's model on its card: from the tables of this build if they have them, never from
/// the rows. A model in a folder is not opened for this, since its path comes from the ledger.
pub(super) fn bound(header: &Value) -> RooflineBound {
    let text = |key: &str| header.get(key).and_then(Value::as_str).unwrap_or("");
    let Ok(target) = Target::by_name(text("target")) else { return RooflineBound::default() };
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
    RooflineBound { bytes, card }
}

fn say(found: &Recorded) {
    let path = found.ledger.display();
    match &found.finding {
        None => report::say(&format!("{path}: holds, {}", line(found))),
        Some(Finding { line, reason, .. }) => {
            let line = line.map_or_else(String::new, |line| format!(" line {line}:"));
            report::say(&format!("{path}: DOES NOT HOLD:{line} {reason}"));
        }
    }
}

fn line(found: &Recorded) -> String {
    if let Some(finding) = &found.finding {
        return format!("does not hold: {}", finding.reason);
    }
    let torn = if found.torn { ", an unfinished row at its end" } else { "" };
    let proposer = found.word("proposer").map_or_else(String::new, |c| format!(", proposer {c:?}"));
    let word = |key: &str| found.word(key).unwrap_or("?");
    format!(
        "{}, {} trials of {} on {}, best {}, {}{torn}{proposer}",
        recorded::state_name(&found.state),
        found.trials.len(),
        word("model"),
        word("device"),
        report::maybe(found.best_us(), "us"),
        word("latency_kind")
    )
}

fn document(found: &Recorded) -> Run {
    let said = |key: &str| found.header.get(key).cloned();
    let finding = found.finding.as_ref();
    Run {
        ledger: found.ledger.clone(),
        holds: finding.is_none(),
        line: finding.and_then(|finding| finding.line),
        reason: finding.map(|finding| finding.reason.clone()),
        trials: found.trials.len(),
        torn: found.torn,
        state: recorded::state_name(&found.state),
        proposer: said("proposer").filter(|command| !command.is_null()),
        model: said("model"),
        target: said("target"),
        device: said("device"),
        latency_kind: said("latency_kind"),
        best_us: found.best_us(),
    }
}
