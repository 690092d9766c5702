//! Pages of searches made up from one real trial.

use super::*;

/// A trial of a search on the reference VM, as in the ledger, with the varying fields as parameters.
fn trial(number: u64, us: f64, outcome: search::Outcome) -> Trial {
    let config: ir::schedule::ScheduleConfig = serde_json::from_value(serde_json::json!({
        "pipeline": {"stage_bytes": 16384, "stages": 8, "in_flight_bytes": 65536, "in_flight_before_wait_bytes": 65536},
        "sync": {"embed": "counter", "qkv": "counter", "attention": "counter", "merge": "counter", "o_proj": "counter", "gate_up": "counter", "down": "counter"},
        "fusion_grouping": {"embed": "separate", "merge": "separate"},
        "tiling": {"qkv": {"rows": 16}, "o_proj": {"rows": 16}, "gate_up": {"rows": 16}, "down": {"rows": 16}, "lm_head": {"rows": 16}, "attention": {"kv_block": 128, "kv_split": 1}},
        "kernel": {"poll_sleep_ns": 20, "evict": "normal"},
        "sm_assignment": "round_robin"
    }))
    .unwrap();
    let mut verdict = search::Verdict::new("m", "h200", "cpu");
    (verdict.valid, verdict.correct) = (true, true);
    verdict.latency_us = Some(us);
    verdict.bound_us = Some(40.0);
    verdict.latency_kind = Some(search::LatencyKind::MeasuredGpu);
    verdict.ci_us = Some([us - 0.5, us + 0.5]);
    let knobs = ["pipeline.stages", "sync.qkv", "kernel.evict", "tiling.qkv.rows"];
    let knob = knobs[number as usize % knobs.len()];
    let gain = 1.0 - us / 100.0;
    serde_json::from_value(serde_json::json!({
        "trial": number, "origin": if number == 0 { "baseline" } else { "step" }, "incumbent": null,
        "outcome": outcome, "why": "made up", "changed": {knob: [8, 9]}, "config": config,
        "gain": {"low": gain - 0.01, "high": gain + 0.01}, "threshold": 0.01, "noise_floor": null, "samples_us": [[1.0, 1.0, 1.0, 1.0]],
        "verdict": verdict, "skipped": {"rejected": 1, "repeated": 0, "examples": []}, "began_s": 0.0, "ended_s": 1.0
    }))
    .unwrap()
}

fn run_of(trials: Vec<Trial>, model: &str) -> Run {
    let header = serde_json::json!({
        "model": model, "graph": model, "target": "h200", "latency_kind": "measured-gpu", "device": model, "seed": 3,
        "budget": "64", "min_gain": 0.01, "kv_capacity": 4096, "amk": "0.1.0", "conditions": {"driver": model}
    });
    let ledger = PathBuf::from(format!("runs/{model}/ledger.jsonl"));
    let mut run = Run::of(&ledger);
    (run.header, run.trials) = (header, trials);
    run
}

#[test]
fn every_colour_of_a_page_is_in_its_style() {
    let page = super::page::render(&[run_of(many(40), "m")]);
    let used: Vec<&str> =
        page.split("var(").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(used.contains(&"--bound"), "the bound is drawn");
    for name in used {
        assert_eq!(page.matches(&format!("{name}:#")).count(), 2, "{name}: by day and by night");
    }
}

#[test]
fn a_page_says_when_its_search_began_and_what_was_not_correct() {
    let mut run = run_of(many(4), "m");
    run.header["began_unix_s"] = 1_795_825_635.into();
    run.header["start"] =
        serde_json::json!({"config": {"kernel": 1}, "source": {"kind": "default", "shape": null}});
    run.trials[2].verdict.correct = false;
    run.trials[2].why = "logit 7 differs".to_owned();
    let page = super::page::render(&[run]);
    assert!(page.contains("2026-11-28T00:27:15Z") && page.contains("logit 7 differs"));
    assert!(page.contains("start: source: kind") && !page.contains("start: config"));
    assert!(!page.contains("began_unix_s") && !page.contains("shape"));
}

