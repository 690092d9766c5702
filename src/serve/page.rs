//! The page at `/`: a chat with the model, in one file. It loads nothing, from here or elsewhere.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const PAGE: &str = include_str!("page.html");

/// The page. Its style and script are allowed by a number of this answer, and nothing else is: a text of a model that
/// became markup could neither run nor load anything.
pub(super) async fn page() -> Response {
    let nonce = format!("{:016x}{:016x}", super::fresh_seed(), super::fresh_seed());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, &policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, PAGE.replace("{nonce}", &nonce)).into_response()
}
