//! The results table for people: a tab-separated view of the ledger.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{At, CorpusError};
use crate::files;

/// A tab-separated file with a header. It is a view: the ledger is the record, and the view is rewritten on resuming.
#[derive(Debug)]
pub struct Results {
    file: File,
    path: PathBuf,
    columns: usize,
}

impl Results {
    /// Writes the file anew, with these columns and rows. An existing entry of its name, even a symbolic link, is
    /// replaced when the new file is complete.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn create(
        path: &Path,
        columns: &[&str],
        rows: &[Vec<String>],
    ) -> Result<Self, CorpusError> {
        files::make_folder_of(path)?;
        if path.is_dir() {
            return Err(CorpusError::io("write", path, std::io::ErrorKind::IsADirectory.into()));
        }
        let file = files::replace(path, text(columns, rows).as_bytes()).at("write", path)?;
        Ok(Self { file, path: path.to_path_buf(), columns: columns.len() })
    }

    /// Appends a row. Missing cells are left empty, tabs and line ends become spaces.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn append(&mut self, row: &[String]) -> Result<(), CorpusError> {
        let cells = (0..self.columns).map(|i| row.get(i).map_or("", String::as_str));
        self.file.write_all(line(cells).as_bytes()).at("write", &self.path)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn text(columns: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = line(columns.iter().copied());
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str)));
    }
    text
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
    fn a_table_takes_the_place_of_a_link_and_of_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let [victim, path] = ["victim", "results.tsv"].map(|name| folder.path().join(name));
        std::fs::write(&victim, "mine").unwrap();
        for name in ["results.tsv", "results.tsv.partial"] {
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        let mut results = Results::create(&path, &["trial"], &[]).unwrap();
        results.append(&["1".into()]).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "trial\n1\n");
        std::fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).unwrap();
        Results::create(&path, &["trial"], &[]).unwrap();
        assert!(path.symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn a_folder_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = Results::create(folder.path(), &["trial"], &[]).unwrap_err().to_string();
        assert!(error.contains(&folder.path().display().to_string()), "{error}");
        assert!(error.contains("name a file"), "{error}");
    }
}
