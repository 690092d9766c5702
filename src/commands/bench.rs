//! `amk bench`: time and accuracy of one row: a step of one sequence, a step of a batch, or a prompt in chunks. Every
//! kind of row gives the same samples, conditions and document.

use std::time::Duration;

use ir::schedule::ScheduleConfig;
use reference_vm::accuracy::Accuracy;
use search::{BUNDLE_SCHEMA, Bundle, DeviceInfo, LatencyKind, Samples, Side, Timing, Verdict};
use serde_json::{Map, Value, json};

use crate::cli::{BenchArgs, DeviceChoice, PeerChoice};
use crate::context::Context;
use crate::csv::{Column, Csv};
use crate::device::Gpu;
use crate::device::probe::live_target;
use crate::failure::{Exit, Failure, Outcome};
use crate::peers::{self, Peer};
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::{conditions, files, report};

mod batch;
mod decode;
mod manifest;
mod phase;
mod prompt;
#[cfg(feature = "full")]
mod server;
mod speculate;

/// Tokens of each sequence that one block times.
const TIMED_TOKENS: u32 = 32;

/// Untimed blocks before the first round.
const WARMUP: usize = 4;

/// The columns of `--csv`.
const COLUMNS: [Column; 28] = [
    ("model", "/model"),
    ("dtype", "/dtype"),
    ("target", "/target"),
    ("device", "/device"),
    ("context", "/context"),
    ("kv_capacity", "/kv_capacity"),
    ("batch", "/batch"),
    ("prompt", "/prompt"),
    ("seed", "/seed"),
    ("us", "/us"),
    ("us_per_token", "/us_per_token"),
    ("latency_kind", "/latency_kind"),
    ("ci_low_us", "/ci_us/0"),
    ("ci_high_us", "/ci_us/1"),
    ("noise", "/noise"),
    ("bound_us", "/bound_us"),
    ("pct_of_roofline", "/pct_of_roofline"),
    ("bytes", "/bytes"),
    ("bandwidth_measured", "/bandwidth_measured"),
    ("correct", "/correct"),
    ("rejected_reason", "/rejected_reason"),
    ("schedule_source", "/schedule_source/kind"),
    ("schedule_id", "/schedule_id"),
    ("program_id", "/program_id"),
    ("kernel_id", "/kernel_id"),
    ("card", "/conditions/card"),
    ("driver", "/conditions/driver"),
    ("amk", "/conditions/amk"),
];

/// What a pass over the weights computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// A step of one sequence.
    Decode,
    /// A step of this many sequences.
    Batch(u32),
    /// A prompt of this many tokens, in chunks.
    Prompt(u32),
    /// Windows with this many guesses.
    Windows(u32),
}

impl Work {
    /// Tokens of a pass.
    fn tokens(self) -> u32 {
        match self {
            Self::Decode | Self::Windows(_) => 1,
            Self::Batch(tokens) | Self::Prompt(tokens) => tokens,
        }
    }

    /// What is timed, in words.
    fn name(self) -> &'static str {
        match self {
            Self::Prompt(_) => "prompt",
            Self::Windows(_) => "token",
            Self::Decode | Self::Batch(_) => "step",
        }
    }
}

/// What to measure.
struct Row<'a> {
    args: &'a BenchArgs,
    work: Work,
    context: Context,
    chosen: Chosen,
}

