//! Flags that say how tokens are chosen.

use clap::Args;
use ir::sampling::Sampling;

use crate::failure::Failure;

/// Wrong flags that are named; a long list of biases can be wrong a thousand times.
const PROBLEMS_MAX: usize = 8;

/// How tokens are chosen. The default is greedy.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// What logits are divided by before a token is drawn; 0 takes the likeliest.
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Draw from the likeliest N tokens; 0: all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) top_k: u32,
    /// Draw from the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Draw from tokens with at least this share of the likeliest one's probability.
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Make tokens that were there before less likely: above 1.
    #[arg(long, default_value_t = 1.0, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Add to logits of tokens; -inf bans one.
    #[arg(long, value_delimiter = ',', value_name = "ID:BIAS", value_parser = bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// What is drawn with: the same seed, the same tokens.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Report the log probability of each token, and of the N likeliest in its place.
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<usize>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is not a token id and a number, such as 17:-2.5 or 17:-inf");
    let (token, bias) = text.split_once(':').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl SamplingArgs {
    /// The settings for a vocabulary, or every flag that is wrong.
    pub(crate) fn sampling(&self, vocab: u32) -> Result<Sampling, Failure> {
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            bias: self.logit_bias.iter().copied().collect(),
            seed: self.seed,
        };
        let problems = sampling.problems(vocab);
        if problems.is_empty() {
            return Ok(sampling);
        }
        let flag = |problem: &ir::sampling::Improper| {
            format!(
                "--{} is {}; legal: {}",
                problem.field.replace('_', "-"),
                problem.got,
                problem.legal
            )
        };
        let mut lines: Vec<String> = problems.iter().take(PROBLEMS_MAX).map(flag).collect();
        if problems.len() > PROBLEMS_MAX {
            lines.push(format!("and {} more", problems.len() - PROBLEMS_MAX));
        }
        Err(Failure::usage(lines.join(" | ")))
    }
}
