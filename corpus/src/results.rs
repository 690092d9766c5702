//! The table that people read: a tab-separated view of the ledger.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::CorpusError;

/// A tab-separated file with a header. It is a view: the ledger is the record, and the view is written anew on resuming.
#[derive(Debug)]
pub struct Results {
    file: File,
    path: PathBuf,
    columns: usize,
}

impl Results {
    /// Writes the file anew, with these columns and rows. An old file is replaced only when the new one is complete.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn create(
        path: &Path,
        columns: &[&str],
        rows: &[Vec<String>],
    ) -> Result<Self, CorpusError> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(|e| CorpusError::io("create", folder, e))?;
        if path.is_dir() {
            return Err(CorpusError::io("write", path, std::io::ErrorKind::IsADirectory.into()));
        }
        let mut text = line(columns.iter().copied());
        for row in rows {
            text.push_str(&line(row.iter().map(String::as_str)));
        }
        let regular = path.symlink_metadata().is_ok_and(|m| m.is_file());
        let special = path.exists() && !regular;
        let file = if special {
            // A pipe or a device: written in place.
            write_all(path, &text)?
        } else {
            let mut partial = path.as_os_str().to_owned();
            partial.push(".partial");
            let partial = PathBuf::from(partial);
            let written =
                write_all(&partial, &text).map_err(|e| rename_in(e, path)).and_then(|file| {
                    std::fs::rename(&partial, path)
                        .map_err(|e| CorpusError::io("write", path, e))?;
                    Ok(file)
                });
            if written.is_err() {
                let _ = std::fs::remove_file(&partial);
            }
            written?
        };
        Ok(Self { file, path: path.to_path_buf(), columns: columns.len() })
    }

    /// Appends a row. Missing cells are left empty, tabs and line ends become spaces.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn append(&mut self, row: &[String]) -> Result<(), CorpusError> {
        let cells = (0..self.columns).map(|i| row.get(i).map_or("", String::as_str));
        self.file
            .write_all(line(cells).as_bytes())
            .map_err(|e| CorpusError::io("write", &self.path, e))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn write_all(path: &Path, text: &str) -> Result<File, CorpusError> {
    File::create(path)
        .and_then(|mut file| file.write_all(text.as_bytes()).map(|()| file))
        .map_err(|e| CorpusError::io("write", path, e))
}

/// The same error, naming the file that was asked for instead of its unfinished copy.
fn rename_in(error: CorpusError, path: &Path) -> CorpusError {
    match error {
        CorpusError::Io { action, source, .. } => CorpusError::io(action, path, source),
        CorpusError::Exists { .. }
        | CorpusError::Locked { .. }
        | CorpusError::Schema { .. }
        | CorpusError::Tampered { .. }
        | CorpusError::Store { .. }
        | CorpusError::NoStore { .. }
        | CorpusError::NewerStore { .. }
        | CorpusError::Diverged { .. }
        | CorpusError::Foreign { .. } => error,
    }
}

fn line<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let cells: Vec<String> = cells.map(|cell| cell.replace(['\t', '\n', '\r'], " ")).collect();
    cells.join("\t") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_header_and_cells_are_cleaned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/results.tsv");
        let rows = [vec!["0".to_owned(), "kept".to_owned()]];
        let mut results = Results::create(&path, &["trial", "why"], &rows).unwrap();
        results.append(&["1".into(), "a\tb\nc".into()]).unwrap();
        results.append(&["2".into()]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "trial\twhy\n0\tkept\n1\ta b c\n2\t\n");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = Results::create(folder.path(), &["trial"], &[]).unwrap_err().to_string();
        assert!(error.contains(&folder.path().display().to_string()), "{error}");
        assert!(error.contains("name a file"), "{error}");
    }
}
