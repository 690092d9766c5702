//! Where a measurement is made: what a reader of the number needs to know about this machine.

use search::{Conditions, Device, DeviceInfo};

/// Where the kernel module says its version.
const DRIVER_FILE: &str = "/proc/driver/nvidia/version";

/// What an open device and this machine say of themselves.
pub(crate) fn here(device: &dyn Device) -> Conditions {
    of(device.describe())
}

/// The same, of what the device said when it was opened.
pub(crate) fn of(info: DeviceInfo) -> Conditions {
    let cuda = |note: &String| note.strip_prefix("driver CUDA ").map(str::to_owned);
    let driver = std::fs::read_to_string(DRIVER_FILE).ok();
    let nvrtc = vm_host::nvrtc_version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let mut notes = info.conditions;
    let uuid = notes.iter().find_map(|note| note.strip_prefix("uuid "));
    let clocks = uuid.and_then(clocks);
    notes.extend(clocks.map(|clocks| format!("clocks {clocks}")));
    let unknown = |found: Option<String>| found.unwrap_or_else(|| "unknown".to_owned());
    Conditions {
        card: info.name,
        driver: unknown(driver.as_deref().and_then(version).map(str::to_owned)),
        cuda: unknown(notes.iter().find_map(cuda)),
        nvrtc: unknown(nvrtc),
        amk: match option_env!("AMK_COMMIT") {
            Some(commit) => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
            None => env!("CARGO_PKG_VERSION").to_owned(),
        },
        notes,
    }
}

/// The highest clocks of a card, where `nvidia-smi` is there to say them.
fn clocks(uuid: &str) -> Option<String> {
    let query = ["--query-gpu=uuid,clocks.max.sm,clocks.max.mem", "--format=csv,noheader,nounits"];
    let said = std::process::Command::new("nvidia-smi").args(query).output().ok()?;
    clocks_of(&String::from_utf8_lossy(&said.stdout), uuid)
}

/// The clocks in the line of a card, whose UUID may be written with dashes and a prefix there.
fn clocks_of(text: &str, uuid: &str) -> Option<String> {
    let digits = |text: &str| text.trim_start_matches("GPU-").replace('-', "").to_lowercase();
    let cells = |line: &str| -> Vec<String> { line.split(',').map(|c| c.trim().into()).collect() };
    let line = text.lines().map(cells).find(|cells| digits(&cells[0]) == digits(uuid))?;
    let [_, sm, mem] = &line[..] else { return None };
    let known = [sm, mem].iter().all(|clock| clock.parse::<u32>().is_ok());
    known.then(|| format!("at most {sm} MHz, memory {mem} MHz"))
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
    fn the_clocks_of_a_card_are_those_of_its_line() {
        let text = "GPU-11111111-0000-0000-0000-000000000000, 1410, 1593\nGPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9, 1980, 2619\n";
        let found = clocks_of(text, "0A1B2C3D4E5F60718293a4b5c6d7e8f9");
        assert_eq!(found.as_deref(), Some("at most 1980 MHz, memory 2619 MHz"));
        assert_eq!(clocks_of(text, "ff"), None);
        assert_eq!(clocks_of("GPU-ff, [N/A], 1\n", "ff"), None);
        assert_eq!(clocks_of("no devices\n", "ff"), None);
    }

    #[test]
    fn the_driver_version_is_found_in_both_forms_of_its_line() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\nGCC version: 11.4.0";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5";
        assert_eq!(version(open), Some("580.159.04"));
        assert_eq!(version(closed), Some("550.54.15"));
        assert_eq!(version("GCC version"), None);
    }
}
