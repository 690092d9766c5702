//! `amk corpus`: the store of all searches. Everything that enters it has passed the checks of `runs verify`.

use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

use corpus::store::{Added, BEST, PRIORS, run_id, schema, text};
use corpus::{Link, Store};
use ir::text::LoadError;
use serde_json::{Map, Value, json};

use super::runs;
use crate::cli::{ImportArgs, StoreArgs, StoreExportArgs};
use crate::failure::{Exit, Failure, Outcome};
use crate::report;
use crate::spinner::Spinner;

/// The beginnings of the lines of an export.
const EXPORTED: [&[u8]; 2] = [b"{\"run\":\"", b"{\"program\":"];

const EXPORT_BYTES_MAX: u64 = 8 << 30;

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
    let store = open(args)?;
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
    let reason = found.err();
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

pub(crate) fn import(args: &ImportArgs) -> Outcome {
    // Everything is read and checked before anything is written.
    let (mut rows, mut programs) = (Vec::new(), Vec::new());
    let working = Spinner::through(args.paths.len(), "reading");
    for path in &args.paths {
        if is_export(path) {
            let found = exported(path)?;
            rows.extend(found.runs.into_iter().map(|(run, links)| (run, path.clone(), links)));
            programs.extend(found.programs);
        } else {
            for ledger in runs::ledgers(std::slice::from_ref(path))? {
                let (found, contents) = runs::sound(&ledger)?;
                rows.push((found.run, ledger, contents.links().collect()));
            }
        }
        working.done();
    }
    drop(working);
    let mut store = Store::open(&args.store.store)?;
    let mut imported = Vec::new();
    let working = Spinner::through(rows.len(), "adding");
    for (run, from, links) in rows {
        let Added { new, held } = store.add(&run, links)?;
        let line = format!("{}: run {run}, {new} rows new, {held} held", from.display());
        report::say(&line);
        working.done();
        imported.push(json!({"run": run, "from": from, "new": new, "held": held}));
    }
    drop(working);
    let mut added = 0;
    for (id, saved) in programs {
        added += u64::from(store.add_program(&id, &saved)?);
    }
    let path = &args.store.store;
    let schema = "amk.corpus_import.v1";
    report::document(
        &json!({"schema": schema, "store": path, "runs": imported, "programs": added}),
    )?;
    Ok(Exit::Yes)
}

fn is_export(path: &Path) -> bool {
    let mut start = [0; 11];
    let read = corpus::files::open(path).and_then(|mut file| file.read(&mut start));
    read.is_ok_and(|bytes| EXPORTED.iter().any(|begin| start[..bytes].starts_with(begin)))
}

/// The rows and programs of an export, each of them checked.
fn exported(path: &Path) -> Result<text::Exported, Failure> {
    let unreadable = |reason: String| {
        Failure::usage(format!("{}: {reason}; name what `amk corpus export` wrote", path.display()))
    };
    let file = corpus::files::open(path).map_err(|e| unreadable(e.to_string()))?;
    let bytes = file.metadata().map_err(|e| unreadable(e.to_string()))?.len();
    if bytes > EXPORT_BYTES_MAX {
        let most = format!("it has {bytes} bytes, and at most {EXPORT_BYTES_MAX} are read");
        return Err(unreadable(most));
    }
    let mut found = text::read(BufReader::new(file)).map_err(unreadable)?;
    for (run, links) in &found.runs {
        let record = |link: &Link| serde_json::from_str(&link.record).unwrap_or(Value::Null);
        let records: Vec<Value> = links.iter().map(record).collect();
        let (header, records) = records.split_first().unwrap_or((&Value::Null, &[]));
        let from = format!("{}, run {run}", path.display());
        let first = links.first().map_or("", |link| link.hash.as_str());
        if run_id(header, first) != *run {
            return Err(Failure::integrity(format!("{from}: the header is that of another run")));
        }
        let mut last = None;
        for link in links {
            let follows = link.follows(last);
            follows.map_err(|reason| Failure::integrity(format!("{from}: {reason}")))?;
            last = Some((link.seq, link.hash.as_str()));
        }
        runs::require_sound(header, records, &from)?;
    }
    let named = |reason: String| {
        let none = "nothing of it was taken";
        Failure::integrity(format!("{}: {reason}; {none}", path.display()))
    };
    let mut known = Vec::new();
    let mut unread = 0_u64;
    for (id, saved) in std::mem::take(&mut found.programs) {
        if is_program(&id, &saved).map_err(named)? {
            known.push((id, saved));
        } else {
            unread += 1;
        }
    }
    if unread > 0 {
        report::say(&format!(
            "note: {unread} programs of {} are of another build, which alone can check them, and are left out",
            path.display()
        ));
    }
    found.programs = known;
    Ok(found)
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

pub(crate) fn export(args: &StoreExportArgs) -> Outcome {
    let store = open(&args.store)?;
    if args.out == Path::new("-") {
        let mut out = BufWriter::new(std::io::stdout().lock());
        text::write(&store, &mut out)?;
        return Ok(Exit::Yes);
    }
    let mut rows = 0;
    let working = Spinner::on(format!("writing {}", args.out.display()));
    crate::files::write_with(&args.out, |file| {
        let mut out = BufWriter::new(file);
        let written = text::write(&store, &mut out);
        rows = written.map_err(|e| std::io::Error::other(e.to_string()))?;
        out.flush()
    })?;
    drop(working);
    report::say(&format!("{rows} rows in {}", args.out.display()));
    let schema = "amk.corpus_export.v1";
    report::document(
        &json!({"schema": schema, "store": args.store.store, "out": args.out, "rows": rows}),
    )?;
    Ok(Exit::Yes)
}