/// What measuring a row gave.
struct Measured {
    /// Latency, interval and bound are those of a pass.
    verdict: Verdict,
    /// The schedule that was measured.
    config: ScheduleConfig,
    accuracy: Option<Accuracy>,
    samples: Samples,
    /// Bytes that a pass reads.
    bytes: Option<u64>,
    /// The device; `None` for a prediction.
    info: Option<DeviceInfo>,
    /// Fields of the document that only this kind of row has.
    fields: Map<String, Value>,
    /// Lines for people about the same.
    lines: Vec<(&'static str, String)>,
}

pub(crate) fn run(args: &BenchArgs) -> Outcome {
    #[cfg(feature = "full")]
    if let Some(url) = &args.load.url {
        return server::run(args, url);
    }
    #[cfg(not(feature = "full"))]
    if args.load.url.is_some() {
        let what = "this build of amk has no `bench --serve`; build it with its default features";
        return Err(Failure::missing(what.to_owned()));
    }
    if args.manifest.is_some() || args.bundle.is_some() {
        args.place.kv.only_f16("a bundle")?;
    }
    if let Some(path) = &args.manifest {
        return manifest::run(args, path);
    }
    if let Some(phase) = &args.phase {
        return phase::run(args, phase);
    }
    let csv = args.csv.as_deref().map(|path| Csv::open(path, &COLUMNS)).transpose()?;
    let row = Row::new(args)?;
    // Before the device is opened: nothing shares the GPU with a measurement.
    let peers = row.peers();
    let measured = match row.work {
        Work::Decode => decode::measure(&row)?,
        Work::Batch(sequences) => batch::measure(&row, sequences)?,
        Work::Prompt(tokens) => prompt::measure(&row, tokens)?,
        Work::Windows(guesses) => speculate::measure(&row, guesses)?,
    };
    row.say(&measured, &peers);
    let holds = measured.verdict.correct && measured.verdict.rejected_reason.is_none();
    if let (Some(path), true) = (&args.bundle, holds) {
        let missing = || Failure::refused("the run left out a figure that a bundle needs");
        let bundle = row.bundle(&measured).ok_or_else(missing)?;
        files::write_whole(path, bundle.to_text().as_bytes())?;
        report::say(&format!("bundle: {}", path.display()));
    }
    let document = row.document(&measured, &peers);
    if let Some(csv) = csv {
        csv.append(&document)?;
    }
    // With its own hash, so that a page may take numbers from it.
    report::document(&corpus::seal(document.as_object().unwrap_or(&Map::new())))?;
    Ok(if holds { Exit::Yes } else { Exit::No })
}

impl<'a> Row<'a> {
    /// Loads the model and chooses the schedule; refuses what cannot be timed before any device is opened.
    fn new(args: &'a BenchArgs) -> Result<Self, Failure> {
        let work = match (args.sequences, args.prefill, args.windows.speculate) {
            (Some(sequences), _, _) => Work::Batch(sequences),
            (None, Some(tokens), _) => Work::Prompt(tokens),
            (None, None, Some(guesses)) => Work::Windows(guesses),
            (None, None, None) => Work::Decode,
        };
        // The last token of a batch's prompt is its first timed input.
        let timed = match work {
            Work::Decode => TIMED_TOKENS,
            Work::Batch(_) | Work::Prompt(_) => TIMED_TOKENS + 1,
            Work::Windows(guesses) => speculate::TOKENS + guesses + 2,
        };
        let (room, tokens) = match work {
            Work::Prompt(tokens) => (tokens, tokens),
            Work::Decode | Work::Batch(_) | Work::Windows(_) => {
                (args.context.saturating_add(timed), args.context)
            }
        };
        let model = args.model.as_deref().unwrap_or_default();
        let context = Context::with_room(model, &args.place, room)?;
        let (graph, most) = (context.graph(), context.kv_capacity);
        match work {
            // A step near the end of the cache times fewer tokens.
            Work::Decode => context.check_timed(args.context, 1, most)?,
            Work::Batch(_) | Work::Windows(_) => context.check_timed(args.context, timed, most)?,
            Work::Prompt(tokens) if !(1..=most).contains(&tokens) => {
                return Err(Failure::usage(format!(
                    "--prefill {tokens} is out of range: a prompt has 1 to {most} tokens"
                )));
            }
            Work::Prompt(_) => {
                if let Some(why) = vm_host::prefill_refused(graph, context.target.devices) {
                    return Err(Failure::usage(format!("--prefill: {why}")));
                }
            }
        }
        let chosen = choose(&context, &args.config, tokens, Auto::Reproducible)?;
        if let Work::Batch(sequences) = work {
            context.check_batch(&chosen.config, sequences)?;
        }
        if let Work::Windows(guesses) = work
            && context.has_device()?
        {
            context.check_batch(&chosen.config, crate::speculate::kernel_seqs(guesses))?;
        }
        Ok(Self { args, work, context, chosen })
    }

    fn timing(&self) -> Timing {
        Timing { rounds: self.args.rounds as usize, warmup: WARMUP }
    }

