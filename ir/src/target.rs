//! A GPU as data, for schedules, lowering and the cost model.
//!
//! **Promises.** There are no driver calls here; the caller that talks to a live device describes it. A bandwidth comes
//! with its source, because bounds and percentages are only as accurate as the bandwidth.

use serde::{Deserialize, Serialize};

use crate::nearest::nearest;
use crate::program::DEVICES_MAX;

/// Where a bandwidth comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BandwidthSource {
    /// Measured on one card with streaming bulk copies; other cards of the same name differ by about 1%.
    Measured,
    /// The vendor's number times [`DERATE_PERCENT`].
    Datasheet,
}

/// Percentage of the vendor's bandwidth that a stream of bulk copies reaches: what the h200 reached (4.67 of 4.8 TB/s).
pub const DERATE_PERCENT: u64 = 97;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Lower-case name, such as `h200`.
    pub name: String,
    /// Compilation target of the device code, such as `sm_90a`.
    pub arch: String,
    /// Multiprocessors; a program has one worker on each.
    pub sms: u32,
    /// Shared memory that one block may opt in to.
    pub smem_optin_bytes: u32,
    /// Second-level cache.
    pub l2_bytes: u64,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Threads of a block, at most.
    pub threads_per_block_max: u32,
    /// Bytes per second that a weight stream over all multiprocessors reaches.
    pub bandwidth: u64,
    /// Where `bandwidth` comes from.
    pub bandwidth_source: BandwidthSource,
    /// Boost clock.
    pub clock_mhz: u32,
    /// GPUs of this kind that run one step together; the other numbers are those of one.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub devices: u32,
    /// Whether these are parts of one GPU, each run as if it were a GPU of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emulated: bool,
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(devices: &u32) -> bool {
    *devices == 1
}

/// One row of the table: name and architecture; multiprocessors, KiB of shared memory, MiB of L2, MHz; GB/s and its
/// source.
type Row = (&'static str, &'static str, [u32; 4], u64, BandwidthSource);

use BandwidthSource::{Datasheet, Measured};

/// The known GPUs. The h200's bandwidth is measured on one card: 64 KB x 3 stages of bulk copies, 1 block per
/// multiprocessor, contiguous per multiprocessor, 4.670 TB/s. The rest are data sheets.
const TABLE: &[Row] = &[
    ("h200", "sm_90a", [132, 227, 60, 1980], 4670, Measured),
    ("h100", "sm_90a", [132, 227, 50, 1980], 3350, Datasheet),
    ("a100", "sm_80", [108, 163, 40, 1410], 2039, Datasheet),
    ("l40s", "sm_89", [142, 99, 96, 2520], 864, Datasheet),
    ("rtx4090", "sm_89", [128, 99, 72, 2520], 1008, Datasheet),
    ("rtx5090", "sm_120a", [170, 99, 96, 2407], 1792, Datasheet),
    ("b200", "sm_100a", [148, 227, 126, 1965], 8000, Datasheet),
    ("gh200", "sm_90a", [132, 227, 60, 1980], 4000, Datasheet),
    ("h20", "sm_90a", [78, 227, 60, 1980], 4000, Datasheet),
    // Any other card of capability 9.0, until it has a row. It has the fastest memory of its kind, so that no measured
    // time lies below the bound.
    ("sm_90", "sm_90a", [132, 227, 60, 1980], 4900, Datasheet),
];

/// A card that the kernel runs on: the words in its driver's name, its row of the table, and its data sheet's bandwidth
/// where that differs from the row's.
struct Card {
    words: &'static [&'static str],
    name: &'static str,
    gb_per_s: Option<u64>,
}

/// The cards of capability 9.0. The first whose words all match is taken, so the more specific ones come first.
const CARDS: &[Card] = &[
    Card { words: &["GH200"], name: "gh200", gb_per_s: None },
    Card { words: &["H200"], name: "h200", gb_per_s: None },
    Card { words: &["H100", "PCIe"], name: "h100", gb_per_s: Some(2039) },
    Card { words: &["H100", "NVL"], name: "h100", gb_per_s: Some(3938) },
    Card { words: &["H100"], name: "h100", gb_per_s: None },
    Card { words: &["H800", "PCIe"], name: "h100", gb_per_s: Some(2039) },
    Card { words: &["H800"], name: "h100", gb_per_s: None },
    Card { words: &["H20"], name: "h20", gb_per_s: None },
];

/// The row for a card of capability 9.0 that has none.
const UNKNOWN_CARD: &str = "sm_90";

