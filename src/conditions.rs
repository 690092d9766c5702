//! The conditions of a measurement: the facts about this machine that a reader of the number needs.

use search::{Conditions, DeviceInfo};

/// The conditions from the description of an opened device and of this machine.
pub(crate) fn of(info: DeviceInfo) -> Conditions {
    let nvrtc = vm_host::nvrtc_version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let unknown = |found: Option<String>| found.unwrap_or_else(|| "unknown".to_owned());
    let (max_sm_mhz, max_memory_mhz) = info.uuid.as_deref().and_then(vm_host::max_clocks).unzip();
    Conditions {
        card: info.name,
        uuid: info.uuid,
        sms: info.sms,
        max_sm_mhz,
        max_memory_mhz,
        other_processes: info.other_processes,
        driver: unknown(vm_host::driver_version()),
        cuda: unknown(info.cuda),
        nvrtc: unknown(nvrtc),
        amk: env!("AMK_VERSION").to_owned(),
    }
}
