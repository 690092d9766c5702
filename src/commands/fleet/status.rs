//! `amk fleet status`: what is on a board.

use std::collections::BTreeSet;

use fleet::protocol::State;
use fleet::{Attempt, Board, Champion, Entry, Recorded, Worker, champions};
use serde_json::{Value, json};

use super::{metrics, open};
use crate::cli::FleetStatusArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, report};

pub(crate) fn run(args: &FleetStatusArgs) -> Outcome {
    let board = open(&args.board.board)?;
    let document = document(&board)?;
    if let Some(file) = &args.metrics_file {
        files::write_whole(file, metrics::text(&document).as_bytes())?;
    }
    say(&document);
    report::document(&document)?;
    Ok(Exit::Yes)
}

/// The finished jobs with their results.
pub(super) fn done(board: &Board) -> Result<Vec<(Entry, Recorded)>, Failure> {
    let mut jobs = board.jobs()?.into_iter();
    let results = board.results()?;
    let pair = |(id, result)| Some((jobs.find(|entry| entry.id == id)?, result));
    Ok(results.into_iter().filter_map(pair).collect())
}

fn state(state: &State) -> &'static str {
    match state {
        State::Queued => "queued",
        State::Leased { .. } => "leased",
        State::Done { .. } => "done",
        State::Dead => "dead",
    }
}

pub(super) fn document(board: &Board) -> Result<Value, Failure> {
    let entries = board.jobs()?;
    let count = |name: &str| entries.iter().filter(|e| state(&e.job.state) == name).count();
    let attempts = board.attempts()?;
    let jobs: Vec<Value> = (entries.iter().filter(|e| !matches!(e.job.state, State::Done { .. })))
        .map(|entry| {
            let spec = &entry.spec;
            let running = attempts.iter().rev().find(|a| a.job == entry.id && a.how == "running");
            json!({
                "job": entry.id, "kind": spec.kind, "model": spec.model, "target": spec.target,
                "device": spec.device, "contexts": spec.contexts, "seed": spec.seed,
                "state": state(&entry.job.state), "attempts": entry.job.attempts,
                "worker": running.map(|attempt| &attempt.worker), "why": entry.why,
            })
        })
        .collect();
    let crew = board.workers()?;
    let workers: Vec<Value> = (crew.iter())
        .map(|(worker, state, seen_ms)| {
            let job = attempts.iter().find(|a| a.worker == worker.id && a.how == "running");
            json!({
                "worker": worker.id, "host": worker.host, "version": worker.version,
                "target": some(&worker.target), "card": some(&worker.card), "name": some(&worker.card_name),
                "state": state, "seen_s": *seen_ms as f64 / 1000.0, "job": job.map(|attempt| attempt.job),
            })
        })
        .collect();
    let ended = |how: &str| attempts.iter().filter(|attempt| attempt.how == how).count();
    Ok(json!({
        "schema": "amk.fleet_status.v1",
        "board": board.path(),
        "terms": board.terms(),
        "jobs": {"queued": count("queued"), "leased": count("leased"), "done": count("done"), "dead": count("dead")},
        "open": jobs,
        "workers": workers,
        "champions": champions(&done(board)?),
        "attempts": {
            "done": ended("done"), "running": ended("running"), "given_back": ended("given_back"),
            "failed": ended("failed"), "expired": ended("expired"),
        },
        "card_seconds": seconds(attempts.iter()),
        "cards": cards(&crew, &attempts),
    }))
}

/// Seconds of these attempts by what came of them: a result, nothing yet, nothing.
fn seconds<'a>(attempts: impl Iterator<Item = &'a Attempt>) -> Value {
    let (mut done, mut running, mut lost) = (0, 0, 0);
    for attempt in attempts {
        match &*attempt.how {
            "done" => done += attempt.took_ms,
            "running" => running += attempt.took_ms,
            _ => lost += attempt.took_ms,
        }
    }
    let seconds = |ms: u64| ms as f64 / 1000.0;
    json!({"done": seconds(done), "running": seconds(running), "lost": seconds(lost)})
}

/// The cost of each card; workers without one count together.
fn cards(crew: &[(Worker, String, u64)], attempts: &[Attempt]) -> Vec<Value> {
    let ids: BTreeSet<&str> = crew.iter().map(|(worker, ..)| &*worker.card).collect();
    let row = |id: &str| {
        let of = |worker: &&Worker| worker.card == id;
        let named = crew.iter().map(|(worker, ..)| worker).find(of);
        let own = attempts.iter().filter(|attempt| attempt.card == id);
        json!({
            "card": some(id),
            "name": named.and_then(|worker| some(&worker.card_name)),
            "host": named.filter(|_| !id.is_empty()).map(|worker| &worker.host),
            "seconds": seconds(own),
        })
    };
    ids.into_iter().map(row).collect()
}

/// An empty text stands for none on the board.
fn some(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

fn say(document: &Value) {
    let of = |key: &str| report::word(document["jobs"].get(key));
    report::say(&format!(
        "jobs: {} queued, {} leased, {} done, {} dead",
        of("queued"),
        of("leased"),
        of("done"),
        of("dead")
    ));
    let list = |key: &str| document[key].as_array().cloned().unwrap_or_default();
    let rows = |key: &str, of: &dyn Fn(&Value) -> (String, String)| {
        let rows: Vec<(String, String)> = list(key).iter().map(of).collect();
        if !rows.is_empty() {
            report::say(&format!("{key}:"));
            report::table(&rows);
        }
    };
    let word = |row: &Value, key: &str| report::word(row.get(key));
    rows("open", &|job| {
        let name = format!("{} {}", word(job, "job"), word(job, "kind"));
        let what = format!("{} for {}", word(job, "model"), word(job, "target"));
        let end = if job["why"].is_null() { word(job, "worker") } else { word(job, "why") };
        (name, format!("{what}, {}, {} attempts, {end}", word(job, "state"), word(job, "attempts")))
    });
    rows("workers", &|worker| {
        let what = if worker["name"].is_null() { "cpu".to_owned() } else { word(worker, "name") };
        let seen = report::maybe(worker["seen_s"].as_f64(), "s ago");
        let job = word(worker, "job");
        (
            word(worker, "worker"),
            format!("{what}, {}, seen {seen}, job {job}", word(worker, "state")),
        )
    });
    rows("champions", &champion_row);
    let seconds = |key: &str| report::maybe(document["card_seconds"][key].as_f64(), "s");
    report::say(&format!(
        "card time: {} done, {} running, {} lost",
        seconds("done"),
        seconds("running"),
        seconds("lost")
    ));
}

fn champion_row(champion: &Value) -> (String, String) {
    let word = |key: &str| report::word(champion.get(key));
    let percent = |at: usize| champion["saved"][at].as_f64().map(|share| 100.0 * share);
    let card = if champion["card"].is_null() { word("target") } else { word("card") };
    let us = report::maybe(champion["latency_us"].as_f64(), "us");
    let saved = report::maybe(percent(0), "%");
    (
        format!("{} on {card}", word("model")),
        format!("{}, {us}, saves at least {saved}, job {}", word("status"), word("job")),
    )
}

/// The line of a champion, for a report.
pub(super) fn line(champion: &Champion) -> String {
    let (name, rest) = champion_row(&json!(champion));
    format!("{name}: {rest}")
}
