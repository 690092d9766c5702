//! A step of a batch, compared with a step of one sequence alone.

use std::sync::Arc;

use ir::program::{Program, Verified};
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use remote::Served;
use search::{Handle, Samples, Side, assess, draw_tokens};
use serde_json::{Value, json};
use vm_host::{Batch, KvPool, Request, Sequence};

use super::{Measured, Row, TIMED_TOKENS, rounds};
use crate::cli::PrefillChoice;
use crate::commands::evaluate::stop_on_our_fault;
use crate::device::Gpu;
use crate::failure::Failure;
use crate::schedule_choice::spread;
use crate::spinner::Spinner;

/// Positions of each sequence that are compared with the graph: the first timed ones, and the last.
const COMPARED: [usize; 6] = [0, 1, 2, 3, 30, 31];

/// For each sequence the logits of every generated position.
type Logits = Vec<Vec<Vec<f32>>>;

pub(super) fn measure(row: &Row<'_>, sequences: u32) -> Result<Measured, Failure> {
    let (args, context, alone) = (row.args, &row.context, row.chosen.config);
    let others = context.others(&args.sharing)?.ok_or_else(|| row.no_gpu())?;
    let config = match args.config.config {
        Some(_) => alone,
        None => spread(alone, context.graph(), &context.target, sequences),
    };
    let mut measured = judged(row, config)?;
    if measured.verdict.rejected_reason.is_some() {
        return Ok(measured);
    }
    let prompts = prompts(row, sequences);
    let mut gpu = open(row)?;
    let info = gpu.describe();
    let program = Arc::new(context.lowered(&alone)?);
    let alone_id = program.id();
    let handle = gpu.prepare(&program, &alone.kernel)?;
    gpu.serve(handle, sequences, KvPool::Full)?;
    let (single, tokens_alone) = one_by_one(row, &mut gpu, handle, &prompts)?;
    drop(gpu); // frees its memory for the next one

    let mut gpu = open(row)?;
    gpu.set_seqs(sequences);
    let program = Arc::new(context.lowered(&config)?);
    let handle = gpu.prepare(&program, &config.kernel)?;
    gpu.serve(handle, sequences, KvPool::Full)?;
    for (session, prompt) in (0..).zip(&prompts) {
        fill(&mut gpu, handle, session, prompt)?;
    }
    let one = json!({"config": alone, "program_id": alone_id, "kernel_id": context.kernel_id(&alone.kernel)});
    let (samples, tokens) = at_once(row, &mut gpu, handle, &prompts, &mut measured)?;
    let bandwidth = info.bandwidth.unwrap_or(context.target.total_bandwidth() as f64);
    let bytes = step_bytes(&program, args.context, sequences);
    measured.verdict.device.clone_from(&info.name);
    measured.info = Some(search::DeviceInfo { other_processes: others, ..info });
    measured.bytes = Some(bytes);
    measured.set_samples(samples, bytes as f64 / bandwidth * 1e6, args.seed);
    let same = tokens_alone.iter().zip(&tokens).filter(|(one, several)| one == several).count();
    beside(&mut measured, (one, &single), same, sequences);
    Ok(measured)
}

/// The gates that need no device: the lowered program computes the graph's values. That each sequence's program is
/// equivalent is proven when it is loaded.
fn judged(row: &Row<'_>, config: ir::schedule::ScheduleConfig) -> Result<Measured, Failure> {
    let (args, context) = (row.args, &row.context);
    let _working = Spinner::on(format!("judging the schedule for {}", context.graph().name));
    let batch = args.sequences.unwrap_or(1);
    let kernel_id = |kernel: &_| context.kernel_id_of(kernel, batch);
    let mut gate = context.gate(args.seed, None, &kernel_id)?.with_contexts(&[args.context]);
    let (verdict, outcome) = assess::evaluate(&mut gate, None, &config, row.timing(), args.seed);
    if let Err(dropped) = &outcome {
        stop_on_our_fault(dropped)?;
    }
    Ok(Measured::new(verdict, config, None))
}

fn open<'a>(row: &'a Row<'_>) -> Result<Gpu<'a>, Failure> {
    let mut gpu = row.open()?;
    gpu.set_prefill(PrefillChoice::Auto)?;
    Ok(gpu)
}

/// Prompts of the sequences, each with the first token to run after it.
fn prompts(row: &Row<'_>, sequences: u32) -> Vec<Vec<u32>> {
    let (length, vocab) = (row.args.context as usize + 1, row.context.graph().vocab);
    let seeds = (0..u64::from(sequences)).map(|seq| row.args.seed.wrapping_mul(8191) + seq);
    seeds.map(|seed| draw_tokens(seed, vocab, length)).collect()
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
    gpu.command(handle, &request, None, &mut || false)?;
    Ok(())
}

