//! The page of `amk fleet report`: the document of `amk fleet status` as tables, in the frame of `amk report`.

use maud::{Markup, html};
use serde_json::Value;

use crate::commands::html::page::{framed, table};
use crate::report::{maybe, word};

/// Rows of a table of jobs; a note says so if the board has more.
const JOBS_MAX: usize = 200;
/// Bytes of a reason that are shown.
const WHY_MAX: usize = 600;

/// The page, from the document of `status`.
pub(super) fn render(status: &Value) -> String {
    let title = format!("Fleet on {}", word(status.get("board")));
    framed(
        &title,
        &html! {
            h1 { (title) }
            (facts(status))
            h2 { "Champions" }
            (champions(status))
            h2 { "Cost" }
            (cost(status))
            h2 { "Dead jobs" }
            (dead(status))
            h2 { "Open jobs" }
            (open(status))
            h2 { "Workers" }
            (workers(status))
            p.quiet {
                "Written by amk " (env!("CARGO_PKG_VERSION")) " from the board, after its ledgers had been audited; \
                 they are in the folders beside this page, one for each job."
            }
        },
    )
}

fn rows(list: &Value) -> Vec<&Value> {
    list.as_array().into_iter().flatten().collect()
}

/// A number of seconds, in hours if it is long.
fn time(seconds: &Value) -> String {
    match seconds.as_f64() {
        Some(s) if s >= 7200.0 => format!("{:.1} h", s / 3600.0),
        other => maybe(other, "s"),
    }
}

fn facts(status: &Value) -> Markup {
    let jobs = ["queued", "leased", "done", "dead"].map(|state| {
        let count = word(status["jobs"].get(state));
        (format!("jobs {state}"), count)
    });
    let seconds = [
        ("done", "card time with a result"),
        ("running", "card time running"),
        ("lost", "card time lost"),
    ]
    .map(|(key, name)| (name.to_owned(), time(&status["card_seconds"][key])));
    html! {
        ul.facts {
            @for (name, value) in jobs.iter().chain(&seconds) { li { b { (value) } (name) } }
        }
    }
}

/// The tokens of context that a champion or a job is judged at.
fn contexts(row: &Value) -> String {
    let all: Vec<String> = rows(&row["contexts"]).into_iter().map(Value::to_string).collect();
    if all.is_empty() { "default".to_owned() } else { all.join(", ") }
}

/// The share of time that a champion saves, as an interval or, of a prediction, as a figure.
fn saved(champion: &Value) -> String {
    let percent = |share: &Value| share.as_f64().map(|share| format!("{:.2}%", 100.0 * share));
    match (percent(&champion["saved"][0]), percent(&champion["saved"][1])) {
        (Some(low), Some(high)) if low == high => low,
        (Some(low), Some(high)) => format!("{low} to {high}"),
        _ => "-".to_owned(),
    }
}

fn champions(status: &Value) -> Markup {
    let lines = html! {
        @for champion in rows(&status["champions"]) {
            @let cell = |key: &str| word(champion.get(key));
            tr.mark[champion["status"] == "confirmed"] {
                td { (cell("model")) }
                td { (cell("target")) }
                td { (contexts(champion)) }
                td { (cell("card")) }
                td { (cell("status")) }
                td.n { (saved(champion)) }
                td.n { (maybe(champion["latency_us"].as_f64(), "µs")) }
                td.n { (cell("cards_kept")) " of " (cell("hosts_kept")) }
                td.n { (cell("reverted")) }
                td.n { (cell("job")) }
            }
        }
    };
    let columns = [
        ("model", false),
        ("target", false),
        ("context", false),
        ("card", false),
        ("status", false),
        ("time saved", true),
        ("per token", true),
        ("cards of hosts", true),
        ("reverted", true),
        ("job", true),
    ];
    html! {
        (table(&columns, &lines))
        p.quiet {
            "One row for each card that a leg ran on: times of two cards are not comparable, shares of time saved and \
             verdicts are. Confirmed: kept on three cards of two hosts, reverted on none. Predicted: nothing was measured."
        }
    }
}

fn cost(status: &Value) -> Markup {
    let lines = html! {
        @for card in rows(&status["cards"]) {
            tr {
                td { @if card["card"].is_null() { "no card" } @else { (word(card.get("card"))) } }
                td { (word(card.get("name"))) }
                td { (word(card.get("host"))) }
                @for key in ["done", "running", "lost"] { td.n { (time(&card["seconds"][key])) } }
            }
        }
    };
    let columns = [
        ("card", false),
        ("name", false),
        ("host", false),
        ("with a result", true),
        ("running", true),
        ("lost", true),
    ];
    let attempts = |how: &str| word(status["attempts"].get(how));
    html! {
        (table(&columns, &lines))
        p.quiet {
            "Attempts: " (attempts("done")) " done, " (attempts("running")) " running, " (attempts("expired"))
            " lost with their lease, " (attempts("failed")) " failed, " (attempts("given_back")) " given back."
        }
    }
}

/// What a job is, in cells.
fn job(job: &Value) -> Markup {
    let cell = |key: &str| word(job.get(key));
    html! {
        td.n { (cell("job")) }
        td { (cell("kind")) }
        td { (cell("model")) }
        td { (cell("target")) }
        td { (contexts(job)) }
        td.n { (cell("seed")) }
        td.n { (cell("attempts")) }
    }
}

