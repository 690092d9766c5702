//! Arguments of `inspect`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{ConfigArgs, ModelArgs, gpu};

/// The subcommands of `inspect`.
#[derive(Debug, Subcommand)]
pub(crate) enum InspectCommand {
    /// The kernel of a schedule: registers and spills; with nvdisasm also the instructions of each op and their source lines.
    #[command(
        after_help = "Examples:\n  amk inspect kernel --model toy\n  amk inspect kernel --model llama-3.2-1b --sass k.sass --ptx k.ptx --cubin k.cubin\n\n\
        Needs NVRTC and no GPU. nvdisasm is looked for in PATH, in /usr/local/cuda/bin and beside NVRTC (pip install nvidia-cuda-nvdisasm)."
    )]
    Kernel(Box<InspectKernelArgs>),
    /// The ring of a running `amk`: the states of its 64 entries, and its last commands.
    #[command(
        after_help = "Examples:\n  amk inspect ring\n  amk inspect ring --pid 4711 | jq '.entries[] | select(.state != \"empty\")'"
    )]
    Ring(InspectProcessArgs),
    /// How a running `amk` knows its figures: ring, control, copy, residency; each measured, derived or missing.
    #[command(
        after_help = "Examples:\n  amk inspect evidence --pid 4711\n\nExit code 5: not all four are measured; `missing` and `derived` name the others."
    )]
    Evidence(InspectProcessArgs),
}

/// A running process.
#[derive(Debug, Args)]
pub(crate) struct InspectProcessArgs {
    /// The process. Default: the one that started last.
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectKernelArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// The kernel of batches of N sequences.
    #[arg(long, value_name = "N", value_parser = gpu::several)]
    pub(crate) batch: Option<u32>,
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

/// A tool of compute-sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SanitizerTool {
    /// Accesses out of bounds, misaligned or to memory that is gone.
    Memcheck,
    /// Barriers that not every thread reaches.
    Synccheck,
    /// Accesses to shared memory without an order.
    Racecheck,
}

impl SanitizerTool {
    pub(crate) const ALL: &[Self] = &[Self::Memcheck, Self::Synccheck, Self::Racecheck];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Synccheck => "synccheck",
            Self::Racecheck => "racecheck",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct SanitizeArgs {
    /// A Hugging Face folder, a model of the Hub or a preset that decodes 5 tokens. Default: toy.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET", conflicts_with = "program")]
    pub(crate) model: Option<String>,
    /// Its schedule: a file with a config, or any subset of one.
    #[arg(long, value_name = "FILE", conflicts_with = "program")]
    pub(crate) config: Option<PathBuf>,
    /// The tools, separated by commas. Default: all three.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) tool: Vec<SanitizerTool>,
    /// Write the whole reports into this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Seconds after which a tool is stopped.
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    pub(crate) limit: u64,
    /// Another program and its arguments, after --.
    #[arg(last = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<String>,
}
