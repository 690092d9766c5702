//! `amk bench --serve`: a load on a server, and what its clients see: throughput, and the distributions of the time to
//! the first token, between tokens and of whole requests.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::cli::{BenchArgs, LoadArgs};
use crate::csv::{Column, Csv};
use crate::distribution::{Distribution, Times};
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{files, report};

mod client;
mod load;
mod plot;

use client::{Address, Answered, Client};
use load::{Load, Plan};

/// Time limit of the first question to the server.
const FIRST: Duration = Duration::from_secs(10);
/// The most different failures that the document has.
const FAILURES_MAX: usize = 16;

/// The columns of `--csv`.
const COLUMNS: [Column; 38] = [
    ("url", "/url"),
    ("model", "/model"),
    ("load", "/load"),
    ("clients", "/clients"),
    ("rate", "/rate"),
    ("seed", "/seed"),
    ("prompt_tokens", "/prompt_tokens"),
    ("shared_tokens", "/shared_tokens"),
    ("answer_tokens", "/answer_tokens"),
    ("temperature", "/temperature"),
    ("completed", "/requests/completed"),
    ("failed", "/requests/failed"),
    ("dropped", "/requests/dropped"),
    ("duration_s", "/duration_s"),
    ("requests_per_s", "/requests_per_s"),
    ("tokens_per_s", "/tokens_per_s"),
    ("first_token_mean_ms", "/first_token_ms/mean"),
    ("first_token_p50_ms", "/first_token_ms/p50"),
    ("first_token_p95_ms", "/first_token_ms/p95"),
    ("first_token_p99_ms", "/first_token_ms/p99"),
    ("first_token_max_ms", "/first_token_ms/max"),
    ("between_events_mean_ms", "/between_events_ms/mean"),
    ("between_events_p50_ms", "/between_events_ms/p50"),
    ("between_events_p95_ms", "/between_events_ms/p95"),
    ("between_events_p99_ms", "/between_events_ms/p99"),
    ("between_events_max_ms", "/between_events_ms/max"),
    ("per_token_mean_ms", "/per_token_ms/mean"),
    ("per_token_p50_ms", "/per_token_ms/p50"),
    ("per_token_p95_ms", "/per_token_ms/p95"),
    ("per_token_p99_ms", "/per_token_ms/p99"),
    ("per_token_max_ms", "/per_token_ms/max"),
    ("end_to_end_mean_ms", "/end_to_end_ms/mean"),
    ("end_to_end_p50_ms", "/end_to_end_ms/p50"),
    ("end_to_end_p95_ms", "/end_to_end_ms/p95"),
    ("end_to_end_p99_ms", "/end_to_end_ms/p99"),
    ("end_to_end_max_ms", "/end_to_end_ms/max"),
    ("prompt_tokens_total", "/tokens/prompt"),
    ("generated_tokens_total", "/tokens/generated"),
];

