//! Copies to the device on a separate stream, which raises `watermark` after them.

use std::sync::Arc;

use crate::driver::{Context, Event, Stream};
use crate::error::HostError;
use crate::memory::HostBuffer;
use crate::weight_stream::memory::Staging;
use crate::weight_stream::pipeline::{SLOTS, Target};
use crate::weight_stream::plan::Plan;

/// The device's end of a weight stream. Everything that it needs is allocated before a kernel is resident.
pub(crate) struct DeviceTarget {
    context: Arc<Context>,
    stream: Stream,
    events: Vec<Event>,
    staging: HostBuffer,
    /// Addresses of the packed matrices.
    matrices: Vec<u64>,
    /// Address of `watermark`.
    watermark: u64,
}

impl DeviceTarget {
    pub(crate) fn new(
        context: &Arc<Context>,
        plan: &Plan,
        matrices: Vec<u64>,
        watermark: u64,
    ) -> Result<Self, HostError> {
        let staging_bytes = plan.largest() * SLOTS;
        let events = (0..=SLOTS).map(|_| Event::new()).collect::<Result<_, _>>()?;
        let (stream, staging) = (Stream::new()?, HostBuffer::zeroed(staging_bytes)?);
        Ok(Self { context: context.clone(), stream, events, staging, matrices, watermark })
    }
}

// SAFETY: the buffer is the target's own.
unsafe impl Target for DeviceTarget {
    fn staging(&self, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.staging.bytes, "{bytes} of {} bytes", self.staging.bytes);
        self.staging.pointer()
    }

    fn enter(&mut self) -> Result<(), HostError> {
        self.context.make_current()
    }

    fn copy(
        &mut self,
        matrix: usize,
        offset: u64,
        from: &Staging,
        bytes: usize,
    ) -> Result<(), HostError> {
        self.stream.copy_in(self.matrices[matrix] + offset, from.pointer(), bytes)
    }

    fn watermark(&mut self, value: u32, slot: usize) -> Result<(), HostError> {
        self.stream.write_value(self.watermark, value)?;
        self.events[slot].record(&self.stream)
    }

    fn copied(&mut self, slot: usize) -> Result<bool, HostError> {
        self.events[slot].is_reached()
    }
}
