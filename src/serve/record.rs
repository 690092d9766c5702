//! What is known of each HTTP request: its id, which every answer names, and the line and the span that say how it ended.

use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{Span, Status, span, status};

use super::otlp::{Spans, attribute};
use super::refusal::Why;
use super::{Served, fresh_seed};
use crate::report;

/// The header of the id, as proxies and OpenAI's clients name it.
const ID: &str = "x-request-id";
/// The same for Anthropic's clients.
const ID_OF_MESSAGES: &str = "request-id";
const ID_MAX: usize = 128;
/// The most characters of a path in the log.
const PATH_MAX: usize = 80;
/// The most characters of a reason in the log.
const REASON_MAX: usize = 240;
/// A duration that is not known yet.
const UNKNOWN: u64 = u64::MAX;

/// The place of a request in a trace: that of the client's header `traceparent`, or a new one.
#[derive(Debug)]
struct Trace {
    id: [u8; 16],
    parent: Vec<u8>,
    spans: Spans,
}

impl Trace {
    /// None if the client does not want its trace recorded.
    fn new(headers: &HeaderMap, spans: &Spans) -> Option<Self> {
        let spans = spans.clone();
        let given = headers.get("traceparent").and_then(|value| value.to_str().ok());
        let Some((id, parent, sampled)) = given.and_then(parent_of) else {
            let id = (u128::from(fresh_seed()) << 64 | u128::from(fresh_seed())).to_be_bytes();
            return Some(Self { id, parent: Vec::new(), spans });
        };
        sampled.then(|| Self { id: id.to_be_bytes(), parent: parent.to_be_bytes().to_vec(), spans })
    }
}

