//! The append-only ledger: one JSON object per line, chained by hash.
//!
//! A line is `{"seq":N,"prev":"…","record":{…},"hash":"…"}`. `hash` is the blake3 of the line's text before `,"hash"`,
//! so the check covers exactly the bytes that were written. `prev` is the `hash` of the line before, and the
//! [`LEDGER_SCHEMA`]'s hash on the first line. The first record is the caller's header. The number of rows is in a file
//! beside the ledger ([`tip`](crate::tip)), so that rows cut off its end are detected.

use std::fs::{File, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::error::{At, CorpusError};
use crate::files;
use crate::tip::{self, Tip, TipRecord};

/// The schema id that the first record of every ledger carries in `schema`.
pub const LEDGER_SCHEMA: &str = "amk.ledger.v3";

/// Schema of the ledgers of the version before, which [`migrate`](crate::migrate) reads.
pub(crate) const EARLIER_LEDGER_SCHEMA: &str = "amk.ledger.v2";

/// The end of the hashed text.
const HASH_FIELD: &str = ",\"hash\":\"";

/// Longest valid line, in bytes.
const LINE_MAX: usize = 64 << 20;

/// Longest ledger that is read: some hundred thousand trials.
const BYTES_MAX: u64 = 2 << 30;

/// A ledger that is open for appending. The file is locked until it is dropped.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    head: Tip,
    path: PathBuf,
    seq: u64,
    prev: String,
    bytes: u64,
}

/// A locked ledger: no other process writes it.
#[derive(Debug)]
pub struct Held {
    file: File,
    path: PathBuf,
}

impl Held {
    /// As [`Ledger::resume`].
    ///
    /// # Errors
    /// If it cannot be read or written, is not a ledger, or was tampered with.
    pub fn resume(self) -> Result<(Ledger, Contents), CorpusError> {
        let Self { file, path } = self;
        let contents = read_open(&file, &path, LEDGER_SCHEMA)?;
        if contents.torn {
            cut(&file, &path, contents.bytes)?;
        }
        let mut head = Tip::open(&path)?;
        let (rows, bytes) = (contents.hashes.len() as u64, contents.bytes);
        let prev = contents.hashes.last().cloned().unwrap_or_default();
        head.write(&TipRecord { rows, hash: prev.clone() })?;
        Ok((Ledger { file, head, path, seq: rows, prev, bytes }, contents))
    }
}

/// A row of the chain: the bytes that were hashed, in parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its number; the header is zero.
    pub seq: u64,
    /// The hash of the row before.
    pub prev: String,
    /// The record's JSON text.
    pub record: String,
    /// The hash of the fields above.
    pub hash: String,
}

impl Link {
    /// The row after another one, or a first one.
    #[must_use]
    pub fn after(last: Option<&Self>, record: String) -> Self {
        let first = || (0, genesis());
        let (seq, prev) = last.map_or_else(first, |last| (last.seq + 1, last.hash.clone()));
        Self::at(seq, prev, record)
    }

    fn at(seq: u64, prev: String, record: String) -> Self {
        let hash = hash_of(&body(seq, &prev, &record));
        Self { seq, prev, record, hash }
    }

    /// The line of the ledger, without its end.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{}{HASH_FIELD}{}\"}}", body(self.seq, &self.prev, &self.record), self.hash)
    }

    /// Parses a line of a ledger. [`follows`](Self::follows) checks its hash.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let (body, rest) =
            Some(line).filter(|line| line.len() <= LINE_MAX)?.rsplit_once(HASH_FIELD)?;
        let hash = rest.strip_suffix("\"}")?;
        let rest = body.strip_prefix("{\"seq\":")?;
        let (seq, rest) = rest.split_once(",\"prev\":\"")?;
        let (prev, record) = rest.split_once("\",\"record\":")?;
        let (seq, record) = (seq.parse().ok()?, record.to_owned());
        Some(Self { seq, prev: prev.to_owned(), record, hash: hash.to_owned() })
    }

    /// Checks that it is the row after another one, or a first one.
    ///
    /// # Errors The reason why it is not.
    pub fn follows(&self, last: Option<(u64, &str)>) -> Result<(), String> {
        self.follows_in(LEDGER_SCHEMA, last)
    }

    fn follows_in(&self, schema: &str, last: Option<(u64, &str)>) -> Result<(), String> {
        let genesis = hash_of(schema);
        let (seq, prev) = last.map_or((0, genesis.as_str()), |(seq, hash)| (seq + 1, hash));
        if self.hash != hash_of(&body(self.seq, &self.prev, &self.record)) {
            return Err("the row was edited (its hash does not fit)".to_owned());
        }
        if self.seq != seq || self.prev != prev {
            return Err(format!(
                "a row was removed, inserted or moved before this one (row {seq} belongs here)"
            ));
        }
        Ok(())
    }
}

/// The contents of a ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    /// The first record.
    pub header: Value,
    /// The other records, first to last.
    pub records: Vec<Value>,
    /// Whether an unfinished last line was ignored.
    pub torn: bool,
    /// The hash of each row, the header's first.
    pub hashes: Vec<String>,
    /// Bytes of the valid lines.
    bytes: u64,
}

