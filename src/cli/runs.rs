//! Arguments of the commands on stored results: runs, the store, measured grids.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use schemars::JsonSchema;
use serde::Deserialize;

use super::{DeviceChoice, ModelArgs, SharingArgs};

/// The subcommands of `runs`.
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
    /// Shows one run: its terms, its trials by outcome, what led and why.
    #[command(
        after_help = "Examples:\n  amk runs show runs/0001\n  amk runs show runs/0001 | jq .champion.config"
    )]
    Show(RunArgs),
    /// Compares two runs, or lists every reason why they cannot be compared (exit code 1).
    #[command(
        after_help = "Examples:\n  amk runs compare runs/0001 runs/0002\n  amk runs compare runs/0001 runs/0002 | jq .reasons"
    )]
    Compare(CompareArgs),
    /// Repeats a trial: checks for the same program, the same values, and on the same card a latency that fits.
    #[command(
        after_help = "Examples:\n  amk runs replay runs/0001\n  amk runs replay runs/0001 --trial 7 --device cpu\n\n\
        Stages: files, graph, schedule, program, kernel, reference, then predict or measure; each is the same, differs or was skipped, and why. \
        Exit code 1: one differs. A time is measured again only on the card, driver and compiler of the record."
    )]
    Replay(ReplayArgs),
    /// Writes trajectories for training and study: state, edit, verdict, decision; one line each, split by whole runs.
    #[command(
        after_help = "Examples:\n  amk runs export --out trajectories\n  amk runs export runs/llama --out t --validation 20\n  amk runs export --out t --sft"
    )]
    Export(RunsExportArgs),
    /// Lists the runs that could be deleted to make room; deletes them with --apply.
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

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// The folder of a search, or its ledger.
    #[arg(value_name = "A")]
    pub(crate) a: PathBuf,
    /// Another one.
    #[arg(value_name = "B")]
    pub(crate) b: PathBuf,
}

#[derive(Debug, Args, Deserialize, JsonSchema)]
pub(crate) struct ReplayArgs {
    /// The folder of a search, or its ledger.
    #[arg(value_name = "RUN")]
    pub(crate) path: PathBuf,
    /// The trial. Default: the champion.
    #[arg(long, value_name = "N")]
    pub(crate) trial: Option<u64>,
    /// The device for a measured trial.
    #[arg(long, value_enum, default_value = "auto")]
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("enum" = ["auto", "cpu", "cuda"], "type" = "string"))]
    pub(crate) device: DeviceChoice,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) sharing: SharingArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RunsExportArgs {
    #[command(flatten)]
    pub(crate) runs: RunsArgs,
    /// A new folder for train.jsonl and validation.jsonl.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Percentage of the runs that go to validation.
    #[arg(long, value_name = "PERCENT", default_value_t = 10)]
    pub(crate) validation: u64,
    /// Write prompts and completions instead: model, GPU and leading schedule, and the change that was kept. No model and GPU is on both
    /// sides.
    #[arg(long)]
    pub(crate) sft: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    #[command(flatten)]
    pub(crate) runs: RunsArgs,
    /// Of sealed runs of one model, target and card, keep the best N and the newest. Default: all.
    #[arg(long, value_name = "N")]
    pub(crate) keep: Option<usize>,
    /// Delete the runs.
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

/// The subcommands of `corpus`.
#[derive(Debug, Subcommand)]
pub(crate) enum CorpusCommand {
    /// Shows what a store holds: the best by model and card, and which moves helped.
    #[command(
        after_help = "Examples:\n  amk corpus show\n  amk corpus show --store night.sqlite | jq .best"
    )]
    Show(StoreArgs),
    /// Checks the file, the chain of every run, and that the tables follow from the rows.
    #[command(after_help = "Examples:\n  amk corpus check")]
    Check(StoreArgs),
    /// Adds runs that are not in the store yet: ledgers, folders of runs, or other stores.
    #[command(
        after_help = "Examples:\n  amk corpus import runs\n  amk corpus import a.sqlite b.sqlite --store all.sqlite"
    )]
    Import(ImportArgs),
    /// Writes the ledgers of a store into a new folder, a folder for each run, byte for byte as they were.
    #[command(
        after_help = "Examples:\n  amk corpus export --out ledgers && amk runs verify ledgers"
    )]
    Export(CorpusExportArgs),
}

/// A store.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store. Default: runs/store.sqlite.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "runs/store.sqlite",
        hide_default_value = true
    )]
    pub(crate) store: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Ledgers, folders of a search, folders of such folders, other stores.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CorpusExportArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// A folder that does not exist yet.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

/// The subcommands of `grid`.
#[derive(Debug, Subcommand)]
pub(crate) enum MeasuredGridCommand {
    /// Measures every point of a grid, each once and briefly. Without a GPU the points are predicted, and the file says so.
    #[command(
        after_help = "Examples:\n  amk grid record --model smollm2-135m --grid corpus/grids/smollm2-135m.grid.json --device cuda --out smollm2.jsonl\n  \
        amk grid record --model qwen3-0.6b --grid corpus/grids/qwen3-0.6b.grid.json --out qwen.jsonl --resume\n\n\
        Each point agrees on the reference VM and, at the timed positions, on the device before it is timed. Rows are written as they \
        come; Ctrl-C ends the run with exit code 130 and --resume goes on. Failed points are rows too."
    )]
    Record(RecordArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    /// The grid: knobs with the values to combine.
    #[arg(long, value_name = "FILE")]
    pub(crate) grid: PathBuf,
    /// Random seed of the tokens and of the order of the points.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Tokens before the timed ones.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) context: u32,
    /// Rounds of four blocks of eight tokens for which a point is timed.
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub(crate) rounds: usize,
    /// Measure this many points, drawn at random. Default: all.
    #[arg(long, value_name = "N")]
    pub(crate) points: Option<usize>,
    /// The file of rows to write.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Continue an existing file.
    #[arg(long)]
    pub(crate) resume: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ProvenanceArgs {
    /// Pages, in Markdown or SVG. Default: those of this repository that have results.
    #[arg(value_name = "FILE", hide_default_value = true, default_values = RESULT_PAGES)]
    pub(crate) files: Vec<PathBuf>,
    /// Write each number anew from its evidence.
    #[arg(long)]
    pub(crate) write: bool,
}

/// The pages of the repository that have results.
const RESULT_PAGES: [&str; 5] = [
    "README.md",
    "docs/explanation/performance.md",
    "docs/guide/which-format.md",
    "docs/results/shipped.md",
    "docs/results/engines.svg",
];
