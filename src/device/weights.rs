//! How weights get to the GPU that is driven here, and how long the first token took.

use std::time::Instant;

use search::DeviceError;
use serde_json::{Value, json};
use vm_host::Streaming;

use super::{Gpu, Machine, device_error};

impl Gpu<'_> {
    /// From the next boot on weights come while the kernel is already resident.
    pub(crate) fn stream_weights(&mut self, streaming: Streaming) {
        self.streaming = Some(streaming);
    }

    /// How the weights came in, and what was first when; in seconds since `began`.
    pub(crate) fn weights_report(&mut self, began: Instant) -> Result<Value, DeviceError> {
        let since = |at: Option<Instant>| at.map(|at| at.duration_since(began).as_secs_f64());
        let (resident, first) = (since(self.resident_at), since(self.first_token_at));
        let Machine::Running(running) = &mut self.machine else { return Ok(Value::Null) };
        let landing = running.landing_report().map_err(device_error)?;
        let rate = landing.load.bytes as f64 / 1e9 / landing.load.seconds.max(1e-9);
        Ok(json!({
            "streamed": self.streaming.is_some(),
            "bytes": landing.load.bytes,
            "seconds": landing.load.seconds,
            "gb_per_s": rate,
            "source": landing.load.source,
            "fallback": landing.load.fallback,
            "waits": landing.waits,
            "waited_s": landing.waited_s,
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
