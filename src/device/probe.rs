//! Which GPUs are here, found without touching them.

use ir::Target;
use vm_device::Architecture;
use vm_host::{Card, DeviceInfo, HostError};

/// What is missing for driving the GPU that is here with programs for this target, found without touching it.
pub(crate) fn look(target: &Target) -> Result<DeviceInfo, HostError> {
    fits(target, Card::default().info()?)
}

/// The GPU of a number, as [`look`] finds the first one.
pub(crate) fn look_at(target: &Target, ordinal: u32) -> Result<DeviceInfo, HostError> {
    fits(target, Card::new(ordinal).info()?)
}

/// The GPU with this id, among those that are seen here.
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
    if info.sms != target.sms {
        return Err(HostError::Request(format!(
            "the target {} has {} multiprocessors, {} has {}; leave --target out to schedule for the GPU that is here",
            target.name, target.sms, info.name, info.sms
        )));
    }
    Ok(info)
}

/// The live GPU as a target, if there is one that the kernel runs on.
pub(crate) fn live_target() -> Option<Target> {
    let info = Card::default().info().ok()?;
    Architecture::of(info.capability)?;
    Some(Target {
        sms: info.sms,
        smem_optin_bytes: info.shared_bytes,
        l2_bytes: info.l2_bytes.into(),
        ..Target::of_card(&info.name)
    })
}

/// What is to be said of a prediction for a target that no kernel is written for.
pub(crate) fn without_kernel(target: &Target) -> Option<String> {
    let arch = target.arch.trim_end_matches(|c: char| !c.is_ascii_digit());
    let missing = Architecture::named(&target.arch).is_none();
    missing.then(|| format!("no kernel for {arch}; rates from H200"))
}
