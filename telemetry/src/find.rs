//! The location of pages: one file per process in a folder that belongs to the user.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};

/// Suffix of a page's file name, after the process id.
const SUFFIX: &str = ".telemetry";
/// Maximum pages that are listed.
const PAGES_MAX: usize = 1024;

/// A folder of pages.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

/// A page in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The process that writes it.
    pub pid: u32,
    /// Its file.
    pub path: PathBuf,
}

/// The folder of this user: `$XDG_RUNTIME_DIR/amk`, or `/tmp/amk-UID` if that variable names no folder.
#[must_use]
pub fn folder() -> Folder {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let path = match named.filter(|path| path.is_absolute() && path.is_dir()) {
        Some(runtime) => runtime.join("amk"),
        None => std::env::temp_dir().join(format!("amk-{}", rustix::process::getuid().as_raw())),
    };
    Folder(path)
}

impl Folder {
    /// A folder at another path.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a process's page.
    #[must_use]
    pub fn page(&self, pid: u32) -> PathBuf {
        self.0.join(format!("{pid}{SUFFIX}"))
    }

    /// Creates a file for this process, locked as long as it is open, and removes the files of ended processes.
    pub(crate) fn create(&self, pid: u32) -> io::Result<(File, PathBuf)> {
        DirBuilder::new().mode(0o700).recursive(true).create(&self.0)?;
        let folder = std::fs::symlink_metadata(&self.0)?;
        // In a folder that is writable by all users, another user may have created it first.
        if !folder.is_dir() || folder.uid() != rustix::process::getuid().as_raw() {
            return Err(io::Error::other(format!(
                "{} is not this user's folder",
                self.0.display()
            )));
        }
        for (found, lives) in self.all() {
            if !lives {
                let _ = std::fs::remove_file(found.path); // another process may have removed it
            }
        }
        let path = self.page(pid);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok((file, path))
    }

    /// The pages of live processes, by process id.
    #[must_use]
    pub fn living(&self) -> Vec<Found> {
        let living = self.all().into_iter().filter(|(_, lives)| *lives);
        living.map(|(found, _)| found).collect()
    }

    fn all(&self) -> Vec<(Found, bool)> {
        let Ok(entries) = std::fs::read_dir(&self.0) else { return Vec::new() };
        let named = |entry: std::fs::DirEntry| {
            let pid = entry.file_name().to_str()?.strip_suffix(SUFFIX)?.parse().ok()?;
            Some(Found { pid, path: entry.path() })
        };
        let found = entries.filter_map(|entry| named(entry.ok()?)).take(PAGES_MAX);
        let mut all: Vec<(Found, bool)> = found
            .filter_map(|found| {
                let lives = lives(&found.path).ok()?;
                Some((found, lives))
            })
            .collect();
        all.sort_by_key(|(found, _)| found.pid);
        all
    }
}

/// Whether a page's process holds its lock. A process id can be reused, or belong to another process in a container; a
/// lock ends with its process.
fn lives(path: &Path) -> io::Result<bool> {
    let file = open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Opens a page for reading.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_page_is_its_owners_and_goes_with_its_process() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::at(&home.path().join("amk"));
        assert_eq!(folder.living(), []);
        let (file, path) = folder.create(71).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(folder.path())), (0o600, 0o700));
        assert_eq!(folder.living(), [Found { pid: 71, path: path.clone() }]);
        assert!(folder.create(71).is_err(), "a living process's page is not taken");
        std::fs::write(folder.path().join("notes.txt"), "x").unwrap();
        drop(file);
        assert_eq!(folder.living(), [], "its process has gone");
        let (_other, _) = folder.create(72).unwrap();
        assert!(!path.exists(), "what a process left is taken away by the next one");
        assert!(folder.path().join("notes.txt").exists(), "and nothing else");
    }

    #[test]
    fn a_folder_that_is_a_link_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let real = home.path().join("real");
        std::fs::create_dir(&real).unwrap();
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(Folder::at(&link).create(1).is_err());
    }
}
