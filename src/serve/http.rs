//! The routes. A request is parsed and tokenised on a blocking thread, decoded on the decode thread, and written out here.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::access::{self, Keys};
use super::answering::Answering;
use super::decode::Job;
use super::origin::Allowed;
use super::record::{self, Record};
use super::refusal::Refusal;
use super::request::{Api, Request};
use super::tenants::Caller;
use super::{Served, body, metrics, page, tokens};

/// The interval of keep-alive comments in a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The paths of the APIs of text.
const TEXTS: [(&str, Api); 4] = [
    ("/v1/completions", Api::Completions),
    ("/v1/chat/completions", Api::Chat),
    ("/v1/messages", Api::Messages),
    ("/v1/responses", Api::Responses),
];

/// The server's routes.
pub(super) fn router(served: Arc<Served>, allowed: Allowed, keys: Keys) -> Router {
    let mut router = Router::new()
        .route("/", get(page::page))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/version", get(version))
        .route("/metrics", get(metrics::all))
        .route(
            "/tokenize",
            post(|served, head, body| convert(tokens::tokenize, served, head, body)),
        )
        .route(
            "/detokenize",
            post(|served, head, body| convert(tokens::detokenize, served, head, body)),
        )
        .route(
            "/v1/messages/count_tokens",
            post(|served, head, body| convert(tokens::count, served, head, body)),
        )
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model));
    for (path, api) in TEXTS {
        let answer = move |served, from, head, body| answer(api, served, from, head, body);
        router = router.route(path, post(answer));
    }
    // The last layer is the outermost.
    router
        .fallback(no_page)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(keys, access::keyed))
        .layer(from_fn_with_state(Arc::new(allowed), access::shared))
        .layer(from_fn(body::read_to_its_end))
        .layer(from_fn_with_state(served.clone(), record::recorded))
        .with_state(served)
}

async fn no_page(uri: Uri) -> Refusal {
    let pages = "/, /health, /ready, /version, /metrics, /tokenize, /detokenize, /v1/models, /v1/completions, /v1/chat/completions, /v1/messages, /v1/messages/count_tokens, /v1/responses";
    Refusal::new(StatusCode::NOT_FOUND, format!("there is no {}; there are {pages}", uri.path()))
}

async fn no_method(method: Method, uri: Uri) -> Refusal {
    let texts = TEXTS.iter().map(|(path, _)| *path);
    let counts = ["/tokenize", "/detokenize", "/v1/messages/count_tokens"];
    let posts = texts.chain(counts).any(|path| path == uri.path());
    let taken = if posts { "POST" } else { "GET" };
    // A page of another site asks with OPTIONS first.
    let cors =
        if method == Method::OPTIONS { "; --cors lets pages of other sites use it" } else { "" };
    let message = format!("{} does not take {method} but {taken}{cors}", uri.path());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

fn document(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn health(State(served): State<Arc<Served>>) -> Response {
    document(&json!({
        "status": "ok",
        "model": served.name(),
        "device": served.device,
        "requests": served.admission.inside(),
        "requests_max": served.admission.limit(),
    }))
}

/// Whether new requests are taken; a load balancer asks this.
async fn ready(State(served): State<Arc<Served>>) -> Result<Response, Refusal> {
    served.taking.check()?;
    Ok(document(&json!({"status": "ready"})))
}

async fn version() -> Response {
    document(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

fn listed(name: &str, served: &Served) -> Value {
    json!({
        "id": name, "object": "model", "created": served.began, "owned_by": "amk",
        "root": served.name(), "max_model_len": served.capacity,
    })
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    let data: Vec<Value> = served.names.iter().map(|name| listed(name, &served)).collect();
    document(&json!({"object": "list", "data": data}))
}

async fn model(
    State(served): State<Arc<Served>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Refusal> {
    match name {
        Ok(Path(name)) if served.names.contains(&name) => Ok(document(&listed(&name, &served))),
        Ok(Path(name)) => Err(served.no_model(&name)),
        Err(_) => Err(Refusal::field("model", "the name of the model is not UTF-8")),
    }
}

/// Reads a body on a blocking thread: templates and tokenizers are slow.
async fn parsed<T: Send + 'static>(
    headers: &HeaderMap,
    body: Body,
    served: &Arc<Served>,
    read: impl FnOnce(&[u8], &Served) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    check_type(headers)?;
    let body = body::received(body).await?;
    let served = served.clone();
    let read = tokio::task::spawn_blocking(move || read(&body, &served)).await;
    read.map_err(|_| Refusal::failed(crate::bug::last_panic()))?
}

async fn convert(
    convert: fn(&[u8], &Served) -> Result<Value, Refusal>,
    State(served): State<Arc<Served>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    // A long text takes time, so that it counts as a request.
    let _admitted = served.enter()?;
    Ok(document(&parsed(&headers, body, &served, convert).await?))
}

async fn answer(
    api: Api,
    State(served): State<Arc<Served>>,
    (Extension(record), Extension(caller)): (Extension<Arc<Record>>, Extension<Caller>),
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    let place = caller.enter()?;
    let admitted = served.enter()?;
    let from = caller.clone();
    let read = move |body: &[u8], served: &Served| Request::read(api, body, &from, served);
    let request = parsed(&headers, body, &served, read).await?;
    record.prompt(request.prompt_tokens);
    served.figures.prompt(request.prompt_tokens);
    let heading = served.heading(api, &request);
    caller.used(request.prompt_tokens);
    let (counted, arrived_ns) = ((caller, place), record.arrived_ns());
    let mut answering = Answering::new(served.clone(), record, counted, request.prompt_tokens);
    for asked in request.choices {
        let (to, events) = unbounded_channel(); // bounded by the tokens of the choice
        answering.add(events, &asked, &request.stop);
        if served.shares {
            served.figures.queried(asked.work.reusable().len());
        }
        let (tenant, admitted) = (request.tenant.clone(), admitted.clone());
        let job = Job { work: asked.work, tenant, to, admitted, arrived_ns };
        served.jobs.send(job).map_err(|_| Refusal::leaving())?;
    }
    // From here on the jobs hold the place in the queue.
    drop(admitted);
    if request.stream {
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
        return Ok(Sse::new(answering.streamed(heading)).keep_alive(keep_alive).into_response());
    }
    Ok(document(&answering.whole(&heading).await?))
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
