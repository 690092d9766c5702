//! How prompts are run on the GPU.

use clap::{Args, ValueEnum};

use crate::failure::Failure;

/// How a prompt is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrefillChoice {
    /// In chunks where that is faster and the model allows it, else token by token.
    #[default]
    Auto,
    /// In chunks of many tokens; refused where that is not possible.
    Chunks,
    /// Token by token.
    Steps,
}

/// How `generate` and `serve` run prompts.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct PrefillArgs {
    /// How cuda runs a prompt. Chunks are matrix products on the tensor cores, between two launches of the resident kernel; they need 16-bit weights.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub(crate) prefill: PrefillChoice,
}

impl PrefillArgs {
    /// Refuses to ignore what was asked for: chunks are the GPU's.
    pub(crate) fn check(self, on_gpu: bool) -> Result<(), Failure> {
        if self.prefill != PrefillChoice::Chunks || on_gpu {
            return Ok(());
        }
        let message = "--prefill chunks is for --device cuda: the CPU evaluates a prompt in its own way; leave it out, or use --prefill auto";
        Err(Failure::usage(message))
    }
}
