//! The parent's deadlines. The device's own limits are shorter (a trap after seconds), so these only end a process that
//! does not answer at all; a slow machine must not reach them.

use std::time::Duration;

/// Bandwidth assumed for the slowest way of loading weights, in bytes per second.
const SLOWEST_LOAD: u64 = 100_000_000;

/// The deadlines of requests, and how often a process is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Starting a process: its driver, its compiler, the measurement of the bandwidth.
    pub open: Duration,
    /// Any request, whatever else it does: long enough for a trap, the end of a kernel and its report.
    pub answer: Duration,
    /// The first program of a process: weights, caches, constants.
    pub boot: Duration,
    /// A kernel variant that the process has not compiled yet.
    pub compile: Duration,
    /// A launch of another kernel variant.
    pub launch: Duration,
    /// A position that is run.
    pub position: Duration,
    /// A process that was asked to end, or killed.
    pub leave: Duration,
    /// Consecutive starts that may fail.
    pub starts: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            open: Duration::from_secs(180),
            answer: Duration::from_secs(30),
            boot: Duration::from_secs(120),
            compile: Duration::from_secs(180),
            launch: Duration::from_secs(10),
            position: Duration::from_millis(200),
            leave: Duration::from_secs(10),
            starts: 3,
        }
    }
}

/// The parts of a request that its deadline depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) opens: bool,
    pub(crate) boots: bool,
    pub(crate) compiles: u32,
    pub(crate) launches: u32,
    pub(crate) positions: u32,
}

impl Limits {
    /// The limits for a model with `bytes` bytes of weights.
    #[must_use]
    pub fn for_weights(bytes: u64) -> Self {
        let limits = Self::default();
        Self { boot: limits.boot + Duration::from_secs(bytes / SLOWEST_LOAD), ..limits }
    }

    /// The deadline of an answer.
    pub(crate) fn of(&self, work: &Work) -> Duration {
        let once = |asked: bool, limit: Duration| if asked { limit } else { Duration::ZERO };
        self.answer
            + once(work.opens, self.open)
            + once(work.boots, self.boot)
            + self.compile.saturating_mul(work.compiles)
            + self.launch.saturating_mul(work.launches)
            + self.position.saturating_mul(work.positions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_grows_with_what_is_asked() {
        let limits = Limits::default();
        let short = limits.of(&Work { positions: 1, ..Work::default() });
        let long = limits.of(&Work { positions: 1000, ..Work::default() });
        assert_eq!(long - short, limits.position * 999);
        let first = limits.of(&Work { positions: 1, boots: true, launches: 1, ..Work::default() });
        assert_eq!(first - short, limits.boot + limits.launch);
        let large = Limits::for_weights(16 << 30);
        assert!(large.boot > limits.boot + Duration::from_secs(100));
    }

    #[test]
    fn the_most_that_can_be_asked_has_a_deadline() {
        let most = Work {
            opens: true,
            boots: true,
            compiles: u32::MAX,
            launches: u32::MAX,
            positions: u32::MAX,
        };
        assert!(Limits::for_weights(u64::MAX).of(&most) > Duration::from_secs(u64::from(u32::MAX)));
    }
}
