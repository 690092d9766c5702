//! The telemetry page, a shared stats segment: its memory, its writer and its readers.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use abi::{
    Activity, EventWords, Evidence, EvidenceFamily, ProgramWords, SessionWords, TELEMETRY_MAGIC,
    TELEMETRY_PROGRAMS, TELEMETRY_VERSION, Telemetry, WorkerWords,
};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use crate::events::{self, RING_WORDS};
use crate::find::{Folder, open};
use crate::sequence::{self, Mapped, Words};

/// Number of session places.
const SESSIONS: usize = abi::SESSIONS_MAX as usize;
/// Number of worker entries.
const WORKERS: usize = abi::WORKERS_MAX as usize;
/// Maximum attempts of a reader during writes.
const TRIES: u32 = 10_000;

/// The contents of a page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Page {
    /// The process and its totals.
    pub head: Telemetry,
    /// Sequences by place.
    pub sessions: [SessionWords; SESSIONS],
    /// Workers by number.
    pub workers: [WorkerWords; WORKERS],
    /// Programs by the number of their kernel.
    pub programs: [ProgramWords; TELEMETRY_PROGRAMS],
}

const WORD_BYTES: usize = size_of::<u64>();
const HEAD_WORDS: usize = size_of::<Telemetry>() / WORD_BYTES;
const SESSION_WORDS: usize = size_of::<SessionWords>() / WORD_BYTES;
const WORKER_WORDS: usize = size_of::<WorkerWords>() / WORD_BYTES;
const PROGRAM_WORDS: usize = size_of::<ProgramWords>() / WORD_BYTES;
const WORDS: usize = size_of::<Page>() / WORD_BYTES;
/// Bytes of the file: the page, and the trace ring behind it.
const FILE_BYTES: usize = (WORDS + RING_WORDS) * WORD_BYTES;
/// Index of the first program's words.
const PROGRAMS: usize = HEAD_WORDS + SESSIONS * SESSION_WORDS + WORKERS * WORKER_WORDS;
/// Index of the process's id and what it is doing.
const ACTIVITY: usize = core::mem::offset_of!(Telemetry, pid) / WORD_BYTES;
/// Words of a program before its tasks by op: its id and its passes.
const PROGRAM_HEAD: usize = core::mem::offset_of!(ProgramWords, workers) / WORD_BYTES;
/// Index of the number of events.
const EVENTS: usize = core::mem::offset_of!(Telemetry, events) / WORD_BYTES;
/// Index of the sequence word.
const SEQUENCE: usize = core::mem::offset_of!(Telemetry, sequence) / WORD_BYTES;

const _: () = assert!(core::mem::offset_of!(Telemetry, activity) == ACTIVITY * WORD_BYTES + 4);
const _: () = assert!(WORDS == PROGRAMS + TELEMETRY_PROGRAMS * PROGRAM_WORDS);
const _: () = assert!(core::mem::offset_of!(Telemetry, sequence).is_multiple_of(WORD_BYTES));

impl Page {
    /// An empty page, on the heap: it is large for a stack.
    #[must_use]
    pub fn boxed() -> Box<Self> {
        Box::new(bytemuck::Zeroable::zeroed())
    }

    fn words(&self) -> &[u64] {
        bytemuck::cast_slice(std::slice::from_ref(self))
    }

    /// The workers in use.
    #[must_use]
    pub fn running(&self) -> &[WorkerWords] {
        &self.workers[..(self.head.workers as usize).min(WORKERS)]
    }

    /// The open sequences.
    pub fn open(&self) -> impl Iterator<Item = (usize, &SessionWords)> {
        self.sessions.iter().enumerate().filter(|(_, session)| session.serial != 0)
    }

    /// Number of steps in the histogram.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.head.steps.iter().fold(0, |sum, count| sum.wrapping_add(*count))
    }
}

