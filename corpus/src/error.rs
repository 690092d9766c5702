//! What can go wrong on the disk, in one line that names the file and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a ledger or a table could not be read or written.
#[derive(Debug)]
pub enum CorpusError {
    /// The operating system refused.
    Io {
        /// `create`, `read`, `write`, `remove`, `sync`, `lock`, `seal`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A new ledger was asked for where one exists.
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Another process writes this ledger.
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The file is no ledger, or one of another version.
    Schema {
        /// The file.
        path: PathBuf,
        /// What stands where the schema id should.
        found: String,
    },
    /// A row was edited, removed, inserted or moved.
    Tampered {
        /// The file.
        path: PathBuf,
        /// Line, from one.
        line: usize,
        /// What does not fit.
        reason: String,
    },
    /// SQLite refused.
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
    /// An SQLite file of somebody else.
    NoStore {
        /// The file.
        path: PathBuf,
    },
    /// A store of a later version of `amk`.
    NewerStore {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
    },
    /// The store has another row of this search than the ledger.
    Diverged {
        /// The store.
        path: PathBuf,
        /// The search.
        run: String,
        /// The row.
        seq: u64,
    },
    /// A row that was offered to the store does not follow from those before it.
    Foreign {
        /// The search.
        run: String,
        /// The row.
        seq: u64,
        /// What does not fit.
        reason: String,
    },
}

impl CorpusError {
    pub(crate) fn store(action: &'static str, path: &Path, source: &rusqlite::Error) -> Self {
        let (damaged, remedy) = crate::store::remedy(source);
        let reason = format!("{source}; {remedy}");
        Self::Store { action, path: path.to_path_buf(), reason, damaged }
    }

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
            | Self::Exists { .. }
            | Self::Locked { .. }
            | Self::Schema { .. }
            | Self::NoStore { .. }
            | Self::NewerStore { .. } => false,
        }
    }
}

/// What a person can do about an I/O error.
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

impl fmt::Display for CorpusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { action, path, source } => {
                write!(f, "cannot {action} {}: {source}; {}", path.display(), remedy(source))
            }
            Self::Exists { path } => write!(
                f,
                "{} already holds a search; continue it with --resume or choose another --out",
                path.display()
            ),
            Self::Locked { path } => write!(
                f,
                "{} is being written by another process; wait for it or choose another --out",
                path.display()
            ),
            Self::Schema { path, found } => write!(
                f,
                "{} is not a ledger of this version ({} is needed, found {found}); choose another --out",
                path.display(),
                crate::LEDGER_SCHEMA
            ),
            Self::Tampered { path, line, reason } => write!(
                f,
                "{} line {line}: {reason}; the ledger cannot be trusted: start again in another --out",
                path.display()
            ),
            Self::Store { action, path, reason, .. } => {
                write!(f, "cannot {action} the store {}: {reason}", path.display())
            }
            Self::NoStore { path } => write!(
                f,
                "{} is an SQLite file and no store of amk; name another with --store",
                path.display()
            ),
            Self::NewerStore { path, found } => write!(
                f,
                "the store {} is of version {found}, and this amk knows versions up to {}; use a newer amk, or make another one from the runs: amk corpus import RUNS --store NEW",
                path.display(),
                crate::store::schema::VERSION
            ),
            Self::Diverged { path, run, seq } => write!(
                f,
                "the store {} has another row {seq} of run {run}: two copies of one search went on apart; keep the other one in a store of its own (--store)",
                path.display()
            ),
            Self::Foreign { run, seq, reason } => write!(
                f,
                "run {run}, row {seq}: {reason}; nothing of it was added: take the rows from the run's ledger"
            ),
        }
    }
}

impl std::error::Error for CorpusError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Exists { .. }
            | Self::Locked { .. }
            | Self::Schema { .. }
            | Self::Tampered { .. }
            | Self::Store { .. }
            | Self::NoStore { .. }
            | Self::NewerStore { .. }
            | Self::Diverged { .. }
            | Self::Foreign { .. } => None,
        }
    }
}
