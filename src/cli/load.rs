//! Flags of a load on a server: `amk bench --serve`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Load on a server")]
pub(crate) struct LoadArgs {
    /// Measure a server that answers /v1/completions, by its address, instead of a step.
    #[arg(long = "serve", value_name = "URL", conflicts_with_all = ["manifest", "phase", "prefill", "sequences", "bundle", "peers", "gguf", "rounds"])]
    pub(crate) url: Option<String>,
    /// Clients that each send a request when the one before has ended (closed loop); default: 8. With --rate: requests
    /// in flight at most, beyond which arrivals are dropped and counted; default: 256.
    #[arg(long, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) clients: Option<u32>,
    /// Requests per second, at random times of a Poisson process (open loop).
    #[arg(long, value_name = "N", requires = "url", value_parser = rate)]
    pub(crate) rate: Option<f64>,
    /// Requests in all.
    #[arg(long, default_value_t = 64, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) requests: u32,
    /// Seconds after which no request is sent.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", requires = "url", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) duration: u32,
    /// Seconds that a request may take.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", requires = "url", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) timeout: u32,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_name = "TOKENS", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) prompt_tokens: u32,
    /// The first tokens of each prompt, the same in all of them; the others are random.
    #[arg(long, default_value_t = 0, value_name = "TOKENS", requires = "url")]
    pub(crate) shared_tokens: u32,
    /// Tokens of each answer; end tokens are ignored.
    #[arg(long, default_value_t = 64, value_name = "TOKENS", requires = "url", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) answer_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0, value_name = "N", requires = "url")]
    pub(crate) temperature: f64,
    /// Prompts are token ids below this number.
    #[arg(long, default_value_t = 200, value_name = "N", requires = "url", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) vocab: u32,
    /// Write the distributions as an SVG file.
    #[arg(long, value_name = "FILE", requires = "url")]
    pub(crate) plot: Option<PathBuf>,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok().filter(|rate| (0.001..=1e5).contains(rate));
    rate.ok_or_else(|| format!("{text:?} is no rate: 0.001 to 100000 requests per second"))
}
