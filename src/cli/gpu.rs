//! Flags about GPUs: which ones, how many sequences they run at once, how prompts and weights are loaded.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use ir::KvDtype;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::failure::Failure;

/// Most GPUs of one machine.
const CARDS_MAX: u32 = 64;

/// Parses the number of a GPU: `0`, or `cuda:0`.
pub(super) fn card(text: &str) -> Result<u32, String> {
    let trimmed = text.trim();
    let number = trimmed.strip_prefix("cuda:").unwrap_or(trimmed).parse().ok();
    number.filter(|&number| number < CARDS_MAX).ok_or_else(|| {
        format!("{text:?} is no GPU: give its number, from 0 (0,1 or cuda:0,cuda:1)")
    })
}

/// The same from JSON, where a number is accepted too.
pub(super) fn cards<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    let one =
        |value: &Value| card(&value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    let all = Vec::<Value>::deserialize(deserializer)?;
    all.iter().map(one).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}

pub(super) fn card_schema() -> Value {
    json!({
        "type": ["integer", "string"],
        "minimum": 0,
        "maximum": CARDS_MAX - 1,
        "pattern": "^(cuda:)?[0-9]+$"
    })
}

/// Whether a measurement may share the GPU.
#[derive(Clone, Debug, Default, Args, Deserialize, JsonSchema)]
pub(crate) struct SharingArgs {
    /// Measure even if other processes use the GPU. The conditions of the measurement say so.
    #[arg(long)]
    #[serde(default)]
    pub(crate) shared_gpu: bool,
}

/// The GPUs that run one step together: the first ones, or those that were named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub(crate) struct Gpus {
    count: u32,
    cards: [u32; ir::program::DEVICES_MAX as usize],
}

impl Gpus {
    pub(crate) fn count(self) -> u32 {
        self.count
    }

    /// Their numbers.
    pub(crate) fn cards(self) -> Vec<u32> {
        self.cards[..self.count as usize].to_vec()
    }
}

impl TryFrom<u32> for Gpus {
    type Error = String;

    fn try_from(count: u32) -> Result<Self, String> {
        let most = ir::program::DEVICES_MAX;
        let cards = std::array::from_fn(|index| index as u32);
        let fits = (1..=most).contains(&count).then_some(Self { count, cards });
        fits.ok_or_else(|| format!("1 to {most} GPUs run one step together, not {count}"))
    }
}

/// Parses a number of GPUs, or a list of different ones.
impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains([',', ':']) {
            let count: u32 = text.trim().parse().map_err(|_| format!("{text:?} is no number"))?;
            return Self::try_from(count);
        }
        let cards = text.split(',').map(card).collect::<Result<Vec<u32>, String>>()?;
        if (1..cards.len()).any(|index| cards[..index].contains(&cards[index])) {
            return Err(format!("{text:?} names a GPU twice"));
        }
        let mut gpus = Self::try_from(cards.len() as u32)?;
        gpus.cards[..cards.len()].copy_from_slice(&cards);
        Ok(gpus)
    }
}

/// Parses a number of parts of one GPU.
pub(super) fn emulated(text: &str) -> Result<u32, String> {
    let most = ir::program::DEVICES_MAX;
    let parts = text.parse().ok().filter(|parts| (2..=most).contains(parts));
    parts.ok_or_else(|| format!("one GPU is run in 2 to {most} parts, not {text}"))
}

/// Batch sizes that kernels are compiled for.
pub(crate) const WIDTHS: [u32; 4] = [1, 2, 4, 8];

/// The largest batch size that kernels are compiled for and that this many places can fill.
pub(crate) fn widest(places: usize) -> u32 {
    let fits = |seqs: &u32| *seqs as usize <= places;
    WIDTHS.into_iter().rev().find(fits).unwrap_or(1)
}

pub(super) fn width(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS)
}

pub(super) fn several(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS[1..])
}

fn one_of(text: &str, widths: &[u32]) -> Result<u32, String> {
    let asked = text.parse().ok().filter(|number| widths.contains(number));
    asked.ok_or_else(|| format!("kernels are compiled for {widths:?} sequences at once"))
}

/// The element type of key/value caches. It is part of what a run computes, so only this flag chooses it: no schedule, search or store does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct KvArgs {
    /// Element type of the key/value cache. e4m3 keeps 8 bits and a scale per token and head: more tokens in the same memory, at some loss.
    #[arg(long, value_name = "f16|e4m3", default_value = "f16", hide_default_value = true, value_parser = kv_dtype)]
    pub(crate) kv_dtype: KvDtype,
}

