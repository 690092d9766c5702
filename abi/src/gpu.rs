//! The state of a GPU: what its driver tells, and how the telemetry page holds it.

use serde::{Deserialize, Serialize};

use crate::telemetry::{Telemetry, ThrottleReason};

/// The word for what a GPU cannot tell.
const UNKNOWN: u32 = u32::MAX;

/// A GPU at a moment. A field is `None` if the GPU or its driver cannot tell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuState {
    /// Clock of the multiprocessors, in megahertz.
    pub sm_mhz: u32,
    /// Clock of the memory, in megahertz.
    pub memory_mhz: u32,
    /// Power that it draws, in watts.
    pub power_w: Option<f64>,
    /// Power that it may draw, in watts.
    pub power_limit_w: Option<f64>,
    /// Temperature of the chip, in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Percent of the driver's last sampling period in which a kernel ran. A resident kernel that waits counts.
    pub busy_percent: Option<u32>,
    /// Memory errors since the driver was loaded that were not corrected.
    pub ecc_errors: Option<u32>,
    /// NVLinks that are up.
    pub links: Option<u32>,
    /// Why the clocks are held down.
    pub throttled: Vec<ThrottleReason>,
}

impl GpuState {
    /// The reasons in words.
    pub fn held_down(&self) -> impl Iterator<Item = &'static str> {
        self.throttled.iter().map(|reason| reason.name())
    }

    /// The state in a line, such as `1755 MHz, memory 3201 MHz, 699 of 700 W, 71 C, held down: power cap`.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line = format!("{} MHz, memory {} MHz", self.sm_mhz, self.memory_mhz);
        match (self.power_w, self.power_limit_w) {
            (Some(power), Some(limit)) => line += &format!(", {power:.0} of {limit:.0} W"),
            (Some(power), None) => line += &format!(", {power:.0} W"),
            (None, _) => {}
        }
        if let Some(degrees) = self.temperature_c {
            line += &format!(", {degrees} C");
        }
        if let Some(links) = self.links.filter(|links| *links > 0) {
            line += &format!(", {links} NVLinks");
        }
        if let Some(errors) = self.ecc_errors.filter(|errors| *errors > 0) {
            line += &format!(", {errors} memory errors");
        }
        if !self.throttled.is_empty() {
            line += &format!(", held down: {}", self.held_down().collect::<Vec<_>>().join(", "));
        }
        line
    }
}

impl Telemetry {
    /// Puts the GPU's state on the page.
    pub fn set_gpu(&mut self, gpu: &GpuState) {
        let word = |value: Option<u32>| value.unwrap_or(UNKNOWN);
        let milliwatts = |watts: Option<f64>| word(watts.map(|watts| (watts * 1e3).round() as u32));
        self.gpu_sm_mhz = gpu.sm_mhz;
        self.gpu_memory_mhz = gpu.memory_mhz;
        self.gpu_power_mw = milliwatts(gpu.power_w);
        self.gpu_power_limit_mw = milliwatts(gpu.power_limit_w);
        self.gpu_temperature_c = word(gpu.temperature_c);
        self.gpu_busy_percent = word(gpu.busy_percent);
        self.gpu_ecc_errors = word(gpu.ecc_errors);
        self.gpu_links = word(gpu.links);
        self.gpu_throttled = gpu.throttled.iter().fold(0, |bits, &why| bits | 1 << why as u32);
    }

    /// The GPU's state on the page; `None` if there was none.
    #[must_use]
    pub fn gpu(&self) -> Option<GpuState> {
        let known = |word: u32| Some(word).filter(|word| *word != UNKNOWN);
        let watts = |word: u32| known(word).map(|milliwatts| f64::from(milliwatts) / 1e3);
        let holds = |why: &ThrottleReason| self.gpu_throttled >> *why as u32 & 1 == 1;
        (self.gpu_sm_mhz > 0).then(|| GpuState {
            sm_mhz: self.gpu_sm_mhz,
            memory_mhz: self.gpu_memory_mhz,
            power_w: watts(self.gpu_power_mw),
            power_limit_w: watts(self.gpu_power_limit_mw),
            temperature_c: known(self.gpu_temperature_c),
            busy_percent: known(self.gpu_busy_percent),
            ecc_errors: known(self.gpu_ecc_errors),
            links: known(self.gpu_links),
            throttled: ThrottleReason::ALL.iter().copied().filter(holds).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;

    #[test]
    fn what_is_put_on_the_page_is_read_from_it() {
        let mut page = Telemetry::zeroed();
        assert_eq!(page.gpu(), None);
        let mut gpu = GpuState {
            sm_mhz: 1755,
            memory_mhz: 3201,
            power_w: Some(699.25),
            power_limit_w: Some(700.0),
            temperature_c: Some(71),
            busy_percent: Some(97),
            ecc_errors: Some(2),
            links: Some(18),
            throttled: vec![ThrottleReason::PowerCap, ThrottleReason::PowerBrake],
        };
        page.set_gpu(&gpu);
        assert_eq!(page.gpu().as_ref(), Some(&gpu));
        assert_eq!(
            gpu.line(),
            "1755 MHz, memory 3201 MHz, 699 of 700 W, 71 C, 18 NVLinks, 2 memory errors, \
             held down: power cap, power brake"
        );
        // What a GPU cannot tell is not zero.
        gpu = GpuState { sm_mhz: 1980, memory_mhz: 3201, ..GpuState::default() };
        page.set_gpu(&gpu);
        assert_eq!(page.gpu(), Some(gpu.clone()));
        assert_eq!(gpu.line(), "1980 MHz, memory 3201 MHz");
    }
}
