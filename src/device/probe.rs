//! Detects the GPUs of this machine without touching them.

use ir::Target;
use vm_device::Architecture;
use vm_host::{Card, DeviceInfo, HostError};

/// Checks, without touching the GPU of a number, whether it can be driven with programs for this target; the error says what is missing.
pub(crate) fn look_at(target: &Target, ordinal: u32) -> Result<DeviceInfo, HostError> {
    fits(target, Card::new(ordinal).info()?)
}

/// The number of the GPU with this UUID, among the visible ones.
pub(crate) fn find(uuid: &str) -> Result<Option<u32>, HostError> {
    for ordinal in 0.. {
        match Card::new(ordinal).info() {
            Ok(info) if info.uuid == uuid => return Ok(Some(ordinal)),
            Ok(_) => {}
            Err(HostError::NoSuchDevice { .. } | HostError::NoDevice) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn fits(target: &Target, info: DeviceInfo) -> Result<DeviceInfo, HostError> {
    let (major, minor) = info.capability;
    if Architecture::of(info.capability).is_none() {
        return Err(HostError::Architecture { name: info.name, major, minor });
    }
    vm_host::nvrtc_version()?;
    let parts = if target.emulated { target.devices } else { 1 };
    if info.sms / parts != target.sms {
        return Err(HostError::Request(format!(
            "the target {} has {} multiprocessors, {} has {}; leave --target out to schedule for the GPU that is here",
            target.name, target.sms, info.name, info.sms
        )));
    }
    Ok(info)
}

/// The live GPU as a target, if there is one that the kernel runs on.
pub(crate) fn live_target() -> Option<Target> {
    live_card().map(|(target, _)| target)
}

/// The same, with the card's description.
pub(crate) fn live_card() -> Option<(Target, DeviceInfo)> {
    let info = Card::default().info().ok()?;
    Architecture::of(info.capability)?;
    let target = Target {
        sms: info.sms,
        smem_optin_bytes: info.shared_bytes,
        l2_bytes: info.l2_bytes.into(),
        ..Target::of_card(&info.name)
    };
    Some((target, info))
}

/// The note on a prediction for a target without a kernel.
pub(crate) fn without_kernel(target: &Target) -> Option<String> {
    let arch = target.arch.trim_end_matches(|c: char| !c.is_ascii_digit());
    let missing = Architecture::named(&target.arch).is_none();
    missing.then(|| format!("no kernel for {arch}; rates from H200"))
}
