//! `amk runs export`: trajectories for training and study. A line is a step: the state (the leading schedule), the
//! edit, the verdict and the decision; failures and illegal proposals are included.
//!
//! Runs go to `train.jsonl` or `validation.jsonl` whole, by a hash of the inputs of their proposals (graph, target,
//! device, kind of latency, seed): a run that repeats another one lands on the same side and does not leak into the
//! other. With `--sft` the hash is of graph and target alone, and a line is a prompt with its completion.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use ir::schedule::ScheduleConfig;
use search::{Origin, Outcome as End, Trial, Verdict};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::ledgers;
use super::recorded::Recorded;
use crate::cli::RunsExportArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, report};

#[derive(Serialize)]
struct Line<'a> {
    schema: &'static str,
    run: &'a str,
    /// The trial, or the trial before which an illegal proposal was made.
    trial: u64,
    model: Option<&'a str>,
    graph_id: Option<&'a str>,
    target: Option<&'a str>,
    device: Option<&'a str>,
    latency_kind: Option<&'a str>,
    /// The leading trial.
    parent: Option<u64>,
    /// The leading schedule and its latency; null before the first trial.
    state: Option<State<'a>>,
    origin: Option<Origin>,
    /// Path to `[before, after]`.
    edit: &'a Map<String, Value>,
    /// Null for proposals that were not tried.
    verdict: Option<&'a Verdict>,
    /// How it ended; `skipped` for a proposal that was illegal or repeated a trial.
    decision: &'static str,
    why: &'a str,
    /// Share of the time saved over the parent: low and high.
    gain: Option<[f64; 2]>,
}

#[derive(Serialize)]
struct State<'a> {
    config: &'a ScheduleConfig,
    latency_us: Option<f64>,
}

#[derive(Serialize)]
struct Placed {
    run: String,
    ledger: PathBuf,
    split: &'static str,
    steps: u64,
}

pub(crate) fn run(args: &RunsExportArgs) -> Outcome {
    if args.out.exists() {
        return Err(Failure::usage(format!(
            "{} is there already; --out names a folder that does not exist yet",
            args.out.display()
        )));
    }
    if args.validation > 100 {
        return Err(Failure::usage("--validation is a percentage: 0 to 100"));
    }
    let (mut runs, mut refused, mut exit) = (Vec::new(), Vec::new(), Exit::Yes);
    for ledger in ledgers(&args.runs.paths)? {
        let found = Recorded::look(&ledger);
        match &found.finding {
            None => runs.push(found),
            Some(finding) => {
                report::say(&format!("left out, {}: {}", ledger.display(), finding.reason));
                exit = if exit == Exit::Integrity { exit } else { finding.exit };
                refused.push(ledger);
            }
        }
    }
    let placed = files::new_folder(&args.out, |folder| {
        let written = write(folder, &runs, args);
        written.map_err(Failure::cannot("write", &args.out, "there may be no room"))
    })?;
    let count =
        |split: &str| placed.iter().filter(|p| p.split == split).map(|p| p.steps).sum::<u64>();
    let (train, validation) = (count("train"), count("validation"));
    report::say(&format!(
        "{train} steps to train on and {validation} to validate, of {} runs, in {}",
        placed.len(),
        args.out.display()
    ));
    report::document(&json!({
        "schema": "amk.trajectories.v1",
        "format": if args.sft { "sft" } else { "trajectories" },
        "out": args.out,
        "train": train,
        "validation": validation,
        "runs": placed,
        "refused": refused,
    }))?;
    Ok(exit)
}

