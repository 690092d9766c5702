//! From raw samples to a latency, a gain and their intervals. Statistics only: the clock is the device's.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use reference_vm::compare::{Agreement, Device};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::{ROUND, Samples, Side};

/// Resamples of a bootstrap.
const RESAMPLES: usize = 2000;

/// Fraction of resamples left out at each end: a 99% interval, because a search makes many comparisons.
const TAIL: f64 = 0.005;

/// A closed interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// A measured latency of a program that agreed on the device.
///
/// ```compile_fail,E0451
/// # use search::{Interval, Latency};
/// let made_up = Latency { median_us: 1.0, ci_us: Interval { low: 1.0, high: 1.0 } };
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    median_us: f64,
    ci_us: Interval,
}

/// An impossible time: less than reading the bytes takes on this device.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{measured_us:.3} us per token is below the bound of {bound_us:.3} us: an artefact")]
pub struct BelowBound {
    /// The least time for reading the bytes.
    pub bound_us: f64,
    /// The measured time.
    pub measured_us: f64,
}

impl Latency {
    /// The latency of one side of the samples. It takes the proof of agreement because nothing else may be timed.
    ///
    /// # Errors
    /// If it is below the bound.
    pub fn new(
        _proof: &Agreement<Device>,
        samples: &Samples,
        side: Side,
        bound_us: f64,
        seed: u64,
    ) -> Result<Self, BelowBound> {
        let values = samples.of(side);
        let median_us = median(&values);
        if !median_us.is_finite() || median_us < bound_us {
            return Err(BelowBound { bound_us, measured_us: median_us });
        }
        Ok(Self { median_us, ci_us: median_interval(&values, seed) })
    }

    /// Median, in microseconds per token.
    #[must_use]
    pub fn median_us(&self) -> f64 {
        self.median_us
    }

    /// Interval of the median.
    #[must_use]
    pub fn ci_us(&self) -> Interval {
        self.ci_us
    }
}

/// A latency that the cost model predicts for a program that agrees on the reference VM. Never compared with a [`Latency`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    us: f64,
    bound_us: f64,
    chain_us: f64,
}

impl Predicted {
    /// A prediction, the bound that it may not be below, and its chain bound.
    ///
    /// # Errors
    /// If it is below the bound, which is an error of the cost model.
    pub fn new(
        _proof: &Agreement<reference_vm::compare::Reference>,
        us: f64,
        bound_us: f64,
        chain_us: f64,
    ) -> Result<Self, BelowBound> {
        // One part in a million: the last bits depend on the order of a sum.
        if !us.is_finite() || us < bound_us * (1.0 - 1e-6) {
            return Err(BelowBound { bound_us, measured_us: us });
        }
        Ok(Self { us, bound_us, chain_us })
    }

    /// Microseconds per token.
    #[must_use]
    pub fn us(&self) -> f64 {
        self.us
    }

    /// The bound.
    #[must_use]
    pub fn bound_us(&self) -> f64 {
        self.bound_us
    }

    /// The step with an infinitely fast stream.
    #[must_use]
    pub fn chain_us(&self) -> f64 {
        self.chain_us
    }
}

impl Samples {
    /// All samples of one side, in the order in which they were taken.
    #[must_use]
    pub fn of(&self, side: Side) -> Vec<f64> {
        let one = |round: &[f64; 4]| {
            let blocks = ROUND.into_iter().zip(*round);
            blocks.filter(|(of, _)| *of == side).map(|(_, us)| us).collect::<Vec<_>>()
        };
        self.rounds.iter().flat_map(one).collect()
    }

    /// The last outputs of each side, logits and the token chosen from them, as rows of one position.
    pub fn last(
        &self,
    ) -> impl DoubleEndedIterator<Item = (&[Vec<f32>], &[u32])> + ExactSizeIterator {
        let rows = self.last_logits.iter().map(std::slice::from_ref);
        rows.zip(self.last_chosen.iter().map(std::slice::from_ref))
    }

    /// One set of samples from several that were taken side by side: each block is the geometric mean of theirs, so a
    /// share of the time counts alike in all of them. Outputs are those of the last.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn geometric_mean(each: Vec<Self>) -> Self {
        let rounds = each.iter().map(|samples| samples.rounds.len()).min().unwrap_or(0);
        let block = |round: usize, block: usize| {
            geometric_mean(each.iter().map(|samples| samples.rounds[round][block]))
        };
        let rounds = (0..rounds).map(|round| [0, 1, 2, 3].map(|at| block(round, at))).collect();
        let joined = each.into_iter().reduce(|mut all, next| {
            all.extend(next);
            all
        });
        Self { rounds, ..joined.expect("something was timed") }
    }

    /// Adds the rounds of another run of the same plan.
    pub fn extend(&mut self, other: Self) {
        self.rounds.extend(other.rounds);
        self.last_logits = other.last_logits;
        self.last_chosen = other.last_chosen;
        self.clocks.extend(other.clocks);
    }
}

