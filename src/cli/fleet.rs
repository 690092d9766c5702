//! Arguments of `amk fleet`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use ir::schedule::ScheduleConfig;
use search::Budget;
use search::strategy::{KnownRun, StrategyName};

use super::{DeviceChoice, SharingArgs};

/// The subcommands of `fleet`.
#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Makes a board with the terms of its leases. `submit` makes one with the default terms.
    #[command(
        after_help = "Examples:\n  amk fleet init --board b.sqlite --lease 120 --heartbeat 20\n  \
        PGPASSWORD=... amk fleet init --board postgres://owner@db.example/amk --worker-role amk_worker"
    )]
    Init(FleetInitArgs),
    /// Adds a job for each model, card and context; or races of the champions found so far.
    #[command(
        after_help = "Examples:\n  amk fleet submit --board b.sqlite --models toy,toy-2l --device cpu --budget 8\n  \
        amk fleet submit --board b.sqlite --models DIR --cards h200,h100 --contexts 128,8192 --device cuda --store runs/store.sqlite\n  \
        amk fleet submit --board b.sqlite --models toy,toy-2l --device cpu --budget 8 --round 1\n  \
        amk fleet submit --board b.sqlite --races 2\n\n\
        Equal jobs are one: submitting twice changes nothing. With --store or --round the legs propose from a snapshot, which is \
        frozen on the board under its hash, so a leg can be repeated from snapshot and seed."
    )]
    Submit(FleetSubmitArgs),
    /// Takes jobs that this machine can do, one at a time, until told to end.
    #[command(
        after_help = "Examples:\n  amk fleet worker --board b.sqlite --device cpu --until-done\n  \
        CUDA_VISIBLE_DEVICES=3 amk fleet worker --board b.sqlite --device cuda --for 8h\n\n\
        One worker drives one card. SIGTERM or Ctrl-C: the job is given back within 5 s, and the worker ends with exit code 0. Each \
        attempt has a folder of its own below --out, as `amk loop` writes it."
    )]
    Worker(FleetWorkerArgs),
    /// Shows jobs by state, workers, champions by model and card, and the cost in card-seconds.
    #[command(
        after_help = "Examples:\n  amk fleet status --board b.sqlite\n  amk fleet status --board b.sqlite --json | jq .champions\n  \
        amk fleet status --board b.sqlite --metrics-file /var/lib/node_exporter/amk.prom"
    )]
    Status(FleetStatusArgs),
    /// Writes the ledgers of all finished jobs into a folder, each checked against its verdict, and a page about the fleet.
    #[command(
        after_help = "Examples:\n  amk fleet report --board b.sqlite --out night\n  amk corpus import night --store runs/store.sqlite"
    )]
    Report(FleetReportArgs),
    /// Tells workers to end after their current job.
    #[command(after_help = "Examples:\n  amk fleet drain --board b.sqlite")]
    Drain(FleetDrainArgs),
}

/// A board.
#[derive(Debug, Args)]
pub(crate) struct FleetBoardArgs {
    /// The board: an SQLite file on a local disk, or postgres://USER@HOST/DATABASE with the password in PGPASSWORD.
    #[arg(long, value_name = "FILE|URL")]
    pub(crate) board: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct FleetInitArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// Seconds after which a job whose worker is silent is free again.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub(crate) lease: f64,
    /// Seconds between two signs of life; at most half of the lease.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) heartbeat: f64,
    /// Attempts of a job that may fail or fall silent before it is dead.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) attempts: u32,
    /// On a server: the role that workers connect as. It may call the five functions of a worker, and nothing else.
    #[arg(long, value_name = "ROLE")]
    pub(crate) worker_role: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct FleetSubmitArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// Models: presets, folders, models of the Hub.
    #[arg(long, value_delimiter = ',', value_name = "MODELS", required_unless_present = "races")]
    pub(crate) models: Vec<String>,
    /// GPUs to schedule for, by target. Default: the live device, else h200.
    #[arg(long, value_delimiter = ',', value_name = "GPUS")]
    pub(crate) cards: Vec<String>,
    /// Tokens of context: a job for each. Default: one job at about 128.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub(crate) contexts: Vec<u32>,
    /// Random seeds: a job for each.
    #[arg(long, value_delimiter = ',', value_name = "SEEDS", default_value = "0")]
    pub(crate) seeds: Vec<u64>,
    /// What the jobs need: cpu (latencies are predicted), cuda (a GPU that is the target), or auto (cuda if there is one here).
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub(crate) device: DeviceChoice,
    /// The budget of each job: a number of trials (64) or a time (90s, 10m, 2h).
    #[arg(long, value_name = "TRIALS|TIME", default_value = "64")]
    pub(crate) budget: Budget,
    /// The strategy: random, hill-climb or residual.
    #[arg(long, value_name = "NAME", default_value = "residual")]
    pub(crate) strategy: StrategyName,
    /// The store whose measured trials the jobs propose from. Default: none.
    #[arg(long, value_name = "FILE")]
    pub(crate) store: Option<PathBuf>,
    /// The round, from 0. Legs of a later round propose from the results of all legs of the rounds before it on this board.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "store")]
    pub(crate) round: u32,
    /// Race each champion that its leg kept on this many further cards.
    #[arg(long, value_name = "N", conflicts_with_all = ["models", "cards", "contexts", "seeds", "device", "budget", "strategy", "store", "round"],
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) races: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct FleetWorkerArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// What this worker has: cpu, cuda, or auto (the GPU if there is one).
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub(crate) device: DeviceChoice,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    /// The folder below which each attempt gets a folder of its own.
    #[arg(long, value_name = "DIR", default_value = "runs/fleet")]
    pub(crate) out: PathBuf,
    /// End when every job that this worker could do is done or dead.
    #[arg(long)]
    pub(crate) until_done: bool,
    /// Take no further job after this time, such as 8h.
    #[arg(long = "for", value_name = "TIME")]
    pub(crate) time: Option<Budget>,
}

#[derive(Debug, Args)]
pub(crate) struct FleetStatusArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// Also write the figures to this file as OpenMetrics, atomically.
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct FleetReportArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// The folder for the ledgers, a folder for each job, and for the page, report.html, which is written again each time.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct FleetDrainArgs {
    #[command(flatten)]
    pub(crate) board: FleetBoardArgs,
    /// Workers, as `status` names them. Default: all.
    #[arg(value_name = "WORKER")]
    pub(crate) workers: Vec<String>,
}

/// What a job of a fleet fixes instead of the store and the rules of this machine.
#[derive(Clone, Debug)]
pub(crate) struct FixedTerms {
    /// The snapshot of earlier searches to propose from.
    pub(crate) known: Vec<KnownRun>,
    /// Of a race: where it begins, and its only candidate.
    pub(crate) race: Option<[ScheduleConfig; 2]>,
}
