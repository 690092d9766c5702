//! The final document of a search.

use std::path::PathBuf;

use ir::schedule::ScheduleConfig;
use schemars::JsonSchema;
use search::{Conditions, Confirmation, Trial, Verdict};
use serde::Serialize;
use serde_json::{Map, Value};

/// The result of a search, and its files.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Found {
    #[schemars(extend("const" = "amk.loop.v1"))]
    pub(super) schema: &'static str,
    /// The verdict on the best schedule: from the confirmation, if there was one.
    pub best_verdict: Option<Verdict>,
    /// The best schedule.
    pub best_config: Option<ScheduleConfig>,
    /// Trials, those before a resume included, without the race at the end.
    pub n_trials: usize,
    /// Trials of the race at the end.
    pub n_raced: usize,
    /// Trials, raced ones included, that were lowered and verified.
    pub n_valid: usize,
    /// Of these, those that agreed with the graph.
    pub n_correct: usize,
    /// Of these, those that were kept.
    pub n_kept: usize,
    /// Illegal proposals, which cost no trial.
    pub n_rejected: u64,
    /// The table of trials.
    pub results_tsv: PathBuf,
    /// The ledger.
    pub ledger: PathBuf,
    /// The store that also holds its rows. None if there is none, or if it could not be kept up to date.
    pub store: Option<PathBuf>,
    /// trials, time, exhausted, goal, bound or interrupted.
    pub stopped_by: String,
    /// The best schedule as a file for `--config`.
    pub best_config_file: Option<PathBuf>,
    /// The file of the best schedule for `generate` and `serve` on this machine: a measured champion that was confirmed.
    pub found_schedule_file: Option<PathBuf>,
    /// Where the search began. None in searches before there was a choice: they began with the neutral schedule.
    pub schedule_source: Option<Value>,
    /// The trials that led, first to last.
    pub kept: Vec<Kept>,
    /// The best schedule judged again, on fresh tokens and against the baseline. None after an interruption.
    pub confirmation: Option<Confirmation>,
    /// The cards of a search with several, by their numbers.
    pub cards: Vec<Card>,
    /// The breakdown of the time.
    pub spent: Value,
    /// The command that resumes this search.
    pub resume: String,
}

impl Found {
    pub(crate) fn was_interrupted(&self) -> bool {
        self.stopped_by == search::StoppedBy::Interrupted.name()
    }
}

/// One of several cards. Its figures are its own: figures of two cards are never compared.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Card {
    /// Its number.
    pub card: u32,
    /// The name of the product.
    pub name: String,
    /// The driver's unique id of it.
    pub uuid: Option<String>,
    /// Trials that it measured.
    pub trials: usize,
    /// The gain that the baseline appears to have over itself there.
    pub noise_floor: Option<f64>,
    /// Microseconds per token of the baseline there.
    pub baseline_us: Option<f64>,
    /// Why the search went on without it, if it did.
    pub left_out: Option<String>,
    /// The first trial without it.
    pub left_out_at: Option<u64>,
}

/// The cards of a header with the figures from the trials.
pub(crate) fn cards(conditions: &[Conditions], trials: &[Trial]) -> Vec<Card> {
    let one = |(number, conditions): (usize, &Conditions)| {
        let card = number as u32;
        let first = trials.first();
        let own = first.filter(|trial| trial.card == Some(card));
        let beside = first.and_then(|first| first.beside.iter().find(|other| other.card == card));
        let left = |trial: &Trial| {
            let left = trial.left_out.iter().find(|left| left.card == card)?;
            Some((trial.trial, left.why.clone()))
        };
        let (left_out_at, left_out) = trials.iter().find_map(left).unzip();
        Card {
            card,
            name: conditions.card.clone(),
            uuid: conditions.uuid.clone(),
            trials: trials.iter().filter(|trial| trial.card == Some(card)).count(),
            noise_floor: own.map_or(beside.and_then(|other| other.noise_floor), |t| t.noise_floor),
            baseline_us: own
                .map_or(beside.and_then(|other| other.latency_us), |t| t.verdict.latency_us),
            left_out,
            left_out_at,
        }
    };
    conditions.iter().enumerate().map(one).collect()
}

/// A trial that led.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Kept {
    /// Its number.
    pub trial: u64,
    /// The knobs in which it differs from the schedule that led before: path to before and after.
    pub changed: Map<String, Value>,
    /// The reason of the decision, in a line.
    pub why: String,
}

impl From<&Trial> for Kept {
    fn from(trial: &Trial) -> Self {
        Self { trial: trial.trial, changed: trial.changed.clone(), why: trial.why.clone() }
    }
}
