//! The protocol of the socket: one request, one answer. Each is a frame with a header, a body in postcard format, and
//! trailing bytes.
//!
//! Lengths are checked before anything is allocated. The parent trusts no answer: a frame that is too long, belongs to
//! another request, is cut off or cannot be decoded ends the process that sent it.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ir::KernelConfig;
use ir::program::Seal;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use search::{Costs, DeviceError, DeviceInfo};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// First word of a frame. It is followed by the request's number, the length of the body and the length of the trailing
/// bytes.
const MAGIC: u32 = u32::from_le_bytes(*b"AMKR");

/// Maximum length of a body: tokens of a request, a compiler's log or timed blocks in an answer.
const BODY_BYTES_MAX: u32 = 16 << 20;

/// Maximum words of all buffers in an answer.
pub(crate) const BUFFER_WORDS_MAX: usize = BODY_BYTES_MAX as usize / size_of::<f32>() / 2;

/// Maximum length of a saved program.
const BYTES_MAX: u32 = 512 << 20;

/// A request of the parent. Handles are the parent's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Opens the device; the shared memory is sent beside it. The key seals all later programs.
    Open { key: [u8; 32] },
    /// Loads the program in the trailing bytes.
    Prepare { handle: u64, kernel: KernelConfig, seal: Seal },
    /// Runs tokens from `first` on. Logits go to the shared rows, chosen tokens into the answer.
    Run { handle: u64, tokens: Vec<u32>, first: u64 },
    /// Times two programs that the parent has proofs for. Their last logits go to the first two shared rows.
    Time { handles: [u64; 2], tokens: Vec<u32>, first: u64, rounds: u64, warmup: u64 },
    /// Lets one program continue the sequence of another.
    HandOver { from: u64, to: u64 },
    /// Announces kernels that will be needed.
    Foresee { kernels: Vec<KernelConfig> },
    /// Unloads a program.
    Release { handle: u64 },
    /// Reads some of a program's buffers.
    Buffers { handle: u64, which: Vec<u32> },
}

/// The result of a request. Each kind has a type of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, derive_more::TryInto)]
pub(crate) enum Reply {
    Opened(DeviceInfo),
    Done,
    Ran(Vec<u32>),
    Timed(Vec<[f64; 4]>, [u32; 2]),
    Buffers(Option<Vec<Vec<f32>>>),
}

/// An answer of the child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) result: Result<Reply, DeviceError>,
    /// Whether only a new process can use the device again.
    pub(crate) lost: bool,
    /// The costs of this process so far.
    pub(crate) costs: Costs,
}

/// Why no message was received or sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The deadline has passed.
    #[error("no answer in time")]
    Overrun,
    /// The other side has closed the socket.
    #[error("the socket was closed")]
    Closed,
    /// It sent an invalid message.
    #[error("it sent {0}")]
    Nonsense(String),
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(io::Error),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        let gone = [
            io::ErrorKind::UnexpectedEof,
            io::ErrorKind::BrokenPipe,
            io::ErrorKind::ConnectionReset,
        ];
        if gone.contains(&error.kind()) { Self::Closed } else { Self::Socket(error) }
    }
}

/// One end of the socket.
pub(crate) struct Channel {
    socket: UnixStream,
    /// The deadline of the current request.
    deadline: Option<Instant>,
}

impl Channel {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self { socket, deadline: None }
    }

    /// Sets the deadline of all following sends and receives.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
    }

    /// Sends a message with trailing bytes.
    pub(crate) fn send<T: Serialize>(
        &mut self,
        number: u32,
        body: &T,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let nonsense = |what: String| Broken::Nonsense(what);
        let body = postcard::to_stdvec(body).map_err(|e| nonsense(e.to_string()))?;
        let (Some(body_len), Some(bytes_len)) =
            (within(body.len(), BODY_BYTES_MAX), within(bytes.len(), BYTES_MAX))
        else {
            return Err(nonsense(format!("{} and {} bytes", body.len(), bytes.len())));
        };
        self.write(bytemuck::bytes_of(&[MAGIC, number, body_len, bytes_len]))?;
        self.write(&body)?;
        self.write(bytes)
    }

    /// Receives a message: its number, its body and its trailing bytes.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<(u32, T, Vec<u8>), Broken> {
        let mut head = [0_u32; 4];
        self.read(bytemuck::bytes_of_mut(&mut head))?;
        let [magic, number, body_len, bytes_len] = head;
        if magic != MAGIC {
            return Err(Broken::Nonsense("what is no message".to_owned()));
        }
        if body_len > BODY_BYTES_MAX || bytes_len > BYTES_MAX {
            let what = format!("a message of {body_len} and {bytes_len} bytes, which is too long");
            return Err(Broken::Nonsense(what));
        }
        let mut body = vec![0; body_len as usize];
        self.read(&mut body)?;
        let mut bytes = vec![0; bytes_len as usize];
        self.read(&mut bytes)?;
        let body = postcard::from_bytes(&body).map_err(|error| {
            Broken::Nonsense(format!("a message that does not decode ({error})"))
        })?;
        Ok((number, body, bytes))
    }

    /// The time left, at least 1 ms: data that has already arrived is read even past the deadline.
    fn left(&self) -> Option<Duration> {
        let moment = Duration::from_millis(1);
        self.deadline.map(|end| end.saturating_duration_since(Instant::now()).max(moment))
    }

    /// Converts a failed read or write to an error. An interruption, or a timeout before the deadline, is no error.
    fn failed(&self, error: io::Error, late: &mut bool) -> Result<(), Broken> {
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok(());
        }
        if ![io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&error.kind()) {
            return Err(error.into());
        }
        // A process that was stopped and continued may find its deadline passed and an answer waiting: it reads once more.
        let over = self.deadline.is_some_and(|end| Instant::now() >= end);
        if std::mem::replace(late, over) { Err(Broken::Overrun) } else { Ok(()) }
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        let mut late = false;
        while !bytes.is_empty() {
            self.socket.set_write_timeout(self.left())?;
            match self.socket.write(bytes) {
                Ok(0) => return Err(Broken::Closed),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => self.failed(error, &mut late)?,
            }
        }
        Ok(())
    }

    fn read(&mut self, mut bytes: &mut [u8]) -> Result<(), Broken> {
        let mut late = false;
        while !bytes.is_empty() {
            self.socket.set_read_timeout(self.left())?;
            match self.socket.read(bytes) {
                Ok(0) => return Err(Broken::Closed),
                Ok(read) => bytes = &mut bytes[read..],
                Err(error) => self.failed(error, &mut late)?,
            }
        }
        Ok(())
    }

    /// Sends a file descriptor, with one byte to carry it.
    pub(crate) fn send_file(&self, file: impl AsFd) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other("no room for a file"));
        }
        let byte = [IoSlice::new(&[0])];
        rustix::net::sendmsg(&self.socket, &byte, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Receives what [`Channel::send_file`] sent.
    pub(crate) fn receive_file(&self) -> io::Result<OwnedFd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut place = [IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&self.socket, &mut place, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let files = control.drain().filter_map(|message| {
            if let RecvAncillaryMessage::ScmRights(files) = message { Some(files) } else { None }
        });
        files.flatten().next().ok_or_else(|| io::Error::other("no file came with the first byte"))
    }
}

