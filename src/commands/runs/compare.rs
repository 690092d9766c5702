//! `amk runs compare`: compares two runs, or lists every reason why they are not comparable.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use search::{LatencyKind, Trial, Verdict, changes};
use serde::Serialize;
use serde_json::{Map, Value};

use super::recorded::Recorded;
use crate::cli::CompareArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::report::{self, Answer};

/// Header fields that must be equal: the name, the JSON pointer, and why it matters.
const EQUAL: [(&str, &str, &str); 14] = [
    ("model", "/graph", "latencies of two models say nothing about schedules"),
    ("graph", "/graph_id", "graphs of one name and other shapes are other models"),
    ("target", "/target", "schedules are for a target"),
    ("kind of latency", "/latency_kind", "a prediction is never compared with a measurement"),
    ("card", "/device", "cards differ"),
    ("card, driver or compiler", "/conditions/driver", "drivers differ"),
    ("card, driver or compiler", "/conditions/cuda", "CUDA versions differ"),
    ("card, driver or compiler", "/conditions/nvrtc", "compilers make other kernels"),
    ("protocol", "/protocol", "trials were gated, timed or decided in another way"),
    ("key/value capacity", "/kv_capacity", "it changes the program"),
    ("contexts", "/contexts", "a step takes longer the more keys it reads"),
    ("sequences of a step", "/batch", "a step of several sequences takes longer than one of one"),
    ("amk", "/amk", "another version may predict otherwise"),
    ("commit", "/commit", "another build may predict otherwise"),
];

/// A reason not to compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct Reason {
    /// What differs.
    what: String,
    /// Its value in the first run.
    a: Value,
    /// Its value in the second.
    b: Value,
    /// Why it matters.
    why: String,
}

/// One side.
#[derive(Debug, Serialize, JsonSchema)]
struct Side {
    run: String,
    /// The champion's trial.
    champion: Option<u64>,
    schedule_id: Option<String>,
    /// Microseconds per token: from the confirmation, if there is one.
    latency_us: Option<f64>,
    /// Its 99 % interval, if it was measured.
    ci_us: Option<[f64; 2]>,
    /// Share of the time saved over the baseline, from the confirmation's race: low and high.
    gain_over_baseline: Option<[f64; 2]>,
    /// The card of these figures, in a search with several.
    card: Option<u32>,
    trials: usize,
}

/// Two runs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Compared {
    #[schemars(extend("const" = "amk.compare.v1"))]
    schema: &'static str,
    /// Whether their figures are comparable.
    comparable: bool,
    /// Every reason why not, not only the first.
    reasons: Vec<Reason>,
    a: Side,
    b: Side,
    /// Knobs in which the champions differ: path to `[a, b]`. Empty if the runs are not comparable.
    changed: Map<String, Value>,
    /// `a`, `b`, `equal` or `inconclusive`; null if the runs are not comparable.
    better: Option<&'static str>,
    /// The figures behind it.
    why: String,
}

pub(crate) fn run(args: &CompareArgs) -> Outcome {
    answer(args)?.print()
}

pub(crate) fn answer(args: &CompareArgs) -> Result<Answer<Compared>, Failure> {
    let [a, b] = [Recorded::open(&args.a)?, Recorded::open(&args.b)?];
    let reasons = reasons(&a, &b);
    let comparable = reasons.is_empty();
    let (mut changed, mut better, mut why) = (Map::new(), None, String::new());
    if comparable {
        changed = difference(&a, &b);
        let (side, line) = judge(&a, &b);
        (better, why) = (Some(side), line);
        report::say(&format!("{}: {why}", side_line(side)));
    } else {
        report::say("not comparable:");
        for reason in &reasons {
            report::say(&format!(
                "  {}: {} and {}; {}",
                reason.what, reason.a, reason.b, reason.why
            ));
        }
    }
    let document = Compared {
        schema: "amk.compare.v1",
        comparable,
        reasons,
        a: side(&a),
        b: side(&b),
        changed,
        better,
        why,
    };
    Ok(Answer { document, exit: if comparable { Exit::Yes } else { Exit::No } })
}

fn side_line(side: &str) -> &str {
    match side {
        "a" => "the first is better",
        "b" => "the second is better",
        "equal" => "equal",
        _ => "inconclusive",
    }
}

