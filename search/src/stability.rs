//! When a row of a benchmark counts as a result: conditions that must have held, and gates over the samples of all
//! processes that measured it. A pure function of the samples.

use std::collections::BTreeSet;
use std::fmt;

use corpus::Conditions;
use serde::{Deserialize, Serialize};

use crate::assess::INTERVAL_ROUNDS;
use crate::clocks::{ClockReadings, Clocks};
use crate::device::{Samples, Side};
use crate::measure::{median, median_interval, noise_floor};
use crate::verdict::LatencyKind;

/// The conditions that must hold in every process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    /// Name of the card; `None` accepts any.
    #[serde(default)]
    pub card: Option<String>,
    /// No other process may have used the card.
    #[serde(default)]
    pub alone: bool,
    /// The SM clock may not have changed between the readings.
    #[serde(default)]
    pub stable_clocks: bool,
    /// Least version of the driver, such as `550.54`.
    #[serde(default)]
    pub driver_min: Option<String>,
}

/// The limits of a row's samples, in percent of the median.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Greatest width of a process's 99% interval.
    pub interval_pct: f64,
    /// Greatest apparent gain of the program over itself (A/A).
    pub noise_pct: f64,
    /// Greatest distance between the medians of two processes.
    pub spread_pct: f64,
    /// Whether throttling is accepted.
    #[serde(default)]
    pub throttling: bool,
}

/// What one process measured.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Process {
    /// Whether the results were right.
    pub correct: bool,
    /// Why not.
    pub rejected_reason: Option<String>,
    /// Measured or predicted.
    pub latency_kind: Option<LatencyKind>,
    /// Element type of the weights.
    pub dtype: String,
    /// Where it was measured; `None` for a prediction.
    pub conditions: Option<Conditions>,
    /// The clocks before and after.
    pub clocks: Vec<Clocks>,
    /// Microseconds per pass of each block, four per round.
    pub samples_us: Vec<[f64; 4]>,
    /// Hash of the schedule.
    pub schedule_id: Option<String>,
    /// Hash of the program.
    pub program_id: Option<String>,
    /// Hash of the kernel build.
    pub kernel_id: Option<String>,
}

impl Process {
    fn samples(&self) -> Samples {
        Samples { rounds: self.samples_us.clone(), ..Samples::default() }
    }

    /// The median of its samples.
    #[must_use]
    pub fn median_us(&self) -> f64 {
        median(&self.samples().of(Side::Candidate))
    }
}

/// The figures of a row that passed every gate.
///
/// ```compile_fail,E0451
/// # use search::stability::Stable;
/// let made_up = Stable { us: 1.0, ci_us: [1.0; 2], interval_pct: 0.0, noise_pct: 0.0, spread_pct: 0.0 };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stable {
    us: f64,
    ci_us: [f64; 2],
    interval_pct: f64,
    noise_pct: f64,
    spread_pct: f64,
}

impl Stable {
    /// Judges the processes of a row.
    ///
    /// # Errors
    /// Every gate that the row misses.
    pub fn new(
        required: &Requirements,
        limits: &Limits,
        processes: &[Process],
        seed: u64,
    ) -> Result<Self, Vec<String>> {
        let mut reasons = Vec::new();
        for (index, process) in processes.iter().enumerate() {
            let at = |what: String| format!("process {}: {what}", index + 1);
            reasons.extend(missed(required, limits, process).into_iter().map(at));
        }
        reasons.extend(different(processes));
        let pooled = processes.iter().flat_map(|process| process.samples().of(Side::Candidate));
        let pooled: Vec<f64> = pooled.collect();
        let (us, interval) = (median(&pooled), median_interval(&pooled, seed));
        let worst = |of: &dyn Fn(&Process) -> f64| {
            processes.iter().map(of).fold(0.0, |a, b| if a > b || f64::is_nan(a) { a } else { b })
        };
        let medians = || processes.iter().map(Process::median_us);
        let (least, most) = (medians().fold(f64::MAX, f64::min), medians().fold(0.0, f64::max));
        let stable = Self {
            us,
            ci_us: [interval.low, interval.high],
            interval_pct: worst(&|process| {
                let interval = median_interval(&process.samples().of(Side::Candidate), seed);
                100.0 * (interval.high - interval.low) / process.median_us()
            }),
            noise_pct: worst(&|process| 100.0 * noise_floor(&process.samples(), seed)),
            spread_pct: 100.0 * (most - least) / us,
        };
        if !pooled.is_empty() {
            reasons.extend(stable.beyond(limits));
        }
        if reasons.is_empty() { Ok(stable) } else { Err(reasons) }
    }

