//! Accuracy of one executor's logits relative to the evaluated graph's, in common metrics.
//!
//! [`compare`](crate::compare) decides and proves; this module measures. Every metric is over whole rows, so it
//! describes the distribution and not the worst element.

use crate::compare::Tolerance;
use crate::math::argmax;

/// Distance of logits from the expected ones, over some positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// Positions compared.
    pub positions: usize,
    /// Greatest over positions of: L2 norm of the difference over L2 norm of the expected row.
    pub rel_worst: f64,
    /// Mean of the same over positions.
    pub rel_mean: f64,
    /// Positions where the lead of the expected best logit exceeds the tolerance.
    pub decided: usize,
    /// The number of these positions where the other executor has the same best.
    pub decided_equal: usize,
    /// Mean divergence of the actual from the expected distribution, in nats.
    pub kl_mean: f64,
    /// Greatest accepted relative error of a position, and mean divergence: [`REL_MAX`](Self::REL_MAX) and
    /// [`KL_MAX`](Self::KL_MAX), and as many times more as the tolerance is greater than [`Tolerance::DEVICE`].
    pub rel_max: f64,
    /// The second of these.
    pub kl_max: f64,
}

impl Accuracy {
    /// Greatest accepted relative error of a position.
    pub const REL_MAX: f64 = 5e-3;
    /// Greatest accepted mean divergence, in nats.
    pub const KL_MAX: f64 = 1e-3;

    /// Measures rows of logits. `None` if there are no rows or they do not pair up.
    #[must_use]
    pub fn of(expected: &[Vec<f32>], actual: &[Vec<f32>], tolerance: Tolerance) -> Option<Self> {
        let pairs = || expected.iter().zip(actual);
        let fit = expected.len() == actual.len() && !expected.is_empty();
        if !fit || pairs().any(|(want, got)| want.len() != got.len() || want.is_empty()) {
            return None;
        }
        let positions = expected.len();
        let errors: Vec<f64> = pairs().map(|(want, got)| relative_error(want, got)).collect();
        let wider = (tolerance.rel() / Tolerance::DEVICE.rel()).max(1.0);
        let decided = || pairs().filter(|(want, _)| is_decided(want, tolerance));
        Some(Self {
            positions,
            rel_worst: errors.iter().copied().fold(0.0, greater),
            rel_mean: errors.iter().sum::<f64>() / positions as f64,
            decided: decided().count(),
            decided_equal: decided().filter(|(want, got)| argmax(want) == argmax(got)).count(),
            kl_mean: pairs().map(|(want, got)| divergence(want, got)).sum::<f64>()
                / positions as f64,
            rel_max: Self::REL_MAX * wider,
            kl_max: Self::KL_MAX * wider,
        })
    }

    /// Whether every metric is within its bound. NaN is not.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.rel_worst <= self.rel_max
            && self.kl_mean <= self.kl_max
            && self.decided == self.decided_equal
    }
}

/// The greater of the two; NaN if either is NaN.
fn greater(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn relative_error(want: &[f32], got: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 =
        want.iter().zip(got).map(|(&w, &g)| square(f64::from(w) - f64::from(g))).sum();
    let size: f64 = want.iter().map(|&w| square(f64::from(w))).sum();
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

/// Whether the best value leads the second by more than the tolerance of the row.
fn is_decided(row: &[f32], tolerance: Tolerance) -> bool {
    let best = argmax(row) as usize;
    let others = row.iter().enumerate().filter(|(index, _)| *index != best);
    let second = others.fold(f32::NEG_INFINITY, |second, (_, &value)| second.max(value));
    let largest = row.iter().fold(0f64, |largest, &v| largest.max(f64::from(v).abs()));
    f64::from(row[best]) - f64::from(second) > tolerance.rel() * largest
}

/// Kullback-Leibler divergence of softmax(actual) from softmax(expected), in nats.
fn divergence(expected: &[f32], actual: &[f32]) -> f64 {
    let (expected_norm, actual_norm) = (log_sum_exp(expected), log_sum_exp(actual));
    let terms = expected.iter().zip(actual).map(|(&want, &got)| {
        let (want, got) = (f64::from(want) - expected_norm, f64::from(got) - actual_norm);
        want.exp() * (want - got)
    });
    let sum: f64 = terms.sum();
    // Rounding can make a divergence of zero negative. NaN is kept.
    if sum < 0.0 { 0.0 } else { sum }
}

fn log_sum_exp(values: &[f32]) -> f64 {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = values.iter().map(|&v| (f64::from(v) - f64::from(max)).exp()).sum();
    f64::from(max) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(expected: &[Vec<f32>], actual: &[Vec<f32>]) -> Accuracy {
        Accuracy::of(expected, actual, Tolerance::DEVICE).unwrap()
    }

    #[test]
    fn equal_rows_have_no_error() {
        let rows = vec![vec![1.0, -2.0, 3.0], vec![0.0, 0.0, 0.0]];
        let found = measure(&rows, &rows);
        assert_eq!((found.positions, found.decided, found.decided_equal), (2, 1, 1));
        assert_eq!((found.rel_worst, found.rel_mean, found.kl_mean), (0.0, 0.0, 0.0));
        assert!(found.holds());
    }

    #[test]
    fn figures_are_those_of_the_definition() {
        let expected = vec![vec![3.0, 4.0], vec![0.0, 2.0]];
        let actual = vec![vec![3.0, 4.5], vec![0.0, 2.0]];
        let found = measure(&expected, &actual);
        assert!((found.rel_worst - 0.1).abs() < 1e-12 && (found.rel_mean - 0.05).abs() < 1e-12);
        let p = 1.0 / (1.0 + 1f64.exp());
        let q = 1.0 / (1.0 + 1.5f64.exp());
        let want = (p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()) / 2.0;
        assert!((found.kl_mean - want).abs() < 1e-9);
        assert!(!found.holds());
    }

    #[test]
    fn a_close_call_may_go_either_way_and_a_clear_one_may_not() {
        let close = measure(&[vec![1.0, 1.004]], &[vec![1.004, 1.0]]);
        assert_eq!((close.decided, close.decided_equal), (0, 0));
        assert!(close.holds());
        let clear = measure(&[vec![1.0, 1.006]], &[vec![1.006, 1.0]]);
        assert_eq!((clear.decided, clear.decided_equal), (1, 0));
        assert!(!clear.holds());
    }

    #[test]
    fn what_is_not_a_number_never_holds() {
        let found = measure(&[vec![1.0, 2.0]], &[vec![f32::NAN, 2.0]]);
        assert!(!found.holds(), "{found:?}");
        assert_eq!(Accuracy::of(&[], &[], Tolerance::DEVICE), None);
        assert_eq!(Accuracy::of(&[vec![1.0]], &[vec![]], Tolerance::DEVICE), None);
        assert_eq!(Accuracy::of(&[vec![1.0]], &[], Tolerance::DEVICE), None);
    }
}
