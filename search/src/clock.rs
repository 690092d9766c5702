//! The time that a search spends on what.

use std::time::Duration;

/// Time since any fixed moment. The search has no clock of its own; it passes this one on to know what it spent on what.
pub type Clock = fn() -> Duration;

/// A clock that always reads zero: what is spent on what is not recorded.
pub(crate) fn no_clock() -> Duration {
    Duration::ZERO
}
