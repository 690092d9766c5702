//! What the tests of a file run on: the first GPU, or several devices that `AMK_TEST_TARGET` names: `h200/2` for two parts of it, `h200x2` for
//! two GPUs.

use ir::{Graph, ScheduleConfig, Target};
use vm_device::Variant;
use vm_host::{Card, DeviceInfo};

/// The devices.
pub(crate) fn target(info: &DeviceInfo) -> Target {
    let named = std::env::var("AMK_TEST_TARGET").unwrap_or_else(|_| "h200".to_owned());
    let named = Target::by_name(&named).unwrap_or_else(|error| panic!("{named}: {error}"));
    let h200 = Target::by_name("h200").expect("a known target");
    Target { sms: info.sms, ..h200 }.like(&named)
}

/// The neutral schedule; on several devices, which hand words over by flags only, the default one.
pub(crate) fn base(graph: &Graph, target: &Target) -> ScheduleConfig {
    match target.devices {
        1 => ir::schedule::neutral_config(graph, target),
        _ => ir::schedule::default_config(graph, target),
    }
}

/// The kernel and the GPUs of a schedule.
pub(crate) fn built(
    config: &ScheduleConfig,
    graph: &Graph,
    target: &Target,
) -> (Variant, Vec<Card>) {
    let variant = vm_host::variant(&config.kernel, graph);
    let cards = (0..target.cards()).map(Card::new).collect();
    (Variant { devices: target.devices, ..variant }, cards)
}
