//! Sessions that share one machine: who runs next, how much, and what state each command is in. The host's half, and pure: it knows no
//! clock, no thread and no device. Time is counted in turns.
//!
//! **Promises.**
//!
//! - A state changes only as [`abi::CHANGES`] says, and only by the side that it names; anything else is refused and changes nothing.
//! - Nothing starves: a command that is ready gets its turn after at most `patience + capacity - 1` turns of others
//!   ([`Scheduler::longest_wait`]), whatever the others do. Higher priorities have less patience.
//! - No session is given more tokens than its quota.
//! - A session that faults, waits or is cancelled takes no turn from another and changes nothing of another.
//!
//! A turn is a value that cannot be copied, and whoever took it gives it back:
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

mod ring;
mod scheduler;
#[cfg(test)]
mod tests;

pub use ring::{Refused, Ring};
pub use scheduler::{
    Cancelled, Outcome, Priority, Rejected, Report, Scheduler, SessionId, Turn, Why,
};
