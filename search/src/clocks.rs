//! Checks whether a card's clocks were stable while it was timed. We do not lock them; the readings are recorded, and a
//! run in which they changed or were throttled has a note that names the cause.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Relative difference up to which two readings of the SM clock count as equal: two of its steps of 15 MHz.
const SAME: f64 = 0.016;

/// Clock readings at one moment, with what sets them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Clocks {
    /// SM clock, in megahertz.
    pub sm_mhz: u32,
    /// Memory clock, in megahertz.
    pub memory_mhz: u32,
    /// Reasons of throttling, in words.
    pub throttled: Vec<String>,
    /// Power that the card draws, in watts.
    #[serde(default)]
    pub power_w: Option<f64>,
    /// Temperature of the chip, in degrees Celsius.
    #[serde(default)]
    pub temperature_c: Option<u32>,
}

/// The readings before and after each run of timed blocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClockReadings {
    /// In the order in which they were taken.
    pub all: Vec<Clocks>,
}

impl ClockReadings {
    /// Adds later readings.
    pub fn extend(&mut self, later: Self) {
        self.all.extend(later.all);
    }

    /// The lowest and the highest SM clock, if they differ by more than the card's steps.
    #[must_use]
    pub fn changed(&self) -> Option<(u32, u32)> {
        let sm = || self.all.iter().map(|clocks| clocks.sm_mhz);
        let (low, high) = (sm().min()?, sm().max()?);
        (f64::from(high - low) > SAME * f64::from(high)).then_some((low, high))
    }

    /// The reasons of throttling.
    #[must_use]
    pub fn throttled(&self) -> BTreeSet<&str> {
        self.all.iter().flat_map(|clocks| &clocks.throttled).map(String::as_str).collect()
    }

    /// Notes for a record: the readings, and a note for each problem. Empty if the clocks could not be read.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let (Some(first), Some(last)) = (self.all.first(), self.all.last()) else {
            return Vec::new();
        };
        let mut notes = vec![format!(
            "clocks: SM {} MHz before and {} MHz after, memory {} MHz",
            first.sm_mhz, last.sm_mhz, last.memory_mhz
        )];
        if let (Some(before), Some(after)) = (first.power_w, last.power_w) {
            notes.push(format!("power: {before:.0} W before and {after:.0} W after"));
        }
        if let (Some(before), Some(after)) = (first.temperature_c, last.temperature_c) {
            notes.push(format!("temperature: {before} C before and {after} C after"));
        }
        if let Some((low, high)) = self.changed() {
            notes.push(format!("clocks changed while timed: SM {low} to {high} MHz"));
        }
        let reasons: Vec<&str> = self.throttled().into_iter().collect();
        if !reasons.is_empty() {
            notes.push(format!("throttled while timed: {}", reasons.join(", ")));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(sm_mhz: u32, throttled: &[&str]) -> Clocks {
        let throttled = throttled.iter().map(|&reason| reason.to_owned()).collect();
        Clocks { sm_mhz, memory_mhz: 3201, throttled, ..Clocks::default() }
    }

    #[test]
    fn what_moved_or_was_held_down_is_named() {
        let notes = |all: &[Clocks]| ClockReadings { all: all.to_vec() }.notes();
        assert_eq!(notes(&[]), Vec::<String>::new());
        let steady = notes(&[reading(1980, &[]), reading(1965, &[])]);
        assert_eq!(steady, ["clocks: SM 1980 MHz before and 1965 MHz after, memory 3201 MHz"]);
        let back = notes(&[reading(1980, &[]), reading(1755, &["power cap"]), reading(1980, &[])]);
        assert_eq!(back.len(), 3, "{back:?}");
        assert_eq!(back[1], "clocks changed while timed: SM 1755 to 1980 MHz");
        assert_eq!(back[2], "throttled while timed: power cap");
        let hot = Clocks { power_w: Some(699.6), temperature_c: Some(71), ..reading(1980, &[]) };
        let hot = notes(&[hot.clone(), Clocks { temperature_c: Some(73), ..hot }]);
        assert_eq!(
            hot[1..],
            ["power: 700 W before and 700 W after", "temperature: 71 C before and 73 C after"]
        );
    }
}
