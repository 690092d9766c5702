//! `amk migrate`: rewrites files of the version before.

use std::path::Path;

use serde_json::json;

use crate::cli::MigrateArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::files;
use crate::report;

const BYTES_MAX: u64 = 1 << 30;

pub(crate) fn run(args: &MigrateArgs) -> Outcome {
    let (from, to) = (&args.path, &args.out);
    if to.exists() {
        let what = format!("{} exists; --out names what is not there yet", to.display());
        return Err(Failure::usage(what));
    }
    let changed = if from.is_dir() { run_folder(from, to)? } else { file(from, to)? };
    report::document(&json!({
        "schema": "amk.migrate.v1", "from": from, "out": to, "documents_changed": changed,
    }))?;
    report::say(&format!("{}: {changed} documents changed", to.display()));
    Ok(Exit::Yes)
}

/// The folder of a search: its ledger with a new chain, its best schedule, and a manifest of the new files.
fn run_folder(from: &Path, to: &Path) -> Result<usize, Failure> {
    files::new_folder(to, |partial| {
        let ledger = partial.join("ledger.jsonl");
        let rows = corpus::migrate::ledger(&from.join("ledger.jsonl"), &ledger)?;
        let best = from.join("best.json");
        if best.exists() {
            file(&best, &partial.join("best.json"))?;
        }
        super::search_loop::store_sink::seal(partial, &ledger);
        Ok(usize::try_from(rows).unwrap_or(usize::MAX))
    })
}

/// Rewrites a document, or JSON lines.
fn file(from: &Path, to: &Path) -> Result<usize, Failure> {
    let text = files::read_text(from, BYTES_MAX)?;
    let (new, changed) = corpus::migrate::text(&text).map_err(|e| files::unreadable(from, e))?;
    files::write_whole(to, new.as_bytes())?;
    Ok(changed)
}
