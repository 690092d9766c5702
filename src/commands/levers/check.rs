//! `amk levers --check`: how good the predicted gains are on this card. Changes of one knob are predicted, then measured, and
//! kept: what is said of later predictions follows from them.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use ir::schedule::{Knob, ScheduleConfig};
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use search::DeviceError;
use search::checks::{CHECKS_MIN, Check, Checked, Checks, Line, Past};
use search::measured_grid::{Answer, Probe, prepare};
use serde_json::{Value, json};

use super::super::measured_grid::{TIMED_TOKENS, prepared};
use super::{moved, predicted_us, written};
use crate::cli::LeversArgs;
use crate::context::Context;
use crate::failure::Failure;
use crate::spinner::Spinner;
use crate::{files, report};

/// Checks that come with the program.
const SHIPPED: &str = include_str!("../../../corpus/checks/h200.jsonl");
const CHECKS_BYTES_MAX: u64 = 16 << 20;
/// Rounds of four blocks, before and after each of which the unchanged schedule is timed.
const ROUNDS: usize = 6;

/// The past checks of the card, if there is one: those that come with the program, and those of the file.
pub(super) fn past(context: &Context, args: &LeversArgs) -> Result<Option<Past>, Failure> {
    let mut text = SHIPPED.to_owned();
    // The first `--check` begins the file.
    let begins = |path: &&PathBuf| args.check > 0 && !path.exists();
    if let Some(path) = args.checks.as_ref().filter(|path| !begins(path)) {
        text.push_str(&files::read_text(path, CHECKS_BYTES_MAX)?);
    }
    let all = Checks::read(&text).map_err(|(line, what)| {
        let line = line.saturating_sub(SHIPPED.lines().count());
        Failure::usage(format!("--checks line {line}: {what}"))
    })?;
    Ok(context.card().map(|card| Past::new(&all, &card)))
}

/// Why nothing is predicted on a card.
pub(super) fn refusal(past: &Past) -> String {
    format!(
        "predictions are not calibrated on this card: {} past checks, {CHECKS_MIN} are needed; make them with \
         `amk levers --model M --device cuda --check 40 --checks FILE`, and name the file",
        past.len()
    )
}

/// A change of one knob.
struct Change {
    /// `KNOB=VALUE`.
    text: String,
    config: ScheduleConfig,
    /// The predicted gain.
    gain_pct: f64,
}

/// Predicts changes of one knob, then measures each between two measurements of the unchanged schedule.
pub(super) fn run(
    context: &Context,
    args: &LeversArgs,
    config: &ScheduleConfig,
) -> Result<Value, Failure> {
    let no_gpu = || Failure::no_gpu("--check measures schedules");
    let mut device = context.open_process(&args.sharing)?.ok_or_else(no_gpu)?;
    let past = past(context, args)?.ok_or_else(no_gpu)?;
    let seed = past.len() as u64;
    let changes = changes(context, args, config, seed)?;
    let working = Spinner::through(changes.len(), "checks");
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let timed = args.context as usize..(args.context + TIMED_TOKENS) as usize;
    let gate = context.gate(seed, Some(timed.end), &kernel_id)?;
    let anchor = prepare(&gate, config)
        .map_err(|answer| Failure::refused(format!("the schedule itself: {answer:?}")))?;
    let ids = (anchor.0.program_id.clone(), anchor.0.kernel_id.clone());
    let card = context.card().unwrap_or_default();
    let mut probe = Probe::new(&gate, anchor, timed, ROUNDS, seed);
    let lost = |error: DeviceError| Failure::missing(error.to_string());
    let mut before = us(&probe.anchor(&mut device).map_err(lost)?)?;
    let configs: Vec<_> = (0..).zip(changes.iter().map(|change| change.config)).collect();
    let (mut made, mut failed) = (Vec::new(), Vec::new());
    prepared(&gate, &configs, |index, ready| {
        let Change { text, gain_pct, .. } = &changes[index as usize];
        let answer = match ready {
            Ok((candidate, reference)) => {
                probe.measure(&mut device, &candidate, reference).map_err(lost)?
            }
            Err(answer) => answer,
        };
        working.done();
        let Ok(took) = us(&answer) else {
            failed.push(json!({"change": text, "answer": answer}));
            return Ok(());
        };
        let after = us(&probe.anchor(&mut device).map_err(lost)?)?;
        let unchanged = f64::midpoint(before, after);
        before = after;
        made.push(Check {
            card: card.clone(),
            kernel_id: ids.1.clone(),
            program_id: ids.0.clone(),
            model: context.graph().name.clone(),
            context: args.context,
            change: text.clone(),
            predicted_pct: *gain_pct,
            measured_pct: 100.0 * (1.0 - took / unchanged),
        });
        Ok(())
    })?;
    drop(working);
    if let Some(path) = &args.checks {
        append(path, Checked { program_id: ids.0, schedule_config: *config }, &made)?;
    }
    let judged = past.judge(&made, config);
    let (held, of) = past.held(&judged);
    report::say(&format!(
        "checked: {}; {held} of {of} within the 80% interval of {} past checks",
        judged.say(),
        past.len()
    ));
    Ok(json!({
        "figures": judged.figures(), "past_checks": past.len(),
        "intervals": of, "intervals_held": held, "failed": failed,
        "each": made.into_iter().map(Line::Check).collect::<Vec<_>>(),
    }))
}

/// Legal changes of one knob to another program or kernel, drawn at random, with their predictions.
fn changes(
    context: &Context,
    args: &LeversArgs,
    start: &ScheduleConfig,
    seed: u64,
) -> Result<Vec<Change>, Failure> {
    let each = |&knob: &Knob| knob.values().into_iter().map(move |value| (knob, value));
    let mut moves: Vec<_> = Knob::ALL.iter().flat_map(each).collect();
    moves.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
    let ids = |config: &ScheduleConfig| {
        let program = context.lowered(config).ok()?;
        Some((program.id(), config.kernel.id()))
    };
    let before = predicted_us(context, args.context, start)?;
    let (mut known, mut changes) = (vec![ids(start)], Vec::new());
    for (knob, value) in moves {
        if changes.len() as u64 == args.check {
            break;
        }
        let Ok(config) = moved(start, knob, value) else { continue };
        let found = ids(&config);
        if found.is_none() || known.contains(&found) {
            continue;
        }
        known.push(found);
        let us = predicted_us(context, args.context, &config)?;
        let text = written(knob, &config);
        changes.push(Change { text, config, gain_pct: 100.0 * (1.0 - us / before) });
    }
    Ok(changes)
}

/// The time of a measured schedule.
fn us(answer: &Answer) -> Result<f64, Failure> {
    let Answer::Measured(measured) = answer else {
        return Err(Failure::refused(format!("not measured: {answer:?}")));
    };
    Ok(measured.us)
}

/// Adds checks to a file, after the schedule that they changed.
fn append(path: &Path, schedule: Checked, checks: &[Check]) -> Result<(), Failure> {
    let lines = checks.iter().cloned().map(Line::Check);
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::options().create(true).append(true).open(path)?);
        for line in std::iter::once(Line::Schedule(schedule)).chain(lines) {
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        }
        out.flush()
    };
    write().map_err(Failure::cannot("write", path, "choose another file"))
}
