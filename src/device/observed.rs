//! Telemetry written by the driver of a card. The state of the kernel is read from its ring by a separate thread.

use abi::{Evidence, EvidenceFamily};
use ir::program::Program;
use telemetry::Publisher;
use vm_host::RingTap;

use super::Gpu;
use crate::observe::SharedMonitor;

impl Gpu<'_> {
    /// Registers the monitor for its later kernels, and the page for transfers to the device. Returns the driver's id of the card.
    pub(crate) fn observed(&mut self, monitor: &SharedMonitor, page: &Publisher) -> &str {
        page.edit(|edit| {
            edit.device(&self.info.name);
            let known = self.bandwidth.unwrap_or(self.context.target.total_bandwidth() as f64);
            edit.head().bandwidth = known as u64;
        });
        (self.monitor, self.page) = (monitor.clone(), Some(page.clone()));
        &self.info.uuid
    }

    /// Shows what goes through the ring of the machine that is booted next to a callback.
    pub(crate) fn show_ring(&mut self, tap: RingTap) {
        self.tap = Some(tap);
    }

    /// Records a launch: of a newly booted machine, or of one that had its weights already.
    pub(super) fn launched(&self, program: &Program, booted: bool) {
        let Some(page) = &self.page else { return };
        let bytes = program.matrices.iter().map(|matrix| matrix.bytes()).sum::<u64>();
        let pages = self.pages().map_or(0, |pages| u64::from(pages.pages) + 1); // and page zero
        let used = vm_host::process_memory(&self.info.uuid, std::process::id());
        page.edit(|edit| {
            // Streamed weights are counted as they arrive, by the thread that observes the kernel.
            let (copied, streamed) = (self.arrival.copied, self.streams_weights());
            let measured = streamed || copied.is_some();
            let known = if measured { Evidence::Measured } else { Evidence::Derived };
            edit.known(EvidenceFamily::Copy, known);
            let resident = if used.is_some() { Evidence::Measured } else { Evidence::Derived };
            edit.known(EvidenceFamily::Residency, resident);
            let head = edit.head();
            head.device_used_bytes = used.unwrap_or(0);
            match booted {
                true if streamed => {}
                true => head.uploaded_bytes += copied.unwrap_or(bytes),
                false => head.avoided_bytes += bytes,
            }
            head.launches += 1;
            head.step_bytes = program.stream_bytes();
            head.weights_bytes = bytes; // the observing thread reads how many have arrived
            head.resident_bytes = bytes + pages * program.kv_bytes(abi::KV_PAGE - 1);
        });
        self.say_pages();
    }

    /// Publishes the page counts, which may have changed.
    pub(super) fn say_pages(&self) {
        let (Some(page), Some(pages)) = (&self.page, self.pages()) else { return };
        page.edit(|edit| {
            let head = edit.head();
            head.kv_pages = pages.pages;
            head.kv_held = pages.held;
            head.kv_promised = pages.promised;
        });
    }
}
