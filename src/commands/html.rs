//! `amk report`: searches as one HTML page that needs nothing else. It shows what the ledger says and computes nothing new but medians.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use search::{Confirmation, Trial};
use serde::Serialize;
use serde_json::Value;

use super::runs;
use super::runs::recorded::Recorded;
use crate::cli::ReportArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::files;
use crate::report::{self, Answer};

mod charts;
mod effects;
mod page;
mod thin;

/// Where the page goes when nothing is said.
pub(crate) const FILE: &str = "report.html";

/// A page that was written.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Written {
    #[schemars(extend("const" = "amk.report.v1"))]
    schema: &'static str,
    /// The page.
    file: PathBuf,
    /// Its length.
    bytes: usize,
    /// The ledgers that it shows.
    ledgers: Vec<PathBuf>,
    /// Their trials.
    trials: usize,
}

/// A search as the page shows it.
pub(super) struct Run {
    /// Its ledger.
    ledger: PathBuf,
    /// The ledger's first record.
    header: Value,
    /// The trials, first to last.
    trials: Vec<Trial>,
    /// The number of the trial that leads at the end.
    champion: Option<u64>,
    /// The last confirmation.
    confirmation: Option<Confirmation>,
}

pub(crate) fn run(args: &ReportArgs) -> Outcome {
    answer(args)?.print()
}

/// Writes the page, and says where it is.
pub(crate) fn answer(args: &ReportArgs) -> Result<Answer<Written>, Failure> {
    let file = args.out.clone().unwrap_or_else(|| PathBuf::from(FILE));
    check_page(&file, args.force)?;
    let ledgers = runs::ledgers(&args.runs)?;
    let shown: Vec<Run> = ledgers.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
    let page = page::render(&shown);
    files::write_whole(&file, page.as_bytes())?;
    report::say(&format!("{}: {} bytes, needs no network", file.display(), page.len()));
    let trials = shown.iter().map(|run| run.trials.len()).sum();
    let document = Written { schema: "amk.report.v1", file, bytes: page.len(), ledgers, trials };
    Ok(Answer { document, exit: Exit::Yes })
}

/// Whether the page may be written there. What is no file, such as a pipe, holds nothing that would be lost.
fn check_page(file: &Path, force: bool) -> Result<(), Failure> {
    if file.is_file() && !force {
        return Err(Failure::usage(format!(
            "{} exists; name another --out, or give --force to write over it",
            file.display()
        )));
    }
    Ok(())
}

fn read(path: &Path) -> Result<Run, Failure> {
    let found = Recorded::read(path)?;
    let champion = found.champion().map(|trial| trial.trial);
    let Recorded { header, trials, confirmation, .. } = found;
    Ok(Run { ledger: path.to_path_buf(), header, trials, champion, confirmation })
}

impl Run {
    /// A word of the header.
    fn word(&self, key: &str) -> String {
        match self.header.get(key) {
            Some(Value::String(text)) => text.clone(),
            None | Some(Value::Null) => "-".to_owned(),
            Some(other) => other.to_string(),
        }
    }

    /// Whether its latencies were measured.
    fn is_measured(&self) -> bool {
        self.word("latency_kind") == search::LatencyKind::MeasuredGpu.name()
    }

    /// `measured` or `predicted`.
    fn kind(&self) -> &'static str {
        if self.is_measured() { "measured" } else { "predicted" }
    }

    /// The baseline's latency on the card of a trial: on another card it would say nothing beside that trial's.
    fn baseline_us(&self, trial: &Trial) -> Option<f64> {
        let first = self.trials.first()?;
        if first.card == trial.card {
            return first.verdict.latency_us;
        }
        first.beside.iter().find(|other| Some(other.card) == trial.card)?.latency_us
    }

    /// The trial that leads at the end.
    fn champion(&self) -> Option<&Trial> {
        self.trials.iter().find(|trial| Some(trial.trial) == self.champion)
    }
}

#[cfg(test)]
mod tests;
