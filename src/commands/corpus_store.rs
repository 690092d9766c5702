//! `amk corpus`: the store of all searches. Everything that enters it has passed the checks of `runs verify`.

use std::io::Read;
use std::path::Path;

use corpus::store::{Added, BEST, PRIORS, run_id, schema};
use corpus::{Ledger, Link, Store};
use ir::text::LoadError;
use serde_json::{Map, Value, json};

use super::runs;
use crate::cli::{CorpusExportArgs, ImportArgs, StoreArgs};
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{files, report};

/// The beginning of every SQLite file.
const SQLITE: [u8; 16] = *b"SQLite format 3\0";

fn open(args: &StoreArgs) -> Result<Store, Failure> {
    if !args.store.exists() {
        return Err(Failure::usage(format!(
            "there is no store {}; a search makes one, or: amk corpus import RUNS --store {0}",
            args.store.display()
        )));
    }
    Ok(Store::existing(&args.store)?)
}

pub(crate) fn show(args: &StoreArgs) -> Outcome {
    let store = open(args)?;
    let rows: Map<String, Value> =
        store.counts()?.into_iter().map(|(table, rows)| (table.to_owned(), rows.into())).collect();
    let best = store.query(BEST, &[])?;
    let line = |best: &Map<String, Value>| {
        let word = |key: &str| best.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
        let us = report::maybe(best.get("best_us").and_then(Value::as_f64), "us");
        let of = |key: &str| best.get(key).map_or_else(String::new, Value::to_string);
        (
            format!("{} for {} on {}", word("model"), word("target"), word("device")),
            format!(
                "{us} {}, {} trials in {} runs",
                word("latency_kind"),
                of("trials"),
                of("runs")
            ),
        )
    };
    report::table(&best.iter().map(line).collect::<Vec<_>>());
    let total = |table: &str| rows.get(table).and_then(Value::as_u64).unwrap_or(0);
    report::say(&format!("{} runs, {} trials", total("runs"), total("trials")));
    report::document(&json!({
        "schema": "amk.corpus.v1",
        "store": args.store,
        "version": schema::VERSION,
        "rows": rows,
        "best": best,
        "moves": store.query(PRIORS, &[])?,
    }))?;
    Ok(Exit::Yes)
}

pub(crate) fn check(args: &StoreArgs) -> Outcome {
    let reason = wrong(&open(args)?)?;
    match &reason {
        None => report::say(&format!("{}: holds", args.store.display())),
        Some(reason) => report::say(&format!(
            "{}: DOES NOT HOLD: {reason}; make it anew from the runs: amk corpus import RUNS --store NEW",
            args.store.display()
        )),
    }
    let holds = reason.is_none();
    let schema = "amk.corpus_check.v1";
    report::document(
        &json!({"schema": schema, "store": args.store, "holds": holds, "reason": reason}),
    )?;
    Ok(if holds { Exit::Yes } else { Exit::Integrity })
}

/// What is wrong with a store, programs included.
fn wrong(store: &Store) -> Result<Option<String>, Failure> {
    let mut unread = 0_u64;
    let found = match store.check()? {
        Ok(()) => store.each_program(|id, saved| {
            unread += u64::from(!is_program(id, saved)?);
            Ok(())
        })?,
        Err(reason) => Err(reason),
    };
    if unread > 0 {
        report::say(&format!("note: {unread} programs are of another build and were not checked"));
    }
    Ok(found.err())
}

