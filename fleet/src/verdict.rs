//! Verdicts of jobs, and what the verdicts of several cards say together.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::board::{Entry, Recorded};
use crate::job::Kind;

/// Least number of cards that must agree before a champion is confirmed.
pub const AGREED_CARDS_MIN: usize = 3;
/// Least number of hosts that these cards are in.
pub const AGREED_HOSTS_MIN: usize = 2;

/// What a job found on its card. It follows from the job's ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// kept, reverted or inconclusive: whether the champion was better than the start again, on fresh tokens.
    pub decision: Option<String>,
    /// Why, in one line.
    pub why: String,
    /// measured-gpu or predicted.
    pub latency_kind: String,
    /// µs per token of the champion on this card; compared with this card's figures only.
    pub latency_us: Option<f64>,
    /// The share of the start's time that the champion saves, as an interval. It may be compared across cards.
    pub saved: Option<[f64; 2]>,
    /// The champion's id.
    pub schedule_id: Option<String>,
    /// Its program.
    pub program_id: Option<String>,
    /// Its kernel.
    pub kernel_id: Option<String>,
    /// The champion's schedule.
    pub config: Value,
    /// The schedule that the search began with.
    pub start_config: Value,
    /// Trials.
    pub trials: u64,
}

impl Finding {
    /// Whether the champion was kept by its confirmation.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.decision.as_deref() == Some("kept")
    }

    fn is_reverted(&self) -> bool {
        self.decision.as_deref() == Some("reverted")
    }

    fn is_measured(&self) -> bool {
        self.latency_kind == "measured-gpu"
    }
}

/// How far a champion is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// By predictions only.
    Predicted,
    /// Measured, on too few cards or hosts, or a card reverted it.
    Candidate,
    /// Kept on enough cards and hosts, and reverted on none.
    Confirmed,
}

/// The status that the results of a champion's leg and races give it.
#[must_use]
pub fn status(results: &[&Recorded]) -> Status {
    if results.iter().any(|result| !result.finding.is_measured()) {
        return Status::Predicted;
    }
    let (cards, hosts) = kept_on(results);
    let reverted = results.iter().any(|result| result.finding.is_reverted());
    let agreed = cards >= AGREED_CARDS_MIN && hosts >= AGREED_HOSTS_MIN;
    if agreed && !reverted { Status::Confirmed } else { Status::Candidate }
}

/// The number of cards that kept a champion, and of their hosts. A card without an identity cannot be told from another
/// one and does not count.
fn kept_on(results: &[&Recorded]) -> (usize, usize) {
    let kept: Vec<&Recorded> =
        (results.iter().copied()).filter(|r| r.finding.is_kept() && !r.card.is_empty()).collect();
    let cards: BTreeSet<&str> = kept.iter().map(|result| &*result.card).collect();
    (cards.len(), hosts(&kept))
}

/// The number of hosts that are surely different. Two results with one host name, one boot or one card are of one host:
/// containers of a machine have names of their own, and a machine that was restarted has another boot.
fn hosts(results: &[&Recorded]) -> usize {
    let mut groups: Vec<Vec<&Recorded>> = Vec::new();
    for result in results {
        let one = |other: &&Recorded| {
            let boots = !result.boot.is_empty() && result.boot == other.boot;
            result.host == other.host || boots || result.card == other.card
        };
        let (same, mut rest): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.iter().any(one));
        let mut joined: Vec<&Recorded> = same.into_iter().flatten().collect();
        joined.push(result);
        rest.push(joined);
        groups = rest;
    }
    groups.len()
}

/// The best schedule for a model on a card at a context.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Champion {
    /// The model.
    pub model: String,
    /// The GPU that it is scheduled for.
    pub target: String,
    /// Tokens of context that it was judged at; empty: the default.
    pub contexts: Vec<u32>,
    /// The card that it was found on; none without a GPU.
    pub card: Option<String>,
    /// predicted, candidate or confirmed.
    pub status: Status,
    /// The leg that found it.
    pub job: u64,
    /// What the leg found.
    #[serde(flatten)]
    pub finding: Finding,
    /// Cards that kept it, the leg's own included.
    pub cards_kept: usize,
    /// Hosts of these cards.
    pub hosts_kept: usize,
    /// Results that reverted it.
    pub reverted: usize,
}

/// The champions by model, target, context and card: of several legs on one card the fastest there, the first of equals.
#[must_use]
pub fn champions(done: &[(Entry, Recorded)]) -> Vec<Champion> {
    type Place<'a> = (&'a str, &'a str, &'a [u32], &'a str);
    let mut best: BTreeMap<Place<'_>, &(Entry, Recorded)> = BTreeMap::new();
    for leg in done.iter().filter(|(entry, _)| entry.spec.kind == Kind::Leg) {
        let (entry, result) = leg;
        let spec = &entry.spec;
        let held =
            best.entry((&spec.model, &spec.target, &spec.contexts, &result.card)).or_insert(leg);
        let us = |result: &Recorded| result.finding.latency_us.unwrap_or(f64::INFINITY);
        if us(result) < us(&held.1) {
            *held = leg;
        }
    }
    best.into_values().map(|leg| champion(leg, done)).collect()
}

fn champion((entry, result): &(Entry, Recorded), done: &[(Entry, Recorded)]) -> Champion {
    let of_leg = |other: &Entry| other.spec.race.as_ref().is_some_and(|race| race.leg == entry.id);
    let races = done.iter().filter(|(other, _)| of_leg(other)).map(|(_, race)| race);
    let all: Vec<&Recorded> = std::iter::once(result).chain(races).collect();
    let (cards_kept, hosts_kept) = kept_on(&all);
    Champion {
        model: entry.spec.model.clone(),
        target: entry.spec.target.clone(),
        contexts: entry.spec.contexts.clone(),
        card: Some(result.card.clone()).filter(|card| !card.is_empty()),
        status: status(&all),
        job: entry.id,
        finding: result.finding.clone(),
        cards_kept,
        hosts_kept,
        reverted: all.iter().filter(|result| result.finding.is_reverted()).count(),
    }
}
