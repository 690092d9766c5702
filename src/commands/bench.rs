//! `amk bench`: µs per token and accuracy, compared with the other engines that run here.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ir::schedule::ScheduleConfig;
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use search::{
    BUNDLE_SCHEMA, Bundle, Conditions, Contender, Device, Gate, Handle, LatencyKind, POSITIONS_MAX,
    Plan, Ran, Rejection, Samples, Side, Timing, Verdict, assess, draw_tokens,
};
use serde_json::{Map, Value, json};

use crate::cli::{BenchArgs, DeviceChoice, PeerChoice};
use crate::context::Context;
use crate::device::probe::live_target;
use crate::failure::{Exit, Failure, Outcome};
use crate::peers::{self, Peer};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose};
use crate::spinner::Spinner;
use crate::{conditions, files, report};

pub(super) mod blocks;

/// Tokens that one block times.
const TIMED_TOKENS: u32 = 32;

/// At most this many positions are all compared; beyond that: the first ones, some between, and the last before and among the timed ones.
const COMPARE_ALL: usize = 192;
const COMPARE_FIRST: usize = 16;
const COMPARE_BETWEEN: usize = 16;
const COMPARE_LAST: usize = 64;

/// Positions whose logits are read from the device at once.
const PIECE: usize = 128;

/// Rounds and warm-up of the timing.
const TIMING: Timing = Timing { rounds: 24, warmup: 4 };

/// The tokens of a bench and the graph's logits at the compared positions.
struct Passage {
    tokens: Vec<u32>,
    /// First timed position.
    context: usize,
    positions: Vec<usize>,
    expected: Vec<Vec<f32>>,
    seed: u64,
}

#[derive(Default)]
struct Shown {
    accuracy: Option<Accuracy>,
    /// Bytes that a step reads at the timed positions.
    bytes: Option<u64>,
    /// Bytes per second of the device, measured.
    bandwidth: Option<f64>,
    rounds_us: Vec<[f64; 4]>,
}

pub(crate) fn run(args: &BenchArgs) -> Outcome {
    if let Some(tokens) = args.prefill {
        return super::prefill::run(args, tokens);
    }
    if let Some(sequences) = args.sequences {
        return super::together::run(args, sequences);
    }
    let context = Context::with_room(&args.model, args.context.saturating_add(TIMED_TOKENS))?;
    let Chosen { config, source } =
        choose(&context, &args.config, args.context, Auto::Reproducible)?;
    context.check_timed(args.context, 1, context.kv_capacity)?;
    // Before the device is opened: nothing shares the GPU with a measurement.
    let peers = measure_peers(args, &context);
    let mut device = context.open_process(&args.sharing)?;
    if args.bundle.is_some() && device.is_none() {
        return Err(Failure::no_gpu("--bundle is for what is measured"));
    }
    let conditions = device.as_ref().map(|device| conditions::of(device.describe()));
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let name = &context.graph().name;
    let working = Spinner::on(format!("evaluating {name}, then judging the schedule"));
    let positions = device.is_some().then_some(POSITIONS_MAX);
    let gate = context.gate(args.seed, positions, &kernel_id)?;
    let mut gate = gate.with_context(args.context);
    let (mut verdict, outcome, shown) = match &mut device {
        None => {
            let (verdict, outcome) = assess::evaluate(&mut gate, None, &config, TIMING, args.seed);
            (verdict, outcome.map(drop), Shown::default())
        }
        Some(device) => {
            let passage = Passage::new(&context, args).map_err(|e| context.unevaluated(e))?;
            Bench { gate: &mut gate, device, passage: &passage }.run(&config)
        }
    };
    drop(working);
    if let Err(dropped) = &outcome {
        super::evaluate::stop_on_our_fault(dropped)?;
    }
    let accurate = judge(&mut verdict, shown.accuracy);
    say(args, &context, &verdict, &shown, &peers);
    let good = verdict.correct && outcome.is_ok() && accurate;
    if let (Some(path), Some(conditions), true) = (&args.bundle, &conditions, good) {
        let bundle = bundle(args, &context, config, &verdict, &shown, conditions.clone());
        let missing = || Failure::refused("the run left out a figure that a bundle needs");
        files::write_whole(path, bundle.ok_or_else(missing)?.to_text().as_bytes())?;
        report::say(&format!("bundle: {}", path.display()));
    }
    let document = document(args, &context, (&verdict, &source), &shown, &peers);
    report::document(&evidence(document, &config, conditions.as_ref()))?;
    Ok(if good { Exit::Yes } else { Exit::No })
}

