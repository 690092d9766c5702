//! Access to files that may come from elsewhere: regular files only, read up to a limit, and replaced without following
//! a symbolic link.
//!
//! Opening a named pipe could block for ever, a device has no end, and a link leads out of the folder. So a file is
//! opened without blocking and checked before it is read. Writes go to a new name first, which is then renamed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{At, CorpusError};

/// Opens a regular file for reading and follows symbolic links: for paths given by the user.
///
/// # Errors
/// If it cannot be opened, or is a pipe, a device or a folder.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(path, OpenOptions::new().read(true), OFlags::empty())
}

/// Opens a regular file for reading that may not be a symbolic link: for the files of a run.
///
/// # Errors
/// As [`open`], and if it is a symbolic link.
pub fn open_own(path: &Path) -> io::Result<File> {
    open_with(path, OpenOptions::new().read(true), OFlags::NOFOLLOW)
}

/// Opens a regular file for reading and writing that may not be a symbolic link; creates it if `create` is set.
///
/// # Errors
/// As [`open_own`].
pub fn open_to_write(path: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(create).truncate(false);
    open_with(path, options, OFlags::NOFOLLOW)
}

fn open_with(path: &Path, options: &mut OpenOptions, more: OFlags) -> io::Result<File> {
    // Both constants are small bits on every system that has them.
    let flags = (OFlags::NONBLOCK | more).bits().cast_signed();
    let file = options.custom_flags(flags).open(path).map_err(|error| {
        let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
        if is_link { other("it is a symbolic link".to_owned()) } else { error }
    })?;
    let found = file.metadata()?;
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if found.is_file() { Ok(file) } else { Err(not_regular()) }
}

/// The bytes of a file from [`open`] or [`open_own`], if there are at most `most`.
///
/// # Errors
/// If it is longer, or cannot be read.
pub fn read_whole(file: &File, most: u64) -> io::Result<Vec<u8>> {
    let too_long = |bytes: u64| other(format!("it has {bytes} bytes, and at most {most} are read"));
    let length = file.metadata()?.len();
    if length > most {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The bytes of a regular file that the user named.
///
/// # Errors
/// As [`open`] and [`read_whole`].
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_whole(&open(path)?, most)
}

/// The text of a regular file that the user named.
///
/// # Errors
/// As [`read`], and if it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "it is not text (UTF-8)");
    String::from_utf8(read(path, most)?).map_err(not_text)
}

/// Creates a new file. An existing entry of this name is unlinked; the target of a link is not touched.
///
/// # Errors If the file cannot be created.
pub fn create(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Writes a file so that it appears complete or not at all, and replaces any entry of its name. Returns the file, open
/// at its end.
///
/// # Errors If the disk reports an error, or a folder has the name. Nothing is left behind.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = create(&partial).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&partial, path).map(|()| file)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// The parent folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates the parent folder of a file.
pub(crate) fn make_folder_of(path: &Path) -> Result<(), CorpusError> {
    let folder = folder_of(path);
    std::fs::create_dir_all(folder).at("create", folder)
}

/// Syncs the folder, so that a new or renamed file is still found after a power loss.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CorpusError> {
    let folder = folder_of(path);
    File::open(folder).and_then(|folder| folder.sync_all()).at("sync", folder)
}

pub(crate) fn not_regular() -> io::Error {
    other("it is not a regular file".to_owned())
}

fn other(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read_and_a_pipe_keeps_nobody_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, mode, 0)
            .unwrap();
        assert_eq!(read(&at("file"), 5).unwrap(), b"12345");
        assert_eq!(read(&at("link"), 5).unwrap(), b"12345", "a link that the user named");
        let why = |found: io::Result<Vec<u8>>| found.unwrap_err().to_string();
        assert_eq!(why(read(&at("file"), 4)), "it has 5 bytes, and at most 4 are read");
        assert_eq!(why(read(&at("pipe"), 5)), "it is not a regular file");
        assert_eq!(why(read(Path::new("/dev/zero"), 5)), "it is not a regular file");
        assert_eq!(
            read(folder.path(), 5).unwrap_err().kind(),
            io::ErrorKind::IsADirectory,
            "a folder"
        );
        for open in [open_own(&at("link")), open_to_write(&at("link"), true)] {
            assert_eq!(open.unwrap_err().to_string(), "it is a symbolic link");
        }
        assert_eq!(
            open_to_write(&at("pipe"), true).unwrap_err().to_string(),
            "it is not a regular file"
        );
    }

    #[test]
    fn a_file_is_replaced_and_nothing_that_a_link_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("victim"), "mine").unwrap();
        std::os::unix::fs::symlink(at("victim"), at("best.json")).unwrap();
        std::os::unix::fs::symlink(at("victim"), at("best.json.partial")).unwrap();
        replace(&at("best.json"), b"new").unwrap();
        assert_eq!(std::fs::read(at("victim")).unwrap(), b"mine");
        assert_eq!(std::fs::read(at("best.json")).unwrap(), b"new");
        assert!(at("best.json").symlink_metadata().unwrap().is_file());
        assert!(!at("best.json.partial").exists());
        replace(folder.path(), b"new").unwrap_err();
    }
}
