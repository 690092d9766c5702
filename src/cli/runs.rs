//! Arguments of `amk runs`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{DeviceChoice, SharingArgs};

/// What `runs` does.
#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// Checks ledgers from the first row to the last.
    #[command(
        after_help = "Examples:\n  amk runs verify\n  amk runs verify runs/0001 elsewhere/ledger.jsonl"
    )]
    Verify(RunsArgs),
    /// Lists searches with their trials and best latencies.
    #[command(after_help = "Examples:\n  amk runs list\n  amk runs list runs/llama")]
    List(RunsArgs),
    /// One run: its terms, its trials by outcome, what led and why.
    #[command(
        after_help = "Examples:\n  amk runs show runs/0001\n  amk runs show runs/0001 | jq .champion.config"
    )]
    Show(RunArgs),
    /// Two runs beside each other, or every reason why they may not be compared (exit code 1).
    #[command(
        after_help = "Examples:\n  amk runs compare runs/0001 runs/0002\n  amk runs compare runs/0001 runs/0002 | jq .reasons"
    )]
    Compare(CompareArgs),
    /// Does a trial again: the same program, the same values, and on the same card a latency that fits.
    #[command(
        after_help = "Examples:\n  amk runs replay runs/0001\n  amk runs replay runs/0001 --trial 7 --device cpu\n\n\
        Stages: files, graph, schedule, program, kernel, reference, then predict or measure; each is the same, differs or was skipped, and why.\n\
        Exit code 1: one differs. A time is measured again only on the card, driver and compiler of the record."
    )]
    Replay(ReplayArgs),
    /// Writes trajectories for training and study: state, edit, verdict, decision; a line each, split by whole runs.
    #[command(
        after_help = "Examples:\n  amk runs export --out trajectories\n  amk runs export runs/llama --out t --validation 20"
    )]
    Export(RunsExportArgs),
    /// Says which runs could be given up to make room; does it with --apply.
    #[command(
        after_help = "Examples:\n  amk runs gc\n  amk runs gc --keep 3\n  amk runs gc --keep 3 --apply"
    )]
    Gc(GcArgs),
}

/// One search.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The folder of a search, or its ledger.
    #[arg(value_name = "RUN")]
    pub(crate) path: PathBuf,
}

/// Arguments of `runs compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// The folder of a search, or its ledger.
    #[arg(value_name = "A")]
    pub(crate) a: PathBuf,
    /// Another one.
    #[arg(value_name = "B")]
    pub(crate) b: PathBuf,
}

/// Arguments of `runs replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The folder of a search, or its ledger.
    #[arg(value_name = "RUN")]
    pub(crate) path: PathBuf,
    /// The trial. Default: the one that leads.
    #[arg(long, value_name = "N")]
    pub(crate) trial: Option<u64>,
    /// What a measured trial is measured on.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
}

/// Arguments of `runs export`.
#[derive(Debug, Args)]
pub(crate) struct RunsExportArgs {
    #[command(flatten)]
    pub(crate) runs: RunsArgs,
    /// A new folder for train.jsonl and validation.jsonl.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// How many of a hundred runs are for validation.
    #[arg(long, value_name = "PERCENT", default_value_t = 10)]
    pub(crate) validation: u64,
}

/// Arguments of `runs gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    #[command(flatten)]
    pub(crate) runs: RunsArgs,
    /// Of sealed runs of one model, target and card, the best so many stay, and the newest. Default: all.
    #[arg(long, value_name = "N")]
    pub(crate) keep: Option<usize>,
    /// Do it.
    #[arg(long)]
    pub(crate) apply: bool,
}

/// Searches.
#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct RunsArgs {
    /// Ledgers, folders of a search, or folders of such folders. Default: runs.
    #[arg(value_name = "PATH")]
    #[serde(default)]
    pub(crate) paths: Vec<PathBuf>,
}