impl From<&Row> for Target {
    fn from(row: &Row) -> Self {
        let &(name, arch, [sms, smem_optin_kib, l2_mib, clock_mhz], gb_per_s, source) = row;
        let percent = match source {
            Measured => 100,
            Datasheet => DERATE_PERCENT,
        };
        Self {
            name: name.to_string(),
            arch: arch.to_string(),
            sms,
            smem_optin_bytes: smem_optin_kib * 1024,
            l2_bytes: u64::from(l2_mib) << 20,
            registers_per_sm: 65_536,
            threads_per_block_max: 1024,
            bandwidth: gb_per_s * 1_000_000_000 / 100 * percent,
            bandwidth_source: source,
            clock_mhz,
            devices: 1,
            emulated: false,
        }
    }
}

/// No GPU of the table has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown target `{given}`; known: {}{}",
    Target::names().collect::<Vec<_>>().join(", "),
    .suggestion.map_or_else(String::new, |name| format!("; try `{name}`"))
)]
pub struct UnknownTarget {
    /// The name that was given.
    pub given: String,
    /// The nearest name of the table, if one is near.
    pub suggestion: Option<&'static str>,
}

impl Target {
    /// The GPU of the table with this name, or several: `h200x2`, or one in parts: `h200/2`.
    ///
    /// # Errors
    /// [`UnknownTarget`], with the nearest name.
    pub fn by_name(name: &str) -> Result<Self, UnknownTarget> {
        if let Some((one, devices)) = name.rsplit_once('x')
            && let Ok(devices @ 2..=DEVICES_MAX) = devices.parse()
            && let Ok(target @ Self { devices: 1, .. }) = Self::by_name(one)
        {
            return Ok(target.times(devices));
        }
        if let Some((one, parts)) = name.rsplit_once('/')
            && let Ok(parts @ 2..=DEVICES_MAX) = parts.parse()
            && let Ok(target @ Self { devices: 1, .. }) = Self::by_name(one)
        {
            return Ok(target.divided(parts));
        }
        TABLE.iter().find(|row| row.0.eq_ignore_ascii_case(name)).map(Self::from).ok_or_else(|| {
            UnknownTarget { given: name.to_string(), suggestion: nearest(name, Self::names()) }
        })
    }

    /// This many GPUs of this kind, which run one step together.
    #[must_use]
    pub fn times(self, devices: u32) -> Self {
        let one = self.of_one();
        let name = if devices == 1 { one.to_owned() } else { format!("{one}x{devices}") };
        Self { name, devices, ..self }
    }

    /// The name of one of its GPUs.
    #[must_use]
    pub fn of_one(&self) -> &str {
        let mark = if self.emulated { '/' } else { 'x' };
        let split = self.name.rsplit_once(mark).filter(|_| self.devices > 1);
        split.map_or(self.name.as_str(), |(one, _)| one)
    }

    /// This GPU, in as many parts, each as a GPU of its own: what tests of several devices run on. Multiprocessors that are left over idle.
    #[must_use]
    pub fn divided(self, parts: u32) -> Self {
        let (name, sms) = (format!("{}/{parts}", self.name), self.sms / parts);
        let bandwidth = self.bandwidth / u64::from(parts);
        Self { name, sms, bandwidth, devices: parts, emulated: true, ..self }
    }

    /// A GPU of this kind as the named one is: several times, or in parts.
    #[must_use]
    pub fn like(self, named: &Self) -> Self {
        if named.emulated { self.divided(named.devices) } else { self.times(named.devices) }
    }

    /// GPUs that are needed.
    #[must_use]
    pub fn cards(&self) -> u32 {
        if self.emulated { 1 } else { self.devices }
    }

    /// Bytes per second that the weight streams of all its GPUs reach together.
    #[must_use]
    pub fn total_bandwidth(&self) -> u64 {
        self.bandwidth * u64::from(self.devices)
    }

    /// The card of capability 9.0 with this driver name; `sm_90` if it is unknown. Sizes are those of the table; those
    /// that the driver reports for the card take precedence.
    #[must_use]
    pub fn of_card(driver_name: &str) -> Self {
        let words: Vec<&str> = driver_name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        let has = |word: &&str| words.iter().any(|had| had.eq_ignore_ascii_case(word));
        let card = CARDS.iter().find(|card| card.words.iter().all(has));
        let name = card.map_or(UNKNOWN_CARD, |card| card.name);
        let row = TABLE.iter().find(|row| row.0 == name).unwrap_or(&TABLE[0]);
        let mut target = Self::from(row);
        if let Some(gb_per_s) = card.and_then(|card| card.gb_per_s) {
            target.bandwidth = gb_per_s * 1_000_000_000 / 100 * DERATE_PERCENT;
            target.bandwidth_source = Datasheet;
        }
        target
    }

