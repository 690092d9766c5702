//! The page. Everything from a ledger is escaped; there is no script, and nothing is fetched.

use ir::schedule::Knob;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use search::{Outcome, Trial};
use serde_json::Value;

use super::Run;
use super::charts::{self, Chart, figure};
use super::effects::{Effect, effects};
use crate::commands::rerun::quoted;
use crate::commands::search_loop::gain;
use crate::report::word;

const STYLE: &str = include_str!("style.css");

/// Where the page may fetch from: nowhere.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// Rows of the table of leaders; a note says so if the search has more.
const LED_MAX: usize = 200;

pub(super) fn render(runs: &[Run]) -> String {
    let title = match runs {
        [run] => format!("{} for {}", run.shown("graph"), run.shown("target")),
        _ => format!("{} searches", runs.len()),
    };
    let measured = runs.iter().filter(|run| run.is_measured()).count();
    let body = html! {
        h1 { (title) }
        @if measured > 0 && measured < runs.len() {
            p { "Some of these searches were measured and some are predictions. The two are never compared." }
        }
        @for run in runs { (section(run)) }
        p.quiet { "Written by amk " (env!("CARGO_PKG_VERSION")) " from the ledgers named above." }
    };
    framed(&title, &body)
}

/// A whole page: its style is in it, and it may fetch nothing.
pub(in crate::commands) fn framed(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                link rel="icon" href="data:,";
                title { "amk: " (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    // Control characters have no meaning in HTML, and browsers guess one.
    page.into_string().replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}

fn section(run: &Run) -> Markup {
    let key = [("kept", "led"), ("reverted", "not better"), ("unclear", "inconclusive")];
    let cards = run.header.get("cards").and_then(Value::as_array).map_or(0, Vec::len);
    html! {
        section {
            h2 { (run.ledger.display()) }
            (facts(run))
            p.key.quiet {
                @for (colour, what) in key.into_iter().chain([("bound", "bound")]) {
                    span { i style={ "background:var(--" (colour) ")" } {} (what) }
                }
            }
            (chart("Progress", charts::progress(run)))
            @if cards > 1 {
                p.quiet {
                    "Measured on " (cards) " cards, of which each is as fast as it is: latencies of two cards are not \
                     comparable, gains are. The best and the start above are of one card."
                }
            }
            (chart("Kept and reverted", charts::gains(run)))
            (led(run))
            (failed(run))
            h3 { "What each knob was worth" }
            (knob_table(&effects(&run.trials)))
            (schedules(run))
            (machine(run))
            (reproduce(run))
        }
    }
}

fn facts(run: &Run) -> Markup {
    let champion = run.champion();
    let us = |trial: Option<&Trial>| trial.and_then(|trial| trial.verdict.latency_us);
    let (first, best) = (champion.and_then(|trial| run.baseline_us(trial)), us(champion));
    let shown = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{} us", figure(us)));
    let count = |test: &dyn Fn(&Trial) -> bool| run.trials.iter().filter(|t| test(t)).count();
    let interval = champion.and_then(|champion| champion.verdict.ci_us).map_or_else(
        || if run.is_measured() { "-".to_owned() } else { "n/a".to_owned() },
        |[low, high]| format!("{} to {} us", figure(low), figure(high)),
    );
    let saved = match (first, best) {
        (Some(first), Some(best)) if first > 0.0 => {
            format!("{:.1} %", 100.0 * (1.0 - best / first))
        }
        _ => "-".to_owned(),
    };
    let share = champion.and_then(|champion| champion.verdict.pct_of_roofline);
    let confirmed = run.confirmation.as_ref().map_or("not run", |c| match c.decision {
        search::Decision::Kept => "confirmed",
        search::Decision::Reverted => "refuted",
        search::Decision::Inconclusive => "inconclusive",
    });
    let failed = count(&|trial| !trial.verdict.correct);
    let skipped: u64 = run.trials.iter().map(|trial| trial.skipped.rejected).sum();
    let kind = run.kind();
    let rows = [
        (format!("best per token, {kind}"), shown(best)),
        ("99% interval".to_owned(), interval),
        (format!("start per token, {kind}"), shown(first)),
        (format!("time saved, {kind}"), saved),
        (
            "of the bound reached".to_owned(),
            share.map_or("-".to_owned(), |share| format!("{share:.1} %")),
        ),
        ("champion re-checked".to_owned(), confirmed.to_owned()),
        ("trials".to_owned(), run.trials.len().to_string()),
        ("kept".to_owned(), count(&|trial| trial.outcome == Outcome::Kept).to_string()),
        ("not correct".to_owned(), failed.to_string()),
        ("illegal, at no cost".to_owned(), skipped.to_string()),
    ];
    html! {
        ul.facts { @for (name, value) in &rows { li { b { (value) } (name) } } }
        @if let Some(confirmation) = &run.confirmation {
            p.quiet { "Confirmation: " (confirmation.why) }
        }
    }
}

fn chart(title: &str, chart: Option<Chart>) -> Markup {
    html! {
        h3 { (title) }
        @match chart {
            None => p.quiet { "Nothing to draw: no trial gave a latency." },
            Some(Chart { drawing, note }) => figure {
                (drawing)
                @if let Some(note) = note { figcaption { (note) "." } }
            },
        }
    }
}

/// A table with these columns; those marked hold numbers.
pub(in crate::commands) fn table(columns: &[(&str, bool)], rows: &Markup) -> Markup {
    html! {
        div.scroll {
            table {
                tr { @for (name, number) in columns { th.n[*number] { (name) } } }
                (rows)
            }
        }
    }
}

/// The trials that led, each with what it changed.
fn led(run: &Run) -> Markup {
    let all: Vec<&Trial> = run.trials.iter().filter(|trial| trial.outcome.leads()).collect();
    let left_out = all.len().saturating_sub(LED_MAX);
    let rows = html! {
        @for trial in all.iter().skip(left_out) {
            tr {
                td.n { (trial.trial) }
                td.n { (trial.verdict.latency_us.map_or("-".to_owned(), figure)) }
                td.n { (gain(trial)) }
                td {
                    @if trial.outcome == Outcome::Baseline {
                        "the start"
                    } @else {
                        @for (index, (path, pair)) in trial.changed.iter().enumerate() {
                            @if index > 0 { ", " }
                            code { (path) } " " (word(pair.get(0))) " → " (word(pair.get(1)))
                        }
                    }
                }
            }
        }
    };
    let us = format!("us per token, {}", run.kind());
    html! {
        (table(&[("trial", true), (&us, true), ("time saved", true), ("changed", false)], &rows))
        @if left_out > 0 { p.quiet { (left_out) " earlier ones are in the ledger." } }
    }
}

/// The trials that were not correct, each with the reason.
fn failed(run: &Run) -> Markup {
    let all: Vec<&Trial> = run.trials.iter().filter(|trial| !trial.verdict.correct).collect();
    let rows = html! {
        @for trial in all.iter().take(LED_MAX) {
            tr {
                td.n { (trial.trial) }
                td { (trial.outcome.name()) }
                td { (trial.why) }
            }
        }
    };
    html! {
        @if !all.is_empty() {
            h3 { "Not correct" }
            (table(&[("trial", true), ("outcome", false), ("why", false)], &rows))
            @if all.len() > LED_MAX { p.quiet { (all.len() - LED_MAX) " later ones are in the ledger." } }
        }
    }
}

fn knob_table(effects: &[Effect]) -> Markup {
    // A value that rounds to zero has no sign.
    let signed = |v: f64| if v.abs() < 0.005 { "0.00 %".to_owned() } else { format!("{v:+.2} %") };
    let percent = |value: Option<f64>| value.map_or("-".to_owned(), signed);
    let rows = html! {
        @for effect in effects {
            tr {
                td { code { (effect.path) } }
                td.n { (effect.trials) }
                td.n { (effect.kept) }
                td.n { (effect.alone.len()) }
                td.n { (percent(effect.alone.first().copied())) }
                td.n { (percent(effect.median())) }
                td.n { (percent(effect.alone.last().copied())) }
            }
        }
    };
    let numbers = ["trials that changed it", "kept", "alone", "worst", "middle", "best"];
    let columns: Vec<(&str, bool)> =
        [("knob", false)].into_iter().chain(numbers.map(|name| (name, true))).collect();
    html! {
        (table(&columns, &rows))
        p.quiet {
            "Time saved over the leader of its moment by trials that changed this knob and no other: \
             what is worth little after a better leader may have been worth much before."
        }
    }
}

/// The winning schedule and the start of the search, side by side.
fn schedules(run: &Run) -> Markup {
    let title = html! { h3 { "The best schedule beside the start" } };
    let (Some(first), Some(champion)) = (run.trials.first(), run.champion()) else {
        return html! { (title) p.quiet { "No schedule was correct." } };
    };
    let rows = html! {
        @for knob in Knob::ALL {
            @let (start, best) = (first.config.get(*knob), champion.config.get(*knob));
            tr.mark[start != best] {
                td { code { (knob.path()) } }
                td { (start) }
                td { (best) }
                td { (knob.desc()) }
            }
        }
    };
    let columns = ["knob", "start", "best", "what it decides"].map(|name| (name, false));
    let verdict = &champion.verdict;
    let [schedule, program, kernel] =
        [&verdict.schedule_id, &verdict.program_id, &verdict.kernel_id]
            .map(|id| id.as_deref().unwrap_or("-"));
    html! {
        (title)
        (table(&columns, &rows))
        p.quiet {
            "Trial " (champion.trial) "; schedule " (schedule) ", program " (program) ", kernel " (kernel) "."
        }
    }
}

/// The machine: all conditions in the header.
fn machine(run: &Run) -> Markup {
    let mut rows = Vec::new();
    terms("", &run.header, &mut rows);
    html! {
        h3 { "The machine and the terms" }
        div.scroll {
            table { @for (name, value) in &rows { tr { td { (name) } td { (value) } } } }
        }
        @if !run.is_measured() {
            p.quiet {
                "Nothing was measured: the latencies are the cost model's, for the target. They rank schedules and are no result."
            }
        }
    }
}

/// The fields of the header that have a value, a row for each, but not the start's knobs, which have a table.
fn terms(name: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match (name, value) {
        (_, Value::Null) | ("start: config", _) => {}
        (_, Value::Object(inner)) => {
            for (key, value) in inner {
                let inside = if name.is_empty() { key.clone() } else { format!("{name}: {key}") };
                terms(&inside, value, rows);
            }
        }
        ("began_unix_s", value) => {
            let began = value.as_i64().and_then(|at| jiff::Timestamp::from_second(at).ok());
            let began = began.map_or_else(|| word(Some(value)), |at| at.to_string());
            rows.push(("began".to_owned(), began));
        }
        (name, value) => rows.push((name.to_owned(), word(Some(value)))),
    }
}

/// The commands that check the search and repeat it.
pub(super) fn commands(run: &Run) -> Vec<String> {
    let folder = run.ledger.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = quoted(&folder.map_or(".".to_owned(), |folder| folder.display().to_string()));
    let device = if run.is_measured() { "cuda" } else { "cpu" };
    let place = format!(
        "--model {} --target {} --device {device} --kv-capacity {}",
        quoted(&run.shown("model")),
        quoted(&run.shown("target")),
        quoted(&run.shown("kv_capacity"))
    );
    let percent = run.header.get("min_gain").and_then(Value::as_f64).unwrap_or_default() * 100.0;
    // The budget is the number of trials: a resumed search has more than its first budget.
    let budget = run.trials.len();
    // Searches before there was a choice began with the neutral schedule.
    let start = run.header.pointer("/start/source/kind").and_then(Value::as_str);
    let start = quoted(start.unwrap_or("neutral"));
    let contexts = run.header.get("contexts").and_then(Value::as_array);
    let contexts: Vec<String> = contexts.into_iter().flatten().map(Value::to_string).collect();
    let contexts = match &*contexts {
        [] => String::new(),
        list => format!(" --context {}", quoted(&list.join(","))),
    };
    vec![
        format!("amk runs verify {folder}"),
        format!("amk evaluate {place} --config {folder}/best.json"),
        format!(
            "amk loop {place}{contexts} --schedule {start} --seed {} --min-gain {percent} --budget {budget} --out again",
            quoted(&run.shown("seed"))
        ),
    ]
}

fn reproduce(run: &Run) -> Markup {
    html! {
        h3 { "How to reproduce it" }
        p { "With amk " (run.shown("amk")) ":" }
        pre { (commands(run).join("\n")) }
        @if run.is_measured() {
            p.quiet {
                "A measured search takes another path where a measurement falls otherwise; \
                 the verdict on the best schedule is what must come out again."
            }
        }
    }
}
