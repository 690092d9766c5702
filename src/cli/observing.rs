//! Arguments of the command that looks at a running process.

use clap::Args;

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