/// The bundle of a measured schedule; `None` if a figure is missing.
fn bundle(
    args: &BenchArgs,
    context: &Context,
    config: ScheduleConfig,
    verdict: &Verdict,
    shown: &Shown,
    conditions: Conditions,
) -> Option<Bundle> {
    Some(Bundle {
        schema: BUNDLE_SCHEMA.to_owned(),
        model: args.model.model.clone(),
        dtype: context.graph().dtype.name().to_owned(),
        target: context.target.name.clone(),
        context: args.context,
        kv_capacity: context.kv_capacity,
        seed: args.seed,
        config,
        schedule_id: config.id(),
        program_id: verdict.program_id.clone()?,
        kernel_id: verdict.kernel_id.clone()?,
        conditions,
        gates: verdict.gates.clone(),
        accuracy: shown.accuracy?.into(),
        timed_tokens: TIMED_TOKENS.min(context.kv_capacity.checked_sub(args.context)?),
        median_us: verdict.latency_us?,
        ci_us: verdict.ci_us?,
        rounds_us: shown.rounds_us.clone(),
        bound_us: verdict.bound_us?,
        bytes_per_token: shown.bytes?,
        bandwidth: shown.bandwidth?,
        notes: verdict.notes.clone(),
    })
}

/// Measures peers if the GPU is here, or if they were requested.
fn measure_peers(args: &BenchArgs, context: &Context) -> Vec<Peer> {
    let here = args.model.place.device != DeviceChoice::Cpu && live_target().is_some();
    let default = [if here { PeerChoice::All } else { PeerChoice::None }];
    let chosen = if args.peers.is_empty() { &default[..] } else { &args.peers };
    let ask = peers::Ask {
        graph: context.graph(),
        context: args.context,
        tokens: TIMED_TOKENS,
        timeout: Duration::from_secs(args.peer_timeout),
        gguf: args.gguf.clone(),
    };
    peers::measure(chosen, &ask, report::say)
}

impl Passage {
    fn new(context: &Context, args: &BenchArgs) -> Result<Self, search::ExpectedError> {
        let graph = context.graph();
        let length = args.context.saturating_add(TIMED_TOKENS).min(context.kv_capacity) as usize;
        let tokens = draw_tokens(args.seed, graph.vocab, length);
        let positions = compared(length);
        report::say(&format!("evaluating the graph at {length} positions"));
        let start = Instant::now();
        let mut evaluator = Evaluator::new(graph, &*context.model.weights)?;
        let expected = evaluator.run_at(&tokens, &positions)?;
        report::say(&format!("evaluated in {:.1} s", start.elapsed().as_secs_f64()));
        let (context, seed) = (args.context as usize, args.seed);
        Ok(Self { tokens, context, positions, expected, seed })
    }
}

/// The positions out of `length` whose logits are compared, in order; the last one is among them.
fn compared(length: usize) -> Vec<usize> {
    if length <= COMPARE_ALL {
        return (0..length).collect();
    }
    let between = (1..=COMPARE_BETWEEN).map(|i| i * length / (COMPARE_BETWEEN + 1));
    let positions: BTreeSet<usize> =
        (0..COMPARE_FIRST).chain(between).chain(length - COMPARE_LAST..length).collect();
    positions.into_iter().collect()
}

struct Bench<'b, 'a> {
    gate: &'b mut Gate<'a>,
    device: &'b mut dyn Device,
    passage: &'b Passage,
}

impl Bench<'_, '_> {
    /// The gates, then accuracy and time at the bench's context.
    fn run(mut self, config: &ScheduleConfig) -> (Verdict, Result<(), Rejection>, Shown) {
        let mut verdict = assess::begin(self.gate, Some(&*self.device), config);
        let bandwidth = self.device.describe().bandwidth;
        let mut shown = Shown { bandwidth, ..Shown::default() };
        let outcome = self.measure(config, &mut shown, &mut verdict);
        if let Err(dropped) = &outcome {
            assess::refuse(&mut verdict, dropped);
        }
        (verdict, outcome, shown)
    }

