//! `amk bench --batch N`: µs per step of a batch, compared with one sequence alone.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use remote::Served;
use search::{Conditions, Handle, Timing, assess, draw_tokens};
use serde_json::{Value, json};
use vm_host::{Batch, KvPool, Request, Sequence};

use super::bench::blocks::Blocks;
use super::bench::{accuracy_document, evidence};
use crate::cli::{BenchArgs, PrefillChoice};
use crate::context::Context;
use crate::device::Gpu;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose, spread};
use crate::spinner::Spinner;
use crate::{conditions, report};

/// Tokens that one block times.
const TIMED_TOKENS: u32 = 32;
/// Timed blocks, and untimed ones before them.
const ROUNDS: usize = 24;
const WARMUP: usize = 4;
/// Positions of each sequence that are compared with the graph: the first timed ones, and the last.
const COMPARED: [usize; 6] = [0, 1, 2, 3, 30, 31];

/// The result of a machine of a given batch size.
struct Measured {
    /// Microseconds per step.
    us: Blocks,
    /// Tokens of each sequence.
    tokens: Vec<Vec<u32>>,
}

struct Shown {
    one: Measured,
    several: Measured,
    accuracy: Accuracy,
    /// Whether every token is the first maximum of its logits.
    chosen: bool,
    bytes: u64,
    bandwidth: f64,
    conditions: Conditions,
    ids: [String; 3],
    one_ids: [String; 3],
}

impl Shown {
    fn holds(&self) -> bool {
        self.accuracy.holds() && self.chosen
    }

    fn bound(&self) -> f64 {
        self.bytes as f64 / self.bandwidth * 1e6
    }

    /// Sequences with the same tokens as alone. If two logits are nearly equal the order of a sum decides, so this is reported, not judged.
    fn as_alone(&self) -> usize {
        let pairs = self.one.tokens.iter().zip(&self.several.tokens);
        pairs.filter(|(one, several)| one == several).count()
    }
}

pub(crate) fn run(args: &BenchArgs, sequences: u32) -> Outcome {
    let needed = args.context.saturating_add(TIMED_TOKENS + 1);
    let context = Context::with_room(&args.model, needed)?;
    context.check_timed(args.context, TIMED_TOKENS + 1, context.positions_max())?;
    if context.graph().dtype == ir::DType::F32 {
        let message =
            "--batch: sequences share the products of 16-bit weights only, and these are f32";
        return Err(Failure::usage(message));
    }
    if !context.has_device()? {
        return Err(no_gpu());
    }
    let Chosen { config: alone, source } =
        choose(&context, &args.config, args.context, Auto::Reproducible)?;
    let config = match args.config.config {
        Some(_) => alone,
        None => spread(alone, context.graph(), &context.target, sequences),
    };
    judged(&context, args, &config)?;
    let shown = measure(&context, args, sequences, (alone, config))?;
    say(&context, args, sequences, &shown);
    let mut document = document(&context, args, (sequences, &source), &shown);
    document["one"]["config"] = json!(alone);
    report::document(&evidence(document, &config, Some(&shown.conditions)))?;
    Ok(if shown.holds() { Exit::Yes } else { Exit::No })
}

/// The gates that need no device: the lowered program computes the graph's values. That each sequence's program is
/// equivalent is proven when it is loaded.
fn judged(context: &Context, args: &BenchArgs, config: &ScheduleConfig) -> Result<(), Failure> {
    let working = Spinner::on(format!("judging the schedule for {}", context.graph().name));
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let mut gate = context.gate(args.seed, None, &kernel_id)?.with_context(args.context);
    let timing = Timing { rounds: ROUNDS, warmup: WARMUP };
    let (verdict, outcome) = assess::evaluate(&mut gate, None, config, timing, args.seed);
    drop(working);
    if let Err(dropped) = &outcome {
        super::evaluate::stop_on_our_fault(dropped)?;
    }
    match verdict.correct && outcome.is_ok() {
        true => Ok(()),
        false => Err(Failure::refused(verdict.rejected_reason.unwrap_or_default())),
    }
}

