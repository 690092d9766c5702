//! The page. Whatever comes from a ledger is escaped; there is no script, and nothing is fetched.

use std::fmt::Write;

use ir::schedule::Knob;
use search::{Outcome, Trial};
use serde_json::Value;

use super::Run;
use super::charts::{self, Chart, figure};
use super::effects::{Effect, effects};

const STYLE: &str = include_str!("style.css");

/// Rows of the table of what led; a search that keeps more says so.
const LED_MAX: usize = 200;

/// Text that means nothing to a browser.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Controls have no meaning here, and browsers guess one.
            c if c.is_control() && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The whole page.
pub(super) fn render(runs: &[Run]) -> String {
    let mut out = String::new();
    let title = match runs {
        [run] => format!("{} for {}", run.word("graph"), run.word("target")),
        _ => format!("{} searches", runs.len()),
    };
    let title = escaped(&title);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>amk: {title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    let measured = runs.iter().filter(|run| run.is_measured()).count();
    if measured > 0 && measured < runs.len() {
        out.push_str("<p>Some of these searches were measured and some are predictions. The two are never compared.</p>\n");
    }
    for run in runs {
        section(&mut out, run);
    }
    let _ = write!(
        out,
        "<p class=\"quiet\">Written by amk {} from the ledgers named above.</p>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    out
}

fn section(out: &mut String, run: &Run) {
    let _ = writeln!(out, "<section>\n<h2>{}</h2>", escaped(&run.ledger.display().to_string()));
    facts(out, run);
    out.push_str(
        "<p class=\"key quiet\"><span><i style=\"background:var(--kept)\"></i>led</span><span><i style=\"background:var(--reverted)\"></i>not better</span>\
         <span><i style=\"background:var(--unclear)\"></i>inconclusive</span><span><i style=\"background:var(--floor)\"></i>floor</span></p>\n",
    );
    chart(out, "Progress", charts::progress(run));
    let cards = run.header.get("cards").and_then(Value::as_array).map_or(0, Vec::len);
    if cards > 1 {
        let _ = writeln!(
            out,
            "<p class=\"quiet\">Measured on {cards} cards, of which each is as fast as it is: latencies of two cards are not comparable, gains are. The best and the start above are of one card.</p>"
        );
    }
    chart(out, "Against the floor", charts::floor(run));
    chart(out, "Kept and reverted", charts::gains(run));
    led(out, run);
    let effects = effects(&run.trials);
    chart(out, "What each knob was worth", charts::knobs(&effects));
    knob_table(out, &effects);
    schedules(out, run);
    machine(out, run);
    reproduce(out, run);
    out.push_str("</section>\n");
}

fn facts(out: &mut String, run: &Run) {
    let champion = run.champion();
    let us = |trial: Option<&Trial>| trial.and_then(|trial| trial.verdict.latency_us);
    let (first, best) = (champion.and_then(|trial| run.baseline_us(trial)), us(champion));
    let shown = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{} us", figure(us)));
    let count = |test: &dyn Fn(&Trial) -> bool| run.trials.iter().filter(|t| test(t)).count();
    let interval = champion.and_then(|champion| champion.verdict.ci_us).map_or_else(
        || if run.is_measured() { "-".to_owned() } else { "none: a prediction".to_owned() },
        |[low, high]| format!("{} to {} us", figure(low), figure(high)),
    );
    let saved = match (first, best) {
        (Some(first), Some(best)) if first > 0.0 => {
            format!("{:.1} %", 100.0 * (1.0 - best / first))
        }
        _ => "-".to_owned(),
    };
    let share = champion.and_then(|champion| champion.verdict.pct_of_roofline);
    let confirmed = run.confirmation.as_ref().map_or_else(
        || "not run".to_owned(),
        |c| match c.decision {
            search::Decision::Kept => "confirmed".to_owned(),
            search::Decision::Reverted => "refuted".to_owned(),
            search::Decision::Inconclusive => "inconclusive".to_owned(),
        },
    );
    let failed = count(&|trial| !trial.verdict.correct);
    let skipped: u64 = run.trials.iter().map(|trial| trial.skipped.rejected).sum();
    let rows = [
        (format!("best, {}, a token", run.kind()), shown(best)),
        ("its 99 % interval".to_owned(), interval),
        (format!("start, {}, a token", run.kind()), shown(first)),
        (format!("time saved, {}", run.kind()), saved),
        (
            "of the floor reached".to_owned(),
            share.map_or("-".to_owned(), |share| format!("{share:.1} %")),
        ),
        ("the champion, once more".to_owned(), confirmed),
        ("trials".to_owned(), run.trials.len().to_string()),
        ("kept".to_owned(), count(&|trial| trial.outcome == Outcome::Kept).to_string()),
        ("not correct".to_owned(), failed.to_string()),
        ("illegal, at no cost".to_owned(), skipped.to_string()),
    ];
    out.push_str("<ul class=\"facts\">\n");
    for (name, value) in rows {
        let _ = writeln!(out, "<li><b>{}</b>{}</li>", escaped(&value), escaped(&name));
    }
    out.push_str("</ul>\n");
    if let Some(confirmation) = &run.confirmation {
        let _ =
            writeln!(out, "<p class=\"quiet\">Confirmation: {}</p>", escaped(&confirmation.why));
    }
}

fn chart(out: &mut String, title: &str, chart: Option<Chart>) {
    let _ = writeln!(out, "<h3>{title}</h3>");
    match chart {
        None => out.push_str("<p class=\"quiet\">Nothing to draw: no trial gave a latency.</p>\n"),
        Some(Chart { svg, note }) => {
            let note = note.map_or(String::new(), |note| {
                format!("<figcaption>{}.</figcaption>", escaped(&note))
            });
            let _ = writeln!(out, "<figure>{svg}{note}</figure>");
        }
    }
}

fn word(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// The trials that led, each with what it changed.
fn led(out: &mut String, run: &Run) {
    let all: Vec<&Trial> = run.trials.iter().filter(|trial| trial.outcome.leads()).collect();
    let _ = write!(
        out,
        "<div class=\"scroll\"><table>\n<tr><th class=\"n\">trial</th><th class=\"n\">us a token, {}</th><th class=\"n\">time saved</th><th>changed</th></tr>\n",
        run.kind()
    );
    let left_out = all.len().saturating_sub(LED_MAX);
    for trial in all.iter().skip(left_out) {
        let gain = trial.gain.map_or(String::new(), |gain| {
            let percent = |share: f64| format!("{:+.2}", 100.0 * share);
            if gain.low == gain.high {
                format!("{} %", percent(gain.low))
            } else {
                format!("{} to {} %", percent(gain.low), percent(gain.high))
            }
        });
        let change = |(path, pair): (&String, &Value)| {
            let (before, after) = (word(pair.get(0)), word(pair.get(1)));
            format!(
                "<code>{}</code> {} &rarr; {}",
                escaped(path),
                escaped(&before),
                escaped(&after)
            )
        };
        let changes: Vec<String> = trial.changed.iter().map(change).collect();
        let changes = if trial.outcome == Outcome::Baseline {
            "the start".to_owned()
        } else {
            changes.join(", ")
        };
        let us = trial.verdict.latency_us.map_or("-".to_owned(), figure);
        let _ = writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{us}</td><td class=\"n\">{gain}</td><td>{changes}</td></tr>",
            trial.trial
        );
    }
    out.push_str("</table></div>\n");
    if left_out > 0 {
        let _ = writeln!(out, "<p class=\"quiet\">{left_out} earlier ones are in the ledger.</p>");
    }
}

fn knob_table(out: &mut String, effects: &[Effect]) {
    out.push_str(
        "<div class=\"scroll\"><table>\n<tr><th>knob</th><th class=\"n\">trials that changed it</th><th class=\"n\">kept</th>\
         <th class=\"n\">alone</th><th class=\"n\">worst</th><th class=\"n\">middle</th><th class=\"n\">best</th></tr>\n",
    );
    // What rounds to nothing has no sign.
    let signed = |v: f64| if v.abs() < 0.005 { "0.00 %".to_owned() } else { format!("{v:+.2} %") };
    let percent = |value: Option<f64>| value.map_or("-".to_owned(), signed);
    for effect in effects {
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code></td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            effect.path,
            effect.trials,
            effect.kept,
            effect.alone.len(),
            percent(effect.alone.first().copied()),
            percent(effect.median()),
            percent(effect.alone.last().copied())
        );
    }
    out.push_str("</table></div>\n<p class=\"quiet\">Time saved over the leader of its moment by trials that changed this knob and no other: what is worth little after a better leader may have been worth much before.</p>\n");
}

/// The winning schedule beside the one that the search began with.
fn schedules(out: &mut String, run: &Run) {
    out.push_str("<h3>The best schedule beside the start</h3>\n");
    let (Some(first), Some(champion)) = (run.trials.first(), run.champion()) else {
        out.push_str("<p class=\"quiet\">No schedule was correct.</p>\n");
        return;
    };
    out.push_str("<div class=\"scroll\"><table>\n<tr><th>knob</th><th>start</th><th>best</th><th>what it decides</th></tr>\n");
    for knob in Knob::ALL {
        let (start, best) = (first.config.get(*knob), champion.config.get(*knob));
        let mark = if start == best { "" } else { " class=\"mark\"" };
        let _ = writeln!(
            out,
            "<tr{mark}><td><code>{}</code></td><td>{start}</td><td>{best}</td><td>{}</td></tr>",
            knob.path(),
            escaped(knob.desc())
        );
    }
    let id = |id: &Option<String>| escaped(id.as_deref().unwrap_or("-"));
    let verdict = &champion.verdict;
    let _ = writeln!(
        out,
        "</table></div>\n<p class=\"quiet\">Trial {}; schedule {}, program {}, kernel {}.</p>",
        champion.trial,
        id(&verdict.schedule_id),
        id(&verdict.program_id),
        id(&verdict.kernel_id)
    );
}

/// Where it ran: everything that the header says.
fn machine(out: &mut String, run: &Run) {
    out.push_str("<h3>The machine and the terms</h3>\n<div class=\"scroll\"><table>\n");
    let mut rows = Vec::new();
    for (key, value) in run.header.as_object().into_iter().flatten() {
        if let Value::Object(inner) = value {
            let named =
                |(name, value): (&String, &Value)| (format!("{key}: {name}"), word(Some(value)));
            rows.extend(inner.iter().map(named));
        } else {
            rows.push((key.clone(), word(Some(value))));
        }
    }
    for (name, value) in rows {
        let _ = writeln!(out, "<tr><td>{}</td><td>{}</td></tr>", escaped(&name), escaped(&value));
    }
    out.push_str("</table></div>\n");
    if !run.is_measured() {
        out.push_str("<p class=\"quiet\">Nothing was measured: the latencies are the cost model's, for the target. They rank schedules and are no result.</p>\n");
    }
}

/// A word of a shell command.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The commands that check it and do it again.
pub(super) fn commands(run: &Run) -> Vec<String> {
    let folder = run.ledger.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = quoted(&folder.map_or(".".to_owned(), |folder| folder.display().to_string()));
    let device = if run.is_measured() { "cuda" } else { "cpu" };
    let place = format!(
        "--model {} --target {} --device {device} --kv-capacity {}",
        quoted(&run.word("model")),
        quoted(&run.word("target")),
        quoted(&run.word("kv_capacity"))
    );
    let percent = run.header.get("min_gain").and_then(Value::as_f64).unwrap_or_default() * 100.0;
    // As many trials as there are now: a search that was resumed has more than its first budget.
    let budget = run.trials.len();
    // Searches from before there was a choice began with the neutral schedule.
    let start = run.header.pointer("/start/source/kind").and_then(Value::as_str);
    let start = quoted(start.unwrap_or("neutral"));
    vec![
        format!("amk runs verify {folder}"),
        format!("amk evaluate {place} --config {folder}/best.json"),
        format!(
            "amk loop {place} --schedule {start} --seed {} --min-gain {percent} --budget {budget} --out again",
            quoted(&run.word("seed"))
        ),
    ]
}

fn reproduce(out: &mut String, run: &Run) {
    let _ = writeln!(
        out,
        "<h3>How to reproduce it</h3>\n<p>With amk {}:</p>\n<pre>{}</pre>",
        escaped(&run.word("amk")),
        escaped(&commands(run).join("\n"))
    );
    if run.is_measured() {
        out.push_str("<p class=\"quiet\">A measured search takes another path where a measurement falls otherwise; the verdict on the best schedule is what must come out again.</p>\n");
    }
}
