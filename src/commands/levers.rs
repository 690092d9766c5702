//! `amk levers`: every knob of a schedule as a lever: which cause of a step's time it should shrink, which moves are legal, what
//! they are predicted to bring, and what the store says that they brought. `--try` makes one move and looks whether the named
//! cause moved.

use std::collections::BTreeMap;
use std::path::Path;

use ir::schedule::{Knob, ScheduleConfig, validate};
use lower::{Predictor, Rates};
use search::checks::{CHECKS_MIN, Past};
use search::strategy::Learned;
use serde_json::{Map, Value, json};
use trace::{Cause, Timeline};

use super::search_loop::store_sink::known_in;
use super::trace::{Ask, traced};
use crate::cli::LeversArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;
use crate::schedule_choice::{Auto, choose};

mod check;

/// Share of a gain that the named causes must account for.
const NAMED_SHARE: f64 = 0.5;

/// Trials that set a knob, on this graph.
const TRIED: &str = "SELECT c.knob, c.became, r.began_unix_s, c.run, t.seq \
    FROM changes c JOIN trials t ON t.run = c.run AND t.seq = c.seq JOIN runs r ON r.run = c.run \
    WHERE t.latency_kind = ?1 AND r.target = ?2 AND r.graph_id = ?3 AND t.gain_low IS NOT NULL \
    ORDER BY r.began_unix_s, t.seq";

/// What a store says of moves.
struct Store {
    /// By knob and new value: the number of trials that made the move, and the last of them.
    tried: BTreeMap<(String, String), (u64, Map<String, Value>)>,
    /// What all its trials say together, those of other models too, by the regression of the strategy `residual`.
    learned: Learned,
}

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
    context.one_gpu("the table of levers")?;
    let chosen = choose(&context, &args.config, args.context, Auto::Reproducible)?;
    let mut document = json!({
        "schema": "amk.levers.v1",
        "model": context.graph().name,
        "target": context.target.name,
        "context": args.context,
        "schedule_source": chosen.source,
    });
    let mut exit = Exit::Yes;
    if let Some(text) = &args.try_move {
        document["tried"] = try_move(&context, args, &chosen.config, text)?;
    } else if args.check > 0 {
        document["check"] = check::run(&context, args, &chosen.config)?;
    } else {
        let levers = Levers::new(&context, args, chosen.config)?;
        document["predicted_us"] = levers.us.into();
        document["past_checks"] = json!(levers.checks.as_ref().map(Past::figures));
        document["levers"] = Knob::ALL.iter().map(|&knob| levers.lever(knob)).collect();
        if let Some(past) = levers.checks.filter(|past| past.len() < CHECKS_MIN) {
            report::say(&check::refusal(&past));
            exit = Exit::Inconclusive;
        }
    }
    report::document(&document)?;
    Ok(exit)
}

/// A schedule whose levers are listed.
struct Levers<'a> {
    context: &'a Context,
    position: u32,
    config: ScheduleConfig,
    /// Its predicted time.
    us: f64,
    /// The past checks of the card, if there is one.
    checks: Option<Past>,
    store: Option<Store>,
}

impl<'a> Levers<'a> {
    fn new(
        context: &'a Context,
        args: &LeversArgs,
        config: ScheduleConfig,
    ) -> Result<Self, Failure> {
        let us = predicted_us(context, args.context, &config)?;
        let checks = check::past(context, args)?;
        let store = args.store.as_deref().map(|path| Store::read(context, path)).transpose()?;
        Ok(Self { context, position: args.context, config, us, checks, store })
    }

    /// One knob with all its moves.
    fn lever(&self, knob: Knob) -> Value {
        let now = self.config.get(knob);
        let others = knob.values().into_iter().filter(|&value| value != now);
        let mut moves: Vec<Value> = others.map(|value| self.change(knob, value)).collect();
        let gain = |row: &Value| row["predicted_gain_pct"].as_f64().unwrap_or(f64::NEG_INFINITY);
        moves.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
        if let Some(best) = moves.first().filter(|best| gain(best) > 0.0) {
            let range =
                match (best["interval_80_pct"][0].as_f64(), best["interval_80_pct"][1].as_f64()) {
                    (Some(low), Some(high)) => format!(", {low:+.2} to {high:+.2}% (80%)"),
                    _ => String::new(),
                };
            report::say(&format!(
                "{:40} {} -> {}: {:+.2}% predicted{range}",
                knob.path(),
                shown(&now.to_json()),
                shown(&best["to"]),
                gain(best)
            ));
        }
        json!({
            "knob": knob.path(), "what": knob.desc(), "acts_on": knob.acts_on().name(),
            "now": now.to_json(),
            "shrinks": shrinks(knob).iter().map(|c| c.name()).collect::<Vec<_>>(),
            "moves": moves,
        })
    }

