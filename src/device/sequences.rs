//! Sequences that share the resident kernel, each in a session of its own: what a server drives. Tokens are chosen on the device.

use ir::sampling::Sampling;
use search::{DeviceError, Handle};
use vm_host::{Decoded, HostError, Request, Resident};

use super::{Gpu, device_error};

/// Why a command was not run.
pub(crate) enum Undone {
    /// It asks for what is not there; nothing has changed, and nobody else is touched.
    Refused(String),
    /// The machine failed: every sequence is lost.
    Failed(DeviceError),
}

impl std::fmt::Display for Undone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => f.write_str(why),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl From<HostError> for Undone {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Request(why) => Self::Refused(why),
            error => Self::Failed(device_error(error)),
        }
    }
}

impl Gpu<'_> {
    /// Boots for so many sequences, and launches the kernel with a program.
    pub(crate) fn serve(&mut self, handle: Handle, sessions: u32) -> Result<(), DeviceError> {
        self.sessions = sessions.max(self.sessions);
        self.activate(handle, false).map(|_| ())
    }

    /// How tokens of a session are chosen in sampled commands from now on.
    pub(crate) fn choose_by(
        &mut self,
        handle: Handle,
        session: u32,
        sampling: &Sampling,
    ) -> Result<(), Undone> {
        self.undone(handle, |running| running.set_sampling(session, sampling))
    }

    /// Runs a command of a session. While it runs, `give_way` is asked whether it is to end after the step under way.
    pub(crate) fn command(
        &mut self,
        handle: Handle,
        request: &Request<'_>,
        give_way: &mut dyn FnMut() -> bool,
    ) -> Result<Decoded, Undone> {
        self.sequences.fill(None); // of searches
        self.undone(handle, |running| running.run(request, give_way))
    }

    /// Runs tokens at the next positions of a session. With `read`, gives the logits after the last of them.
    pub(crate) fn feed(
        &mut self,
        handle: Handle,
        session: u32,
        position: u32,
        tokens: &[u32],
        read: bool,
    ) -> Result<Vec<f32>, Undone> {
        self.sequences.fill(None);
        let (head, last) = tokens.split_at(tokens.len().saturating_sub(usize::from(read)));
        self.undone(handle, |running| {
            if !head.is_empty() {
                running.decode(session, position, head, 1, &[], false)?;
            }
            if last.is_empty() {
                return Ok(Vec::new());
            }
            let position = position + head.len() as u32;
            running.decode(session, position, last, 1, &[], true)?;
            Ok(running.logits(1)?.into_iter().next().unwrap_or_default())
        })
    }

    /// Does something with the running kernel. What fails ends the kernel; what is refused leaves it as it is.
    fn undone<T>(
        &mut self,
        handle: Handle,
        act: impl FnOnce(&mut Resident) -> Result<T, HostError>,
    ) -> Result<T, Undone> {
        let done = match self.activate(handle, false) {
            Ok(running) => act(running).map_err(Undone::from),
            Err(error) => Err(Undone::Failed(error)),
        };
        match done {
            Err(Undone::Failed(error)) => self.recover(Err(error)).map_err(Undone::Failed),
            done => done,
        }
    }
}
