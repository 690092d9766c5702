//! Connections: the limit on their number, and the time limits on sending a request.

use std::collections::VecDeque;
use std::future::Future;
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::refusal::Refusal;

/// The time limit for the head of a request, and for an idle connection.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// Connections beyond those of admitted requests: for clients about to send a request, or for `/health`.
const SPARE: usize = 192;
/// Connections at once while the server is leaving.
const LATE: usize = 64;
/// Pause after a failed accept, for example without free descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// The connection limit of a server with this many admitted requests: at most half of this process's descriptors.
pub(super) fn most(requests: usize) -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
    (requests + SPARE).min(half.max(1))
}

/// A connection, as seen by the accept loop.
#[derive(Default)]
struct Connection {
    /// Whether the head of a request has been received.
    asked: AtomicBool,
    /// Notified when another connection needs the place.
    evicted: Notify,
}

impl Connection {
    fn has_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }
}

/// Serves connections until `leave`, then until the current requests are answered; meanwhile new connections are
/// answered, once each, so that their clients hear that the server is leaving. At the limit, the oldest connection
/// that has sent no request is closed; if all have sent one, the new connection is refused with 503.
pub(super) async fn serve(
    listener: TcpListener,
    app: Router,
    most: usize,
    leave: impl Future<Output = ()>,
) {
    let (leaving, left) = watch::channel(false);
    let mut open: VecDeque<Arc<Connection>> = VecDeque::new();
    let mut tasks = JoinSet::new();
    let mut leave = pin!(leave);
    loop {
        let accepted = tokio::select! {
            () = &mut leave => break,
            accepted = listener.accept() => accepted,
        };
        while tasks.try_join_next().is_some() {}
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // A connection that has ended is referenced only here.
        open.retain(|connection| Arc::strong_count(connection) > 1);
        if open.len() >= most && !make_room(&mut open) {
            refuse(stream, most);
            continue;
        }
        let connection = Arc::new(Connection::default());
        open.push_back(connection.clone());
        tasks.spawn(converse(stream, app.clone(), connection, Some(left.clone())));
    }
    leaving.send_replace(true);
    // Aborted when the current requests are answered, after a moment for answers on their way.
    let mut late = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(_) => continue,
                None => break,
            },
            accepted = listener.accept() => accepted,
        };
        while late.try_join_next().is_some() {}
        match accepted {
            Ok((stream, _)) if late.len() < LATE => {
                late.spawn(converse(stream, app.clone(), Arc::default(), None));
            }
            Ok((stream, _)) => drop(stream),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
    drop(listener);
    let all = async { while late.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(PAUSE, all).await;
}

/// Closes the oldest connection that has sent no request, if there is one.
fn make_room(open: &mut VecDeque<Arc<Connection>>) -> bool {
    let idle = open.iter().position(|connection| !connection.has_asked());
    let evicted = idle.and_then(|index| open.remove(index));
    evicted.inspect(|connection| connection.evicted.notify_one()).is_some()
}

/// Responds without reading a request, and closes the connection.
fn refuse(stream: TcpStream, most: usize) {
    let body = Refusal::crowded(most).document().to_string();
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    if let Ok(mut stream) = stream.into_std() {
        // It fits into the socket's empty send buffer; an error means that the client has disconnected.
        let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    }
}

/// Serves a connection. One without `left` came while the server is leaving, and has one answer.
async fn converse(
    stream: TcpStream,
    app: Router,
    connection: Arc<Connection>,
    left: Option<watch::Receiver<bool>>,
) {
    // Streamed tokens are small and must be sent at once.
    let _ = stream.set_nodelay(true);
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request: hyper::Request<Incoming>| {
        connection.asked.store(true, Ordering::Relaxed);
        app.call(request)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).keep_alive(left.is_some());
    let mut conversation = pin!(http.serve_connection(TokioIo::new(stream), service));
    let mut leaving = left.is_none();
    let mut left = left.unwrap_or_else(|| watch::channel(true).1);
    loop {
        let mut begun = false;
        tokio::select! {
            // A connection error concerns only the client.
            _ = conversation.as_mut() => return,
            () = connection.evicted.notified() => {}
            _ = left.wait_for(|left| *left), if !leaving => {
                leaving = true;
                begun = true;
            }
        }
        if begun {
            // A request may be on its way: it is told that the server is leaving.
            if !connection.has_asked()
                && tokio::time::timeout(PAUSE, conversation.as_mut()).await.is_ok()
            {
                return;
            }
            conversation.as_mut().graceful_shutdown();
        }
        if !connection.has_asked() {
            return;
        }
    }
}
