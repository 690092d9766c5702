//! A streamed request to a server's /v1/completions, timed event by event. Connections are kept and used again.

use std::cell::RefCell;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::failure::Failure;

/// The longest line of a stream, and the longest error document, in bytes.
const LINE_MAX: usize = 1 << 20;
/// The most characters of a server's message that are repeated.
const MESSAGE_MAX: usize = 160;

/// Where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// `HOST:PORT`.
    pub(super) authority: String,
    /// The path before `/v1`.
    base: String,
}

impl Address {
    /// Reads `http://HOST[:PORT][/PATH][/v1]`.
    pub(super) fn read(url: &str) -> Result<Self, Failure> {
        let bad = || {
            let what = "legal: http://HOST:PORT, with a path in front of /v1 if there is one; there is no TLS";
            Failure::usage(format!("--serve {url:?} is no address of a server; {what}"))
        };
        let rest = url.strip_prefix("http://").ok_or_else(bad)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || authority.contains('@') || !plain(rest) {
            return Err(bad());
        }
        let port = authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        let authority = match port {
            Some(_) => authority.to_owned(),
            None if authority.ends_with(']') || !authority.contains(':') => {
                format!("{authority}:80")
            }
            None => return Err(bad()),
        };
        let path = path.trim_end_matches('/');
        let base = path.strip_suffix("v1").unwrap_or(path).trim_end_matches('/');
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        Ok(Self { authority, base })
    }
}

/// What came of a request, from when it was due.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answered {
    /// From the due time to the first text.
    pub(super) first: Option<Duration>,
    /// Between two events with text.
    pub(super) gaps: Vec<Duration>,
    /// From the due time to the end of the stream.
    pub(super) whole: Duration,
    /// Tokens, as the server counts them; without a count, events.
    pub(super) tokens: u64,
    pub(super) prompt: u64,
}

impl Answered {
    /// The mean time between two tokens after the first.
    pub(super) fn per_token(&self) -> Option<Duration> {
        let rest = u32::try_from(self.tokens.checked_sub(1)?).ok().filter(|rest| *rest > 0)?;
        Some(self.whole.saturating_sub(self.first?) / rest)
    }
}

/// A client of one server.
pub(super) struct Client {
    address: Address,
    key: Option<String>,
    idle: RefCell<Vec<SendRequest<Body>>>,
}

impl Client {
    pub(super) fn new(address: Address, key: Option<String>) -> Self {
        Self { address, key, idle: RefCell::default() }
    }

    /// The first name that the server has for its model.
    pub(super) async fn model(&self, deadline: Instant) -> Result<String, String> {
        let (response, _sender) = self.send("/v1/models", None, deadline).await?;
        let document = read(response, deadline).await?;
        let document: Value = serde_json::from_slice(&document).map_err(|why| why.to_string())?;
        let name = document["data"][0]["id"].as_str();
        name.map(str::to_owned).ok_or_else(|| "/v1/models names no model".to_owned())
    }

    /// Sends a completion and reads its stream. Times count from `due`.
    pub(super) async fn complete(
        &self,
        body: &Value,
        due: Instant,
        deadline: Instant,
    ) -> Result<Answered, String> {
        let sent = self.send("/v1/completions", Some(body), deadline).await?;
        let (response, sender) = sent;
        let mut answer = Answered::default();
        let mut stream = Stream::default();
        let mut pieces = Body::new(response.into_body()).into_data_stream();
        let mut last = None;
        while !stream.done {
            let piece = timeout_at(deadline, pieces.next()).await.map_err(|_| late())?;
            let piece = piece.ok_or("the stream ended without [DONE]")?;
            let piece = piece.map_err(|error| format!("the stream broke off: {error}"))?;
            let now = Instant::now();
            for _ in 0..stream.push(&piece)? {
                match last.replace(now) {
                    None => answer.first = Some(now - due),
                    Some(before) => answer.gaps.push(now - before),
                }
            }
        }
        answer.whole = due.elapsed();
        let counted = answer.gaps.len() as u64 + u64::from(answer.first.is_some());
        answer.tokens = stream.tokens.unwrap_or(counted);
        answer.prompt = stream.prompt.unwrap_or(0);
        // The end of the chunked body, so that the connection can be used again.
        let rest = timeout_at(deadline, pieces.next()).await.map_err(|_| late())?;
        if rest.is_none() {
            self.idle.borrow_mut().push(sender);
        }
        Ok(answer)
    }

    /// Sends a request and returns the head of a successful answer.
    async fn send(
        &self,
        path: &str,
        body: Option<&Value>,
        deadline: Instant,
    ) -> Result<(Response<Incoming>, SendRequest<Body>), String> {
        let mut kept = self.idle.borrow_mut().pop();
        loop {
            let old = kept.take().filter(|sender| !sender.is_closed());
            let was_kept = old.is_some();
            let mut sender = match old {
                Some(sender) => sender,
                None => timeout_at(deadline, self.connect()).await.map_err(|_| late())??,
            };
            let answered = timeout_at(deadline, async {
                sender.ready().await?;
                sender.send_request(self.request(path, body)).await
            });
            match answered.await.map_err(|_| late())? {
                Ok(response) if response.status() == StatusCode::OK => {
                    return Ok((response, sender));
                }
                Ok(response) => return Err(refusal(response, deadline).await),
                // The server may have closed a kept connection just now.
                Err(error) if was_kept && error.is_canceled() => {}
                Err(error) => return Err(format!("no answer: {error}")),
            }
        }
    }

