//! Storage of search results: an append-only ledger per search, a table for people, and one store of all searches
//! ([`store`]).
//!
//! **Promises.** [`Ledger::append`] returns only when the row is on the disk, so a killed process loses nothing that it
//! acknowledged. Rows are chained by hash, and a small file beside them holds their number: edited, removed, inserted
//! or reordered rows are detected on reading, and so are rows cut off the end. A row that was being written when the
//! machine died has no line end; it was never acknowledged, is ignored on reading and cut off on resuming.
//!
//! **What the chain cannot show.** Files that were rewritten as a whole with new hashes. It protects against mistakes
//! and quiet edits, not against an owner who forges both files; `search` (its audit) checks further properties of the
//! contents.
//!
//! The crate also has the schedules shipped with the project ([`shipped`]), and documents that contain their own hash
//! ([`seal`]).
//!
//! The crate stores records as they are; `search` defines their meaning.

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