fn within(len: usize, most: u32) -> Option<u32> {
    u32::try_from(len).ok().filter(|&len| len <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ends with a deadline that only tests with their own deadline reach.
    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        let (mut one, mut other) = (Channel::new(one), Channel::new(other));
        for end in [&mut one, &mut other] {
            end.set_deadline(Instant::now() + Duration::from_secs(60));
        }
        (one, other)
    }

    /// A deadline that passes during a test.
    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (mut one, mut other) = pair();
        let kernel = KernelConfig { poll_sleep_ns: 100, ..KernelConfig::default() };
        let requests = [
            Request::Open { key: [5; 32] },
            Request::Prepare { handle: 3, kernel, seal: [7; 32] },
            Request::Run { handle: 3, tokens: vec![1, 2, 3], first: 1 },
            Request::Time { handles: [1, 2], tokens: vec![4], first: 0, rounds: 12, warmup: 1 },
            Request::Foresee { kernels: vec![kernel; 2] },
            Request::Release { handle: 9 },
        ];
        for (number, request) in (7..).zip(&requests) {
            one.send(number, request, &[1, 2, 3]).unwrap();
            let (got, body, bytes) = other.receive::<Request>().unwrap();
            assert_eq!((got, &body, &bytes[..]), (number, request, &[1, 2, 3][..]));
        }
        let error = DeviceError::TimedOut { after_ms: 3, status: "x".into() };
        let answer = Answer { result: Err(error), lost: true, costs: Costs::default() };
        other.send(1, &answer, &[]).unwrap();
        assert_eq!(one.receive::<Answer>().unwrap().1, answer);
    }

    #[test]
    fn a_file_travels() {
        let (one, other) = pair();
        let (shared, file) = crate::shared::Shared::create(1, 1).unwrap();
        one.send_file(&file).unwrap();
        drop(file);
        let there = std::fs::File::from(other.receive_file().unwrap());
        assert!(crate::shared::Shared::open(&there).is_ok());
        drop(shared);
        one.socket.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(other.receive_file().is_err());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let head = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
        let bad: [(Vec<u8>, &str); 5] = [
            (b"Traceback (most recent call last)".to_vec(), "no message"),
            (head([MAGIC, 1, BODY_BYTES_MAX + 1, 0]), "too long"),
            (head([MAGIC, 1, 0, u32::MAX]), "too long"),
            ([head([MAGIC, 1, 3, 0]), vec![0xff; 3]].concat(), "does not decode"),
            (head([MAGIC, 1, 0, 0]), "does not decode"),
        ];
        for (bytes, expected) in bad {
            let (mut one, mut other) = pair();
            other.write(&bytes).unwrap();
            let error = one.receive::<Answer>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn half_a_message_is_waited_for_until_the_deadline() {
        let (mut one, mut other) = pair();
        other.write(&MAGIC.to_le_bytes()).unwrap();
        let deadline = soon();
        one.set_deadline(deadline);
        assert!(matches!(one.receive::<Answer>(), Err(Broken::Overrun)));
        assert!(Instant::now() >= deadline);
        let (mut one, mut other) = pair();
        other.write(&MAGIC.to_le_bytes()).unwrap();
        drop(other);
        assert!(matches!(one.receive::<Answer>(), Err(Broken::Closed)));
    }

    #[test]
    fn who_does_not_read_is_not_waited_for() {
        let (mut one, _other) = pair();
        one.set_deadline(soon());
        let error = one.send(1, &Request::Open { key: [0; 32] }, &vec![0; 64 << 20]);
        assert!(matches!(error, Err(Broken::Overrun)), "{error:?}");
    }

    #[test]
    fn an_answer_that_waits_is_taken_after_the_deadline() {
        let (mut one, mut other) = pair();
        other.send(1, &Request::Open { key: [0; 32] }, &[]).unwrap();
        one.set_deadline(Instant::now() - Duration::from_secs(1));
        assert!(one.receive::<Request>().is_ok());
    }
}
