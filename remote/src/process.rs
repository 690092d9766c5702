//! The device process: starting it, waiting for its end, killing it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Polling interval for the end of a process.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A process that may still run.
pub(crate) struct Process(Option<Child>);

impl Process {
    /// Starts it with the socket as its standard input. It has a process group of its own: the signals of Ctrl-C or
    /// Ctrl-Z in a terminal go to the parent, which ends its work first. Its standard output is discarded: standard
    /// output carries the parent's result only.
    pub(crate) fn start(mut command: Command) -> io::Result<(Self, UnixStream)> {
        let (here, there) = UnixStream::pair()?;
        let child = command
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok((Self(Some(child)), here))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.as_ref().map_or(0, Child::id)
    }

    /// Waits up to `limit` for its end and returns the status.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        loop {
            let child = self.0.as_mut()?;
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.0 = None;
                    return Some(status);
                }
                // Already reaped elsewhere: nothing is left to wait for.
                Err(_) => {
                    self.0 = None;
                    return None;
                }
                Ok(None) if began.elapsed() >= limit => return None,
                Ok(None) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Kills it and waits up to `limit`. False if it is still there: a driver may keep a process that was killed.
    pub(crate) fn kill(&mut self, limit: Duration) -> bool {
        if let Some(child) = &mut self.0 {
            let _ = child.kill(); // fails if it has ended already
        }
        let _ = self.wait(limit);
        self.0.is_none()
    }
}

impl Drop for Process {
    /// Hands a process that is still running to a thread that waits for it, so that no zombie is left.
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            std::thread::spawn(move || child.wait());
        }
    }
}

/// The end of a process in words.
pub(crate) fn describe(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("exit code {code}"),
        Some((None, Some(signal))) => format!("signal {signal}"),
        Some((None, None)) | None => "unknown exit status".to_owned(),
    }
}
