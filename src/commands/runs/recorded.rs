//! A run, read completely: the common input of all commands on runs.

use std::path::{Path, PathBuf};

use corpus::manifest::State;
use corpus::{Contents, CorpusError};
use search::{Audit, Conditions, Confirmation, Decision, Row, Trial};
use serde_json::Value;

use super::{Finding, one_ledger, seal, sound, terms};
use crate::failure::{Exit, Failure};

/// A run, as far as it is valid.
pub(in crate::commands) struct Recorded {
    pub(in crate::commands) ledger: PathBuf,
    pub(in crate::commands) run: String,
    pub(in crate::commands) header: Value,
    /// Rows of its ledger, the header included.
    pub(in crate::commands) rows: usize,
    pub(in crate::commands) trials: Vec<Trial>,
    /// The confirmation of the champion, if it came last.
    pub(in crate::commands) confirmation: Option<Confirmation>,
    /// The champion that was refuted last.
    refuted: Option<u64>,
    /// Whether an unfinished row at its end was left out.
    pub(super) torn: bool,
    pub(in crate::commands) state: State,
    /// The first invalid item; nothing after it was read.
    pub(super) finding: Option<Finding>,
}

impl Recorded {
    pub(in crate::commands) fn of(ledger: &Path) -> Self {
        Self {
            ledger: ledger.to_path_buf(),
            run: String::new(),
            header: Value::Null,
            rows: 0,
            trials: Vec::new(),
            confirmation: None,
            refuted: None,
            torn: false,
            state: State::Open,
            finding: None,
        }
    }

    /// Reads the only run that a path names, and refuses it if it is invalid.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        Self::read(&one_ledger(path)?)
    }

    /// Reads a ledger with its run, and refuses it if it is invalid.
    pub(in crate::commands) fn read(ledger: &Path) -> Result<Self, Failure> {
        sound(ledger).map(|(found, _)| found)
    }

    /// Reads a ledger as far as it is valid.
    pub(super) fn look(ledger: &Path) -> Self {
        Self::examined(ledger).0
    }

    /// The same, and its rows as far as their chain is valid.
    pub(super) fn examined(ledger: &Path) -> (Self, Option<Contents>) {
        let mut found = Self::of(ledger);
        match corpus::read(ledger) {
            Ok(contents) => {
                let first = contents.hashes.first().map_or("", String::as_str);
                found.run = corpus::store::run_id(&contents.header, first);
                (found.rows, found.torn) = (contents.hashes.len(), contents.torn);
                found.header = contents.header.clone();
                let taken = found.take(&contents.header, &contents.records).err();
                found.finding = taken.or_else(|| seal(ledger, &mut found.state));
                (found, Some(contents))
            }
            Err(error) => {
                let exit = if error.is_integrity() { Exit::Integrity } else { Exit::Usage };
                // Of another file, as the ledger's head, the error names which.
                let (line, reason) = if let CorpusError::Tampered { path, line, reason } = &error
                    && path == ledger
                {
                    (Some(*line), reason.clone())
                } else {
                    (None, error.to_string())
                };
                found.finding = Some(Finding { line, reason, exit });
                (found, None)
            }
        }
    }

    /// Appends rows, up to the first that does not follow from its samples and the rows before it.
    pub(super) fn take(&mut self, header: &Value, records: &[Value]) -> Result<(), Finding> {
        let Some(terms) = terms(header) else {
            let reason = "the header is that of another version of amk".to_owned();
            return Err(Finding { line: Some(1), reason, exit: Exit::Usage });
        };
        let mut audit = Audit::new(terms).with_bound(super::bound(header));
        for (index, record) in records.iter().enumerate() {
            let at = |reason: String, exit| Finding { line: Some(index + 2), reason, exit };
            let row: Row = serde_json::from_value(record.clone()).map_err(|error| {
                at(format!("written by another version of amk ({error})"), Exit::Usage)
            })?;
            audit.row(&row).map_err(|reason| {
                at(format!("the row does not follow: {reason}"), Exit::Integrity)
            })?;
            match row {
                Row::Trial(trial) => {
                    self.confirmation = None;
                    self.trials.push(*trial);
                }
                Row::Confirmation(last) => {
                    let refuted = last.decision == Decision::Reverted;
                    self.refuted = refuted.then_some(last.champion);
                    self.confirmation = Some(*last);
                }
            }
        }
        Ok(())
    }

    /// A string of the header.
    pub(in crate::commands) fn word(&self, key: &str) -> Option<&str> {
        self.header.get(key).and_then(Value::as_str)
    }

    /// The champion: the last trial that led. If its confirmation refuted it, the first one that led, or none if that was the refuted one.
    pub(in crate::commands) fn champion(&self) -> Option<&Trial> {
        let mut leading = self.trials.iter().filter(|trial| trial.outcome.leads());
        let last = leading.next_back()?;
        if Some(last.trial) == self.refuted { leading.next() } else { Some(last) }
    }

    /// The champion's latency, if all rows are valid.
    pub(super) fn best_us(&self) -> Option<f64> {
        let whole = self.finding.as_ref().is_none_or(|finding| finding.line.is_none());
        self.champion().filter(|_| whole)?.verdict.latency_us
    }

    pub(in crate::commands) fn conditions(&self) -> Option<Conditions> {
        serde_json::from_value(self.header.get("conditions")?.clone()).ok()
    }

    /// The conditions of each card of a search with several; else those of the search, if it measured.
    pub(super) fn cards(&self) -> Vec<Conditions> {
        let several =
            self.header.get("cards").and_then(|cards| serde_json::from_value(cards.clone()).ok());
        several.unwrap_or_else(|| self.conditions().into_iter().collect())
    }

    /// The conditions of a card of this search; without a number, those of the search.
    pub(super) fn card(&self, number: Option<u32>) -> Option<Conditions> {
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) => self.cards().into_iter().nth(number),
            None => self.conditions(),
        }
    }

    /// The noise floor that its search measured on a card; 0 if it predicted.
    pub(super) fn noise_floor(&self, card: Option<u32>) -> f64 {
        let beside = self.trials.iter().flat_map(|trial| &trial.beside);
        let beside = beside.filter(|other| Some(other.card) == card).filter_map(|o| o.noise_floor);
        let own = self.trials.iter().filter(|trial| trial.card == card);
        own.filter_map(|trial| trial.noise_floor).chain(beside).next_back().unwrap_or(0.0)
    }
}

/// The folder of a run's ledger, if the ledger has the standard file name.
pub(super) fn folder(ledger: &Path) -> Option<&Path> {
    let named = ledger.file_name().is_some_and(|name| name == super::LEDGER);
    let folder = ledger.parent().filter(|_| named)?;
    Some(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
}

pub(super) fn state_name(state: &State) -> &'static str {
    match state {
        State::Open => "open",
        State::Sealed(..) => "sealed",
        State::Collected(..) => "collected",
    }
}
