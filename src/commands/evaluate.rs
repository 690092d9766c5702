//! `amk evaluate`: one structured verdict on one schedule.

use ir::Violations;
use schemars::JsonSchema;
use search::{Assessed, Decision, Device, Gate, Rejection, Timing, Verdict, device_positions};
use serde::Serialize;
use serde_json::json;

use crate::cli::EvaluateArgs;
use crate::commands::program::say_divergence;
use crate::commands::rerun::{self, Inputs, Place};
use crate::commands::search_loop::MIN_GAIN_MEASURED;
use crate::context::Context;
use crate::device::probe::without_kernel;
use crate::failure::{Exit, Failure, Outcome};
use crate::report::{self, Answer};
use crate::schedule_choice::{self, Auto, Chosen, ScheduleSource};
use crate::spinner::Spinner;

pub(crate) fn run(args: &EvaluateArgs) -> Outcome {
    let (answer, races) = judge(args)?;
    races.map_or_else(|| answer.print(), Ok)
}

pub(crate) fn answer(args: &EvaluateArgs) -> Result<Answer<Judgement>, Failure> {
    judge(args).map(|(answer, _)| answer)
}

/// A verdict and the schedule it judges.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Judgement {
    #[serde(flatten)]
    pub(crate) verdict: Verdict,
    /// The source of the schedule. None if it is illegal.
    schedule_source: Option<ScheduleSource>,
}

/// The verdict on one schedule. With races against copies, also their exit code; their document is printed then.
fn judge(args: &EvaluateArgs) -> Result<(Answer<Judgement>, Option<Exit>), Failure> {
    let context = Context::new(&args.model)?;
    let tokens = context.predicted_at();
    let chosen = schedule_choice::judged(&context, &args.config, tokens, Auto::Reproducible)?;
    let mut device = context.open_process(&args.sharing)?;
    if args.aa.is_some() && device.is_none() {
        return Err(Failure::no_gpu("--aa is for what is measured"));
    }
    let Chosen { config, source } = match chosen {
        Ok(chosen) => chosen,
        Err(violations) => {
            let schedule_source = None;
            let name = device.as_ref().map_or_else(|| "cpu".to_owned(), |d| d.describe().name);
            let mut verdict = Verdict::new(&context.graph().name, &context.target.name, &name);
            search::assess::refuse(&mut verdict, &Rejection::Rejected(violations.clone()));
            say_violations(&violations);
            let document = Judgement { verdict, schedule_source };
            return Ok((Answer { document, exit: Exit::No }, None));
        }
    };
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let working = Spinner::on(format!("judging a schedule of {}", context.graph().name));
    let positions = device.is_some().then(|| device_positions(context.graph()));
    let mut gate = context.gate(args.seed, positions, &kernel_id)?;
    let (mut verdict, outcome) = search::assess::evaluate(
        &mut gate,
        device.as_mut().map(|gpu| gpu as &mut dyn Device),
        &config,
        Timing::default(),
        args.seed,
    );
    drop(working);
    if let Err(dropped) = &outcome {
        stop_on_our_fault(dropped)?;
    }
    if let Some(found) = &mut verdict.first_divergence {
        let inputs = Inputs::Schedule {
            config: &config,
            default: context.default_config(),
            seed: args.seed,
        };
        found.rerun = rerun::command(&Place::of(&context), &inputs, found);
    }
    verdict.notes.extend(without_kernel(&context.target));
    say(&verdict);
    let mut races = None;
    if let (Some(count), Some(device), Ok(assessed)) = (args.aa, &mut device, &outcome) {
        let copies = (count.into(), args.seed);
        races = Some(same(&mut gate, device, assessed, &verdict, copies)?);
    }
    let exit = if verdict.correct && outcome.is_ok() { Exit::Yes } else { Exit::No };
    let document = Judgement { verdict, schedule_source: Some(source) };
    Ok((Answer { document, exit }, races))
}

/// Races a program against its copy and reports how often a search would have kept the copy.
fn same(
    gate: &mut Gate<'_>,
    device: &mut dyn Device,
    assessed: &Assessed,
    verdict: &Verdict,
    (count, seed): (usize, u64),
) -> Outcome {
    let timing = Timing::default();
    let equals = search::equals(gate, device, assessed, timing, MIN_GAIN_MEASURED, (count, seed))
        .map_err(|dropped| match Failure::from(&dropped) {
        Failure { exit: Exit::No, message } => {
            Failure::refused(format!("a copy of the program is out: {message}"))
        }
        fault => fault,
    })?;
    let (kept, most) = (equals.kept(), equals.kept_max());
    let document = aa_document(verdict, &equals);
    report::say(&format!(
        "A/A: {kept} of {count} equal candidates kept (at most {most}), {} reverted, {} inconclusive; intervals {:.2} % wide, threshold {:.2} %",
        document["reverted"],
        document["inconclusive"],
        100.0 * equals.width(),
        100.0 * equals.threshold
    ));
    report::document(&document)?;
    Ok(if kept <= most { Exit::Yes } else { Exit::No })
}

pub(super) fn aa_document(verdict: &Verdict, equals: &search::Equals) -> serde_json::Value {
    let of = |decision| equals.all.iter().filter(|equal| equal.decision == decision).count();
    json!({
        "schema": "amk.aa.v1",
        "verdict": verdict,
        "comparisons": equals.all.len(),
        "kept": equals.kept(),
        "kept_max": equals.kept_max(),
        "reverted": of(Decision::Reverted),
        "inconclusive": of(Decision::Inconclusive),
        "interval_width_median": equals.width(),
        "noise_floor": equals.noise_floor,
        "threshold": equals.threshold,
        "holds": equals.kept() <= equals.kept_max(),
        "all": equals.all,
    })
}

/// Ends the command if the failure is not the schedule's fault.
pub(crate) fn stop_on_our_fault(dropped: &Rejection) -> Result<(), Failure> {
    let failure = Failure::from(dropped);
    if failure.exit == Exit::No { Ok(()) } else { Err(failure) }
}

fn say_violations(violations: &Violations) {
    let total = violations.total();
    report::say(&format!("rejected: {total} violation{}", if total == 1 { "" } else { "s" }));
    for violation in violations.list() {
        report::say(&format!("  {violation}"));
    }
}

pub(crate) fn say(verdict: &Verdict) {
    let kind = verdict.latency_kind.map_or("", search::LatencyKind::name);
    let mut rows = vec![
        ("model", format!("{} on {}", verdict.model, verdict.target)),
        ("device", verdict.device.clone()),
    ];
    for gate in &verdict.gates {
        let mark = if gate.passed { "yes" } else { "NO " };
        rows.push((&gate.gate, format!("{mark} {}", gate.detail)));
    }
    let share = report::maybe(verdict.pct_of_roofline, "% of the bound");
    rows.push(("latency", format!("{} {kind}, {share}", report::maybe(verdict.latency_us, "us"))));
    for note in &verdict.notes {
        rows.push(("note", note.clone()));
    }
    report::table(&rows);
    say_divergence(verdict.first_divergence.as_ref());
}