fn write(folder: &Path, runs: &[Recorded], args: &RunsExportArgs) -> std::io::Result<Vec<Placed>> {
    let create = |name: &str| File::create(folder.join(name)).map(BufWriter::new);
    let mut files = [create("train.jsonl")?, create("validation.jsonl")?];
    let mut placed = Vec::new();
    for found in runs {
        let side = usize::from(percentile(found, args.sft) < args.validation);
        let mut steps = 0;
        let mut write = |line: Value| {
            steps += 1;
            writeln!(files[side], "{line}")
        };
        for trial in &found.trials {
            if args.sft {
                sft(found, trial).map_or(Ok(()), &mut write)?;
            } else {
                lines(found, trial).iter().try_for_each(|line| write(json!(line)))?;
            }
        }
        let split = ["train", "validation"][side];
        let (run, ledger) = (found.run.clone(), found.ledger.clone());
        placed.push(Placed { run, ledger, split, steps });
    }
    for file in &mut files {
        file.flush()?;
        file.get_ref().sync_all()?;
    }
    Ok(placed)
}

/// The percentile of a run, by a hash of the inputs of its proposals, or of graph and target alone.
fn percentile(found: &Recorded, pair: bool) -> u64 {
    let graph = found.word("graph_id").or_else(|| found.word("graph")).unwrap_or("");
    let words = ["target", "device", "latency_kind"].map(|key| found.word(key).unwrap_or(""));
    let seed = found.header.get("seed").and_then(Value::as_u64).unwrap_or(0);
    let drawn_from = match pair {
        true => format!("{graph}\n{}", words[0]),
        false => format!("{graph}\n{}\n{seed}", words.join("\n")),
    };
    let id = corpus::store::fresh_run_id(&drawn_from);
    u64::from_str_radix(&id, 16).unwrap_or(0) % 100
}

/// A kept trial as a prompt and its completion; `None` for others, and where the prompt would tell the completion.
fn sft(found: &Recorded, trial: &Trial) -> Option<Value> {
    let leads = trial.outcome == End::Kept && !trial.changed.is_empty();
    let parent = trial.incumbent.filter(|_| leads)?;
    let parent = found.trials.iter().find(|trial| trial.trial == parent)?;
    let changes = trial.changed.iter();
    let changes: Vec<String> =
        changes.map(|(knob, pair)| format!("{knob}={}", report::word(pair.get(1)))).collect();
    let word = |key| found.word(key).unwrap_or("-");
    let prompt = format!(
        "Change this schedule so that a decode step takes less time.\nmodel: {} {}\ngpu: {}\nlatency: {}\nschedule: {}\nus per token: {}\n",
        word("graph"),
        found.header["shape"],
        word("target"),
        word("latency_kind"),
        json!(parent.config),
        report::word(Some(&json!(parent.verdict.latency_us)))
    );
    if changes.iter().any(|change| prompt.contains(change.as_str())) {
        return None;
    }
    let completion = changes.join("\n");
    let schema = "amk.sft.v1";
    let line = json!({"schema": schema, "run": found.run, "trial": trial.trial, "prompt": prompt, "completion": completion});
    Some(line)
}

/// The steps of a trial: the untried proposals before it, then the trial.
fn lines<'a>(found: &'a Recorded, trial: &'a Trial) -> Vec<Line<'a>> {
    let parent = trial.incumbent.and_then(|n| found.trials.iter().find(|trial| trial.trial == n));
    let blank = |edit, decision, why| Line {
        schema: "amk.trajectory.v1",
        run: &found.run,
        trial: trial.trial,
        model: found.word("model"),
        graph_id: found.word("graph_id"),
        target: found.word("target"),
        device: found.word("device"),
        latency_kind: found.word("latency_kind"),
        parent: trial.incumbent,
        state: parent
            .map(|parent| State { config: &parent.config, latency_us: parent.verdict.latency_us }),
        origin: None,
        edit,
        verdict: None,
        decision,
        why,
        gain: None,
    };
    let skipped = trial.skipped.examples.iter();
    let mut all: Vec<Line<'a>> =
        skipped.map(|skipped| blank(&skipped.changed, "skipped", skipped.why.as_str())).collect();
    let outcome: End = trial.outcome;
    all.push(Line {
        origin: Some(trial.origin),
        verdict: Some(&trial.verdict),
        gain: trial.gain.map(|gain| [gain.low, gain.high]),
        ..blank(&trial.changed, outcome.name(), trial.why.as_str())
    });
    all
}
