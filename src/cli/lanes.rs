//! Several sequences in one command.

use clap::Args;

use crate::failure::Failure;

/// Lanes that kernels are compiled with.
const WIDTHS: [u32; 4] = [1, 2, 4, 8];

/// How many sequences `serve` runs at once.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LanesArgs {
    /// Sequences that one command decodes at once on cuda, sharing a pass over the weights: 1, 2, 4 or 8. Default: 8 where the weights have
    /// 16 bits, but no more than --sessions. Eight clients then get over three times as many tokens, and a lone one waits longer for each
    /// (llama-3.2-1b on an H200: 725 instead of 610 us; smollm2-135m: half as long again and more). For a lone client say 1.
    #[arg(long, value_name = "N", value_parser = width)]
    pub(crate) lanes: Option<u32>,
}

/// How many sequences `bench` runs at once.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SequencesArgs {
    /// Time a step of so many sequences at once, beside that of one: 2, 4 or 8. Needs the GPU and 16-bit weights.
    #[arg(long, value_name = "N", value_parser = several, conflicts_with_all = ["bundle", "peers", "gguf", "prefill"])]
    pub(crate) sequences: Option<u32>,
}

impl LanesArgs {
    /// Refuses to ignore what was asked for: lanes are the GPU's.
    pub(crate) fn check(self, on_gpu: bool) -> Result<(), Failure> {
        if self.lanes.is_none_or(|lanes| lanes == 1) || on_gpu {
            return Ok(());
        }
        let message = "--lanes is for --device cuda: on the CPU sequences take turns; leave it out";
        Err(Failure::usage(message))
    }
}

/// The most sequences at once that kernels are compiled for and that these places can fill.
pub(crate) fn widest(places: usize) -> u32 {
    let fits = |lanes: &u32| *lanes as usize <= places;
    WIDTHS.into_iter().rev().find(fits).unwrap_or(1)
}

fn width(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS)
}

fn several(text: &str) -> Result<u32, String> {
    one_of(text, &WIDTHS[1..])
}

fn one_of(text: &str, widths: &[u32]) -> Result<u32, String> {
    let asked = text.parse().ok().filter(|number| widths.contains(number));
    asked.ok_or_else(|| format!("kernels are compiled for {widths:?} sequences at once"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_sequences_at_once_than_places() {
        let widths = [1, 2, 3, 7, 8, 64].map(widest);
        assert_eq!(widths, [1, 2, 2, 4, 8, 8]);
    }
}
