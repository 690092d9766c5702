//! What the card's clocks are, as NVML says. The library comes with the driver; where it is missing nothing is known.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;

use crate::nvml::{ByUuid, Init, LIBRARY, name_of};

/// `nvmlClockType_t`.
const SM: c_uint = 1;
const MEMORY: c_uint = 2;

/// Bits of the reasons for clocks below the highest, of those that slow a measurement down. An idle card and clocks that somebody set are
/// none.
const REASONS: [(c_ulonglong, &str); 6] = [
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal slowdown by the driver"),
    (0x40, "thermal slowdown by the hardware"),
    (0x80, "power brake"),
];

/// Clocks at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardClocks {
    /// Of the multiprocessors, in megahertz.
    pub sm_mhz: u32,
    /// Of the memory.
    pub memory_mhz: u32,
    /// What holds them down, in words.
    pub throttled: Vec<&'static str>,
}

type ClockInfo = unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_int;
type Reasons = unsafe extern "C" fn(*mut c_void, *mut c_ulonglong) -> c_int;

/// The calls, and the device that they are asked about. NVML stays initialised until the process ends: a reading is to cost microseconds.
struct Card {
    device: *mut c_void,
    clock: ClockInfo,
    reasons: Reasons,
    _library: Library,
}

// SAFETY: NVML may be called from any thread, and a device's handle is valid in all of them.
unsafe impl Send for Card {}
// SAFETY: as above; nothing of it is ever changed.
unsafe impl Sync for Card {}

impl Card {
    fn open(uuid: &str) -> Option<Self> {
        let name = name_of(uuid)?;
        // SAFETY: the driver's library, which initialises itself when it is asked to and not when it is loaded.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        // SAFETY: the types are those of nvml.h; the library is kept beside the pointers.
        let (init, by_uuid, clock, reasons) = unsafe {
            let reasons = library
                .get::<Reasons>(b"nvmlDeviceGetCurrentClocksEventReasons\0")
                .or_else(|_| library.get(b"nvmlDeviceGetCurrentClocksThrottleReasons\0"));
            (
                *library.get::<Init>(b"nvmlInit_v2\0").ok()?,
                *library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get::<ClockInfo>(b"nvmlDeviceGetClockInfo\0").ok()?,
                *reasons.ok()?,
            )
        };
        let mut device = std::ptr::null_mut();
        // SAFETY: NVML is initialised first; the name ends with a zero and the out pointer is valid.
        let found = unsafe { init() == 0 && by_uuid(name.as_ptr(), &raw mut device) == 0 };
        found.then_some(Self { device, clock, reasons, _library: library })
    }

    fn clocks(&self) -> Option<CardClocks> {
        let (mut sm_mhz, mut memory_mhz, mut bits) = (0, 0, 0);
        // SAFETY: the device's handle is that of an initialised NVML, the out pointers are valid.
        let known = unsafe {
            (self.clock)(self.device, SM, &raw mut sm_mhz) == 0
                && (self.clock)(self.device, MEMORY, &raw mut memory_mhz) == 0
                && (self.reasons)(self.device, &raw mut bits) == 0
        };
        known.then(|| CardClocks { sm_mhz, memory_mhz, throttled: words(bits) })
    }
}

fn words(bits: c_ulonglong) -> Vec<&'static str> {
    REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|&(_, word)| word).collect()
}

/// The clocks of the device with this id (of [`DeviceInfo`](crate::DeviceInfo)); nothing if NVML cannot say. Devices stay open once they
/// were asked about.
#[must_use]
pub fn card_clocks(uuid: &str) -> Option<CardClocks> {
    static CARDS: Mutex<BTreeMap<String, Option<Arc<Card>>>> = Mutex::new(BTreeMap::new());
    let card = {
        let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || Card::open(uuid).map(Arc::new);
        cards.entry(uuid.to_owned()).or_insert_with(open).clone()?
    };
    card.clocks()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_card_and_set_clocks_are_no_reasons() {
        assert_eq!(words(0x1 | 0x2 | 0x100), Vec::<&str>::new());
        assert_eq!(words(0x4 | 0x40), ["power cap", "thermal slowdown by the hardware"]);
    }

    #[test]
    fn a_device_that_is_not_here_has_no_clocks() {
        assert_eq!(card_clocks("0123456789abcdef0123456789abcdef"), None);
    }
}
