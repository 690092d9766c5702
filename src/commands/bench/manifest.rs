//! `amk bench --manifest`: measures the rows of a file, each in several processes of its own, and judges their samples
//! by the file's gates. A row that misses one is `unstable` and has no result.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use ir::program::DEVICES_MAX;
use search::stability::{Limits, Process, Requirements, Stable};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::child_process::{self, Ended};
use crate::cli::{BenchArgs, ScheduleChoice, WIDTHS};
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, report};

const BYTES_MAX: u64 = 1 << 20;
const SCHEMA: &str = "amk.bench_manifest.v1";

/// What to measure, under which conditions, and when it counts.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    schema: String,
    /// Conditions of every row.
    #[serde(default)]
    require: Requirements,
    gates: Limits,
    /// Timed rounds of four blocks in each process.
    repeats: u32,
    /// Processes that measure each row.
    processes: usize,
    /// Seconds that a process may take.
    timeout_s: u64,
    rows: Vec<RowSpec>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowSpec {
    name: String,
    model: String,
    /// Element type that the weights must have.
    format: String,
    /// Tokens before the timed ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    context: Option<u32>,
    /// Sequences at once.
    #[serde(default = "one")]
    batch: u32,
    /// Tokens of a prompt in chunks, instead of a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prompt: Option<u32>,
    #[serde(default = "one")]
    gpus: u32,
    #[serde(default = "shipped")]
    schedule: ScheduleChoice,
    #[serde(default)]
    seed: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kv_capacity: Option<u32>,
}

fn one() -> u32 {
    1
}

fn shipped() -> ScheduleChoice {
    ScheduleChoice::Shipped
}

pub(super) fn run(args: &BenchArgs, path: &Path) -> Outcome {
    let manifest: Manifest = files::read_json(path, BYTES_MAX)?;
    let problems = manifest.problems();
    if !problems.is_empty() {
        let problems = problems.join("; ");
        return Err(Failure::usage(format!("{}: {problems}", path.display())));
    }
    if let Some(folder) = &args.bundle {
        let unwritable = Failure::cannot("create", folder, "--bundle names a folder");
        fs::create_dir_all(folder).map_err(unwritable)?;
    }
    let rows = manifest.rows.iter().map(|row| measure(args, &manifest, row));
    let rows = rows.collect::<Result<Vec<Value>, Failure>>()?;
    let holds = rows.iter().all(|row| row["status"] == "stable");
    report::document(&json!({
        "schema": "amk.bench_rows.v1",
        "manifest": manifest,
        "holds": holds,
        "rows": rows,
    }))?;
    Ok(if holds { Exit::Yes } else { Exit::No })
}

impl Manifest {
    /// Everything that is wrong with it.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.schema != SCHEMA {
            problems.push(format!("its schema is {}, not {SCHEMA}", self.schema));
        }
        if !(4..=1000).contains(&self.repeats) {
            problems.push(format!("repeats is {}; legal: 4 to 1000", self.repeats));
        }
        if !(2..=100).contains(&self.processes) {
            let processes = self.processes;
            problems.push(format!("processes is {processes}; legal: 2 to 100, for their spread"));
        }
        if self.timeout_s == 0 || self.rows.is_empty() {
            problems.push("it needs a timeout_s above zero, and rows".to_owned());
        }
        let mut names = BTreeSet::new();
        for row in &self.rows {
            let known = !names.insert(&row.name);
            let at = |what: String| format!("row {:?}: {what}", row.name);
            problems.extend(row.problems(known).into_iter().map(at));
        }
        problems
    }
}

impl RowSpec {
    fn problems(&self, known: bool) -> Vec<String> {
        let mut problems = Vec::new();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if known || self.name.is_empty() || !self.name.chars().all(plain) {
            problems.push("a name is of letters, digits, - _ . and its own".to_owned());
        }
        if !(1..=DEVICES_MAX).contains(&self.gpus) {
            problems.push(format!("gpus is {}; legal: 1 to {DEVICES_MAX}", self.gpus));
        }
        if !WIDTHS.contains(&self.batch) {
            problems.push(format!("batch is {}; legal: {WIDTHS:?}", self.batch));
        }
        if self.prompt.is_some() && (self.batch != 1 || self.context.is_some()) {
            problems.push("a prompt has no batch and no context".to_owned());
        }
        if self.schedule == ScheduleChoice::Found {
            problems.push("schedule is found, which differs between machines".to_owned());
        }
        problems
    }

    /// Whether `amk bundle` has a format for it.
    fn has_bundle(&self) -> bool {
        self.prompt.is_none() && self.batch == 1
    }

    /// The command that measures it once.
    fn command(&self, args: &BenchArgs, rounds: u32, bundle: Option<&Path>) -> Command {
        let mut command = child_process::this_program();
        command.args(["bench", "--json", "--model", &self.model]);
        let device = args.place.device.to_possible_value();
        let schedule = self.schedule.to_possible_value();
        let number = |value: Option<u32>| value.map(|value| value.to_string());
        let step = self.has_bundle();
        let flags = [
            ("--device", device.map(|value| value.get_name().to_owned())),
            ("--schedule", schedule.map(|value| value.get_name().to_owned())),
            ("--target", args.place.target.clone()),
            ("--seed", Some(self.seed.to_string())),
            ("--rounds", number(Some(rounds))),
            ("--context", number(self.context)),
            ("--batch", number((self.batch > 1).then_some(self.batch))),
            ("--gpus", number((self.gpus > 1).then_some(self.gpus))),
            ("--prefill", number(self.prompt)),
            ("--kv-capacity", number(self.kv_capacity)),
            ("--peers", step.then(|| "none".to_owned())),
        ];
        for (flag, value) in flags {
            command.args(value.map(|value| format!("{flag}={value}")));
        }
        if args.sharing.shared_gpu {
            command.arg("--shared-gpu");
        }
        if let Some(path) = bundle {
            command.arg("--bundle").arg(path);
        }
        command
    }
}

