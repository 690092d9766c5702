//! The state of the GPU on the telemetry page: clocks, power, temperature, and what holds it down.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use telemetry::Publisher;

/// How often the GPU is asked. An answer takes up to a few milliseconds, in which the page is not locked.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Asks the driver for the state of the GPU, once it is known which.
pub(super) struct GpuWatch {
    gpu: Arc<OnceLock<String>>,
    asked: Option<Instant>,
}

impl GpuWatch {
    pub(super) fn new(gpu: Arc<OnceLock<String>>) -> Self {
        Self { gpu, asked: None }
    }

    pub(super) fn look(&mut self, page: &Publisher) {
        let Some(gpu) = self.gpu.get() else { return };
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            return;
        }
        self.asked = Some(Instant::now());
        if let Some(state) = vm_host::gpu_state(gpu) {
            page.edit(|edit| edit.head().set_gpu(&state));
        }
    }
}
