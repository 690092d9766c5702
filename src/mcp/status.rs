//! What the server is doing, as the tool `status` answers.

use schemars::JsonSchema;
use serde::Serialize;

use super::jobs::{Follow, Jobs};
use crate::commands::search_loop::{Found, Progress};

/// What the server is doing.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Status {
    #[schemars(extend("const" = "amk.status.v1"))]
    schema: &'static str,
    /// Version of amk.
    version: &'static str,
    /// idle, evaluating or searching.
    doing: &'static str,
    /// Evaluations that wait for their turn.
    waiting: usize,
    /// The latest search of this server.
    search: Option<SearchStatus>,
}

/// A search of this server.
#[derive(Debug, Serialize, JsonSchema)]
struct SearchStatus {
    /// starting, running, finished, interrupted or failed.
    state: &'static str,
    /// The search's folder.
    folder: Option<String>,
    model: Option<String>,
    target: Option<String>,
    /// cpu, or the device's name.
    device: Option<String>,
    /// measured-gpu or predicted.
    latency_kind: Option<String>,
    budget: Option<String>,
    /// Trials that are on the disk.
    trials: u64,
    /// Seconds that it took, sessions before a resume included.
    elapsed_s: f64,
    /// Latency of the schedule that leads, in microseconds a token.
    best_us: Option<f64>,
    /// Its trial.
    best_trial: Option<u64>,
    /// The last trial, in a line.
    last: Option<String>,
    /// The command that goes on with it; as a tool: `loop` with `resume` and `out`.
    resume: Option<String>,
    /// What it found, once it has ended.
    result: Option<Found>,
    /// Why it failed.
    error: Option<String>,
}

impl Status {
    pub(super) fn of(jobs: &Jobs) -> Self {
        let search = jobs.search();
        let searching = search.as_ref().is_some_and(|search| search.is_running());
        let doing = match (searching, jobs.is_judging()) {
            (true, _) => "searching",
            (false, true) => "evaluating",
            (false, false) => "idle",
        };
        Self {
            schema: "amk.status.v1",
            version: env!("CARGO_PKG_VERSION"),
            doing,
            waiting: jobs.waiting(),
            search: search.map(|search| SearchStatus::of(&search)),
        }
    }
}

impl SearchStatus {
    fn of(search: &Follow) -> Self {
        let (progress, end) = (search.progress(), search.end());
        let (state, result, error) = match end.as_deref() {
            None if progress.is_none() => ("starting", None, None),
            None => ("running", None, None),
            Some(Ok(found)) if found.was_interrupted() => {
                ("interrupted", Some(found.clone()), None)
            }
            Some(Ok(found)) => ("finished", Some(found.clone()), None),
            Some(Err(failure)) => ("failed", None, Some(failure.message.clone())),
        };
        let of = |word: fn(&Progress) -> String| progress.as_ref().map(word);
        Self {
            state,
            folder: of(|p| p.folder.display().to_string()),
            model: of(|p| p.model.clone()),
            target: of(|p| p.target.clone()),
            device: of(|p| p.device.clone()),
            latency_kind: of(|p| p.latency_kind.clone()),
            budget: of(|p| p.budget.to_string()),
            trials: progress.as_ref().map_or(0, |p| p.trials),
            elapsed_s: progress.as_ref().map_or(0.0, |p| p.elapsed.as_secs_f64()),
            best_us: progress.as_ref().and_then(|p| p.best_us),
            best_trial: progress.as_ref().and_then(|p| p.best_trial),
            last: progress.as_ref().and_then(|p| p.last.clone()),
            resume: of(|p| p.resume.clone()),
            result,
            error,
        }
    }
}