fn jobs(all: &[&Value], last: (&str, &dyn Fn(&Value) -> String)) -> Markup {
    let lines = html! {
        @for entry in all.iter().take(JOBS_MAX) {
            tr { (job(entry)) td { (last.1(entry)) } }
        }
    };
    let columns = [
        ("job", true),
        ("kind", false),
        ("model", false),
        ("target", false),
        ("context", false),
        ("seed", true),
        ("attempts", true),
        (last.0, false),
    ];
    let left = all.len().saturating_sub(JOBS_MAX);
    html! {
        @if all.is_empty() { p.quiet { "None." } } @else { (table(&columns, &lines)) }
        @if left > 0 { p.quiet { (left) " more are listed by `amk fleet status`." } }
    }
}

/// The beginning of a reason.
fn why(entry: &Value) -> String {
    let text = word(entry.get("why"));
    match text.char_indices().find(|(at, _)| *at >= WHY_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn dead(status: &Value) -> Markup {
    let all = rows(&status["open"]);
    let dead: Vec<&Value> = all.into_iter().filter(|entry| entry["state"] == "dead").collect();
    jobs(&dead, ("why", &why))
}

fn open(status: &Value) -> Markup {
    let all = rows(&status["open"]);
    let open: Vec<&Value> = all.into_iter().filter(|entry| entry["state"] != "dead").collect();
    let state = |entry: &Value| match entry["worker"].as_str() {
        Some(worker) => format!("leased by {worker}"),
        None if entry["why"].is_null() => word(entry.get("state")),
        None => format!("{}; last: {}", word(entry.get("state")), why(entry)),
    };
    jobs(&open, ("state", &state))
}

fn workers(status: &Value) -> Markup {
    let all = rows(&status["workers"]);
    let lines = html! {
        @for worker in all.iter().take(JOBS_MAX) {
            @let cell = |key: &str| word(worker.get(key));
            tr {
                td { (cell("worker")) }
                td { (cell("card")) }
                td { (cell("version")) }
                td { (cell("state")) }
                td.n { (time(&worker["seen_s"])) " ago" }
                td.n { (cell("job")) }
            }
        }
    };
    let columns = [
        ("worker", false),
        ("card", false),
        ("version", false),
        ("state", false),
        ("seen", true),
        ("job", true),
    ];
    let left = all.len().saturating_sub(JOBS_MAX);
    html! {
        (table(&columns, &lines))
        @if left > 0 { p.quiet { (left) " more are listed by `amk fleet status`." } }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(name: &str, jobs: usize) -> Value {
        let entry = |job: usize| {
            json!({
                "job": job, "kind": "leg", "model": name, "target": "h200", "seed": 1, "attempts": 3, "worker": null,
                "state": if job.is_multiple_of(2) { "dead" } else { "queued" }, "why": name.repeat(20),
            })
        };
        json!({
            "board": name,
            "jobs": {"queued": 3, "leased": 0, "done": 5, "dead": 7},
            "open": (0..jobs).map(entry).collect::<Vec<_>>(),
            "workers": [{"worker": name, "card": name, "version": "0", "state": "active", "seen_s": 1.0, "job": null}],
            "champions": [{
                "model": name, "target": "h200", "contexts": [128, 2048], "card": "GPU-a", "status": "confirmed",
                "saved": [0.0123, 0.0456], "latency_us": 98.7, "cards_kept": 3, "hosts_kept": 2, "reverted": 0,
                "job": 4, "schedule_id": "s-1",
            }],
            "attempts": {"done": 5, "running": 0, "given_back": 1, "failed": 21, "expired": 2},
            "card_seconds": {"done": 10000.0, "running": 0.0, "lost": 12.5},
            "cards": [{"card": "GPU-a", "name": name, "host": "one", "seconds": {"done": 10000.0, "running": 0.0, "lost": 12.5}}],
        })
    }

    #[test]
    fn every_figure_of_the_status_is_on_the_page() {
        let page = render(&status("m", 4));
        let wanted = [
            "<b>7</b>jobs dead",
            "<b>2.8 h</b>card time with a result",
            "<b>12.5 s</b>card time lost",
            "1.23% to 4.56%",
            "98.7 µs",
            "128, 2048",
            "confirmed",
            "3 of 2",
            "21 failed",
            "GPU-a",
        ];
        for words in wanted {
            assert!(page.contains(words), "{words} is not on the page");
        }
        assert_eq!(page.matches(&"m".repeat(20)).count(), 4, "each reason once");
    }

    #[test]
    fn names_and_reasons_stay_text_and_nothing_is_fetched() {
        let hostile = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\u{1b}[31m";
        let (page, harmless) = (render(&status(hostile, 4)), render(&status("m", 4)));
        assert!(page.contains("&lt;script&gt;alert(1)"), "the name is not on the page at all");
        for tag in ["<script", "<img", "</title", "\u{1b}"] {
            let count = |page: &str| page.matches(tag).count();
            assert_eq!(count(&page), count(&harmless), "{tag}");
        }
        for word in ["http:", "https:", "<script", "url(", "@import", "src="] {
            assert!(!harmless.contains(word), "{word}");
        }
    }

    #[test]
    fn ten_thousand_jobs_fit_and_the_page_says_what_is_left_out() {
        let page = render(&status("a reason of some length, ", 10_000));
        assert!(page.len() < 1_000_000, "{} bytes", page.len());
        assert_eq!(page.matches("4800 more are listed").count(), 2);
    }
}
