//! The state machine of one job: pure, so that the model explores exactly what the board executes.
//!
//! A lease is known by its **fence**, a number that the board never gives twice. Whoever beats, finishes or gives back
//! shows the fence; an older one is late. A lease that has run out still counts until somebody else claims the job, so
//! a slow worker loses nothing unless its place was taken.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Milliseconds of a clock.
pub type Millis = u64;

/// The number of a lease; later leases have larger ones.
pub type Fence = u64;

/// The terms of all leases of a board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// How long a lease lasts after a claim or a heartbeat.
    pub lease_ms: Millis,
    /// How often a worker renews it.
    pub heartbeat_ms: Millis,
    /// Leases of a job that may run out or fail before it is dead.
    pub attempts_max: u32,
}

impl Default for Terms {
    fn default() -> Self {
        Self { lease_ms: 60_000, heartbeat_ms: 10_000, attempts_max: 3 }
    }
}

impl Terms {
    /// Checks that a worker can miss one heartbeat.
    ///
    /// # Errors
    /// What is out of range, and the range.
    pub fn check(&self) -> Result<(), String> {
        let Self { lease_ms, heartbeat_ms, attempts_max } = *self;
        if heartbeat_ms == 0 || heartbeat_ms.saturating_mul(2) > lease_ms || lease_ms > 86_400_000 {
            return Err(format!(
                "a lease of {lease_ms} ms with a heartbeat of {heartbeat_ms} ms: the heartbeat must be above 0 and at \
                 most half of the lease, the lease at most a day"
            ));
        }
        if attempts_max == 0 {
            return Err("0 attempts: a job needs at least one".to_owned());
        }
        Ok(())
    }

    /// When a worker must stop believing in its lease, on its own monotonic clock: `asked` is that clock before the
    /// request was sent, so the board's lease never ends earlier.
    #[must_use]
    pub fn own_deadline<T: std::ops::Add<Duration>>(&self, asked: T) -> T::Output {
        asked + Duration::from_millis(self.lease_ms)
    }
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Free.
    Queued,
    /// Leased until this time of the board's clock.
    Leased {
        /// The lease.
        fence: Fence,
        /// When it runs out.
        until: Millis,
    },
    /// Finished.
    Done {
        /// The lease that finished it.
        fence: Fence,
        /// The hash of the result.
        hash: String,
    },
    /// Given up: its attempts are used up.
    Dead,
}

/// One job, as the protocol sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    /// Its state.
    pub state: State,
    /// Attempts that count: leases that were not given back.
    pub attempts: u32,
}

/// The answer to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// The job is leased.
    Granted(Job),
    /// The last attempt ran out: the job is dead.
    Dead(Job),
    /// It is leased to another worker, or closed.
    No,
}

/// The answer to a finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The result is to be recorded, in the same transaction as this state.
    Now(Job),
    /// It was recorded before: the answer to the first request was lost.
    Already,
}

/// Why a request with a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Late {
    /// Another worker has the job.
    #[error("the lease ran out and another worker has the job")]
    Taken,
    /// The job is free again.
    #[error("the lease was given back")]
    Free,
    /// Another worker finished the job.
    #[error("the lease ran out and another worker finished the job")]
    Finished,
    /// The job's attempts were used up.
    #[error("the lease ran out and the job's attempts are used up")]
    Dead,
    /// Two results under one lease.
    #[error("this lease has finished the job with another result: two processes use one lease")]
    Differs,
}

impl Job {
    /// A new job.
    #[must_use]
    pub fn new() -> Self {
        Self { state: State::Queued, attempts: 0 }
    }

    /// Leases the job under a new fence, if it is free or its lease ran out.
    #[must_use]
    pub fn claim(&self, now: Millis, fence: Fence, terms: &Terms) -> Claimed {
        match self.state {
            State::Queued => {}
            State::Leased { until, .. } if until <= now => {}
            State::Leased { .. } | State::Done { .. } | State::Dead => return Claimed::No,
        }
        if self.attempts >= terms.attempts_max {
            return Claimed::Dead(Self { state: State::Dead, attempts: self.attempts });
        }
        let state = State::Leased { fence, until: now + terms.lease_ms };
        Claimed::Granted(Self { state, attempts: self.attempts + 1 })
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// If the lease is lost.
    pub fn beat(&self, now: Millis, fence: Fence, terms: &Terms) -> Result<Self, Late> {
        self.held(fence)?;
        let until = now + terms.lease_ms;
        Ok(Self { state: State::Leased { fence, until }, attempts: self.attempts })
    }

    /// Closes the job with the result of this hash.
    ///
    /// # Errors
    /// If the lease is lost: the result is not recorded.
    pub fn finish(&self, fence: Fence, hash: &str) -> Result<Finish, Late> {
        if let State::Done { fence: done, hash: held } = &self.state
            && *done == fence
        {
            return if held == hash { Ok(Finish::Already) } else { Err(Late::Differs) };
        }
        self.held(fence)?;
        let state = State::Done { fence, hash: hash.to_owned() };
        Ok(Finish::Now(Self { state, attempts: self.attempts }))
    }

    /// Frees the job again. The attempt does not count.
    ///
    /// # Errors
    /// If the lease is lost.
    pub fn give_back(&self, fence: Fence) -> Result<Self, Late> {
        self.held(fence)?;
        Ok(Self { state: State::Queued, attempts: self.attempts - 1 })
    }

    /// Frees the job after a failure; the last attempt leaves it dead.
    ///
    /// # Errors
    /// If the lease is lost.
    pub fn fail(&self, fence: Fence, terms: &Terms) -> Result<Self, Late> {
        self.held(fence)?;
        let last = self.attempts >= terms.attempts_max;
        let state = if last { State::Dead } else { State::Queued };
        Ok(Self { state, attempts: self.attempts })
    }

    fn held(&self, fence: Fence) -> Result<(), Late> {
        match self.state {
            State::Leased { fence: held, .. } if held == fence => Ok(()),
            State::Leased { .. } => Err(Late::Taken),
            State::Queued => Err(Late::Free),
            State::Done { .. } => Err(Late::Finished),
            State::Dead => Err(Late::Dead),
        }
    }
}

impl Default for Job {
    fn default() -> Self {
        Self::new()
    }
}
