//! A/A test: races a program against a copy of itself under the search's stopping rule. Every copy that it would keep
//! is a false positive.

use std::sync::Arc;

use serde::Serialize;

use crate::assess::{Assessed, Timing, assess, fixed, race};
use crate::decide::Decision;
use crate::device::{Device, Samples};
use crate::effort::{StoppingRule, spread};
use crate::gate::Gate;
use crate::measure::{Interval, median, noise_floor};
use crate::propose::mixed;
use crate::rejection::Rejection;
use crate::verdict::Verdict;

/// Of 64 equal candidates a search may keep at most this many.
const KEPT_OF_64: usize = 2;

/// One comparison of a program with its copy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Equal {
    /// What a search would have decided.
    pub decision: Decision,
    /// The apparent gain of the copy, as a fraction.
    pub gain: Interval,
    /// Rounds that were measured.
    pub rounds: usize,
    /// The clock readings, and what was wrong with them.
    pub notes: Vec<String>,
}

/// All comparisons, and the threshold that they had to beat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Equals {
    /// The apparent gain of the program over itself when the baseline was measured.
    pub noise_floor: f64,
    /// The larger of that and the least gain worth keeping.
    pub threshold: f64,
    /// The comparisons, in order.
    pub all: Vec<Equal>,
}

impl Equals {
    /// How many copies a search would have kept.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.all.iter().filter(|equal| equal.decision == Decision::Kept).count()
    }

    /// How many copies it may keep: 2 of 64.
    #[must_use]
    pub fn kept_max(&self) -> usize {
        self.all.len() * KEPT_OF_64 / 64
    }

    /// The median width of the gain's interval.
    #[must_use]
    pub fn width(&self) -> f64 {
        let widths: Vec<f64> = self.all.iter().map(|e| e.gain.high - e.gain.low).collect();
        median(&widths)
    }
}

/// Measures the baseline's noise, then races an assessed program against a copy `count` times. To the device the copy
/// is a separate program: it is loaded separately, switched to and from, and proven like any candidate.
///
/// # Errors
/// If there is no device, it gives no result, or an output disagrees.
pub fn equals(
    gate: &mut Gate<'_>,
    device: &mut dyn Device,
    assessed: &Assessed,
    timing: Timing,
    min_gain: f64,
    (count, seed): (usize, u64),
) -> Result<Equals, Rejection> {
    let mut copy = assessed.candidate.clone();
    copy.program = Arc::new((*copy.program).clone());
    let mut unread = Verdict::new("", "", "");
    let copy = assess(gate, Some(&mut *device), copy, &mut unread)?;
    let baseline = race(gate, device, [assessed; 2], timing, fixed(timing.rounds))?;
    let noise_floor = noise_floor(&baseline, seed);
    let threshold = noise_floor.max(min_gain);
    let bar = StoppingRule { threshold, spread: spread(&baseline), rounds: timing.rounds };
    let mut all = Vec::with_capacity(count);
    for index in 0..count {
        let seed = mixed(seed, index as u64);
        let enough = |samples: &Samples| bar.enough(samples, seed);
        let samples = race(gate, device, [assessed, &copy], timing, enough)?;
        let look = bar.look(&samples, seed);
        all.push(Equal {
            decision: look.decision.unwrap_or(Decision::Inconclusive),
            gain: look.gain,
            rounds: samples.rounds.len(),
            notes: samples.clocks.notes(),
        });
    }
    Ok(Equals { noise_floor, threshold, all })
}
