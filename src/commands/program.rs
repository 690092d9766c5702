//! `amk lower`, `verify`, `disasm` and `interpret`: programs as files.

use ir::program::{Program, Verified};
use reference_vm::divergence::Examiner;
use reference_vm::machine::Machine;
use search::{Expected, FirstDivergence, Rejection};
use serde_json::{Value, json};

use crate::cli::{FileArgs, InterpretArgs, LowerArgs};
use crate::commands::rerun::{self, Inputs, Place};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::spinner::Spinner;
use crate::{files, models, report};

pub(crate) fn lower(args: &LowerArgs) -> Outcome {
    args.output.as_deref().map_or(Ok(()), files::check_place)?;
    let context = Context::of_shape(&args.model)?;
    let tokens = context.predicted_at();
    let Chosen { config, source } = choose(&context, &args.config, tokens, Auto::Reproducible)?;
    let program = context.lowered(&config)?;
    report::say(&format!(
        "program {} of {} for {}: {} tasks on {} workers, {} counters, {:.1} MB of weights per step",
        program.id(),
        context.graph().name,
        context.target.name,
        program.task_len(),
        program.workers.len(),
        program.counters,
        program.stream_bytes() as f64 / 1e6
    ));
    if let Some(path) = &args.output {
        files::save(&program, path)?;
        report::say(&format!("saved to {}", path.display()));
    }
    let mut document = facts(&program);
    document["schema"] = "amk.lower.v2".into();
    document["model"] = context.graph().name.clone().into();
    document["target"] = context.target.name.clone().into();
    document["schedule_id"] = config.id().into();
    document["numeric_id"] = ir::schedule::numeric_id(&config).into();
    document["schedule_source"] = json!(source);
    document["kernel_id"] = context.kernel_id(&config.kernel).into();
    document["output"] = json!(args.output);
    report::document(&document)?;
    Ok(Exit::Yes)
}

fn facts(program: &Program) -> Value {
    json!({
        "schema": null,
        "model": program.model,
        "program_id": program.id(),
        "tasks": program.task_len(),
        "workers": program.workers.len(),
        "devices": program.topology.devices,
        "n_buffers": program.buffers.len(),
        "n_counters": program.counters,
        "weight_mb": program.stream_bytes() as f64 / 1e6,
        "kv_capacity": program.kv_capacity,
    })
}

pub(crate) fn verify(args: &FileArgs) -> Outcome {
    let program = files::open(&args.file)?;
    let checked = ir::program::check(&program);
    let mut document = facts(&program);
    document["schema"] = "amk.verify.v1".into();
    document["verified"] = checked.is_ok().into();
    document["violations"] = json!(checked.as_ref().err().map_or(&[][..], |v| v.list()));
    document["n_violations"] = checked.as_ref().err().map_or(0, |v| v.total()).into();
    match &checked {
        Ok(()) => {
            report::say("verified: no deadlock, no race, every tile once, within every limit")
        }
        Err(violations) => {
            report::say("NOT verified:");
            violations.to_string().lines().for_each(report::say);
        }
    }
    report::document(&document)?;
    Ok(if checked.is_ok() { Exit::Yes } else { Exit::No })
}

pub(crate) fn disasm(args: &FileArgs) -> Outcome {
    let program = files::open(&args.file)?;
    report::text(&ir::text::print(&program))?;
    Ok(Exit::Yes)
}

pub(crate) fn interpret(args: &InterpretArgs) -> Outcome {
    let program = files::verified(&args.file)?;
    let mut model = models::load(&args.model)?;
    model.graph.kv_dtype = program.kv_dtype(); // a saved program was lowered for it
    let graph = &model.graph;
    let working = Spinner::on(format!("running {} on the reference VM", graph.name));
    let mut machine = Machine::new(&program, graph, &*model.weights).map_err(|e| {
        Failure::usage(format!("{} does not run on {}: {e}", args.file.display(), graph.name))
    })?;
    let expected = inputs(args, &program, &model)
        .map_err(|e| Failure::usage(format!("{} cannot be evaluated: {e}", graph.name)))?;
    let mut chosen = Vec::new();
    let agreement = match expected.examine_into(&mut machine, &mut chosen) {
        Err(Rejection::Unrunnable(e)) => {
            return Err(Failure::usage(format!("the tokens cannot be fed: {e}")));
        }
        Err(halted @ Rejection::Halted(_)) => return Err(Failure::refused(halted.to_string())),
        judged => judged,
    };
    let summary = agreement.as_ref().ok().map(|agreement| agreement.summary());
    let reason = agreement.as_ref().err().map(ToString::to_string);
    let located = reason.as_ref().and_then(|_| locate(args, &program, &model, &expected));
    drop(working);
    let scope = expected.reference_scope();
    report::document(&json!({
        "schema": "amk.interpret.v1",
        "model": graph.name,
        "program_id": program.id(),
        "tokens": expected.reference_tokens().collect::<Vec<_>>(),
        "next_tokens": chosen,
        "scope": scope,
        "correct": reason.is_none(),
        "disagreement": reason,
        "first_divergence": located,
        "max_abs_err": summary.map(|s| s.max_abs_err),
        "max_rel_err": summary.map(|s| s.max_rel_err),
        "top1_agreement": summary.map(|s| s.top1_agreement),
    }))?;
    report::say(&match &reason {
        None => format!("agrees with the graph at {scope}"),
        Some(reason) => format!("DISAGREES: {reason}"),
    });
    say_divergence(located.as_ref());
    Ok(if reason.is_none() { Exit::Yes } else { Exit::No })
}

/// The inputs of a search's gate, or the given tokens; both with the gate's bounds.
fn inputs(
    args: &InterpretArgs,
    program: &Program,
    model: &model::Model,
) -> Result<Expected, search::ExpectedError> {
    let (graph, weights) = (&model.graph, &*model.weights);
    if args.tokens.is_empty() {
        return Expected::new(graph, weights, program.kv_capacity, args.seed, None);
    }
    Expected::on_tokens(graph, weights, args.tokens.clone())
}

/// The first task that diverges on these inputs.
fn locate(
    args: &InterpretArgs,
    program: &Verified<Program>,
    model: &model::Model,
    expected: &Expected,
) -> Option<FirstDivergence> {
    let (graph, weights) = (&model.graph, &*model.weights);
    let examiner = Examiner::new(graph, weights).ok()?;
    let mut machine = Machine::new(program, graph, weights).ok()?;
    let at = expected.diverges(&examiner, &mut machine, None)?;
    let mut found = FirstDivergence::of(program, "reference", &at);
    let kv_dtype = program.kv_dtype();
    let place = Place { model: &args.model, target: None, kv_capacity: None, kv_dtype };
    let inputs = Inputs::Program { file: &args.file, tokens: &args.tokens, seed: args.seed };
    found.rerun = rerun::command(&place, &inputs, &found);
    Some(found)
}

/// Prints where a program diverges, and the command to rerun that task.
pub(super) fn say_divergence(found: Option<&FirstDivergence>) {
    let Some(found) = found else { return };
    report::say(&format!("first divergence: {}", found.detail));
    if let Some(command) = &found.rerun {
        report::say(&format!("that task again: {command}"));
    }
}
