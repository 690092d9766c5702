//! Where a measurement is made: what a reader of the number needs to know about this machine.

use search::{Conditions, Device};

/// Where the kernel module says its version.
const DRIVER_FILE: &str = "/proc/driver/nvidia/version";

/// What an open device and this machine say of themselves.
pub(crate) fn here(device: &dyn Device) -> Conditions {
    let info = device.describe();
    let cuda = |note: &String| note.strip_prefix("driver CUDA ").map(str::to_owned);
    let driver = std::fs::read_to_string(DRIVER_FILE).ok();
    let nvrtc = vm_host::nvrtc_version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let unknown = |found: Option<String>| found.unwrap_or_else(|| "unknown".to_owned());
    Conditions {
        card: info.name,
        driver: unknown(driver.as_deref().and_then(version).map(str::to_owned)),
        cuda: unknown(info.conditions.iter().find_map(cuda)),
        nvrtc: unknown(nvrtc),
        amk: match option_env!("AMK_COMMIT") {
            Some(commit) => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
            None => env!("CARGO_PKG_VERSION").to_owned(),
        },
        notes: info.conditions,
    }
}

/// The first thing in the driver's text that looks like a version, such as `580.159.04`.
fn version(text: &str) -> Option<&str> {
    let looks = |word: &&str| {
        let parts = word.split('.');
        parts.clone().count() >= 2
            && parts
                .clone()
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(looks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_version_is_found_in_both_forms_of_its_line() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\nGCC version: 11.4.0";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5";
        assert_eq!(version(open), Some("580.159.04"));
        assert_eq!(version(closed), Some("550.54.15"));
        assert_eq!(version("GCC version"), None);
    }
}