fn open(context: &Context) -> Result<Gpu<'_>, Failure> {
    let mut gpu = context.open_here(true)?.ok_or_else(no_gpu)?;
    gpu.set_prefill(PrefillChoice::Auto)?;
    Ok(gpu)
}

fn no_gpu() -> Failure {
    Failure::no_gpu("--batch is for what is measured")
}

/// Prompts of the sequences, each with the first token to run after it.
fn prompts(args: &BenchArgs, vocab: u32, sequences: u32) -> Vec<Vec<u32>> {
    let length = args.context as usize + 1;
    let seeds = (0..u64::from(sequences)).map(|seq| args.seed.wrapping_mul(8191) + seq);
    seeds.map(|seed| draw_tokens(seed, vocab, length)).collect()
}

fn measure(
    context: &Context,
    args: &BenchArgs,
    sequences: u32,
    (alone, config): (ScheduleConfig, ScheduleConfig),
) -> Result<Shown, Failure> {
    let prompts = prompts(args, context.graph().vocab, sequences);
    let mut gpu = open(context)?;
    let info = gpu.describe();
    let bandwidth = info.bandwidth.unwrap_or(context.target.bandwidth as f64);
    let conditions = conditions::of(info);
    let program = Arc::new(context.lowered(&alone)?);
    let one_ids = [alone.id(), program.id(), context.kernel_id(&alone.kernel)];
    let handle = gpu.prepare(&program, &alone.kernel)?;
    gpu.serve(handle, sequences, KvPool::Full)?;
    let one = one_by_one(&mut gpu, handle, &prompts)?;
    drop(gpu); // frees its memory for the next one

    let mut gpu = open(context)?;
    gpu.set_seqs(sequences);
    let program = Arc::new(context.lowered(&config)?);
    let handle = gpu.prepare(&program, &config.kernel)?;
    gpu.serve(handle, sequences, KvPool::Full)?;
    for (session, prompt) in (0..).zip(&prompts) {
        fill(&mut gpu, handle, session, prompt)?;
    }
    let compare = |tokens: &[Vec<u32>], rows: &Rows| compare(context, &prompts, tokens, rows);
    let (several, (accuracy, chosen)) = at_once(&mut gpu, handle, &prompts, compare)?;
    let ids = [config.id(), program.id(), context.kernel_id_of(&config.kernel, sequences)];
    let bytes = step_bytes(&program, args.context, sequences);
    Ok(Shown { one, several, accuracy, chosen, bytes, bandwidth, conditions, ids, one_ids })
}

/// Bytes that a step in the middle of a block reads: the weights once, and the keys and values of every sequence.
fn step_bytes(program: &Verified<Program>, context: u32, sequences: u32) -> u64 {
    let keys = program.kv_bytes(context + TIMED_TOKENS / 2);
    program.stream_bytes() + u64::from(sequences) * keys
}

/// Runs a prompt except its last token.
fn fill(gpu: &mut Gpu<'_>, handle: Handle, session: u32, prompt: &[u32]) -> Result<(), Failure> {
    let tokens = &prompt[..prompt.len() - 1];
    let request = Request { session, tokens, ..Request::default() };
    gpu.command(handle, &request, &mut || false)?;
    Ok(())
}

