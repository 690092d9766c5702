//! A fleet: many workers search for schedules and share one board of jobs.
//!
//! A job is a **leg** (a whole search on one card, with its own ledger) or a **race** (a champion against the schedule
//! that its leg began with, on another card). A worker leases a job, runs it, and finishes it with a verdict and the
//! ledger. Figures of one card are never compared with another's: only verdicts and shares of time saved cross cards.
//!
//! **Promises.** [`protocol`] is the state machine of one job, pure and explored exhaustively (`tests/model.rs`). A
//! [`Board`], in an SQLite file or on a PostgreSQL server, applies it inside one transaction for each request, so a job
//! has one result, even if workers are killed, stopped or late, and a request that is repeated after a lost answer
//! changes nothing. Time is the board's clock only.

mod board;
mod board_error;
mod job;
mod mount;
#[cfg(feature = "postgres")]
mod postgres;
pub mod protocol;
mod sqlite;
mod verdict;

pub use board::{Answer, Attempt, Board, Claim, Entry, Leased, Recorded, Submitted, Worker};
pub use board_error::BoardError;
pub use job::{Device, Kind, Raced, Spec};
pub use mount::network_mount;
pub use verdict::{
    AGREED_CARDS_MIN, AGREED_HOSTS_MIN, Champion, Finding, Status, champions, status,
};
