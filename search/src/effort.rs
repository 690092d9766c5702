//! How long to measure: a few rounds first, more only while they can change the decision. The rule, in the order of its
//! looks:
//!
//! - **After 1, 2, 4 and 8 rounds** a candidate is *reverted* if its mean gain plus [`GIVE_UP`] standard errors is below the threshold.
//!   The standard error comes from the spread within rounds, this pair's or the baseline's, whichever is larger.
//! - **After 4 and 8 rounds** it is *kept* if its mean gain less Student's 99.95% quantile of standard errors is above the threshold.
//! - **After the full rounds, and after three times as many**, the bootstrap interval of [`gain`] decides.
//! - **A gain that is only an order effect is not kept.** In a round (A B B A) each side has one block after a block of
//!   the other side and one after a block of its own. The clocks and caches that a candidate leaves behind affect the
//!   incumbent's last block; so the gain must also show in the blocks that follow their own kind, or the decision is
//!   *inconclusive*.
//!
//! A wrong revert costs a better schedule, which a later trial may find again. A wrong keep would be a false claim, so
//! no keep rests on fewer than four rounds or on another pair's spread alone: the looks together keep an equal
//! candidate in at most 1.1% of trials even if the threshold were zero (2 x 0.05% + 2 x 0.5%).

use crate::decide::{Decision, decide_measured};
use crate::device::Samples;
use crate::measure::{Interval, gain, median};

/// Standard errors by which a candidate must miss the threshold to be given up early: 99.95% one-sided, with a margin
/// because the spread itself is an estimate.
const GIVE_UP: f64 = 4.0;

/// Rounds after which an early keep is possible, with Student's 99.95% quantile for one degree of freedom less.
const KEEP_AFTER: [(usize, f64); 2] = [(4, 12.92), (8, 5.41)];

/// Rounds after which the samples are checked before the full rounds.
const EARLY: [usize; 4] = [1, 2, 4, 8];

/// Multiple of the full rounds after which the comparison ends as inconclusive.
const LONGEST: usize = 3;

/// The threshold of a comparison, its length, and the variation of single blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoppingRule {
    /// The larger of the noise floor and the least gain worth keeping.
    pub threshold: f64,
    /// Standard deviation of a block, as a fraction of its time, from racing the baseline against itself.
    pub spread: f64,
    /// Rounds of a full comparison.
    pub rounds: usize,
}

/// The result of the samples so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interim {
    /// Fraction of the incumbent's time that the candidate saves.
    pub gain: Interval,
    /// The decision; `None` asks for more rounds.
    pub decision: Option<Decision>,
}

impl StoppingRule {
    /// Rounds to add to `done` rounds; `None` when nothing more is to be measured.
    #[must_use]
    pub fn more(&self, done: usize) -> Option<usize> {
        let looks = EARLY.into_iter().filter(|&look| look < self.rounds);
        let mut looks = looks.chain([self.rounds, LONGEST * self.rounds]);
        looks.find(|&look| look > done).map(|look| look - done)
    }

    /// Rounds to add to these samples; `None` once they decide or nothing more is to be measured.
    #[must_use]
    pub fn enough(&self, samples: &Samples, seed: u64) -> Option<usize> {
        let done = samples.rounds.len();
        let decided = done > 0 && self.look(samples, seed).decision.is_some();
        if decided { None } else { self.more(done) }
    }

    /// Decides on the samples so far.
    #[must_use]
    pub fn look(&self, samples: &Samples, seed: u64) -> Interim {
        let rounds = samples.rounds.len();
        if rounds >= self.rounds {
            let gain = gain(samples, seed);
            let mut decision = decide_measured(gain, self.threshold, self.threshold);
            if decision == Decision::Kept && self.is_left_behind(samples) {
                decision = Decision::Inconclusive;
            }
            let last = self.more(rounds).is_none();
            let undecided = decision == Decision::Inconclusive && !last;
            return Interim { gain, decision: (!undecided).then_some(decision) };
        }
        let gains: Vec<f64> = samples.rounds.iter().map(gain_of_round).collect();
        let n = gains.len() as f64;
        let mean = gains.iter().sum::<f64>() / n;
        let within = |sigmas: f64, deviation: f64| {
            let reach = sigmas * deviation / n.sqrt();
            Interval { low: mean - reach, high: mean + reach }
        };
        let spread = self.spread.max(spread(samples));
        let wide = within(GIVE_UP, spread);
        if wide.high < self.threshold {
            return Interim { gain: wide, decision: Some(Decision::Reverted) };
        }
        if let Some((_, quantile)) =
            KEEP_AFTER.iter().rev().find(|(after, _)| gains.len() >= *after)
        {
            let squares: f64 = gains.iter().map(|gain| (gain - mean).powi(2)).sum();
            let sure = within(*quantile, spread.max((squares / (n - 1.0)).sqrt()));
            if sure.low > self.threshold && !self.is_left_behind(samples) {
                return Interim { gain: sure, decision: Some(Decision::Kept) };
            }
        }
        Interim { gain: wide, decision: None }
    }

    /// Whether the gain is an order effect: it disappears in the blocks that follow their own kind, so the candidate
    /// slows the block after it.
    #[must_use]
    pub fn is_left_behind(&self, samples: &Samples) -> bool {
        let (own, candidate): (Vec<f64>, Vec<f64>) =
            samples.rounds.iter().map(|&[a, _, c, _]| (a, c)).unzip();
        let steady = 1.0 - median(&candidate) / median(&own);
        steady.is_nan() || steady <= self.threshold
    }
}

