//! Metrics as text. `/metrics` of the server has all of them; `--metrics` is a listener for the telemetry page alone,
//! so that access to the metrics does not include access to the model.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use telemetry::Reader;
use tokio::net::TcpListener;

use super::origin::{self, Allowed};
use super::{Served, connections};
use crate::failure::Failure;
use crate::observe::snapshot;

/// The content type that OpenMetrics 1.0 requires.
const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The content type of Prometheus's older format.
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The connection limit of the metrics listener.
const CONNECTIONS: usize = 16;

/// Listens until the runtime ends. Returns the address.
pub(super) async fn listen(addr: SocketAddr, reader: Reader) -> Result<SocketAddr, Failure> {
    let failed = |error: std::io::Error| {
        Failure::usage(format!("cannot listen on {addr}; --metrics takes another address: {error}"))
    };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let allowed = Allowed { loopback: bound.ip().is_loopback(), origins: Vec::new() };
    let app = Router::new()
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(Arc::new(allowed), origin::guard))
        .with_state(Arc::new(reader));
    // Ends with the runtime: shutdown does not wait for metrics requests.
    tokio::spawn(connections::serve(listener, app, CONNECTIONS, std::future::pending()));
    Ok(bound)
}

async fn metrics(State(reader): State<Arc<Reader>>) -> Response {
    match snapshot(&reader) {
        Some(page) => {
            ([(header::CONTENT_TYPE, TEXT)], telemetry::openmetrics(page)).into_response()
        }
        None => (StatusCode::SERVICE_UNAVAILABLE, "the page is being written").into_response(),
    }
}

/// All metrics, in the format that the client accepts: routers know the older one only.
pub(super) async fn all(State(served): State<Arc<Served>>, headers: HeaderMap) -> Response {
    let Some(page) = snapshot(&served.page) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the page is being written").into_response();
    };
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let openmetrics = accepts.is_some_and(|kinds| kinds.contains("application/openmetrics-text"));
    let kind = if openmetrics { TEXT } else { CLASSIC };
    ([(header::CONTENT_TYPE, kind)], served.figures.text(page, openmetrics)).into_response()
}
