//! One step of every worker: where its time went, what caused it, and what would change it.
//!
//! [`Timeline`] splits the time of all workers at the marks of their tasks; [`Path`] gives each piece
//! of the critical path a cause; [`replay()`] runs the recorded step again with parts of it changed. The
//! crate is pure: records in, numbers and text out. [`live`] writes events of a running process.

pub mod attribution;
mod clocks;
pub mod counters;
pub mod digest;
mod graph;
pub mod live;
mod parts;
pub mod perfetto;
pub mod plant;
mod predicted;
pub mod replay;
pub mod residuals;
pub mod timeline;

pub use attribution::{Cause, Path, Piece};
pub use clocks::Clocks;
pub use plant::Plant;
pub use predicted::{Predicted, predicted};
pub use replay::{Edit, Replayed, replay};
pub use residuals::{Expected, Residuals};
pub use timeline::{Clock, Timeline};

#[cfg(test)]
mod residuals_tests;
#[cfg(test)]
mod tests;
