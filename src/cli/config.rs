//! The flags of commands that run a schedule.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{ModelArgs, SharingArgs};
use crate::config_source::ConfigSource;

/// What `--schedule` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ScheduleChoice {
    /// The best that is known: found (`generate` and `serve` only), else shipped, else default.
    Auto,
    /// What `loop` measured and confirmed on this machine for this shape and GPU.
    Found,
    /// The schedule that is shipped for this shape, or for a similar one.
    Shipped,
    /// The rule-based default.
    Default,
    /// The knob table's values: a named start of studies, not a fast schedule.
    Neutral,
}

/// A schedule.
#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ConfigArgs {
    /// A JSON file with any subset of the knobs, - for standard input, or the JSON itself. Knobs that it leaves out take the rule-based
    /// default for the model and GPU. Default: see --schedule.
    #[arg(long, value_name = "FILE|-|JSON")]
    #[schemars(
        description = "The schedule: an object with any subset of the knobs, such as {\"pipeline\": {\"stages\": 4}}, or the path of a JSON file with one. Knobs that it leaves out take the rule-based default for the model and GPU. Default: see `schedule`."
    )]
    pub(crate) config: Option<ConfigSource>,
    /// The schedule where no config is given: auto (what was found on this machine, for `generate` and `serve` only; else the shipped one;
    /// else default), found, shipped, default (rule-based) or neutral (a slow start of studies).
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        conflicts_with = "config",
        hide_possible_values = true
    )]
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("enum" = ["auto", "found", "shipped", "default", "neutral"], "type" = "string"))]
    pub(crate) schedule: Option<ScheduleChoice>,
}

/// One task of a program again, on the inputs that it had.
#[derive(Debug, Args)]
pub(crate) struct RerunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// A saved program (.amk or .amkp) instead of what a schedule lowers to.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub(crate) program: Option<PathBuf>,
    /// The task: its worker and its index in the worker's queue, such as 17:3.
    #[arg(long, value_name = "WORKER:TASK", value_parser = task)]
    pub(crate) task: TaskPlace,
    /// The position at which it runs. Default: the first.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) position: usize,
    /// What the gate's tokens are drawn with.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Token ids from position 0 on instead of the gate's, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub(crate) tokens: Vec<u32>,
    /// Words to print: wrong ones first.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub(crate) words: usize,
}

/// A task by worker and index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskPlace {
    pub(crate) worker: u32,
    pub(crate) task: u32,
}

fn task(text: &str) -> Result<TaskPlace, String> {
    let parts = text.split_once(':').and_then(|(worker, task)| {
        Some(TaskPlace { worker: worker.parse().ok()?, task: task.parse().ok()? })
    });
    parts.ok_or_else(|| "give the worker and the index of the task, such as 17:3".to_owned())
}
