//! Arguments of the commands that generate and serve text, and of the view of what runs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{ArgGroup, Args};
use ir::ScheduleConfig;
use search::Budget;
use vm_host::{ReadBy, Streaming};

use super::{ConfigArgs, DeviceChoice, ModelArgs, PrefillArgs, ReadByChoice, SamplingArgs, gpu};
use crate::command_log::{CommandLog, Head};
use crate::failure::Failure;

/// Parses `20` or `20%`.
pub(super) fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end().parse::<f64>().ok();
    number
        .filter(|number| number.is_finite())
        .ok_or_else(|| format!("{text:?} is no percentage: give a number, such as 20 or 20%"))
}

/// Parses one token id of a list.
pub(super) fn token(text: &str) -> Result<u32, String> {
    text.trim()
        .parse()
        .map_err(|_| "token ids are whole numbers with commas between them, such as 1,2,3".into())
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The port where no other is given.
const PORT: u16 = 8080;

/// Parses the IP of an interface. `localhost` is the only name, as no other is sure to be of this machine.
fn host(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(LOOPBACK);
    }
    text.parse().map_err(|_| "it must be the IP of an interface of this machine, such as 127.0.0.1, or 0.0.0.0 for all".into())
}

/// Parses `127.0.0.1:8080`, `localhost:8080`, `127.0.0.1` or `8080`.
fn address(text: &str) -> Result<SocketAddr, String> {
    let parts = || match text.rsplit_once(':') {
        Some((ip, port)) => Some(SocketAddr::new(host(ip).ok()?, port.parse().ok()?)),
        None => text.parse().map(|port| SocketAddr::new(LOOPBACK, port)).ok(),
    };
    let alone = || host(text).ok().map(|ip| SocketAddr::new(ip, PORT));
    text.parse().ok().or_else(alone).or_else(parts).ok_or_else(|| {
        "it must be an IP and a port from 0 to 65535, such as 127.0.0.1:8080, or one of the two"
            .into()
    })
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("text").args(["tokens", "prompt"]).required(true)))]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Token ids to continue, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token)]
    pub(crate) tokens: Vec<u32>,
    /// Text to continue, - for standard input; needs the model's tokenizer.json.
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Put the prompt into the model's chat template.
    #[arg(long, requires = "prompt", conflicts_with = "tokens")]
    pub(crate) chat: bool,
    /// The chat's system message.
    #[arg(long, requires = "chat", value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// The most tokens to generate.
    #[arg(long, short = 'n', alias = "max-tokens", default_value_t = 32, value_name = "N")]
    pub(crate) max_new_tokens: usize,
    /// Token ids that end the generation, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IDS", value_parser = token)]
    pub(crate) stop: Vec<u32>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) prefill: PrefillArgs,
    /// Write the logits of every executed position: a safetensors file with `logits`, [positions, vocab] f32.
    #[arg(long, value_name = "FILE")]
    pub(crate) logits: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) stream: StreamArgs,
    /// Compare every tensor on the GPU with its file at the end.
    #[arg(long)]
    pub(crate) check_weights: bool,
    #[command(flatten)]
    pub(crate) log: CommandLogArgs,
    #[command(flatten)]
    pub(crate) guesses: GuessArgs,
}

/// Guessed tokens of `generate`, `chat` and `serve`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GuessArgs {
    /// Guess up to this many next tokens from the text so far and check them in one step, while that is faster. No token changes. Default: none.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=7))]
    pub(crate) speculate: u32,
    /// A small model of the same vocabulary that guesses where the text has nothing better to look up, while that is faster. On
    /// cuda it runs on the first GPU that the model does not use.
    #[arg(long, value_name = "DIR|ORG/NAME|PRESET", requires = "speculate")]
    pub(crate) draft: Option<String>,
}

/// Guessed tokens of `bench`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct WindowArgs {
    /// Time the tokens of one sequence where each step checks up to this many guesses of the next tokens, and plain steps for comparison.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=7), conflicts_with_all = ["bundle", "peers", "gguf", "prefill", "sequences", "manifest", "phase"])]
    pub(crate) speculate: Option<u32>,
    /// With --speculate: guesses are the true tokens, and wrong with the probability 1 - A, instead of looked up in the text.
    #[arg(long, value_name = "A", requires = "speculate", value_parser = probability)]
    pub(crate) acceptance: Option<f64>,
    /// With --speculate: a small model of the same vocabulary guesses where the text has nothing to look up, on cuda on the first
    /// GPU that the model does not use. With --acceptance it takes its time, and the guesses are those of --acceptance.
    #[arg(long, value_name = "DIR|ORG/NAME|PRESET", requires = "speculate")]
    pub(crate) draft: Option<String>,
}

