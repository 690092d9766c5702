//! The parameters of a search, and its clock.

use std::time::Duration;

use ir::ScheduleConfig;
use ir::schedule::{Knob, Value};

use crate::assess::Timing;
use crate::budget::Budget;

/// The parameters of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Seed of proposals, tokens and intervals.
    pub seed: u64,
    /// When to end.
    pub budget: Budget,
    /// Trials, after the baseline, that the sweep over the knobs may take.
    pub explore: u64,
    /// The least gain worth keeping.
    pub min_gain: f64,
    /// The schedule that the search begins with.
    pub default: ScheduleConfig,
    /// The knobs to vary, with the values to draw from.
    pub space: Vec<(Knob, Vec<Value>)>,
    /// How a device is timed.
    pub timing: Timing,
    /// How many of the best schedules a measured search races at its end; 0 is none.
    pub finalists: usize,
    /// Of schedules that take the same time in that race, the one that departs from this one in fewer knobs leads; `None`: the one that
    /// led before.
    pub simplest: Option<ScheduleConfig>,
}

/// Time since any fixed moment. The search has no clock of its own; it uses this one to record where the time went.
pub type Clock = fn() -> Duration;

/// A clock that always reads zero: no times are recorded.
pub(crate) fn no_clock() -> Duration {
    Duration::ZERO
}
