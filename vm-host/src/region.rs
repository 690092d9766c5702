//! The memory of a device that the others may write to: in one allocation, laid out alike on all, so that one distance leads from a word to the
//! same word of another device.

use crate::error::HostError;
use crate::machine::{PROGRAMS_MAX, STEP_BYTES};
use crate::memory::DeviceBuffer;

const STEP: u64 = 0;
const DONE: u64 = (STEP + STEP_BYTES).next_multiple_of(128);
const WEIGHT_STREAM: u64 = (DONE + size_of::<abi::Done>() as u64).next_multiple_of(128);
const EXCHANGE: u64 = (WEIGHT_STREAM + size_of::<abi::WeightStream>() as u64).next_multiple_of(128);
const LAUNCHES: u64 = (EXCHANGE + EXCHANGE_BYTES).next_multiple_of(128);
/// An exchange for each sequence.
const EXCHANGE_BYTES: u64 = (abi::SEQS_MAX * size_of::<abi::Exchange>()) as u64;
const LAUNCHES_BYTES: u64 = (abi::DEVICES_MAX * size_of::<abi::Launch>()) as u64;
const PROGRAMS: u64 = (LAUNCHES + LAUNCHES_BYTES).next_multiple_of(4096);

/// Bytes of a region with this much for each program.
pub(crate) fn region_bytes(program_bytes: u64) -> u64 {
    PROGRAMS + PROGRAMS_MAX as u64 * program_bytes.next_multiple_of(256)
}

pub(crate) struct Region {
    memory: DeviceBuffer,
    program_bytes: u64,
}

impl Region {
    /// On the GPU whose context is current.
    pub(crate) fn new(program_bytes: u64) -> Result<Self, HostError> {
        let memory = DeviceBuffer::zeroed(region_bytes(program_bytes))?;
        Ok(Self { memory, program_bytes: program_bytes.next_multiple_of(256) })
    }

    pub(crate) fn step(&self) -> u64 {
        self.memory.address + STEP
    }

    pub(crate) fn done(&self) -> u64 {
        self.memory.address + DONE
    }

    pub(crate) fn weight_stream(&self) -> u64 {
        self.memory.address + WEIGHT_STREAM
    }

    /// The exchanges of all sequences.
    pub(crate) fn exchange(&self) -> u64 {
        self.memory.address + EXCHANGE
    }

    /// The launch blocks of all devices.
    pub(crate) fn launches(&self) -> u64 {
        self.memory.address + LAUNCHES
    }

    /// The place of a program.
    pub(crate) fn program(&self, place: usize) -> u64 {
        self.memory.address + PROGRAMS + place as u64 * self.program_bytes
    }

    /// Bytes of such a place.
    pub(crate) fn program_bytes(&self) -> u64 {
        self.program_bytes
    }

    /// What a launch begins with at zero: addresses and bytes.
    pub(crate) fn zeroed_at_launch(&self) -> [(u64, u64); 3] {
        let done = size_of::<abi::Done>() as u64;
        [(self.step(), STEP_BYTES), (self.done(), done), (self.exchange(), EXCHANGE_BYTES)]
    }
}