    fn request(&self, path: &str, body: Option<&Value>) -> Request<Body> {
        let method = if body.is_some() { "POST" } else { "GET" };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.address.base))
            .header(header::HOST, &self.address.authority)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        request.body(body).unwrap_or_default()
    }

    async fn connect(&self) -> Result<SendRequest<Body>, String> {
        let authority = &self.address.authority;
        let stream = TcpStream::connect(authority).await;
        let stream = stream.map_err(|error| format!("cannot connect to {authority}: {error}"))?;
        let _ = stream.set_nodelay(true);
        let shaken = handshake(TokioIo::new(stream)).await;
        let (sender, connection) = shaken.map_err(|error| format!("no connection: {error}"))?;
        // It ends when the sender is dropped.
        tokio::task::spawn_local(connection);
        Ok(sender)
    }
}

fn late() -> String {
    "not answered in time (--timeout)".to_owned()
}

async fn read(response: Response<Incoming>, deadline: Instant) -> Result<Vec<u8>, String> {
    let body = Body::new(response.into_body());
    let bytes = timeout_at(deadline, axum::body::to_bytes(body, LINE_MAX)).await;
    let bytes = bytes.map_err(|_| late())?.map_err(|error| error.to_string())?;
    Ok(bytes.to_vec())
}

/// Status and message of a refusal.
async fn refusal(response: Response<Incoming>, deadline: Instant) -> String {
    let status = response.status();
    let document = read(response, deadline).await.unwrap_or_default();
    let document: Value = serde_json::from_slice(&document).unwrap_or_default();
    format!("{}: {}", status.as_u16(), message(&document))
}

fn message(document: &Value) -> String {
    let error = &document["error"];
    let text = error["message"].as_str().or(error.as_str()).unwrap_or("no message");
    text.chars().take(MESSAGE_MAX).collect()
}

/// Server-sent events as their bytes come.
#[derive(Debug, Default)]
struct Stream {
    line: Vec<u8>,
    done: bool,
    tokens: Option<u64>,
    prompt: Option<u64>,
}

impl Stream {
    /// Takes bytes; returns the number of events with text among them.
    fn push(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let mut texts = 0;
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                if self.line.len() > LINE_MAX {
                    return Err(format!("a line of the stream is longer than {LINE_MAX} bytes"));
                }
                continue;
            }
            let line = std::mem::take(&mut self.line);
            if let Some(data) = line.trim_ascii().strip_prefix(b"data:") {
                texts += usize::from(self.event(data.trim_ascii())?);
            }
        }
        Ok(texts)
    }

    /// Takes an event; returns whether it has text.
    fn event(&mut self, data: &[u8]) -> Result<bool, String> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(false);
        }
        let event: Value = serde_json::from_slice(data)
            .map_err(|error| format!("an event of the stream is no JSON: {error}"))?;
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Err(format!("in the stream: {}", message(&event)));
        }
        self.tokens = event["usage"]["completion_tokens"].as_u64().or(self.tokens);
        self.prompt = event["usage"]["prompt_tokens"].as_u64().or(self.prompt);
        Ok(event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_a_path() {
        let read = |url: &str| {
            let address =
                Address::read(url).unwrap_or_else(|failure| panic!("{}", failure.message));
            (address.authority, address.base)
        };
        let at = |authority: &str, base: &str| (authority.to_owned(), base.to_owned());
        assert_eq!(read("http://localhost:8080"), at("localhost:8080", ""));
        assert_eq!(read("http://localhost:8080/v1/"), at("localhost:8080", ""));
        assert_eq!(read("http://a.example/models/b/v1"), at("a.example:80", "/models/b"));
        assert_eq!(read("http://[::1]:9"), at("[::1]:9", ""));
        for bad in
            ["https://a:1", "a:1", "http://", "http://:8", "http://u@a", "http://a:x", "http://a b"]
        {
            assert!(Address::read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn events_are_counted_however_their_bytes_are_cut() {
        let text = b": keep-alive\n\ndata: {\"choices\":[{\"text\":\"a\"}]}\r\n\r\ndata: {\"choices\":[{\"text\":\"\"}]}\n\n\
            data:{\"choices\":[{\"text\":\"b\"}],\"usage\":null}\n\n\
            data: {\"choices\":[],\"usage\":{\"completion_tokens\":7,\"prompt_tokens\":3}}\n\ndata: [DONE]\n\n";
        for cut in 0..text.len() {
            let mut stream = Stream::default();
            let texts = stream.push(&text[..cut]).unwrap() + stream.push(&text[cut..]).unwrap();
            assert_eq!(
                (texts, stream.tokens, stream.prompt, stream.done),
                (2, Some(7), Some(3), true)
            );
        }
    }

    #[test]
    fn what_is_no_event_is_an_error() {
        assert!(Stream::default().push(b"data: {\n").unwrap_err().contains("no JSON"));
        let told = Stream::default().push(b"data: {\"error\": {\"message\": \"lost\"}}\n");
        assert_eq!(told.unwrap_err(), "in the stream: lost");
        let long = vec![b'x'; LINE_MAX + 1];
        assert!(Stream::default().push(&long).unwrap_err().contains("longer"));
    }
}