/// Decodes a text field: up to its first zero, with invalid UTF-8 replaced and control characters removed.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).chars().filter(|c| !c.is_control()).collect()
}

/// Writes as much of a text as fits, in whole characters.
fn put(out: &mut [u8], text: &str) {
    let mut end = text.len().min(out.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.fill(0);
    out[..end].copy_from_slice(&text.as_bytes()[..end]);
}

/// Nanoseconds since 1970.
#[must_use]
pub fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The memory of a page.
struct Memory {
    map: MmapRaw,
    /// Holds the lock that shows that the process is alive.
    _file: File,
    path: Option<PathBuf>,
}

impl Memory {
    /// Creates the memory in the folder. If that fails, creates memory that only this process sees, and returns the
    /// reason as well.
    fn create(folder: &Folder) -> io::Result<(Self, Option<io::Error>)> {
        let (file, path, why) = match folder.create(std::process::id()) {
            Ok((file, path)) => (file, Some(path), None),
            Err(error) => (anonymous()?, None, Some(error)),
        };
        match Self::map(file, path) {
            Ok(memory) => Ok((memory, why)),
            // No space in the folder: writing to memory without reserved space would fault.
            Err(error) => Ok((Self::map(anonymous()?, None)?, Some(error))),
        }
    }

    fn map(file: File, path: Option<PathBuf>) -> io::Result<Self> {
        let set = fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES as u64);
        let mapped = set.map_err(io::Error::from).and_then(|()| MmapOptions::new().map_raw(&file));
        match mapped {
            Ok(map) => Ok(Self { map, _file: file, path }),
            Err(error) => {
                path.iter().for_each(|path| drop(std::fs::remove_file(path)));
                Err(error)
            }
        }
    }

    fn words(&self) -> Mapped {
        // SAFETY: a mapping is page-aligned and was made with the length of the file; the caller keeps it beside the words.
        unsafe { Mapped::new(self.map.as_mut_ptr().cast_const().cast(), WORDS + RING_WORDS) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path); // readers keep their mapping
        }
    }
}

fn anonymous() -> io::Result<File> {
    Ok(File::from(memfd_create(c"amk-telemetry", MemfdFlags::CLOEXEC)?))
}

/// The contents to publish, with the parts that have changed.
struct Writing {
    page: Box<Page>,
    words: Mapped,
    /// Bitmask of changed sessions.
    sessions: u64,
    /// Whether workers changed.
    workers: bool,
    /// Bitmask of programs that were replaced.
    programs: u64,
    memory: Arc<Memory>, // of the words: dropped after them
}

const _: () = assert!(SESSIONS <= u64::BITS as usize);

/// The writer of a process's page. Clones write the same page.
#[derive(Clone)]
pub struct Publisher(Arc<Mutex<Writing>>);

/// An edit of the page in progress.
pub struct Edit<'a>(&'a mut Writing);

impl Edit<'_> {
    /// The process and its totals.
    pub fn head(&mut self) -> &mut Telemetry {
        &mut self.0.page.head
    }

    /// The command that the process runs, and its model.
    pub fn command(&mut self, command: &str, model: &str) {
        put(&mut self.0.page.head.command, command);
        put(&mut self.0.page.head.model, model);
    }

    /// Sets the device that runs the model, once its name is known.
    pub fn device(&mut self, name: &str) {
        put(&mut self.0.page.head.device, name);
    }

    /// A sequence. An out-of-range place is taken as the last one.
    pub fn session(&mut self, place: usize) -> &mut SessionWords {
        let place = place.min(SESSIONS - 1);
        self.0.sessions |= 1 << place;
        &mut self.0.page.sessions[place]
    }

    /// All workers.
    pub fn workers(&mut self) -> &mut [WorkerWords; WORKERS] {
        self.0.workers = true;
        &mut self.0.page.workers
    }

    /// Replaces a program. An out-of-range number is taken as the last one.
    pub fn program(&mut self, number: usize) -> &mut ProgramWords {
        let number = number.min(TELEMETRY_PROGRAMS - 1);
        self.0.programs |= 1 << number;
        &mut self.0.page.programs[number]
    }

    /// Sets how often each program has passed.
    pub fn passes(&mut self, passes: [u64; TELEMETRY_PROGRAMS]) {
        for (program, passes) in self.0.page.programs.iter_mut().zip(passes) {
            program.passes = passes;
        }
    }

    /// Sets how a family of figures is known.
    pub fn known(&mut self, family: EvidenceFamily, how: Evidence) {
        self.0.page.head.evidence[family as usize] = how as u32;
    }

    /// Writes an event into the trace ring, over the oldest one; its time is at least a nanosecond. Readers see it with
    /// the end of this edit, by which its counts are on the page, too.
    pub fn event(&mut self, event: EventWords) {
        let index = self.0.page.head.events;
        events::write(&self.0.words.part(WORDS, RING_WORDS), index, event);
        self.0.page.head.events += 1;
    }
}

