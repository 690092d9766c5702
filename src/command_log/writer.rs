//! The file of a command log: a thread writes it behind a queue that is bounded, as the file is.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use abi::{Completion, Submission};
use telemetry::now_ns;
use vm_host::{Passed, RingTap};

use super::{Entry, Head, Line};
use crate::failure::Failure;
use crate::report;

/// Entries that may wait for the file.
const QUEUE: usize = 1024;
/// Bytes that are kept for the last entry.
const LAST: u64 = 256;
/// How long entries may wait in memory.
const FLUSH_EVERY: Duration = Duration::from_millis(100);
/// How long the end waits for the file.
const PATIENCE: Duration = Duration::from_secs(5);

enum Message {
    Line(Line),
    Close,
}

#[derive(Default)]
struct Counts {
    /// Whether an entry is missing: none is written after it.
    full: AtomicBool,
    written: AtomicU64,
    dropped: AtomicU64,
}

impl Counts {
    fn drop_one(&self) {
        self.full.store(true, Ordering::Relaxed);
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// An open log. Clones write to the same file; pushing an entry never blocks.
#[derive(Clone)]
pub(crate) struct CommandLog {
    queue: SyncSender<Message>,
    counts: Arc<Counts>,
    numbers: Arc<AtomicU64>,
    path: Arc<PathBuf>,
    /// Disconnected when the file is complete.
    done: Arc<std::sync::Mutex<Receiver<()>>>,
}

/// What became of a log.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Ended {
    pub(crate) file: PathBuf,
    pub(crate) entries: u64,
    pub(crate) dropped: u64,
}

impl CommandLog {
    /// Begins a log of at most `most` bytes in a new file.
    ///
    /// # Errors
    /// If there is such a file already, or it cannot be written.
    pub(crate) fn create(path: &Path, head: &Head, most: u64) -> Result<Self, Failure> {
        Self::with_queue(path, head, most, QUEUE)
    }

    pub(super) fn with_queue(
        path: &Path,
        head: &Head,
        most: u64,
        queue: usize,
    ) -> Result<Self, Failure> {
        let remedy = "--command-log names a file that does not exist yet";
        let refused = Failure::cannot::<std::io::Error>("write", path, remedy);
        let mut file = std::fs::File::create_new(path).map_err(refused)?;
        let mut first = serde_json::to_string(head).unwrap_or_default();
        first.push('\n');
        file.write_all(first.as_bytes()).map_err(refused)?;
        let counts = Arc::<Counts>::default();
        let (queue, inbox) = sync_channel(queue);
        let (finished, done) = sync_channel(0);
        let mut sink = Sink {
            file: BufWriter::new(file),
            left: most.saturating_sub(first.len() as u64 + LAST),
            counts: counts.clone(),
            last: 0,
        };
        let run = move || {
            sink.run(&inbox);
            drop(finished);
        };
        let thread = std::thread::Builder::new().name("command-log".to_owned()).spawn(run);
        thread.map_err(|error| Failure::usage(format!("no thread: {error}")))?;
        let (numbers, path) = (Arc::default(), Arc::new(path.to_owned()));
        Ok(Self { queue, counts, numbers, path, done: Arc::new(done.into()) })
    }

    /// Appends an entry that began at `began_ns`, or counts it as dropped.
    pub(crate) fn push(&self, began_ns: u64, entry: Entry) {
        if self.counts.full.load(Ordering::Relaxed) {
            return self.counts.drop_one();
        }
        let n = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let took_ns = now_ns().saturating_sub(began_ns);
        let line = Message::Line(Line { n, at_ns: began_ns, took_ns, entry });
        match self.queue.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.counts.drop_one(),
        }
    }

    /// A callback that logs what goes through a ring.
    pub(crate) fn tap(&self) -> RingTap {
        let log = self.clone();
        Arc::new(move |passed| log.push(now_ns(), in_words(passed)))
    }

    /// Ends the file; what is pushed later is dropped. Waits for the file a few seconds at most.
    pub(crate) fn close(&self) -> Ended {
        let began = Instant::now();
        while let Err(TrySendError::Full(_)) = self.queue.try_send(Message::Close)
            && began.elapsed() < PATIENCE
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Ok(done) = self.done.lock() {
            let _ = done.recv_timeout(PATIENCE); // it is never sent, but disconnected
        }
        let Counts { written, dropped, .. } = &*self.counts;
        let ended = Ended {
            file: self.path.to_path_buf(),
            entries: written.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
        };
        report::say(&ended.line());
        ended
    }
}

impl Ended {
    fn line(&self) -> String {
        let (file, entries) = (self.file.display(), self.entries);
        let dropped = match self.dropped {
            0 => String::new(),
            dropped => format!("; the {dropped} after them did not fit"),
        };
        format!("command log: {entries} entries in {file}{dropped}")
    }
}

fn in_words(passed: Passed<'_>) -> Entry {
    match passed {
        Passed::Submission(of) => {
            let words: [u32; size_of::<Submission>() / 4] = bytemuck::cast(*of);
            let command = abi::Command::new(of.command).map_or("unknown", abi::Command::name);
            let (sequence, command) = (of.sequence, command.to_owned());
            Entry::Submission { sequence, command, words: words.to_vec() }
        }
        Passed::Completion(of) => {
            let words: [u32; size_of::<Completion>() / 4] = bytemuck::cast(*of);
            Entry::Completion { sequence: of.sequence, words: words.to_vec() }
        }
    }
}

/// The thread's side.
struct Sink {
    file: BufWriter<std::fs::File>,
    /// Bytes that may still be written.
    left: u64,
    counts: Arc<Counts>,
    /// The number of the last line.
    last: u64,
}

impl Sink {
    fn run(&mut self, inbox: &Receiver<Message>) {
        let (mut flushed, mut told) = (Instant::now(), false);
        loop {
            match inbox.recv_timeout(FLUSH_EVERY) {
                Ok(Message::Line(line)) => self.line(&line),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::Close) | Err(RecvTimeoutError::Disconnected) => return self.close(),
            }
            if flushed.elapsed() >= FLUSH_EVERY {
                self.flush();
                flushed = Instant::now();
            }
            // Said here: standard error may block.
            if !told && self.counts.full.load(Ordering::Relaxed) {
                told = true;
                let last = self.last;
                report::say(&format!("note: the command log ends with entry {last}: full"));
            }
        }
    }

    fn line(&mut self, line: &Line) {
        // Lines after one that is missing are not a beginning of what happened. One that was queued before is.
        if line.n != self.last + 1 {
            return self.counts.drop_one();
        }
        let mut text = serde_json::to_string(line).unwrap_or_default();
        text.push('\n');
        let fits = text.len() as u64 <= self.left;
        if !fits || self.file.write_all(text.as_bytes()).is_err() {
            self.left = 0;
            return self.counts.drop_one();
        }
        self.left -= text.len() as u64;
        self.last = line.n;
        self.counts.written.fetch_add(1, Ordering::Relaxed);
    }

    /// A file that cannot be written takes no more.
    fn flush(&mut self) {
        if self.file.flush().is_err() {
            self.counts.full.store(true, Ordering::Relaxed);
        }
    }

    fn close(&mut self) {
        self.counts.full.store(true, Ordering::Relaxed);
        let dropped = self.counts.dropped.load(Ordering::Relaxed);
        let entry = Entry::Closed { dropped };
        let line = Line { n: self.last + 1, at_ns: now_ns(), took_ns: 0, entry };
        let text = serde_json::to_string(&line).unwrap_or_default();
        let _ = writeln!(self.file, "{text}").and_then(|()| self.file.flush()); // reported as cut
    }
}
