//! The terms of a search.

use ir::ScheduleConfig;
use ir::schedule::{Knob, Value};

use crate::assess::Timing;
use crate::budget::Budget;

/// How a search goes about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// What proposals, tokens and intervals are drawn with.
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
}
