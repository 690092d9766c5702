//! `amk runs show`: one run in full.

use std::collections::BTreeMap;
use std::path::Path;

use corpus::manifest::State;
use serde_json::{Value, json};

use super::recorded::{Recorded, state_name};
use crate::cli::RunArgs;
use crate::commands::search_loop::{self, Card, Kept};
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

pub(crate) fn run(args: &RunArgs) -> Outcome {
    let found = Recorded::open(&args.path)?;
    say(&found);
    report::document(&shown(&found))?;
    Ok(Exit::Yes)
}

/// The document of a run.
pub(crate) fn document(path: &Path) -> Result<Value, Failure> {
    Recorded::open(path).map(|found| shown(&found))
}

fn shown(found: &Recorded) -> Value {
    let manifest = match &found.state {
        State::Sealed(manifest, _) | State::Collected(manifest, _) => Some(manifest),
        State::Open => None,
    };
    let kept = found.trials.iter().filter(|trial| trial.outcome.leads()).map(Kept::from);
    json!({
        "schema": "amk.run.v1",
        "run": found.run,
        "ledger": found.ledger,
        "state": state_name(&found.state),
        "manifest": manifest,
        "terms": found.header,
        "rows": found.rows,
        "outcomes": outcomes(found),
        // Of the card that measured the baseline.
        "noise_floor": found.noise_floor(found.trials.first().and_then(|trial| trial.card)),
        "cards": cards(found),
        "champion": found.champion().map(|trial| {
            json!({"trial": trial.trial, "config": trial.config, "verdict": trial.verdict})
        }),
        "kept": kept.collect::<Vec<Kept>>(),
        "confirmation": found.confirmation,
    })
}

/// The number of trials of each outcome.
fn outcomes(found: &Recorded) -> BTreeMap<&'static str, u64> {
    let mut outcomes = BTreeMap::new();
    for trial in &found.trials {
        *outcomes.entry(trial.outcome.name()).or_default() += 1;
    }
    outcomes
}

/// The cards by their numbers; empty for a search with one.
fn cards(found: &Recorded) -> Vec<Card> {
    let several = found.header.get("cards").is_some();
    if several { search_loop::cards_of(&found.cards(), &found.trials) } else { Vec::new() }
}

fn say(found: &Recorded) {
    let word = |key: &str| found.word(key).unwrap_or("?");
    let counts: Vec<String> =
        outcomes(found).iter().map(|(name, n)| format!("{n} {name}")).collect();
    let us = found.champion().and_then(|trial| trial.verdict.latency_us);
    let mut rows = vec![
        ("run".to_owned(), format!("{}, {}", found.run, state_name(&found.state))),
        (
            "model".to_owned(),
            format!("{} for {} on {}", word("model"), word("target"), word("device")),
        ),
        ("trials".to_owned(), counts.join(", ")),
        ("proposer".to_owned(), found.word("proposer").map_or("-".into(), |c| format!("{c:?}"))),
        ("best".to_owned(), format!("{}, {}", report::maybe(us, "us"), word("latency_kind"))),
    ];
    rows.extend(cards(found).into_iter().map(|card| {
        let out = match (card.left_out_at, card.left_out) {
            (Some(trial), Some(why)) => format!(", left out from trial {trial} on: {why}"),
            _ => String::new(),
        };
        let line = format!(
            "{} {}, {} trials, baseline {}, noise {}{out}",
            card.name,
            card.uuid.unwrap_or_default(),
            card.trials,
            report::maybe(card.baseline_us, "us"),
            report::maybe(card.noise_floor.map(|noise| 100.0 * noise), "%")
        );
        (format!("card {}", card.card), line)
    }));
    rows.extend(found.confirmation.iter().map(|last| ("confirmed".to_owned(), last.why.clone())));
    report::table(&rows);
}