/// Measures a row in all its processes and judges it. A process that fails is a reason, and the last one of its row.
fn measure(args: &BenchArgs, manifest: &Manifest, row: &RowSpec) -> Result<Value, Failure> {
    let folder = args.bundle.as_ref().filter(|_| row.has_bundle());
    let bundle = folder.map(|folder| folder.join(format!("{}.bundle.json", row.name)));
    // Takes its name only if the row is a result.
    let fresh = bundle.as_ref().map(|path| path.with_extension("unjudged"));
    let (mut documents, mut processes) = (Vec::new(), Vec::<Process>::new());
    let mut failed = None;
    for number in 1..=manifest.processes {
        // Each process measures all of it; the bundle is the first one's.
        let fresh = fresh.as_deref().filter(|_| number == 1);
        let command = row.command(args, manifest.repeats, fresh);
        match once(command, manifest.timeout_s) {
            Ok((document, process)) => {
                report::say(&format!("  {} {number}: {:.1} us", row.name, process.median_us()));
                documents.push(document);
                processes.push(process);
            }
            Err(Failure { exit: Exit::No, message }) => {
                failed = Some(format!("process {number}: {message}"));
                break;
            }
            Err(Failure { exit, message }) => {
                let message = format!("row {:?}, process {number}: {message}", row.name);
                return Err(Failure { exit, message });
            }
        }
    }
    let judged = judge(manifest, row, &processes, failed);
    match &judged {
        Ok(stable) => report::say(&format!("{}: {stable}", row.name)),
        Err(reasons) => report::say(&format!("{}: UNSTABLE: {}", row.name, reasons.join("; "))),
    }
    if let (Some(fresh), Some(path)) = (&fresh, &bundle) {
        if judged.is_ok() {
            let unwritable = Failure::cannot("write", path, "choose another folder in --bundle");
            fs::rename(fresh, path).map_err(unwritable)?;
        } else {
            let _ = fs::remove_file(fresh);
        }
    }
    Ok(entry(row, &judged, &documents, bundle.filter(|_| judged.is_ok())))
}

/// Runs a process that measures a row.
fn once(command: Command, timeout_s: u64) -> Result<(Value, Process), Failure> {
    let ended = child_process::run(command, "", Duration::from_secs(timeout_s));
    let document = answer(&ended.map_err(|error| Failure::refused(error.to_string()))?)?;
    let process = serde_json::from_value(document.clone());
    Ok((document, process.map_err(|error| Failure::bug(error.to_string()))?))
}

/// The document of a process that measured; its failure if it ended without one.
fn answer(ended: &Ended) -> Result<Value, Failure> {
    let document: Value = serde_json::from_str(&ended.out).unwrap_or_default();
    if document["schema"] == "amk.bench.v1" {
        return Ok(document);
    }
    let message = document["message"].as_str().unwrap_or_else(|| ended.last_line()).to_owned();
    let exits = [Exit::Usage, Exit::Missing, Exit::Integrity, Exit::Bug, Exit::Interrupted];
    let exit = exits.into_iter().find(|exit| ended.status.code() == Some(exit.code()));
    Err(Failure { exit: exit.unwrap_or(Exit::No), message })
}

/// Judges the processes of a row, of which the last may have failed.
fn judge(
    manifest: &Manifest,
    row: &RowSpec,
    all: &[Process],
    failed: Option<String>,
) -> Result<Stable, Vec<String>> {
    let judged = Stable::new(&manifest.require, &manifest.gates, all, row.seed);
    let other = all.iter().find(|process| process.dtype != row.format);
    let other =
        other.map(|process| format!("the weights are {}, not {}", process.dtype, row.format));
    let more: Vec<String> = failed.into_iter().chain(other).collect();
    if more.is_empty() {
        return judged;
    }
    Err(judged.err().into_iter().flatten().chain(more).collect())
}

/// The entry of a row in the answer.
fn entry(
    row: &RowSpec,
    judged: &Result<Stable, Vec<String>>,
    documents: &[Value],
    bundle: Option<PathBuf>,
) -> Value {
    let all = |field: &str| documents.iter().map(|d| d[field].clone()).collect::<Vec<_>>();
    let first = |field: &str| documents.first().map(|document| document[field].clone());
    json!({
        "row": row,
        "status": if judged.is_ok() { "stable" } else { "unstable" },
        "reasons": judged.as_ref().err().cloned().unwrap_or_default(),
        "result": judged.as_ref().ok(),
        "medians_us": all("us"),
        "samples_us": all("samples_us"),
        "bounds_us": all("bound_us"),
        "bandwidths_measured": all("bandwidth_measured"),
        "conditions": all("conditions"),
        "clocks": all("clocks"),
        "accuracy": all("accuracy"),
        "schedule_id": first("schedule_id"),
        "schedule_source": first("schedule_source"),
        "program_id": first("program_id"),
        "kernel_id": first("kernel_id"),
        "bundle": bundle,
    })
}

#[cfg(test)]
mod tests;
