//! Weight loading for a GPU driven by this process, and the time to the first token.

use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use search::DeviceError;
use serde_json::{Value, json};
use vm_device::Variant;
use vm_host::{BootOptions, Idle, KvPool, Streaming};

use super::{Gpu, LOGITS_ROWS, Machine, device_error};
use crate::context::Context;
use crate::report;

/// How the weights are loaded, and the times of arrival.
#[derive(Default)]
pub(super) struct Arrival {
    /// Set if weights are loaded while the kernel is already resident; says how.
    pub(super) streaming: Option<Streaming>,
    resident_at: Option<Instant>,
    first_token_at: Option<Instant>,
    /// Bytes that were copied to the device before a launch, counted with each copy.
    pub(super) copied: Option<u64>,
}

impl Arrival {
    /// Records that the kernel is resident.
    pub(super) fn resident(&mut self) {
        self.resident_at.get_or_insert_with(Instant::now);
    }

    /// Records that a command returned tokens.
    pub(super) fn tokens(&mut self) {
        self.first_token_at.get_or_insert_with(Instant::now);
    }
}

/// Boots a machine for a program, and reports the weights that were loaded before a launch.
pub(super) fn boot(
    context: &Context,
    program: &Verified<Program>,
    variant: &Variant,
    (deadline, sessions, kv_pool): (Duration, u32, KvPool),
    arrival: &mut Arrival,
) -> Result<Idle, DeviceError> {
    let streaming = arrival.streaming;
    let options = BootOptions {
        cards: context.gpus(),
        sessions,
        kv_pool,
        logits_rows: LOGITS_ROWS,
        deadline,
        streaming,
        ..BootOptions::default()
    };
    let idle = Idle::boot(context.graph(), &*context.model.weights, program, variant, options)
        .map_err(device_error)?;
    if streaming.is_some() {
        return Ok(idle);
    }
    let load = idle.load_report();
    arrival.copied = Some(load.packed_bytes);
    report::say(&format!(
        "weights: {:.2} GB from {} to the device in {:.2} s ({:.2} GB/s){}",
        load.bytes as f64 / 1e9,
        load.source,
        load.seconds,
        load.bytes as f64 / 1e9 / load.seconds,
        load.fallback.as_ref().map(|why| format!("; {why}")).unwrap_or_default()
    ));
    Ok(idle)
}

impl Gpu<'_> {
    /// Sets that from the next boot on weights are loaded while the kernel is already resident.
    pub(crate) fn stream_weights(&mut self, streaming: Streaming) {
        self.arrival.streaming = Some(streaming);
    }

    /// Whether weights are loaded while the kernel is already resident.
    pub(crate) fn streams_weights(&self) -> bool {
        self.arrival.streaming.is_some()
    }

    /// Reports how the weights were loaded, and the times of the first events in seconds since `began`.
    pub(crate) fn weights_report(&mut self, began: Instant) -> Result<Value, DeviceError> {
        let since = |at: Option<Instant>| at.map(|at| at.duration_since(began).as_secs_f64());
        let (resident, first) =
            (since(self.arrival.resident_at), since(self.arrival.first_token_at));
        let Machine::Running(running) = &mut self.machine else { return Ok(Value::Null) };
        let weight_stream = running.weight_stream_report().map_err(device_error)?;
        let rate = weight_stream.load.bytes as f64 / 1e9 / weight_stream.load.seconds.max(1e-9);
        Ok(json!({
            "streamed": self.arrival.streaming.is_some(),
            "bytes": weight_stream.load.bytes,
            "seconds": weight_stream.load.seconds,
            "gb_per_s": rate,
            "source": weight_stream.load.source,
            "fallback": weight_stream.load.fallback,
            "waits": weight_stream.waits,
            "waited_s": weight_stream.waited_s,
            "resident_s": resident,
            "first_token_s": first,
        }))
    }

    /// Compares every tensor on the device with its file.
    pub(crate) fn check_weights(&mut self) -> Result<Value, DeviceError> {
        let context = self.context;
        let Machine::Running(running) = &mut self.machine else { return Ok(Value::Null) };
        let checks = running
            .check_weights(context.graph(), &*context.model.weights)
            .map_err(device_error)?;
        let differ: Vec<_> = checks.iter().filter(|check| !check.equal()).collect();
        if differ.is_empty() {
            let bytes: u64 = checks.iter().map(|check| check.bytes).sum();
            return Ok(json!({"tensors": checks.len(), "bytes": bytes, "equal": true}));
        }
        let names: Vec<&str> = differ.iter().map(|check| check.tensor.as_str()).collect();
        let reason = format!(
            "{} of {} tensors on the device are not those of the files: {}",
            names.len(),
            checks.len(),
            names.join(", ")
        );
        Err(DeviceError::Fault { reason })
    }
}