/// Runs each sequence alone, on a kernel of batch size 1; the first is timed.
fn one_by_one(
    gpu: &mut Gpu<'_>,
    handle: Handle,
    prompts: &[Vec<u32>],
) -> Result<Measured, Failure> {
    for (session, prompt) in (0..).zip(prompts) {
        fill(gpu, handle, session, prompt)?;
    }
    let mut decode = |session: u32, prompt: &[u32]| {
        let (head, tokens) = prompt.split_at(prompt.len() - 1);
        let (position, generate) = (head.len() as u32, TIMED_TOKENS);
        let request = Request { session, position, tokens, generate, ..Request::default() };
        gpu.command(handle, &request, &mut || false)
    };
    let us = Blocks::time((WARMUP, ROUNDS), || {
        decode(0, &prompts[0]).map(|done| done.host_us / f64::from(done.steps.max(1)))
    })?;
    let tokens = (0..).zip(prompts).map(|(session, prompt)| Ok(decode(session, prompt)?.tokens));
    Ok(Measured { us, tokens: tokens.collect::<Result<_, Failure>>()? })
}

fn seqs(prompts: &[Vec<u32>]) -> Vec<Sequence> {
    let seq = |(session, prompt): (u32, &Vec<u32>)| Sequence {
        session,
        position: prompt.len() as u32 - 1,
        token: prompt.last().copied().unwrap_or_default(),
        sampled: false,
    };
    (0..).zip(prompts).map(seq).collect()
}

/// Compares each sequence's logits with the graph's, fed with the same tokens, and its tokens with its logits.
fn compare(
    context: &Context,
    prompts: &[Vec<u32>],
    tokens: &[Vec<u32>],
    logits: &[Vec<Vec<f32>>],
) -> Result<(Accuracy, bool), Failure> {
    let working = Spinner::on(format!("evaluating {} for each sequence", context.graph().name));
    let (mut expected, mut actual, mut chosen) = (Vec::new(), Vec::new(), true);
    for ((prompt, tokens), rows) in prompts.iter().zip(tokens).zip(logits) {
        let fed = [&prompt[..], &tokens[..tokens.len().saturating_sub(1)]].concat();
        let positions: Vec<usize> = COMPARED.iter().map(|at| prompt.len() - 1 + at).collect();
        let evaluator = Evaluator::new(context.graph(), &*context.model.weights);
        let wanted = evaluator.and_then(|mut evaluator| evaluator.run_at(&fed, &positions));
        expected.extend(wanted.map_err(|error| context.unevaluated(error))?);
        actual.extend(COMPARED.iter().filter_map(|at| rows.get(*at).cloned()));
        chosen &= rows.len() == tokens.len();
        chosen &= rows.iter().zip(tokens).all(|(row, token)| first_greatest(row) == *token);
    }
    drop(working);
    let accuracy = Accuracy::of(&expected, &actual, Tolerance::DEVICE);
    let missing = || Failure::refused("a sequence ended before all its positions were run");
    Ok((accuracy.ok_or_else(missing)?, chosen))
}

/// The index of the greatest value, the first of equals.
fn first_greatest(row: &[f32]) -> u32 {
    let better = |best: usize, (index, value): (usize, &f32)| {
        if *value > row[best] { index } else { best }
    };
    row.iter().enumerate().fold(0, better) as u32
}

/// For each sequence the logits of every generated position.
type Rows = Vec<Vec<Vec<f32>>>;

/// Runs all sequences at once. Timed blocks must give the tokens whose logits were compared before.
fn at_once(
    gpu: &mut Gpu<'_>,
    handle: Handle,
    prompts: &[Vec<u32>],
    compare: impl FnOnce(&[Vec<u32>], &Rows) -> Result<(Accuracy, bool), Failure>,
) -> Result<(Measured, (Accuracy, bool)), Failure> {
    let seqs = seqs(prompts);
    let batch = |keep_logits| Batch { seqs: &seqs, generate: TIMED_TOKENS, stop: &[], keep_logits };
    let first = gpu.batch(handle, &batch(true), &mut || false)?;
    let logits = gpu.batch_logits(handle, seqs.len() as u32, first.steps)?;
    let tokens: Vec<Vec<u32>> = first.seqs.into_iter().map(|seq| seq.tokens).collect();
    let compared = compare(&tokens, &logits)?;
    let us = Blocks::time((WARMUP, ROUNDS), || {
        let done = gpu.batch(handle, &batch(false), &mut || false)?;
        if done.seqs.iter().zip(&tokens).any(|(seq, tokens)| seq.tokens != *tokens) {
            let what = "a timed block gave other tokens than those that were compared";
            return Err(Failure::refused(what));
        }
        Ok(done.host_us / f64::from(done.steps.max(1)))
    })?;
    Ok((Measured { us, tokens }, compared))
}

