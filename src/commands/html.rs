//! `amk report`: searches as one self-contained HTML page. It shows the figures of the ledger and computes nothing new but medians.

use std::path::PathBuf;

use schemars::JsonSchema;
use search::Trial;
use serde::Serialize;

use super::runs;
use super::runs::recorded::Recorded as Run;
use crate::cli::ReportArgs;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::report::{self, Answer};

mod charts;
mod effects;
pub(super) mod page;

/// The default file.
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

pub(crate) fn answer(args: &ReportArgs) -> Result<Answer<Written>, Failure> {
    let file = args.out.clone().unwrap_or_else(|| PathBuf::from(FILE));
    // Something that is not a regular file, such as a pipe, has no contents to lose.
    if file.is_file() && !args.force {
        return Err(Failure::usage(format!(
            "{} exists; name another --out, or give --force to write over it",
            file.display()
        )));
    }
    let ledgers = runs::ledgers(&args.runs)?;
    let shown: Vec<Run> = ledgers.iter().map(|path| Run::read(path)).collect::<Result<_, _>>()?;
    let page = page::render(&shown);
    files::write_whole(&file, page.as_bytes())?;
    report::say(&format!("{}: {} bytes, needs no network", file.display(), page.len()));
    let trials = shown.iter().map(|run| run.trials.len()).sum();
    let document = Written { schema: "amk.report.v1", file, bytes: page.len(), ledgers, trials };
    Ok(Answer { document, exit: Exit::Yes })
}

impl Run {
    fn shown(&self, key: &str) -> String {
        report::word(self.header.get(key))
    }

    fn is_measured(&self) -> bool {
        self.word("latency_kind") == Some(search::LatencyKind::MeasuredGpu.name())
    }

    fn kind(&self) -> &'static str {
        if self.is_measured() { "measured" } else { "predicted" }
    }

    /// The baseline's latency on the card of a trial: latencies on two cards are not comparable.
    fn baseline_us(&self, trial: &Trial) -> Option<f64> {
        let first = self.trials.first()?;
        if first.card == trial.card {
            return first.verdict.latency_us;
        }
        first.beside.iter().find(|other| Some(other.card) == trial.card)?.latency_us
    }
}

#[cfg(test)]
mod tests;
