//! The state of the server, as the tool `status` answers.

use schemars::JsonSchema;
use serde::Serialize;

use super::jobs::{Follow, Jobs};
use crate::commands::search_loop::{Found, Progress};

/// The state of the server.
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
    #[serde(flatten)]
    progress: Progress,
    /// The result, once it has ended.
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
        Self { state, progress: progress.unwrap_or_default(), result, error }
    }
}
