//! Schedules that searches on this machine measured and confirmed: one small JSON file each under the user's data folder.
//!
//! **Promises.** A file is written atomically. Its contents are untrusted: they are bounded, parsed, and validated like
//! any config, and an entry that does not fit is skipped with a note. A schedule of another kernel build is not used:
//! its time was that of the other kernel.

use std::path::{Path, PathBuf};

use ir::program::{Dims, GraphShape};
use ir::schedule::{ScheduleConfig, read_config};
use serde::{Deserialize, Serialize};

use crate::context::Context;
use crate::failure::Failure;
use crate::{files, report};

const SCHEMA: &str = "amk.found.v1";

const BYTES_MAX: u64 = 64 << 10;

/// Farthest context, as a ratio, for which a found schedule is used.
const CONTEXT_RATIO_MAX: f64 = 4.0;

/// A schedule that a search confirmed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) schema: String,
    /// The shape that it was found for.
    pub(crate) shape: GraphShape,
    /// The GPU's name in the target table.
    pub(crate) target: String,
    /// The GPU's full name.
    pub(crate) card: String,
    /// Tokens of context at which it was measured.
    pub(crate) context: u32,
    /// Sequences of the steps that were measured.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub(crate) batch: u32,
    /// The kernel build that it was measured with.
    pub(crate) kernel_id: String,
    pub(crate) schedule_id: String,
    /// Measured microseconds per token.
    pub(crate) latency_us: f64,
    pub(crate) config: serde_json::Value,
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(batch: &u32) -> bool {
    *batch == 1
}

impl Entry {
    /// An entry for a graph, from a search's confirmation.
    pub(crate) fn new(
        context: &Context,
        card: &str,
        tokens: u32,
        config: &ScheduleConfig,
        latency_us: f64,
    ) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            shape: GraphShape::from(context.graph()),
            target: context.target.name.clone(),
            card: card.to_owned(),
            context: tokens,
            batch: context.batch,
            kernel_id: context.kernel_id(&config.kernel),
            schedule_id: config.id(),
            latency_us,
            config: serde_json::json!(config),
        }
    }

    /// The file name, made of every field that distinguishes entries.
    fn file_name(&self) -> String {
        let Dims { hidden, heads, kv_heads, head_dim, ffn, vocab, layers, dtype } = self.shape.dims;
        let dtype = self.shape.codes.unwrap_or(dtype);
        let shape = [hidden, layers, heads, kv_heads, head_dim, ffn, vocab].map(|n| n.to_string());
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
        let word = |text: &str| text.chars().map(plain).collect::<String>();
        format!(
            "{}-{}-{}-{}-{}-{}.json",
            word(&self.target),
            shape.join("x"),
            dtype.name(),
            self.context,
            word(&self.kernel_id),
            word(&self.card),
        )
    }
}

/// The folder of found schedules: below `$AMK_DATA`, else below the user's data folder.
pub(crate) fn folder() -> Option<PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let named = std::env::var_os("AMK_DATA").map(PathBuf::from);
    let base = || {
        let data = absolute("XDG_DATA_HOME");
        Some(data.or_else(|| Some(absolute("HOME")?.join(".local/share")))?.join("amk"))
    };
    Some(named.or_else(base)?.join("schedules"))
}

/// Saves an entry, unless a faster one of the same kind exists; returns its file.
pub(crate) fn keep(folder: &Path, entry: &Entry) -> Result<PathBuf, Failure> {
    let path = folder.join(entry.file_name());
    if read(&path).is_ok_and(|held| held.latency_us <= entry.latency_us) {
        return Ok(path);
    }
    let made = std::fs::create_dir_all(folder);
    made.map_err(Failure::cannot("make", folder, "AMK_DATA names another folder"))?;
    files::write_json(&path, entry)?;
    Ok(path)
}

/// The found schedule for this graph, GPU, kernel and number of sequences whose context is nearest by ratio. Reports
/// skipped entries.
pub(crate) fn nearest(
    context: &Context,
    tokens: u32,
    batch: u32,
) -> Option<(ScheduleConfig, Entry)> {
    let (best, notes) = nearest_in(&folder()?, context, tokens, batch);
    for note in notes {
        report::say(&format!("note: {note}"));
    }
    best
}

/// The same in a given folder; returns the notes.
pub(crate) fn nearest_in(
    folder: &Path,
    context: &Context,
    tokens: u32,
    batch: u32,
) -> (Option<(ScheduleConfig, Entry)>, Vec<String>) {
    let (mut found, mut notes) = (Vec::new(), Vec::new());
    let shape = GraphShape::from(context.graph());
    for path in entries(folder) {
        let entry = match read(&path) {
            Ok(entry) => entry,
            Err(why) => {
                notes
                    .push(format!("{} is no found schedule and is ignored: {why}", path.display()));
                continue;
            }
        };
        let other = entry.target != context.target.name || entry.batch != batch;
        if entry.shape != shape || other {
            continue;
        }
        match usable(context, &entry) {
            Ok(config) => found.push((config, entry)),
            Err(why) => notes.push(format!("{} is ignored: {why}", path.display())),
        }
    }
    let far = |entry: &Entry| ratio(entry.context, tokens);
    found.retain(|(_, entry)| far(entry) <= CONTEXT_RATIO_MAX.ln() + 1e-9);
    let card = context.card();
    let order = |(_, entry): &(ScheduleConfig, Entry)| {
        (card.as_ref().is_some_and(|card| *card != entry.card), far(entry), entry.latency_us)
    };
    let best = found.into_iter().min_by(|a, b| {
        let (a, b) = (order(a), order(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.total_cmp(&b.2))
    });
    (best, notes)
}

/// The schedule of an entry for this graph and GPU, if it is legal and of the current kernel.
fn usable(context: &Context, entry: &Entry) -> Result<ScheduleConfig, String> {
    let text = entry.config.to_string();
    let config = *read_config(&text, context.graph(), &context.target)
        .map_err(|violations| violations.to_string())?;
    let now = context.kernel_id_of(&config.kernel, entry.batch);
    if entry.kernel_id != now {
        return Err(format!(
            "it was measured with kernel {}, and this one is {now}; run `amk loop` again",
            entry.kernel_id
        ));
    }
    Ok(config)
}

/// The entries of a folder, sorted by name. Empty if there is no folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let json = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json");
    let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).filter(json).collect();
    paths.sort();
    paths
}

fn read(path: &Path) -> Result<Entry, String> {
    let text = corpus::files::read_text(path, BYTES_MAX).map_err(|error| error.to_string())?;
    let entry: Entry = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if entry.latency_us <= 0.0 {
        return Err(format!("{} us is no latency", entry.latency_us));
    }
    if entry.schema != SCHEMA {
        return Err(format!("its schema is {}, not {SCHEMA}", entry.schema));
    }
    Ok(entry)
}

fn ratio(a: u32, b: u32) -> f64 {
    (f64::from(a.max(1)).ln() - f64::from(b.max(1)).ln()).abs()
}

#[cfg(test)]
#[path = "found_tests.rs"]
pub(crate) mod tests;
