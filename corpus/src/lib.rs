//! What searches found: an append-only ledger of each, the table that people read, and one store of them all ([`store`]).
//!
//! **Promises.** [`Ledger::append`] returns only when the row is on the disk, so that a killed process loses nothing it
//! acknowledged. Rows are chained by hash, and a small file beside them says where they end: an edited, removed, inserted or reordered row
//! is found on reading, and so are rows cut off the end. A row that was being written when the machine died has no line end; it was never
//! acknowledged, is ignored on reading and cut off on resuming.
//!
//! **What the chain cannot show.** Files that were rewritten as a whole with new hashes. It guards against slips and quiet edits, not
//! against an owner who forges both files; what such a forger must get right is up to `search` (its audit).
//!
//! Beside them, the schedules that are shipped with the project ([`shipped`]), and documents that know their own hash ([`seal`]).
//!
//! The crate stores what it is given: what a row means is up to `search`.

mod conditions;
mod error;
pub mod files;
mod ledger;
pub mod manifest;
pub mod migrate;
mod results;
mod schedules;
mod seal;
pub mod store;
mod tip;

pub use conditions::Conditions;
pub use error::CorpusError;
pub use ledger::{Contents, Held, LEDGER_SCHEMA, Ledger, Link, read};
pub use results::Results;
pub use schedules::{Match, SHAPE_DISTANCE_MAX, Shipped, all_shipped, shape_distance, shipped};
pub use seal::{check_seal, seal};
pub use store::Store;