fn many(count: u64) -> Vec<Trial> {
    let us = |n: u64| 100.0 - 30.0 * (n as f64 / count as f64) + ((n * 7919) % 97) as f64 / 3.0;
    let mut best = f64::MAX;
    let made = |n: u64| {
        let outcome = match n {
            0 => search::Outcome::Baseline,
            n if us(n) < best => search::Outcome::Kept,
            n if n % 13 == 0 => search::Outcome::Inconclusive,
            _ => search::Outcome::Reverted,
        };
        best = best.min(us(n));
        trial(n, us(n), outcome)
    };
    (0..count).map(made).collect()
}

#[test]
fn ten_thousand_trials_are_less_than_a_megabyte_and_it_says_what_is_left_out() {
    let run = run_of(many(10_000), "m");
    let led = run.trials.iter().filter(|trial| trial.outcome.leads()).count();
    assert!(led > 10, "{led}");
    let page = page::render(&[run]);
    assert!(page.len() < 1 << 20, "{} bytes", page.len());
    if let Some(path) = std::env::var_os("AMK_REPORT_PAGE") {
        std::fs::write(path, &page).unwrap();
    }
    let left = format!("of {} trials that did not lead are drawn", 10_000 - led);
    assert!(page.contains(&left), "the page does not say what it leaves out");
    assert!(page.contains("<b>10000</b>trials"));
    // Every trial of a small search is drawn.
    let small = page::render(&[run_of(many(40), "m")]);
    assert!(!small.contains("are drawn"), "something of 40 trials is left out");
    assert!(small.matches("<circle").count() > 40);
}

/// A ledger cannot inject elements, attributes or addresses.
#[test]
fn hostile_names_stay_text() {
    let hostile = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\u{1b}[31m";
    let mut run = run_of(many(8), hostile);
    run.trials[3].why = hostile.to_owned();
    run.trials[2].verdict.schedule_id = Some(hostile.to_owned());
    for trial in &mut run.trials {
        trial.changed.insert(hostile.to_owned(), serde_json::json!([hostile, hostile]));
    }
    let page = page::render(&[run]);
    let harmless = page::render(&[run_of(many(8), "m")]);
    assert!(page.contains("&lt;script&gt;alert(1)"), "the name is not on the page at all");
    // In text, in the title, in code and in a command: never unescaped.
    assert!(page.matches("&lt;img src=x").count() >= 8 && !page.contains("<img src=x"));
    for tag in ["<script", "<img", "</title", "onerror=alert(1)>", "\u{1b}"] {
        let count = |page: &str| page.matches(tag).count();
        assert_eq!(count(&page), count(&harmless), "{tag}");
    }
}

#[test]
fn the_page_fetches_nothing() {
    let page = page::render(&[run_of(many(100), "m")]);
    let strange = |word: &str| page.replace("http://www.w3.org/2000/svg", "").contains(word);
    for word in ["http:", "https:", "<script", "url(", "@import", "src="] {
        assert!(!strange(word), "{word}");
    }
}

#[test]
fn a_search_without_a_correct_trial_has_a_page() {
    let mut broken = trial(0, 1.0, search::Outcome::Disagreed);
    broken.verdict.latency_us = None;
    broken.gain = None;
    broken.changed.clear();
    for trials in [Vec::new(), vec![broken]] {
        let page = page::render(&[run_of(trials, "m")]);
        assert!(page.contains("Nothing to draw") && page.contains("No schedule was correct"));
    }
}

#[test]
fn commands_survive_a_shell() {
    let run = run_of(many(4), "it's; rm -rf");
    let commands = page::commands(&run);
    assert_eq!(commands[0], "amk runs verify 'runs/it'\\''s; rm -rf'");
    assert!(
        commands[2].ends_with("--seed 3 --min-gain 1 --budget 4 --out again"),
        "{}",
        commands[2]
    );
}
