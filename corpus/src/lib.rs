//! The store of trials: an append-only ledger, and the table that people read.
//!
//! **Promises.** [`Ledger::append`] returns only when the row is on the disk, so that a killed process loses nothing it
//! acknowledged. Rows are chained by hash: an edited, removed, inserted or reordered row is found on reading. A row that was
//! being written when the machine died has no line end; it was never acknowledged, is ignored on reading and cut off on resuming.
//!
//! **What the chain cannot show.** Rows removed from the end, and a file rewritten as a whole with new hashes. It guards against
//! slips and quiet edits, not against an owner who forges the file.
//!
//! Beside the store, the schedules that are shipped with the project ([`shipped`]), and documents that know their own hash ([`seal`]).
//!
//! The crate stores what it is given: what a row means is up to `search`.

mod error;
mod ledger;
mod results;
mod schedules;
mod seal;

pub use error::CorpusError;
pub use ledger::{Contents, LEDGER_SCHEMA, Ledger, read};
pub use results::Results;
pub use schedules::{Shipped, all_shipped, shipped};
pub use seal::{check_seal, seal};