    /// Every GPU of the table.
    #[must_use]
    pub fn all() -> Vec<Self> {
        TABLE.iter().map(Self::from).collect()
    }

    /// The names of the table, in order.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.0)
    }

    /// Whether the architecture has tensor cores that multiply 16-bit elements of both kinds (8.0 and later).
    #[must_use]
    pub fn has_mma(&self) -> bool {
        let digits =
            self.arch.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
        digits.parse::<u32>().is_ok_and(|arch| arch >= 80)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_found_by_name_with_suggestions() {
        let h200 = Target::by_name("H200").expect("in the table");
        assert_eq!(
            (h200.sms, h200.smem_optin_bytes, h200.bandwidth),
            (132, 232_448, 4_670_000_000_000)
        );
        assert_eq!(h200.bandwidth_source, Measured);
        let error = Target::by_name("rtx409O").expect_err("not in the table");
        assert_eq!(error.suggestion, Some("rtx4090"));
        assert_eq!(
            error.to_string(),
            "unknown target `rtx409O`; known: h200, h100, a100, l40s, rtx4090, rtx5090, b200, gh200, h20, sm_90; try `rtx4090`"
        );
    }

    #[test]
    fn several_gpus_are_a_target_of_their_own() {
        let [one, two] = ["rtx4090", "rtx4090x2"].map(|name| Target::by_name(name).unwrap());
        assert_eq!((two.devices, two.sms, two.bandwidth), (2, one.sms, one.bandwidth));
        assert_eq!(two.total_bandwidth(), 2 * one.bandwidth);
        assert_eq!((one.clone().times(2), two.clone().times(1)), (two.clone(), one));
        assert_eq!(two.clone().times(4).name, "rtx4090x4");
        let halves = Target::by_name("h200/2").unwrap();
        assert_eq!((halves.sms, halves.devices, halves.cards()), (66, 2, 1));
        assert_eq!(halves.total_bandwidth(), Target::by_name("h200").unwrap().bandwidth);
        assert_eq!(Target::by_name("h200").unwrap().like(&halves), halves);
        assert_eq!([&two.times(2), &halves].map(Target::of_one), ["rtx4090", "h200"]);
        for name in [
            "h200/1", "h200/9", "h200/2/2", "h200x2/2", "/2", "h200x1", "h200x9", "h200x", "x2",
            "h200x2x2", "h200x-2",
        ] {
            assert!(Target::by_name(name).is_err(), "{name}");
        }
        let json = serde_json::to_value(Target::by_name("h200").unwrap()).unwrap();
        assert_eq!(json.get("devices"), None, "one GPU is written as before there were several");
    }

    #[test]
    fn cards_are_told_apart_by_whole_words_of_their_names() {
        for (driver_name, name, gb_per_s) in [
            ("NVIDIA H200", "h200", 4670),
            ("NVIDIA H200 NVL", "h200", 4670),
            ("NVIDIA GH200 480GB", "gh200", 3880),
            ("NVIDIA H20", "h20", 3880),
            ("NVIDIA H100 80GB HBM3", "h100", 3249),
            ("NVIDIA H100 PCIe", "h100", 1977),
            ("NVIDIA H100 NVL", "h100", 3819),
            ("NVIDIA H800", "h100", 3249),
            ("NVIDIA H2000", "sm_90", 4753),
            ("", "sm_90", 4753),
        ] {
            let target = Target::of_card(driver_name);
            let found = (target.name.as_str(), target.bandwidth / 1_000_000_000);
            assert_eq!(found, (name, gb_per_s), "{driver_name}");
            // A search on this card is resumed by this name.
            assert!(Target::by_name(&target.name).is_ok(), "{driver_name}");
            assert_eq!(target.arch, "sm_90a", "{driver_name}");
        }
        assert!(CARDS.iter().all(|card| Target::by_name(card.name).is_ok()));
    }

    #[test]
    fn every_target_is_within_the_abi_and_differs_in_name() {
        let all = Target::all();
        for (i, target) in all.iter().enumerate() {
            assert!((1..=abi::WORKERS_MAX).contains(&target.sms), "{}", target.name);
            assert!(target.has_mma());
            assert!(all[..i].iter().all(|other| other.name != target.name));
            assert_eq!(Target::by_name(&target.name).as_ref(), Ok(target));
        }
    }
}
