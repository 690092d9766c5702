//! A measured grid (a tabular benchmark): every point of a grid of schedules with its result, so that strategies can be
//! compared without a device. Every proposal of a strategy within the grid was recorded; nothing is interpolated or
//! taken from a neighbouring point.

use std::collections::BTreeSet;

use corpus::Conditions;
use ir::Violations;
use serde::{Deserialize, Serialize};

use crate::verdict::LatencyKind;

mod grid;
mod probe;

pub use grid::{BadGrid, GRID_SCHEMA, Grid, Space};
pub use probe::{Probe, prepare};

/// Schema of a measured grid's file: a line with the terms ([`Terms`]), then a line for each point ([`Row`]).
pub const MEASURED_GRID_SCHEMA: &str = "amk.measured_grid.v1";

/// The conditions under which the rows that follow were recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// [`MEASURED_GRID_SCHEMA`].
    pub schema: String,
    /// Measured, or predicted by the cost model; one file holds one of the two.
    pub latency_kind: LatencyKind,
    /// The model, as `--model` takes it.
    pub model: String,
    /// Hash of the graph.
    pub graph_id: String,
    /// The target of the schedules.
    pub target: String,
    /// Where it was measured; `None` for predictions.
    pub conditions: Option<Conditions>,
    /// Positions of the key/value cache.
    pub kv_capacity: u32,
    /// Tokens before the timed ones.
    pub context: u32,
    /// Tokens of a timed block.
    pub timed_tokens: u32,
    /// Rounds of four blocks per timed point.
    pub rounds: usize,
    /// Seed of the tokens and of the order of the points.
    pub seed: u64,
    /// Bandwidth measured at the start, in bytes per second.
    pub bandwidth: Option<f64>,
    /// The points.
    pub grid: Grid,
    /// The recorded part of the points: `[i, n]` are those whose number is `i` modulo `n`.
    pub shard: [u32; 2],
    /// Hash of the file that `amk migrate` made this one from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrated_from: Option<String>,
}

/// A point with its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Number of the point in its grid.
    pub point: u32,
    /// The result.
    #[serde(flatten)]
    pub answer: Answer,
}

/// The result of a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// It breaks these rules. It was not run.
    Illegal(Vec<String>),
    /// It lowers to the same program and kernel as this point, and shares its result.
    Twin(u32),
    /// It agreed and was timed.
    Measured(Measured),
    /// It lowers and has a prediction of the cost model. It was not run.
    Predicted {
        /// Hash of the program.
        program_id: String,
        /// Hash of the kernel build.
        kernel_id: String,
        /// Microseconds per token.
        us: f64,
    },
    /// It is legal and has no latency.
    Failed {
        /// The name of the outcome, as a trial's.
        outcome: String,
        /// Why, in one line.
        why: String,
    },
    /// The first point of all, timed again later in the run to show the drift.
    Again(Measured),
}

impl Answer {
    /// An illegal point, with the rules that it breaks, each once.
    #[must_use]
    pub fn illegal(violations: &Violations) -> Self {
        let rules: BTreeSet<_> = violations.list().iter().map(|v| v.rule.id().to_owned()).collect();
        Self::Illegal(rules.into_iter().collect())
    }
}

/// The result of timing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Hash of the program.
    pub program_id: String,
    /// Hash of the kernel build.
    pub kernel_id: String,
    /// Median of the blocks, in microseconds per token.
    pub us: f64,
    /// The blocks, in the order in which they ran. The least and the greatest of eight enclose the median with 99.2%
    /// (sign test).
    pub blocks_us: Vec<f64>,
    /// SM clock just after, where it is known.
    pub sm_mhz: Option<u32>,
}
