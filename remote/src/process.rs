//! The device process: started, asked to leave, killed, waited for.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often an ending process is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A process that may still run.
pub(crate) struct Process(Option<Child>);

impl Process {
    /// Starts it, with the socket as its standard input. It has a process group of its own: what a terminal sends at Ctrl-C or Ctrl-Z
    /// is for the parent, which ends its work first. Standard output is the parent's answer and nothing of the child's.
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

    /// How it ended, if it does within this time.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        loop {
            let child = self.0.as_mut()?;
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.0 = None;
                    return Some(status);
                }
                // Reaped by somebody else: there is nothing left to wait for.
                Err(_) => {
                    self.0 = None;
                    return None;
                }
                Ok(None) if began.elapsed() >= limit => return None,
                Ok(None) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Kills it and waits, so long and no longer. False if it is still there: a driver may keep a process that was killed.
    pub(crate) fn kill(&mut self, limit: Duration) -> bool {
        if let Some(child) = &mut self.0 {
            let _ = child.kill(); // it may have ended by itself
        }
        let _ = self.wait(limit);
        self.0.is_none()
    }
}

impl Drop for Process {
    /// What does not end in time is left to a thread that waits, so that no zombie stays behind.
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            std::thread::spawn(move || child.wait());
        }
    }
}

/// An end in words.
pub(crate) fn describe(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("exit code {code}"),
        Some((None, Some(signal))) => format!("signal {signal}"),
        Some((None, None)) | None => "nobody knows how".to_owned(),
    }
}