fn kv_dtype(text: &str) -> Result<KvDtype, String> {
    let known = KvDtype::ALL.into_iter().find(|dtype| dtype.name() == text);
    known.ok_or_else(|| {
        format!("key/value caches are of f16 (16 bits) or e4m3 (8 bits), not {text}")
    })
}

impl KvArgs {
    /// Refuses a cache of codes for `what`, which knows caches of 16 bits only.
    pub(crate) fn only_f16(self, what: &str) -> Result<(), Failure> {
        if self.kv_dtype == KvDtype::F16 {
            return Ok(());
        }
        let dtype = self.kv_dtype.name();
        Err(Failure::usage(format!(
            "{what} is for key/value caches of f16: leave --kv-dtype {dtype} out, or give it to generate, chat, serve, evaluate or bench"
        )))
    }
}

/// Arguments of `device-child`, which `amk` passes to itself.
#[derive(Debug, Args)]
pub(crate) struct DeviceChildArgs {
    /// The model, as it was given to the parent.
    #[arg(long)]
    pub(crate) model: String,
    /// The target, if one was given to the parent.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// The GPUs of a step, if there are several.
    #[arg(long)]
    pub(crate) gpus: Option<Gpus>,
    /// Capacity of the key/value cache in tokens.
    #[arg(long)]
    pub(crate) kv_capacity: Option<u32>,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    /// Sequences of a step.
    #[arg(long, default_value_t = 1)]
    pub(crate) batch: u32,
}

/// How a prompt is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrefillChoice {
    /// In chunks where that is faster and the model allows it, else token by token.
    #[default]
    Auto,
    /// In chunks of many tokens; an error where that is not possible.
    Chunks,
    /// Token by token.
    Steps,
}

impl PrefillChoice {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// How `generate` and `serve` run prompts.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct PrefillArgs {
    /// How cuda runs a prompt. Chunks are matrix products on the tensor cores, between two launches of the resident kernel; they need 16-bit weights.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub(crate) prefill: PrefillChoice,
}

impl PrefillArgs {
    /// Refuses chunks without a GPU: an explicit flag is never ignored.
    pub(crate) fn check(self, on_gpu: bool) -> Result<(), Failure> {
        if self.prefill != PrefillChoice::Chunks || on_gpu {
            return Ok(());
        }
        let message = "--prefill chunks is for --device cuda: the CPU evaluates a prompt in its own way; leave it out, or use --prefill auto";
        Err(Failure::usage(message))
    }
}

/// How streamed weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReadByChoice {
    /// From the page cache if they are in it, else by io_uring past it, else by threads.
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
            assert_eq!(card(text), Ok(number));
        }
        for text in ["", "cuda", "cuda:", "-1", "64", "gpu:0", "1.5", "cpu"] {
            let refused = card(text).unwrap_err();
            assert!(refused.contains("cuda:0,cuda:1"), "{refused}");
        }
        assert_eq!(cards(json!([2, "cuda:3"])).unwrap(), [2, 3]);
        assert!(cards(json!([2, "gpu"])).is_err());
    }

    #[test]
    fn gpus_are_counted_or_named() {
        for (text, count) in
            [("1", 1), ("2", 2), ("0,1,2,3", 4), ("cuda:0, cuda:3", 2), ("cuda:1", 1)]
        {
            assert_eq!(text.parse::<Gpus>().map(Gpus::count), Ok(count), "{text}");
        }
        assert_eq!("cuda:3,1".parse::<Gpus>().unwrap().cards(), [3, 1]);
        assert_eq!("3".parse::<Gpus>().unwrap().cards(), [0, 1, 2]);
        for text in ["0", "9", "", "two", "0,0", "0,x", "0,1,2,3,4,5,6,7,8", "-1"] {
            assert!(text.parse::<Gpus>().is_err(), "{text}");
        }
        assert_eq!(serde_json::from_value::<Gpus>(json!(4)).unwrap().count(), 4);
        assert!(serde_json::from_value::<Gpus>(json!(0)).is_err());
    }

    #[test]
    fn there_are_no_more_sequences_at_once_than_places() {
        let widths = [1, 2, 3, 7, 8, 64].map(widest);
        assert_eq!(widths, [1, 2, 2, 4, 8, 8]);
    }
}