/// Every reason why the figures of two runs are not comparable.
fn reasons(a: &Recorded, b: &Recorded) -> Vec<Reason> {
    let mut found = Vec::new();
    let mut differs = |what: &str, a: Value, b: Value, why: &str| {
        if a != b {
            found.push(Reason { what: what.to_owned(), a, b, why: why.to_owned() });
        }
    };
    let measured =
        [a, b].iter().all(|run| run.word("latency_kind") == Some(LatencyKind::MeasuredGpu.name()));
    for (what, pointer, why) in EQUAL {
        // A measured time belongs to a kernel and a program, which have ids; a prediction belongs to a build.
        if measured && ["amk", "commit"].contains(&what) {
            continue;
        }
        let at = |run: &Recorded| run.header.pointer(pointer).cloned().unwrap_or(Value::Null);
        differs(what, at(a), at(b), why);
    }
    if shared(a, b).is_empty() {
        let (one, other) = (uuids(a).join(", "), uuids(b).join(", "));
        let why = "two cards of one name differ by per cents";
        differs("card's UUID", one.into(), other.into(), why);
    }
    let kernels =
        conflict(a, b, |trial| Some((trial.config.kernel.id(), trial.verdict.kernel_id.clone()?)));
    if let Some((one, other)) = kernels {
        let why = "one kernel config was compiled from two sources";
        differs("kernel build", one.into(), other.into(), why);
    }
    let programs =
        conflict(a, b, |trial| Some((trial.config.id(), trial.verdict.program_id.clone()?)));
    if let Some((one, other)) = programs {
        differs("lowering", one.into(), other.into(), "one schedule lowered to two programs");
    }
    found
}

/// The UUIDs of a run's cards.
fn uuids(run: &Recorded) -> Vec<String> {
    let uuid = |card: &search::Conditions| card.uuid.clone().unwrap_or("unknown".to_owned());
    run.cards().iter().map(uuid).collect()
}

/// The cards that both runs measured on, with their numbers in each. Predicted runs share one card without a number.
fn shared(a: &Recorded, b: &Recorded) -> Vec<(Option<String>, [Option<u32>; 2])> {
    let (one, other) = (uuids(a), uuids(b));
    if one.is_empty() && other.is_empty() {
        return vec![(None, [None; 2])];
    }
    let several = |run: &Recorded| run.header.get("cards").is_some();
    let number = |run: &Recorded, at: usize| several(run).then_some(at as u32);
    let pair = |(at, uuid): (usize, &String)| {
        let there = other.iter().position(|known| known == uuid)?;
        Some((Some(uuid.clone()), [number(a, at), number(b, there)]))
    };
    one.iter().enumerate().filter_map(pair).collect()
}

/// Two different values for the same key, if the runs have any.
fn conflict(
    a: &Recorded,
    b: &Recorded,
    of: impl Fn(&Trial) -> Option<(String, String)>,
) -> Option<(String, String)> {
    let known: BTreeMap<String, String> = a.trials.iter().filter_map(&of).collect();
    let other = b.trials.iter().filter_map(&of);
    let mut pairs = other.filter_map(|(key, value)| Some((known.get(&key)?.clone(), value)));
    pairs.find(|(one, other)| one != other)
}

fn difference(a: &Recorded, b: &Recorded) -> Map<String, Value> {
    let (Some(one), Some(other)) = (a.champion(), b.champion()) else { return Map::new() };
    let pair = |change: search::Change| {
        let values = vec![change.from.to_json(), change.to.to_json()];
        (change.knob.path().to_owned(), Value::Array(values))
    };
    changes(&one.config, &other.config).into_iter().map(pair).collect()
}

fn side(run: &Recorded) -> Side {
    let champion = run.champion();
    let verdict = champion.map(|trial| &trial.verdict);
    let card = confirmed(run).map_or(champion.and_then(|trial| trial.card), |last| last.card);
    let Figures { latency_us, ci_us, gain } = figures(run, card);
    Side {
        run: run.run.clone(),
        champion: champion.map(|trial| trial.trial),
        schedule_id: verdict.and_then(|verdict| verdict.schedule_id.clone()),
        latency_us,
        ci_us,
        gain_over_baseline: gain,
        card,
        trials: run.trials.len(),
    }
}

/// One card's figures for a run's champion.
struct Figures {
    latency_us: Option<f64>,
    ci_us: Option<[f64; 2]>,
    gain: Option<[f64; 2]>,
}

