//! Runs chat templates in separate processes.
//!
//! A template is a program: thirty lines that double a string make a gigabyte of it, and its engine counts steps, not
//! bytes. A thread that has to be stopped keeps its memory; a process returns it. So a program registers a command at
//! its start ([`templates_run_in`]). Each rendering then runs in a fresh process with limits of memory and time, which
//! is always killed and waited for.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, pidfd_open, setrlimit};

use crate::chat::Job;

/// Memory of one compilation or rendering, in bytes, beyond what the process has when it starts.
const MEMORY_MAX: u64 = 128 << 20;
/// Time of one compilation or rendering. The step limit is reached in about a second, so this is for slow steps.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The exit code of a process whose allocator has no memory: that of a missing capability.
const OUT_OF_MEMORY: i32 = 3;
/// Most concurrent processes; further ones wait for one of them to end.
const PROCESSES_MAX: usize = 4;

/// The command that starts a process which calls [`template_process`].
static START: OnceLock<fn() -> Command> = OnceLock::new();
static RUNNING: Running = Running { count: Mutex::new(0), ended: Condvar::new() };

/// Runs this program's chat templates in separate processes from now on. `start` is the command: this program with an
/// argument that makes it call [`template_process`]. Without this, templates run in the program itself, where their
/// steps and output are limited, and their memory is not.
pub fn templates_run_in(start: fn() -> Command) {
    // The first call takes effect.
    let _ = START.set(start);
}

/// The main function of a template's process: reads the job from standard input, and replaces it with the answer.
///
/// # Errors
/// When this process was not started by [`templates_run_in`]'s program.
pub fn template_process() -> io::Result<()> {
    limit_this_process()?;
    let mut paper = File::from(rustix::io::fcntl_dupfd_cloexec(io::stdin(), 0)?);
    let mut text = Vec::new();
    paper.read_to_end(&mut text)?;
    let job: Job = serde_json::from_slice(&text)?;
    drop(text);
    let (mark, answer) = match job.run() {
        Ok(prompt) => (b'+', prompt),
        Err(reason) => (b'-', reason),
    };
    paper.rewind()?;
    paper.set_len(0)?;
    paper.write_all(&[mark])?;
    paper.write_all(answer.as_bytes())
}

/// Exceeding the memory limit ends the process by SIGABRT, exceeding the time limit by SIGXCPU.
fn limit_this_process() -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let kib = kib.ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))?;
    let limits = [
        (Resource::As, kib * 1024 + MEMORY_MAX),
        (Resource::Cpu, TIME_MAX.as_secs()),
        (Resource::Core, 0),
    ];
    for (resource, most) in limits {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    Ok(())
}

/// Runs a job, in a separate process if one is registered; returns the prompt or an error.
pub(crate) fn run(job: &Job) -> Result<String, String> {
    let Some(start) = START.get() else { return job.run() };
    let _place = RUNNING.enter();
    in_process(start(), job).unwrap_or_else(|error| Err(format!("it could not be run: {error}")))
}

/// The outer error is the operating system's.
fn in_process(mut command: Command, job: &Job) -> io::Result<Result<String, String>> {
    let mut paper = File::from(memfd_create("template", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(io::BufWriter::new(&paper), job)?;
    paper.rewind()?;
    let own = Stdio::from(paper.try_clone()?);
    // Ctrl-C is for the program, which may want to finish the rendering.
    command.process_group(0);
    let child = command.stdin(own).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let Some(status) = Process(child).ended_within(TIME_MAX)? else {
        return Ok(Err(too_long()));
    };
    if !status.success() {
        return Ok(Err(failed(status)));
    }
    let mut answer = String::new();
    paper.rewind()?;
    paper.read_to_string(&mut answer)?;
    Ok(match answer.strip_prefix('+') {
        Some(prompt) => Ok(prompt.to_owned()),
        None => Err(answer.trim_start_matches('-').to_owned()),
    })
}

fn too_long() -> String {
    format!("it ran longer than {} s and was stopped", TIME_MAX.as_secs())
}

/// Why a process without an answer ended.
fn failed(status: ExitStatus) -> String {
    // A program without memory aborts, or its allocator ends it, as that of `amk` does.
    let aborted = status.signal() == Some(Signal::ABORT.as_raw());
    if aborted || status.code() == Some(OUT_OF_MEMORY) {
        return format!("it asked for more than {MEMORY_MAX} bytes of memory and was stopped");
    }
    if status.signal() == Some(Signal::XCPU.as_raw()) {
        return too_long();
    }
    format!("it made the template engine fail ({status})")
}

/// A process that is killed when its owner is dropped.
struct Process(Child);

impl Process {
    /// Its exit status, or `None` if it had to be killed.
    fn ended_within(mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let handle = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty())?;
        let began = Instant::now();
        loop {
            let left = limit.saturating_sub(began.elapsed());
            let left =
                Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(None),
                Ok(_) => return self.0.wait().map(Some),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Killing fails only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The number of running processes.
struct Running {
    count: Mutex<usize>,
    ended: Condvar,
}

/// One of them, released when it is dropped.
struct Place<'a>(&'a Running);

impl Running {
    /// Waits for a free place. Running processes end within [`TIME_MAX`].
    fn enter(&self) -> Place<'_> {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let count = self.ended.wait_while(count, |count| *count >= PROCESSES_MAX);
        *count.unwrap_or_else(PoisonError::into_inner) += 1;
        Place(self)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}