/// Trace, span and whether it is recorded, of `00-TRACE-SPAN-FLAGS`.
fn parent_of(header: &str) -> Option<(u128, u64, bool)> {
    let mut parts = header.split('-');
    let mut part = |digits: usize| {
        let hex = |part: &&str| part.len() == digits && part.bytes().all(|b| b.is_ascii_hexdigit());
        parts.next().filter(hex)
    };
    let (version, id, parent, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    let id = u128::from_str_radix(id, 16).ok().filter(|id| *id != 0 && version != "ff")?;
    let parent = u64::from_str_radix(parent, 16).ok().filter(|parent| *parent != 0)?;
    Some((id, parent, u8::from_str_radix(flags, 16).ok()? & 1 == 1))
}

/// A request. Its line is logged when the last reference is dropped: after the answer, or when the client has gone.
#[derive(Debug)]
pub(super) struct Record {
    trace: Option<Trace>,
    id: String,
    method: Method,
    path: String,
    began: Instant,
    arrived_ns: u64,
    status: AtomicU16,
    refused: OnceLock<String>,
    prompt: AtomicUsize,
    cached: AtomicUsize,
    tokens: AtomicUsize,
    first_us: AtomicU64,
}

impl Record {
    pub(super) fn new(request: &Request, spans: Option<&Spans>) -> Self {
        let path = request.uri().path();
        Self {
            trace: spans.and_then(|spans| Trace::new(request.headers(), spans)),
            id: given(request.headers()).unwrap_or_else(|| format!("req_{:016x}", fresh_seed())),
            method: request.method().clone(),
            path: path.chars().take(PATH_MAX).collect(),
            began: Instant::now(),
            arrived_ns: telemetry::now_ns(),
            status: AtomicU16::new(0),
            refused: OnceLock::new(),
            prompt: AtomicUsize::new(0),
            cached: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            first_us: AtomicU64::new(UNKNOWN),
        }
    }

    pub(super) fn prompt(&self, tokens: usize) {
        self.prompt.store(tokens, Ordering::Relaxed);
    }

    /// These tokens of the prompt were in the cache.
    pub(super) fn cached(&self, tokens: usize) {
        self.cached.fetch_add(tokens, Ordering::Relaxed);
    }

    /// A token has come. Returns the time since the request, if it is the first.
    pub(super) fn token(&self) -> Option<Duration> {
        let first = self.tokens.fetch_add(1, Ordering::Relaxed) == 0;
        let took = self.began.elapsed();
        if first {
            let us = u64::try_from(took.as_micros()).unwrap_or(UNKNOWN);
            self.first_us.store(us, Ordering::Relaxed);
        }
        first.then_some(took)
    }

    /// When it arrived, in nanoseconds since 1970.
    pub(super) fn arrived_ns(&self) -> u64 {
        self.arrived_ns
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    fn line(&self) -> String {
        let status = match self.status.load(Ordering::Relaxed) {
            // The client left before there was an answer.
            0 => "-".to_owned(),
            status => status.to_string(),
        };
        let first = match self.first_us.load(Ordering::Relaxed) {
            UNKNOWN => "-".to_owned(),
            us => format!("{:.1}", us as f64 / 1e3),
        };
        // Quoted: it repeats parts of the body.
        let why = self.refused.get().map(|why| format!(" refused={why:?}")).unwrap_or_default();
        format!(
            "{} {} {status} prompt_tokens={} cached={} tokens={} first_ms={first} ms={:.1} id={}{why}",
            self.method,
            self.path,
            self.prompt.load(Ordering::Relaxed),
            self.cached.load(Ordering::Relaxed),
            self.tokens.load(Ordering::Relaxed),
            self.began.elapsed().as_secs_f64() * 1e3,
            self.id,
        )
    }

    /// The request as a span, with the names of OpenTelemetry's conventions.
    fn span(&self, trace: &Trace) -> Span {
        let status = self.status.load(Ordering::Relaxed);
        let text = |key, text: &str| attribute(key, Value::StringValue(text.to_owned()));
        let number = |key, number: usize| attribute(key, Value::IntValue(number as i64));
        let counted = |key, counter: &AtomicUsize| number(key, counter.load(Ordering::Relaxed));
        let mut attributes: Vec<KeyValue> = vec![
            text("http.request.method", self.method.as_str()),
            text("url.path", &self.path),
            text("http.request.header.x-request-id", &self.id),
            counted("gen_ai.usage.input_tokens", &self.prompt),
            counted("gen_ai.usage.cache_read.input_tokens", &self.cached),
            counted("gen_ai.usage.output_tokens", &self.tokens),
        ];
        // Without a status the client left before there was an answer.
        attributes.extend((status > 0).then(|| number("http.response.status_code", status.into())));
        let first = self.first_us.load(Ordering::Relaxed);
        let first = (first != UNKNOWN).then(|| span::Event {
            time_unix_nano: self.arrived_ns.saturating_add(first.saturating_mul(1000)),
            name: "first token".to_owned(),
            ..span::Event::default()
        });
        let took = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(UNKNOWN);
        let code =
            if status >= 500 { status::StatusCode::Error } else { status::StatusCode::Unset };
        let message = self.refused.get().cloned().unwrap_or_default();
        // A path that there is not may be any text, and names are to be few.
        let name = match status {
            404 => self.method.to_string(),
            _ => format!("{} {}", self.method, self.path),
        };
        Span {
            trace_id: trace.id.to_vec(),
            span_id: (fresh_seed() | 1).to_be_bytes().to_vec(),
            parent_span_id: trace.parent.clone(),
            flags: 1,
            name,
            kind: span::SpanKind::Server as i32,
            start_time_unix_nano: self.arrived_ns,
            end_time_unix_nano: self.arrived_ns.saturating_add(took),
            attributes,
            events: first.into_iter().collect(),
            status: Some(Status { message, code: code as i32 }),
            ..Span::default()
        }
    }

    /// Whether the request is a probe of a monitor that succeeded: those are not logged.
    fn is_probe(&self) -> bool {
        let probes = ["/", "/health", "/ready", "/metrics"];
        self.status.load(Ordering::Relaxed) == 200 && probes.contains(&self.path.as_str())
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.is_probe() {
            report::say(&self.line());
            self.trace.iter().for_each(|trace| trace.spans.send(self.span(trace)));
        }
    }
}

/// The client's id, if it is short and plain.
fn given(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(ID)?.to_str().ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    (!id.is_empty() && id.len() <= ID_MAX && id.chars().all(plain)).then(|| id.to_owned())
}

/// Records a request and names its id in the answer.
pub(super) async fn recorded(
    State(served): State<Arc<Served>>,
    mut request: Request,
    next: Next,
) -> Response {
    let record = Arc::new(Record::new(&request, served.spans.as_ref()));
    request.extensions_mut().insert(record.clone());
    let mut response = next.run(request).await;
    record.status.store(response.status().as_u16(), Ordering::Relaxed);
    if let Some(Why(why)) = response.extensions_mut().remove() {
        let _ = record.refused.set(why.chars().take(REASON_MAX).collect());
    }
    if let Ok(id) = HeaderValue::from_str(&record.id) {
        if record.path.starts_with("/v1/messages") {
            response.headers_mut().insert(ID_OF_MESSAGES, id.clone());
        }
        response.headers_mut().insert(ID, id);
    }
    response
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn record(id: &str) -> Record {
        let request = axum::http::Request::post("/v1/completions?key=secret");
        Record::new(&request.header(ID, id).body(Body::empty()).unwrap(), None)
    }

    #[test]
    fn the_parent_is_that_of_a_well_formed_header() {
        let (id, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let of = |flags: &str| parent_of(&format!("00-{id}-{parent}-{flags}"));
        let known = (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, 0xb7ad_6b71_6920_3331);
        assert_eq!(of("01"), Some((known.0, known.1, true)));
        assert_eq!(of("02"), Some((known.0, known.1, false)));
        assert_eq!(parent_of(&format!("cc-{id}-{parent}-01-more")), of("01"), "a later version");
        for wrong in [
            String::new(),
            format!("ff-{id}-{parent}-01"),
            format!("00-{}-{parent}-01", "0".repeat(32)),
            format!("00-{id}-{}-01", "0".repeat(16)),
            format!("00-+{}-{parent}-01", &id[1..]),
            format!("00-{id}-{parent}"),
        ] {
            assert_eq!(parent_of(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn ids_of_clients_are_taken_if_they_are_plain() {
        assert_eq!(record("a-1_2.x:y").id, "a-1_2.x:y");
        for odd in ["", "two words", "\"", &"x".repeat(ID_MAX + 1)] {
            assert!(record(odd).id.starts_with("req_"), "{odd}");
        }
        assert_ne!(record("").id, record("").id);
    }

    #[test]
    fn a_line_has_the_counts_and_no_query() {
        let record = record("a");
        assert!(record.line().starts_with(
            "POST /v1/completions - prompt_tokens=0 cached=0 tokens=0 first_ms=- ms="
        ));
        record.prompt(3);
        record.cached(2);
        record.status.store(200, Ordering::Relaxed);
        assert!(record.token().is_some());
        assert!(record.token().is_none(), "only the first is timed");
        let line = record.line();
        assert!(
            line.starts_with(
                "POST /v1/completions 200 prompt_tokens=3 cached=2 tokens=2 first_ms="
            ),
            "{line}"
        );
        assert!(line.ends_with(" id=a"), "{line}");
        record.refused.set("`x\n` is no field".to_owned()).unwrap();
        assert!(record.line().ends_with(" id=a refused=\"`x\\n` is no field\""));
    }
}