/// The confirmation of the champion.
fn confirmed(run: &Recorded) -> Option<&search::Confirmation> {
    let champion = run.champion().map(|trial| trial.trial);
    run.confirmation.as_ref().filter(|last| Some(last.champion) == champion)
}

/// A card's figures for a run's champion: those of the confirmation, else those of the trial if it was measured there.
fn figures(run: &Recorded, card: Option<u32>) -> Figures {
    let ends = |gain: Option<search::Interval>| gain.map(|gain| [gain.low, gain.high]);
    if let Some(last) = confirmed(run) {
        if last.card == card {
            let Verdict { latency_us, ci_us, .. } = last.verdict;
            return Figures { latency_us, ci_us, gain: ends(last.gain) };
        }
        if let Some(other) = last.beside.iter().find(|other| Some(other.card) == card) {
            let (latency_us, ci_us) = (other.latency_us, other.ci_us);
            return Figures { latency_us, ci_us, gain: ends(other.gain) };
        }
    }
    let verdict = run.champion().filter(|trial| trial.card == card).map(|trial| &trial.verdict);
    let (latency_us, ci_us) =
        verdict.map_or((None, None), |verdict| (verdict.latency_us, verdict.ci_us));
    Figures { latency_us, ci_us, gain: None }
}

/// Which run is better, as far as the records show: the answer must be the same on every card that both ran on, else it is inconclusive.
fn judge(a: &Recorded, b: &Recorded) -> (&'static str, String) {
    let cards = shared(a, b);
    let several = cards.len() > 1;
    let mut sides = Vec::new();
    let mut lines = Vec::new();
    for (uuid, [at_a, at_b]) in &cards {
        let (side, line) = judge_card(a, b, &figures(a, *at_a), &figures(b, *at_b));
        let place = uuid.as_deref().filter(|_| several);
        lines.push(place.map_or_else(|| line.clone(), |uuid| format!("card {uuid}: {line}")));
        sides.push(side);
    }
    let first = sides.first().copied().unwrap_or("inconclusive");
    let agreed = sides.iter().all(|&side| side == first);
    (if agreed { first } else { "inconclusive" }, lines.join("; "))
}

/// Which run is better on one card.
fn judge_card(
    a: &Recorded,
    b: &Recorded,
    one: &Figures,
    other: &Figures,
) -> (&'static str, String) {
    let champion = |run: &Recorded| run.champion().and_then(|t| t.verdict.latency_us).is_some();
    if !champion(a) || !champion(b) {
        return ("inconclusive", "a run has no correct schedule".to_owned());
    }
    let (Some(us_a), Some(us_b)) = (one.latency_us, other.latency_us) else {
        return ("inconclusive", "a champion was not measured on it".to_owned());
    };
    let percent = 100.0 * (us_b / us_a - 1.0);
    let figures = format!("{us_a:.2} us and {us_b:.2} us ({percent:+.2} %)");
    let schedule = |run: &Recorded| run.champion().and_then(|t| t.verdict.schedule_id.clone());
    if schedule(a) == schedule(b) {
        return ("equal", format!("the same schedule leads in both; {figures}"));
    }
    let predicted = a.word("latency_kind") == Some(LatencyKind::Predicted.name());
    if predicted {
        let side = if us_a < us_b {
            "a"
        } else if us_b < us_a {
            "b"
        } else {
            "equal"
        };
        return (side, format!("{figures}, predicted"));
    }
    // Both raced the same baseline, each in its own process: that cancels the state of the card on that day.
    if let (Some([low_a, high_a]), Some([low_b, high_b])) = (one.gain, other.gain) {
        let line = format!(
            "saves {:.2} to {:.2} % and {:.2} to {:.2} % of the baseline's time; {figures}",
            100.0 * low_a,
            100.0 * high_a,
            100.0 * low_b,
            100.0 * high_b
        );
        return (apart([low_b, high_b], [low_a, high_a]), line);
    }
    match (one.ci_us, other.ci_us) {
        (Some(ci_a), Some(ci_b)) => (
            apart(ci_a, ci_b),
            format!(
                "{figures}; measured in two processes and not raced: drift of the card is in it"
            ),
        ),
        _ => ("inconclusive", format!("{figures}, without intervals")),
    }
}

/// Which of two cost intervals is below the other.
fn apart(a: [f64; 2], b: [f64; 2]) -> &'static str {
    if a[1] < b[0] {
        "a"
    } else if b[1] < a[0] {
        "b"
    } else {
        "inconclusive"
    }
}
