//! The cache on this machine: `models--ORG--NAME/{refs,snapshots,blobs}`.

#[cfg(feature = "client")]
use std::path::Path;
use std::path::PathBuf;
#[cfg(feature = "client")]
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::HubError;
use crate::id::{ModelId, is_word};
use crate::settings::Hub;

/// Longest commit in a file of `refs`.
const COMMIT_MAX: usize = 100;

/// A model's folder in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder with `config.json` and the weights.
    pub dir: PathBuf,
    /// Whether everything is there that the model was published with: the weights are, in any case.
    pub whole: bool,
}

impl Hub {
    /// The model's snapshot in the cache, if its configuration and all its weights are there. Nothing is downloaded.
    ///
    /// # Errors
    /// If a file of the snapshot is invalid.
    pub fn find(&self, id: &ModelId) -> Result<Option<Snapshot>, HubError> {
        let Some(commit) = self.commit(id) else { return Ok(None) };
        let dir = self.snapshot(id, &commit);
        if !dir.join("config.json").is_file() || !model::missing_weights(&dir)?.is_empty() {
            return Ok(None);
        }
        let tokenizer = "tokenizer.json";
        let absent = self.absent(id, &commit, tokenizer).exists();
        let whole = dir.join(tokenizer).is_file() || absent;
        Ok(Some(Snapshot { dir, whole }))
    }

    /// The model's folder in the cache with a `config.json`, whether or not its weights are there.
    #[must_use]
    pub fn described(&self, id: &ModelId) -> Option<PathBuf> {
        let dir = self.snapshot(id, &self.commit(id)?);
        dir.join("config.json").is_file().then_some(dir)
    }

    /// A model's folder.
    pub(crate) fn repo(&self, id: &ModelId) -> PathBuf {
        self.cache.join(id.folder())
    }

    pub(crate) fn snapshot(&self, id: &ModelId, commit: &str) -> PathBuf {
        self.repo(id).join("snapshots").join(commit)
    }

    /// The marker of a file that the model does not have at this commit.
    pub(crate) fn absent(&self, id: &ModelId, commit: &str, file: &str) -> PathBuf {
        self.repo(id).join(".no_exist").join(commit).join(file)
    }

    pub(crate) fn reference(&self, id: &ModelId) -> PathBuf {
        self.repo(id).join("refs").join(id.revision())
    }

    /// The commit of the id's revision, as far as the cache knows it.
    fn commit(&self, id: &ModelId) -> Option<String> {
        if self.snapshot(id, id.revision()).is_dir() {
            return Some(id.revision().to_owned());
        }
        let path = self.reference(id);
        let short = path.metadata().ok()?.len() <= COMMIT_MAX as u64;
        let commit = short.then(|| std::fs::read_to_string(&path).ok())??;
        let commit = commit.trim();
        is_word(commit).then(|| commit.to_owned())
    }
}

/// Makes the folder of a file.
#[cfg(feature = "client")]
pub(crate) fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(HubError::io("create", parent))
}

/// Writes a small file: whole or not at all.
#[cfg(feature = "client")]
pub(crate) fn write(path: &Path, text: &str) -> Result<(), HubError> {
    make_parent(path)?;
    let temporary = temporary(path);
    std::fs::write(&temporary, text).map_err(HubError::io("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(HubError::io("write", path))
}

/// A name beside a file that nobody else uses: the same file may be written by several processes and threads at once, and
/// each renames its own.
#[cfg(feature = "client")]
pub(crate) fn temporary(path: &Path) -> PathBuf {
    static NAMED: AtomicU64 = AtomicU64::new(0);
    let number = NAMED.fetch_add(1, Ordering::Relaxed);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.{number}", std::process::id()));
    path.with_file_name(name)
}

#[cfg(all(test, feature = "client"))]
mod tests {
    use super::*;

    #[test]
    fn one_file_is_written_by_many_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("marker");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|_| write(&path, "whole").unwrap()));
            }
        });
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "whole");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }
}