impl Contents {
    /// The rows as links of the chain, the header first. A row whose text differs from `serde_json`'s output does not
    /// verify any more.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        let genesis = std::iter::once(genesis());
        let prev = genesis.chain(self.hashes.iter().cloned());
        let records = std::iter::once(&self.header).chain(&self.records);
        let rows = records.zip(prev).zip(&self.hashes).zip(0..);
        rows.map(|(((record, prev), hash), seq)| Link {
            seq,
            prev,
            record: record.to_string(),
            hash: hash.clone(),
        })
    }
}

impl Ledger {
    /// Starts a ledger. `header` must be a JSON object; its `schema` is set to [`LEDGER_SCHEMA`].
    ///
    /// # Errors
    /// If the file exists and is not empty, or cannot be written.
    pub fn create(path: &Path, header: &Value) -> Result<Self, CorpusError> {
        files::make_folder_of(path)?;
        let file = open(path, true)?;
        lock(&file, path)?;
        let held = file.metadata().at("read", path)?.len();
        if held > 0 && !only_a_torn_header(&file, path)? {
            return Err(CorpusError::Exists(path.to_path_buf()));
        }
        cut(&file, path, 0)?;
        let head = Tip::open(path)?;
        let path_buf = path.to_path_buf();
        let mut ledger = Self { file, head, path: path_buf, seq: 0, prev: genesis(), bytes: 0 };
        let mut header = header.clone();
        if let Some(fields) = header.as_object_mut() {
            fields.insert("schema".into(), LEDGER_SCHEMA.into());
        }
        ledger.append(&header)?;
        files::sync_folder(path)?;
        Ok(ledger)
    }

    /// Opens a ledger to continue it, and cuts off an unfinished last line.
    ///
    /// # Errors
    /// If it cannot be read or written, is not a ledger, is in use, or was tampered with.
    pub fn resume(path: &Path) -> Result<(Self, Contents), CorpusError> {
        Self::hold(path)?.resume()
    }

    /// Locks a ledger against other searches, and changes nothing.
    ///
    /// # Errors
    /// If it cannot be opened for writing, or is in use.
    pub fn hold(path: &Path) -> Result<Held, CorpusError> {
        let file = open(path, false)?;
        lock(&file, path)?;
        Ok(Held { file, path: path.to_path_buf() })
    }

    /// Writes a ledger and its tip record from rows that were read elsewhere, such as those of a store: the bytes are
    /// those of the ledger that they came from.
    ///
    /// # Errors
    /// If there is no row, one does not follow from the one before it, or the files cannot be written.
    pub fn restore(path: &Path, links: &[Link]) -> Result<(), CorpusError> {
        let mut text = String::new();
        let mut last = None;
        for (at, link) in links.iter().enumerate() {
            link.follows(last).map_err(|reason| CorpusError::Tampered {
                path: path.to_path_buf(),
                line: at + 1,
                reason,
            })?;
            last = Some((link.seq, link.hash.as_str()));
            text += &(link.line() + "\n");
        }
        let Some((seq, hash)) = last else {
            return Err(CorpusError::io("write", path, std::io::ErrorKind::InvalidInput.into()));
        };
        files::make_folder_of(path)?;
        files::replace(path, text.as_bytes()).at("write", path)?;
        Tip::open(path)?.write(&TipRecord { rows: seq + 1, hash: hash.to_owned() })
    }

    /// Appends a record and returns its row once the row is on the disk.
    ///
    /// # Errors
    /// If the disk reports an error. The ledger then ends where it ended before.
    pub fn append(&mut self, record: &impl Serialize) -> Result<Link, CorpusError> {
        let record = serde_json::to_string(record).map_err(std::io::Error::from);
        let record = record.at("write", &self.path)?;
        let link = Link::at(self.seq, self.prev.clone(), record);
        let line = link.line() + "\n";
        let written = (&self.file)
            .seek(SeekFrom::Start(self.bytes))
            .and_then(|_| self.file.write_all(line.as_bytes()))
            .and_then(|()| self.file.sync_data());
        if written.is_err() {
            // A partly written line is not a row; the next reader would cut it off too.
            let _ = self.file.set_len(self.bytes);
        }
        written.at("write", &self.path)?;
        self.bytes += line.len() as u64;
        self.seq += 1;
        self.prev.clone_from(&link.hash);
        self.head.write(&TipRecord { rows: self.seq, hash: link.hash.clone() })?;
        Ok(link)
    }