pub(crate) fn import(args: &ImportArgs) -> Outcome {
    // Everything is read and checked before anything is written.
    let (mut ledgers, mut stores) = (Vec::new(), Vec::new());
    let working = Spinner::through(args.paths.len(), "reading");
    for path in &args.paths {
        if is_sqlite(path) {
            stores.push(sound_store(path)?);
        } else {
            for ledger in runs::ledgers(std::slice::from_ref(path))? {
                let (found, contents) = runs::sound(&ledger)?;
                ledgers.push((found.run, ledger, contents));
            }
        }
        working.done();
    }
    drop(working);
    let mut store = Store::open(&args.store.store)?;
    let mut imported = Vec::new();
    let mut add = |run: &str, from: &Path, added: Added| {
        let Added { new, held } = added;
        report::say(&format!("{}: run {run}, {new} rows new, {held} held", from.display()));
        imported.push(json!({"run": run, "from": from, "new": new, "held": held}));
    };
    for (run, from, contents) in ledgers {
        add(&run, &from, store.add(&run, contents.links())?);
    }
    let mut programs = 0;
    for from in stores {
        for run in from.runs()? {
            add(&run, from.path(), store.add(&run, from.links(&run)?)?);
        }
        let mut saved = Vec::new();
        let read = from.each_program(|id, bytes| {
            // What only another build can read is left out: nobody here can say that it is what its id says.
            saved.extend(is_program(id, bytes)?.then(|| (id.to_owned(), bytes.to_vec())));
            Ok(())
        })?;
        // It held a moment ago: somebody writes to it.
        read.map_err(|reason| {
            Failure::integrity(format!("{}: {reason}; its runs were taken", from.path().display()))
        })?;
        for (id, bytes) in saved {
            programs += u64::from(store.add_program(&id, &bytes)?);
        }
    }
    let path = &args.store.store;
    let schema = "amk.corpus_import.v1";
    report::document(
        &json!({"schema": schema, "store": path, "runs": imported, "programs": programs}),
    )?;
    Ok(Exit::Yes)
}

/// Writes every run of a sound store as a ledger.
pub(crate) fn export(args: &CorpusExportArgs) -> Outcome {
    if args.out.exists() {
        return Err(Failure::usage(format!(
            "{} is there already; --out names a folder that does not exist yet",
            args.out.display()
        )));
    }
    let store = open(&args.store)?;
    let store = sound_store(store.path())?;
    let runs = files::new_folder(&args.out, |folder| {
        let mut runs = Vec::new();
        for run in store.runs()? {
            let links = store.links(&run)?;
            let file = |folder: &Path| folder.join(&run).join(runs::LEDGER);
            Ledger::restore(&file(folder), &links)?;
            runs.push(json!({"run": run, "ledger": file(&args.out), "rows": links.len()}));
        }
        Ok(runs)
    })?;
    report::say(&format!("{} ledgers in {}", runs.len(), args.out.display()));
    let (schema, path) = ("amk.corpus_export.v1", &args.store.store);
    report::document(&json!({"schema": schema, "store": path, "out": args.out, "runs": runs}))?;
    Ok(Exit::Yes)
}

fn is_sqlite(path: &Path) -> bool {
    let mut start = [0; SQLITE.len()];
    corpus::files::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok())
        && start == SQLITE
}

/// Opens a store to import from, if all of it holds: each run by the audit of its ledger too.
fn sound_store(path: &Path) -> Result<Store, Failure> {
    let store = Store::existing(path)?;
    if let Some(reason) = wrong(&store)? {
        let message = format!("{}: {reason}; nothing of it was taken", path.display());
        return Err(Failure::integrity(message));
    }
    for run in store.runs()? {
        let links = store.links(&run)?;
        let record = |link: &Link| serde_json::from_str(&link.record).unwrap_or(Value::Null);
        let records: Vec<Value> = links.iter().map(record).collect();
        let (header, records) = records.split_first().unwrap_or((&Value::Null, &[]));
        let from = format!("{}, run {run}", path.display());
        let first = links.first().map_or("", |link| link.hash.as_str());
        if run_id(header, first) != run {
            return Err(Failure::integrity(format!("{from}: the header is that of another run")));
        }
        runs::require_sound(header, records, &from)?;
    }
    Ok(store)
}

/// Whether the bytes were read and are the program with this id; `false` if only another build can read them.
fn is_program(id: &str, saved: &[u8]) -> Result<bool, String> {
    match ir::text::load(saved) {
        Ok(program) if program.id() == id => Ok(true),
        Ok(program) => Err(format!("what it calls program {id} is another one ({})", program.id())),
        Err(LoadError::Version { .. } | LoadError::Abi { .. }) => Ok(false),
        Err(error) => Err(format!("program {id} cannot be read: {error}")),
    }
}
