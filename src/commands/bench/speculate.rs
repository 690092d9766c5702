//! Windows: tokens per time where each step checks guesses, beside steps of one position. The guesses are the true tokens,
//! spoiled with a given probability, or those that are looked up in the text, and of a draft model where there are none. The
//! tokens must be those of plain decoding by the same kernel.

use std::sync::Arc;
use std::time::Instant;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use reference_vm::Order;
use reference_vm::machine::{Machine, Run};
use remote::Served;
use search::{Handle, LatencyKind, Samples, Side, assess, draw_tokens};
use serde_json::json;
use vm_host::{KvPool, Request, Window, WindowDecoded};

use super::{Measured, Row, TIMED_TOKENS, rounds};
use crate::cli::PrefillChoice;
use crate::commands::evaluate::stop_on_our_fault;
use crate::context::Context;
use crate::device::Gpu;
use crate::engine::DraftModel;
use crate::failure::Failure;
use crate::schedule_choice::spread;
use crate::speculate::{Draft, Lookup, Tally, kernel_seqs, price};
use crate::spinner::Spinner;

/// Tokens of a block of windows; and of the only one on the reference VM.
pub(super) const TOKENS: u32 = 64;
const TOKENS_OF_REFERENCE: u32 = 24;
/// Windows draw how many of their guesses are right from this sequence: multiples of the golden section modulo one, which
/// fill the unit interval evenly, so that few windows have the mean of many.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// What runs the text: the GPU or the reference VM.
trait Text {
    /// The tokens that plain decoding gives behind the prompt.
    fn plain(&mut self, count: u32) -> Result<Vec<u32>, Failure>;

    /// Runs a window at a position: the choices after each of these tokens.
    fn window(&mut self, position: u32, tokens: &[u32]) -> Result<WindowDecoded, Failure>;
}

struct OnGpu<'g, 'a> {
    gpu: &'g mut Gpu<'a>,
    handle: Handle,
    prompt: &'g [u32],
}

impl Text for OnGpu<'_, '_> {
    fn plain(&mut self, generate: u32) -> Result<Vec<u32>, Failure> {
        let (head, tokens) = self.prompt.split_at(self.prompt.len() - 1);
        let position = head.len() as u32;
        let request = Request { position, tokens, generate, ..Request::default() };
        Ok(self.gpu.command(self.handle, &request, None, &mut || false)?.tokens)
    }

    fn window(&mut self, position: u32, tokens: &[u32]) -> Result<WindowDecoded, Failure> {
        let window = Window { position, tokens, ..Window::default() };
        let done = self.gpu.windows(self.handle, &[window], false)?;
        let only = done.windows.into_iter().next();
        only.ok_or_else(|| Failure::bug("a step of one window has no window"))
    }
}

struct OnReference<'a> {
    machine: Machine<'a>,
    prompt: &'a [u32],
}

impl OnReference<'_> {
    fn tokens(run: Run) -> Result<Vec<u32>, Failure> {
        match run {
            Run::Finished(outputs) => Ok(outputs.tokens),
            halted @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                Err(Failure::refused(search::Rejection::Halted(halted).to_string()))
            }
        }
    }
}

impl Text for OnReference<'_> {
    fn plain(&mut self, count: u32) -> Result<Vec<u32>, Failure> {
        let refused = |error: reference_vm::MachineError| Failure::refused(error.to_string());
        Self::tokens(self.machine.run(self.prompt, Order::Waves).map_err(refused)?)?;
        Self::tokens(self.machine.greedy(count as usize, &[], Order::Waves).map_err(refused)?)
    }

    fn window(&mut self, position: u32, tokens: &[u32]) -> Result<WindowDecoded, Failure> {
        self.machine.truncate(position as usize);
        let run = self.machine.window(0, tokens, Order::Waves);
        let run = run.map_err(|error| Failure::refused(error.to_string()))?;
        let chosen = Self::tokens(run)?.into_iter().map(Some).collect();
        Ok(WindowDecoded { chosen })
    }
}

/// A prompt, and how guesses of the tokens behind it are made.
struct Guesses<'a> {
    prompt: &'a [u32],
    most: usize,
    /// Probability that a guess is right; `None`: it is looked up.
    acceptance: Option<f64>,
    /// Where the sequence of draws begins, from 0 to 1.
    begins: f64,
    draft: Option<&'a DraftModel>,
}

impl Guesses<'_> {
    /// The guesses of a window behind the true token of number `done`.
    fn of(&self, window: u64, done: usize, truth: &[u32], text: &Lookup) -> Vec<u32> {
        let Some(acceptance) = self.acceptance else { return text.guess(self.most) };
        let draw = (self.begins + window as f64 * GOLDEN).fract();
        let right = (1..=self.most as i32).take_while(|&k| draw < acceptance.powi(k)).count();
        let guess = |(index, &token): (usize, &u32)| {
            // Another token: it cannot be chosen, or the true one would not have been.
            if index == right { u32::from(token == 0) } else { token }
        };
        let behind = truth.iter().skip(done + 1).take(self.most);
        behind.enumerate().map(guess).collect()
    }
}

