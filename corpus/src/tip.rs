//! The tip record of a ledger: the number of rows and the hash of the last, in a small file beside it (`ledger.head`).
//!
//! A chain shows changes inside it but not rows that were cut off its end; the tip record does. It is written after its
//! row is on the disk, in place and in one piece of fixed length, so it is never ahead of the ledger, and a full disk
//! does not stop it. A process that dies between the two leaves a tip record that is one row behind, which is valid:
//! the row that it names is there.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{At, CorpusError};
use crate::files;

/// Longest text that is read as a tip record.
const BYTES_MAX: u64 = 256;

/// The contents of a tip record.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TipRecord {
    /// Rows of the ledger, the header among them.
    pub(crate) rows: u64,
    /// The last one's hash.
    pub(crate) hash: String,
}

/// A tip record that is open for writing.
#[derive(Debug)]
pub(crate) struct Tip {
    file: File,
    path: PathBuf,
}

/// The path of a ledger's tip record.
pub(crate) fn path_of(ledger: &Path) -> PathBuf {
    ledger.with_extension("head")
}

impl Tip {
    /// Opens the tip record of a ledger, or creates one.
    pub(crate) fn open(ledger: &Path) -> Result<Self, CorpusError> {
        let path = path_of(ledger);
        let file = files::open_to_write(&path, true).at("create", &path)?;
        Ok(Self { file, path })
    }

    /// Records the ledger's current end.
    pub(crate) fn write(&mut self, mark: &TipRecord) -> Result<(), CorpusError> {
        // Fixed length, so that nothing of an older text is left behind it.
        let text = format!("{{\"rows\":{:20},\"hash\":\"{}\"}}\n", mark.rows, mark.hash);
        let written =
            self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.write_all(text.as_bytes()));
        written.at("write", &self.path)
    }
}

/// The tip record of a ledger, if there is one.
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
