//! The flags of commands that run a schedule.

use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::Deserialize;

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
