//! Which schedule a command runs, and why: the only place that chooses between a config, a schedule found here, a
//! shipped one, and the rule-based default.

use ir::program::GraphShape;
use ir::schedule::{
    ScheduleConfig, default_config_at, legal_values, read_config, split_keys, validate,
};
use ir::{Graph, Knob, Target, Violations};
use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::{ConfigArgs, ScheduleChoice};
use crate::context::Context;
use crate::failure::Failure;
use crate::found::{self, Entry};
use crate::report;

/// Farthest context, as a ratio, for which a shipped schedule's own number of key splits is kept.
const CONTEXT_RATIO_MAX: f64 = 4.0;

/// The policy of `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auto {
    /// The best for this machine, including its own searches: for commands that only need speed.
    Fastest,
    /// The same on every machine with this version of amk: for commands that prove a figure.
    Reproducible,
}

/// Whether a schedule is for the graph's own shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ShapeMatch {
    /// The same sizes and format.
    Same,
    /// A similar shape of the same format.
    Similar,
}

/// The source of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ScheduleSource {
    /// config, found, shipped, default or neutral.
    pub(crate) kind: &'static str,
    /// The GPU that it was measured on; none for the default or a config.
    pub(crate) target: Option<String>,
    /// Whether it is for this shape or for a similar one.
    pub(crate) shape: Option<ShapeMatch>,
    /// Tokens of context that it is for.
    pub(crate) context: Option<u32>,
    /// The kernel build that it was measured with.
    pub(crate) kernel: Option<String>,
    /// Tokens of context for which its keys are split instead, if `context` is far away: that schedule was never measured.
    pub(crate) split_for: Option<u32>,
    /// Why this one, in one line.
    pub(crate) why: String,
}

/// A legal schedule and its source.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) config: ScheduleConfig,
    pub(crate) source: ScheduleSource,
}

/// The schedule for `tokens` tokens of context. Prints the choice in one line.
pub(crate) fn choose(
    context: &Context,
    args: &ConfigArgs,
    tokens: u32,
    auto: Auto,
) -> Result<Chosen, Failure> {
    judged(context, args, tokens, auto)?.map_err(|violations| {
        let from = args.config.as_ref();
        let from = from.map_or_else(|| "the schedule".to_owned(), ToString::to_string);
        Failure::refused(format!("{from}: {violations}"))
    })
}

/// The same for commands whose answer can hold violations. The inner error is a refusal by a gate; an unreadable file is an outer error.
pub(crate) fn judged(
    context: &Context,
    args: &ConfigArgs,
    tokens: u32,
    auto: Auto,
) -> Result<Result<Chosen, Violations>, Failure> {
    if args.config.is_some() && args.schedule.is_some() {
        return Err(Failure::usage("config and schedule both name a schedule; give one of them"));
    }
    let chosen = match &args.config {
        Some(given) => {
            let why = "the given config".to_owned();
            let source = ScheduleSource { kind: "config", why, ..ScheduleSource::default() };
            context.config(given)?.map(|config| Chosen { config, source })
        }
        None => {
            let choice = args.schedule.unwrap_or(ScheduleChoice::Auto);
            Ok(by_name(context, choice, tokens, auto)?)
        }
    };
    if let Ok(chosen) = &chosen {
        report::say(&format!("schedule: {}", chosen.source.why));
    }
    Ok(chosen)
}

fn by_name(
    context: &Context,
    choice: ScheduleChoice,
    tokens: u32,
    auto: Auto,
) -> Result<Chosen, Failure> {
    let missing = |what: &str, then: &str| {
        let (name, target) = (&context.graph().name, &context.target.name);
        Failure::missing(format!(
            "no schedule is {what} for the shape of {name} on {target}; {then}"
        ))
    };
    match choice {
        ScheduleChoice::Found => found(context, tokens).ok_or_else(|| {
            missing("found", "run `amk loop --device cuda` on it, or leave --schedule out")
        }),
        ScheduleChoice::Shipped => shipped(context, tokens)
            .ok_or_else(|| missing("shipped", "leave --schedule out for the rule-based default")),
        ScheduleChoice::Default => Ok(default(context, tokens, "rule-based default")),
        ScheduleChoice::Neutral => Ok(neutral(context)),
        ScheduleChoice::Auto => {
            let own = match auto {
                Auto::Fastest => found(context, tokens),
                Auto::Reproducible => None,
            };
            let known = own.or_else(|| shipped(context, tokens));
            Ok(known.unwrap_or_else(|| {
                default(context, tokens, "no schedule for this shape: rule-based default")
            }))
        }
    }
}

/// The choice of `auto` where figures are proved, without output.
pub(crate) fn reproducible(context: &Context, tokens: u32) -> ScheduleConfig {
    let known = shipped(context, tokens);
    for_steps(context, known.unwrap_or_else(|| default(context, tokens, "")).config)
}

/// The schedule of steps of one sequence, for the number of sequences that the context's steps have.
pub(crate) fn for_steps(context: &Context, config: ScheduleConfig) -> ScheduleConfig {
    match context.batch {
        1 => config,
        batch => spread(config, context.graph(), &context.target, batch),
    }
}

fn default(context: &Context, tokens: u32, why: &str) -> Chosen {
    let config = default_config_at(context.graph(), &context.target, tokens);
    let source = ScheduleSource {
        kind: "default",
        context: Some(tokens),
        why: format!("{why} for {tokens} tokens of context"),
        ..ScheduleSource::default()
    };
    Chosen { config, source }
}

fn neutral(context: &Context) -> Chosen {
    let config = context.neutral_config();
    let why = "neutral, a slow start of studies".to_owned();
    let source = ScheduleSource { kind: "neutral", why, ..ScheduleSource::default() };
    Chosen { config, source }
}