/// The figures of a load.
#[derive(Debug, Serialize)]
struct Figures {
    schema: &'static str,
    url: String,
    model: String,
    /// `closed` or `open`.
    load: &'static str,
    clients: u32,
    rate: Option<f64>,
    seed: u64,
    prompt_tokens: u32,
    shared_tokens: u32,
    answer_tokens: u32,
    temperature: f64,
    requests: Counts,
    /// Messages of failures, with their number.
    failures: BTreeMap<String, usize>,
    duration_s: f64,
    /// Of completed requests, as the server counts them.
    tokens: Tokens,
    requests_per_s: f64,
    tokens_per_s: f64,
    /// From the moment when a request was due.
    first_token_ms: Option<Distribution>,
    /// Between two events of a stream; a server that sends several tokens at once has long and very short ones.
    between_events_ms: Option<Distribution>,
    /// The mean of each answer after its first token.
    per_token_ms: Option<Distribution>,
    end_to_end_ms: Option<Distribution>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Counts {
    completed: usize,
    failed: usize,
    /// Arrivals of an open loop that were not sent, since --clients were in flight.
    dropped: u32,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Tokens {
    prompt: u64,
    generated: u64,
}

/// The times of a load, by kind.
struct Kinds {
    first: Times,
    between: Times,
    per_token: Times,
    whole: Times,
}

impl Kinds {
    fn of(answered: &[Answered]) -> Self {
        Self {
            first: Times::of(answered.iter().filter_map(|answer| answer.first)),
            between: Times::of(answered.iter().flat_map(|answer| answer.gaps.iter().copied())),
            per_token: Times::of(answered.iter().filter_map(Answered::per_token)),
            whole: Times::of(answered.iter().map(|answer| answer.whole)),
        }
    }
}

pub(super) fn run(args: &BenchArgs, url: &str) -> Outcome {
    let address = Address::read(url)?;
    let csv = args.csv.as_deref().map(|path| Csv::open(path, &COLUMNS)).transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| Failure::missing(format!("no runtime: {error}")))?;
    let local = tokio::task::LocalSet::new();
    let (model, load) = local.block_on(&runtime, loaded(args, address))?;
    let kinds = Kinds::of(&load.answered);
    let figures = figures((args, url), model, &load, &kinds);
    report::say_text(&table(&figures));
    if let Some(path) = &args.load.plot {
        files::write_whole(path, plot::svg(&kinds).map_err(Failure::refused)?.as_bytes())?;
        report::say(&format!("plot: {}", path.display()));
    }
    if let Some(csv) = csv {
        csv.append(
            &serde_json::to_value(&figures).map_err(|error| Failure::bug(error.to_string()))?,
        )?;
    }
    report::document(&figures)?;
    let all_well = figures.requests.failed == 0 && figures.requests.dropped == 0;
    Ok(if all_well && figures.requests.completed > 0 { Exit::Yes } else { Exit::No })
}

/// Asks for the model's name and runs the load.
async fn loaded(args: &BenchArgs, address: Address) -> Result<(String, Load), Failure> {
    let key = std::env::var("AMK_API_KEY").ok().filter(|key| !key.trim().is_empty());
    let client = Rc::new(Client::new(address, key.map(|key| key.trim().to_owned())));
    let model = match &args.model {
        Some(model) => model.clone(),
        None => client.model(Instant::now() + FIRST).await.map_err(|why| {
            let remedy = "start the server, or name its model with --model; AMK_API_KEY is its key";
            Failure::missing(format!("the server names no model: {why}; {remedy}"))
        })?,
    };
    let plan = plan(&args.load, model.clone(), args.seed);
    let spinner = Spinner::through(plan.requests as usize, "requests");
    let load = plan.run(client, move || spinner.done()).await;
    Ok((model, load))
}

fn clients(load: &LoadArgs) -> u32 {
    load.clients.unwrap_or(if load.rate.is_some() { 256 } else { 8 })
}

fn plan(load: &LoadArgs, model: String, seed: u64) -> Plan {
    Plan {
        model,
        clients: clients(load),
        rate: load.rate,
        requests: load.requests,
        duration: Duration::from_secs(load.duration.into()),
        timeout: Duration::from_secs(load.timeout.into()),
        prompt: load.prompt_tokens,
        shared: load.shared_tokens,
        answer: load.answer_tokens,
        vocab: load.vocab,
        temperature: load.temperature,
        seed,
    }
}

fn figures((args, url): (&BenchArgs, &str), model: String, load: &Load, kinds: &Kinds) -> Figures {
    let mut failures = BTreeMap::new();
    for why in &load.failed {
        if failures.len() < FAILURES_MAX || failures.contains_key(why) {
            *failures.entry(why.clone()).or_insert(0) += 1;
        }
    }
    let sum = |count: fn(&Answered) -> u64| load.answered.iter().map(count).sum();
    let tokens = Tokens { prompt: sum(|one| one.prompt), generated: sum(|one| one.tokens) };
    let seconds = load.took.as_secs_f64().max(f64::MIN_POSITIVE);
    Figures {
        schema: "amk.bench_serve.v1",
        url: url.to_owned(),
        model,
        load: if args.load.rate.is_some() { "open" } else { "closed" },
        clients: clients(&args.load),
        rate: args.load.rate,
        seed: args.seed,
        prompt_tokens: args.load.prompt_tokens,
        shared_tokens: args.load.shared_tokens.min(args.load.prompt_tokens),
        answer_tokens: args.load.answer_tokens,
        temperature: args.load.temperature,
        requests: Counts {
            completed: load.answered.len(),
            failed: load.failed.len(),
            dropped: load.dropped,
        },
        failures,
        duration_s: seconds,
        tokens,
        requests_per_s: load.answered.len() as f64 / seconds,
        tokens_per_s: tokens.generated as f64 / seconds,
        first_token_ms: kinds.first.distribution(),
        between_events_ms: kinds.between.distribution(),
        per_token_ms: kinds.per_token.distribution(),
        end_to_end_ms: kinds.whole.distribution(),
    }
}

/// The figures for people.
fn table(figures: &Figures) -> String {
    let Counts { completed, failed, dropped } = figures.requests;
    let mut lines = vec![
        format!(
            "{} {}: {completed} requests completed, {failed} failed, {dropped} dropped, in {:.2} s",
            figures.url, figures.model, figures.duration_s
        ),
        format!(
            "{:.1} tokens per second, {:.2} requests per second",
            figures.tokens_per_s, figures.requests_per_s
        ),
        format!(
            "{:16}{}",
            "ms",
            ["mean", "p50", "p95", "p99", "p99.9", "max"]
                .map(|name| format!(" {name:>9}"))
                .concat()
        ),
    ];
    for (name, found) in [
        ("first token", figures.first_token_ms),
        ("between events", figures.between_events_ms),
        ("per token", figures.per_token_ms),
        ("end to end", figures.end_to_end_ms),
    ] {
        let Some(Distribution { mean, p50, p95, p99, p99_9, max, .. }) = found else { continue };
        let times = [mean, p50, p95, p99, p99_9, max].map(|time| format!(" {time:9.2}"));
        lines.push(format!("{name:16}{}", times.concat()));
    }
    for (why, times) in &figures.failures {
        lines.push(format!("failed {times} times: {why}"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests;
