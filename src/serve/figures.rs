//! `/metrics` on the server's own port: the metrics that routers and dashboards know from vLLM, after `amk`'s own.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use telemetry::Page;

use super::tenants::Tenants;
use super::tune::TuneFigures;
use crate::speculate::Tally;

/// Bounds of times to the first token, in seconds: vLLM's.
const FIRST: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Bounds of times between tokens: vLLM's, and shorter ones, since a step can take less than a millisecond.
const BETWEEN: [f64; 24] = [
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Bounds of times of whole requests: vLLM's, and shorter ones.
const WHOLE: [f64; 24] = [
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// Bounds of tokens of a request: vLLM's, for contexts of up to 128 Ki.
const TOKENS: [f64; 17] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0, 131_072.0,
];

type Share = Gauge<f64, AtomicU64>;

/// What one sequence had, when it ends. Times are none of what it never reached.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ran {
    pub(super) prompt: usize,
    pub(super) tokens: usize,
    /// From the request to its place.
    pub(super) queued: Option<Duration>,
    /// From its place to its first token.
    pub(super) prefill: Option<Duration>,
    /// From its first token to its end.
    pub(super) decode: Option<Duration>,
}

/// What a draft guessed. Clones count together.
#[derive(Clone, Debug, Default)]
pub(super) struct DraftFigures {
    guessed: Counter,
    accepted: Counter,
}

impl DraftFigures {
    /// Adds what windows gave.
    pub(super) fn add(&self, windows: &Tally) {
        self.guessed.inc_by(windows.drafted);
        self.accepted.inc_by(windows.drafts_accepted);
    }

    fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("guessed", "Of the guessed tokens, those of the draft model", &self.guessed),
            ("accepted", "Of these, tokens that were right", &self.accepted),
        ] {
            registry.register(format!("amk_draft_{name}_tokens"), help, counter.clone());
        }
    }
}

/// The metrics of requests.
pub(super) struct Figures {
    registry: Registry,
    waiting: Gauge,
    running: Gauge,
    cache: Share,
    first: Histogram,
    between: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_lengths: Histogram,
    lengths: Histogram,
    longest: Histogram,
    prompt: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    generated: Counter,
    drafts: Counter,
    drafted: Counter,
    accepted: Counter,
    pub(super) draft: DraftFigures,
    success: Family<[(&'static str, &'static str); 1], Counter>,
    tenants: Arc<Tenants>,
}

impl std::fmt::Debug for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Figures").finish_non_exhaustive()
    }
}

impl Figures {
    pub(super) fn new(model: &str, tenants: Arc<Tenants>) -> Self {
        let label = ("model_name".into(), model.to_owned().into());
        let mut figures = Self {
            registry: Registry::with_labels(std::iter::once(label)),
            waiting: Gauge::default(),
            running: Gauge::default(),
            cache: Share::default(),
            first: Histogram::new(FIRST),
            between: Histogram::new(BETWEEN),
            whole: Histogram::new(WHOLE),
            queued: Histogram::new(WHOLE),
            prefill: Histogram::new(WHOLE),
            decode: Histogram::new(WHOLE),
            prompt_lengths: Histogram::new(TOKENS),
            lengths: Histogram::new(TOKENS),
            longest: Histogram::new(TOKENS),
            prompt: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            generated: Counter::default(),
            drafts: Counter::default(),
            drafted: Counter::default(),
            accepted: Counter::default(),
            draft: DraftFigures::default(),
            success: Family::default(),
            tenants,
        };
        figures.register();
        figures.draft.register(&mut figures.registry);
        figures.tenants.register(&mut figures.registry);
        figures
    }

    /// The same with those of a search that tunes the server, if there is one.
    pub(super) fn with_tuning(mut self, tuning: Option<&TuneFigures>) -> Self {
        tuning.into_iter().for_each(|tuning| tuning.register(&mut self.registry));
        self
    }