fn say(context: &Context, args: &BenchArgs, sequences: u32, shown: &Shown) {
    let (one, several, bound) = (shown.one.us.median(), shown.several.us.median(), shown.bound());
    let range = |measured: &Measured| {
        let [least, most] = measured.us.ends();
        format!("{:.1} us per step ({least:.1} to {most:.1})", measured.us.median())
    };
    let graph = context.graph();
    let a = shown.accuracy;
    report::table(&[
        ("model", format!("{} {}", graph.name, graph.dtype.name())),
        ("context", format!("{} tokens, whole steps, median of {ROUNDS}", args.context)),
        ("one", format!("{}, {:.0} tokens/s", range(&shown.one), 1e6 / one)),
        (
            &sequences.to_string(),
            format!(
                "{}, {:.2} x one; {:.1} us per token, {:.0} tokens/s, {:.2} x one's",
                range(&shown.several),
                several / one,
                several / f64::from(sequences),
                f64::from(sequences) * 1e6 / several,
                f64::from(sequences) * one / several
            ),
        ),
        (
            "bound",
            format!(
                "{bound:.1} us = {:.4} GB at {:.3} TB/s, keys of all; {:.1} % of it reached",
                shown.bytes as f64 / 1e9,
                shown.bandwidth / 1e12,
                bound / several * 100.0
            ),
        ),
        (
            "accuracy",
            format!(
                "relative error {:.1e} worst; top-1 equal at {} of {} decided; {} positions against f32: {}; tokens as alone: {} of {sequences}",
                a.rel_worst,
                a.decided_equal,
                a.decided,
                a.positions,
                if shown.holds() { "within bounds" } else { "OUT OF BOUNDS" },
                shown.as_alone()
            ),
        ),
    ]);
}

fn document(
    context: &Context,
    args: &BenchArgs,
    (sequences, source): (u32, &ScheduleSource),
    shown: &Shown,
) -> Value {
    let (one, several, bound) = (shown.one.us.median(), shown.several.us.median(), shown.bound());
    let against = "f32 evaluation of the same weights, each sequence by itself";
    let [schedule_id, program_id, kernel_id] = &shown.ids;
    let [one_schedule_id, one_program_id, one_kernel_id] = &shown.one_ids;
    json!({
        "schema": "amk.bench.sequences.v1",
        "model": context.graph().name,
        "dtype": context.graph().dtype.name(),
        "target": context.target.name,
        "context": args.context,
        "kv_capacity": context.kv_capacity,
        "seed": args.seed,
        "sequences": sequences,
        "us_per_step": several,
        "us_per_step_rounds": shown.several.us.0,
        "us_per_token": several / f64::from(sequences),
        "tokens_per_s": f64::from(sequences) * 1e6 / several,
        "one": {
            "us_per_step": one,
            "us_per_step_rounds": shown.one.us.0,
            "schedule_id": one_schedule_id,
            "program_id": one_program_id,
            "kernel_id": one_kernel_id,
        },
        "times_one": several / one,
        "bound_us": bound,
        "pct_of_roofline": bound / several * 100.0,
        "bytes_per_step": shown.bytes,
        "bandwidth_measured": shown.bandwidth,
        "accuracy": accuracy_document(&shown.accuracy, against),
        "chosen_by_logits": shown.chosen,
        "sequences_as_alone": shown.as_alone(),
        "correct": shown.holds(),
        "schedule_id": schedule_id,
        "schedule_source": source,
        "program_id": program_id,
        "kernel_id": kernel_id,
    })
}
