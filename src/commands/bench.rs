//! `amk bench`: microseconds a token, beside what else runs here.

use search::{Device, Expected, Gate, LatencyKind, Timing};
use serde_json::json;

use crate::cli::BenchArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::{peers, report};

/// Tokens that one block times.
const TIMED_TOKENS: u32 = 32;

pub(crate) fn run(args: &BenchArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let config = context.best_config(args.config.config.as_deref())?;
    if args.context == 0 || args.context >= context.kv_capacity {
        return Err(Failure::usage(format!(
            "--context {} is out of range: the key/value cache holds {}; raise --kv-capacity",
            args.context, context.kv_capacity
        )));
    }
    let mut device = context.open()?;
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let (graph, weights) = (context.graph(), &*context.model.weights);
    let positions = (args.context + TIMED_TOKENS).min(context.kv_capacity) as usize;
    let on_device = device.is_some().then_some(positions);
    let expected = Expected::new(graph, weights, context.kv_capacity, args.seed, on_device)
        .map_err(|e| Failure::usage(format!("{} cannot be evaluated: {e}", graph.name)))?;
    let mut gate =
        Gate::new(graph, weights, &context.target, context.lower_options(), &kernel_id, expected)
            .with_context(args.context)
            .with_timed_from(args.context as usize);
    let bandwidth = device.as_ref().and_then(|device| device.describe().bandwidth);
    let (verdict, outcome) = search::assess::evaluate(
        &mut gate,
        device.as_mut().map(|gpu| gpu as &mut dyn Device),
        &config,
        Timing { rounds: 24, warmup: 4 },
        args.seed,
    );
    if let Err(dropped) = &outcome {
        super::evaluate::stop_on_our_fault(dropped)?;
    }
    let peers = peers::look();
    super::evaluate::say(&verdict);
    if verdict.latency_kind == Some(LatencyKind::Predicted) {
        report::say("no GPU was used: the latency is a prediction, not a measurement");
    }
    for peer in &peers {
        report::say(&format!("  {:10} {}", peer.name, peer.note));
    }
    report::document(&json!({
        "schema": "amk.bench.v1",
        "model": graph.name,
        "target": context.target.name,
        "device": verdict.device,
        "context": args.context,
        "us_per_token": verdict.latency_us,
        "latency_kind": verdict.latency_kind,
        "ci_us": verdict.ci_us,
        "bound_us": verdict.bound_us,
        "pct_of_roofline": verdict.pct_of_roofline,
        "bandwidth_measured": bandwidth,
        "correct": verdict.correct,
        "rejected_reason": verdict.rejected_reason,
        "schedule_id": verdict.schedule_id,
        "program_id": verdict.program_id,
        "kernel_id": verdict.kernel_id,
        "peers": peers,
        "notes": verdict.notes,
    }))?;
    Ok(if verdict.correct && outcome.is_ok() { Exit::Yes } else { Exit::No })
}
