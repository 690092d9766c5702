//! Saved programs (`.amk` is text, `.amkp` is binary), and atomic writes.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ir::program::{Program, Verified};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;

const PROGRAM_BYTES_MAX: u64 = 1 << 30;

fn is_binary(path: &Path) -> Result<bool, Failure> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("amk") => Ok(false),
        Some("amkp") => Ok(true),
        Some(_) | None => Err(Failure::usage(format!(
            "{}: a program file ends in .amk (text) or .amkp (binary)",
            path.display()
        ))),
    }
}

/// Writes a program atomically.
pub(crate) fn save(program: &Program, path: &Path) -> Result<(), Failure> {
    let bytes = match is_binary(path)? {
        true => ir::text::save(program),
        false => ir::text::print(program).into_bytes(),
    };
    write_whole(path, &bytes)
}

/// Reads a program, without verifying it.
pub(crate) fn open(path: &Path) -> Result<Program, Failure> {
    let binary = is_binary(path)?;
    let bytes = corpus::files::read(path, PROGRAM_BYTES_MAX).map_err(|e| unreadable(path, e))?;
    if binary {
        return ir::text::load(&bytes)
            .map_err(|error| Failure::integrity(format!("{}: {error}", path.display())));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::usage(format!("{} is not text", path.display())))?;
    ir::text::parse(&text).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

/// The error for a named path that cannot be read.
pub(crate) fn unreadable(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::cannot("read", path, "check the path")(error)
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: u64) -> Result<String, Failure> {
    corpus::files::read_text(path, most).map_err(|error| unreadable(path, error))
}

/// The text of a reader, such as standard input or a pipe: at most `most` bytes.
pub(crate) fn read_input(
    input: impl Read,
    name: &dyn std::fmt::Display,
    most: u64,
) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let read = input.take(most + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::usage(format!("cannot read {name}: {error}")))?;
    if bytes.len() as u64 > most {
        return Err(Failure::usage(format!("{name} is longer than {} MiB", most >> 20)));
    }
    String::from_utf8(bytes).map_err(|_| Failure::usage(format!("{name} is not UTF-8 text")))
}

/// The contents of a JSON file of at most `most` bytes.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, most: u64) -> Result<T, Failure> {
    serde_json::from_str(&read_text(path, most)?).map_err(|error| unreadable(path, error))
}

/// Writes a file atomically.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_with(path, |file| file.write_all(bytes))
}

/// The same with a value as JSON.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).unwrap_or_default() + "\n";
    write_whole(path, text.as_bytes())
}

/// The same, with a callback that writes.
pub(crate) fn write_with(
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> Result<(), Failure> {
    check_place(path)?;
    let refused = Failure::cannot::<std::io::Error>("write", path, PLACE_REMEDY);
    if path.exists() && !path.is_file() {
        // A pipe or a device cannot be replaced by a rename: writes into it.
        let mut file = OpenOptions::new().write(true).open(path).map_err(refused)?;
        return write(&mut file).map_err(refused);
    }
    let partial = partial_of(path);
    let written = corpus::files::create(&partial)
        .and_then(|mut file| write(&mut file).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&partial);
        refused(e)
    })
}

const PLACE_REMEDY: &str = "choose a path that you may write to and that has room";

/// Refuses a path where no file can be written, before the work that is to be written there.
pub(crate) fn check_place(path: &Path) -> Result<(), Failure> {
    let refused = Failure::cannot::<std::io::Error>("write", path, PLACE_REMEDY);
    if path.is_dir() {
        return Err(refused(std::io::ErrorKind::IsADirectory.into()));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match parent.map(std::fs::metadata).transpose() {
        Ok(None) => Ok(()),
        Ok(Some(parent)) if parent.is_dir() => Ok(()),
        Ok(Some(_)) => Err(refused(std::io::ErrorKind::NotADirectory.into())),
        Err(error) => Err(refused(error)),
    }
}

/// Creates a folder atomically, with its contents.
pub(crate) fn new_folder<T>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let remedy = "--out names a folder that does not exist yet, where there is room";
    let refused = Failure::cannot::<std::io::Error>("write", path, remedy);
    let partial = partial_of(path);
    std::fs::create_dir_all(&partial).map_err(refused)?;
    let filled = fill(&partial)
        .and_then(|filled| std::fs::rename(&partial, path).map(|()| filled).map_err(refused));
    if filled.is_err() {
        let _ = std::fs::remove_dir_all(&partial);
    }
    filled
}

fn partial_of(path: &Path) -> PathBuf {
    /// A counter makes the names unique within one process.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.{number}.partial", std::process::id()));
    PathBuf::from(name)
}

/// A saved program that passes verification.
pub(crate) fn verified(path: &Path) -> Result<Verified<Program>, Failure> {
    ir::program::verify(open(path)?).map_err(|violations| {
        Failure::refused(format!("{} does not verify: {violations}", path.display()))
    })
}

/// A file of rows in JSON; each row is flushed before the next one is made.
pub(crate) struct Rows {
    path: PathBuf,
    file: File,
}

impl Rows {
    /// Creates a new file, which must not exist yet.
    pub(crate) fn create(path: &Path, remedy: &str) -> Result<Self, Failure> {
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let file = file.map_err(Failure::cannot("start", path, remedy))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Opens an existing file to continue it; returns its text up to the last complete row. A row cut off by a kill is removed.
    pub(crate) fn resume(path: &Path, most: u64) -> Result<(Self, String), Failure> {
        let mut text = read_text(path, most)?;
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        let whole = |mut file: File| {
            file.set_len(text.len() as u64)?;
            file.seek(SeekFrom::End(0)).map(|_| file)
        };
        let file = OpenOptions::new().write(true).open(path).and_then(whole);
        let file = file.map_err(Failure::cannot("write", path, "check the path"))?;
        Ok((Self { path: path.to_owned(), file }, text))
    }

    pub(crate) fn write(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        let line = serde_json::to_string(row).map_err(std::io::Error::from);
        let written = line.and_then(|line| self.file.write_all((line + "\n").as_bytes()));
        let remedy = "make room there";
        written
            .and_then(|()| self.file.flush())
            .map_err(Failure::cannot("write", &self.path, remedy))
    }
}
