//! The state of a GPU as a driver tells it: a library that stands in for NVML is compiled and loaded by a process of its own.

use std::path::Path;
use std::process::Command;

use abi::ThrottleReason;

/// A GPU that knows all, but for its temperature.
const DRIVER: &str = r#"
typedef unsigned int u32; typedef unsigned long long u64;
#define OK 0
#define INVALID 2
#define NOT_SUPPORTED 3
extern "C" {
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(u32) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int) { return "?"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = (void *)1;
  return uuid[4] == 'a' ? OK : INVALID;
}
int nvmlDeviceGetClockInfo(void *, int kind, u32 *mhz) { *mhz = kind == 1 ? 1755 : kind == 2 ? 3201 : 0; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *, u64 *bits) { *bits = 0x1 | 0x4; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *, u64 *bits) { *bits = 0x1 | 0x4; return OK; }
int nvmlDeviceGetPowerUsage(void *, u32 *milliwatts) { *milliwatts = 699250; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *, u32 *milliwatts) { *milliwatts = 700000; return OK; }
int nvmlDeviceGetTemperature(void *, int, u32 *) { return NOT_SUPPORTED; }
int nvmlDeviceGetUtilizationRates(void *, u32 *rates) { rates[0] = 97; rates[1] = 40; return OK; }
int nvmlDeviceGetTotalEccErrors(void *, int kind, int counter, u64 *errors) {
  *errors = kind == 1 && counter == 0 ? 2 : 1000;
  return OK;
}
int nvmlDeviceGetNvLinkState(void *, u32 link, int *up) { *up = link != 5; return link < 18 ? OK : INVALID; }
}
"#;

/// What the process with that library runs: names the test, which does nothing elsewhere.
const INSIDE: &str = "AMK_TEST_NVML";

fn compiled(folder: &Path) {
    let (source, library) = (folder.join("nvml.cc"), folder.join("libnvidia-ml.so.1"));
    std::fs::write(&source, DRIVER).unwrap();
    let built =
        Command::new("g++").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(built.expect("g++").success());
}

#[test]
fn the_state_of_a_gpu_is_what_its_driver_tells() {
    let folder = tempfile::tempdir().unwrap();
    compiled(folder.path());
    let me = std::env::current_exe().unwrap();
    let inside = Command::new(me)
        .args(["--exact", "inside_of_a_process_with_that_driver", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&inside.stdout);
    assert!(inside.status.success() && said.contains("read the state"), "{said}");
}

#[test]
fn inside_of_a_process_with_that_driver() {
    if std::env::var_os(INSIDE).is_none() {
        return; // the other test runs this one
    }
    let state = vm_host::gpu_state("a0000000000000000000000000000000").expect("a state");
    assert_eq!((state.sm_mhz, state.memory_mhz), (1755, 3201));
    assert_eq!((state.power_w, state.power_limit_w), (Some(699.25), Some(700.0)));
    assert_eq!((state.temperature_c, state.busy_percent), (None, Some(97)));
    assert_eq!((state.ecc_errors, state.links), (Some(2), Some(17)));
    assert_eq!(state.throttled, [ThrottleReason::PowerCap]);
    assert_eq!(vm_host::gpu_state("b0000000000000000000000000000000"), None);
    println!("read the state");
}
