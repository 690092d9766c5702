//! `amk propose`: the schedule to edit and every knob with its legal values.

use serde_json::{Value, json};

use crate::cli::ProposeArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

pub(crate) fn run(args: &ProposeArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let (config, from) = match &args.ledger {
        None => (context.default_config(), "the neutral schedule".to_owned()),
        Some(path) => incumbent(&context, path)?,
    };
    let space = ir::schedule::search_space(context.graph(), &context.target);
    let knobs = space.as_object().map_or(0, serde_json::Map::len);
    report::document(&json!({
        "schema": "amk.propose.v1",
        "model": context.graph().name,
        "target": context.target.name,
        "schedule_config": config,
        "schedule_id": config.id(),
        "search_space": space,
    }))?;
    report::say(&format!(
        "{from}; {knobs} knobs. Edit schedule_config (any subset of it is a config) and judge it: amk evaluate --config FILE"
    ));
    Ok(Exit::Yes)
}

/// The schedule that leads in a ledger.
fn incumbent(
    context: &Context,
    path: &std::path::Path,
) -> Result<(ir::schedule::ScheduleConfig, String), Failure> {
    let contents = corpus::read(path)?;
    let held = contents.header.get("model").and_then(Value::as_str).unwrap_or_default();
    let name = &context.graph().name;
    if contents.header.get("graph").and_then(Value::as_str) != Some(name) {
        return Err(Failure::usage(format!(
            "{} holds a search on {held}, not on {name}; give that --model",
            path.display()
        )));
    }
    let rows = super::search_loop::rows(&contents, path)?;
    let leads = |row: search::Row| match row {
        search::Row::Trial(trial) if trial.outcome.leads() => Some(trial),
        search::Row::Trial(_) | search::Row::Confirmation(_) => None,
    };
    match rows.into_iter().filter_map(leads).next_back() {
        Some(trial) => Ok((
            trial.config,
            format!("the incumbent of {}: trial {}", path.display(), trial.trial),
        )),
        None => Err(Failure::usage(format!(
            "{} has no correct schedule yet; run `amk loop --resume`",
            path.display()
        ))),
    }
}