    /// The names. Of two for one metric, the second is that of older versions of vLLM.
    fn register(&mut self) {
        let registry = &mut self.registry;
        let mut add = |name: &str, help: &str, metric: Box<dyn Add>| {
            metric.add(registry, &format!("vllm:{name}"), help);
        };
        add(
            "num_requests_waiting",
            "Sequences that wait for a place",
            Box::new(self.waiting.clone()),
        );
        add("num_requests_running", "Sequences in a place", Box::new(self.running.clone()));
        for name in ["kv_cache_usage_perc", "gpu_cache_usage_perc"] {
            add(name, "Used part of the KV cache; 1 is all", Box::new(self.cache.clone()));
        }
        add(
            "time_to_first_token_seconds",
            "From a request to its first token",
            Box::new(self.first.clone()),
        );
        for name in ["inter_token_latency_seconds", "time_per_output_token_seconds"] {
            add(name, "Between two tokens of a sequence", Box::new(self.between.clone()));
        }
        add(
            "e2e_request_latency_seconds",
            "From a request to its end",
            Box::new(self.whole.clone()),
        );
        for (name, help, histogram) in [
            ("request_queue_time_seconds", "From a request to its place", &self.queued),
            ("request_prefill_time_seconds", "From its place to its first token", &self.prefill),
            ("request_decode_time_seconds", "From its first token to its end", &self.decode),
            ("request_prompt_tokens", "Tokens of the prompt of a sequence", &self.prompt_lengths),
            ("request_generation_tokens", "Generated tokens of a sequence", &self.lengths),
            (
                "request_max_num_generation_tokens",
                "Generated tokens of the longest sequence of a request",
                &self.longest,
            ),
        ] {
            add(name, help, Box::new(histogram.clone()));
        }
        add("prompt_tokens", "Tokens of prompts", Box::new(self.prompt.clone()));
        let queries = Box::new(self.prefix_queries.clone());
        add("prefix_cache_queries", "Tokens of prompts that were looked for in the cache", queries);
        let hits = Box::new(self.prefix_hits.clone());
        add("prefix_cache_hits", "Those of them that were there", hits);
        add("generation_tokens", "Generated tokens", Box::new(self.generated.clone()));
        let drafts = Box::new(self.drafts.clone());
        add("spec_decode_num_drafts", "Steps of a sequence that checked guessed tokens", drafts);
        let drafted = Box::new(self.drafted.clone());
        add("spec_decode_num_draft_tokens", "Tokens guessed for them", drafted);
        let accepted = Box::new(self.accepted.clone());
        add("spec_decode_num_accepted_tokens", "Guessed tokens that were right", accepted);
        add("request_success", "Sequences ended, by reason", Box::new(self.success.clone()));
    }

    pub(super) fn prompt(&self, tokens: usize) {
        self.prompt.inc_by(tokens as u64);
    }

    /// The cache was asked for the tokens of a sequence's prompt.
    pub(super) fn queried(&self, tokens: usize) {
        self.prefix_queries.inc_by(tokens as u64);
    }

    /// It had these.
    pub(super) fn reused(&self, tokens: usize) {
        self.prefix_hits.inc_by(tokens as u64);
    }

    pub(super) fn first(&self, took: Duration) {
        self.first.observe(took.as_secs_f64());
    }

    pub(super) fn token(&self) {
        self.generated.inc();
    }

    /// This many tokens of a sequence came together, this long after the one before them.
    pub(super) fn between(&self, tokens: usize, after: Duration) {
        for _ in 0..tokens {
            self.between.observe(after.as_secs_f64() / tokens as f64);
        }
    }

    /// A sequence of a request that began this long ago has ended: `stop`, `length` or `abort`.
    pub(super) fn ended(&self, reason: &'static str, took: Duration, ran: &Ran) {
        self.success.get_or_create(&[("finished_reason", reason)]).inc();
        if reason == "abort" {
            return;
        }
        self.prompt_lengths.observe(ran.prompt as f64);
        self.lengths.observe(ran.tokens as f64);
        for (histogram, took) in [
            (&self.whole, Some(took)),
            (&self.queued, ran.queued),
            (&self.prefill, ran.prefill),
            (&self.decode, ran.decode),
        ] {
            took.iter().for_each(|took| histogram.observe(took.as_secs_f64()));
        }
    }

    /// All sequences of a request have ended; the longest has this many tokens.
    pub(super) fn longest(&self, tokens: usize) {
        self.longest.observe(tokens as f64);
    }

    /// All metrics as text, in the OpenMetrics format or in Prometheus's older one.
    pub(super) fn text(&self, page: Box<Page>, openmetrics: bool) -> String {
        self.waiting.set(page.head.waiting.into());
        self.running.set(page.open().count() as i64);
        self.cache.set(used(&page));
        let head = &page.head;
        for (counter, counted) in [
            (&self.drafts, head.windows),
            (&self.drafted, head.guessed),
            (&self.accepted, head.accepted),
        ] {
            counter.inner().store(counted, Ordering::Relaxed);
        }
        self.tenants.update();
        let own = telemetry::openmetrics(page);
        let mut text = own.trim_end().trim_end_matches("# EOF").to_owned();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        if openmetrics { text } else { classic(&text) }
    }
}

/// The used part of the KV cache, from 0 to 1.
fn used(page: &Page) -> f64 {
    let head = &page.head;
    if head.kv_pages > 0 {
        return f64::from(head.kv_held) / f64::from(head.kv_pages);
    }
    // On the CPU each place has a cache of its own.
    let all = f64::from(head.places) * f64::from(head.capacity);
    let held: u64 = page.open().map(|(_, session)| session.positions).sum();
    if all > 0.0 { (held as f64 / all).min(1.0) } else { 0.0 }
}