/// Guesses of a window, and whether they are a draft's. With given guesses it takes its time for as many.
fn with_draft(
    draft: &mut Draft<'_>,
    (guesses, text): (&Guesses<'_>, &[u32]),
    found: Vec<u32>,
) -> Result<(Vec<u32>, bool), Failure> {
    let given = guesses.acceptance.is_some();
    let count = if given { found.len() } else { guesses.most };
    if count == 0 || !given && !found.is_empty() {
        return Ok((found, false));
    }
    let guessed = draft.guess(text, count).tokens;
    if !draft.can_guess(text.len()) {
        let why = "the draft model failed, or its positions end before those of the model";
        return Err(Failure::refused(why));
    }
    if !given {
        return Ok((guessed, true));
    }
    draft.pretend(text, &found);
    Ok((found, true))
}

/// Runs a block of windows, and counts what they gave. `None` if a token is not the true one.
fn block(
    text: &mut dyn Text,
    (guesses, truth): (&Guesses<'_>, &[u32]),
    mut draft: Option<&mut Draft<'_>>,
    count: usize,
) -> Result<Option<Tally>, Failure> {
    let first = guesses.prompt.len();
    let mut lookup = Lookup::new(guesses.prompt);
    lookup.push(truth[0]);
    let (mut done, mut tally) = (0, Tally::default());
    while done < count {
        let found = guesses.of(tally.windows, done, truth, &lookup);
        let (guessed, drafted) = match draft.as_deref_mut() {
            Some(draft) => with_draft(draft, (guesses, lookup.text()), found)?,
            None => (found, false),
        };
        let tokens = [&truth[done..=done], &guessed].concat();
        let chosen = text.window((first + done) as u32, &tokens)?.accepted(&guessed);
        if chosen.is_empty() || !truth[done + 1..].starts_with(&chosen) {
            return Ok(None);
        }
        chosen.iter().for_each(|&token| lookup.push(token));
        done += chosen.len();
        let judged = (chosen.len() - 1, chosen.len() <= guessed.len());
        tally.add(guessed.len(), judged, chosen.len(), drafted);
    }
    Ok(Some(tally))
}

const OTHER_TOKENS: &str = "windows gave other tokens than plain decoding by the same kernel";

pub(super) fn measure(row: &Row<'_>, most: u32) -> Result<Measured, Failure> {
    let (args, context, alone) = (row.args, &row.context, row.chosen.config);
    let others = context.others(&args.sharing)?;
    let seqs = kernel_seqs(most);
    let config = match args.config.config {
        Some(_) => alone,
        None => spread(alone, context.graph(), &context.target, seqs),
    };
    let mut measured = judged(row, &config, others.map(|_| seqs))?;
    if measured.verdict.rejected_reason.is_some() {
        return Ok(measured);
    }
    let prompt = draw_tokens(args.seed, context.graph().vocab, args.context as usize);
    let begins = f64::from(draw_tokens(args.seed, 1 << 20, 1)[0]) / f64::from(1 << 20);
    let (draft, acceptance) = (args.windows.draft.as_deref(), args.windows.acceptance);
    let draft = DraftModel::of(draft, most, (context, others.is_some()), args.context)?;
    let (most, draft) = (most as usize, draft.as_ref());
    let guesses = Guesses { prompt: &prompt, most, acceptance, begins, draft };
    match others {
        None => predicted(context, &config, &guesses, &mut measured)?,
        Some(others) => {
            let info = on_gpu(row, (&alone, &config, seqs), &guesses, &mut measured)?;
            measured.info = Some(search::DeviceInfo { other_processes: others, ..info });
        }
    }
    Ok(measured)
}

/// The gates that need no device: the lowered program computes the graph's values. That its windows read what they must is
/// proven when it is loaded.
fn judged(row: &Row<'_>, config: &ScheduleConfig, seqs: Option<u32>) -> Result<Measured, Failure> {
    let (args, context) = (row.args, &row.context);
    let _working = Spinner::on(format!("judging the schedule for {}", context.graph().name));
    let kernel_id = |kernel: &_| context.kernel_id_of(kernel, seqs.unwrap_or(1));
    let mut gate = context.gate(args.seed, None, &kernel_id)?;
    let (verdict, outcome) = assess::evaluate(&mut gate, None, config, row.timing(), args.seed);
    if let Err(dropped) = &outcome {
        stop_on_our_fault(dropped)?;
    }
    Ok(Measured::new(verdict, *config, None))
}

/// Runs the windows on the reference VM. The time is predicted: that of a step of one position, as the price of a window.
fn predicted(
    context: &Context,
    config: &ScheduleConfig,
    guesses: &Guesses<'_>,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let program = context.lowered(config)?;
    let machine = Machine::new(&program, context.graph(), &*context.model.weights);
    let machine = machine.map_err(|error| Failure::refused(error.to_string()))?;
    let Guesses { prompt, most, draft, .. } = *guesses;
    let mut text = OnReference { machine, prompt };
    let truth = text.plain(TOKENS_OF_REFERENCE + most as u32 + 2)?;
    let mut opened = draft.map(DraftModel::open).transpose()?;
    let of = (guesses, &truth[..]);
    let tally = block(&mut text, of, opened.as_mut(), TOKENS_OF_REFERENCE as usize)?;
    let Some(tally) = tally else {
        measured.refuse(OTHER_TOKENS.to_owned());
        return Ok(());
    };
    let plain = measured.verdict.latency_us;
    // A draft's step is predicted by the bytes that it reads.
    let of_draft = draft.map_or(0.0, |draft| draft.part_of(context));
    let drafted = of_draft * tally.drafted as f64 / tally.windows as f64;
    let per_window = plain.map(|us| us * (price(most + 1) + drafted));
    let per_token = per_window.map(|us| us * tally.windows as f64 / tally.tokens as f64);
    let share = tally.windows as f64 / tally.tokens as f64;
    measured.verdict.latency_us = per_token;
    measured.verdict.bound_us = measured.verdict.bound_us.map(|us| us * share);
    measured.verdict.ci_us = None;
    measured.verdict.pct_of_roofline = None;
    measured.verdict.latency_kind = Some(LatencyKind::Predicted);
    let us_per_guess = draft.and(plain).map(|us| us * of_draft);
    report(measured, &tally, (json!({"us": plain}), us_per_guess), guesses);
    Ok(())
}

/// Times windows on the kernel of several sequences, and steps of one position on that for one.
fn on_gpu(
    row: &Row<'_>,
    (alone, config, seqs): (&ScheduleConfig, &ScheduleConfig, u32),
    guesses: &Guesses<'_>,
    measured: &mut Measured,
) -> Result<search::DeviceInfo, Failure> {
    let context = &row.context;
    let Guesses { prompt, most, draft, .. } = *guesses;
    let mut gpu = row.open()?;
    // Its kernel leaves before the memory of the model is freed.
    let mut draft = draft.map(DraftModel::open).transpose()?;
    let info = gpu.describe();
    gpu.set_prefill(PrefillChoice::Auto)?;
    let program =
        |config| Ok::<Arc<Verified<Program>>, Failure>(Arc::new(context.lowered(config)?));
    let one = gpu.prepare(&program(alone)?, &alone.kernel)?;
    gpu.set_seqs(seqs);
    let wide = program(config)?;
    let handle = gpu.prepare(&wide, &config.kernel)?;
    gpu.serve(handle, 1, KvPool::Full)?;
    let tokens = &prompt[..prompt.len() - 1];
    if !tokens.is_empty() {
        gpu.command(handle, &Request { tokens, ..Request::default() }, None, &mut || false)?;
    }
    let mut text = OnGpu { gpu: &mut gpu, handle, prompt };
    let truth = text.plain(TOKENS + most as u32 + 2)?;
    let mut tally = None;
    let samples = rounds(row.timing(), info.uuid.as_deref(), || {
        let began = Instant::now();
        let found = block(&mut text, (guesses, &truth), draft.as_mut(), TOKENS as usize)?;
        let us = began.elapsed().as_secs_f64() * 1e6;
        let found = found.ok_or_else(|| Failure::refused(OTHER_TOKENS))?;
        tally = Some(found);
        Ok::<f64, Failure>(us / found.tokens as f64)
    })?;
    let us_per_guess = draft.as_ref().and_then(Draft::us_per_guess);
    drop(draft);
    text.handle = one;
    let single = rounds(row.timing(), None, || {
        let began = Instant::now();
        let got = text.plain(TIMED_TOKENS)?.len();
        Ok::<f64, Failure>(began.elapsed().as_secs_f64() * 1e6 / got.max(1) as f64)
    })?;
    let tally = tally.unwrap_or_default();
    let middle = row.args.context + TOKENS / 2;
    let bytes = wide.stream_bytes() + wide.kv_bytes(middle);
    let bandwidth = info.bandwidth.unwrap_or(context.target.bandwidth as f64);
    measured.verdict.device.clone_from(&info.name);
    let per_token = bytes as f64 * tally.windows as f64 / tally.tokens.max(1) as f64;
    measured.bytes = Some(per_token as u64);
    measured.set_samples(samples, per_token / bandwidth * 1e6, row.args.seed);
    report(measured, &tally, (plain_of(&single, alone), us_per_guess), guesses);
    Ok(info)
}

fn plain_of(single: &Samples, alone: &ScheduleConfig) -> serde_json::Value {
    let us = search::median(&single.of(Side::Candidate));
    json!({"us": us, "samples_us": single.rounds, "config": alone})
}

/// Adds what the windows gave, and the steps of one position beside them.
fn report(
    measured: &mut Measured,
    tally: &Tally,
    (plain, us_per_guess): (serde_json::Value, Option<f64>),
    guesses: &Guesses<'_>,
) {
    let most = guesses.most;
    let (us, one) = (measured.verdict.latency_us, plain["us"].as_f64());
    let per_step = tally.tokens as f64 / tally.windows.max(1) as f64;
    let ratio = us.zip(one).map(|(us, one)| one / us);
    let mut document = tally.to_json();
    document["guesses"] = most.into();
    document["draft"] = json!(guesses.draft.map(DraftModel::name));
    document["draft_us_per_guess"] = json!(us_per_guess);
    document["tokens_per_step"] = per_step.into();
    document["us_per_step"] = json!(us.map(|us| us * per_step));
    document["plain"] = plain;
    document["tokens_as_plain"] = true.into();
    document["times_plain"] = json!(ratio);
    let acceptance = tally.accepted as f64 / (tally.accepted + tally.rejected).max(1) as f64;
    let line = format!(
        "{per_step:.2} tokens per step of {} positions, {:.0}% of the guesses behind right ones were right; the tokens are those of plain decoding",
        most + 1,
        100.0 * acceptance
    );
    measured.lines.push(("windows", line));
    if let (Some(one), Some(ratio)) = (one, ratio) {
        measured.lines.push((
            "plain",
            format!("{one:.1} us per token; windows give {ratio:.2} x the tokens"),
        ));
    }
    if let Some(draft) = guesses.draft {
        let (name, drafted, us) =
            (draft.name(), tally.drafted, crate::report::maybe(us_per_guess, "us"));
        let line = format!("{drafted} of {} guesses by {name}, {us} each", tally.guessed);
        measured.lines.push(("draft", line));
    }
    measured.fields.insert("speculation".to_owned(), document);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses token 7 + position modulo 5 whatever the text is.
    struct Counting {
        windows: Vec<usize>,
        wrong: bool,
    }

    fn next(position: u32) -> u32 {
        7 + position % 5
    }

    impl Text for Counting {
        fn plain(&mut self, count: u32) -> Result<Vec<u32>, Failure> {
            Ok((0..count).map(|i| next(2 + i)).collect())
        }

        fn window(&mut self, position: u32, tokens: &[u32]) -> Result<WindowDecoded, Failure> {
            self.windows.push(tokens.len());
            let wrong = u32::from(self.wrong && self.windows.len() == 3);
            let chosen = (0..tokens.len() as u32).map(|i| Some(next(position + i) + wrong));
            Ok(WindowDecoded { chosen: chosen.collect() })
        }
    }

    fn of(acceptance: Option<f64>, wrong: bool) -> (Option<Tally>, usize) {
        let mut text = Counting { windows: Vec::new(), wrong };
        let truth = text.plain(80).unwrap();
        let prompt = [1, 2, 3];
        let (most, begins, draft) = (5, 0.3, None);
        let guesses = Guesses { prompt: &prompt, most, acceptance, begins, draft };
        let tally = block(&mut text, (&guesses, &truth), None, 64).unwrap();
        (tally, text.windows.len())
    }

    #[test]
    fn guesses_are_right_as_often_as_they_are_to_be() {
        let all = of(Some(1.0), false).0.unwrap();
        assert_eq!((all.accepted, all.rejected, all.tokens / all.windows), (all.guessed, 0, 6));
        let none = of(Some(0.0), false).0.unwrap();
        assert_eq!((none.accepted, none.windows), (0, 64));
        let some = of(Some(0.7), false).0.unwrap();
        let per_step = some.tokens as f64 / some.windows as f64;
        assert!((2.75..3.15).contains(&per_step), "{some:?}: 2.94 are expected");
        let acceptance = some.accepted as f64 / (some.accepted + some.rejected) as f64;
        assert!((0.65..0.75).contains(&acceptance), "{some:?}");
        let looked_up = of(None, false).0.unwrap();
        assert!(looked_up.accepted * 2 > looked_up.guessed, "{looked_up:?}");
    }

    #[test]
    fn a_token_that_plain_decoding_did_not_give_ends_the_block() {
        assert_eq!(of(Some(0.5), true), (None, 3));
    }
}
