//! What can go wrong on the disk, in one line that names the file and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a ledger or a table could not be read or written.
#[derive(Debug)]
pub enum CorpusError {
    /// The operating system refused.
    Io {
        /// `create`, `read`, `write`, `remove`, `sync`, `lock`.
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
}

impl CorpusError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Whether the file's contents, rather than access to it, are at fault.
    #[must_use]
    pub fn is_integrity(&self) -> bool {
        match self {
            Self::Tampered { .. } => true,
            Self::Io { .. } | Self::Exists { .. } | Self::Locked { .. } | Self::Schema { .. } => {
                false
            }
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
            | Self::Tampered { .. } => None,
        }
    }
}
