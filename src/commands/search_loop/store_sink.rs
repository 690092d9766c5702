//! Adds the ledger's acknowledged rows to the store. The ledger is the record, so a store that cannot be written never
//! ends a search: the failure is reported once, with the command that brings the store up to date.

use std::path::{Path, PathBuf};

use corpus::{CorpusError, Link, Store};
use ir::schedule::ScheduleConfig;
use search::Search;
use search::strategy::{MoveStats, PriorMove, rank};
use serde_json::{Map, Value};

use crate::cli::LoopArgs;
use crate::report;

/// The default store, beside the folders of the searches.
pub(crate) const STORE: &str = "store.sqlite";

/// A store that follows one ledger.
pub(super) struct StoreSink {
    store: Option<Store>,
    run: String,
    ledger: PathBuf,
}

impl StoreSink {
    /// Opens the store and adds the rows already in the ledger: after a kill the ledger may have more than the store.
    pub(super) fn open(args: &LoopArgs, dir: &Path, ledger: &Path) -> Self {
        let mut keeper = Self { store: None, run: String::new(), ledger: ledger.to_path_buf() };
        let Some(path) = path(args, dir) else { return keeper };
        match keeper.begin(&path) {
            Ok(store) => keeper.store = Some(store),
            Err(error) => keeper.behind(&error),
        }
        keeper
    }

    fn begin(&mut self, path: &Path) -> Result<Store, CorpusError> {
        let contents = corpus::read(&self.ledger)?;
        let header = contents.hashes.first().map_or("", String::as_str);
        self.run = corpus::store::run_id(&contents.header, header);
        let mut store = Store::open(path)?;
        store.add(&self.run, contents.links())?;
        Ok(store)
    }

    /// The store's file, while it is kept up to date.
    pub(super) fn path(&self) -> Option<&Path> {
        self.store.as_ref().map(Store::path)
    }

    /// Adds an acknowledged row.
    pub(super) fn row(&mut self, link: Link) {
        let Some(store) = &mut self.store else { return };
        if let Err(error) = store.add(&self.run, [link]) {
            self.behind(&error);
        }
    }

    pub(super) fn program(&mut self, search: &Search<'_>, config: &ScheduleConfig) {
        let Some(store) = &mut self.store else { return };
        let Ok(candidate) = search.gate().lower(config) else { return };
        let saved = ir::text::save(&candidate.program);
        if let Err(error) = store.add_program(&candidate.program_id, &saved) {
            self.behind(&error);
        }
    }

    /// Stops writing to the store: a row after a missing one would break the chain.
    fn behind(&mut self, error: &CorpusError) {
        self.store = None;
        report::say(&format!(
            "note: {error}. The search goes on without the store; bring it up to date with: amk corpus import {}",
            self.ledger.display()
        ));
    }
}

/// The gains of moves so far, on all graphs, for this kind of latency and this target.
const SEEN: &str = "SELECT move, tries, gain_sum FROM priors WHERE latency_kind = ?1 AND target = ?2 ORDER BY move, graph, device";

/// The helpful moves in the store for a new search: none if there is no store yet.
pub(super) fn known(
    args: &LoopArgs,
    dir: &Path,
    kind: &str,
    target: &str,
) -> Result<Vec<PriorMove>, CorpusError> {
    let Some(path) = path(args, dir).filter(|path| path.is_file()) else { return Ok(Vec::new()) };
    let rows = Store::existing(&path)?.query(SEEN, &[kind, target])?;
    let seen = |row: Map<String, Value>| {
        Some(MoveStats {
            to: serde_json::from_str(row.get("move")?.as_str()?).ok()?,
            tries: row.get("tries")?.as_f64()?,
            gain_sum: row.get("gain_sum")?.as_f64()?,
        })
    };
    Ok(rank(rows.into_iter().filter_map(seen)))
}

/// Seals the run of a search that has ended. An unsealed run is as safe as before, and counts as resumable.
pub(in crate::commands) fn seal(dir: &Path, ledger: &Path) {
    let sealed = corpus::read(ledger).and_then(|contents| {
        let first = contents.hashes.first().map_or("", String::as_str);
        let run = corpus::store::run_id(&contents.header, first);
        let rows = contents.hashes.len() as u64;
        corpus::manifest::seal_run(dir, &run, rows, super::header::unix_s())
    });
    if let Err(error) = sealed {
        report::say(&format!("note: the run is not sealed: {error}"));
    }
}

/// The store of the arguments: the one named, or the one beside the search's folder.
fn path(args: &LoopArgs, dir: &Path) -> Option<PathBuf> {
    match &args.store {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(path.clone()),
        None => Some(dir.parent().unwrap_or(Path::new("")).join(STORE)),
    }
}
