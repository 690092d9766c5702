//! `amk bench --prefill N`: milliseconds of a prompt in chunks, compared with the bound of the card's arithmetic and
//! memory, and whether the logits after it equal those of the same prompt token by token.

use std::sync::Arc;
use std::time::Instant;

use ir::schedule::ScheduleConfig;
use ir::{Graph, Target};
use remote::Served;
use search::{Conditions, draw_tokens};
use serde_json::{Value, json};
use vm_device::{ARCHITECTURES, Architecture};
use vm_host::{PrefillOptions, Prefilled};

use super::bench::blocks::Blocks;
use super::bench::evidence;
use crate::cli::BenchArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose};
use crate::{conditions, report};

/// Timed runs, after one warm-up.
const RUNS: usize = 10;
/// Bound on the relative error: the norm of the difference of the logits over their norm, for both ways to run a prompt.
const ERROR_MAX: f64 = 5e-3;

struct Measured {
    /// Milliseconds.
    ms: Blocks,
    last: Prefilled,
    /// Milliseconds of the same prompt token by token.
    steps_ms: f64,
    error: f64,
    top1: [Option<usize>; 2],
    bandwidth: f64,
    conditions: Conditions,
    config: ScheduleConfig,
    source: ScheduleSource,
}

impl Measured {
    /// Whether chunks and steps agree.
    fn holds(&self) -> bool {
        self.error <= ERROR_MAX
    }
}

pub(crate) fn run(args: &BenchArgs, tokens: u32) -> Outcome {
    let mut context = Context::new(&args.model)?;
    let most = context.positions_max();
    if tokens == 0 || tokens > most {
        let message =
            format!("--prefill {tokens} is out of range: a prompt has 1 to {most} tokens");
        return Err(Failure::usage(message));
    }
    context.kv_capacity = context.kv_capacity.max(tokens);
    if let Some(why) = vm_host::prefill_refused(context.graph()) {
        return Err(Failure::usage(format!("--prefill: {why}")));
    }
    let measured = measure(args, &context, tokens)?;
    let bound = bound_ms(context.graph(), &context.target, &measured);
    say(&context, tokens, &measured, bound);
    let document = document(&context, args.seed, tokens, &measured, bound);
    report::document(&evidence(document, &measured.config, Some(&measured.conditions)))?;
    Ok(if measured.holds() { Exit::Yes } else { Exit::No })
}

fn measure(args: &BenchArgs, context: &Context, tokens: u32) -> Result<Measured, Failure> {
    let Chosen { config, source } = choose(context, &args.config, tokens, Auto::Reproducible)?;
    let program = Arc::new(context.lowered(&config)?);
    let Some(mut device) = context.open_here(true)? else {
        return Err(Failure::no_gpu("--prefill is for what is measured"));
    };
    let info = device.describe();
    let bandwidth = info.bandwidth.unwrap_or(context.target.bandwidth as f64);
    let conditions = conditions::of(info);
    let handle = device.prepare(&program, &config.kernel)?;
    let prompt = draw_tokens(args.seed, context.graph().vocab, tokens as usize);
    let options = PrefillOptions::default();
    let ms = Blocks::time((1, RUNS), || {
        let done = device.prefill(handle, (1, 0), &prompt, true, &options);
        done.map(|(done, _)| done.device_us / 1e3)
    })?;
    let profiled = PrefillOptions { profile: true, ..options };
    let (last, chunks) = device.prefill(handle, (1, 0), &prompt, true, &profiled)?;
    // The first token launches the kernel, which is not part of the prompt's time.
    device.feed(handle, 0, 0, &prompt[..1], true)?;
    let began = Instant::now();
    let steps = device.feed(handle, 0, 0, &prompt, true)?;
    let steps_ms = began.elapsed().as_secs_f64() * 1e3;
    let error = relative(&steps, &chunks);
    let top1 = [&steps, &chunks].map(|row| greatest(row));
    Ok(Measured { ms, last, steps_ms, error, top1, bandwidth, conditions, config, source })
}

