//! Adds the ledger's acknowledged rows to the store. The ledger is the record, so a store that cannot be written never
//! ends a search: the failure is reported once, with the command that brings the store up to date.

use std::path::{Path, PathBuf};

use corpus::{CorpusError, Link, Store};
use ir::program::GraphShape;
use ir::schedule::ScheduleConfig;
use search::Search;
use search::strategy::{KnownRun, KnownTrial, weight};
use serde_json::{Value, json};

use super::Header;
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

/// The trials of the searches for a target that were judged at the same contexts by steps of as many sequences, the newest
/// search first.
const MEASURED: &str = "SELECT t.run, t.config, t.latency_us, t.predicted_us, t.kernel_id, r.graph_id, \
    json_object('hidden', r.hidden, 'layers', r.layers, 'heads', r.heads, 'kv_heads', r.kv_heads, \
    'head_dim', r.head_dim, 'ffn', r.ffn, 'vocab', r.vocab, 'dtype', r.dtype, 'codes', r.codes) AS shape \
    FROM trials t JOIN runs r ON r.run = t.run WHERE r.latency_kind = ?1 AND r.target = ?2 \
    AND t.latency_us IS NOT NULL AND t.predicted_us IS NOT NULL AND r.hidden IS NOT NULL \
    AND coalesce(r.contexts, '[]') = ?3 AND coalesce(r.batch, 1) = CAST(?4 AS INTEGER) \
    ORDER BY r.began_unix_s DESC, t.run, t.seq";

/// Maximum trials of earlier searches that a search begins with: they are in its ledger's header.
const KNOWN_MAX: usize = 256;

/// The trials in the store for a new search: none if there is no store yet. The searches of one graph count together
/// as one.
pub(super) fn known(
    args: &LoopArgs,
    dir: &Path,
    context: &Context,
    header: &Header,
) -> Result<Vec<KnownRun>, CorpusError> {
    match path(args, dir).filter(|path| path.is_file()) {
        Some(path) => known_in(&path, context, &header.kind, &header.contexts),
        None => Ok(Vec::new()),
    }
}

/// The trials in a store for the context's target, judged at these contexts, by search.
pub(in crate::commands) fn known_in(
    path: &Path,
    context: &Context,
    kind: &str,
    contexts: &[u32],
) -> Result<Vec<KnownRun>, CorpusError> {
    let contexts = json!(contexts).to_string();
    let (target, batch) = (&context.target.name, context.batch.to_string());
    let rows = Store::existing(path)?.query(MEASURED, &[kind, target, &contexts, &batch])?;
    let here = GraphShape::from(context.graph());
    let mut runs: Vec<(String, KnownRun)> = Vec::new();
    for row in rows.iter().take(KNOWN_MAX) {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let us = |name: &str| row.get(name).and_then(Value::as_f64);
        let (Ok(config), Ok(shape)) =
            (serde_json::from_str(text("config")), serde_json::from_str(text("shape")))
        else {
            continue; // of a version with other knobs
        };
        let (config, shape): (ScheduleConfig, GraphShape) = (config, shape);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::{DeviceChoice, PlaceArgs};

    #[test]
    fn trials_at_other_contexts_or_of_other_batches_are_not_learned_from() {
        let folder = tempfile::tempdir().unwrap();
        let place = PlaceArgs { device: DeviceChoice::Cpu, ..PlaceArgs::default() };
        let context = Context::load("toy", &place).unwrap_or_else(|f| panic!("{}", f.message));
        let at = folder.path().join("store.sqlite");
        let mut store = Store::open(&at).unwrap();
        let one = Value::Null;
        for (run, contexts, batch) in [
            ("plain", json!([]), &one),
            ("long", json!([2048]), &one),
            ("eight", json!([]), &json!(8)),
        ] {
            let header = json!({
                "run": run, "graph_id": run, "target": "h200", "latency_kind": "measured-gpu",
                "contexts": contexts, "batch": batch, "shape": GraphShape::from(context.graph()),
            });
            let trial = json!({
                "kind": "trial", "trial": 0, "outcome": "baseline", "predicted_us": 10.0,
                "config": context.neutral_config(), "verdict": {"latency_us": 11.0},
            });
            let path = folder.path().join(run).join("ledger.jsonl");
            corpus::Ledger::create(&path, &header).unwrap().append(&trial).unwrap();
            store.add(run, corpus::read(&path).unwrap().links()).unwrap();
        }
        let graphs = |context: &Context, contexts: &[u32]| {
            let found = known_in(&at, context, "measured-gpu", contexts).unwrap();
            found.into_iter().map(|run| run.graph).collect::<Vec<_>>()
        };
        let known = |contexts: &[u32]| graphs(&context, contexts);
        assert_eq!([known(&[]), known(&[2048])], [["plain"], ["long"]]);
        assert_eq!(known(&[128, 2048]), Vec::<String>::new());
        let eight = Context { batch: 8, ..context };
        assert_eq!(graphs(&eight, &[]), ["eight"]);
    }
}