impl Publisher {
    /// Creates the page of this process, with the fields that `about` sets. If its folder cannot be used, no other
    /// process sees it, and the second value is the reason.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(
        folder: &Folder,
        about: impl FnOnce(&mut Edit<'_>),
    ) -> io::Result<(Self, Option<io::Error>)> {
        let (memory, why) = Memory::create(folder)?;
        let memory = Arc::new(memory);
        let words = memory.words();
        let mut page = Page::boxed();
        let head = &mut page.head;
        let (pid, now) = (std::process::id(), now_ns());
        *head = Telemetry {
            pid,
            started_ns: now,
            beat_ns: now,
            version: TELEMETRY_VERSION,
            size: FILE_BYTES as u32,
            magic: TELEMETRY_MAGIC,
            ..*head
        };
        let writing = Writing { page, words, sessions: 0, workers: true, programs: 0, memory };
        let publisher = Self(Arc::new(Mutex::new(writing)));
        publisher.edit(about);
        Ok((publisher, why))
    }

    fn lock(&self) -> MutexGuard<'_, Writing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its path, if other processes can see it.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.lock().memory.path.clone()
    }

    /// A reader of the same page.
    #[must_use]
    pub fn reader(&self) -> Reader {
        let memory = self.lock().memory.clone();
        Reader::of(memory.words(), memory)
    }

    /// Edits the page and publishes the change. The cost is published with the next change.
    pub fn edit<T>(&self, change: impl FnOnce(&mut Edit<'_>) -> T) -> T {
        let began = Instant::now();
        let mut writing = self.lock();
        let value = change(&mut Edit(&mut writing));
        writing.page.head.beat_ns = now_ns();
        writing.page.head.writes += 1;
        writing.show();
        let cost = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        writing.page.head.write_ns = writing.page.head.write_ns.saturating_add(cost);
        value
    }
}

impl Writing {
    /// Writes the changed parts.
    fn show(&mut self) {
        let (page, words) = (self.page.words(), &self.words);
        let write = |from: usize, len: usize| {
            for (index, word) in page[from..from + len].iter().enumerate() {
                if from + index != SEQUENCE {
                    words.store(from + index, *word, std::sync::atomic::Ordering::Relaxed);
                }
            }
        };
        sequence::begin(words, SEQUENCE);
        write(0, HEAD_WORDS);
        let mut left = std::mem::take(&mut self.sessions);
        while left != 0 {
            let place = left.trailing_zeros() as usize;
            left &= left - 1;
            write(HEAD_WORDS + place * SESSION_WORDS, SESSION_WORDS);
        }
        if std::mem::take(&mut self.workers) {
            let workers = self.page.running().len();
            write(HEAD_WORDS + SESSIONS * SESSION_WORDS, workers * WORKER_WORDS);
        }
        let mut programs = std::mem::take(&mut self.programs);
        for number in 0..TELEMETRY_PROGRAMS {
            // Of a program that stays, only the passes change.
            let len = if programs & 1 == 0 { PROGRAM_HEAD } else { PROGRAM_WORDS };
            programs >>= 1;
            write(PROGRAMS + number * PROGRAM_WORDS, len);
        }
        sequence::end(words, SEQUENCE);
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.page.head.activity = Activity::Ended as u32;
        self.show();
    }
}