/// The gain of one round; drift within the round cancels.
fn gain_of_round(&[a, b, c, d]: &[f64; 4]) -> f64 {
    1.0 - (b + c) / (a + d)
}

/// Standard deviation of a block as a fraction of its side's time, from the differences of the two blocks that each
/// side has in a round. It equals that of a round's gain, which is a difference of two means of two blocks.
#[must_use]
pub fn spread(samples: &Samples) -> f64 {
    let squares = |&[a, b, c, d]: &[f64; 4]| {
        let share = |x: f64, y: f64| ((x - y) / (x + y) * 2.0).powi(2) / 2.0;
        f64::midpoint(share(a, d), share(b, c))
    };
    let sum: f64 = samples.rounds.iter().map(squares).sum();
    (sum / samples.rounds.len().max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use rand::rngs::Xoshiro256PlusPlus;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const TRIES: u64 = 200;

    const BAR: StoppingRule = StoppingRule { threshold: 0.01, spread: 0.002, rounds: 12 };

    /// A block: noise of four uniform numbers, and in one of fifty a spike of up to 5%.
    fn block(us: f64, noise: f64, rng: &mut Xoshiro256PlusPlus) -> f64 {
        let sum: f64 = (0..4).map(|_| rng.random::<f64>() - 0.5).sum();
        let spike = if rng.random_bool(0.02) { 0.05 * rng.random::<f64>() } else { 0.0 };
        us * (1.0 + noise * sum * 3f64.sqrt() + spike)
    }

    /// Runs the rule to its end; returns the decision and the rounds that it took.
    fn decided(bar: StoppingRule, gain: f64, noise: f64, seed: u64) -> (Decision, usize) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut samples = Samples::default();
        loop {
            let more = bar.more(samples.rounds.len()).unwrap();
            for _ in 0..more {
                let mut side = |us: f64| block(us, noise, &mut rng);
                let (b, c) = (side(100.0 * (1.0 - gain)), side(100.0 * (1.0 - gain)));
                samples.rounds.push([side(100.0), b, c, side(100.0)]);
            }
            if let Some(decision) = bar.look(&samples, seed).decision {
                return (decision, samples.rounds.len());
            }
        }
    }

    fn share(bar: StoppingRule, gain: f64, noise: f64, decision: Decision) -> f64 {
        let hits = (0..TRIES).filter(|&seed| decided(bar, gain, noise, seed).0 == decision).count();
        hits as f64 / TRIES as f64
    }

    #[test]
    fn equals_are_not_kept_even_without_a_threshold() {
        for noise in [0.0005, 0.002, 0.01] {
            let bar = StoppingRule { threshold: 0.0, spread: noise, ..BAR };
            let kept = share(bar, 0.0, noise, Decision::Kept);
            assert!(kept <= 0.02, "{kept} of equal candidates kept at noise {noise}");
            assert!(share(BAR, 0.0, noise, Decision::Kept) == 0.0);
        }
    }

    #[test]
    fn a_spread_that_is_too_small_keeps_no_equals() {
        let bar = StoppingRule { threshold: 0.0, spread: 0.0001, ..BAR };
        let kept = share(bar, 0.0, 0.01, Decision::Kept);
        assert!(kept <= 0.02, "{kept} kept");
    }

    #[test]
    fn what_is_clear_is_decided_at_once() {
        for seed in 0..200 {
            let (slower, rounds) = decided(BAR, -0.05, 0.002, seed);
            assert_eq!(slower, Decision::Reverted);
            assert!(rounds <= 4, "{rounds} rounds for what is 5 % slower");
        }
        let quick = (0..200).filter(|&seed| decided(BAR, 0.0, 0.002, seed).1 <= 2).count();
        assert!(quick > 150, "{quick} of 200 equals took two rounds or less");
        let quick = |&seed: &u64| decided(BAR, 0.1, 0.002, seed) == (Decision::Kept, 4);
        let kept = (0..200).filter(quick).count();
        assert!(kept > 120, "{kept} of 200 that are 10 % faster took four rounds");
    }

    #[test]
    fn what_is_better_is_rarely_given_up() {
        let lost = share(BAR, 0.02, 0.002, Decision::Reverted);
        assert!(lost < 0.01, "{lost} of candidates that are 2 % faster reverted");
        assert!(share(BAR, 0.02, 0.002, Decision::Kept) > 0.95);
    }

    #[test]
    fn what_is_left_behind_is_no_gain() {
        // Two equal programs, one of which makes the next block of the other 10% slower.
        let samples = |rounds: usize| {
            let rounds = (0..rounds).map(|i| {
                let us = 100.0 + 0.01 * (i % 3) as f64;
                [us, us, us, 1.1 * us]
            });
            Samples { rounds: rounds.collect(), ..Samples::default() }
        };
        assert!(gain(&samples(12), 1).low > 0.04, "it looks like a gain");
        for rounds in [4, 8, 12, 36] {
            assert_ne!(BAR.look(&samples(rounds), 1).decision, Some(Decision::Kept), "{rounds}");
        }
        assert_eq!(BAR.look(&samples(36), 1).decision, Some(Decision::Inconclusive));
    }

    #[test]
    fn looks_add_up() {
        let mut done = 0;
        let mut looks = Vec::new();
        while let Some(more) = BAR.more(done) {
            done += more;
            looks.push(done);
        }
        assert_eq!(looks, [1, 2, 4, 8, 12, 36]);
        assert_eq!(StoppingRule { rounds: 2, ..BAR }.more(1), Some(1));
    }
}
