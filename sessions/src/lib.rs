//! Scheduling of sessions that share one machine: which runs next, for how many tokens, and the state of each command.
//! This is the host's half. It is pure: no clock, no thread and no device. Time is counted in turns.
//!
//! **Promises.**
//!
//! - A state changes only as in [`abi::CHANGES`], and only by the side given there; any other change is refused and
//!   changes nothing.
//! - No starvation: a ready command gets its turn after at most `patience + capacity - 1` turns of others
//!   ([`Scheduler::longest_wait`]), whatever the others do. Higher priorities have less patience.
//! - Tenants whose requests wait get places in proportion to their shares, counted in tokens ([`Fair`]); none starves.
//! - No session is given more tokens than its quota.
//! - A session that faults, waits or is cancelled takes no turn from another and changes nothing of another.
//!
//! A turn is a value that cannot be copied and must be given back:
//!
//! ```compile_fail
//! # use sessions::{Outcome, Priority, Scheduler};
//! # let mut scheduler = Scheduler::new(1);
//! # let session = scheduler.open(Priority::Normal, 8).unwrap();
//! # scheduler.submit(session).unwrap();
//! let turn = scheduler.next(4).unwrap();
//! scheduler.give_back(turn, 1, Outcome::Yield).unwrap();
//! scheduler.give_back(turn, 1, Outcome::Yield).unwrap(); // the turn is gone
//! ```

mod fair;
mod ring;
mod scheduler;
#[cfg(test)]
mod tests;

pub use fair::{Fair, SHARE_MAX, Tenant};
pub use ring::{Refused, Ring};
pub use scheduler::{
    Cancelled, Outcome, Priority, Rejected, Report, Scheduler, SessionId, Turn, Why,
};