/// A log of the commands of `generate` and `serve`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CommandLogArgs {
    /// Log every command and its answer to a new file, in JSON lines; `amk replay` runs them again.
    #[arg(long, value_name = "FILE", conflicts_with = "speculate")]
    pub(crate) command_log: Option<PathBuf>,
    /// The most MiB of that file. What comes later is counted, and not written.
    #[arg(long, default_value_t = 64, value_name = "MIB", requires = "command_log", value_parser = clap::value_parser!(u32).range(1..=4000))]
    pub(crate) command_log_limit: u32,
}

impl CommandLogArgs {
    /// Begins the log, if there is to be one.
    pub(crate) fn begin(&self, head: impl FnOnce() -> Head) -> Result<Option<CommandLog>, Failure> {
        let most = u64::from(self.command_log_limit) << 20;
        self.command_log.as_ref().map(|path| CommandLog::create(path, &head(), most)).transpose()
    }
}

#[derive(Debug, Args)]
pub(crate) struct ReplayLogArgs {
    /// The log.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// What runs the commands. Default: the device of the log.
    #[arg(long, value_enum)]
    pub(crate) device: Option<DeviceChoice>,
    /// The model, if it is elsewhere now. Default: the name in the log.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET")]
    pub(crate) model: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// The system message.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// The most tokens of an answer.
    #[arg(long, short = 'n', alias = "max-tokens", default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..).map(|n| n as usize))]
    pub(crate) max_new_tokens: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) prefill: PrefillArgs,
    #[command(flatten)]
    pub(crate) guesses: GuessArgs,
}

/// Whether and how weights are loaded while the kernel is already resident.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// Launch the kernel before the weights are loaded. Of `generate`, each layer runs as soon as its weights have arrived;
    /// a server takes requests at once, which wait for the weights (`wait_io`).
    #[arg(long)]
    pub(crate) stream_weights: bool,
    /// How streamed weights are read.
    #[arg(long, value_enum, default_value = "auto", requires = "stream_weights")]
    pub(crate) read_weights_by: ReadByChoice,
    /// Seconds without a byte after which streaming fails.
    #[arg(long, default_value_t = 10, value_name = "SECONDS", requires = "stream_weights")]
    pub(crate) weights_deadline: u64,
}

impl StreamArgs {
    /// How weights are streamed, if they are.
    pub(crate) fn streaming(&self) -> Option<Streaming> {
        let read_by = match self.read_weights_by {
            ReadByChoice::Auto => ReadBy::Auto,
            ReadByChoice::IoUring => ReadBy::IoUring,
            ReadByChoice::Pread => ReadBy::Pread,
        };
        let limit = Duration::from_secs(self.weights_deadline.max(1));
        self.stream_weights.then_some(Streaming { read_by, limit })
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// The address to listen on: IP:PORT, or one of the two; port 0 takes a free one. There is no TLS: for anything but
    /// loopback put a proxy in front.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT", value_parser = address)]
    pub(crate) addr: SocketAddr,
    /// The IP of --addr alone.
    #[arg(long, value_name = "IP", conflicts_with = "addr", value_parser = host)]
    pub(crate) host: Option<IpAddr>,
    /// The port of --addr alone.
    #[arg(long, value_name = "PORT", conflicts_with = "addr")]
    pub(crate) port: Option<u16>,
    /// A name of the model for requests; may be repeated. The first is that of answers and metrics. Default: the model's own.
    #[arg(long, alias = "alias", value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) served_model_name: Vec<String>,
    /// Refuse requests without this key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; /health and /ready need
    /// none. Default: that of AMK_API_KEY, which other users of the machine cannot see.
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// A JSON file of tenants with API keys of their own: `{"tenants": [{"name", "key", "share", "requests",
    /// "tokens_per_minute", "service_tier"}]}`; name and key must be there. Those whose requests wait get places by
    /// their shares.
    #[arg(long, value_name = "FILE")]
    pub(crate) tenants: Option<PathBuf>,
    /// An origin whose pages may use the server, as SCHEME://HOST[:PORT]; may be repeated. `*` is any: use it with a key.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors: Vec<String>,
    /// Sequences that decode at the same time, each with its own key/value cache. Default: 8.
    #[arg(long, value_name = "N")]
    pub(crate) sessions: Option<usize>,
    /// Capacity in tokens of all key/value caches on the device together, in pages of 128: a request waits until its
    /// prompt and its new tokens fit. Default: --sessions times --kv-capacity if that fits into the device's memory,
    /// else what fits.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) kv_pool: Option<u64>,
    /// The same tokens for a request with a seed, alone or under load: one kernel (docs/reference/http-api.md,
    /// system_fingerprint), and no shared pages of the cache.
    #[arg(long)]
    pub(crate) deterministic: bool,
    /// Do not share pages of the cache among requests whose prompts begin with the same tokens.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// The most requests in the server, waiting ones included; others are refused with 429.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096).map(usize::from))]
    pub(crate) queue: usize,
    /// The address of the Prometheus endpoint, /metrics; port 0 takes a free one. It is a listener of its own without authentication.
    #[arg(long, value_name = "IP:PORT", value_parser = address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// A file for the same text, rewritten atomically at an interval.
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics_file: Option<PathBuf>,
    /// Seconds between two writes of that file.
    #[arg(long, default_value_t = 5, value_name = "SECONDS", requires = "metrics_file", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) metrics_every: u32,
    #[command(flatten)]
    pub(crate) prefill: PrefillArgs,
    #[command(flatten)]
    pub(crate) stream: StreamArgs,
    /// Sequences that one command decodes at once on cuda, sharing a pass over the weights: 1, 2, 4 or 8. Default: 8
    /// on one GPU with weights of 16 bits, but no more than --sessions; while there is one sequence alone, the kernel for one runs, which is
    /// faster with one. With a number, its kernel always runs.
    #[arg(long = "batch", value_name = "N", value_parser = gpu::width)]
    pub(crate) seqs: Option<u32>,
    #[command(flatten)]
    pub(crate) log: CommandLogArgs,
    #[command(flatten)]
    pub(crate) guesses: GuessArgs,
    #[command(flatten)]
    pub(crate) tune: TuneArgs,
}

impl ServeArgs {
    /// The address to listen on.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(self.addr.ip()), self.port.unwrap_or(self.addr.port()))
    }
}