/// Why a page could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It cannot be opened.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is not a telemetry page.
    #[error("it is not a telemetry page of `amk`")]
    Foreign,
    /// It was written by another version.
    #[error(
        "it has version {found} and {size} bytes; this program reads version {TELEMETRY_VERSION} with {FILE_BYTES}"
    )]
    Version {
        /// Its version.
        found: u32,
        /// Its bytes.
        size: u32,
    },
    /// Its sequence stays odd: its process died during a write.
    #[error("its process stopped in the middle of writing it")]
    Torn,
}

/// Reads a page of this process or another one.
pub struct Reader {
    words: Mapped,
    ring: Mapped,
    _memory: Arc<Memory>, // of the words: dropped after them
}

impl Reader {
    /// Maps a page that another process writes, for reading only.
    ///
    /// # Errors
    /// If it is not a page of this version.
    pub fn open(path: &Path) -> Result<Self, Unreadable> {
        let file = open(path)?;
        let about = file.metadata()?;
        if !about.is_file() || about.len() < (3 * WORD_BYTES) as u64 {
            return Err(Unreadable::Foreign);
        }
        let short = about.len() != FILE_BYTES as u64;
        let map = MmapOptions::new().map_raw_read_only(&file)?;
        let len = map.len() / WORD_BYTES;
        // SAFETY: a mapping is page-aligned; it is kept beside the words, which are only loaded. The file belongs to
        // its writer, a process of this user, which sets its length once.
        let words = unsafe { Mapped::new(map.as_ptr().cast(), len) };
        let word = |index: usize| words.load(index, std::sync::atomic::Ordering::Relaxed);
        if word(0).to_ne_bytes() != TELEMETRY_MAGIC {
            return Err(Unreadable::Foreign);
        }
        let [found, size] = bytemuck::cast::<u64, [u32; 2]>(word(1));
        if short || found != TELEMETRY_VERSION || size as usize != FILE_BYTES {
            return Err(Unreadable::Version { found, size });
        }
        let memory = Memory { map, _file: file, path: None };
        Ok(Self::of(words, Arc::new(memory)))
    }

    fn of(words: Mapped, memory: Arc<Memory>) -> Self {
        Self { ring: words.part(WORDS, RING_WORDS), words, _memory: memory }
    }

    /// The trace ring.
    pub(crate) fn ring(&self) -> &Mapped {
        &self.ring
    }

    /// Whether its process has said that it ended.
    #[must_use]
    pub fn ended(&self) -> bool {
        let [_, activity] = bytemuck::cast::<u64, [u32; 2]>(
            self.words.load(ACTIVITY, std::sync::atomic::Ordering::Relaxed),
        );
        activity == Activity::Ended as u32
    }

    /// Events of the trace ring since the start. Pairs with the fence in [`sequence::begin`]: their entries are whole.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.words.load(EVENTS, std::sync::atomic::Ordering::Acquire)
    }

    /// Copies a consistent state of the page. Allocates nothing.
    ///
    /// # Errors
    /// If a write was in progress at every attempt.
    pub fn read(&self, page: &mut Page) -> Result<(), Unreadable> {
        let out: &mut [u64] = bytemuck::cast_slice_mut(std::slice::from_mut(page));
        for _ in 0..TRIES {
            if sequence::copy(&self.words, SEQUENCE, out) {
                return Ok(());
            }
            std::thread::yield_now();
        }
        Err(Unreadable::Torn)
    }
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
