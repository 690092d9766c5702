//! Errors of the board, in one line that names the file and the remedy.

use std::path::{Path, PathBuf};

/// Why a board could not be used.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// SQLite reported an error.
    #[error("cannot use the board {}: {source}{}", .path.display(), hint(.source))]
    Sqlite {
        /// The board.
        path: PathBuf,
        /// SQLite's reason.
        source: rusqlite::Error,
    },
    /// A server refused a request or could not be reached.
    #[error("cannot use the board {}: {reason}", .path.display())]
    Server {
        /// The board.
        path: PathBuf,
        /// The reason.
        reason: String,
        /// It may pass: the request can be repeated.
        passing: bool,
    },
    /// The file is something else.
    #[error("{} is no board of a fleet; name another file with --board", .0.display())]
    NoBoard(PathBuf),
    /// There is no such file.
    #[error("there is no board {path}; make one with: amk fleet init --board {path}", path = .0.display())]
    Missing(PathBuf),
    /// A board of another version.
    #[error(
        "the board {} is of version {found}, this amk knows version {known}: let all workers and the board have one version, or make a new board",
        .path.display()
    )]
    Version {
        /// The board.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The version of this build.
        known: i64,
    },
    /// The board exists with other terms.
    #[error("the board {} exists with other terms ({}); use it as it is, or make a new board", .path.display(), .terms)]
    Terms {
        /// The board.
        path: PathBuf,
        /// Its terms.
        terms: String,
    },
    /// The board lies on a network file system.
    #[error(
        "{} is on {kind}, a network file system, where SQLite's locks do not hold; a board file serves the workers of one machine, on its own disk",
        .path.display()
    )]
    Network {
        /// The board.
        path: PathBuf,
        /// The file system.
        kind: String,
    },
    /// Something on the board is not what its hash says, or cannot be read.
    #[error("the board {} is damaged: {reason}; its ledgers can be saved with: amk fleet report", .path.display())]
    Damaged {
        /// The board.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A request that makes no sense.
    #[error("{0}")]
    Refused(String),
}

impl BoardError {
    /// Whether the same request may succeed later: another process holds the board, or the server is away.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Sqlite { .. } | Self::Server { passing: true, .. })
    }
}

fn hint(error: &rusqlite::Error) -> &'static str {
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseBusy) => {
            "; a process that was stopped in the middle of a request holds it: let it go on, or kill it"
        }
        _ => "",
    }
}

/// Adds the board's path to SQLite's errors.
pub(crate) trait At<T> {
    fn at(self, path: &Path) -> Result<T, BoardError>;
}

impl<T> At<T> for rusqlite::Result<T> {
    fn at(self, path: &Path) -> Result<T, BoardError> {
        self.map_err(|source| BoardError::Sqlite { path: path.to_path_buf(), source })
    }
}
