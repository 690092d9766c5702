//! Utilities of the cross-crate tests: toy models, programs built without `lower`, edits that break them, the explorer
//! of memory orders, a scripted device, random legal schedules, recorded measured grids, and the file-test runner.
//!
//! Only tests depend on this crate. It builds programs in its own way, so that a mistake in `lower` is not repeated
//! here.

pub mod build;
pub mod edit;
pub mod explore;
pub mod filetest;
pub mod fuzz;
pub mod measured_grid;
pub mod mutant;
pub mod random_sample;
pub mod rng;
pub mod scripted;
pub mod toy;
pub mod weak;

use std::path::PathBuf;

/// The root of the repository: the build's path, or the current folder on a machine that only got the program.
#[must_use]
pub fn root() -> PathBuf {
    let built =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default();
    if built.join("corpus").is_dir() { built } else { PathBuf::from(".") }
}

/// Whether expected outputs are to be rewritten (`BLESS=1`).
#[must_use]
pub fn blessing() -> bool {
    std::env::var_os("BLESS").is_some_and(|value| value == "1")
}