/// A search of a server between its requests. Its terms are those of `amk loop`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuneArgs {
    /// Search for a faster schedule while no request is in the server, and switch to what the search keeps: of one
    /// sequence, or with --batch of as many.
    #[arg(long)]
    pub(crate) tune: bool,
    /// End the search when the kept trials save this percentage of the first schedule's time.
    #[arg(long, value_name = "PERCENT", requires = "tune", value_parser = percent)]
    pub(crate) goal: Option<f64>,
    /// End the search when the time is within this percentage of its bound, bytes or hand-offs.
    #[arg(long, value_name = "PERCENT", requires = "tune", value_parser = percent)]
    pub(crate) stop_within: Option<f64>,
    /// When to end it: a number of trials (64) or a time (90s, 10m, 2h). Default: 64.
    #[arg(long, value_name = "TRIALS|TIME", requires = "tune")]
    pub(crate) budget: Option<Budget>,
    /// Where its ledger, table and best schedule go. Default: a new folder in runs/.
    #[arg(long, value_name = "DIR", requires = "tune")]
    pub(crate) out: Option<PathBuf>,
    /// For tests: try a slow schedule first, then one whose gate before a switch fails.
    #[arg(long, hide = true, requires = "tune")]
    pub(crate) tune_plant: bool,
}

/// What the search of a server begins with.
#[derive(Clone, Debug)]
pub(crate) struct TuneStart {
    /// The schedule that serves.
    pub(crate) config: ScheduleConfig,
    /// Schedules to try first, for tests.
    pub(crate) planted: Vec<ScheduleConfig>,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The process to show. Default: the one that started last.
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Take two samples, a moment apart, print one document and end.
    #[arg(long)]
    pub(crate) once: bool,
    /// Print JSON: with --once one document, else one per look, on a line each, until the process ends.
    #[arg(long)]
    pub(crate) json: bool,
    /// Milliseconds between two samples.
    #[arg(long, default_value_t = 500, value_name = "MS", value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) every: u64,
}

/// A number from 0 to 1.
pub(super) fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| format!("{text} is no number from 0 to 1"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches as _;

    fn listens_at(arguments: &str) -> String {
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        let given = format!("serve -m toy {arguments}");
        match command.try_get_matches_from(given.split_whitespace()) {
            Ok(found) => ServeArgs::from_arg_matches(&found).unwrap().address().to_string(),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        }
    }

    #[test]
    fn a_server_takes_its_address_as_other_servers_do() {
        for (given, address) in [
            ("", "127.0.0.1:8080"),
            ("--addr 0.0.0.0:80", "0.0.0.0:80"),
            ("--addr localhost:9000", "127.0.0.1:9000"),
            ("--addr 9000", "127.0.0.1:9000"),
            ("--addr 0.0.0.0", "0.0.0.0:8080"),
            ("--addr ::1", "[::1]:8080"),
            ("--addr [::1]:9000", "[::1]:9000"),
            ("--host 0.0.0.0 --port 8000", "0.0.0.0:8000"),
            ("--port 0", "127.0.0.1:0"),
        ] {
            assert_eq!(listens_at(given), address, "{given}");
        }
        for (given, word) in [
            ("--addr 127.0.0.1:99999", "such as 127.0.0.1:8080"),
            ("--addr here:80", "such as 127.0.0.1:8080"),
            ("--host example.com", "0.0.0.0 for all"),
            ("--port 1 --addr 2", "cannot be used with"),
        ] {
            let said = listens_at(given);
            assert!(said.contains(word), "{given}: {said}");
        }
    }

    #[test]
    fn a_wrong_token_id_is_answered_with_right_ones() {
        assert_eq!(token(" 7"), Ok(7));
        assert!(token("1 2").unwrap_err().contains("1,2,3"));
    }
}