    /// Opens the GPU in this process. It measures the bandwidth.
    fn open(&self) -> Result<Gpu<'_>, Failure> {
        self.context.open_here(true)?.ok_or_else(|| self.no_gpu())
    }

    fn no_gpu(&self) -> Failure {
        let flag = if let Work::Batch(_) = self.work { "--batch" } else { "--prefill" };
        Failure::no_gpu(&format!("{flag} is for what is measured"))
    }

    /// Measures other engines if the GPU is here, or if they were requested.
    fn peers(&self) -> Vec<Peer> {
        if self.work != Work::Decode {
            return Vec::new();
        }
        let args = self.args;
        let here = args.place.device != DeviceChoice::Cpu && live_target().is_some();
        let default = [if here { PeerChoice::All } else { PeerChoice::None }];
        let chosen = if args.peers.is_empty() { &default[..] } else { &args.peers };
        let ask = peers::Ask {
            graph: self.context.graph(),
            context: args.context,
            tokens: TIMED_TOKENS,
            gpus: self.context.cards.len() as u32,
            timeout: Duration::from_secs(args.peer_timeout),
            gguf: args.gguf.clone(),
        };
        peers::measure(chosen, &ask, report::say)
    }

    /// The bundle of a measured schedule; `None` if a figure is missing.
    fn bundle(&self, measured: &Measured) -> Option<Bundle> {
        let (args, context, verdict) = (self.args, &self.context, &measured.verdict);
        Some(Bundle {
            schema: BUNDLE_SCHEMA.to_owned(),
            model: context.name.clone(),
            dtype: context.graph().dtype.name().to_owned(),
            target: context.target.name.clone(),
            context: args.context,
            kv_capacity: context.kv_capacity,
            seed: args.seed,
            config: measured.config,
            schedule_id: measured.config.id(),
            program_id: verdict.program_id.clone()?,
            kernel_id: verdict.kernel_id.clone()?,
            conditions: conditions::of(measured.info.clone()?),
            gates: verdict.gates.clone(),
            accuracy: measured.accuracy?.into(),
            timed_tokens: TIMED_TOKENS.min(context.kv_capacity.checked_sub(args.context)?),
            median_us: verdict.latency_us?,
            ci_us: verdict.ci_us?,
            rounds_us: measured.samples.rounds.clone(),
            bound_us: verdict.bound_us?,
            bytes_per_token: measured.bytes?,
            bandwidth: measured.info.as_ref()?.bandwidth?,
            notes: verdict.notes.clone(),
        })
    }

    fn say(&self, measured: &Measured, peers: &[Peer]) {
        let (graph, verdict) = (self.context.graph(), &measured.verdict);
        let timed = match self.work {
            Work::Decode => format!("{} tokens, batch 1, whole step", self.args.context),
            Work::Batch(n) => format!("{} tokens, batch {n}, whole step", self.args.context),
            Work::Prompt(tokens) => format!("prompt of {tokens} tokens, logits of the last"),
            Work::Windows(n) => {
                format!("{} tokens, one sequence, up to {n} guesses per step", self.args.context)
            }
        };
        let mut rows = vec![
            ("model", format!("{} {} on {}", graph.name, floats(graph), verdict.device)),
            ("context", timed),
        ];
        if let Some(reason) = &verdict.rejected_reason {
            rows.push(("NO", reason.clone()));
        }
        rows.push(("amk", self.latency_line(verdict)));
        rows.push(("bound", self.bound_line(measured)));
        if let Some(accuracy) = measured.accuracy {
            rows.push(("accuracy", accuracy_line(&accuracy)));
        }
        rows.extend(measured.lines.iter().cloned());
        let us = verdict.latency_us.filter(|_| measured.info.is_some());
        rows.extend(peers.iter().map(|peer| (peer.name, peer_line(peer, us))));
        rows.extend(verdict.notes.iter().map(|note| ("note", note.clone())));
        report::table(&rows);
        if verdict.latency_kind == Some(LatencyKind::Predicted) {
            report::say("no GPU was used: the latency is a prediction, not a measurement");
        }
    }

