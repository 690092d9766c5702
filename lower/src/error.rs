//! Why a schedule cannot be lowered.

use std::fmt;

use ir::Violations;

/// A quantity that the ABI limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Tokens of a session's key/value cache.
    KvCapacity,
    /// Elements of one layer's key/value cache.
    KvWords,
    /// Elements of one buffer.
    BufferWords,
    /// Rows of a packed matrix.
    MatrixRows,
    /// Buffers of a program.
    Buffers,
    /// Counters of a program.
    Counters,
    /// Tasks of a program.
    Tasks,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KvCapacity => "tokens of the key/value cache",
            Self::KvWords => "elements of one layer's key/value cache",
            Self::BufferWords => "elements of a buffer",
            Self::MatrixRows => "rows of a packed matrix",
            Self::Buffers => "buffers",
            Self::Counters => "counters",
            Self::Tasks => "tasks",
        })
    }
}

/// An unsupported request, or a bug of this crate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LowerError {
    /// The program would have more of something than the ABI can represent.
    #[error("the program needs {actual} {limit}, between 1 and {max} are possible")]
    LimitExceeded {
        /// The limited quantity.
        limit: Limit,
        /// The maximum.
        max: u64,
        /// The required number.
        actual: u64,
    },
    /// The schedule was validated for another graph or target.
    #[error("the schedule is not valid for this graph and target: {0}")]
    NotValidHere(Violations),
    /// The lowered program does not verify: a bug of this crate.
    #[error("lowering made a program that does not verify, which is a bug in `lower`: {0}")]
    Internal(Violations),
}

/// `Ok` if `1 <= actual <= max`.
pub(crate) fn within(limit: Limit, max: u64, actual: u64) -> Result<(), LowerError> {
    if (1..=max).contains(&actual) {
        Ok(())
    } else {
        Err(LowerError::LimitExceeded { limit, max, actual })
    }
}
