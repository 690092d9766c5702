//! The routes. A request is parsed and tokenised on a blocking thread, decoded on the decode thread, and written out here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::Served;
use super::answer::{Heading, Usage};
use super::body;
use super::decode::{Event, Finish, Job};
use super::origin;
use super::refusal::Refusal;
use super::request::{Api, Request};
use super::text::{Piece, Writer};

/// The interval of keep-alive comments in a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The server's routes. `loopback`: whether the listener is on loopback.
pub(super) fn router(served: Arc<Served>, loopback: bool) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route(
            "/v1/completions",
            post(|served, head, body| answer(Api::Completions, served, head, body)),
        )
        .route(
            "/v1/chat/completions",
            post(|served, head, body| answer(Api::Chat, served, head, body)),
        )
        .fallback(no_page)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(loopback, origin::guard))
        .layer(from_fn(body::read_to_its_end))
        .with_state(served)
}

async fn no_page(uri: Uri) -> Refusal {
    let pages = "/health, /v1/models, /v1/completions, /v1/chat/completions";
    Refusal::new(StatusCode::NOT_FOUND, format!("there is no {}; there are {pages}", uri.path()))
}

async fn no_method(method: Method, uri: Uri) -> Refusal {
    let message = format!("{} does not take {method}", uri.path());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

fn document(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn health(State(served): State<Arc<Served>>) -> Response {
    document(&json!({
        "status": "ok",
        "model": served.name,
        "device": served.device,
        "requests": served.admission.inside(),
        "requests_max": served.admission.limit(),
    }))
}

fn listed(served: &Served) -> Value {
    json!({"id": served.name, "object": "model", "created": served.began, "owned_by": "amk"})
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    document(&json!({"object": "list", "data": [listed(&served)]}))
}

async fn model(
    State(served): State<Arc<Served>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Refusal> {
    match name {
        Ok(Path(name)) if name == served.name => Ok(document(&listed(&served))),
        Ok(Path(name)) => Err(served.no_model(&name)),
        Err(_) => Err(Refusal::field("model", "the name of the model is not UTF-8")),
    }
}

async fn answer(
    api: Api,
    State(served): State<Arc<Served>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    check_type(&headers)?;
    let admitted = served.admission.enter();
    let admitted = admitted.ok_or_else(|| Refusal::full(served.admission.limit()))?;
    let body = body::received(body).await?;
    let reader = served.clone();
    // Templates and tokenizers are slow.
    let read = tokio::task::spawn_blocking(move || Request::read(api, &body, &reader)).await;
    let request = read.map_err(|_| Refusal::failed(crate::bug::last_panic()))??;
    let (to, events) = unbounded_channel(); // bounded by the tokens of the request
    let heading = served.heading(api, request.work.logprobs.is_some());
    let answering = Answering {
        events,
        writer: Some(Writer::new(served.tokenizer.clone(), request.stop)),
        ends: request.work.stop.clone(),
        usage: Usage { prompt: request.work.prompt.len(), completion: 0 },
        sent: 0,
    };
    let job = Job { work: request.work, to, admitted };
    served.jobs.send(job).map_err(|_| Refusal::leaving())?;
    if request.stream {
        let ready = heading.opening().iter().map(Value::to_string).collect();
        let include_usage = request.include_usage;
        let streamed = Streamed { answering, heading, include_usage, ready, over: false };
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
        return Ok(Sse::new(streamed.events()).keep_alive(keep_alive).into_response());
    }
    whole(answering, &heading).await
}

/// Requires JSON: a page of another site can post a form to a local server without a CORS preflight, but not JSON.
fn check_type(headers: &HeaderMap) -> Result<(), Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("the content type is {kind:?}; it must be application/json");
    Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// An answer being sent. Dropping it closes the channel, so that the decode thread stops.
struct Answering {
    events: UnboundedReceiver<Event>,
    /// None after the end of the text.
    writer: Option<Writer>,
    ends: Vec<u32>,
    usage: Usage,
    /// Characters sent.
    sent: usize,
}

/// The next piece, and the `finish_reason` if it is the last.
type Next = (Piece, Option<&'static str>);

impl Answering {
    async fn next(&mut self) -> Result<Next, Refusal> {
        let undecodable = |error: model::ModelError| Refusal::failed(error.to_string());
        loop {
            let event = self.events.recv().await;
            let Some(writer) = &mut self.writer else {
                return Err(Refusal::failed("the text has ended"));
            };
            match event {
                Some(Event::Token { id, logprobs }) => {
                    self.usage.completion += 1;
                    let ends = self.ends.contains(&id);
                    let (piece, stopped) =
                        writer.push(id, ends, logprobs.as_ref()).map_err(undecodable)?;
                    if stopped {
                        self.events.close(); // discards the rest
                        return Ok((piece, Some("stop")));
                    }
                    if !piece.is_empty() {
                        return Ok((piece, None));
                    }
                }
                Some(Event::End(finish)) => {
                    let reason = match finish {
                        Finish::Stop => "stop",
                        Finish::Length => "length",
                        Finish::Failed(why) => return Err(Refusal::failed(why)),
                        Finish::Leaving => return Err(Refusal::leaving()),
                    };
                    let last = self.writer.take().map(Writer::finish).transpose();
                    let (piece, stopped) = last.map_err(undecodable)?.unwrap_or_default();
                    return Ok((piece, Some(if stopped { "stop" } else { reason })));
                }
                None => return Err(Refusal::failed("the decode thread has gone")),
            }
        }
    }
}

async fn whole(mut answering: Answering, heading: &Heading) -> Result<Response, Refusal> {
    let mut all = Piece::default();
    loop {
        let (piece, finish) = answering.next().await?;
        all.text.push_str(&piece.text);
        all.scored.extend(piece.scored);
        if let Some(finish) = finish {
            return Ok(document(&heading.whole(&all, finish, answering.usage)));
        }
    }
}

/// An answer being streamed in lines.
struct Streamed {
    answering: Answering,
    heading: Heading,
    include_usage: bool,
    /// Lines to send before the next event is awaited.
    ready: VecDeque<String>,
    over: bool,
}

impl Streamed {
    async fn next(&mut self) -> Option<String> {
        if self.ready.is_empty() && !self.over {
            match self.answering.next().await {
                Ok((piece, finish)) => self.take(&piece, finish),
                // The status has been sent already: clients look for an error here.
                Err(refusal) => {
                    self.ready.push_back(refusal.document().to_string());
                    self.over = true;
                }
            }
        }
        self.ready.pop_front()
    }

    fn take(&mut self, piece: &Piece, finish: Option<&str>) {
        let chunk = self.heading.chunk(piece, self.answering.sent, finish);
        self.ready.push_back(chunk.to_string());
        self.answering.sent += piece.text.chars().count();
        if finish.is_some() {
            let usage = self.include_usage.then(|| self.heading.usage(self.answering.usage));
            self.ready.extend(usage.map(|usage| usage.to_string()));
            self.ready.push_back("[DONE]".to_owned());
            self.over = true;
        }
    }

    fn events(self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        stream::unfold(self, |mut streamed| async move {
            let line = streamed.next().await?;
            Some((Ok(sse::Event::default().data(line)), streamed))
        })
    }
}
