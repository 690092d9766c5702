//! The files that a tool may read and write: those in the folder that the server was started in. A client's model may
//! follow a stranger's instructions; the person who starts the server decides what it may access.
//!
//! `model` is exempt: checkpoints lie in caches elsewhere, and from a folder without one only its name and the keys of
//! its config.json are repeated.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use super::arguments::Problem;
use crate::config_source::ConfigSource;

/// Arguments that are a path, or a list of paths.
const PATHS: [&str; 6] = ["ledger", "out", "store", "path", "paths", "runs"];

/// Arguments that are a schedule or the path of one.
const SOURCES: [&str; 3] = ["config", "a", "b"];

/// Each argument that names a file outside of the working folder.
pub(super) fn outside(arguments: &Map<String, Value>) -> Vec<Problem> {
    let Some(folder) = working_folder() else { return Vec::new() };
    let why = format!(
        "it is outside of {}, where the server was started; name a file in there, or give the schedule itself",
        folder.display()
    );
    let mut problems = Vec::new();
    for (name, given) in arguments {
        for given in given.as_array().map_or(std::slice::from_ref(given), Vec::as_slice) {
            let path = if PATHS.contains(&name.as_str()) {
                given.as_str().map(PathBuf::from)
            } else if SOURCES.contains(&name.as_str()) {
                named(given)
            } else {
                None
            };
            if path.is_some_and(|path| !is_inside(&folder, &path)) {
                problems.push(Problem::new(name, given, why.as_str()));
            }
        }
    }
    problems
}

fn working_folder() -> Option<PathBuf> {
    std::env::current_dir().and_then(std::fs::canonicalize).ok()
}

/// Whether a path is inside the folder that the server was started in.
pub(super) fn in_working_folder(path: &Path) -> bool {
    working_folder().is_some_and(|folder| is_inside(&folder, path))
}

/// The path of a schedule; `None` if the argument is the schedule itself.
fn named(given: &Value) -> Option<PathBuf> {
    match serde_json::from_value(given.clone()) {
        Ok(ConfigSource::File(path)) => Some(path),
        Ok(ConfigSource::Stdin | ConfigSource::Inline(_)) | Err(_) => None,
    }
}

/// Whether a path is inside the folder after links are followed. A missing path is judged by the folder in which it would be created.
fn is_inside(folder: &Path, path: &Path) -> bool {
    let mut place = folder.join(path);
    let mut missing = PathBuf::new();
    loop {
        if let Ok(real) = place.canonicalize() {
            return real.join(missing).starts_with(folder);
        }
        // A write would follow a dangling link.
        if place.symlink_metadata().is_ok() {
            return false;
        }
        let Some(Component::Normal(name)) = place.components().next_back() else { return false };
        missing = if missing.as_os_str().is_empty() {
            PathBuf::from(name)
        } else {
            Path::new(name).join(&missing)
        };
        if !place.pop() {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_dots_that_leave_the_folder_are_outside() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folder = dir.path().canonicalize().unwrap();
        std::fs::create_dir(folder.join("runs")).unwrap();
        std::fs::write(folder.join("a.json"), "{}").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, folder.join(name));
        link(elsewhere.path(), "away").unwrap();
        link(Path::new("/no/such/file"), "dangling").unwrap();
        link(Path::new("a.json"), "b.json").unwrap();
        let absolute = folder.join("a.json");
        for path in ["a.json", "b.json", "runs/new/deep", ".", "runs/../a.json", "new.html"] {
            assert!(is_inside(&folder, Path::new(path)), "{path}");
        }
        assert!(is_inside(&folder, &absolute));
        for path in ["..", "../x", "/etc/passwd", "away", "away/new", "dangling", "no/../../x"] {
            assert!(!is_inside(&folder, Path::new(path)), "{path}");
        }
    }
}
