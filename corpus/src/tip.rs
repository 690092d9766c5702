//! The head of a ledger: how many rows it has and the hash of the last, in a small file beside it (`ledger.head`).
//!
//! A chain shows what was changed inside it and says nothing of rows that were cut off its end; the head does. It is written after its
//! row is on the disk, in place and in one piece of fixed length, so it is never ahead of the ledger, and a full disk does not stop it.
//! A process that dies between the two leaves a head that is one row behind, which is no fault: the row that it names is there.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{At, CorpusError};
use crate::files;

/// Longest text that is read as a head.
const BYTES_MAX: u64 = 256;

/// What a head says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TipRecord {
    /// Rows of the ledger, the header among them.
    pub(crate) rows: u64,
    /// The last one's hash.
    pub(crate) hash: String,
}

/// A head that is open for writing.
#[derive(Debug)]
pub(crate) struct Tip {
    file: File,
    path: PathBuf,
}

/// Where the head of a ledger is.
pub(crate) fn path_of(ledger: &Path) -> PathBuf {
    ledger.with_extension("head")
}

impl Tip {
    /// Opens the head of a ledger, or makes one.
    pub(crate) fn open(ledger: &Path) -> Result<Self, CorpusError> {
        let path = path_of(ledger);
        let file = files::open_to_write(&path, true).at("create", &path)?;
        Ok(Self { file, path })
    }

    /// Says how far the ledger goes now.
    pub(crate) fn write(&mut self, mark: &TipRecord) -> Result<(), CorpusError> {
        // Of one length whatever it says, so that nothing of an older text is left behind it.
        let text = format!("{{\"rows\":{:20},\"hash\":\"{}\"}}\n", mark.rows, mark.hash);
        let written =
            self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.write_all(text.as_bytes()));
        written.at("write", &self.path)
    }
}

/// The head of a ledger, if there is one.
pub(crate) fn read(ledger: &Path) -> Result<Option<TipRecord>, CorpusError> {
    let path = path_of(ledger);
    let text = match files::open_own(&path).and_then(|file| files::read_whole(&file, BYTES_MAX)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CorpusError::io("read", &path, error)),
    };
    if text.is_empty() {
        // A process died before it wrote the first one.
        return Ok(None);
    }
    let mark: Result<TipRecord, _> = serde_json::from_slice(&text);
    mark.map(Some).map_err(|_| CorpusError::Tampered {
        path,
        line: 1,
        reason: "this is not the head of a ledger".into(),
    })
}
