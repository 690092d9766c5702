//! Errors in the shape of OpenAI's API, `{"error": {message, type, param, code}}`, with the `"type": "error"` that
//! Anthropic's has beside it.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why a request was refused, beside its response, for the log.
#[derive(Clone, Debug)]
pub(super) struct Why(pub(super) String);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) message: String,
    pub(super) param: Option<String>,
    pub(super) code: Option<&'static str>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A field that is wrong or unsupported.
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = Some(param.into());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(super) fn coded(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(super) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub(super) fn leaving() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down").coded("leaving")
    }

    pub(super) fn loading() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the model is being loaded").coded("loading")
    }

    pub(super) fn full(limit: usize) -> Self {
        let message = format!("{limit} requests are in the server, its limit; try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, message).coded("queue_full")
    }

    /// The connection limit is reached, and all connections are in use.
    pub(super) fn crowded(limit: usize) -> Self {
        let message = format!("{limit} connections are in use, the limit; try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message).coded("too_many_connections")
    }

    pub(super) fn document(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = self.document().to_string();
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (self.status, json, body).into_response();
        response.extensions_mut().insert(Why(self.message));
        let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        if later.contains(&self.status) {
            // About the time that a text of some tokens takes.
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
