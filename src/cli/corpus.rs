//! Arguments of `amk corpus`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// What to do with the store.
#[derive(Debug, Subcommand)]
pub(crate) enum CorpusCommand {
    /// Says what a store holds: what leads by model and card, and which moves paid.
    #[command(
        after_help = "Examples:\n  amk corpus show\n  amk corpus show --store night.sqlite | jq .best"
    )]
    Show(StoreArgs),
    /// Checks the file, the chain of every run, and that the tables follow from the rows.
    #[command(after_help = "Examples:\n  amk corpus check")]
    Check(StoreArgs),
    /// Adds runs that are not in the store yet: ledgers, folders of runs, or what `export` wrote.
    #[command(
        after_help = "Examples:\n  amk corpus import runs\n  amk corpus import night.jsonl --store all.sqlite"
    )]
    Import(ImportArgs),
    /// Writes the store out: JSON lines (every row with its chain, and the programs), or a Parquet file for each table.
    #[command(
        after_help = "Examples:\n  amk corpus export --out store.jsonl\n  amk corpus export --out - | gzip > store.jsonl.gz\n  \
        amk corpus export --format parquet --out tables"
    )]
    Export(StoreExportArgs),
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

/// Arguments of `corpus import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Ledgers, folders of a search, folders of such folders, exported files.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
}

/// Arguments of `corpus export`.
#[derive(Debug, Args)]
pub(crate) struct StoreExportArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// What to write.
    #[arg(long, value_enum, default_value = "jsonl")]
    pub(crate) format: ExportFormat,
    /// The file, or `-` for standard output, which then carries the lines instead of a document. For Parquet a new folder.
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) out: PathBuf,
}

/// What a store is written out as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// JSON lines: everything, to be imported again.
    Jsonl,
    /// A file for each table.
    Parquet,
}
