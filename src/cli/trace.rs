//! Arguments of the commands that take a step apart.

use std::path::PathBuf;

use clap::Args;

use super::{ConfigArgs, ConfigSource, ModelArgs, PlaceArgs, ScheduleChoice, SharingArgs};

#[derive(Debug, Default, Args)]
pub(crate) struct TraceArgs {
    /// The model to trace a step of: a Hugging Face folder, a GGUF file, a model of the Hugging Face Hub (ORG/NAME), or a preset.
    #[arg(long, short, value_name = "DIR|ORG/NAME|PRESET", required_unless_present = "pid")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) live: LiveArgs,
    /// Schedules (JSON files) to time and to trace, one after the other. Default: see --schedule.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Vec<ConfigSource>,
    /// The schedule if no config is given: auto (the shipped one, else default), found, shipped, default (rule-based) or neutral.
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        conflicts_with = "config",
        hide_possible_values = true
    )]
    pub(crate) schedule: Option<ScheduleChoice>,
    /// Write one step of the last schedule as trace events in JSON, for ui.perfetto.dev: one track per worker, arrows
    /// from producers, counters.
    #[arg(long, value_name = "FILE", alias = "chrome")]
    pub(crate) perfetto: Option<PathBuf>,
    /// Write a text digest of at most 6 KB: time by op and layer, the longest waits and their producers, bubbles.
    #[arg(long, value_name = "FILE")]
    pub(crate) digest: Option<PathBuf>,
    /// The digest as a field of the answer, for the tool of `amk mcp`.
    #[arg(skip)]
    pub(crate) digest_in_answer: bool,
    /// Write the recorded steps of the last schedule against the predicted one as JSON: parts that take longer than
    /// expected and repeat, what the difference of the span is due to, each part by op, layer and worker.
    #[arg(long, value_name = "FILE")]
    pub(crate) residuals: Option<PathBuf>,
    /// Write one step of the last schedule as a page of HTML: bounds, causes, what-ifs, a timeline, residuals.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Replay the recorded step with an edit: hop=FACTOR, stream=FACTOR, op.NAME=FACTOR, balance=perfect, several with
    /// commas. May be given several times.
    #[arg(long, value_name = "EDITS")]
    pub(crate) what_if: Vec<String>,
    /// Slow a step for a known reason and see whether it is found: OP[.CAUSE][@wWORKER][@lLAYER]=+TIMEus,
    /// in_flight=STAGES (predicted steps only) or nothing. May be given several times.
    #[arg(long, value_name = "CAUSE")]
    pub(crate) plant: Vec<trace::Plant>,
    /// The same with N seeded causes, and N times with nothing.
    #[arg(long, default_value_t = 0, value_name = "N", hide_default_value = true)]
    pub(crate) plants: u64,
    /// Also compile the kernel of the timed steps, and say its registers and spills. Needs NVRTC, but no GPU.
    #[arg(long)]
    pub(crate) kernel: bool,
    /// Tokens before the measured ones.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) context: u32,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "What a running amk does")]
pub(crate) struct LiveArgs {
    /// Capture what this process (serve, generate) does, in place of one step of a model; see `amk top` for its number.
    #[arg(long, value_name = "PID", conflicts_with_all = ["model", "config", "schedule", "residuals", "html", "what_if", "plant", "plants", "kernel", "context"])]
    pub(crate) pid: Option<u32>,
    /// Seconds to capture.
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", requires = "pid", conflicts_with = "model", value_parser = seconds)]
    pub(crate) seconds: f64,
    /// End after this many events.
    #[arg(long, default_value_t = 100_000, value_name = "N", requires = "pid", conflicts_with = "model", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_events: u32,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|s| (0.01..=3600.0).contains(s));
    seconds.ok_or_else(|| format!("{text:?} is no time: 0.01 to 3600 seconds"))
}

#[derive(Debug, Args)]
pub(crate) struct LeversArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Tokens before the step.
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) context: u32,
    /// A store of searches: what each move brought there.
    #[arg(long, value_name = "FILE", conflicts_with = "try_move")]
    pub(crate) store: Option<PathBuf>,
    /// Measure N random moves of one knob, each between two measurements of the schedule: how good predictions are here.
    #[arg(
        long,
        default_value_t = 0,
        value_name = "N",
        hide_default_value = true,
        conflicts_with = "try_move"
    )]
    pub(crate) check: u64,
    /// Past checks, beside those that come with amk; --check adds to them.
    #[arg(long, value_name = "FILE")]
    pub(crate) checks: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
    /// Make one move and trace the step before and after.
    #[arg(long = "try", value_name = "KNOB=VALUE")]
    pub(crate) try_move: Option<String>,
}