    fn measure(
        &mut self,
        config: &ScheduleConfig,
        shown: &mut Shown,
        verdict: &mut Verdict,
    ) -> Result<(), Rejection> {
        let passage = self.passage;
        let candidate = assess::lower(self.gate, config, verdict)?;
        let assessed = assess::assess(self.gate, Some(self.device), candidate, verdict)?;
        let candidate = &assessed.candidate;
        let kernel = &candidate.config.kernel;
        let handle = self.device.prepare(&candidate.program, kernel).map_err(Rejection::Failed)?;
        let actual = rows_at(self.device, handle, passage)?;
        shown.accuracy = Accuracy::of(&passage.expected, &actual.logits, Tolerance::DEVICE);
        let disagreed = |by| move |at| Rejection::Disagreed { by, at };
        let agreement = assessed
            .reference
            .and_device(&passage.expected, &actual.logits, &actual.chosen, Tolerance::DEVICE)
            .map_err(disagreed("device"))?;
        let contender = Contender::new(handle, &agreement);
        let Timing { rounds, warmup } = TIMING;
        let plan = Plan { tokens: &passage.tokens, first: passage.context, rounds, warmup };
        let samples: Samples =
            search::time(self.device, [contender; 2], &plan).map_err(Rejection::Failed)?;
        let last = passage.expected.last().map(std::slice::from_ref).unwrap_or_default();
        for (actual, chosen) in samples.last() {
            let _ = assessed
                .reference
                .and_device(last, actual, chosen, Tolerance::DEVICE)
                .map_err(disagreed("timed"))?;
        }
        let middle = u32::midpoint(passage.context as u32, passage.tokens.len() as u32);
        let keys = candidate.program.kv_bytes(middle);
        shown.bytes = Some(candidate.program.stream_bytes() + keys);
        let bounds = assess::bounds(self.gate, self.device, candidate, middle);
        let _ = assess::set_measured(verdict, &agreement, &samples, bounds, passage.seed)?;
        debug_assert_eq!(samples.of(Side::Candidate).len(), 2 * rounds);
        let noise = search::noise_floor(&samples, passage.seed);
        verdict.notes.push(format!("noise floor {:.2} %", 100.0 * noise));
        shown.rounds_us = samples.rounds;
        Ok(())
    }
}

/// The device's logits at the passage's positions. The others are dropped piece by piece: at a long context they would not fit.
fn rows_at(device: &mut dyn Device, handle: Handle, passage: &Passage) -> Result<Ran, Rejection> {
    let wanted: BTreeSet<usize> = passage.positions.iter().copied().collect();
    let mut kept = Ran::default();
    for first in (0..passage.tokens.len()).step_by(PIECE) {
        let end = passage.tokens.len().min(first + PIECE);
        let ran = device.run(handle, &passage.tokens[..end], first).map_err(Rejection::Failed)?;
        let positions = ran.logits.into_iter().zip(ran.chosen).zip(first..);
        for ((row, token), _) in positions.filter(|(_, position)| wanted.contains(position)) {
            kept.logits.push(row);
            kept.chosen.push(token);
        }
    }
    Ok(kept)
}

/// Whether the accuracy is within its bounds; if not, writes so into the verdict. Without a device there is nothing to judge.
fn judge(verdict: &mut Verdict, accuracy: Option<Accuracy>) -> bool {
    let accurate = accuracy.is_none_or(|accuracy| accuracy.holds());
    if !accurate {
        verdict.correct = false;
        let reason = format!(
            "accuracy is out of bounds: relative error at most {:.0e}, divergence at most {:.0e} nats, every decided top-1 equal",
            Accuracy::REL_MAX,
            Accuracy::KL_MAX
        );
        verdict.rejected_reason.get_or_insert(reason);
    }
    accurate
}