    /// One move: legality, what it should bring, what the store says.
    fn change(&self, knob: Knob, value: ir::schedule::Value) -> Value {
        let (context, to) = (self.context, value.to_json());
        let mut row = json!({"to": to});
        let legal = moved(&self.config, knob, value).and_then(|c| legal(context, &c).map(|()| c));
        let predicted = legal.and_then(|config| {
            predicted_us(context, self.position, &config)
                .map(|us| (config, us))
                .map_err(|f| f.message)
        });
        match predicted {
            Err(why) => row["refused"] = why.into(),
            Ok((config, us)) => self.predict(&mut row, knob, &config, us),
        }
        if let Some((trials, last)) = self.store.as_ref().and_then(|store| store.tried(knob, &to)) {
            row["tried"] = json!({"trials": trials, "last": last});
        }
        row
    }

    /// Adds what a move should bring. On a card without enough past checks nothing is predicted.
    fn predict(&self, row: &mut Value, knob: Knob, config: &ScheduleConfig, us: f64) {
        let gain = 100.0 * (1.0 - us / self.us);
        let (model, change) = (&self.context.graph().name, written(knob, config));
        let expected =
            self.checks.as_ref().map(|past| past.expected(model, &self.config, &change, gain));
        match expected {
            Some(None) => {}
            Some(Some((expected, interval))) => {
                row["predicted_gain_pct"] = expected.into();
                row["cost_model_gain_pct"] = gain.into();
                row["interval_80_pct"] = json!(interval);
            }
            None => row["predicted_gain_pct"] = gain.into(),
        }
        if let Some(store) = &self.store {
            let [gain, low, high] = store.learned.gain_pct((&self.config, self.us), (config, us));
            row["learned"] = json!({"gain_pct": gain, "interval_80_pct": [low, high]});
        }
    }
}

/// A knob and its value, `KNOB=VALUE`.
fn written(knob: Knob, config: &ScheduleConfig) -> String {
    format!("{}={}", knob.path(), shown(&config.get(knob).to_json()))
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

/// A JSON value without the quotes of a string, as the store has it.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
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

impl Store {
    fn read(context: &Context, path: &Path) -> Result<Self, Failure> {
        let kind = if context.has_device()? { "measured-gpu" } else { "predicted" };
        let (target, graph) = (&context.target.name, context.graph().id());
        let mut tried = BTreeMap::<_, (u64, Map<String, Value>)>::new();
        for row in corpus::Store::existing(path)?.query(TRIED, &[kind, target, &graph])? {
            let text = |key: &str| row.get(key).map(shown).unwrap_or_default();
            let (count, last) = tried.entry((text("knob"), text("became"))).or_default();
            *count += 1;
            *last = row;
        }
        Ok(Self { tried, learned: Learned::new(&known_in(path, context, kind, &[])?) })
    }

    fn tried(&self, knob: Knob, to: &Value) -> Option<&(u64, Map<String, Value>)> {
        self.tried.get(&(knob.path().to_owned(), shown(to)))
    }
}

/// Makes one move, traces the step before and after, and says which causes on the critical path shrank.
fn try_move(
    context: &Context,
    args: &LeversArgs,
    config: &ScheduleConfig,
    text: &str,
) -> Result<Value, Failure> {
    let usage = |what: String| Failure::usage(format!("--try {text}: {what}"));
    let (changed, knob) = config.with_change(text).map_err(usage)?;
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
    report::say(&format!("{knob}: {us:.1} -> {then_us:.1} us, {gain_pct:+.2}%; {verdict}"));
    Ok(json!({
        "knob": knob.path(), "was": config.get(knob).to_json(), "to": changed.get(knob).to_json(),
        "latency_kind": if context.has_device()? { "measured-gpu" } else { "predicted" },
        "us_before": us, "us_after": then_us, "gain_pct": gain_pct,
        "shrinks": shrinks(knob).iter().map(|c| c.name()).collect::<Vec<_>>(),
        "causes": causes, "named_cause_shrank": explained, "verdict": verdict,
        "rollback": {knob.path(): config.get(knob).to_json()},
    }))
}

/// Nanoseconds of each cause on the critical path before and after; by how much the named ones shrank, and all.
fn causes(knob: Knob, before: &Timeline, after: &Timeline) -> (Value, i64, i64) {
    let sums = |timeline: &Timeline| {
        let mut sums = BTreeMap::<Cause, i64>::new();
        for (cause, _, ns) in trace::Path::new(timeline).table(timeline) {
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
