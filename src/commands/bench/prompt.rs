//! A prompt in chunks, compared with the bound of the card's arithmetic and memory; its logits with those of the same
//! prompt token by token.

use std::sync::Arc;
use std::time::Instant;

use ir::{Graph, Target};
use reference_vm::accuracy::Accuracy;
use reference_vm::compare::Tolerance;
use remote::Served;
use search::{DeviceInfo, Verdict, draw_tokens};
use serde_json::json;
use vm_device::{ARCHITECTURES, Architecture};
use vm_host::{PrefillOptions, Prefilled};

use super::{Measured, Row, rounds};
use crate::failure::Failure;

pub(super) fn measure(row: &Row<'_>, tokens: u32) -> Result<Measured, Failure> {
    let (args, context, config) = (row.args, &row.context, row.chosen.config);
    let program = Arc::new(context.lowered(&config)?);
    let others = context.others(&args.sharing)?.ok_or_else(|| row.no_gpu())?;
    let mut device = row.open()?;
    let info = DeviceInfo { other_processes: others, ..device.describe() };
    let mut verdict = Verdict::new(&context.graph().name, &context.target.name, &info.name);
    verdict.schedule_id = Some(config.id());
    verdict.kernel_id = Some(vm_host::prefill_kernel_id(context.graph(), &context.target.arch));
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
    // The first token launches the kernel, which is not part of the prompt's time.
    device.feed(handle, 0, 0, &prompt[..1], true)?;
    let began = Instant::now();
    let steps = device.feed(handle, 0, 0, &prompt, true)?;
    let steps_us = began.elapsed().as_secs_f64() * 1e6;
    let accuracy =
        Accuracy::of(&[steps], &[chunks], Tolerance::device_limit(context.graph().kv_dtype));
    let missing = || Failure::refused("the device gave no logits of the prompt's last token");
    measured.set_accuracy(Some(accuracy.ok_or_else(missing)?));
    let bandwidth = info.bandwidth.unwrap_or(context.target.bandwidth as f64);
    let bound = bound_us(context.graph(), &context.target, &last, bandwidth);
    measured.set_samples(samples, bound, args.seed);
    beside(&mut measured, &last, steps_us);
    Ok(measured)
}

/// The roofline bound: arithmetic, or reading all weights once per chunk, whichever takes longer.
fn bound_us(graph: &Graph, target: &Target, last: &Prefilled, bandwidth: f64) -> f64 {
    // The card is here, so there is a kernel for its architecture.
    let row = Architecture::named(&target.arch).unwrap_or(&ARCHITECTURES[0]);
    let sms = f64::from(target.sms * target.devices);
    let peak = sms * row.flop_per_cycle * f64::from(target.clock_mhz) * 1e6;
    let bytes = graph.weight_bytes() as f64 * f64::from(last.chunks);
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
