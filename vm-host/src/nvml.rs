//! NVML queries for a card: the processes on it, its state and its driver. The library comes with the driver and is loaded at run time. Where
//! it is missing, or a container hides what is outside, nothing is known.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use abi::{GpuState, ThrottleReason};
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// Clock throttle reasons that slow a measurement down, by NVML's bit.
const REASONS: [(ThrottleReasons, ThrottleReason); 6] = [
    (ThrottleReasons::SW_POWER_CAP, ThrottleReason::PowerCap),
    (ThrottleReasons::HW_SLOWDOWN, ThrottleReason::Hardware),
    (ThrottleReasons::SYNC_BOOST, ThrottleReason::SyncBoost),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, ThrottleReason::DriverThermal),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, ThrottleReason::HardwareThermal),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, ThrottleReason::PowerBrake),
];

/// The most links of a card that are asked for; a Hopper card has 18.
const LINKS_MAX: u32 = 18;

/// NVML, which stays initialised until the process ends.
fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| Nvml::init().ok()).as_ref()
}

/// Queries the device with this id (of [`DeviceInfo`](crate::DeviceInfo)). Devices stay open after their first query, so that a reading costs
/// microseconds.
fn ask<T>(
    uuid: &str,
    question: impl FnOnce(&Device<'static>) -> Result<T, NvmlError>,
) -> Option<T> {
    static DEVICES: Mutex<BTreeMap<String, Option<Device<'static>>>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || nvml()?.device_by_uuid(visible_name(uuid)?).ok();
    let device = devices.entry(uuid.to_owned()).or_insert_with(open);
    question(device.as_ref()?).ok()
}

/// Ids of the processes that have a context on the device with this id, including this one if it has. `None` if NVML cannot tell. Inside a
/// container the ids may be those of the host, and processes of others may be missing.
#[must_use]
pub fn compute_processes(uuid: &str) -> Option<Vec<u32>> {
    // Drivers before 510 have only the second version of the call.
    let processes = ask(uuid, |device| {
        device.running_compute_processes().or_else(|_| device.running_compute_processes_v2())
    });
    Some(processes?.into_iter().map(|process| process.pid).collect())
}

/// Memory of the device with this id that a process uses, in bytes; `None` if NVML cannot tell, as in a container whose
/// process ids are not those of the host.
#[must_use]
pub fn process_memory(uuid: &str, pid: u32) -> Option<u64> {
    let processes = ask(uuid, |device| {
        device.running_compute_processes().or_else(|_| device.running_compute_processes_v2())
    })?;
    processes.into_iter().find(|process| process.pid == pid).and_then(|process| {
        match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        }
    })
}

/// The state of the device with this id; `None` if NVML cannot tell its clocks.
#[must_use]
pub fn gpu_state(uuid: &str) -> Option<GpuState> {
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    let few = |errors: u64| u32::try_from(errors).unwrap_or(u32::MAX - 1);
    let uncorrected = (MemoryError::Uncorrected, EccCounter::Volatile);
    ask(uuid, |device| {
        Ok(GpuState {
            sm_mhz: device.clock_info(Clock::SM)?,
            memory_mhz: device.clock_info(Clock::Memory)?,
            power_w: device.power_usage().ok().map(watts),
            power_limit_w: device.enforced_power_limit().ok().map(watts),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            busy_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
            ecc_errors: device.total_ecc_errors(uncorrected.0, uncorrected.1).ok().map(few),
            links: links_up(device),
            throttled: reasons(device.current_throttle_reasons()?),
        })
    })
}

fn links_up(device: &Device<'_>) -> Option<u32> {
    let mut up = 0;
    for link in 0..LINKS_MAX {
        match device.link_wrapper_for(link).is_active() {
            Ok(active) => up += u32::from(active),
            // Links are numbered without a gap; a card without them does not support the call.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Err(_) => return None,
        }
    }
    Some(up)
}

/// The highest clocks of the device with this id, of its multiprocessors and its memory, in megahertz; `None` if NVML cannot tell.
#[must_use]
pub fn max_clocks(uuid: &str) -> Option<(u32, u32)> {
    ask(uuid, |device| {
        Ok((device.max_clock_info(Clock::SM)?, device.max_clock_info(Clock::Memory)?))
    })
}

/// Version of the kernel driver, such as `580.159.04`; `None` if NVML cannot tell.
#[must_use]
pub fn driver_version() -> Option<String> {
    nvml()?.sys_driver_version().ok()
}

fn reasons(found: ThrottleReasons) -> Vec<ThrottleReason> {
    REASONS.iter().filter(|(bit, _)| found.contains(*bit)).map(|&(_, reason)| reason).collect()
}

/// The device with this id as NVML and `CUDA_VISIBLE_DEVICES` name it: `GPU-` and five groups; `None` if it is no id.
#[must_use]
pub fn visible_name(uuid: &str) -> Option<String> {
    if uuid.len() != 32 || !uuid.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &uuid[range]);
    Some(format!("GPU-{}", groups.join("-")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOT_HERE: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn ids_are_spelled_as_nvml_does() {
        let name = visible_name(NOT_HERE);
        assert_eq!(name.as_deref(), Some("GPU-01234567-89ab-cdef-0123-456789abcdef"));
        assert_eq!(visible_name("0123"), None);
        assert_eq!(visible_name(&"é".repeat(16)), None);
    }

    #[test]
    fn an_idle_card_and_set_clocks_are_no_reasons() {
        // The bits of nvml.h.
        use ThrottleReason::{
            DriverThermal, Hardware, HardwareThermal, PowerBrake, PowerCap, SyncBoost,
        };
        let said = |bits| reasons(ThrottleReasons::from_bits_truncate(bits));
        assert_eq!(said(0x1 | 0x2 | 0x100), []);
        assert_eq!(said(0x4 | 0x40), [PowerCap, HardwareThermal]);
        let others = [Hardware, SyncBoost, DriverThermal, PowerBrake];
        assert_eq!(said(0x8 | 0x10 | 0x20 | 0x80), others);
    }

    #[test]
    fn of_a_device_that_is_not_here_nothing_is_known() {
        assert_eq!(compute_processes(NOT_HERE), None);
        assert_eq!(gpu_state(NOT_HERE), None);
        assert_eq!(process_memory(NOT_HERE, 1), None);
        assert_eq!(max_clocks(NOT_HERE), None);
    }
}
