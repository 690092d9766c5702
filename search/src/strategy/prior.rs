//! Moves that helped in earlier searches, on other graphs too: first all of them at once, then each, best first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{Form, Proposals, Question, SearchSpace};
use crate::propose::{Origin, TrialRecords, edited};

/// Trials with zero gain that each move is credited with, so that one lucky trial does not lead the list.
const DOUBT: f64 = 1.0;

/// Least gain of a move that is used, after the credit of [`DOUBT`].
const WORTH_MIN: f64 = 0.001;

/// Maximum number of moves for a search.
const MOVES_MAX: usize = 32;

/// Largest loss that one trial counts for: the size of a loss is no information about the good moves.
const LOSS_MAX: f64 = -0.1;

/// Statistics of one move in a store, for one graph on one card.
#[derive(Clone, Debug, PartialEq)]
pub struct MoveStats {
    /// Paths of the knobs that were changed, with their new values.
    pub to: BTreeMap<String, Json>,
    /// Trials that made the move.
    pub tries: f64,
    /// Sum of the gains, as fractions of the incumbent's time.
    pub gain_sum: f64,
}

/// A move that helped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriorMove {
    /// Paths of the knobs with the values that helped.
    pub to: BTreeMap<String, Json>,
    /// Expected gain, as a fraction of the incumbent's time.
    pub worth: f64,
}

/// Ranks the moves that helped, best first. Results of a move on several graphs or cards are added, weighted by their
/// number of trials.
#[must_use]
pub fn rank(seen: impl IntoIterator<Item = MoveStats>) -> Vec<PriorMove> {
    let mut sums: BTreeMap<String, (BTreeMap<String, Json>, f64, f64)> = BTreeMap::new();
    for MoveStats { to, tries, gain_sum } in seen {
        let name = serde_json::to_string(&to).unwrap_or_default();
        let (_, all, gains) = sums.entry(name).or_insert((to, 0.0, 0.0));
        *all += tries;
        *gains += gain_sum.max(LOSS_MAX * tries);
    }
    let known = sums
        .into_values()
        .map(|(to, tries, gains)| PriorMove { to, worth: gains / (tries + DOUBT) });
    let mut known: Vec<PriorMove> = known.filter(|known| known.worth >= WORTH_MIN).collect();
    // Moves of equal worth stay in the order of their names.
    known.sort_by(|a, b| b.worth.total_cmp(&a.worth));
    known.truncate(MOVES_MAX);
    known
}

/// The moves that fit into a search space. A move with a knob or value outside it is left out.
pub(super) fn moves(search_space: &SearchSpace, known: Vec<PriorMove>) -> Vec<Form> {
    let form = |known: PriorMove| -> Option<Form> {
        let one = |(path, json): (&String, &Json)| {
            let (knob, values) = search_space.space.iter().find(|(knob, _)| knob.path() == path)?;
            Some((*knob, values.iter().copied().find(|value| value.to_json() == *json)?))
        };
        known.to.iter().map(one).collect()
    };
    known.into_iter().filter_map(form).collect()
}

/// Whether a trial set all these knobs to these values and lost.
fn refuted(form: &Form, past: &TrialRecords) -> bool {
    past.iter().any(|past| {
        let made = past.changes.iter().all(|c| form.contains(&(c.knob, c.to)));
        made && !past.kept && form.iter().all(|&(knob, value)| past.config.get(knob) == value)
    })
}

/// Proposes all moves at once, then the better half and quarter of them, then each, then continues as `hill-climb`.
pub(super) fn ask<'s>(
    search_space: &'s SearchSpace,
    moves: &[Form],
    question: &Question<'s>,
) -> Proposals<'s> {
    let Question { trial, incumbent, past } = *question;
    let mut planned = Vec::new();
    if trial <= search_space.sweep {
        let count = moves.len();
        let parts = [count, count.div_ceil(2), count.div_ceil(4)];
        // If two moves set the same knob, the better one wins.
        let union =
            |part: usize| -> Form { moves[..part].iter().rev().flatten().copied().collect() };
        let unions = parts.into_iter().filter(|&part| part > 1).map(union);
        let open = moves.iter().filter(|form| !refuted(form, past)).cloned();
        planned.extend(unions.chain(open).map(|form| edited(incumbent, &form)));
    }
    let planned = planned.into_iter().filter(move |config| config != incumbent);
    let known = planned.map(|config| (Origin::Prior, config));
    Box::new(known.chain(search_space.draws(trial, incumbent, past)))
}
