//! A board as OpenMetrics, from the document of `amk fleet status`.

use serde_json::Value;
use telemetry::{MetricFamily, openmetrics_of};

use crate::report::word;

type Sample = (Vec<(&'static str, String)>, f64);

/// The metrics of a board. Counters never fall: attempts that still run are in none of them.
pub(super) fn text(status: &Value) -> String {
    let family = |name, help, in_seconds, only_grows, samples| MetricFamily {
        name,
        help,
        in_seconds,
        only_grows,
        samples,
    };
    openmetrics_of(vec![
        family("fleet_jobs", "Jobs by state.", false, false, by("state", &status["jobs"], &[])),
        family(
            "fleet_workers",
            "Workers by state.",
            false,
            false,
            counted(&status["workers"], "state", &["active", "draining", "gone"]),
        ),
        family(
            "fleet_attempts",
            "Attempts that ended, by outcome.",
            false,
            true,
            by("outcome", &status["attempts"], &["running"]),
        ),
        family(
            "fleet_card",
            "Time of cards in attempts that ended: with a result, or lost.",
            true,
            true,
            card_seconds(&status["cards"]),
        ),
        family(
            "fleet_champions",
            "Champions by status.",
            false,
            false,
            counted(&status["champions"], "status", &["predicted", "candidate", "confirmed"]),
        ),
        family(
            "fleet_champion_saved_ratio",
            "Share of the start's time that a champion saves: bounds of its interval.",
            false,
            false,
            saved(&status["champions"]),
        ),
    ])
}

/// The numbers of an object, labelled with their keys.
fn by(label: &'static str, object: &Value, without: &[&str]) -> Vec<Sample> {
    let pairs = object.as_object().into_iter().flatten();
    let pairs = pairs.filter(|(key, _)| !without.contains(&key.as_str()));
    pairs.filter_map(|(key, n)| Some((vec![(label, key.clone())], n.as_f64()?))).collect()
}

fn rows(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// How many rows have each of these words under a key.
fn counted(list: &Value, key: &'static str, words: &[&str]) -> Vec<Sample> {
    let count = |word: &str| rows(list).filter(|row| row[key] == word).count();
    words.iter().map(|&word| (vec![(key, word.to_owned())], count(word) as f64)).collect()
}

fn card_seconds(cards: &Value) -> Vec<Sample> {
    let of = |card: &Value| {
        let mut samples = by("outcome", &card["seconds"], &["running"]);
        let id = card["card"].as_str().unwrap_or("none");
        samples.iter_mut().for_each(|(labels, _)| labels.insert(0, ("card", id.to_owned())));
        samples
    };
    rows(cards).flat_map(of).collect()
}

fn saved(champions: &Value) -> Vec<Sample> {
    let of = |champion: &Value| {
        let contexts: Vec<String> = rows(&champion["contexts"]).map(Value::to_string).collect();
        let bound = |(name, at): (&str, usize)| {
            let labels = vec![
                ("model", word(champion.get("model"))),
                ("target", word(champion.get("target"))),
                ("contexts", contexts.join(",")),
                ("card", champion["card"].as_str().unwrap_or("none").to_owned()),
                ("status", word(champion.get("status"))),
                ("bound", name.to_owned()),
            ];
            Some((labels, champion["saved"][at].as_f64()?))
        };
        [("low", 0), ("high", 1)].into_iter().filter_map(bound).collect::<Vec<Sample>>()
    };
    rows(champions).flat_map(of).collect()
}
