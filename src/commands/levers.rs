//! `amk levers`: every knob of a schedule as a lever: which cause of a step's time it should shrink, which moves are legal, what
//! they are predicted to bring, and what the store says that they brought. `--try` makes one move and looks whether the named
//! cause moved.

use std::collections::BTreeMap;

use ir::schedule::{Knob, ScheduleConfig, validate};
use lower::{Predictor, Rates};
use serde_json::{Map, Value, json};
use trace::{Cause, Path, Timeline};

use super::trace::{Ask, traced};
use crate::cli::LeversArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;
use crate::schedule_choice::{Auto, choose};

/// Share of a gain that the named causes must account for.
const NAMED_SHARE: f64 = 0.5;

/// Moves of one knob alone, with what they brought.
const TRIED: &str = "SELECT c.knob, c.became, t.gain_low, t.gain_high, r.began_unix_s, c.run, t.seq \
    FROM changes c JOIN trials t ON t.run = c.run AND t.seq = c.seq JOIN runs r ON r.run = c.run \
    WHERE t.latency_kind = ?1 AND r.target = ?2 AND r.graph_id = ?3 AND t.gain_low IS NOT NULL \
    AND (SELECT COUNT(*) FROM changes d WHERE d.run = c.run AND d.seq = c.seq) = 1 \
    ORDER BY r.began_unix_s, t.seq";

/// Rows of the store, by knob and new value.
type Tried = BTreeMap<(String, String), Vec<Map<String, Value>>>;

/// The causes that a knob acts on.
const fn shrinks(knob: Knob) -> &'static [Cause] {
    match knob {
        Knob::SmAssignmentPolicy => &[Cause::HandOff, Cause::Products, Cause::Starved],
        Knob::PipelineStageBytes
        | Knob::PipelineStages
        | Knob::PipelineInFlightBytes
        | Knob::KernelEvict => &[Cause::Starved],
        Knob::FusionGroupingEmbed | Knob::FusionGroupingMerge => {
            &[Cause::HandOff, Cause::Issue, Cause::Look]
        }
        Knob::TilingQkvRows
        | Knob::TilingOProjRows
        | Knob::TilingGateUpRows
        | Knob::TilingDownRows
        | Knob::TilingLmHeadRows => &[Cause::Products, Cause::Output, Cause::Starved],
        Knob::TilingAttentionKvBlock | Knob::TilingAttentionKvSplit => {
            &[Cause::Products, Cause::HandOff, Cause::Staging]
        }
        Knob::PipelineInFlightBeforeWaitBytes
        | Knob::KernelPollSleepNs
        | Knob::SyncEmbed
        | Knob::SyncQkv
        | Knob::SyncAttention
        | Knob::SyncMerge
        | Knob::SyncOProj
        | Knob::SyncGateUp
        | Knob::SyncDown => &[Cause::HandOff, Cause::Look],
    }
}

pub(crate) fn run(args: &LeversArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let chosen = choose(&context, &args.config, args.context, Auto::Reproducible)?;
    let mut document = json!({
        "schema": "amk.levers.v1",
        "model": context.graph().name,
        "target": context.target.name,
        "context": args.context,
        "schedule_source": chosen.source,
    });
    match &args.try_move {
        Some(text) => document["tried"] = try_move(&context, args, &chosen.config, text)?,
        None => {
            let measured = tried(&context, args)?;
            let before = predicted_us(&context, args.context, &chosen.config)?;
            document["predicted_us"] = before.into();
            let lever =
                |&knob: &Knob| lever(&context, args, &chosen.config, before, knob, &measured);
            document["levers"] = Knob::ALL.iter().map(lever).collect();
        }
    }
    report::document(&document)?;
    Ok(Exit::Yes)
}

/// One knob with all its moves.
fn lever(
    context: &Context,
    args: &LeversArgs,
    config: &ScheduleConfig,
    before: f64,
    knob: Knob,
    measured: &Tried,
) -> Value {
    let now = config.get(knob);
    let mut moves: Vec<Value> = Vec::new();
    for value in knob.values().into_iter().filter(|&value| value != now) {
        let to = value.to_json();
        let mut row = json!({"to": to});
        match moved(config, knob, value).and_then(|c| legal(context, &c).map(|()| c)) {
            Err(rule) => row["refused"] = rule.into(),
            Ok(config) => match predicted_us(context, args.context, &config) {
                Ok(us) => row["predicted_gain_pct"] = (100.0 * (1.0 - us / before)).into(),
                Err(failure) => row["refused"] = failure.message.into(),
            },
        }
        if let Some(rows) = measured.get(&(knob.path().to_owned(), shown(&to))) {
            row["measured"] = summary(rows);
        }
        moves.push(row);
    }
    let gain = |row: &Value| row["predicted_gain_pct"].as_f64().unwrap_or(f64::NEG_INFINITY);
    moves.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    if let Some(best) = moves.first().filter(|best| gain(best) > 0.0) {
        report::say(&format!(
            "{:40} {} -> {}: {:+.2}% predicted",
            knob.path(),
            shown(&now.to_json()),
            shown(&best["to"]),
            gain(best)
        ));
    }
    json!({
        "knob": knob.path(), "what": knob.desc(), "acts_on": knob.acts_on().name(),
        "now": now.to_json(), "shrinks": shrinks(knob).iter().map(|c| c.name()).collect::<Vec<_>>(),
        "moves": moves,
    })
}

/// The schedule after a move.
fn moved(
    config: &ScheduleConfig,
    knob: Knob,
    value: ir::schedule::Value,
) -> Result<ScheduleConfig, String> {
    let mut config = *config;
    let refused = |domain| format!("{} takes {domain}", knob.path());
    config.set(knob, value).map_err(refused)?;
    Ok(config)
}