/// Runs each sequence alone, on a kernel of batch size 1; the first is timed. Returns the tokens of each.
fn one_by_one(
    row: &Row<'_>,
    gpu: &mut Gpu<'_>,
    handle: Handle,
    prompts: &[Vec<u32>],
) -> Result<(Samples, Vec<Vec<u32>>), Failure> {
    for (session, prompt) in (0..).zip(prompts) {
        fill(gpu, handle, session, prompt)?;
    }
    let mut decode = |session: u32, prompt: &[u32]| {
        let (head, tokens) = prompt.split_at(prompt.len() - 1);
        let (position, generate) = (head.len() as u32, TIMED_TOKENS);
        let request = Request { session, position, tokens, generate, ..Request::default() };
        gpu.command(handle, &request, None, &mut || false)
    };
    let samples = rounds(row.timing(), None, || {
        decode(0, &prompts[0]).map(|done| done.host_us / f64::from(done.steps.max(1)))
    })?;
    let tokens = (0..).zip(prompts).map(|(session, prompt)| Ok(decode(session, prompt)?.tokens));
    Ok((samples, tokens.collect::<Result<_, Failure>>()?))
}

/// Runs all sequences at once and compares their logits. Timed blocks must give the tokens whose logits were compared.
fn at_once(
    row: &Row<'_>,
    gpu: &mut Gpu<'_>,
    handle: Handle,
    prompts: &[Vec<u32>],
    measured: &mut Measured,
) -> Result<(Samples, Vec<Vec<u32>>), Failure> {
    let seqs = (0..).zip(prompts).map(|(session, prompt)| {
        let (head, tokens) = prompt.split_at(prompt.len() - 1);
        Sequence { session, position: head.len() as u32, tokens, sampled: false }
    });
    let seqs: Vec<Sequence<'_>> = seqs.collect();
    let batch = |keep_logits| Batch { seqs: &seqs, steps: TIMED_TOKENS, stop: &[], keep_logits };
    let first = gpu.batch(handle, &batch(true), &mut || false)?;
    let logits = gpu.batch_logits(handle, seqs.len() as u32, first.steps)?;
    let tokens: Vec<Vec<u32>> = first.seqs.into_iter().map(|seq| seq.tokens).collect();
    compare(row, prompts, &tokens, &logits, measured)?;
    let uuid = gpu.describe().uuid;
    let samples = rounds(row.timing(), uuid.as_deref(), || {
        let done = gpu.batch(handle, &batch(false), &mut || false)?;
        if done.seqs.iter().zip(&tokens).any(|(seq, tokens)| seq.tokens != *tokens) {
            let what = "a timed block gave other tokens than those that were compared";
            return Err(Failure::refused(what));
        }
        Ok(done.host_us / f64::from(done.steps.max(1)))
    })?;
    Ok((samples, tokens))
}

/// Compares each sequence's logits with the graph's, fed with the same tokens, and its tokens with its logits.
fn compare(
    row: &Row<'_>,
    prompts: &[Vec<u32>],
    tokens: &[Vec<u32>],
    logits: &Logits,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let context = &row.context;
    let _working = Spinner::on(format!("evaluating {} for each sequence", context.graph().name));
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
    let accuracy =
        Accuracy::of(&expected, &actual, Tolerance::device_limit(context.graph().kv_dtype));
    let missing = || Failure::refused("a sequence ended before all its positions were run");
    measured.set_accuracy(Some(accuracy.ok_or_else(missing)?));
    if !chosen {
        measured.refuse("a token is not the first maximum of its logits".to_owned());
    }
    measured.fields.insert("chosen_by_logits".to_owned(), chosen.into());
    Ok(())
}

/// The index of the greatest value, the first of equals.
fn first_greatest(row: &[f32]) -> u32 {
    let better = |best: usize, (index, value): (usize, &f32)| {
        if *value > row[best] { index } else { best }
    };
    row.iter().enumerate().fold(0, better) as u32
}

/// Adds the step of one sequence. If two logits are nearly equal the order of a sum decides, so the number of
/// sequences with the same tokens as alone is reported, not judged.
fn beside(
    measured: &mut Measured,
    (mut alone, single): (Value, &Samples),
    same: usize,
    sequences: u32,
) {
    let one = search::median(&single.of(Side::Candidate));
    let ratio = measured.verdict.latency_us.unwrap_or(f64::NAN) / one;
    let more = f64::from(sequences) / ratio;
    let line = format!(
        "{one:.1} us per step, {:.0} tokens/s; the batch takes {ratio:.2} x as long and gives {more:.2} x the tokens; tokens as alone: {same} of {sequences}",
        1e6 / one
    );
    measured.lines.push(("one", line));
    alone["us"] = one.into();
    alone["samples_us"] = json!(single.rounds);
    let fields = [("one", alone), ("times_one", json!(ratio)), ("sequences_as_alone", json!(same))];
    measured.fields.extend(fields.map(|(name, value)| (name.to_owned(), value)));
}
