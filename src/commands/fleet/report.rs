//! `amk fleet report`: the ledgers of a board as runs on the disk. Each is audited, and its verdict is derived again.

use std::path::Path;

use corpus::Contents;
use fleet::{Entry, Recorded, champions};
use serde_json::json;

use super::finding::finding;
use super::{open, status};
use crate::cli::FleetReportArgs;
use crate::commands::runs::{self, recorded::Recorded as Run};
use crate::failure::{Exit, Failure, Outcome};
use crate::report as out;

pub(crate) fn run(args: &FleetReportArgs) -> Outcome {
    let board = open(&args.board.board)?;
    let done = status::done(&board)?;
    let mut runs = Vec::new();
    for (entry, result) in &done {
        let (run, _) = written(entry, result, &args.out.join(entry.id.to_string()))?;
        runs.push(json!({
            "job": entry.id,
            "kind": entry.spec.kind,
            "model": entry.spec.model,
            "target": entry.spec.target,
            "ledger": run.ledger,
            "decision": result.finding.decision,
            "saved": result.finding.saved,
        }));
    }
    let champions = champions(&done);
    champions.iter().for_each(|champion| out::say(&status::line(champion)));
    out::say(&format!(
        "{} ledgers hold; take them into a store with: amk corpus import {}",
        runs.len(),
        args.out.display()
    ));
    out::document(&json!({
        "schema": "amk.fleet_report.v1",
        "board": board.path(),
        "runs": runs,
        "champions": champions,
    }))?;
    Ok(Exit::Yes)
}

/// Writes the ledger of a result, unless it is there, audits it, and derives the verdict again.
pub(super) fn written(
    entry: &Entry,
    result: &Recorded,
    folder: &Path,
) -> Result<(Run, Contents), Failure> {
    let ledger = folder.join(runs::LEDGER);
    let cannot = Failure::cannot::<std::io::Error>("write", folder, "name another --out");
    std::fs::create_dir_all(folder).map_err(cannot)?;
    for (path, text) in [(&ledger, &result.ledger), (&ledger.with_extension("head"), &result.head)]
    {
        match std::fs::read(path) {
            Ok(held) if held == text.as_bytes() => {}
            Ok(_) => {
                return Err(Failure::usage(format!(
                    "{} is there and is another file; name another --out",
                    path.display()
                )));
            }
            Err(_) => drop(corpus::files::replace(path, text.as_bytes()).map_err(cannot)?),
        }
    }
    let (run, contents) = runs::sound(&ledger)?;
    if finding(&entry.spec, &run)? != result.finding {
        return Err(Failure::integrity(format!(
            "the verdict of job {} does not follow from its ledger {}",
            entry.id,
            ledger.display()
        )));
    }
    Ok((run, contents))
}
