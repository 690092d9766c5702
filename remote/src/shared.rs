//! Memory that both processes map: a header in which the child records what it is doing, then rows of logits.
//!
//! The header is read after a kill, so each word is written as soon as it is known. The rows belong to the child
//! between a request and its answer, and to the parent otherwise.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use abi::{Status, Trap};
use memmap2::{MmapOptions, MmapRaw};
use rayon::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use telemetry::Suspect;

/// Bytes of the header; rows follow it.
const HEAD_BYTES: usize = 4096;

/// First word, which identifies this memory.
const MAGIC: u32 = u32::from_le_bytes(*b"AMKS");

/// Offsets of the header's words.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const ROWS: usize = 1;
    pub(super) const VOCAB: usize = 2;
    pub(super) const REQUEST: usize = 3;
    pub(super) const PHASE: usize = 4;
    pub(super) const BEAT: usize = 5;
    pub(super) const HEARTBEAT: usize = 6;
    /// Words of an `abi::Status`, the last of which marks it complete.
    pub(super) const STATUS: usize = 16;
    /// Whether a worker is suspected, then the words of the `Suspect`.
    pub(super) const SUSPECTED: usize = 64;
    pub(super) const SUSPECT: usize = 65;
}

const STATUS_WORDS: usize = size_of::<Status>() / 4;

/// Declares the phases once, with their numbers and names.
macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident = $words:literal,)+) => {
        /// What a device process is doing.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Phase {
            $($(#[$doc])* $name,)+
        }

        impl Phase {
            const ALL: &[Self] = &[$(Self::$name),+];

            /// The phase in words.
            #[must_use]
            pub fn words(self) -> &'static str {
                match self {
                    $(Self::$name => $words,)+
                }
            }
        }
    };
}

phases! {
    /// Has not reported anything yet.
    Starting = "starting",
    /// Looks for driver, compiler and device.
    Opening = "opening the device",
    /// Waits for a request, after an answer.
    Waiting = "waiting for a request",
    /// Opens and decodes a sealed program.
    Unsealing = "opening a program",
    /// Compiles a kernel variant, or waits for one.
    Compiling = "compiling a kernel",
    /// Loads the model onto the device.
    Booting = "bringing the weights to the device",
    /// Ends a kernel and launches another.
    Launching = "launching a kernel",
    /// Uploads a program, switches to it, poisons the memory that it will write.
    Loading = "loading a program",
    /// The device runs positions.
    Running = "running positions",
    /// The device is timed.
    Timing = "timing",
    /// Copies logits.
    Reading = "reading logits",
    /// Waits for a kernel to end.
    Stopping = "waiting for a kernel to leave",
}

/// The mapping of the shared memory.
pub(crate) struct Shared {
    map: MmapRaw,
    rows: usize,
    vocab: usize,
}

impl Shared {
    /// Creates the memory for `rows` rows of `vocab` logits. Pages that are never written cost nothing.
    pub(crate) fn create(rows: usize, vocab: usize) -> io::Result<(Self, File)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create(c"amk-device", flags)?);
        file.set_len(Self::bytes(rows, vocab)?)?;
        // If a process truncated the file, accesses of the other would fault.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().map_raw(&file)?;
        let shared = Self { map, rows, vocab };
        let count = |n: usize| u32::try_from(n).map_err(io::Error::other);
        shared.word(at::ROWS).store(count(rows)?, Ordering::Relaxed);
        shared.word(at::VOCAB).store(count(vocab)?, Ordering::Relaxed);
        shared.word(at::MAGIC).store(MAGIC, Ordering::Release);
        Ok((shared, file))
    }

    /// Maps memory that the other process created.
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        let refuse = |what: &str| Err(io::Error::other(format!("the shared memory {what}")));
        let bytes = file.metadata()?.len();
        if bytes < HEAD_BYTES as u64 {
            return refuse("is too short");
        }
        let map = MmapOptions::new().map_raw(file)?;
        let mut shared = Self { map, rows: 0, vocab: 0 };
        if shared.word(at::MAGIC).load(Ordering::Acquire) != MAGIC {
            return refuse("has another magic number");
        }
        shared.rows = shared.word(at::ROWS).load(Ordering::Relaxed) as usize;
        shared.vocab = shared.word(at::VOCAB).load(Ordering::Relaxed) as usize;
        if Self::bytes(shared.rows, shared.vocab)? != bytes {
            return refuse("has another length than its header gives");
        }
        Ok(shared)
    }

    fn bytes(rows: usize, vocab: usize) -> io::Result<u64> {
        let bytes = rows
            .checked_mul(vocab)
            .and_then(|values| values.checked_mul(size_of::<f32>()))
            .and_then(|bytes| bytes.checked_add(HEAD_BYTES));
        bytes.map(|bytes| bytes as u64).ok_or_else(|| io::Error::other("too many logits"))
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        debug_assert!(index < HEAD_BYTES / 4);
        // SAFETY: inside the first page, which every mapping has, and aligned; all accesses to it are atomic.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().cast::<u32>().add(index)) }
    }

    fn values(&self) -> *mut f32 {
        // SAFETY: the mapping is longer than its first page, or there are no values and none are read.
        unsafe { self.map.as_mut_ptr().add(HEAD_BYTES).cast() }
    }
}

