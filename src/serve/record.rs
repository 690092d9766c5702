//! What is known of each HTTP request: its id, which every answer names, and the line that is logged when it ends.

use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;

use super::refusal::Why;
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

/// A request. Its line is logged when the last reference is dropped: after the answer, or when the client has gone.
#[derive(Debug)]
pub(super) struct Record {
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
    pub(super) fn new(request: &Request) -> Self {
        let path = request.uri().path();
        Self {
            id: given(request.headers())
                .unwrap_or_else(|| format!("req_{:016x}", super::fresh_seed())),
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
pub(super) async fn recorded(mut request: Request, next: Next) -> Response {
    let record = Arc::new(Record::new(&request));
    request.extensions_mut().insert(record.clone());
    let mut response = next.run(request).await;
    record.status.store(response.status().as_u16(), Ordering::Relaxed);
    if let Some(Why(why)) = response.extensions_mut().remove() {
        let _ = record.refused.set(why.chars().take(REASON_MAX).collect());
    }
    if let Ok(id) = HeaderValue::from_str(&record.id) {
        if record.path == "/v1/messages" {
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
        Record::new(&request.header(ID, id).body(Body::empty()).unwrap())
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
