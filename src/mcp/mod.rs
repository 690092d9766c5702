//! `amk mcp`: the commands that an agent needs as tools of the Model Context Protocol, on standard input and output.
//!
//! The SDK implements the protocol. A tool's arguments are those of the command of its name and its answer is that
//! command's document: the schemas of both are generated from the same types. Standard output carries JSON-RPC only,
//! and after the first line nothing is written to standard error, since no client need read it.
//!
//! **Promises.** Nothing waits without a bound: one schedule is judged at a time, a few wait for their turn, further
//! calls are refused at once, and unread progress is replaced by newer progress. A search runs on its own thread and
//! checks before each trial whether to continue. The end of the input ends it too.

mod arguments;
mod jobs;
mod listed;
mod paths;
mod prompts;
mod resources;
mod server;
mod status;
mod tools;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rmcp::ServiceExt;
use rmcp::service::ServerInitializeError;
use tokio::io::{AsyncRead, ReadBuf};

use crate::failure::{Exit, Failure, Outcome};
use crate::report;
use jobs::Jobs;

/// Serves one client until it closes the input.
pub(crate) fn serve() -> Outcome {
    report::say("amk mcp: serving on standard input and output until the input ends");
    crate::spinner::quiet();
    let here = |error: std::io::Error| Failure::missing(format!("cannot start a server: {error}"));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().thread_stack_size(jobs::STACK_BYTES).build();
    let runtime = runtime.map_err(here)?;
    let jobs = Arc::new(Jobs::default());
    let server = server::Server::new(jobs.clone())?;
    let served = runtime.block_on(async {
        let (input, output) = rmcp::transport::stdio();
        let input = UntilEnd { input, jobs: jobs.clone() };
        match server.serve((input, output)).await {
            // A client that stops reading would block the SDK's shutdown forever.
            Ok(running) => tokio::select! {
                ended = running.waiting() => ended.map(drop).map_err(|error| error.to_string()),
                () = jobs.long_ended() => Ok(()),
            },
            Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    });
    jobs.end();
    jobs.wait();
    // A thread blocked on standard input cannot be joined.
    runtime.shutdown_background();
    served.map(|()| Exit::Yes).map_err(|error| Failure::usage(format!("no MCP client: {error}")))
}

/// Standard input; its end ends the work.
struct UntilEnd<R> {
    input: R,
    jobs: Arc<Jobs>,
}

impl<R: AsyncRead + Unpin> AsyncRead for UntilEnd<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let (before, room) = (buf.filled().len(), buf.remaining());
        let read = ready!(Pin::new(&mut self.input).poll_read(cx, buf));
        if read.is_err() || (room > 0 && buf.filled().len() == before) {
            self.jobs.end();
        }
        Poll::Ready(read)
    }
}
