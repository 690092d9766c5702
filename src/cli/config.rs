//! The flags of commands that run a schedule, and of those that choose tokens.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ir::sampling::Sampling;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ModelArgs, SharingArgs};
use crate::config_source::ConfigSource;
use crate::failure::Failure;

/// What `--schedule` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ScheduleChoice {
    /// The best known schedule: found (`generate` and `serve` only), else shipped, else default.
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
#[derive(Clone, Debug, Default, Args, Deserialize, JsonSchema)]
pub(crate) struct ConfigArgs {
    /// A JSON file with any subset of the knobs, - for standard input, or the JSON itself. Knobs that it leaves out take the rule-based
    /// default for the model and GPU. Default: see --schedule.
    #[arg(long, value_name = "FILE|-|JSON")]
    #[schemars(
        with = "Option<serde_json::Value>",
        extend("type" = ["object", "string", "null"]),
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

/// Reruns one task of a program on its original inputs.
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
    pub(crate) task: (u32, u32),
    /// The position at which it runs. Default: the first.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) position: usize,
    /// Random seed of the gate's tokens.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Token ids from position 0 on instead of the gate's, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = super::text::token)]
    pub(crate) tokens: Vec<u32>,
    /// How many words to print; wrong ones come first.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub(crate) words: usize,
}

/// Parses a task: worker and index.
fn task(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once(':');
    let parts = parts.and_then(|(worker, task)| Some((worker.parse().ok()?, task.parse().ok()?)));
    parts.ok_or_else(|| "give the worker and the index of the task, such as 17:3".to_owned())
}

/// The most wrong flags that are named: a long list of biases can be wrong a thousand times.
const PROBLEMS_MAX: usize = 8;

/// How tokens are sampled. The default is greedy.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// The temperature: logits are divided by it before a token is sampled; 0 is greedy.
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Sample from the N likeliest tokens; 0: all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) top_k: u32,
    /// Sample from the likeliest tokens whose probabilities add up to P.
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Sample from tokens with at least P times the probability of the likeliest one.
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Repetition penalty: above 1 makes tokens that occurred before less likely.
    #[arg(long, default_value_t = 1.0, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Add to logits of tokens; -inf bans one.
    #[arg(long, value_delimiter = ',', value_name = "ID:BIAS", value_parser = bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Random seed: the same seed gives the same tokens.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Report the log probability of each token, and of the N likeliest tokens at its position.
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<usize>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is not a token id and a number, such as 17:-2.5 or 17:-inf");
    let (token, bias) = text.split_once(':').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl SamplingArgs {
    /// The settings for a vocabulary, or every flag that is wrong.
    pub(crate) fn sampling(&self, vocab: u32) -> Result<Sampling, Failure> {
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            bias: self.logit_bias.iter().copied().collect(),
            seed: self.seed,
        };
        let problems = sampling.problems(vocab);
        if problems.is_empty() {
            return Ok(sampling);
        }
        let flag = |problem: &ir::sampling::Improper| {
            format!(
                "--{} is {}; legal: {}",
                problem.field.replace('_', "-"),
                problem.got,
                problem.legal
            )
        };
        let mut lines: Vec<String> = problems.iter().take(PROBLEMS_MAX).map(flag).collect();
        if problems.len() > PROBLEMS_MAX {
            lines.push(format!("and {} more", problems.len() - PROBLEMS_MAX));
        }
        Err(Failure::usage(lines.join(" | ")))
    }
}
