//! `amk fleet report`: the ledgers of a board as runs on the disk. Each is audited, and its verdict is derived again.

use std::path::{Path, PathBuf};

use corpus::Contents;
use fleet::{Board, Entry, Recorded, champions};
use serde_json::json;

use super::finding::finding;
#[cfg(feature = "full")]
use super::page;
use super::{open, status};
use crate::cli::FleetReportArgs;
#[cfg(feature = "full")]
use crate::commands::html;
use crate::commands::runs::{self, recorded::Recorded as Run};
use crate::failure::{Exit, Failure, Outcome};
#[cfg(feature = "full")]
use crate::files;
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
    let page = written_page(&board, &args.out)?;
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
        "page": page,
    }))?;
    Ok(Exit::Yes)
}

/// Writes the page of the fleet, if this build has pages.
fn written_page(board: &Board, folder: &Path) -> Result<Option<PathBuf>, Failure> {
    #[cfg(feature = "full")]
    {
        let file = folder.join(html::FILE);
        std::fs::create_dir_all(folder).map_err(cannot(folder))?;
        files::write_whole(&file, page::render(&status::document(board)?).as_bytes())?;
        out::say(&format!("{}: the page of this fleet", file.display()));
        Ok(Some(file))
    }
    #[cfg(not(feature = "full"))]
    {
        let _ = (board, folder);
        Ok(None)
    }
}

fn cannot(folder: &Path) -> impl Fn(std::io::Error) -> Failure + Copy {
    Failure::cannot("write", folder, "name another --out")
}

/// Writes the ledger of a result, unless it is there, audits it, and derives the verdict again.
pub(super) fn written(
    entry: &Entry,
    result: &Recorded,
    folder: &Path,
) -> Result<(Run, Contents), Failure> {
    let ledger = folder.join(runs::LEDGER);
    let cannot = cannot(folder);
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