/// The geometric mean; not a number if there are none.
pub(crate) fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    match values.len() {
        // Exactly the value, which a logarithm would not give back.
        1 => values.sum(),
        count => (values.map(f64::ln).sum::<f64>() / count as f64).exp(),
    }
}

/// The fraction of the incumbent's time that the candidate saves: the bootstrap interval over whole rounds, so that
/// drift within a round stays paired.
#[must_use]
pub fn gain(samples: &Samples, seed: u64) -> Interval {
    let rounds = &samples.rounds;
    let statistic = |picks: &[usize]| {
        let picked =
            Samples { rounds: picks.iter().map(|&i| rounds[i]).collect(), ..Samples::default() };
        1.0 - median(&picked.of(Side::Candidate)) / median(&picked.of(Side::Incumbent))
    };
    bootstrap(rounds.len(), seed, statistic)
}

/// The apparent gain of a program over itself. No decision may rest on a smaller gain.
#[must_use]
pub fn noise_floor(same_twice: &Samples, seed: u64) -> f64 {
    let Interval { low, high } = gain(same_twice, seed);
    low.abs().max(high.abs())
}

/// The median; NaN if there are no values or one of them is NaN.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    if values.is_empty() || values.iter().any(|v| v.is_nan()) {
        return f64::NAN;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}

/// The bootstrap interval of the median.
#[must_use]
pub fn median_interval(values: &[f64], seed: u64) -> Interval {
    bootstrap(values.len(), seed, |picks| {
        median(&picks.iter().map(|&i| values[i]).collect::<Vec<_>>())
    })
}

fn bootstrap(len: usize, seed: u64, statistic: impl Fn(&[usize]) -> f64) -> Interval {
    if len == 0 {
        return Interval { low: f64::NAN, high: f64::NAN };
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut picks = vec![0; len];
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            picks.fill_with(|| rng.random_range(0..len));
            statistic(&picks)
        })
        .collect();
    values.sort_by(f64::total_cmp);
    let cut = (RESAMPLES as f64 * TAIL) as usize;
    Interval { low: values[cut], high: values[RESAMPLES - 1 - cut] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(a: f64, b: f64, noise: f64, seed: u64) -> Samples {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut one = |us: f64| us * (1.0 + noise * (rng.random::<f64>() - 0.5));
        let rounds = (0..12).map(|_| [one(a), one(b), one(b), one(a)]).collect();
        Samples { rounds, ..Samples::default() }
    }

    #[test]
    fn median_of_even_and_odd() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan() && median(&[1.0, f64::NAN]).is_nan());
    }

    #[test]
    fn sides_follow_the_order_of_a_round() {
        let samples = Samples { rounds: vec![[1.0, 2.0, 3.0, 4.0]], ..Samples::default() };
        assert_eq!(samples.of(Side::Incumbent), [1.0, 4.0]);
        assert_eq!(samples.of(Side::Candidate), [2.0, 3.0]);
    }

    #[test]
    fn the_interval_holds_the_true_gain_and_is_repeatable() {
        for seed in 0..50 {
            let samples = samples(100.0, 95.0, 0.02, seed);
            let found = gain(&samples, 7);
            assert!(found.low < 0.05 && 0.05 < found.high, "seed {seed}: {found:?}");
            assert_eq!(found, gain(&samples, 7));
        }
    }

    #[test]
    fn drift_within_rounds_is_no_gain() {
        let drifting = |i: usize| {
            let us = |block: usize| 100.0 * (1.0 + 0.01 * (4 * i + block) as f64);
            [us(0), us(1), us(2), us(3)]
        };
        let samples = Samples { rounds: (0..12).map(drifting).collect(), ..Samples::default() };
        let found = gain(&samples, 1);
        assert!(found.low < 1e-9 && found.high > -1e-9, "{found:?}");
    }

    #[test]
    fn no_samples_give_no_number() {
        assert!(gain(&Samples::default(), 1).low.is_nan());
        assert!(noise_floor(&Samples::default(), 1).is_nan());
    }
}
