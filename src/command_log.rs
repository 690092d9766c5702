//! The command log: every command of an engine with its answer, a line of JSON each, behind a head that says what ran
//! them. `amk replay` runs them again.
//!
//! **Promises.** The engine never waits for the file. The file is a beginning of what happened: after the first line that
//! did not fit nothing more is written, and what is missing is counted.

use std::path::Path;

use ir::KvDtype;
use ir::program::Program;
use ir::sampling::Sampling;
use ir::schedule::ScheduleConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::context::Context;
use crate::failure::Failure;
use crate::files;

mod logged;
mod writer;

pub(crate) use logged::Logged;
pub(crate) use writer::{CommandLog, Ended};

pub(crate) const SCHEMA: &str = "amk.command_log.v1";

/// The longest log that is read.
const BYTES_MAX: u64 = 4 << 30;

/// The first line: what ran the commands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) schema: String,
    pub(crate) amk: String,
    /// generate or serve.
    pub(crate) command: String,
    /// The model as it was named, and the id of its graph.
    pub(crate) model: String,
    pub(crate) graph_id: String,
    /// eval, cpu or cuda.
    pub(crate) device: String,
    pub(crate) target: String,
    /// The GPU's name.
    pub(crate) card: Option<String>,
    pub(crate) kv_capacity: u32,
    /// Element type of the caches; logs of earlier versions are of 16 bits.
    #[serde(default, skip_serializing_if = "is_f16")]
    pub(crate) kv_dtype: KvDtype,
    /// Tokens of all caches on a GPU together; null for what fits.
    pub(crate) kv_pool: Option<u64>,
    /// Sequences at the same time.
    pub(crate) places: usize,
    /// Whether sequences with equal beginnings share pages.
    pub(crate) shares: bool,
    /// How a GPU runs prompts.
    pub(crate) prefill: String,
    /// The kernels by their index; the graph runs without one.
    pub(crate) kernels: Vec<Kernel>,
    /// Nanoseconds since 1970.
    pub(crate) began_ns: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_f16(dtype: &KvDtype) -> bool {
    *dtype == KvDtype::F16
}

/// A schedule and what it became.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    /// Sequences of a command.
    pub(crate) seqs: u32,
    pub(crate) program_id: String,
    /// The build, on a GPU.
    pub(crate) kernel_id: Option<String>,
    pub(crate) config: Value,
}

impl Kernel {
    pub(crate) fn new(
        context: &Context,
        (program, config): (&Program, &ScheduleConfig),
        seqs: u32,
        on_gpu: bool,
    ) -> Self {
        Self {
            seqs,
            program_id: program.id(),
            kernel_id: on_gpu.then(|| context.kernel_id_of(&config.kernel, seqs)),
            config: serde_json::to_value(config).unwrap_or_default(),
        }
    }
}

impl Head {
    /// Of a model on a device, which is named here as it was opened.
    pub(crate) fn new(context: &Context, command: &str, device: &str) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            amk: env!("AMK_VERSION").to_owned(),
            command: command.to_owned(),
            model: context.name.clone(),
            graph_id: context.graph().id(),
            device: device.to_owned(),
            target: context.target.name.clone(),
            card: if device == "cuda" { context.card() } else { None },
            kv_capacity: context.kv_capacity,
            kv_dtype: context.graph().kv_dtype,
            kv_pool: None,
            places: 1,
            shares: false,
            prefill: "auto".to_owned(),
            kernels: Vec::new(),
            began_ns: telemetry::now_ns(),
        }
    }
}

/// A line after the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    /// The number of the line's entry, from 1.
    pub(crate) n: u64,
    /// When it began, in nanoseconds since 1970, and how long it took.
    pub(crate) at_ns: u64,
    pub(crate) took_ns: u64,
    #[serde(flatten)]
    pub(crate) entry: Entry,
}

/// A command with its answer. Sessions have numbers from 1, places are reused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Entry {
    /// A session begins; the answer is the number of positions that it got from others.
    Begin { session: u64, place: usize, positions: u64, prompt: Vec<u32>, said: Said<usize> },
    /// A session took over what others have run of its prompt, up to a position.
    Reuse { session: u64, place: usize, position: usize, to: usize },
    /// How the machine samples; the answer is whether it does.
    Sampling { session: u64, place: usize, sampling: Settings, stop: Vec<u32>, said: Said<bool> },
    /// Tokens from a position on; the answer is the last row of logits, if it is read.
    Feed {
        session: u64,
        place: usize,
        position: usize,
        tokens: Vec<u32>,
        read: bool,
        said: Said<Option<Row>>,
    },
    /// The same with all rows.
    Rows { session: u64, place: usize, position: usize, tokens: Vec<u32>, said: Said<Vec<Row>> },
    /// Tokens, after which the machine samples up to `generate`.
    Advance {
        session: u64,
        place: usize,
        position: usize,
        kernel: usize,
        tokens: Vec<u32>,
        generate: u32,
        said: Said<Done>,
    },
    /// The same for a batch, a token each.
    Together { seqs: Vec<Seq>, kernel: usize, generate: u32, said: Said<Vec<Said<Done>>> },
    /// The host sampled a token from the last row, for a position. The settings are there if nothing else rules, and only
    /// with the first token of a session.
    Token { session: u64, place: usize, position: usize, token: u32, sampling: Option<Settings> },
    /// The session left its place.
    End { session: u64, place: usize },
    /// The words that the host put into the ring.
    Submission { sequence: u32, command: String, words: Vec<u32> },
    /// The words of the answer there.
    Completion { sequence: u32, words: Vec<u32> },
    /// The last line: the number of entries after the limit, which are not in the file.
    Closed { dropped: u64 },
}

