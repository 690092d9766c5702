//! Request bodies: limits on length and time, and how unread ones are drained.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use futures_util::StreamExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::refusal::Refusal;

/// The most bytes of a body: enough for a long prompt.
const BODY_MAX: usize = 1 << 20;
/// The time limit for receiving a body.
const BODY_TIME: Duration = Duration::from_secs(10);

pub(super) async fn received(body: Body) -> Result<Bytes, Refusal> {
    let bytes = timeout(BODY_TIME, axum::body::to_bytes(body, BODY_MAX)).await;
    let bytes = bytes.map_err(|_| {
        let message = format!("the body did not come within {} s", BODY_TIME.as_secs());
        Refusal::new(StatusCode::REQUEST_TIMEOUT, message)
    })?;
    bytes.map_err(|_| {
        let message = format!("the body is longer than {BODY_MAX} bytes, or broke off");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    })
}

/// Sends the response after the body has been received, even if the handler did not read it. A client sends its body
/// before it reads; a response that overtakes the body closes the connection, and the client sees a reset instead of
/// the response.
pub(super) async fn read_to_its_end(request: Request, next: Next) -> Response {
    // One deadline for the whole body: a body too slow for the handler gets no extra time.
    let deadline = Instant::now() + BODY_TIME;
    let (back, given_back) = oneshot::channel();
    let request = request.map(|body| Body::new(Lent { body, back: Some(back) }));
    let response = next.run(request).await;
    if let Ok(rest) = { given_back }.try_recv() {
        // A body that is too long or too slow is reset.
        let _ = timeout_at(deadline, discard(rest)).await;
    }
    response
}

async fn discard(body: Body) {
    let mut pieces = body.into_data_stream();
    let mut left = BODY_MAX;
    while let Some(Ok(piece)) = pieces.next().await {
        let Some(rest) = left.checked_sub(piece.len()) else { return };
        left = rest;
    }
}

/// A body that returns to its owner when it is dropped before its end.
struct Lent {
    body: Body,
    back: Option<oneshot::Sender<Body>>,
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(back) = self.back.take().filter(|_| !self.body.is_end_stream()) {
            // The receiver is gone if the connection has closed.
            let _ = back.send(std::mem::take(&mut self.body));
        }
    }
}
