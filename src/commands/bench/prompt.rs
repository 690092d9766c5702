//! A prompt in chunks, compared with the bound of the card's arithmetic and memory; its logits with those of the same
//! prompt token by token. A mixture may choose other experts in a chunk than in a step, so the first tokens of its prompt
//! are compared with the graph on the routes of their chunk.

use std::sync::Arc;
use std::time::Instant;

use ir::{Graph, Target};
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use reference_vm::eval::Evaluator;
use reference_vm::routes::Routes;
use remote::Served;
use search::{DeviceInfo, Handle, Verdict, draw_tokens};
use serde_json::json;
use vm_device::{ARCHITECTURES, Architecture};
use vm_host::{PrefillOptions, Prefilled};

use super::decode::evaluated_max;
use super::{Measured, Row, rounds};
use crate::device::Gpu;
use crate::failure::Failure;
use crate::report;

/// The longest chunk whose last layer runs all of its tokens.
const JUDGED_MAX: usize = 128;
/// How far the best expert left out may be above the worst one chosen: both are as wrong as logits may be (decision 026).
const ROUTE_MAX: f64 = 2.0 * Accuracy::REL_MAX;

pub(super) fn measure(row: &Row<'_>, tokens: u32) -> Result<Measured, Failure> {
    let (args, context, config) = (row.args, &row.context, row.chosen.config);
    let program = Arc::new(context.lowered(&config)?);
    let others = context.others(&args.sharing)?.ok_or_else(|| row.no_gpu())?;
    let mut device = row.open()?;
    let info = DeviceInfo { other_processes: others, ..device.describe() };
    let mut verdict = Verdict::new(&context.graph().name, &context.target.name, &info.name);
    verdict.schedule_id = Some(config.id());
    let Target { devices, arch, .. } = &context.target;
    verdict.kernel_id = Some(vm_host::prefill_kernel_id(context.graph(), *devices, arch));
    (verdict.valid, verdict.correct) = (true, true);
    let mut measured = Measured::new(verdict, config, Some(info.clone()));

    let handle = device.prepare(&program, &config.kernel)?;
    let prompt = draw_tokens(args.seed, context.graph().vocab, tokens as usize);
    let options = PrefillOptions::default();
    let samples = rounds(row.timing(), info.uuid.as_deref(), || {
        let done = device.prefill(handle, (1, 0), &prompt, true, &options);
        done.map(|(done, _)| done.device_us)
    })?;
    let profiled = PrefillOptions { profile: true, ..options };
    let (last, chunks) = device.prefill(handle, (1, 0), &prompt, true, &profiled)?;
    if last.clamped {
        return Err(Failure::refused(
            "values exceed the range of f16: this model's prompts run token by token",
        ));
    }
    let on_routes = match context.graph().has_experts() {
        true => Some(on_routes(row, &mut device, handle, &prompt)?),
        false => None,
    };
    // The first token launches the kernel, which is not part of the prompt's time.
    device.feed(handle, (0, 0), &prompt[..1], (true, &mut || {}))?;
    let began = Instant::now();
    let steps = device.feed(handle, (0, 0), &prompt, (true, &mut || {}))?;
    let steps_us = began.elapsed().as_secs_f64() * 1e6;
    let (expected, actual) = match &on_routes {
        Some(judged) => (&judged.expected, &judged.actual),
        None => (&steps, &chunks),
    };
    let accuracy = Accuracy::of(
        std::slice::from_ref(expected),
        std::slice::from_ref(actual),
        Tolerance::device_limit(context.graph().kv_dtype),
    );
    let missing = || Failure::refused("the device gave no logits of the prompt's last token");
    measured.set_accuracy(Some(accuracy.ok_or_else(missing)?));
    if let Some(judged) = &on_routes {
        judged.tell(&mut measured);
    }
    let bandwidth = info.bandwidth.unwrap_or(context.target.bandwidth as f64);
    let bound = bound_us(context.graph(), &context.target, &last, bandwidth);
    measured.set_samples(samples, bound, args.seed);
    beside(&mut measured, &last, steps_us);
    Ok(measured)
}

/// The first tokens of a mixture's prompt: the logits of their chunk, and those of the graph on its routes.
struct OnRoutes {
    tokens: usize,
    actual: Vec<f32>,
    expected: Vec<f32>,
    /// Choices in all, and those that are not the graph's.
    choices: usize,
    strays: usize,
    /// How far a choice is from the graph's at most.
    gap: f64,
}