    /// Removes the files: only the header was recorded.
    ///
    /// # Errors If the disk reports an error.
    pub fn remove(self) -> Result<(), CorpusError> {
        for path in [self.path.clone(), tip::path_of(&self.path)] {
            std::fs::remove_file(&path).at("remove", &path)?;
        }
        Ok(())
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads and checks a whole ledger.
///
/// # Errors
/// If it cannot be read, is not a ledger, or was tampered with.
pub fn read(path: &Path) -> Result<Contents, CorpusError> {
    let file = files::open_own(path).at("read", path)?;
    read_open(&file, path, LEDGER_SCHEMA)
}

/// Reads and checks a ledger of the previous version.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_earlier(path: &Path) -> Result<Contents, CorpusError> {
    let file = files::open_own(path).at("read", path)?;
    read_open(&file, path, EARLIER_LEDGER_SCHEMA)
}

fn open(path: &Path, create: bool) -> Result<File, CorpusError> {
    let action = if create { "create" } else { "open" };
    files::open_to_write(path, create).at(action, path)
}

fn lock(file: &File, path: &Path) -> Result<(), CorpusError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(CorpusError::Locked(path.to_path_buf())),
        // Some network file systems have no locks; the chain still detects two writers.
        Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(source)) => Err(CorpusError::io("lock", path, source)),
    }
}

/// Whether the file has no finished line: a process died while it wrote the header.
fn only_a_torn_header(file: &File, path: &Path) -> Result<bool, CorpusError> {
    let text = files::read_whole(file, BYTES_MAX).at("read", path)?;
    Ok(!text.contains(&b'\n') && text.starts_with(br#"{"seq":0,"#))
}

fn cut(file: &File, path: &Path, bytes: u64) -> Result<(), CorpusError> {
    file.set_len(bytes).and_then(|()| file.sync_data()).at("write", path)
}

fn genesis() -> String {
    hash_of(LEDGER_SCHEMA)
}

fn hash_of(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// The text of a line before its hash.
fn body(seq: u64, prev: &str, record: &str) -> String {
    format!("{{\"seq\":{seq},\"prev\":\"{prev}\",\"record\":{record}")
}

fn read_open(file: &File, path: &Path, needed: &'static str) -> Result<Contents, CorpusError> {
    // Read first, so that rows which another process adds meanwhile do not appear to be missing.
    let mark = tip::read(path)?;
    let mut reader = file;
    let bytes = reader
        .seek(SeekFrom::Start(0))
        .and_then(|_| files::read_whole(file, BYTES_MAX))
        .at("read", path)?;
    let finished = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |last| last + 1);
    let schema = |found: &str| CorpusError::Schema {
        path: path.to_path_buf(),
        needed,
        found: found.to_owned(),
    };
    let tampered = |rows: &[String], reason: String| CorpusError::Tampered {
        path: path.to_path_buf(),
        line: rows.len() + 1,
        reason,
    };
    let (mut records, mut hashes) = (Vec::new(), Vec::<String>::new());
    for line in bytes[..finished].split_inclusive(|&b| b == b'\n') {
        let no_row = || match (hashes.len(), &mark) {
            (0, None) => schema("something else"),
            // The head of a ledger lies beside it.
            (0, Some(_)) => tampered(&hashes, "this is not the header of a ledger".to_owned()),
            _ => tampered(&hashes, "this is not a row".to_owned()),
        };
        let line = std::str::from_utf8(&line[..line.len() - 1]).ok();
        let link = line.and_then(Link::parse).ok_or_else(no_row)?;
        let record: Value = serde_json::from_str(&link.record).map_err(|_| no_row())?;
        if hashes.is_empty() {
            let found = record.get("schema").and_then(Value::as_str).unwrap_or("none");
            if found != needed {
                return Err(schema(found));
            }
        }
        let last = hashes.last().map(|hash| (hashes.len() as u64 - 1, hash.as_str()));
        link.follows_in(needed, last).map_err(|reason| tampered(&hashes, reason))?;
        records.push(record);
        hashes.push(link.hash);
    }
    if hashes.is_empty() {
        if mark.is_some() {
            return Err(tampered(&hashes, "its rows were cut off".to_owned()));
        }
        return Err(schema(if bytes.is_empty() { "an empty file" } else { "no finished line" }));
    }
    reaches(&hashes, mark, path).map_err(|reason| tampered(&hashes, reason))?;
    let (header, torn) = (records.remove(0), finished < bytes.len());
    Ok(Contents { header, records, torn, hashes, bytes: finished as u64 })
}

/// Checks that the rows reach as far as the tip record.
fn reaches(hashes: &[String], mark: Option<TipRecord>, path: &Path) -> Result<(), String> {
    let head = tip::path_of(path);
    let head = head.file_name().unwrap_or_default().to_string_lossy();
    let rows = hashes.len();
    let Some(mark) = mark else {
        // A new ledger's head is written after its header.
        let missing = format!("{head} is missing, which says where the rows end");
        return if rows == 1 { Ok(()) } else { Err(missing) };
    };
    let named = usize::try_from(mark.rows).unwrap_or(usize::MAX);
    if named > rows {
        return Err(format!("rows were cut off the end ({rows} are here, {head} counts {named})"));
    }
    if named.checked_sub(1).is_some_and(|last| hashes[last] == mark.hash) {
        return Ok(());
    }
    Err(format!("{head} names another row {named} than this ledger has"))
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