    fn latency_line(&self, verdict: &Verdict) -> String {
        let kind = verdict.latency_kind.map_or("", LatencyKind::name);
        let interval = verdict.ci_us.map_or_else(String::new, |[low, high]| {
            format!(" (99 % interval {low:.1} to {high:.1})")
        });
        let rate = verdict.latency_us.map_or_else(String::new, |us| {
            format!(", {:.0} tokens/s", f64::from(self.work.tokens()) * 1e6 / us)
        });
        let us = report::maybe(verdict.latency_us, "us");
        format!("{us} per {}{interval}{rate}, {kind}", self.work.name())
    }

    fn bound_line(&self, measured: &Measured) -> String {
        let (verdict, info) = (&measured.verdict, measured.info.as_ref());
        let measured_rate = info.and_then(|info| info.bandwidth);
        let bandwidth = measured_rate.unwrap_or(self.context.target.total_bandwidth() as f64);
        let predicted = verdict.bound_us.filter(|_| info.is_none());
        let bytes = measured.bytes.map(|bytes| bytes as f64);
        let bytes = bytes.or(predicted.map(|us| us * 1e-6 * bandwidth));
        let read = bytes.map_or_else(String::new, |bytes| {
            format!(" = {:.4} GB at {:.3} TB/s", bytes / 1e9, bandwidth / 1e12)
        });
        let share = report::maybe(verdict.pct_of_roofline, "% of it reached");
        format!("{}{read}; {share}", report::maybe(verdict.bound_us, "us"))
    }

    fn document(&self, measured: &Measured, peers: &[Peer]) -> Value {
        let (context, verdict) = (&self.context, &measured.verdict);
        let prompt = if let Work::Prompt(tokens) = self.work { Some(tokens) } else { None };
        let tokens = f64::from(self.work.tokens());
        let info = measured.info.as_ref();
        let against = "f32 evaluation of the same weights";
        let against = match prompt {
            None => against,
            Some(_) if context.graph().has_experts() => {
                "f32 evaluation of the prompt's first tokens on the routes of their chunk"
            }
            Some(_) => "the same prompt token by token",
        };
        let accuracy = measured.accuracy.map(|accuracy| accuracy_document(&accuracy, against));
        let per_token = measured.bytes.filter(|_| self.work == Work::Decode);
        let noise = info.map(|_| search::noise_floor(&measured.samples, self.args.seed));
        let mut document = json!({
            "schema": "amk.bench.v1",
            "model": context.graph().name,
            "dtype": context.graph().dtype.name(),
            "target": context.target.name,
            "device": verdict.device,
            "context": self.args.context,
            "kv_capacity": context.kv_capacity,
            "seed": self.args.seed,
            "config": measured.config,
            "batch": if prompt.is_some() { 1 } else { self.work.tokens() },
            "prompt": prompt,
            "us": verdict.latency_us,
            "us_per_token": verdict.latency_us.map(|us| us / tokens),
            "latency_kind": verdict.latency_kind,
            "ci_us": verdict.ci_us,
            "samples_us": measured.samples.rounds,
            "noise": noise,
            "bound_us": verdict.bound_us,
            "pct_of_roofline": verdict.pct_of_roofline,
            "bytes": measured.bytes,
            "bytes_per_token": per_token,
            "bandwidth_measured": info.and_then(|info| info.bandwidth),
            "accuracy": accuracy,
            "correct": verdict.correct,
            "rejected_reason": verdict.rejected_reason,
            "schedule_id": verdict.schedule_id,
            "schedule_source": self.chosen.source,
            "program_id": verdict.program_id,
            "kernel_id": verdict.kernel_id,
            "conditions": info.cloned().map(conditions::of),
            "clocks": measured.samples.clocks.all,
            "peers": peers,
            "notes": verdict.notes,
        });
        if let Value::Object(fields) = &mut document {
            fields.extend(measured.fields.clone());
        }
        document
    }
}

impl Measured {
    fn new(verdict: Verdict, config: ScheduleConfig, info: Option<DeviceInfo>) -> Self {
        Self {
            verdict,
            config,
            accuracy: None,
            samples: Samples::default(),
            bytes: None,
            info,
            fields: Map::new(),
            lines: Vec::new(),
        }
    }

