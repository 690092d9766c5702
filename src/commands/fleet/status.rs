//! `amk fleet status`: what is on a board.

use fleet::protocol::State;
use fleet::{Board, Champion, Entry, Recorded, champions};
use serde_json::{Value, json};

use super::open;
use crate::cli::FleetBoardArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

pub(crate) fn run(args: &FleetBoardArgs) -> Outcome {
    let board = open(&args.board)?;
    let document = document(&board)?;
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

fn document(board: &Board) -> Result<Value, Failure> {
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
    let seconds = |of: &dyn Fn(&str) -> bool| {
        let took = attempts.iter().filter(|attempt| of(&attempt.how)).map(|a| a.took_ms);
        took.sum::<u64>() as f64 / 1000.0
    };
    let workers: Vec<Value> = (board.workers()?.iter())
        .map(|(worker, state, seen_ms)| {
            let job = attempts.iter().find(|a| a.worker == worker.id && a.how == "running");
            json!({
                "worker": worker.id, "host": worker.host, "version": worker.version,
                "target": some(&worker.target), "card": some(&worker.card), "name": some(&worker.card_name),
                "state": state, "seen_s": *seen_ms as f64 / 1000.0, "job": job.map(|attempt| attempt.job),
            })
        })
        .collect();
    let is_lost = |how: &str| !matches!(how, "done" | "running");
    Ok(json!({
        "schema": "amk.fleet_status.v1",
        "board": board.path(),
        "terms": board.terms(),
        "jobs": {"queued": count("queued"), "leased": count("leased"), "done": count("done"), "dead": count("dead")},
        "open": jobs,
        "workers": workers,
        "champions": champions(&done(board)?),
        "card_seconds": {
            "done": seconds(&|how| how == "done"),
            "running": seconds(&|how| how == "running"),
            "lost": seconds(&is_lost),
        },
    }))
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
