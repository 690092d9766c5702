//! What a search leaves for `generate` and `serve` on this machine.

use std::path::PathBuf;

use search::{Confirmation, Decision, LatencyKind, Search};

use super::header::Header;
use crate::context::Context;
use crate::found::{self, Entry};
use crate::schedule_choice::reproducible;

/// Keeps a measured champion that beat the schedule which would run without it. `None` if there is nothing to keep, else its file or why it
/// is not kept.
pub(super) fn confirmed(
    context: &Context,
    header: &Header,
    search: &Search<'_>,
    confirmation: &Confirmation,
) -> Option<Result<PathBuf, String>> {
    let verdict = &confirmation.verdict;
    let measured = verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
    let latency_us = verdict.latency_us.filter(|_| measured)?;
    let stands = confirmation.decision == Decision::Kept && confirmation.champion > 0;
    let champion =
        search.champion().filter(|trial| stands && trial.trial == confirmation.champion)?;
    if header.start(context) != reproducible(context, context.predicted_at()) {
        let why = "the search did not begin with the schedule that they run; start one without --schedule";
        return Some(Err(why.to_owned()));
    }
    let Some(folder) = found::folder() else {
        return Some(Err("there is no data folder; AMK_DATA names one".to_owned()));
    };
    let tokens = search.gate().timed_position();
    let entry = Entry::new(context, &header.device, tokens, &champion.config, latency_us);
    Some(found::keep(&folder, &entry).map_err(|failure| failure.message))
}
