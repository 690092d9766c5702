//! The file of a measured grid while it is written: terms first, then rows. Each row is written out before the next one is begun.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use search::measured_grid::{Answer, Row, Terms};

use crate::failure::Failure;
use crate::files::Rows;

const BYTES_MAX: u64 = 1 << 30;

/// The rows recorded so far, and the file for the next ones.
pub(super) struct Recording {
    path: PathBuf,
    rows: Rows,
    /// Answers by point.
    pub(super) done: BTreeMap<u32, Answer>,
    /// The point that gave the answer for a program and a kernel.
    pub(super) by_ids: BTreeMap<(String, String), u32>,
}

impl Recording {
    /// Creates a new file, which must not exist yet; or with `resume` continues one that has these terms.
    pub(super) fn open(path: &Path, terms: &Terms, resume: bool) -> Result<Self, Failure> {
        let (done, by_ids) = (BTreeMap::new(), BTreeMap::new());
        if !(resume && path.exists()) {
            let remedy = "--out names a new file, or one to go on with and --resume";
            let mut rows = Rows::create(path, remedy)?;
            rows.write(terms)?;
            return Ok(Self { path: path.to_owned(), rows, done, by_ids });
        }
        let (rows, whole) = Rows::resume(path, BYTES_MAX)?;
        let mut recording = Self { path: path.to_owned(), rows, done, by_ids };
        let mut lines = whole.lines();
        recording.check_terms(lines.next().unwrap_or_default(), terms)?;
        for (number, line) in lines.enumerate() {
            let row: Row = serde_json::from_str(line).map_err(|error| {
                let line = number + 2;
                Failure::integrity(format!("{} line {line} is no row: {error}", path.display()))
            })?;
            recording.note(row);
        }
        Ok(recording)
    }

    fn check_terms(&self, line: &str, now: &Terms) -> Result<(), Failure> {
        let refuse = |what: String| {
            Err(Failure::usage(format!(
                "{} was recorded under other terms: {what}; start another file",
                self.path.display()
            )))
        };
        let Ok(then) = serde_json::from_str::<Terms>(line) else {
            return refuse("its first line is not the terms of a measured grid".to_owned());
        };
        if let (Some(then), Some(now)) = (&then.conditions, &now.conditions)
            && let Some(difference) = then.differs(now)
        {
            return refuse(difference);
        }
        // Each process measures the bandwidth anew, and the conditions hold the fields that may differ.
        let (conditions, bandwidth) = (then.conditions.clone(), then.bandwidth);
        if (Terms { conditions, bandwidth, ..now.clone() }) != then {
            return refuse("model, grid, context, seed or rounds".to_owned());
        }
        Ok(())
    }

    fn note(&mut self, row: Row) {
        match &row.answer {
            Answer::Again(_) => return,
            Answer::Measured(measured) => {
                let ids = (measured.program_id.clone(), measured.kernel_id.clone());
                self.by_ids.insert(ids, row.point);
            }
            Answer::Predicted { program_id, kernel_id, .. } => {
                self.by_ids.insert((program_id.clone(), kernel_id.clone()), row.point);
            }
            Answer::Illegal(_) | Answer::Twin(_) | Answer::Failed { .. } => {}
        }
        self.done.insert(row.point, row.answer);
    }

    pub(super) fn row(&mut self, point: u32, answer: Answer) -> Result<(), Failure> {
        let row = Row { point, answer };
        self.rows.write(&row)?;
        self.note(row);
        Ok(())
    }
}