/// The best shipped schedule that is legal here.
fn shipped(context: &Context, tokens: u32) -> Option<Chosen> {
    let (graph, target) = (context.graph(), &context.target);
    let all = corpus::shipped(&GraphShape::from(graph), target, tokens);
    all.into_iter().find_map(|found| {
        let shipped = found.shipped;
        let mut config = *read_config(shipped.schedule, graph, target).ok()?;
        let far =
            f64::from(shipped.context.max(tokens)) / f64::from(shipped.context.min(tokens).max(1));
        let split_for = (far > CONTEXT_RATIO_MAX).then_some(tokens);
        let mut adapted = String::new();
        if let Some(tokens) = split_for {
            split_keys(&mut config, graph, target, tokens);
            adapted = format!(", its keys split for {tokens}");
        }
        let (shape, of) = match found.same_shape {
            true => (ShapeMatch::Same, "the same shape"),
            false => (ShapeMatch::Similar, "a similar shape"),
        };
        let source = ScheduleSource {
            kind: "shipped",
            target: Some(shipped.target.to_owned()),
            shape: Some(shape),
            context: Some(shipped.context),
            kernel: shipped.bundle.and_then(kernel_of),
            split_for,
            why: format!(
                "shipped for {of} ({}) on {} at {} tokens of context{adapted}",
                shipped.folder, shipped.target, shipped.context
            ),
        };
        Some(Chosen { config, source })
    })
}

/// The kernel id in a bundle.
fn kernel_of(bundle: &str) -> Option<String> {
    let bundle: serde_json::Value = serde_json::from_str(bundle).ok()?;
    Some(bundle.get("kernel_id")?.as_str()?.to_owned())
}

fn found(context: &Context, tokens: u32) -> Option<Chosen> {
    found_for(context, tokens, context.batch)
}

/// The schedule that a search on this machine found for steps of `seqs` sequences.
fn found_for(context: &Context, tokens: u32, seqs: u32) -> Option<Chosen> {
    // Searches are of caches of 16 bits.
    context.kv().only_f16("").ok()?;
    let (config, entry) = found::nearest(context, tokens, seqs)?;
    let Entry { target, card, context, batch, kernel_id, latency_us, .. } = entry;
    let of = if batch == 1 { String::new() } else { format!(" for {batch} sequences at once") };
    let why = format!(
        "found on this machine ({card}){of} at {context} tokens of context, {latency_us:.1} us"
    );
    let source = ScheduleSource {
        kind: "found",
        target: Some(target),
        shape: Some(ShapeMatch::Same),
        context: Some(context),
        kernel: Some(kernel_id),
        split_for: None,
        why,
    };
    Some(Chosen { config, source })
}

/// Tokens of context for which the schedule of a batch is chosen, if the caches have room for as many.
const BATCH_TOKENS: u32 = 512;

/// The schedule of a kernel for several sequences: what a search found for them, else that for [`BATCH_TOKENS`], spread over
/// them; with at least as many splits of the keys as the one for a full cache has.
pub(crate) fn for_batch(
    context: &Context,
    args: &ConfigArgs,
    full: &Chosen,
    seqs: u32,
) -> Result<Chosen, Failure> {
    let tokens = context.kv_capacity.min(BATCH_TOKENS);
    let free =
        args.config.is_none() && args.schedule.is_none_or(|choice| choice == ScheduleChoice::Auto);
    let found = if free { found_for(context, tokens, seqs) } else { None };
    let is_found = found.is_some();
    let mut chosen = match found {
        Some(found) => {
            report::say(&format!("schedule: {}", found.source.why));
            found
        }
        None => choose(context, args, tokens, Auto::Fastest)?,
    };
    let splits = &mut chosen.config.tiling.attention.kv_split;
    *splits = full.config.tiling.attention.kv_split.max(*splits);
    if !is_found {
        chosen.config = spread(chosen.config, context.graph(), &context.target, seqs);
    }
    Ok(chosen)
}

/// The schedule with at least as many splits of the keys as there are sequences, and the largest blocks. One session at a
/// short context is fastest with few splits: it has work for one or two, and each further one adds a hand-off. Sequences
/// take their first splits on different workers (decision 022), so with one split per sequence eight sessions at a short
/// context use eight times as many workers. There are at most as many splits as workers for them. A split that has keys
/// costs a batch of eight 55 to 150 us, so blocks are large (docs/lab/2026-11-25-batches.md). A value that makes the
/// schedule illegal is skipped.
pub(crate) fn spread(
    config: ScheduleConfig,
    graph: &Graph,
    target: &Target,
    seqs: u32,
) -> ScheduleConfig {
    let (split, block) = (Knob::TilingAttentionKvSplit, Knob::TilingAttentionKvBlock);
    let most = target.sms / graph.kv_heads.max(1);
    let with = |config: &ScheduleConfig, knob, value| {
        let mut tried = *config;
        let set = tried.set(knob, value).is_ok() && validate(tried, graph, target).is_ok();
        set.then_some(tried)
    };
    let mut best = config;
    for value in legal_values(split, graph, target) {
        let splits = |config: &ScheduleConfig| config.tiling.attention.kv_split;
        let more = |tried: &ScheduleConfig| {
            splits(&best) < seqs && splits(&best) < splits(tried) && splits(tried) <= most
        };
        best = with(&best, split, value).filter(more).unwrap_or(best);
    }
    for value in legal_values(block, graph, target) {
        best = with(&best, block, value).unwrap_or(best);
    }
    best
}

#[cfg(test)]
#[path = "schedule_choice_tests.rs"]
mod tests;