/// The rows of logits in one process's mapping.
pub(crate) struct Rows(Arc<Shared>);

impl Rows {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self(shared.clone())
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.0.rows
    }

    /// The first rows, which the child may write between a request and its answer.
    pub(crate) fn first_mut(&mut self, count: usize) -> Option<&mut [f32]> {
        if count > self.0.rows {
            return None;
        }
        // SAFETY: in range. This process has one `Rows`, which is borrowed exclusively; the other process does not
        // access the rows until it has the answer.
        Some(unsafe { std::slice::from_raw_parts_mut(self.0.values(), count * self.0.vocab) })
    }

    /// Copies the first rows, with all cores. The child must have answered.
    pub(crate) fn copy(&self, count: usize) -> Vec<Vec<f32>> {
        let (count, vocab) = (count.min(self.0.rows), self.0.vocab);
        // SAFETY: in range. The child writes only between a request and its answer, and no request is under way. Every
        // bit pattern is a valid `f32`.
        let values = unsafe { std::slice::from_raw_parts(self.0.values(), count * vocab) };
        values.par_chunks_exact(vocab.max(1)).map(<[f32]>::to_vec).collect()
    }
}

/// The header in which a device process records what it is doing.
#[derive(Clone)]
pub struct Board(Arc<Shared>);

impl Board {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self(shared.clone())
    }

    /// Records the phase that begins.
    pub fn enter(&self, phase: Phase) {
        self.0.word(at::PHASE).store(phase as u32, Ordering::Release);
    }

    /// Records the latest state of the kernel: its poller's clock and, if it has trapped, which task waited for what.
    pub fn kernel(&self, heartbeat: u32, status: Option<&Status>) {
        self.0.word(at::HEARTBEAT).store(heartbeat, Ordering::Relaxed);
        let Some(status) = status else { return };
        let words: &[u32; STATUS_WORDS] = bytemuck::cast_ref(status);
        let last = STATUS_WORDS - 1;
        for (index, word) in words[..last].iter().enumerate() {
            self.0.word(at::STATUS + index).store(*word, Ordering::Relaxed);
        }
        self.0.word(at::STATUS + last).store(words[last], Ordering::Release);
    }

    /// Records a worker that is suspected to have stalled, or that none is.
    pub fn suspect(&self, suspect: Option<&Suspect>) {
        for (index, word) in suspect.map(Suspect::to_words).iter().flatten().enumerate() {
            self.0.word(at::SUSPECT + index).store(*word, Ordering::Relaxed);
        }
        let suspected = u32::from(suspect.is_some());
        self.0.word(at::SUSPECTED).store(suspected, Ordering::Release);
    }

    /// Increments the heartbeat count, which shows that the process is alive.
    pub(crate) fn beat(&self) {
        self.0.word(at::BEAT).fetch_add(1, Ordering::Relaxed);
    }

    /// Starts a request: clears the status and the suspect of the one before.
    pub(crate) fn begin(&self, request: u32) {
        self.0.word(at::REQUEST).store(request, Ordering::Relaxed);
        for index in 0..STATUS_WORDS {
            self.0.word(at::STATUS + index).store(0, Ordering::Relaxed);
        }
        self.suspect(None);
    }

    /// Clears the header for a new process.
    pub(crate) fn reset(&self) {
        self.begin(0);
        self.enter(Phase::Starting);
    }

    /// The last state that the process recorded.
    #[must_use]
    pub fn last(&self) -> Last {
        let word = |index: usize| self.0.word(index).load(Ordering::Relaxed);
        let valid = self.0.word(at::STATUS + STATUS_WORDS - 1).load(Ordering::Acquire) != 0;
        let status = valid.then(|| {
            let words: [u32; STATUS_WORDS] = std::array::from_fn(|index| word(at::STATUS + index));
            bytemuck::cast(words)
        });
        let suspected = self.0.word(at::SUSPECTED).load(Ordering::Acquire) != 0;
        let suspect = std::array::from_fn(|index| word(at::SUSPECT + index));
        Last {
            suspect: suspected.then(|| Suspect::from_words(suspect)),
            phase: Phase::ALL.get(word(at::PHASE) as usize).copied(),
            request: word(at::REQUEST),
            beat: word(at::BEAT),
            heartbeat: word(at::HEARTBEAT),
            status,
        }
    }
}

