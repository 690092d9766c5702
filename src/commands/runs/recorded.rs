//! A run that holds, read whole: what `show`, `compare`, `replay` and `export` start from.

use std::path::{Path, PathBuf};

use corpus::manifest::{self, State};
use search::{Conditions, Confirmation, Row, Trial};
use serde_json::Value;

use super::{Finding, look, one_ledger};
use crate::commands::search_loop;
use crate::failure::Failure;

/// A run.
pub(super) struct Recorded {
    /// Its ledger.
    pub(super) ledger: PathBuf,
    /// Its id.
    pub(super) run: String,
    /// The header of its ledger.
    pub(super) header: Value,
    /// Rows of its ledger, the header among them.
    pub(super) rows: usize,
    pub(super) trials: Vec<Trial>,
    /// The confirmation of the trial that leads, if it came last.
    pub(super) confirmation: Option<Confirmation>,
    pub(super) state: State,
}

impl Recorded {
    /// Reads the one run that a path means, and refuses it if it does not hold.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        Self::read(&one_ledger(path)?)
    }

    /// Reads a ledger with its run.
    pub(super) fn read(ledger: &Path) -> Result<Self, Failure> {
        if let Some(Finding { reason, exit, .. }) = look(ledger).finding {
            let message = format!("{} does not hold: {reason}", ledger.display());
            return Err(Failure { exit, message });
        }
        let contents = corpus::read(ledger)?;
        let first = contents.hashes.first().map_or("", String::as_str);
        let run = corpus::store::run_id(&contents.header, first);
        let (mut trials, mut confirmation) = (Vec::new(), None);
        for row in search_loop::rows(&contents, ledger)? {
            match row {
                Row::Trial(trial) => {
                    confirmation = None;
                    trials.push(*trial);
                }
                Row::Confirmation(last) => confirmation = Some(*last),
            }
        }
        let state = match folder(ledger) {
            Some(folder) => manifest::look(folder)?.state,
            None => State::Open,
        };
        let (rows, header) = (contents.hashes.len(), contents.header);
        Ok(Self { ledger: ledger.to_path_buf(), run, header, rows, trials, confirmation, state })
    }

    /// A text of the header.
    pub(super) fn word(&self, key: &str) -> Option<&str> {
        self.header.get(key).and_then(Value::as_str)
    }

    /// The trial that leads: the baseline where the champion was refuted.
    pub(super) fn champion(&self) -> Option<&Trial> {
        let refuted = self
            .confirmation
            .as_ref()
            .is_some_and(|confirmation| confirmation.decision == search::Decision::Reverted);
        let mut leading = self.trials.iter().filter(|trial| trial.outcome.leads());
        if refuted { leading.next() } else { leading.next_back() }
    }

    /// Where it was measured.
    pub(super) fn conditions(&self) -> Option<Conditions> {
        serde_json::from_value(self.header.get("conditions")?.clone()).ok()
    }

    /// Where each card measured, of a search that has several; else where it was measured, if it was.
    pub(super) fn cards(&self) -> Vec<Conditions> {
        let several =
            self.header.get("cards").and_then(|cards| serde_json::from_value(cards.clone()).ok());
        several.unwrap_or_else(|| self.conditions().into_iter().collect())
    }

    /// Where a card of this search measured: of one without a number, where the search did.
    pub(super) fn card(&self, number: Option<u32>) -> Option<Conditions> {
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) => self.cards().into_iter().nth(number),
            None => self.conditions(),
        }
    }

    /// The noise that its search measured on a card; none where it was predicted.
    pub(super) fn noise_floor(&self, card: Option<u32>) -> f64 {
        let beside = self.trials.iter().flat_map(|trial| &trial.beside);
        let beside = beside.filter(|other| Some(other.card) == card).filter_map(|o| o.noise_floor);
        let own = self.trials.iter().filter(|trial| trial.card == card);
        own.filter_map(|trial| trial.noise_floor).chain(beside).next_back().unwrap_or(0.0)
    }
}

/// The folder of a run's ledger, if the ledger is called as it should be.
pub(super) fn folder(ledger: &Path) -> Option<&Path> {
    let named = ledger.file_name().is_some_and(|name| name == super::LEDGER);
    let folder = ledger.parent().filter(|_| named)?;
    Some(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
}

/// The word for a run's state.
pub(super) fn state_name(state: &State) -> &'static str {
    match state {
        State::Open => "open",
        State::Sealed(..) => "sealed",
        State::Collected(..) => "collected",
    }
}
