//! Arguments of the commands that look at a running process, or keep one busy.

use clap::Args;
use clap::builder::TypedValueParser;

use super::ModelArgs;

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The process to look at. Default: the one that there is.
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Look twice, a moment apart, print one document and end.
    #[arg(long)]
    pub(crate) once: bool,
    /// Print JSON; only with --once, which prints a table for people without it.
    #[arg(long, requires = "once")]
    pub(crate) json: bool,
    /// Milliseconds between two looks.
    #[arg(long, default_value_t = 500, value_name = "MS", value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) every: u64,
}

/// Arguments of `soak`.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// How long. The process is stopped once, half-way, if it is for four seconds or more.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub(crate) seconds: u64,
    /// What is drawn.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Sequences that take turns.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64).map(usize::from))]
    pub(crate) sessions: usize,
}