    /// Sets the accuracy. If it is out of bounds, the verdict says so.
    fn set_accuracy(&mut self, accuracy: Option<Accuracy>) {
        self.accuracy = accuracy;
        if let Some(accuracy) = accuracy.filter(|accuracy| !accuracy.holds()) {
            self.refuse(format!(
                "accuracy is out of bounds: relative error at most {:.0e}, divergence at most {:.0e} nats, every decided top-1 equal",
                accuracy.rel_max, accuracy.kl_max
            ));
        }
    }

    fn refuse(&mut self, reason: String) {
        self.verdict.correct = false;
        self.verdict.rejected_reason.get_or_insert(reason);
    }

    /// Sets the samples of passes that were compared by their accuracy, and what follows from them.
    fn set_samples(&mut self, samples: Samples, bound_us: f64, seed: u64) {
        let (verdict, values) = (&mut self.verdict, samples.of(Side::Candidate));
        let (us, interval) = (search::median(&values), search::median_interval(&values, seed));
        verdict.latency_us = Some(us);
        verdict.latency_kind = Some(LatencyKind::MeasuredGpu);
        verdict.ci_us = Some([interval.low, interval.high]);
        verdict.bound_us = Some(bound_us);
        verdict.pct_of_roofline = Some(100.0 * bound_us / us);
        verdict.notes.extend(samples.clocks.notes());
        self.set_noise(samples, seed);
    }

    fn set_noise(&mut self, samples: Samples, seed: u64) {
        let noise = search::noise_floor(&samples, seed);
        self.verdict.notes.push(format!("noise floor {:.2} %", 100.0 * noise));
        self.samples = samples;
    }
}

/// Times rounds of four blocks, as a search times a program against itself. The clocks are read before and after.
pub(super) fn rounds<E>(
    timing: Timing,
    uuid: Option<&str>,
    mut block: impl FnMut() -> Result<f64, E>,
) -> Result<Samples, E> {
    let clocks = || uuid.and_then(crate::device::clocks);
    for _ in 0..timing.warmup {
        block()?;
    }
    let mut samples = Samples::default();
    samples.clocks.all.extend(clocks());
    for _ in 0..timing.rounds {
        samples.rounds.push([block()?, block()?, block()?, block()?]);
    }
    samples.clocks.all.extend(clocks());
    Ok(samples)
}

/// The type that a model is multiplied in, and of floats that are stored in another, that.
fn floats(graph: &ir::Graph) -> String {
    let (stored, multiplied) = (graph.tensor(graph.embed).dtype, graph.dtype);
    if graph.codes().is_some() || stored == multiplied {
        return multiplied.name().to_owned();
    }
    format!("{} as {}", stored.name(), multiplied.name())
}

fn accuracy_line(accuracy: &Accuracy) -> String {
    format!(
        "relative error {:.1e} worst, {:.1e} mean; top-1 equal at {} of {} decided; KL {:.1e} nats; {} positions against f32: {}",
        accuracy.rel_worst,
        accuracy.rel_mean,
        accuracy.decided_equal,
        accuracy.decided,
        accuracy.kl_mean,
        accuracy.positions,
        if accuracy.holds() { "within bounds" } else { "OUT OF BOUNDS" }
    )
}

fn accuracy_document(accuracy: &Accuracy, against: &str) -> Value {
    json!({
        "against": against,
        "positions": accuracy.positions,
        "rel_err_worst": accuracy.rel_worst,
        "rel_err_mean": accuracy.rel_mean,
        "rel_err_max_allowed": accuracy.rel_max,
        "top1_decided": accuracy.decided,
        "top1_equal": accuracy.decided_equal,
        "kl_mean": accuracy.kl_mean,
        "kl_max_allowed": accuracy.kl_max,
        "within_bounds": accuracy.holds(),
    })
}

fn peer_line(peer: &Peer, amk_us: Option<f64>) -> String {
    let (Some(us), Some([low, high])) = (peer.us_per_token, peer.interval) else {
        return format!("absent: {}", peer.absent.as_deref().unwrap_or("no reason is known"));
    };
    let ratio = amk_us.map_or_else(String::new, |amk| format!(", {:.2} x amk", us / amk));
    let version = peer.version.as_deref().unwrap_or_default();
    format!(
        "{us:.1} us per token ({low:.1} to {high:.1}){ratio}; {version}; {}",
        peer.conditions.join("; ")
    )
}

#[cfg(test)]
mod tests;
