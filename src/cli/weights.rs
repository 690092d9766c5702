//! How weights get to the GPU.

use clap::{Args, ValueEnum};

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
