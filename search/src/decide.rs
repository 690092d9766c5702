//! Keep, revert or inconclusive: pure functions of measurements or predictions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::measure::{Interval, Predicted};

/// The decision on a correct candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It is better by more than the threshold: the new incumbent.
    Kept,
    /// It is not better by more than the threshold.
    Reverted,
    /// The interval contains the threshold.
    #[default]
    Inconclusive,
}

/// Decides on a measured gain. The threshold is the larger of the noise floor and the least gain worth keeping.
///
/// A NaN gives [`Decision::Inconclusive`].
#[must_use]
pub fn decide_measured(gain: Interval, noise_floor: f64, min_gain: f64) -> Decision {
    let threshold = if noise_floor.is_nan() { f64::NAN } else { noise_floor.max(min_gain) };
    if gain.low > threshold {
        Decision::Kept
    } else if gain.high < threshold {
        Decision::Reverted
    } else {
        Decision::Inconclusive
    }
}

/// Decides on two predictions, which have no noise.
#[must_use]
pub fn decide_predicted(incumbent: &Predicted, candidate: &Predicted, min_gain: f64) -> Decision {
    if predicted_gain(incumbent, candidate) > min_gain {
        Decision::Kept
    } else {
        Decision::Reverted
    }
}

/// The fraction of the incumbent's predicted time that the candidate saves.
#[must_use]
pub fn predicted_gain(incumbent: &Predicted, candidate: &Predicted) -> f64 {
    1.0 - candidate.us() / incumbent.us()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(low: f64, high: f64) -> Interval {
        Interval { low, high }
    }

    #[test]
    fn the_whole_interval_must_clear_the_threshold() {
        let table = [
            (interval(0.02, 0.04), 0.005, 0.01, Decision::Kept),
            (interval(0.02, 0.04), 0.03, 0.01, Decision::Inconclusive),
            (interval(0.005, 0.04), 0.0, 0.01, Decision::Inconclusive),
            (interval(-0.02, 0.005), 0.0, 0.01, Decision::Reverted),
            (interval(-0.5, -0.4), 0.0, 0.01, Decision::Reverted),
            (interval(0.01, 0.01), 0.0, 0.01, Decision::Inconclusive),
            (interval(f64::NAN, f64::NAN), 0.0, 0.01, Decision::Inconclusive),
            (interval(0.2, 0.4), f64::NAN, 0.01, Decision::Inconclusive),
        ];
        for (gain, noise, least, want) in table {
            assert_eq!(decide_measured(gain, noise, least), want, "{gain:?} {noise} {least}");
        }
    }
}
