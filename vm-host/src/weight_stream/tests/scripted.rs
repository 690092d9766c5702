//! A source that fails on request.

use std::time::Duration;

use super::source::{Job, Source};
use crate::error::HostError;

/// The failure that replaces a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    /// The disk reports an error.
    Eio,
    /// No answer arrives.
    Silent,
    /// The call never returns.
    Hangs,
}

/// Wraps another source: delays every request and every piece, and from some piece on fails.
pub(crate) struct Scripted {
    pub(crate) inner: Box<dyn Source>,
    pub(crate) asked: Duration,
    pub(crate) delay: Duration,
    pub(crate) mishap: Option<(usize, Mishap)>,
}

impl Source for Scripted {
    fn name(&self) -> String {
        format!("scripted, {}", self.inner.name())
    }

    fn start(&mut self, job: Job) -> Result<(), HostError> {
        std::thread::sleep(self.asked);
        self.inner.start(job)
    }

    fn next(&mut self, limit: Duration) -> Option<Result<Job, HostError>> {
        std::thread::sleep(self.delay);
        let job = self.inner.next(limit)?;
        match (self.mishap, &job) {
            (Some((from, mishap)), Ok(job)) if job.piece >= from => match mishap {
                Mishap::Eio => {
                    let message = std::io::Error::from_raw_os_error(libc::EIO).to_string();
                    Some(Err(HostError::Weights { path: "a dead disk".into(), message }))
                }
                Mishap::Silent => {
                    std::thread::sleep(limit);
                    None
                }
                Mishap::Hangs => loop {
                    std::thread::park();
                },
            },
            _ => Some(job),
        }
    }
}
