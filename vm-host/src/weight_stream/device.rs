//! Copies to the devices on streams of their own, which raise `watermark` after them.

use std::sync::Arc;

use crate::driver::{Context, Event, Stream};
use crate::error::HostError;
use crate::memory::HostBuffer;
use crate::weight_stream::memory::Staging;
use crate::weight_stream::pipeline::{SLOTS, Target};
use crate::weight_stream::plan::Plan;

/// A device's end of a weight stream.
pub(crate) struct DeviceEnd {
    stream: Stream,
    events: Vec<Event>,
    /// Addresses of the packed matrices.
    matrices: Vec<u64>,
    /// Address of `watermark`.
    watermark: u64,
}

impl DeviceEnd {
    /// On the GPU whose context is current.
    pub(crate) fn new(matrices: Vec<u64>, watermark: u64) -> Result<Self, HostError> {
        let events = (0..=SLOTS).map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self { stream: Stream::new()?, events, matrices, watermark })
    }
}

/// The devices' end of a weight stream. Everything that it needs is allocated before a kernel is resident.
pub(crate) struct DeviceTarget {
    context: Arc<Context>,
    staging: HostBuffer,
    devices: Vec<DeviceEnd>,
}

impl DeviceTarget {
    pub(crate) fn new(
        context: &Arc<Context>,
        plan: &Plan,
        devices: Vec<DeviceEnd>,
    ) -> Result<Self, HostError> {
        let staging = HostBuffer::zeroed(plan.largest() * SLOTS)?;
        Ok(Self { context: context.clone(), staging, devices })
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
        (device, offset): (usize, u64),
        from: &Staging,
        bytes: usize,
    ) -> Result<(), HostError> {
        let to = &self.devices[device];
        to.stream.copy_in(to.matrices[matrix] + offset, from.pointer(), bytes)
    }

    fn watermark(&mut self, value: u32, slot: usize) -> Result<(), HostError> {
        for to in &self.devices {
            to.stream.write_value(to.watermark, value)?;
            to.events[slot].record(&to.stream)?;
        }
        Ok(())
    }

    fn copied(&mut self, slot: usize) -> Result<bool, HostError> {
        for to in &self.devices {
            if !to.events[slot].is_reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
