//! Saved programs (`.amk` is text, `.amkp` is binary), and files that appear whole or not at all.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ir::program::{Program, Verified};
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

/// Writes a program, whole or not at all.
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

/// A path that was named cannot be read.
pub(crate) fn unreadable(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("cannot read {}: {error}; check the path", path.display()))
}

/// The text of a file of at most so many bytes.
pub(crate) fn read_text(path: &Path, most: u64) -> Result<String, Failure> {
    corpus::files::read_text(path, most).map_err(|error| unreadable(path, error))
}

/// What a JSON file of at most so many bytes holds.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, most: u64) -> Result<T, Failure> {
    serde_json::from_str(&read_text(path, most)?).map_err(|error| unreadable(path, error))
}

/// Writes a file so that it appears complete or not at all.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_with(path, |file| file.write_all(bytes))
}

/// The same, in parts.
pub(crate) fn write_with(
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let refused = |e: std::io::Error| {
        Failure::usage(format!(
            "cannot write {}: {e}; choose a path that you may write to and that has room",
            path.display()
        ))
    };
    if path.is_dir() {
        return Err(refused(std::io::ErrorKind::IsADirectory.into()));
    }
    if path.exists() && !path.is_file() {
        // A pipe or a device: there is nothing to rename over.
        let mut file = std::fs::OpenOptions::new().write(true).open(path).map_err(refused)?;
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

/// Makes a folder so that it appears complete or not at all.
pub(crate) fn new_folder<T>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let refused = |error: std::io::Error| {
        let remedy = "--out names a folder that does not exist yet, where there is room";
        Failure::usage(format!("cannot write {}: {error}; {remedy}", path.display()))
    };
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
    /// Writers of one process differ too.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.{number}.partial", std::process::id()));
    PathBuf::from(name)
}

/// A saved program that holds.
pub(crate) fn verified(path: &Path) -> Result<Verified<Program>, Failure> {
    ir::program::verify(open(path)?).map_err(|violations| {
        Failure::refused(format!("{} does not verify: {violations}", path.display()))
    })
}