fn say(args: &BenchArgs, context: &Context, verdict: &Verdict, shown: &Shown, peers: &[Peer]) {
    let graph = context.graph();
    let mut row = vec![
        ("model", format!("{} {} on {}", graph.name, graph.dtype.name(), verdict.device)),
        ("context", format!("{} tokens, batch 1, whole step", args.context)),
    ];
    if let Some(reason) = &verdict.rejected_reason {
        row.push(("NO", reason.clone()));
    }
    row.push(("amk", latency_line(verdict)));
    let rate = shown.bandwidth.unwrap_or(context.target.bandwidth as f64);
    row.push(("bound", bound_line(verdict, shown, rate)));
    if let Some(accuracy) = shown.accuracy {
        row.push(("accuracy", accuracy_line(&accuracy)));
    }
    let measured =
        verdict.latency_us.filter(|_| verdict.latency_kind == Some(LatencyKind::MeasuredGpu));
    row.extend(peers.iter().map(|peer| (peer.name, peer_line(peer, measured))));
    row.extend(verdict.notes.iter().map(|note| ("note", note.clone())));
    report::table(&row);
    if verdict.latency_kind == Some(LatencyKind::Predicted) {
        report::say("no GPU was used: the latency is a prediction, not a measurement");
    }
}

fn latency_line(verdict: &Verdict) -> String {
    let kind = verdict.latency_kind.map_or("", LatencyKind::name);
    let interval = verdict
        .ci_us
        .map_or_else(String::new, |[low, high]| format!(" (99 % interval {low:.1} to {high:.1})"));
    format!("{} a token{interval}, {kind}", report::maybe(verdict.latency_us, "us"))
}

fn bound_line(verdict: &Verdict, shown: &Shown, bandwidth: f64) -> String {
    let bytes = shown.bytes.map(|bytes| bytes as f64);
    let bytes = bytes.or(verdict.bound_us.map(|us| us * 1e-6 * bandwidth));
    let share = report::maybe(verdict.pct_of_roofline, "% of it reached");
    let read = bytes.map_or_else(String::new, |bytes| {
        format!(" = {:.4} GB at {:.3} TB/s", bytes / 1e9, bandwidth / 1e12)
    });
    format!("{}{read}; {share}", report::maybe(verdict.bound_us, "us"))
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

pub(super) fn accuracy_document(accuracy: &Accuracy, against: &str) -> Value {
    json!({
        "against": against,
        "positions": accuracy.positions,
        "rel_err_worst": accuracy.rel_worst,
        "rel_err_mean": accuracy.rel_mean,
        "rel_err_max_allowed": Accuracy::REL_MAX,
        "top1_decided": accuracy.decided,
        "top1_equal": accuracy.decided_equal,
        "kl_mean": accuracy.kl_mean,
        "kl_max_allowed": Accuracy::KL_MAX,
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

/// Adds what makes a document evidence of its numbers: the schedule, where it was measured, and its own hash.
pub(super) fn evidence(
    mut document: Value,
    config: &ScheduleConfig,
    conditions: Option<&Conditions>,
) -> Map<String, Value> {
    document["config"] = json!(config);
    document["conditions"] = json!(conditions);
    corpus::seal(document.as_object().unwrap_or(&Map::new()))
}

fn document(
    args: &BenchArgs,
    context: &Context,
    (verdict, source): (&Verdict, &ScheduleSource),
    shown: &Shown,
    peers: &[Peer],
) -> Value {
    let against = "f32 evaluation of the same weights";
    let accuracy = shown.accuracy.map(|accuracy| accuracy_document(&accuracy, against));
    json!({
        "schema": "amk.bench.v1",
        "model": context.graph().name,
        "dtype": context.graph().dtype.name(),
        "target": context.target.name,
        "device": verdict.device,
        "context": args.context,
        "kv_capacity": context.kv_capacity,
        "seed": args.seed,
        "us_per_token": verdict.latency_us,
        "rounds_us": shown.rounds_us,
        "latency_kind": verdict.latency_kind,
        "ci_us": verdict.ci_us,
        "bound_us": verdict.bound_us,
        "pct_of_roofline": verdict.pct_of_roofline,
        "bytes_per_token": shown.bytes,
        "bandwidth_measured": shown.bandwidth,
        "accuracy": accuracy,
        "correct": verdict.correct,
        "rejected_reason": verdict.rejected_reason,
        "schedule_id": verdict.schedule_id,
        "schedule_source": source,
        "program_id": verdict.program_id,
        "kernel_id": verdict.kernel_id,
        "peers": peers,
        "notes": verdict.notes,
    })
}

#[cfg(test)]
mod tests;
