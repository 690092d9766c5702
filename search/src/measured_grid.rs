//! A measured grid: every point of a grid of schedules with its answer, so that strategies can be compared with no device. Whatever a strategy
//! proposes within the grid was recorded; nothing is interpolated, and nothing is taken for its neighbour.

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

/// Under which terms the rows that follow were recorded.
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
    /// Where it was measured; nothing where it was predicted.
    pub conditions: Option<Conditions>,
    /// Positions of the key/value cache.
    pub kv_capacity: u32,
    /// Tokens before the timed ones.
    pub context: u32,
    /// Tokens of a timed block.
    pub timed_tokens: u32,
    /// Rounds of four blocks that a point is timed.
    pub rounds: usize,
    /// What tokens, and the order of the points, were drawn with.
    pub seed: u64,
    /// Bytes per second that the device read at the start.
    pub bandwidth: Option<f64>,
    /// The points.
    pub grid: Grid,
    /// Which part of the points: `[i, n]` are those whose number is `i` modulo `n`.
    pub shard: [u32; 2],
    /// Hash of the file that this one was made of by `amk migrate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrated_from: Option<String>,
}

/// A point with its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Number of the point in its grid.
    pub point: u32,
    /// What became of it.
    #[serde(flatten)]
    pub answer: Answer,
}

/// What became of a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// It breaks these rules; no device was asked.
    Illegal(Vec<String>),
    /// It lowers to the program and kernel of another point, and has its answer.
    Twin(u32),
    /// It agreed and was timed.
    Measured(Measured),
    /// It lowers, and the cost model says so much. It was not run.
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
    /// The first point of all, timed once more later in the run: what drift there was.
    Again(Measured),
}

impl Answer {
    /// What is illegal, by the rules that it breaks, each once.
    #[must_use]
    pub fn illegal(violations: &Violations) -> Self {
        let rules: BTreeSet<_> = violations.list().iter().map(|v| v.rule.id().to_owned()).collect();
        Self::Illegal(rules.into_iter().collect())
    }
}

/// What timing gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Hash of the program.
    pub program_id: String,
    /// Hash of the kernel build.
    pub kernel_id: String,
    /// Median of the blocks, in microseconds per token.
    pub us: f64,
    /// The blocks, in the order in which they ran. The least and the greatest of eight enclose the median with 99.2 % (sign test).
    pub blocks_us: Vec<f64>,
    /// The clock of the multiprocessors just after, where it is known.
    pub sm_mhz: Option<u32>,
}
