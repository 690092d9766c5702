//! Checks the names and origins of requests: only names of this server, and no pages of other sites.
//!
//! A page of another site can have its name resolve to this machine, so that the browser treats it as the server's own
//! page and lets it read answers (DNS rebinding). `Host` still holds the name that the page used.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::refusal::Refusal;

/// The names and origins that a listener answers to.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowed {
    /// Whether the listener is on loopback.
    pub(super) loopback: bool,
    /// Further origins whose pages may use the server; `*` for any.
    pub(super) origins: Vec<String>,
}

impl Allowed {
    /// Whether an origin is one of the further ones.
    pub(super) fn lists(&self, origin: &str) -> bool {
        self.origins.iter().any(|listed| listed == "*" || listed.eq_ignore_ascii_case(origin))
    }
}

/// Refuses requests for another server's name, and those from pages of other sites.
pub(super) async fn guard(
    State(allowed): State<Arc<Allowed>>,
    request: Request,
    next: Next,
) -> Response {
    match check(&allowed, request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

pub(super) fn check(allowed: &Allowed, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
    let loopback = allowed.loopback;
    let hosts = texts(headers, header::HOST).chain(uri.authority().map(|name| Some(name.as_str())));
    let hosts: Vec<Option<&str>> = hosts.collect();
    if loopback && !hosts.iter().all(|host| host.is_some_and(is_loopback)) {
        let message = "this server listens on loopback and answers to localhost, 127.0.0.1 and [::1] only; a proxy in front of it has to send one of these as Host";
        return Err(Refusal::new(StatusCode::FORBIDDEN, message).coded("foreign_host"));
    }
    let own = |origin: &str| {
        // `null` has no scheme: a page that hides its origin.
        let Some((_, authority)) = origin.split_once("://") else { return false };
        let same = |host: &Option<&str>| host.is_some_and(|h| h.eq_ignore_ascii_case(authority));
        (loopback && is_loopback(authority)) || hosts.iter().any(same)
    };
    let known = |origin: &str| allowed.lists(origin) || own(origin);
    if texts(headers, header::ORIGIN).all(|origin| origin.is_some_and(known)) {
        return Ok(());
    }
    let message = "pages of other sites may not use this server (the request has an Origin that is not this server's, and --cors does not name it)";
    Err(Refusal::new(StatusCode::FORBIDDEN, message).coded("foreign_origin"))
}

/// A header's values; `None` for those that are not text.
fn texts(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = Option<&str>> {
    headers.get_all(name).into_iter().map(|value| value.to_str().ok())
}

/// Whether a host, with or without a port, is a loopback name or address.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let address = address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    !host.contains('@') && (address || name.eq_ignore_ascii_case("localhost"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(loopback: bool) -> Allowed {
        Allowed { loopback, origins: vec!["https://Friend.example".to_owned()] }
    }

    fn asked(loopback: bool, headers: &[(&str, &str)]) -> Result<(), &'static str> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().unwrap();
            map.append(name, value.parse().unwrap());
        }
        check(&allowed(loopback), &Uri::from_static("/v1/models"), &map)
            .map_err(|e| e.code.unwrap())
    }

    #[test]
    fn a_listener_on_loopback_answers_to_loopback_names_only() {
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:8080"] {
            assert_eq!(asked(true, &[("host", host)]), Ok(()), "{host}");
        }
        // HTTP/1.0 does not require it; browsers always send it.
        assert_eq!(asked(true, &[]), Ok(()));
        for host in
            ["evil.example", "localhost.evil.example:80", "localhost@evil.example", "", "[::2]"]
        {
            assert_eq!(asked(true, &[("host", host)]), Err("foreign_host"), "{host}");
        }
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(asked(true, &two), Err("foreign_host"));
        let absolute = Uri::from_static("http://evil.example/v1/models");
        let refused = check(&allowed(true), &absolute, &HeaderMap::new()).unwrap_err();
        assert_eq!((refused.status, refused.code), (StatusCode::FORBIDDEN, Some("foreign_host")));
        assert_eq!(asked(false, &[("host", "ai.example")]), Ok(()));
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let from = |loopback, host, origin| asked(loopback, &[("host", host), ("origin", origin)]);
        assert_eq!(from(true, "localhost:8080", "http://127.0.0.1:3000"), Ok(()));
        assert_eq!(from(false, "ai.example", "https://ai.example"), Ok(()));
        assert_eq!(from(true, "localhost:8080", "https://friend.example"), Ok(()));
        for origin in [
            "http://evil.example",
            "http://friend.example",
            "null",
            "",
            "http://localhost.evil.example",
        ] {
            assert_eq!(from(true, "localhost", origin), Err("foreign_origin"), "{origin}");
            assert_eq!(from(false, "ai.example", origin), Err("foreign_origin"), "{origin}");
        }
        assert_eq!(from(false, "ai.example", "http://localhost:3000"), Err("foreign_origin"));
    }
}
