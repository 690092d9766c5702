//! Errors of reading and writing files, in one line that names the file and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// Why a ledger or a table could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}; {}", .path.display(), remedy(.source))]
    Io {
        /// `create`, `read`, `write`, `remove`, `sync`, `lock`, `seal`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A new ledger was to be created where one exists.
    #[error(
        "{} already holds a search; continue it with --resume or choose another --out",
        .0.display()
    )]
    Exists(PathBuf),
    /// Another process writes this ledger.
    #[error(
        "{} is being written by another process; wait for it or choose another --out",
        .0.display()
    )]
    Locked(PathBuf),
    /// The file is not a ledger, or one of another version.
    #[error(
        "{} is not a ledger of this version ({} is needed, found {found}); `amk migrate` rewrites those of the version before, else choose another --out",
        .path.display(), .needed
    )]
    Schema {
        /// The file.
        path: PathBuf,
        /// The schema id of ledgers.
        needed: &'static str,
        /// The schema found.
        found: String,
    },
    /// A row was edited, removed, inserted or moved.
    #[error(
        "{} line {line}: {reason}; the ledger cannot be trusted: start again in another --out",
        .path.display()
    )]
    Tampered {
        /// The file.
        path: PathBuf,
        /// Line, from one.
        line: usize,
        /// The inconsistency.
        reason: String,
    },
    /// SQLite reported an error.
    #[error("cannot {action} the store {}: {reason}", .path.display())]
    Store {
        /// `open`, `read`, `write`, `bring up to date`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// SQLite's reason and the remedy.
        reason: String,
        /// Whether the file is damaged.
        damaged: bool,
    },
    /// An SQLite file of another program.
    #[error("{} is an SQLite file and no store of amk; name another with --store", .0.display())]
    NoStore(PathBuf),
    /// A store of a later version of `amk`.
    #[error(
        "the store {} is of version {found}, and this amk knows versions up to {known}; use a newer amk, or make another one from the runs: amk corpus import RUNS --store NEW",
        .path.display()
    )]
    NewerStore {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The latest version that this build supports.
        known: i64,
    },
    /// The store and the ledger have different rows of this search.
    #[error(
        "the store {} has another row {seq} of run {run}: two copies of one search went on apart; keep the other one in a store of its own (--store)",
        .path.display()
    )]
    Diverged {
        /// The store.
        path: PathBuf,
        /// The search.
        run: String,
        /// The row.
        seq: u64,
    },
    /// A row that was to be added to the store does not follow from those before it.
    #[error(
        "run {run}, row {seq}: {reason}; nothing of it was added: take the rows from the run's ledger"
    )]
    Foreign {
        /// The search.
        run: String,
        /// The row.
        seq: u64,
        /// The inconsistency.
        reason: String,
    },
}

impl CorpusError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Whether the file's contents, rather than access to it, are at fault.
    #[must_use]
    pub fn is_integrity(&self) -> bool {
        match self {
            Self::Tampered { .. } | Self::Diverged { .. } | Self::Foreign { .. } => true,
            Self::Store { damaged, .. } => *damaged,
            Self::Io { .. }
            | Self::Exists(_)
            | Self::Locked(_)
            | Self::Schema { .. }
            | Self::NoStore(_)
            | Self::NewerStore { .. } => false,
        }
    }
}

/// Adds the action and the file to an error.
pub(crate) trait At<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CorpusError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CorpusError> {
        self.map_err(|source| CorpusError::io(action, path, source))
    }
}

impl<T> At<T> for rusqlite::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CorpusError> {
        self.map_err(|source| {
            let (damaged, remedy) = store_remedy(&source);
            let reason = format!("{source}; {remedy}");
            CorpusError::Store { action, path: path.to_path_buf(), reason, damaged }
        })
    }
}

/// What a user can do about an I/O error.
const REMEDIES: &[(io::ErrorKind, &str)] = &[
    (io::ErrorKind::PermissionDenied, "choose a folder that you may write to"),
    (io::ErrorKind::ReadOnlyFilesystem, "the file system is read-only: choose another folder"),
    (io::ErrorKind::StorageFull, "the disk is full: free some space or choose another folder"),
    (
        io::ErrorKind::QuotaExceeded,
        "the quota is used up: free some space or choose another folder",
    ),
    (
        io::ErrorKind::FileTooLarge,
        "files may not grow further here (ulimit -f): raise the limit or choose another folder",
    ),
    (io::ErrorKind::NotFound, "check the path"),
    (io::ErrorKind::InvalidInput, "move what is not the run's out of its folder"),
    (io::ErrorKind::IsADirectory, "name a file, not a folder"),
    (io::ErrorKind::NotADirectory, "a file is in the way of a folder: choose another path"),
    (io::ErrorKind::AlreadyExists, "a file is in the way of a folder: choose another path"),
];

fn remedy(source: &io::Error) -> &'static str {
    let found = REMEDIES.iter().find(|(kind, _)| *kind == source.kind());
    found.map_or("choose another path", |(_, remedy)| remedy)
}

/// The remedy for an SQLite error, and whether the file is damaged.
fn store_remedy(error: &rusqlite::Error) -> (bool, &'static str) {
    let corrupt = "it is damaged: make it anew with `amk corpus import RUNS --store NEW` (the ledgers are the record)";
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (false, "another process is writing it: try again")
        }
        Some(ErrorCode::DiskFull) => (false, "the disk is full: free some space"),
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => (
            false,
            "name a path that you may write to with --store, or leave the store out: --store none",
        ),
        Some(ErrorCode::DatabaseCorrupt) => (true, corrupt),
        Some(ErrorCode::NotADatabase) => (false, "it is no SQLite file: name another with --store"),
        _ => (false, "name another path with --store, or leave the store out: --store none"),
    }
}
