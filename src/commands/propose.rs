//! `amk propose`: the schedule to edit and every knob with its legal values.

use ir::Rule;
use ir::schedule::{Knob, ScheduleConfig, validate};
use lower::{Predictor, Rates};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::runs::recorded::Recorded;
use crate::cli::ProposeArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::report::{self, Answer};

/// A schedule to start from.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Proposal {
    #[schemars(extend("const" = "amk.propose.v1"))]
    schema: &'static str,
    model: String,
    target: String,
    /// The schedule; any subset of it is a config.
    schedule_config: ScheduleConfig,
    /// Its hash.
    schedule_id: String,
    /// Its time by the cost model.
    predicted: Prediction,
    /// Each knob's dotted path with its type, legal values and default, what it acts on and what it decides.
    search_space: Map<String, Value>,
}

/// Predicted microseconds of a step of one sequence.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Prediction {
    /// The step.
    us_per_token: f64,
    /// Reading its bytes, the least that it can take.
    bound_us: f64,
    /// Its critical path if bytes cost nothing.
    chain_us: f64,
    /// Tokens of context.
    context: u32,
}

pub(crate) fn answer(args: &ProposeArgs) -> Result<Answer<Proposal>, Failure> {
    let context = Context::of_shape(&args.model)?;
    refuse_without_ops(&context)?;
    let (config, from) = match &args.ledger {
        None => (context.default_config(), "the rule-based default".to_owned()),
        Some(path) => incumbent(&context, path)?,
    };
    let space = ir::schedule::search_space(context.graph(), &context.target);
    let Value::Object(search_space) = space else {
        return Err(Failure::bug("a search space is no object"));
    };
    if !report::prints_documents() {
        let row = |knob: &Knob| (knob.path(), config.get(*knob).to_string());
        report::table(&Knob::ALL.iter().map(row).collect::<Vec<_>>());
    }
    report::say(&format!(
        "{from}; {} knobs. Edit schedule_config (any subset of it is a config) and judge it: amk evaluate --config FILE. --json prints it with the search space",
        search_space.len()
    ));
    report::say(&bound(&context));
    let predicted = predicted(&context, &config)?;
    let Prediction { us_per_token, context: tokens, .. } = predicted;
    report::say(&format!(
        "Predicted: {us_per_token:.0} us per token at {tokens} tokens of context"
    ));
    let document = Proposal {
        schema: "amk.propose.v1",
        model: context.graph().name.clone(),
        target: context.target.name.clone(),
        schedule_config: config,
        schedule_id: config.id(),
        predicted,
        search_space,
    };
    Ok(Answer { document, exit: Exit::Yes })
}

/// What the cost model says of a schedule.
fn predicted(context: &Context, config: &ScheduleConfig) -> Result<Prediction, Failure> {
    let (program, tokens) = (context.lowered(config)?, context.predicted_at());
    let predictor = Predictor::new(&program, &config.kernel, &context.target, tokens);
    let cost = predictor.predict(Rates::shipped());
    Ok(Prediction {
        us_per_token: cost.latency_us,
        bound_us: cost.bound_us,
        chain_us: predictor.chain_us(Rates::shipped()),
        context: tokens,
    })
}

/// Refuses a model beyond what the ops can do, with the least time that a step of it would take.
fn refuse_without_ops(context: &Context) -> Result<(), Failure> {
    let (graph, target) = (context.graph(), &context.target);
    let Err(violations) = validate(context.default_config(), graph, target) else { return Ok(()) };
    if !violations.has(Rule::SGraph) {
        return Ok(());
    }
    Err(Failure::refused(format!("{violations}. {}", bound(context))))
}

/// The weights that a step reads, and the least time that this takes.
fn bound(context: &Context) -> String {
    let (graph, target) = (context.graph(), &context.target);
    let (step, all) = (graph.step_bytes(), graph.weight_bytes());
    let mb = |bytes: usize| bytes as f64 / 1e6;
    format!(
        "A step reads {:.1} MB of the {:.1} MB of weights, which takes {:.0} us on {}",
        mb(step),
        mb(all),
        step as f64 / target.total_bandwidth() as f64 * 1e6,
        target.name,
    )
}

fn incumbent(
    context: &Context,
    path: &std::path::Path,
) -> Result<(ScheduleConfig, String), Failure> {
    let found = Recorded::read(path)?;
    let (held, name) = (found.word("model").unwrap_or_default(), &context.graph().name);
    if found.word("graph") != Some(name) {
        return Err(Failure::usage(format!(
            "{} holds a search on {held}, not on {name}; give that --model",
            path.display()
        )));
    }
    match found.champion() {
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