    /// The limits that the figures exceed. A figure that is not a number exceeds all.
    fn beyond(&self, limits: &Limits) -> impl Iterator<Item = String> {
        let all = [
            ("the 99% interval is", self.interval_pct, limits.interval_pct, "wide"),
            ("the program against itself (A/A) seems", self.noise_pct, limits.noise_pct, "faster"),
            ("the medians of the processes are", self.spread_pct, limits.spread_pct, "apart"),
        ];
        let beyond = all.into_iter().filter(|(_, found, most, _)| found > most || found.is_nan());
        beyond
            .map(|(what, found, most, how)| format!("{what} {found:.2}% {how}, more than {most}%"))
    }
}

impl fmt::Display for Stable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { us, interval_pct, noise_pct, spread_pct, .. } = self;
        write!(
            f,
            "{us:.1} us; 99% interval {interval_pct:.2}% wide, A/A {noise_pct:.2}%, processes {spread_pct:.2}% apart"
        )
    }
}

/// What is wrong with one process.
fn missed(required: &Requirements, limits: &Limits, process: &Process) -> Vec<String> {
    let mut reasons = Vec::new();
    if !process.correct {
        let why = process.rejected_reason.as_deref().unwrap_or("no reason was given");
        reasons.push(format!("its results are wrong: {why}"));
    }
    let (rounds, kind) = (process.samples_us.len(), process.latency_kind);
    if kind != Some(LatencyKind::MeasuredGpu) {
        reasons.push("it measured nothing: there was no GPU".to_owned());
    } else if rounds < INTERVAL_ROUNDS {
        reasons.push(format!("it has {rounds} rounds, an interval takes {INTERVAL_ROUNDS}"));
    }
    let unknown =
        Conditions { card: "unknown".into(), driver: "unknown".into(), ..Conditions::default() };
    let conditions = process.conditions.as_ref().unwrap_or(&unknown);
    if let Some(card) = required.card.as_ref().filter(|card| **card != conditions.card) {
        reasons.push(format!("the card is {}, not {card}", conditions.card));
    }
    if required.alone && conditions.other_processes != Some(0) {
        let others = conditions.other_processes;
        let others = others.map_or_else(|| "an unknown number of".to_owned(), |n| n.to_string());
        reasons.push(format!("{others} other processes used the card"));
    }
    if let Some(least) = &required.driver_min
        && version(&conditions.driver) < version(least)
    {
        reasons.push(format!("the driver is {}, older than {least}", conditions.driver));
    }
    let clocks = ClockReadings { all: process.clocks.clone() };
    if process.clocks.is_empty() && (required.stable_clocks || !limits.throttling) {
        reasons.push("the clocks could not be read".to_owned());
    }
    if let Some((low, high)) = clocks.changed().filter(|_| required.stable_clocks) {
        reasons.push(format!("the SM clock changed: {low} to {high} MHz"));
    }
    let throttled: Vec<&str> = clocks.throttled().into_iter().collect();
    if !limits.throttling && !throttled.is_empty() {
        reasons.push(format!("the card was throttled: {}", throttled.join(", ")));
    }
    reasons
}

/// The parts of a version; `None`, which is less than any, if it has none.
fn version(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|part| part.parse().ok()).collect()
}

/// What the processes did not have in common.
fn different(processes: &[Process]) -> Vec<String> {
    let ids = |of: fn(&Process) -> &Option<String>| {
        processes.iter().map(of).collect::<BTreeSet<_>>().len() > 1
    };
    let mut reasons = Vec::new();
    for (what, differ) in [
        ("schedules", ids(|process| &process.schedule_id)),
        ("programs", ids(|process| &process.program_id)),
        ("kernels", ids(|process| &process.kernel_id)),
    ] {
        if differ {
            reasons.push(format!("the processes ran different {what}"));
        }
    }
    let mut conditions = processes.iter().filter_map(|process| process.conditions.as_ref());
    if let Some(first) = conditions.next() {
        reasons.extend(conditions.find_map(|other| first.differs(other)));
    }
    if processes.is_empty() {
        reasons.push("no process measured it".to_owned());
    }
    reasons
}

#[cfg(test)]
mod tests;
