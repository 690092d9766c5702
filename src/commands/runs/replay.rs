//! `amk runs replay`: repeats a trial of a run. A stage that cannot run here is reported, and is not a failure.

use schemars::JsonSchema;
use search::replay::{Place, Repeated, Stage, replay};
use search::{Conditions, Device, LatencyKind, device_positions};
use serde::Serialize;
use serde_json::Value;

use super::recorded::Recorded;
use crate::cli::{DeviceChoice, PlaceArgs, ReplayArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::report::{self, Answer};
use crate::spinner::Spinner;

/// How a trial went again.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Replayed {
    #[schemars(extend("const" = "amk.replay.v1"))]
    schema: &'static str,
    run: String,
    trial: u64,
    same: bool,
    /// Each is the same, differs or was skipped, and why.
    #[schemars(with = "Vec<Value>")]
    stages: Vec<Stage>,
}

pub(crate) fn answer(args: &ReplayArgs) -> Result<Answer<Replayed>, Failure> {
    let found = Recorded::open(&args.path)?;
    let trial = match args.trial {
        None => found.champion(),
        Some(number) => found.trials.iter().find(|trial| trial.trial == number),
    };
    let trial = trial.ok_or_else(|| {
        let last = found.trials.len().saturating_sub(1);
        Failure::usage(format!("{} has no such trial: 0 to {last}", found.ledger.display()))
    })?;
    let context = context(&found, args.device)?;
    let seed = found.header.get("seed").and_then(Value::as_u64).unwrap_or(0);
    let mut stages = vec![files(&found), graph(&found, &context)];
    if stages.iter().all(|stage| stage.result != Repeated::Differs) {
        let measured = trial.verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
        let recorded = found.card(trial.card);
        let mut device = if measured { card(&context, args, recorded.as_ref())? } else { None };
        let kernel_id = |kernel: &_| context.kernel_id(kernel);
        let positions = measured.then(|| device_positions(context.graph()));
        let contexts = found.header.get("contexts").cloned().unwrap_or_default();
        let contexts: Vec<u32> = serde_json::from_value(contexts).unwrap_or_default();
        let mut gate = context.gate_at(seed, positions, &kernel_id, &contexts)?;
        let here = device.as_ref().map(|gpu| crate::conditions::of(gpu.describe()));
        let place = match (elsewhere(recorded.as_ref(), here.as_ref()), &mut device) {
            (None, Some(device)) => Place::Here(device as &mut dyn Device),
            (Some(why), _) => Place::Elsewhere(why),
            (None, None) => Place::Elsewhere("no GPU: none was found, or --device cpu".to_owned()),
        };
        let working = Spinner::on(format!("running trial {} again", trial.trial));
        let done = replay(&mut gate, place, trial, found.noise_floor(trial.card), seed);
        drop(working);
        stages.extend(done.map_err(|dropped| Failure::from(&dropped))?);
    }
    let same = stages.iter().all(|stage| stage.result != Repeated::Differs);
    for Stage { stage, result, detail } in &stages {
        let word = match result {
            Repeated::Same => "same",
            Repeated::Differs => "DIFFERS",
            Repeated::Skipped => "skipped",
        };
        report::say(&format!("  {stage:9} {word:7} {detail}"));
    }
    let (run, trial) = (found.run.clone(), trial.trial);
    let document = Replayed { schema: "amk.replay.v1", run, trial, same, stages };
    Ok(Answer { document, exit: if same { Exit::Yes } else { Exit::No } })
}

/// The GPU that measured the trial, if it is here; else the GPU that a search would use.
fn card<'a>(
    context: &'a Context,
    args: &ReplayArgs,
    recorded: Option<&Conditions>,
) -> Result<Option<remote::Remote<'a>>, Failure> {
    let uuid = recorded.and_then(|card| card.uuid.as_deref());
    let ordinal = uuid.and_then(|uuid| crate::device::probe::find(uuid).ok().flatten());
    match ordinal {
        Some(ordinal) if context.has_device()? => {
            context.open_process_at(ordinal, &args.sharing).map(Some)
        }
        Some(_) | None => context.open_process(&args.sharing),
    }
}

/// The model of the run, on the device of the replay.
fn context(found: &Recorded, device: DeviceChoice) -> Result<Context, Failure> {
    let missing =
        |what: &str| Failure::usage(format!("{} does not say its {what}", found.ledger.display()));
    let capacity = found.header.get("kv_capacity").and_then(Value::as_u64);
    let place = PlaceArgs {
        target: Some(found.word("target").ok_or_else(|| missing("target"))?.to_owned()),
        device,
        kv_capacity: capacity.and_then(|tokens| u32::try_from(tokens).ok()),
        ..PlaceArgs::default()
    };
    let context = Context::load(found.word("model").ok_or_else(|| missing("model"))?, &place)?;
    let batch = found.header.get("batch").and_then(Value::as_u64).unwrap_or(1);
    context.for_steps_of(u32::try_from(batch).unwrap_or(u32::MAX))
}

/// The ledger was read and was valid; an invalid run was refused before.
fn files(found: &Recorded) -> Stage {
    let detail = format!("{} rows follow from each other and their samples", found.rows);
    Stage { stage: "files", result: Repeated::Same, detail }
}

fn graph(found: &Recorded, context: &Context) -> Stage {
    let now = context.graph().id();
    match found.word("graph_id") {
        None => Stage::skipped("graph", "the ledger is from before the graph's id was kept"),
        Some(then) => Stage {
            stage: "graph",
            result: if then == now { Repeated::Same } else { Repeated::Differs },
            detail: format!("recorded {then}, now {now}"),
        },
    }
}

/// Why a time measured here need not match, if it need not.
fn elsewhere(then: Option<&Conditions>, here: Option<&Conditions>) -> Option<String> {
    let here = here?;
    match then {
        None => Some("the ledger does not say where it was measured".to_owned()),
        Some(then) => then.differs(here),
    }
}
