//! `amk runs gc`: makes room. Lists what it would delete; deletes it with `--apply`.
//!
//! It deletes searches without a single trial and, with `--keep`, sealed runs that are in the store, row for row, and
//! that are neither among the best of their kind nor the newest. A collected run keeps its manifest, so the chain of
//! later runs stays valid. Nothing is deleted from a run that another process writes, that is invalid, or that can be
//! resumed.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use corpus::Store;
use corpus::manifest::{State, collect_run};
use serde::Serialize;
use serde_json::json;

use super::ledgers;
use super::recorded::{Recorded, folder};
use crate::cli::GcArgs;
use crate::commands::search_loop::store_sink::STORE;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

#[derive(Serialize)]
struct Fate {
    folder: PathBuf,
    /// `keep`, `collect` (its manifest stays) or `remove`.
    action: &'static str,
    why: String,
    bytes: u64,
}

pub(crate) fn run(args: &GcArgs) -> Outcome {
    let mut fates = Vec::new();
    let mut sealed: BTreeMap<String, Vec<Recorded>> = BTreeMap::new();
    for ledger in ledgers(&args.runs.paths)? {
        let Some(place) = folder(&ledger) else { continue };
        match considered(&ledger, place) {
            Ok(found) => sealed.entry(kind_of(&found)).or_default().push(found),
            Err((action, why)) => fates.push(fate(place, action, why)),
        }
    }
    for (_, runs) in sealed {
        fates.extend(chosen(runs, args.keep)?);
    }
    fates.sort_by(|a, b| a.folder.cmp(&b.folder));
    for fate in &fates {
        report::say(&format!("  {:7} {}: {}", fate.action, fate.folder.display(), fate.why));
    }
    if args.apply {
        for fate in &fates {
            apply(fate)?;
        }
    }
    let bytes =
        fates.iter().filter(|fate| fate.action != "keep").map(|fate| fate.bytes).sum::<u64>();
    let verb = if args.apply { "freed" } else { "to free with --apply" };
    report::say(&format!("{bytes} bytes {verb}"));
    report::document(
        &json!({"schema": "amk.gc.v1", "applied": args.apply, "bytes": bytes, "runs": fates}),
    )?;
    Ok(Exit::Yes)
}

/// A valid sealed run, or the action and reason for one that is not.
fn considered(ledger: &Path, place: &Path) -> Result<Recorded, (&'static str, String)> {
    let written = corpus::files::open_own(ledger).is_ok_and(|file| file.try_lock().is_err());
    if written {
        return Err(("keep", "another process writes it".to_owned()));
    }
    let found = Recorded::look(ledger);
    if let Some(finding) = &found.finding {
        return Err(("keep", format!("it does not hold: {}", finding.reason)));
    }
    match found.state {
        State::Sealed(..) => Ok(found),
        State::Open if found.trials.is_empty() && only_a_search(place) => {
            Err(("remove", "its search never came as far as a trial".to_owned()))
        }
        State::Open | State::Collected(..) => Err(("keep", "it can be resumed".to_owned())),
    }
}

/// Whether a folder holds only files that a search writes.
fn only_a_search(place: &Path) -> bool {
    let own = ["ledger.jsonl", "ledger.head", "results.tsv"];
    let named = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|entry| own.iter().any(|name| entry.file_name() == **name))
    };
    std::fs::read_dir(place).is_ok_and(|mut entries| entries.all(named))
}

/// The key of runs whose latencies can be ranked together.
fn kind_of(found: &Recorded) -> String {
    let word = |key: &str| found.word(key).unwrap_or("").to_owned();
    let uuid = found.conditions().and_then(|conditions| conditions.uuid).unwrap_or_default();
    let graph = found.word("graph_id").map_or_else(|| word("graph"), str::to_owned);
    [graph, word("target"), word("latency_kind"), word("device"), uuid].join("\n")
}

/// The fates of runs of one kind: the best `keep` and the newest stay.
fn chosen(mut runs: Vec<Recorded>, keep: Option<usize>) -> Result<Vec<Fate>, Failure> {
    let us = |run: &Recorded| run.champion().and_then(|trial| trial.verdict.latency_us);
    let number = |run: &Recorded| match &run.state {
        State::Sealed(manifest, _) | State::Collected(manifest, _) => manifest.number,
        State::Open => u64::MAX,
    };
    let newest = runs.iter().map(number).max();
    runs.sort_by(|a, b| match (us(a), us(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    });
    let mut fates = Vec::new();
    for (rank, found) in runs.iter().enumerate() {
        let Some(place) = folder(&found.ledger) else { continue };
        let (action, why) = match keep {
            None => ("keep", "sealed; --keep N gives up all but the best N of a kind".to_owned()),
            Some(keep) if rank < keep => ("keep", format!("number {} of its kind", rank + 1)),
            Some(_) if Some(number(found)) == newest => {
                ("keep", "the newest of its kind".to_owned())
            }
            Some(_) => match in_store(found, place)? {
                Ok(store) => (
                    "collect",
                    format!("number {} of its kind; its rows are in {}", rank + 1, store.display()),
                ),
                Err(why) => ("keep", why),
            },
        };
        fates.push(fate(place, action, why));
    }
    Ok(fates)
}

/// The store beside a run, if it holds every row.
fn in_store(found: &Recorded, place: &Path) -> Result<Result<PathBuf, String>, Failure> {
    let path = place.parent().unwrap_or(Path::new("")).join(STORE);
    let missing = format!(
        "its rows are not all in {}: amk corpus import {} --store {0}",
        path.display(),
        place.display()
    );
    if !path.exists() {
        return Ok(Err(missing));
    }
    let store = Store::existing(&path)?;
    let links: Vec<corpus::Link> = corpus::read(&found.ledger)?.links().collect();
    Ok(if store.links(&found.run)? == links { Ok(path) } else { Err(missing) })
}

fn fate(place: &Path, action: &'static str, why: String) -> Fate {
    let entries = std::fs::read_dir(place).into_iter().flatten();
    let size = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.metadata().ok();
    let bytes = entries.filter_map(size).map(|found| found.len()).sum();
    Fate { folder: place.to_path_buf(), action, why, bytes }
}

fn apply(fate: &Fate) -> Result<(), Failure> {
    match fate.action {
        "collect" => {
            collect_run(&fate.folder)?;
        }
        "remove" => std::fs::remove_dir_all(&fate.folder)
            .map_err(|e| Failure::usage(format!("cannot remove {}: {e}", fate.folder.display())))?,
        _ => {}
    }
    Ok(())
}
