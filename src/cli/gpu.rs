//! Flags about GPUs: which, how many sequences they run at once, how prompts and weights get there.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::failure::Failure;

/// Most GPUs of one machine.
const CARDS_MAX: u32 = 64;

/// The number of a GPU: `0`, or `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CardNumber(pub(crate) u32);

impl fmt::Display for CardNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl FromStr for CardNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let number = trimmed.strip_prefix("cuda:").unwrap_or(trimmed).parse().ok();
        let number = number.filter(|&number| number < CARDS_MAX).map(Self);
        number.ok_or_else(|| {
            format!("{text:?} is no GPU: give its number, from 0 (0,1 or cuda:0,cuda:1)")
        })
    }
}

impl<'de> Deserialize<'de> for CardNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for CardNumber {
    fn schema_name() -> Cow<'static, str> {
        "CardNumber".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": CARDS_MAX - 1,
            "pattern": "^(cuda:)?[0-9]+$"
        })
    }
}

/// Lanes that kernels are compiled with.
const WIDTHS: [u32; 4] = [1, 2, 4, 8];

/// How many sequences `serve` runs at once.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LanesArgs {
    /// Sequences that one command decodes at once on cuda, sharing a pass over the weights: 1, 2, 4 or 8. Default: 8 where the weights have
    /// 16 bits, but no more than --sessions. Eight clients then get over three times as many tokens, and a lone one waits longer for each
    /// (llama-3.2-1b on an H200: 725 instead of 610 us; smollm2-135m: half as long again and more). For a lone client say 1.
    #[arg(long, value_name = "N", value_parser = width)]
    pub(crate) lanes: Option<u32>,
}

/// How many sequences `bench` runs at once.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SequencesArgs {
    /// Time a step of so many sequences at once, beside that of one: 2, 4 or 8. Needs the GPU and 16-bit weights.
    #[arg(long, value_name = "N", value_parser = several, conflicts_with_all = ["bundle", "peers", "gguf", "prefill"])]
    pub(crate) sequences: Option<u32>,
}

impl LanesArgs {
    /// Refuses to ignore what was asked for: lanes are the GPU's.
    pub(crate) fn check(self, on_gpu: bool) -> Result<(), Failure> {
        if self.lanes.is_none_or(|lanes| lanes == 1) || on_gpu {
            return Ok(());
        }
        let message = "--lanes is for --device cuda: on the CPU sequences take turns; leave it out";
        Err(Failure::usage(message))
    }
}

/// The most sequences at once that kernels are compiled for and that these places can fill.
pub(crate) fn widest(places: usize) -> u32 {
    let fits = |lanes: &u32| *lanes as usize <= places;
    WIDTHS.into_iter().rev().find(fits).unwrap_or(1)
}

fn width(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS)
}

fn several(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS[1..])
}

fn one_of(text: &str, widths: &[u32]) -> Result<u32, String> {
    let asked = text.parse().ok().filter(|number| widths.contains(number));
    asked.ok_or_else(|| format!("kernels are compiled for {widths:?} sequences at once"))
}

/// How a prompt is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrefillChoice {
    /// In chunks where that is faster and the model allows it, else token by token.
    #[default]
    Auto,
    /// In chunks of many tokens; refused where that is not possible.
    Chunks,
    /// Token by token.
    Steps,
}

/// How `generate` and `serve` run prompts.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct PrefillArgs {
    /// How cuda runs a prompt. Chunks are matrix products on the tensor cores, between two launches of the resident kernel; they need 16-bit weights.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub(crate) prefill: PrefillChoice,
}

impl PrefillArgs {
    /// Refuses to ignore what was asked for: chunks are the GPU's.
    pub(crate) fn check(self, on_gpu: bool) -> Result<(), Failure> {
        if self.prefill != PrefillChoice::Chunks || on_gpu {
            return Ok(());
        }
        let message = "--prefill chunks is for --device cuda: the CPU evaluates a prompt in its own way; leave it out, or use --prefill auto";
        Err(Failure::usage(message))
    }
}

/// How weights get to the GPU.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WeightsArgs {
    /// Launch the kernel before the weights are there: each layer is run as soon as it has landed.
    #[arg(long)]
    pub(crate) stream_weights: bool,
    /// Where streamed weights are read from.
    #[arg(long, value_enum, default_value = "auto", requires = "stream_weights")]
    pub(crate) read_weights_by: ReadByChoice,
    /// Seconds without a byte after which streamed weights are given up.
    #[arg(long, default_value_t = 10, value_name = "SECONDS", requires = "stream_weights")]
    pub(crate) weights_deadline: u64,
    /// Compare every tensor on the GPU with its file afterwards.
    #[arg(long)]
    pub(crate) check_weights: bool,
}

/// Where streamed weights are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReadByChoice {
    /// From the page cache if it has them, else by io_uring past it, else by threads.
    Auto,
    /// By io_uring, past the page cache.
    IoUring,
    /// By threads with pread, through the page cache.
    Pread,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_a_number() {
        for (text, number) in [("0", 0), ("cuda:3", 3), (" 1 ", 1)] {
            assert_eq!(text.parse(), Ok(CardNumber(number)));
        }
        for text in ["", "cuda", "cuda:", "-1", "64", "gpu:0", "1.5", "cpu"] {
            let refused = text.parse::<CardNumber>().unwrap_err();
            assert!(refused.contains("cuda:0,cuda:1"), "{refused}");
        }
        assert_eq!(serde_json::from_str::<CardNumber>("2").unwrap(), CardNumber(2));
        assert_eq!(serde_json::from_str::<CardNumber>("\"cuda:2\"").unwrap(), CardNumber(2));
    }

    #[test]
    fn there_are_no_more_sequences_at_once_than_places() {
        let widths = [1, 2, 3, 7, 8, 64].map(widest);
        assert_eq!(widths, [1, 2, 2, 4, 8, 8]);
    }
}
