//! Files of comma-separated values (RFC 4180): one row for each run of a command, so that a sweep is one file.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::Failure;
use crate::files;

/// The name of a column, and the place of its value in the command's document.
pub(crate) type Column = (&'static str, &'static str);

/// A file that gets a row.
pub(crate) struct Csv<'a> {
    path: PathBuf,
    columns: &'a [Column],
    before: String,
}

impl<'a> Csv<'a> {
    /// Reads what the file has, before anything is measured.
    ///
    /// # Errors
    /// If it cannot be read, or has other columns.
    pub(crate) fn open(path: &Path, columns: &'a [Column]) -> Result<Self, Failure> {
        files::check_place(path)?;
        let mut before = String::new();
        if path.is_file() {
            before =
                std::fs::read_to_string(path).map_err(|error| files::unreadable(path, error))?;
        }
        let header = header(columns);
        if !before.is_empty() && before.lines().next() != Some(&header) {
            let path = path.display();
            let message =
                format!("{path} has other columns than these: {header}; name another file");
            return Err(Failure::usage(message));
        }
        if !before.is_empty() && !before.ends_with('\n') {
            before.push('\n');
        }
        Ok(Self { path: path.to_owned(), columns, before })
    }

    /// Appends the row of a document; the first row of a file follows the names of the columns.
    pub(crate) fn append(mut self, document: &Value) -> Result<(), Failure> {
        if self.before.is_empty() {
            self.before = header(self.columns) + "\n";
        }
        let cell = |(_, place): &Column| cell(document.pointer(place).unwrap_or(&Value::Null));
        let row: Vec<String> = self.columns.iter().map(cell).collect();
        files::write_whole(&self.path, format!("{}{}\n", self.before, row.join(",")).as_bytes())
    }
}

fn header(columns: &[Column]) -> String {
    columns.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(",")
}

/// A value; nothing for null.
fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    };
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const COLUMNS: [Column; 3] = [("model", "/model"), ("low_us", "/ci_us/0"), ("ok", "/ok")];

    #[test]
    fn rows_are_appended_under_one_header() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        for document in [
            json!({"model": "a,\"b\"", "ci_us": [1.5, 2.0], "ok": true}),
            json!({"model": "plain", "ci_us": null}),
        ] {
            Csv::open(&path, &COLUMNS).unwrap().append(&document).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "model,low_us,ok\n\"a,\"\"b\"\"\",1.5,true\nplain,,\n");
        let why = Csv::open(&path, &COLUMNS[..2]).err().unwrap().message;
        assert!(why.contains("other columns"), "{why}");
        let missing = dir.path().join("no/a.csv");
        assert!(Csv::open(&missing, &COLUMNS).is_err());
    }
}
