//! The distribution of measured times, as a client of a stream of tokens sees them.

use std::time::Duration;

use serde::Serialize;

/// A distribution, in milliseconds. A quantile is the least value that is not below that part of all (nearest rank).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Distribution {
    pub(crate) count: usize,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
}

/// Milliseconds in ascending order.
#[derive(Debug)]
pub(crate) struct Times(pub(crate) Vec<f64>);

impl Times {
    pub(crate) fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut sorted: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        Self(sorted)
    }

    pub(crate) fn quantile(&self, part: f64) -> Option<f64> {
        let rank = (part * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied()
    }

    pub(crate) fn distribution(&self) -> Option<Distribution> {
        let count = self.0.len();
        Some(Distribution {
            count,
            mean: self.0.iter().sum::<f64>() / count.max(1) as f64,
            p50: self.quantile(0.5)?,
            p95: self.quantile(0.95)?,
            p99: self.quantile(0.99)?,
            p99_9: self.quantile(0.999)?,
            max: self.quantile(1.0)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(times: &[u64]) -> Times {
        Times::of(times.iter().map(|ms| Duration::from_millis(*ms)))
    }

    #[test]
    pub(crate) fn quantiles_are_values_that_occurred() {
        let thousand: Vec<u64> = (1..=1000).rev().collect();
        let found = ms(&thousand).distribution().unwrap();
        assert_eq!((found.p50, found.p95, found.p99), (500.0, 950.0, 990.0));
        assert_eq!((found.p99_9, found.max), (999.0, 1000.0));
        assert!((found.mean - 500.5).abs() < 1e-9);
        let one = ms(&[7]).distribution().unwrap();
        assert_eq!((one.p50, one.p99, one.max), (7.0, 7.0, 7.0));
        assert_eq!(ms(&[]).distribution(), None);
    }
}