/// A metric that can be registered under a name.
trait Add {
    fn add(self: Box<Self>, registry: &mut Registry, name: &str, help: &str);
}

impl<M: prometheus_client::registry::Metric> Add for M {
    fn add(self: Box<Self>, registry: &mut Registry, name: &str, help: &str) {
        registry.register(name, help, *self);
    }
}

/// OpenMetrics text in the older format, which names the type of a counter's samples and knows neither units nor infos.
fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let line = match line.strip_prefix("# ") {
            Some(comment) => match comment.split_once(' ') {
                Some(("HELP", _)) => line.to_owned(),
                Some(("TYPE", rest)) => match rest.rsplit_once(' ') {
                    Some((name, "counter")) => format!("# TYPE {name}_total counter"),
                    Some((name, "info")) => format!("# TYPE {name}_info gauge"),
                    _ => line.to_owned(),
                },
                _ => continue,
            },
            None => line.to_owned(),
        };
        let _ = writeln!(out, "{line}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_those_of_vllm() {
        let figures = Figures::new("a model", Arc::default());
        figures.prompt(5);
        figures.queried(300);
        figures.reused(256);
        figures.first(Duration::from_millis(2));
        figures.token();
        figures.between(4, Duration::from_micros(1900));
        let ms = Duration::from_millis;
        let (queued, prefill, decode) = (Some(ms(7)), Some(ms(40)), Some(ms(200)));
        let ran = Ran { prompt: 5, tokens: 30, queued, prefill, decode };
        figures.ended("stop", ms(200), &ran);
        figures.ended("abort", ms(200), &Ran::default());
        figures.longest(30);
        let mut page = Page::boxed();
        (page.head.places, page.head.capacity, page.head.waiting) = (2, 50, 7);
        (page.head.windows, page.head.guessed, page.head.accepted) = (3, 12, 8);
        (page.sessions[1].serial, page.sessions[1].positions) = (9, 25);
        let text = figures.text(page.clone(), true);
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
        assert!(text.contains("\n# TYPE amk_tokens counter\n"), "{text}");
        for sample in [
            "num_requests_waiting{model_name=\"a model\"} 7",
            "num_requests_running{model_name=\"a model\"} 1",
            "kv_cache_usage_perc{model_name=\"a model\"} 0.25",
            "gpu_cache_usage_perc{model_name=\"a model\"} 0.25",
            "time_to_first_token_seconds_bucket{model_name=\"a model\",le=\"0.005\"} 1",
            "inter_token_latency_seconds_bucket{model_name=\"a model\",le=\"0.0005\"} 4",
            "time_per_output_token_seconds_count{model_name=\"a model\"} 4",
            "e2e_request_latency_seconds_count{model_name=\"a model\"} 1",
            "request_queue_time_seconds_bucket{model_name=\"a model\",le=\"0.01\"} 1",
            "request_prefill_time_seconds_bucket{model_name=\"a model\",le=\"0.01\"} 0",
            "request_prefill_time_seconds_bucket{model_name=\"a model\",le=\"0.05\"} 1",
            "request_decode_time_seconds_count{model_name=\"a model\"} 1",
            "request_prompt_tokens_sum{model_name=\"a model\"} 5.0",
            "request_generation_tokens_sum{model_name=\"a model\"} 30.0",
            "request_max_num_generation_tokens_count{model_name=\"a model\"} 1",
            "prompt_tokens_total{model_name=\"a model\"} 5",
            "prefix_cache_queries_total{model_name=\"a model\"} 300",
            "prefix_cache_hits_total{model_name=\"a model\"} 256",
            "generation_tokens_total{model_name=\"a model\"} 1",
            "spec_decode_num_drafts_total{model_name=\"a model\"} 3",
            "spec_decode_num_draft_tokens_total{model_name=\"a model\"} 12",
            "spec_decode_num_accepted_tokens_total{model_name=\"a model\"} 8",
            "request_success_total{model_name=\"a model\",finished_reason=\"stop\"} 1",
            "request_success_total{model_name=\"a model\",finished_reason=\"abort\"} 1",
        ] {
            assert!(text.contains(&format!("\nvllm:{sample}\n")), "{sample}:\n{text}");
        }
        let text = figures.text(page, false);
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
        assert!(text.contains("\n# TYPE vllm:prompt_tokens_total counter\n"), "{text}");
        assert!(text.contains("\n# TYPE vllm:num_requests_waiting gauge\n"), "{text}");
    }
}
