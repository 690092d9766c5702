//! Who may use the server: those with an API key, if there are any, and pages of the allowed origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::origin::{self, Allowed};
use super::refusal::Refusal;
use super::tenants::Caller;

/// Paths that need no key: load balancers and supervisors have none, and the page asks for it.
const OPEN: [&str; 3] = ["/", "/health", "/ready"];
/// The seconds for which a browser may keep the answer to a preflight.
const PREFLIGHT_S: &str = "600";

/// The API keys, and whose they are. Only their hashes are kept; hashes are compared in constant time.
#[derive(Clone, Debug, Default)]
pub(super) struct Keys(Arc<[(blake3::Hash, Caller)]>);

impl Keys {
    pub(super) fn new<'k>(keys: impl Iterator<Item = (&'k str, Caller)>) -> Self {
        Self(keys.map(|(key, caller)| (blake3::hash(key.as_bytes()), caller)).collect())
    }

    /// Whether everybody may use the server.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn opens(&self, key: &str) -> Option<&Caller> {
        let hash = blake3::hash(key.as_bytes());
        self.0.iter().find(|(known, _)| *known == hash).map(|(_, caller)| caller)
    }
}

/// The key of a request: a bearer token, or Anthropic's header.
fn given(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

/// Refuses requests without a key, if there are keys, and says whose the others are.
pub(super) async fn keyed(State(keys): State<Keys>, mut request: Request, next: Next) -> Response {
    let caller = if keys.is_empty() || OPEN.contains(&request.uri().path()) {
        Ok(Caller::default())
    } else {
        match given(request.headers()) {
            Some(given) => keys.opens(given).cloned().ok_or("the API key is wrong"),
            None => Err(
                "this server needs its API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            ),
        }
    };
    let message = match caller {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            return next.run(request).await;
        }
        Err(message) => message,
    };
    let refusal = Refusal::new(StatusCode::UNAUTHORIZED, message).coded("invalid_api_key");
    let mut response = refusal.into_response();
    let bearer = HeaderValue::from_static("Bearer");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    response
}

/// Answers preflights, and names the origin in answers to pages of the allowed origins. Other origins are refused.
pub(super) async fn shared(
    State(allowed): State<Arc<Allowed>>,
    request: Request,
    next: Next,
) -> Response {
    if let Err(refusal) = origin::check(&allowed, request.uri(), request.headers()) {
        return refusal.into_response();
    }
    let origin = request.headers().get(header::ORIGIN).cloned();
    let origin = origin.filter(|origin| origin.to_str().is_ok_and(|origin| allowed.lists(origin)));
    let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let preflight = origin.is_some() && request.method() == Method::OPTIONS && asks;
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let Some(origin) = origin else { return response };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    let exposed = HeaderValue::from_static("x-request-id, request-id, retry-after");
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    if preflight {
        let methods = HeaderValue::from_static("GET, POST, OPTIONS");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_S));
        if let Some(wanted) = wanted {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_in_either_header() {
        let keys = Keys::new([("sesame", Caller::default())].into_iter());
        let opens = |name: &'static str, value: &'static str| {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
            given(&headers).is_some_and(|given| keys.opens(given).is_some())
        };
        assert!(
            opens("authorization", "Bearer sesame") && opens("authorization", "bearer  sesame")
        );
        assert!(opens("x-api-key", "sesame"));
        assert!(!opens("authorization", "sesame") && !opens("authorization", "Basic sesame"));
        assert!(!opens("authorization", "Bearer sesam") && !opens("x-api-key", ""));
    }
}
