//! The device that tests run on.

use vm_host::{DeviceInfo, HostError};

/// The device, or `None` if there is none: the test prints so and passes, unless `AMK_REQUIRE_DEVICE` is set. A device that does not answer
/// properly is always a failure.
pub(crate) fn device() -> Option<DeviceInfo> {
    match vm_host::Card::default().info() {
        Ok(info) => Some(info),
        Err(error @ (HostError::NoDriver | HostError::NoDevice)) => {
            let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
            assert!(!required, "a device is required: {error}");
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
