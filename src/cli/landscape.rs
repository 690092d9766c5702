//! Arguments of `amk landscape`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ModelArgs, SharingArgs};

/// What to do with landscapes.
#[derive(Debug, Subcommand)]
pub(crate) enum LandscapeCommand {
    /// Measures every point of a grid, each once and briefly. Without a GPU the cost model answers, and the file says so.
    #[command(
        after_help = "Examples:\n  amk landscape record --model smollm2-135m --grid corpus/landscapes/smollm2-135m.grid.json --device cuda --out smollm2.jsonl\n  \
        amk landscape record --model qwen3-0.6b --grid corpus/landscapes/qwen3-0.6b.grid.json --out qwen.jsonl --resume\n\n\
        Each point agrees on the reference machine and, at the timed positions, on the device before it is timed. Rows are written as they\n\
        come; Ctrl-C ends the run with exit code 130 and --resume goes on. Failed points are rows too."
    )]
    Record(RecordArgs),
}

/// A part of a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shard {
    /// Which, from zero.
    pub(crate) index: u32,
    /// Of how many.
    pub(crate) of: u32,
}

impl std::str::FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (index, of) = text.split_once('/')?;
            Some((index.parse().ok()?, of.parse().ok()?))
        };
        match read() {
            Some((index, of)) if index < of => Ok(Self { index, of }),
            _ => Err("a shard is I/N with I from 0 to N - 1".to_owned()),
        }
    }
}

/// Arguments of `landscape record`.
#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    /// The grid: knobs with the values to combine.
    #[arg(long, value_name = "FILE")]
    pub(crate) grid: PathBuf,
    /// What tokens, and the order of the points, are drawn with.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Tokens before the timed ones.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) context: u32,
    /// Rounds of four blocks of eight tokens that a point is timed.
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub(crate) rounds: usize,
    /// Record only the points whose number is I modulo N.
    #[arg(long, default_value = "0/1", value_name = "I/N")]
    pub(crate) shard: Shard,
    /// The file of rows to write.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Go on with a file that is there.
    #[arg(long)]
    pub(crate) resume: bool,
}