/// The last state that a device process recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Last {
    /// What it was doing; `None` if the number is invalid.
    pub phase: Option<Phase>,
    /// The request, counted from one.
    pub request: u32,
    /// Ticks of its watching thread.
    pub beat: u32,
    /// The clock of the kernel's poller.
    pub heartbeat: u32,
    /// The status of the kernel, if it has trapped.
    pub status: Option<Status>,
    /// A worker without progress when last checked; the kernel had not trapped.
    pub suspect: Option<Suspect>,
}

impl std::fmt::Display for Last {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let phase = self.phase.map_or("in an unknown phase", Phase::words);
        write!(f, "{phase} (request {})", self.request)?;
        let Some(status) = &self.status else {
            write!(f, ", the kernel reported no trap")?;
            return self.suspect.map_or(Ok(()), |suspect| write!(f, ", but {suspect}"));
        };
        let trap = Trap::new(status.trap).map_or("unknown trap", Trap::name);
        let Status { worker, task, opcode, object, have, need, epoch, .. } = *status;
        let opcode = u16::try_from(opcode).ok().and_then(abi::Opcode::new);
        let opcode = opcode.map_or("unknown op", |opcode| opcode.info().name);
        write!(
            f,
            ", trap {trap}: worker {worker}, task {task} ({opcode}), counter {object} has {have} and needs {need}, step {epoch}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_the_same_rows_and_words() {
        let (parent, file) = Shared::create(3, 5).unwrap();
        let (parent, child) = (Arc::new(parent), Arc::new(Shared::open(&file).unwrap()));
        let mut rows = Rows::new(&child);
        assert_eq!(rows.len(), 3);
        assert!(rows.first_mut(4).is_none());
        let written: Vec<f32> = (0..10).map(|i| i as f32).collect();
        rows.first_mut(2).unwrap().copy_from_slice(&written);
        assert_eq!(Rows::new(&parent).copy(2), [&written[..5], &written[5..]]);
        let (here, there) = (Board::new(&child), Board::new(&parent));
        there.begin(7);
        here.enter(Phase::Running);
        assert_eq!(there.last().phase, Some(Phase::Running));
        assert!(there.last().to_string().contains("running positions (request 7)"));
        let status = Status {
            trap: Trap::CounterDeadline as u32,
            worker: 3,
            task: 14,
            object: 7,
            have: 12,
            need: 16,
            valid: 1,
            ..Status::default()
        };
        here.kernel(1, Some(&status));
        let said = there.last().to_string();
        for part in ["counter_deadline", "worker 3", "task 14", "counter 7 has 12 and needs 16"] {
            assert!(said.contains(part), "{said}");
        }
        there.begin(8);
        assert_eq!(there.last().status, None, "a new request forgets the trap of the last one");
        let still = Suspect::from_words([5, 900, 0, 14, 130, Trap::StageDeadline as u32, 3, 0, 1]);
        here.suspect(Some(&still));
        let said = there.last().to_string();
        for part in ["no trap, but worker 5", "900 ms", "task 14 of position 130", "stage 3"] {
            assert!(said.contains(part), "{said}");
        }
        here.kernel(2, Some(&status));
        assert!(
            !there.last().to_string().contains("900 ms"),
            "what the kernel says itself is better"
        );
        here.suspect(None);
        assert_eq!(there.last().suspect, None);
        here.suspect(Some(&still));
        there.begin(9);
        assert_eq!(there.last().suspect, None, "a new request forgets a suspicion too");
    }

    #[test]
    fn memory_that_lies_about_itself_is_refused() {
        let (shared, file) = Shared::create(2, 4).unwrap();
        shared.word(at::ROWS).store(3, Ordering::Relaxed);
        assert!(Shared::open(&file).is_err());
        shared.word(at::ROWS).store(2, Ordering::Relaxed);
        assert!(Shared::open(&file).is_ok());
        shared.word(at::MAGIC).store(0, Ordering::Relaxed);
        assert!(Shared::open(&file).is_err());
        assert!(Shared::create(usize::MAX, 2).is_err());
        assert!(file.set_len(100).is_err(), "sealed");
    }
}