/// A sequence of a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Seq {
    pub(crate) session: u64,
    pub(crate) place: usize,
    pub(crate) position: usize,
    pub(crate) token: u32,
    /// The tokens of its prompt that follow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) prompt: Vec<u32>,
}

impl Seq {
    /// The tokens that it was given.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        std::iter::once(self.token).chain(self.prompt.iter().copied()).collect()
    }
}

/// The answer of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said<T> {
    Ok(T),
    Error(String),
}

/// A row of logits: a hash of its bits, and its highest token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) bits: String,
    pub(crate) best: Option<u32>,
}

impl Row {
    pub(crate) fn of(logits: &[f32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for piece in logits.chunks(1024) {
            let bytes: Vec<u8> = piece.iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
        let bits = hasher.finalize().to_hex()[..16].to_owned();
        Self { bits, best: Sampling::default().choose(logits, &ir::sampling::Seen::default(), 0) }
    }
}

/// Tokens that the machine sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) tokens: Vec<u32>,
    /// Positions that were run.
    pub(crate) ran: usize,
    pub(crate) stopped: bool,
}

/// [`Sampling`], as JSON has it: a bias without a number bans its token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    bias: Vec<(u32, Option<f32>)>,
    seed: u64,
}

impl From<&Sampling> for Settings {
    fn from(of: &Sampling) -> Self {
        let number = |(&token, &bias): (&u32, &f32)| (token, Some(bias).filter(|b| b.is_finite()));
        Self {
            temperature: of.temperature,
            top_k: of.top_k,
            top_p: of.top_p,
            min_p: of.min_p,
            repetition_penalty: of.repetition_penalty,
            bias: of.bias.iter().map(number).collect(),
            seed: of.seed,
        }
    }
}

impl From<Settings> for Sampling {
    fn from(of: Settings) -> Self {
        let banned = |(token, bias): (u32, Option<f32>)| (token, bias.unwrap_or(f32::NEG_INFINITY));
        Self {
            temperature: of.temperature,
            top_k: of.top_k,
            top_p: of.top_p,
            min_p: of.min_p,
            repetition_penalty: of.repetition_penalty,
            bias: of.bias.into_iter().map(banned).collect(),
            seed: of.seed,
        }
    }
}

/// A log that was read.
pub(crate) struct Recorded {
    pub(crate) head: Head,
    pub(crate) lines: Vec<Line>,
    /// Why the log has no end, if it has none.
    pub(crate) cut: Option<String>,
    /// Entries that were not written.
    pub(crate) dropped: u64,
}

impl Recorded {
    /// Reads a log; one that was cut off up to the cut.
    ///
    /// # Errors
    /// If it cannot be read, is no log, or a line before the last is damaged or missing.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let text = files::read_text(path, BYTES_MAX)?;
        let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let head = serde_json::from_str::<Head>(first).ok().filter(|head| head.schema == SCHEMA);
        let head = head.ok_or_else(|| {
            let name = path.display();
            Failure::usage(format!("{name} is no command log: its first line is no {SCHEMA}"))
        })?;
        let mut found = Self { head, lines: Vec::new(), cut: None, dropped: 0 };
        let mut closed = false;
        let mut pieces = rest.split_inclusive('\n').zip(2..).peekable();
        while let Some((piece, number)) = pieces.next() {
            let place = format!("{}: line {number}", path.display());
            let line: Line = match serde_json::from_str(piece.trim_end()) {
                Ok(line) => line,
                Err(_) if pieces.peek().is_none() && !piece.ends_with('\n') => {
                    found.cut = Some(format!("line {number} is incomplete"));
                    return Ok(found);
                }
                Err(error) => return Err(Failure::integrity(format!("{place}: {error}"))),
            };
            let expected = found.lines.len() as u64 + 1;
            if closed || line.n != expected {
                let n = line.n;
                let why = format!("{place}: entry {n} stands where entry {expected} should be");
                return Err(Failure::integrity(why));
            }
            if let Entry::Closed { dropped } = line.entry {
                (closed, found.dropped) = (true, dropped);
            } else {
                found.lines.push(line);
            }
        }
        found.cut = (!closed).then(|| "it has no last entry: its process was killed".to_owned());
        Ok(found)
    }
}

#[cfg(test)]
#[path = "command_log_tests.rs"]
mod tests;