fn relative(expected: &[f32], actual: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = expected.iter().zip(actual).map(|(e, a)| f64::from(e - a));
    let difference = squares(&mut { differences });
    (difference / squares(&mut expected.iter().map(|&e| f64::from(e)))).sqrt()
}

fn greatest(row: &[f32]) -> Option<usize> {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index)
}

/// The roofline bound: arithmetic, or reading all weights once per chunk, whichever takes longer.
fn bound_ms(graph: &Graph, target: &Target, measured: &Measured) -> f64 {
    // The card is here, so there is a kernel for its architecture.
    let row = Architecture::named(&target.arch).unwrap_or(&ARCHITECTURES[0]);
    let peak = f64::from(target.sms) * row.flop_per_cycle * f64::from(target.clock_mhz) * 1e6;
    let bytes = graph.weight_bytes() as f64 * f64::from(measured.last.chunks);
    (measured.last.flop / peak).max(bytes / measured.bandwidth) * 1e3
}

fn say(context: &Context, tokens: u32, measured: &Measured, bound: f64) {
    let (graph, ms) = (context.graph(), measured.ms.median());
    let [least, most] = measured.ms.ends();
    let mut rows = vec![
        ("model", format!("{} {}", graph.name, graph.dtype.name())),
        (
            "prompt",
            format!("{tokens} tokens in {} chunks, logits of the last", measured.last.chunks),
        ),
        (
            "amk",
            format!(
                "{ms:.3} ms ({least:.3} to {most:.3}, median of {RUNS}), {:.0} tokens/s, {:.0} TFLOP/s",
                f64::from(tokens) / ms * 1e3,
                measured.last.flop / ms / 1e9
            ),
        ),
        ("bound", format!("{bound:.3} ms; {:.1} % of it reached", bound / ms * 100.0)),
        (
            "steps",
            format!(
                "{:.1} ms token by token, {:.0} x; logits differ by {:.1e} of their length, top-1 {}",
                measured.steps_ms,
                measured.steps_ms / ms,
                measured.error,
                if measured.top1[0] == measured.top1[1] { "equal" } else { "different" }
            ),
        ),
    ];
    rows.extend(measured.last.kernels.iter().map(|time| {
        let rate = if time.flop > 0.0 {
            format!(", {:.0} TFLOP/s", time.flop / time.us / 1e6)
        } else {
            String::new()
        };
        (time.kernel, format!("{:.3} ms in {} launches{rate}", time.us / 1e3, time.launches))
    }));
    report::table(&rows);
}

fn document(context: &Context, seed: u64, tokens: u32, measured: &Measured, bound: f64) -> Value {
    let (ms, [least, most]) = (measured.ms.median(), measured.ms.ends());
    json!({
        "schema": "amk.bench.prefill.v1",
        "model": context.graph().name,
        "dtype": context.graph().dtype.name(),
        "target": context.target.name,
        "kernel_id": vm_host::prefill_kernel_id(context.graph(), &context.target.arch),
        "seed": seed,
        "tokens": tokens,
        "chunks": measured.last.chunks,
        "ms": ms,
        "ms_runs": measured.ms.0,
        "ms_least": least,
        "ms_most": most,
        "runs": RUNS,
        "tokens_per_second": f64::from(tokens) / ms * 1e3,
        "flop": measured.last.flop,
        "bound_ms": bound,
        "pct_of_bound": bound / ms * 100.0,
        "steps_ms": measured.steps_ms,
        "rel_err": measured.error,
        "rel_err_max_allowed": ERROR_MAX,
        "top1_equal": measured.top1[0] == measured.top1[1],
        "correct": measured.holds(),
        "schedule_source": measured.source,
        "kernels": measured.last.kernels,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_length_of_what_is_expected() {
        assert!((relative(&[3.0, 4.0], &[3.0, 4.5]) - 0.1).abs() < 1e-9);
        assert!(relative(&[1.0], &[f32::NAN]).is_nan());
        assert_eq!(greatest(&[1.0, 7.0, -9.0]), Some(1));
    }
}
