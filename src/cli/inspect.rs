//! Arguments of `inspect`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ConfigArgs, ModelArgs};

/// The subcommands of `inspect`.
#[derive(Debug, Subcommand)]
pub(crate) enum InspectCommand {
    /// The kernel of a schedule: registers and spills; with nvdisasm also the instructions of each op and their source lines.
    #[command(
        after_help = "Examples:\n  amk inspect kernel --model toy\n  amk inspect kernel --model llama-3.2-1b --sass k.sass --ptx k.ptx --cubin k.cubin\n\n\
        Needs NVRTC and no GPU. nvdisasm is looked for in PATH, in /usr/local/cuda/bin and beside NVRTC (pip install nvidia-cuda-nvdisasm)."
    )]
    Kernel(InspectKernelArgs),
}

#[derive(Debug, Args)]
pub(crate) struct InspectKernelArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Write the machine code as text, with source lines; needs nvdisasm.
    #[arg(long, value_name = "FILE")]
    pub(crate) sass: Option<PathBuf>,
    /// Write the PTX.
    #[arg(long, value_name = "FILE")]
    pub(crate) ptx: Option<PathBuf>,
    /// Write the compiled kernel.
    #[arg(long, value_name = "FILE")]
    pub(crate) cubin: Option<PathBuf>,
    /// The source lines with most instructions to list for each op.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub(crate) lines: usize,
}