fn on_routes(
    row: &Row<'_>,
    device: &mut Gpu<'_>,
    handle: Handle,
    prompt: &[u32],
) -> Result<OnRoutes, Failure> {
    let graph = row.context.graph();
    let tokens = prompt.len().min(JUDGED_MAX).min(evaluated_max(graph));
    let head = &prompt[..tokens];
    let options = PrefillOptions::default();
    let (_, actual) = device.prefill(handle, (1, 0), head, true, &options)?;
    let layers = device.chunk_routes(tokens as u32)?;
    let mut routes = Routes::new(layers.len());
    for token in 0..tokens {
        routes.push(layers.iter().filter_map(|layer| layer.chosen.get(token).cloned()));
    }
    report::say(&format!("evaluating the graph on the routes of {tokens} tokens"));
    let unevaluated = |error| row.context.unevaluated(error);
    let evaluator = Evaluator::new(graph, &*row.context.model.weights).map_err(unevaluated)?;
    let mut evaluator = evaluator.on_routes(0, routes).recording_routes();
    let mut rows = evaluator.run_at(head, &[tokens - 1]).map_err(unevaluated)?;
    let (Some(expected), Some(routed)) = (rows.pop(), evaluator.routed()) else {
        return Err(Failure::refused("the graph chose no experts"));
    };
    let (choices, strays) = (tokens * layers.len(), routed.strays(tokens));
    Ok(OnRoutes { tokens, actual, expected, choices, strays, gap: routed.worst().gap })
}

impl OnRoutes {
    /// Adds how many choices differ; refuses those that rounding does not explain.
    fn tell(&self, measured: &mut Measured) {
        let Self { tokens, choices, strays, gap, .. } = *self;
        if gap.is_nan() || gap > ROUTE_MAX {
            measured.refuse(format!(
                "a chunk chose an expert whose logit is {gap:.1e} of the greatest below another: at most {ROUTE_MAX:.0e} is rounding"
            ));
        }
        let line =
            format!("{strays} of {choices} choices of {tokens} tokens, by {gap:.1e} at most");
        measured.lines.push(("other experts", line));
        let fields = [
            ("judged_tokens", json!(tokens)),
            ("choices", json!(choices)),
            ("other_choices", json!(strays)),
        ];
        measured.fields.extend(fields.map(|(name, value)| (name.to_owned(), value)));
    }
}

/// The roofline bound: arithmetic, or reading all weights once per chunk, whichever takes longer. Of experts those of one
/// token: which others a chunk reads follows from its routes.
fn bound_us(graph: &Graph, target: &Target, last: &Prefilled, bandwidth: f64) -> f64 {
    // The card is here, so there is a kernel for its architecture.
    let row = Architecture::named(&target.arch).unwrap_or(&ARCHITECTURES[0]);
    let sms = f64::from(target.sms * target.devices);
    let peak = sms * row.flop_per_cycle * f64::from(target.clock_mhz) * 1e6;
    let weights = if graph.has_experts() { graph.step_bytes() } else { graph.weight_bytes() };
    let bytes = weights as f64 * f64::from(last.chunks);
    (last.flop / peak).max(bytes / bandwidth) * 1e6
}

/// Adds the chunks, the kernels and the time token by token.
fn beside(measured: &mut Measured, last: &Prefilled, steps_us: f64) {
    let us = measured.verdict.latency_us.unwrap_or(f64::NAN);
    let (chunks, rate) = (last.chunks, last.flop / us / 1e6);
    measured.lines.push(("chunks", format!("{chunks}, {rate:.0} TFLOP/s")));
    let slower = format!("{steps_us:.1} us token by token, {:.0} x", steps_us / us);
    measured.lines.push(("steps", slower));
    measured.lines.extend(last.kernels.iter().map(|time| {
        let rate = if time.flop > 0.0 {
            format!(", {:.0} TFLOP/s", time.flop / time.us / 1e6)
        } else {
            String::new()
        };
        (time.kernel, format!("{:.1} us in {} launches{rate}", time.us, time.launches))
    }));
    let fields = [
        ("chunks", json!(last.chunks)),
        ("flop", json!(last.flop)),
        ("steps_us", json!(steps_us)),
        ("kernels", json!(last.kernels)),
    ];
    measured.fields.extend(fields.map(|(name, value)| (name.to_owned(), value)));
}
