//! A run that holds, read whole: what `show`, `compare`, `replay` and `export` start from.

use std::path::{Path, PathBuf};

use corpus::manifest::State;
use search::{Conditions, Confirmation, Decision, Row, Trial};
use serde_json::Value;

use super::{one_ledger, sound};
use crate::failure::Failure;

/// A run.
pub(in crate::commands) struct Recorded {
    /// Its ledger.
    pub(super) ledger: PathBuf,
    /// Its id.
    pub(super) run: String,
    /// The header of its ledger.
    pub(in crate::commands) header: Value,
    /// Rows of its ledger, the header among them.
    pub(super) rows: usize,
    pub(in crate::commands) trials: Vec<Trial>,
    /// The confirmation of the trial that leads, if it came last.
    pub(in crate::commands) confirmation: Option<Confirmation>,
    /// The champion that was refuted last.
    refuted: Option<u64>,
    pub(super) state: State,
}

impl Recorded {
    /// Reads the one run that a path means, and refuses it if it does not hold.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        Self::read(&one_ledger(path)?)
    }

    /// Reads a ledger with its run.
    pub(in crate::commands) fn read(ledger: &Path) -> Result<Self, Failure> {
        let (contents, state) = sound(ledger)?;
        let first = contents.hashes.first().map_or("", String::as_str);
        let run = corpus::store::run_id(&contents.header, first);
        let (mut trials, mut confirmation, mut last_refuted) = (Vec::new(), None, None);
        for row in super::rows(&contents, ledger)? {
            match row {
                Row::Trial(trial) => {
                    confirmation = None;
                    trials.push(*trial);
                }
                Row::Confirmation(last) => {
                    last_refuted = refuted(&last);
                    confirmation = Some(*last);
                }
            }
        }
        let (rows, header, refuted) = (contents.hashes.len(), contents.header, last_refuted);
        let ledger = ledger.to_path_buf();
        Ok(Self { ledger, run, header, rows, trials, confirmation, refuted, state })
    }

    /// A text of the header.
    pub(super) fn word(&self, key: &str) -> Option<&str> {
        self.header.get(key).and_then(Value::as_str)
    }

    /// The trial that leads: the baseline where the champion was refuted.
    pub(in crate::commands) fn champion(&self) -> Option<&Trial> {
        leading(self.trials.iter(), self.refuted)
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

/// The champion that a confirmation refuted.
pub(super) fn refuted(last: &Confirmation) -> Option<u64> {
    (last.decision == Decision::Reverted).then_some(last.champion)
}

/// The trial that leads: the last that led, unless its confirmation refuted it. Then it is the first one, and nobody if that was it.
pub(super) fn leading<'t>(
    trials: impl DoubleEndedIterator<Item = &'t Trial>,
    refuted: Option<u64>,
) -> Option<&'t Trial> {
    let mut leading = trials.filter(|trial| trial.outcome.leads());
    let last = leading.next_back()?;
    if Some(last.trial) == refuted { leading.next() } else { Some(last) }
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
