//! Who else uses the GPU, as NVML says, and how NVML is asked about one. The library comes with the driver; where it is missing, or a
//! container hides what is outside, nothing is known.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

/// What the driver installs.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// Processes that are named; there may be more.
const PROCESSES_MAX: usize = 64;

/// NVML's answer if the caller's list is too short.
const INSUFFICIENT_SIZE: c_int = 7;

/// A process as NVML lists it (second and third version of the call).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

pub(crate) type Init = unsafe extern "C" fn() -> c_int;
pub(crate) type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int;

/// Numbers of the processes that have a context on the device with this id (of [`DeviceInfo`](crate::DeviceInfo)), this one included if
/// it has. Nothing if NVML cannot say. Inside a container numbers may be those of the host, and processes of others may be missing.
#[must_use]
pub fn compute_processes(uuid: &str) -> Option<Vec<u32>> {
    // SAFETY: the driver's library, which initialises itself when it is asked to and not when it is loaded.
    let library = unsafe { Library::new(LIBRARY) }.ok()?;
    // SAFETY: the types are those of nvml.h; the calls live no longer than the library.
    let (init, shutdown, by_uuid, processes) = unsafe {
        let processes = library
            .get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0")
            .or_else(|_| library.get(b"nvmlDeviceGetComputeRunningProcesses_v2\0"));
        (
            library.get::<Init>(b"nvmlInit_v2\0").ok()?,
            library.get::<Init>(b"nvmlShutdown\0").ok()?,
            library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?,
            processes.ok()?,
        )
    };
    let name = name_of(uuid)?;
    let mut device = std::ptr::null_mut();
    let mut list = [ProcessInfo::default(); PROCESSES_MAX];
    let mut count = PROCESSES_MAX as c_uint;
    // SAFETY: every pointer is valid for its call, the list as long as `count` says; NVML is initialised before and shut down after.
    let answer = unsafe {
        if init() != 0 {
            return None;
        }
        let found = by_uuid(name.as_ptr(), &raw mut device);
        let answer = match found {
            0 => processes(device, &raw mut count, list.as_mut_ptr()),
            error => error,
        };
        shutdown();
        answer
    };
    let known = (count as usize).min(PROCESSES_MAX);
    matches!(answer, 0 | INSUFFICIENT_SIZE)
        .then(|| list[..known].iter().map(|process| process.pid).collect())
}

/// NVML's form of an id: `GPU-` and five groups.
pub(crate) fn name_of(uuid: &str) -> Option<CString> {
    if uuid.len() != 32 || !uuid.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &uuid[range]);
    CString::new(format!("GPU-{}", groups.join("-"))).ok()
}

/// How `CUDA_VISIBLE_DEVICES` names the device with this id (of [`DeviceInfo`](crate::DeviceInfo)); nothing if it is no id.
#[must_use]
pub fn visible_name(uuid: &str) -> Option<String> {
    name_of(uuid)?.into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_spelled_as_nvml_does() {
        assert_eq!(
            name_of("0123456789abcdef0123456789abcdef").as_deref(),
            Some(c"GPU-01234567-89ab-cdef-0123-456789abcdef")
        );
        assert_eq!(name_of("0123"), None);
        assert_eq!(name_of(&"é".repeat(16)), None);
    }

    #[test]
    fn the_list_has_the_layout_of_the_header() {
        assert_eq!(size_of::<ProcessInfo>(), 24);
        assert_eq!(std::mem::offset_of!(ProcessInfo, used_bytes), 8);
        assert_eq!(std::mem::offset_of!(ProcessInfo, gpu_instance), 16);
    }

    #[test]
    fn a_device_that_is_not_here_has_no_processes() {
        assert_eq!(compute_processes("0123456789abcdef0123456789abcdef"), None);
    }
}
