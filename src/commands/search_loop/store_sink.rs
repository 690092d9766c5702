//! Adds the ledger's acknowledged rows to the store. The ledger is the record, so a store that cannot be written never
//! ends a search: the failure is reported once, with the command that brings the store up to date.

use std::path::{Path, PathBuf};

use corpus::{CorpusError, Link, Store};
use ir::program::Dims;
use ir::schedule::ScheduleConfig;
use search::Search;
use search::strategy::{KnownRun, KnownTrial, weight};
use serde_json::Value;

use crate::cli::LoopArgs;
use crate::context::Context;
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

/// The measured trials of the searches for a target, the newest search first.
const MEASURED: &str = "SELECT t.run, t.config, t.latency_us, t.predicted_us, t.kernel_id, r.graph_id, \
    json_object('hidden', r.hidden, 'layers', r.layers, 'heads', r.heads, 'kv_heads', r.kv_heads, \
    'head_dim', r.head_dim, 'ffn', r.ffn, 'vocab', r.vocab, 'dtype', r.dtype) AS shape \
    FROM trials t JOIN runs r ON r.run = t.run WHERE r.latency_kind = ?1 AND r.target = ?2 \
    AND t.latency_us IS NOT NULL AND t.predicted_us IS NOT NULL AND r.hidden IS NOT NULL \
    ORDER BY r.began_unix_s DESC, t.run, t.seq";

/// Maximum trials of earlier searches that a search begins with: they are in its ledger's header.
const KNOWN_MAX: usize = 256;

/// The trials in the store for a new search: none if there is no store yet. The searches of one graph count together
/// as one.
pub(super) fn known(
    args: &LoopArgs,
    dir: &Path,
    context: &Context,
    kind: &str,
) -> Result<Vec<KnownRun>, CorpusError> {
    match path(args, dir).filter(|path| path.is_file()) {
        Some(path) => known_in(&path, context, kind),
        None => Ok(Vec::new()),
    }
}

/// The measured trials in a store for the context's target, by search.
pub(in crate::commands) fn known_in(
    path: &Path,
    context: &Context,
    kind: &str,
) -> Result<Vec<KnownRun>, CorpusError> {
    let rows = Store::existing(path)?.query(MEASURED, &[kind, &context.target.name])?;
    let here = Dims::from(context.graph());
    let mut runs: Vec<(String, KnownRun)> = Vec::new();
    for row in rows.iter().take(KNOWN_MAX) {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let us = |name: &str| row.get(name).and_then(Value::as_f64);
        let (Ok(config), Ok(shape)) =
            (serde_json::from_str(text("config")), serde_json::from_str(text("shape")))
        else {
            continue; // of a version with other knobs
        };
        let (config, shape): (ScheduleConfig, Dims) = (config, shape);
        let (Some(measured), Some(predicted)) = (us("latency_us"), us("predicted_us")) else {
            continue;
        };
        if runs.last().is_none_or(|(run, _)| run != text("run")) {
            let same_kernel = context.kernel_id(&config.kernel) == text("kernel_id");
            let weight = weight(same_kernel, &here, &shape);
            let run = KnownRun { graph: text("graph_id").to_owned(), weight, trials: Vec::new() };
            runs.push((text("run").to_owned(), run));
        }
        if let Some((_, run)) = runs.last_mut() {
            run.trials.push(KnownTrial::new(&config, measured, predicted));
        }
    }
    let mut runs: Vec<KnownRun> = runs.into_iter().map(|(_, run)| run).collect();
    let graphs: Vec<String> = runs.iter().map(|run| run.graph.clone()).collect();
    for run in &mut runs {
        run.weight /= graphs.iter().filter(|graph| **graph == run.graph).count() as f64;
    }
    Ok(runs)
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