fn legal(context: &Context, config: &ScheduleConfig) -> Result<(), String> {
    let valid = validate(*config, context.graph(), &context.target);
    valid.map(|_| ()).map_err(|violations| violations.to_string())
}

fn predicted_us(context: &Context, position: u32, config: &ScheduleConfig) -> Result<f64, Failure> {
    let program = context.lowered(config)?;
    let predictor = Predictor::new(&program, &config.kernel, &context.target, position);
    Ok(predictor.predict(Rates::shipped()).latency_us)
}

/// A JSON value without the quotes of a string, as the store has it.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// What the store says of moves of one knob, on this graph and target: by knob and new value.
fn tried(context: &Context, args: &LeversArgs) -> Result<Tried, Failure> {
    let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let Some(path) = args.store.as_deref() else { return Ok(found) };
    let kind = if context.has_device()? { "measured-gpu" } else { "predicted" };
    let graph = context.graph().id();
    let store = corpus::Store::existing(path)?;
    for row in store.query(TRIED, &[kind, &context.target.name, &graph])? {
        let text = |key: &str| row.get(key).map(shown).unwrap_or_default();
        found.entry((text("knob"), text("became"))).or_default().push(row);
    }
    Ok(found)
}

/// Number of tries, their gains in percent, and the last of them.
fn summary(rows: &[Map<String, Value>]) -> Value {
    let number = |row: &Map<String, Value>, key: &str| row.get(key).and_then(Value::as_f64);
    let middle = |row| Some(50.0 * (number(row, "gain_low")? + number(row, "gain_high")?));
    let mut gains: Vec<f64> = rows.iter().filter_map(middle).collect();
    gains.sort_by(f64::total_cmp);
    let last = rows.last();
    let ends = |key| last.and_then(|row| number(row, key)).map(|share| 100.0 * share);
    json!({
        "tries": rows.len(), "gain_pct": gains.get(gains.len() / 2),
        "last": {
            "run": last.and_then(|row| row.get("run")), "unix_s": last.and_then(|row| row.get("began_unix_s")),
            "gain_pct": [ends("gain_low"), ends("gain_high")],
        },
    })
}

/// Makes one move, traces the step before and after, and says which causes on the critical path shrank.
fn try_move(
    context: &Context,
    args: &LeversArgs,
    config: &ScheduleConfig,
    text: &str,
) -> Result<Value, Failure> {
    let usage = |what: String| Failure::usage(format!("--try {text}: {what}"));
    let (path, value) = text.split_once('=').ok_or_else(|| usage("write KNOB=VALUE".into()))?;
    let knob = Knob::from_path(path)
        .ok_or_else(|| usage(format!("there is no knob {path}; amk levers lists them")))?;
    let to = knob.values().into_iter().find(|of| shown(&of.to_json()) == value);
    let to = to.ok_or_else(|| usage(format!("{path} takes {}", knob.domain())))?;
    let changed = moved(config, knob, to).map_err(usage)?;
    legal(context, &changed).map_err(Failure::refused)?;
    let ask = Ask { context: args.context, plant: &[], plants: 0 };
    let mut idle = None;
    let mut step =
        |name: &str, config: &ScheduleConfig| traced(context, &ask, name, config, &mut idle);
    let (us, before) = step("before", config)?;
    let (then_us, after) = step("after", &changed)?;
    let (causes, named, all) = causes(knob, &before, &after);
    let gain_pct = 100.0 * (1.0 - then_us / us);
    // A move that gains must gain through what it acts on; one that does not has nothing to explain.
    let gains = gain_pct > 0.0 && all > 0;
    let explained = gains.then_some(named as f64 >= NAMED_SHARE * all as f64);
    let verdict = match explained {
        Some(true) => "the named causes shrank",
        Some(false) => "it gains through other causes than the named ones",
        None => "it does not gain",
    };
    report::say(&format!("{path}: {us:.1} -> {then_us:.1} us, {gain_pct:+.2}%; {verdict}"));
    Ok(json!({
        "knob": path, "was": config.get(knob).to_json(), "to": to.to_json(),
        "latency_kind": if context.has_device()? { "measured-gpu" } else { "predicted" },
        "us_before": us, "us_after": then_us, "gain_pct": gain_pct,
        "shrinks": shrinks(knob).iter().map(|c| c.name()).collect::<Vec<_>>(),
        "causes": causes, "named_cause_shrank": explained, "verdict": verdict,
        "rollback": {path: config.get(knob).to_json()},
    }))
}

/// Nanoseconds of each cause on the critical path before and after; by how much the named ones shrank, and all.
fn causes(knob: Knob, before: &Timeline, after: &Timeline) -> (Value, i64, i64) {
    let sums = |timeline: &Timeline| {
        let mut sums = BTreeMap::<Cause, i64>::new();
        for (cause, _, ns) in Path::new(timeline).table(timeline) {
            *sums.entry(cause).or_default() += ns as i64;
        }
        sums
    };
    let (old, new) = (sums(before), sums(after));
    let of = |sums: &BTreeMap<Cause, i64>, cause| sums.get(&cause).copied().unwrap_or(0);
    let saved = |cause| of(&old, cause) - of(&new, cause);
    let named = shrinks(knob).iter().map(|&cause| saved(cause)).sum();
    let all: Vec<Cause> =
        old.keys().chain(new.keys().filter(|c| !old.contains_key(c))).copied().collect();
    let row = |&cause: &Cause| {
        json!({"cause": cause.name(), "before_ns": of(&old, cause), "after_ns": of(&new, cause),
            "named": shrinks(knob).contains(&cause)})
    };
    let rows = all.iter().map(row).collect();
    (rows, named, before.span() as i64 - after.span() as i64)
}
