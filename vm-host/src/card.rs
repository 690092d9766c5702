//! A GPU as a value: its ordinal, properties, free memory and bandwidth.

use std::sync::Arc;

use vm_device::{Architecture, Variant};

use crate::compile::{Cubin, compile, default_cache};
use crate::driver::{Context, Device, DeviceInfo, Event, Module, Stream};
use crate::error::HostError;
use crate::memory::DeviceBuffer;

/// The build whose measuring kernels are used; any other would do.
pub(crate) const PROBE_VARIANT: Variant = Variant {
    dtype: abi::DType::Bf16,
    unpack: 1,
    head_dim: 64,
    group: 1,
    qk_norm: false,
    features: 0,
    widths: [64; 3],
    shares: 0,
    format_shares: None,
    poll_sleep_ns: 20,
    evict_first: true,
    seqs: 1,
    devices: 1,
    masks: false,
    trace: vm_device::Trace::Off,
    first_task: 0,
};

/// A GPU, by the driver's ordinal. The default is the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Card {
    ordinal: u32,
}

impl Card {
    /// The GPU with this ordinal, whether or not it exists.
    #[must_use]
    pub const fn new(ordinal: u32) -> Self {
        Self { ordinal }
    }

    /// Its number.
    pub(crate) const fn ordinal(self) -> u32 {
        self.ordinal
    }

    /// Its properties. Nothing is allocated on it and no context made, so another process may own it.
    ///
    /// # Errors
    /// If there is no driver, or no such GPU.
    pub fn info(self) -> Result<DeviceInfo, HostError> {
        Device::at(self.ordinal)?.info()
    }

    /// Free memory in bytes, not counting this process's context.
    ///
    /// # Errors
    /// If there is no driver or no such GPU, or it accepts no new context.
    pub fn free_memory(self) -> Result<u64, HostError> {
        self.context()?.free_bytes()
    }

    /// Makes its primary context current on this thread.
    pub(crate) fn context(self) -> Result<Arc<Context>, HostError> {
        Context::new(Device::at(self.ordinal)?)
    }

    /// Bandwidth of bulk copies in bytes per second: the median of `runs` sweeps over scratch memory far larger than the L2 cache.
    /// No kernel of ours may be resident.
    ///
    /// # Errors
    /// If there are no kernels for it, or a launch fails.
    pub fn measure_bandwidth(self, runs: usize) -> Result<f64, HostError> {
        const STAGE: u32 = 32 << 10;
        const STAGES: u32 = 6;
        let context = self.context()?;
        let info = context.info()?;
        let (module, _) = load_module(&PROBE_VARIANT, &info)?;
        let kernel = module.function(c"amk_bandwidth")?;
        let shared = 1024 + STAGE * STAGES;
        kernel.allow_shared(shared)?;
        let (stream, scratch) = (Stream::new()?, DeviceBuffer::zeroed(2 << 30)?);
        let (start, end) = (Event::new()?, Event::new()?);
        let sweep = u64::from(info.sms) * u64::from(STAGE);
        let mut rates = Vec::new();
        for _ in 0..=runs.max(1) {
            let (mut source, mut bytes, mut stage, mut stages) =
                (scratch.address, scratch.bytes, STAGE, STAGES);
            let mut arguments: [*mut std::ffi::c_void; 4] = [
                (&raw mut source).cast(),
                (&raw mut bytes).cast(),
                (&raw mut stage).cast(),
                (&raw mut stages).cast(),
            ];
            start.record(&stream)?;
            stream.launch(&kernel, info.sms, 32, shared, &mut arguments)?;
            end.record(&stream)?;
            end.synchronize()?;
            rates.push((bytes / sweep * sweep) as f64 / start.elapsed_us(&end)? * 1e6);
        }
        rates.remove(0); // warm-up
        rates.sort_by(f64::total_cmp);
        Ok(rates[rates.len() / 2])
    }
}

/// Looks up the kernels for a GPU's architecture.
pub(crate) fn arch(info: &DeviceInfo) -> Result<&'static Architecture, HostError> {
    let (major, minor) = info.capability;
    let unknown = || HostError::Architecture { name: info.name.clone(), major, minor };
    Architecture::of(info.capability).ok_or_else(unknown)
}

pub(crate) fn load_module(
    variant: &Variant,
    info: &DeviceInfo,
) -> Result<(Module, Cubin), HostError> {
    let cubin = compile(variant, arch(info)?.name, default_cache().as_deref())?;
    Ok((Module::load(&cubin.image)?, cubin))
}
