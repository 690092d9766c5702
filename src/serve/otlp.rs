//! OpenTelemetry: a span for each request, and the metrics of `/metrics`, sent by OTLP over HTTP to the collector that the
//! environment names. A thread of its own sends them, so that no request waits for a collector; what that cannot take is dropped.

mod metrics;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, InstrumentationScope, KeyValue, any_value::Value,
};
use opentelemetry_proto::tonic::metrics::v1::{ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;

use crate::failure::Failure;
use crate::report;

/// The collector's address, to which each signal adds its path. Without it nothing is sent.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Spans that wait to be sent, at most, and those of one message.
const QUEUE: usize = 2048;
const BATCH: usize = 512;
/// How long the end of the process waits for the last message.
const LAST: Duration = Duration::from_secs(1);

/// Takes the spans of requests.
#[derive(Clone, Debug)]
pub(super) struct Spans {
    queue: SyncSender<Span>,
    dropped: Arc<AtomicU64>,
}

impl Spans {
    fn new() -> (Self, Receiver<Span>) {
        let (queue, spans) = sync_channel(QUEUE);
        (Self { queue, dropped: Arc::default() }, spans)
    }

    /// Queues a span, or drops it if the queue is full.
    pub(super) fn send(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The metrics as OpenMetrics text, and when they began, in nanoseconds since 1970.
type Figures = Box<dyn Fn() -> Option<(String, u64)> + Send>;

/// The thread that sends.
pub(super) struct Exporter(Receiver<()>);

impl Exporter {
    /// Starts it if the environment names a collector.
    pub(super) fn start(figures: Figures) -> Result<Option<(Self, Spans)>, Failure> {
        let Some(collector) = Collector::of(&|name| std::env::var(name).ok())? else {
            return Ok(None);
        };
        let (spans, queue) = Spans::new();
        let dropped = spans.dropped.clone();
        let (over, ended) = channel();
        let run = move || {
            collector.run(&queue, &dropped, &figures);
            let _ = over.send(()); // the process may have stopped waiting
        };
        let thread = std::thread::Builder::new().name("otlp".to_owned()).spawn(run);
        thread.map_err(|error| Failure::usage(format!("no thread: {error}")))?;
        Ok(Some((Self(ended), spans)))
    }

    /// Waits until the last message is sent, not for long. Every [`Spans`] must have been dropped.
    pub(super) fn finish(self) {
        let _ = self.0.recv_timeout(LAST); // it is late: what it has is dropped
    }
}

/// Where to send, and how often.
#[derive(Debug)]
struct Collector {
    agent: ureq::Agent,
    base: String,
    headers: Vec<(String, String)>,
    spans_every: Duration,
    metrics_every: Duration,
    resource: Resource,
    failing: Cell<bool>,
}

impl Collector {
    /// By OpenTelemetry's variables.
    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, Failure> {
        let set = |name: &str| variable(name).filter(|text| !text.trim().is_empty());
        let Some(base) = set(ENDPOINT) else { return Ok(None) };
        let base = base.trim().trim_end_matches('/').to_owned();
        if !["http://", "https://"].iter().any(|scheme| base.starts_with(scheme)) {
            let message = format!(
                "{ENDPOINT} {base:?} is no address; give http://HOST:4318, or leave it out"
            );
            return Err(Failure::usage(message));
        }
        let protocol = set("OTEL_EXPORTER_OTLP_PROTOCOL");
        if let Some(other) = protocol.filter(|protocol| protocol != "http/protobuf") {
            let message = format!(
                "OTEL_EXPORTER_OTLP_PROTOCOL {other:?} is not supported; give http/protobuf, or leave it out"
            );
            return Err(Failure::usage(message));
        }
        let millis = |name: &str, otherwise: u64| {
            let Some(text) = set(name) else { return Ok(Duration::from_millis(otherwise)) };
            let millis = text.trim().parse().ok().filter(|millis| *millis > 0);
            millis.map(Duration::from_millis).ok_or_else(|| {
                Failure::usage(format!("{name} {text:?} is no number of milliseconds above zero"))
            })
        };
        let timeout = millis("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000)?;
        let config = ureq::Agent::config_builder().timeout_global(Some(timeout));
        Ok(Some(Self {
            agent: config.max_redirects(0).build().into(),
            base,
            headers: pairs("OTEL_EXPORTER_OTLP_HEADERS", set("OTEL_EXPORTER_OTLP_HEADERS"))?,
            spans_every: millis("OTEL_BSP_SCHEDULE_DELAY", 5_000)?,
            metrics_every: millis("OTEL_METRIC_EXPORT_INTERVAL", 60_000)?,
            resource: resource(&set)?,
            failing: Cell::new(false),
        }))
    }

    /// Sends until every sender is dropped, and then what is left.
    fn run(&self, queue: &Receiver<Span>, dropped: &AtomicU64, figures: &Figures) {
        let mut spans = Vec::new();
        let began = Instant::now();
        let (mut next_spans, mut next_metrics) =
            (began + self.spans_every, began + self.metrics_every);
        let mut over = false;
        while !over {
            let wait = next_spans.min(next_metrics).saturating_duration_since(Instant::now());
            match queue.recv_timeout(wait) {
                Ok(span) => spans.push(span),
                Err(why) => over = why == RecvTimeoutError::Disconnected,
            }
            let now = Instant::now();
            if over || now >= next_spans || spans.len() >= BATCH {
                self.send_spans(std::mem::take(&mut spans), dropped);
                next_spans = Instant::now() + self.spans_every;
            }
            if over || now >= next_metrics {
                self.send_metrics(figures);
                next_metrics = Instant::now() + self.metrics_every;
            }
        }
    }

    fn send_spans(&self, spans: Vec<Span>, dropped: &AtomicU64) {
        if spans.is_empty() {
            return;
        }
        let count = spans.len() as u64;
        let scope_spans = vec![ScopeSpans { scope: scope(), spans, ..ScopeSpans::default() }];
        let of = ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans,
            ..ResourceSpans::default()
        };
        let request = ExportTraceServiceRequest { resource_spans: vec![of] };
        if !self.post("traces", &request.encode_to_vec()) {
            dropped.fetch_add(count, Ordering::Relaxed);
            return;
        }
        let lost = dropped.swap(0, Ordering::Relaxed);
        if lost > 0 {
            report::say(&format!("note: {lost} spans were dropped while {} failed", self.base));
        }
    }

    /// A message that fails is not sent again: the next one has the same sums, and more.
    fn send_metrics(&self, figures: &Figures) {
        let Some((text, began_ns)) = figures() else { return };
        let metrics = metrics::of_text(&text, began_ns, telemetry::now_ns());
        let scope_metrics =
            vec![ScopeMetrics { scope: scope(), metrics, ..ScopeMetrics::default() }];
        let of = ResourceMetrics {
            resource: Some(self.resource.clone()),
            scope_metrics,
            ..ResourceMetrics::default()
        };
        let request = ExportMetricsServiceRequest { resource_metrics: vec![of] };
        self.post("metrics", &request.encode_to_vec());
    }

    /// Whether a message arrived. The first failure after a success is reported, and the first success after it.
    fn post(&self, signal: &str, message: &[u8]) -> bool {
        let url = format!("{}/v1/{signal}", self.base);
        let mut request = self.agent.post(&url).header("content-type", "application/x-protobuf");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let sent = request.send(message);
        match &sent {
            Err(error) if !self.failing.get() => {
                report::say(&format!(
                    "note: {url} takes no {signal} ({error}); is {ENDPOINT} right?"
                ));
            }
            Ok(_) if self.failing.get() => {
                report::say(&format!("note: {url} takes {signal} again"))
            }
            Ok(_) | Err(_) => {}
        }
        self.failing.set(sent.is_err());
        sent.is_ok()
    }
}

/// Who sends.
fn resource(set: &dyn Fn(&str) -> Option<String>) -> Result<Resource, Failure> {
    const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
    let given = pairs(ATTRIBUTES, set(ATTRIBUTES))?;
    let service = set("OTEL_SERVICE_NAME").or_else(|| {
        given.iter().find(|(key, _)| key == "service.name").map(|(_, value)| value.clone())
    });
    let mut attributes: Vec<KeyValue> = given
        .into_iter()
        .filter(|(key, _)| key != "service.name")
        .map(|(key, value)| attribute(&key, Value::StringValue(value)))
        .collect();
    let service = service.unwrap_or_else(|| "amk".to_owned());
    attributes.push(attribute("service.name", Value::StringValue(service)));
    let version = env!("CARGO_PKG_VERSION").to_owned();
    attributes.push(attribute("service.version", Value::StringValue(version)));
    let pid = i64::from(std::process::id());
    attributes.push(attribute("process.pid", Value::IntValue(pid)));
    Ok(Resource { attributes, ..Resource::default() })
}

/// A list `KEY=VALUE,...`.
fn pairs(name: &str, list: Option<String>) -> Result<Vec<(String, String)>, Failure> {
    let list = list.unwrap_or_default();
    let entries = list.split(',').filter(|entry| !entry.trim().is_empty());
    let pair = |entry: &str| {
        let (key, value) = entry.split_once('=').filter(|(key, _)| !key.trim().is_empty())?;
        Some((key.trim().to_owned(), value.trim().to_owned()))
    };
    // The entry may be a secret, so the message does not repeat it.
    let failed = || Failure::usage(format!("{name} has an entry that is not KEY=VALUE"));
    entries.map(|entry| pair(entry).ok_or_else(failed)).collect()
}

fn scope() -> Option<InstrumentationScope> {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Some(InstrumentationScope {
        name: "amk".to_owned(),
        version,
        ..InstrumentationScope::default()
    })
}

/// An attribute of a span, a sample or the process.
pub(super) fn attribute(key: &str, value: Value) -> KeyValue {
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collector(variables: &[(&str, &str)]) -> Result<Option<Collector>, Failure> {
        Collector::of(&|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_environment_names_the_collector() {
        assert!(
            collector(&[]).unwrap().is_none() && collector(&[(ENDPOINT, " ")]).unwrap().is_none()
        );
        let found = collector(&[
            (ENDPOINT, "http://127.0.0.1:4318/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer a=b, x=1"),
            ("OTEL_BSP_SCHEDULE_DELAY", "70"),
        ]);
        let found = found.unwrap().unwrap();
        assert_eq!(found.base, "http://127.0.0.1:4318");
        let headers = [("authorization", "Bearer a=b"), ("x", "1")];
        assert_eq!(found.headers, headers.map(|(key, value)| (key.to_owned(), value.to_owned())));
        assert_eq!(found.spans_every, Duration::from_millis(70));
        assert_eq!(found.metrics_every, Duration::from_secs(60));
        for (name, value) in [
            (ENDPOINT, "localhost:4318"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "1s"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
        ] {
            let refused = collector(&[(name, value), (ENDPOINT, "http://a")]).unwrap_err();
            assert!(refused.message.contains(name), "{}", refused.message);
            assert!(!refused.message.contains("secret"), "{}", refused.message);
        }
    }

    #[test]
    fn a_full_queue_drops_spans_and_waits_for_nobody() {
        let (spans, queue) = Spans::new();
        (0..QUEUE + 7).for_each(|_| spans.send(Span::default()));
        assert_eq!(spans.dropped.load(Ordering::Relaxed), 7);
        assert_eq!(queue.try_iter().count(), QUEUE);
    }
}
