//! Child processes: this program again, and a command that is run to its end or its time limit, whose output is
//! collected. The child is always reaped.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

/// The polling interval of a running child.
const LOOK: Duration = Duration::from_millis(20);

/// How long the pipes may stay open after a child has ended: a grandchild can hold them.
const DRAIN: Duration = Duration::from_secs(2);

/// This process's program, whatever has become of its file.
pub(crate) const SELF: &str = "/proc/self/exe";

/// The command that starts `amk`: program and first arguments.
static START: OnceLock<Vec<OsString>> = OnceLock::new();

/// Names the command that starts `amk` with the arguments that follow: a program and its first arguments, such as
/// `python -m amk`. It must be of this build. The first call takes effect; without one it is `amk` of `PATH`.
pub fn starts_as(command: impl IntoIterator<Item = OsString>) {
    let _ = START.set(command.into_iter().collect());
}

/// This program again, even if its file was replaced: both sides are the same build.
pub(crate) fn this_program() -> Command {
    let start = START.get().map_or(&[][..], Vec::as_slice);
    let (program, first) = start
        .split_first()
        .map_or(("amk".into(), &[][..]), |(program, first)| (program.clone(), first));
    let mut command = Command::new(program);
    if first.is_empty() {
        command.arg0("amk");
    }
    command.args(first);
    command
}

/// The same for another program to start: to it, `/proc/self/exe` would be itself.
pub(crate) fn this_program_by_path() -> io::Result<Command> {
    let start = this_program();
    if start.get_program() != SELF {
        return Ok(start);
    }
    let mut command = Command::new(std::fs::read_link(SELF)?);
    command.args(start.get_args());
    Ok(command)
}

/// A child that ended by itself.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Its standard output.
    pub(crate) out: String,
    /// Its standard error.
    pub(crate) err: String,
}

impl Ended {
    /// The last line on standard error that is not empty.
    pub(crate) fn last_line(&self) -> &str {
        self.err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default()
    }
}

/// Runs a command with this text on its standard input. The kind of the error is `NotFound` if there is no such program
/// and `TimedOut` at the limit.
pub(crate) fn run(mut command: Command, input: &str, timeout: Duration) -> io::Result<Ended> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn()?;
    let stdin = child.stdin.take();
    let input = input.to_owned();
    // On threads: a child may stop reading, and pipes fill up.
    std::thread::spawn(move || stdin.map(|mut pipe| pipe.write_all(input.as_bytes())));
    let (out, err) = (collected(child.stdout.take()), collected(child.stderr.take()));
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() < timeout => std::thread::sleep(LOOK),
            waiting => {
                let _ = child.kill();
                let _ = child.wait();
                let late = format!("no answer within {} s", timeout.as_secs_f64());
                let late = io::Error::new(io::ErrorKind::TimedOut, late);
                return Err(waiting.err().unwrap_or(late));
            }
        }
    };
    let out = out.recv_timeout(DRAIN).unwrap_or_default();
    let err = err.recv_timeout(DRAIN).unwrap_or_default();
    Ok(Ended { status, out, err })
}

/// Everything written to a pipe, once it is closed.
fn collected(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // After an error, the bytes read so far are the result.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}
