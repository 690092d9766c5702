//! The host half of the ring protocol. Pairs with `vm-device/cuda/ring.cuh` and `poller.cuh`, function by function.
//!
//! Entry `i` of both rings carries sequence `i + 1`, written last with release and read first with acquire. The host writes
//! submissions and `abort`, the device writes completions, `heartbeat` and `head`: every word has one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::{
    Completion, DEVICES_MAX, RING_ENTRIES, RingIndices, Status, Submission, WORKERS_MAX,
    WorkerHeartbeat,
};

use crate::error::HostError;

/// Byte offsets of the parts in the mapped block.
pub(crate) const SUBMISSIONS: usize = 0;
/// Completions, after the submissions.
pub(crate) const COMPLETIONS: usize = SUBMISSIONS + RING_ENTRIES as usize * size_of::<Submission>();
/// Then the indices, on cache lines of their own.
pub(crate) const INDICES: usize =
    (COMPLETIONS + RING_ENTRIES as usize * size_of::<Completion>()).next_multiple_of(128);
/// Then the status block.
pub(crate) const STATUS: usize = (INDICES + size_of::<RingIndices>()).next_multiple_of(128);
/// Then one heartbeat per worker.
pub(crate) const WORKER_HEARTBEATS: usize = (STATUS + size_of::<Status>()).next_multiple_of(128);
/// Bytes of all of it.
pub(crate) const BYTES: usize = (WORKER_HEARTBEATS
    + WORKERS_MAX as usize * size_of::<WorkerHeartbeat>())
.next_multiple_of(4096);

/// Interval at which a wait looks whether all devices are alive. The poller writes its heartbeat more often.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Polls of a completion between two looks at tokens.
const POLLS_PER_LOOK: u32 = 16;

/// The words of a ring, by byte offset. The protocol is written against this trait, so that a model checker can run it (`ring_tests.rs`).
pub(crate) trait Words {
    fn load(&self, offset: usize, order: Ordering) -> u32;
    fn store(&self, offset: usize, value: u32, order: Ordering);
}

/// What goes through a ring.
#[derive(Clone, Copy, Debug)]
pub enum Passed<'a> {
    /// The host has published this command.
    Submission(&'a Submission),
    /// The host has read this answer.
    Completion(&'a Completion),
}

/// A callback for all that goes through a ring, on the thread that drives the machine. It must not block.
pub type RingTap = Arc<dyn Fn(Passed<'_>) + Send + Sync>;

/// Words in memory that the devices share: this many bytes.
pub(crate) struct Mapped(*mut u8, usize);

// SAFETY: the memory outlives the ring (the machine owns both) and is only ever accessed atomically.
unsafe impl Send for Mapped {}

impl Mapped {
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= self.1 && offset.is_multiple_of(4));
        // SAFETY: in range and aligned; the word is only ever accessed atomically, on both sides.
        unsafe { AtomicU32::from_ptr(self.0.add(offset).cast()) }
    }
}

impl Words for Mapped {
    fn load(&self, offset: usize, order: Ordering) -> u32 {
        self.word(offset).load(order)
    }

    fn store(&self, offset: usize, value: u32, order: Ordering) {
        self.word(offset).store(value, order);
    }
}

/// The host's end of a ring. Each further device of a program has a block of its own behind the first, of which only the words to leave, the
/// poller's clock, the status and the heartbeats are used.
pub(crate) struct RingHost<W = Mapped> {
    words: W,
    devices: u32,
    /// Workers of a device.
    workers: u32,
    tail: u32, // submissions published
    seen: u32, // completions read
    tap: Option<RingTap>,
}

impl RingHost {
    /// Takes over zeroed blocks of host memory: one per device, each for `workers` workers.
    ///
    /// # Safety
    /// `base` points to `BYTES` bytes for each device, 128-byte aligned, that outlive the ring and that only the devices share.
    pub(crate) unsafe fn new(base: *mut u8, devices: u32, workers: u32) -> Self {
        debug_assert_eq!(base as usize % 128, 0);
        let words = Mapped(base, devices as usize * BYTES);
        Self { words, devices, workers, tail: 0, seen: 0, tap: None }
    }
}

impl<W: Words> RingHost<W> {
    /// Shows everything that goes through the ring from now on to a callback.
    pub(crate) fn show(&mut self, tap: Option<RingTap>) {
        self.tap = tap;
    }

    fn load(&self, offset: usize, order: Ordering) -> u32 {
        self.words.load(offset, order)
    }

    fn store(&self, offset: usize, value: u32, order: Ordering) {
        self.words.store(offset, value, order);
    }

    /// Publishes a command and returns its sequence. Pairs with ring.cuh: ring_acquire in poller_run.
    pub(crate) fn publish(&mut self, submission: &Submission) -> Result<u32, HostError> {
        if self.tail.wrapping_sub(self.seen) >= RING_ENTRIES {
            return Err(HostError::Request(format!(
                "the ring holds {RING_ENTRIES} commands already: take a completion first"
            )));
        }
        let sequence = self.tail.wrapping_add(1);
        let entry = SUBMISSIONS + (self.tail % RING_ENTRIES) as usize * size_of::<Submission>();
        let submission = Submission { sequence, ..*submission };
        let words: [u32; size_of::<Submission>() / 4] = bytemuck::cast(submission);
        let last = words.len() - 1; // the sequence
        for (i, word) in words[..last].iter().enumerate() {
            self.store(entry + i * 4, *word, Ordering::Relaxed);
        }
        self.store(entry + last * 4, sequence, Ordering::Release);
        self.tail = sequence;
        self.tap.iter().for_each(|tap| tap(Passed::Submission(&submission)));
        Ok(sequence)
    }

    /// Copies a value word by word. Its writer is done, or each word is independent.
    fn copy<T: bytemuck::Pod>(&self, offset: usize) -> T {
        let mut copy = T::zeroed();
        let words: &mut [u32] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut copy));
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.load(offset + index * 4, Ordering::Relaxed);
        }
        copy
    }

    /// The completion of a command, by its number from zero, if its entry holds it.
    fn posted(&self, index: u32) -> Option<Completion> {
        let entry = COMPLETIONS + (index % RING_ENTRIES) as usize * size_of::<Completion>();
        let sequence = entry + core::mem::offset_of!(Completion, sequence);
        let here = self.load(sequence, Ordering::Acquire) == index.wrapping_add(1);
        here.then(|| self.copy(entry))
    }

    /// The next completion, if it has been posted. Pairs with poller.cuh: post_completion.
    pub(crate) fn poll_completion(&mut self) -> Option<Completion> {
        let completion = self.posted(self.seen)?;
        self.seen = self.seen.wrapping_add(1);
        self.tap.iter().for_each(|tap| tap(Passed::Completion(&completion)));
        Some(completion)
    }

    /// Waits for the next completion, at most until `limit`. If a device's heartbeat stops, it calls `gone`, whether the kernel has exited (one
    /// that died posts nothing more): a query of the driver, during which no token would be seen. Now and then it calls `preempt`: once that has
    /// returned true, the command must yield.
    ///
    /// # Errors
    /// The status block's reason if the device stopped, the driver's if the kernel died, else a time-out.
    pub(crate) fn wait_completion(
        &mut self,
        limit: Duration,
        mut gone: impl FnMut() -> Result<bool, HostError>,
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<Completion, HostError> {
        let start = Instant::now();
        let heartbeat = self.heartbeat();
        let mut beats = self.heartbeats();
        let mut spins = 0_u32;
        let mut look_at = LOOK_EVERY;
        let mut asked = false;
        loop {
            if let Some(completion) = self.poll_completion() {
                return Ok(completion);
            }
            spins = spins.wrapping_add(1);
            // It is called after the request, too: it also gives the masks that the last step waits for.
            if spins.is_multiple_of(POLLS_PER_LOOK)
                && preempt()
                && !std::mem::replace(&mut asked, true)
            {
                self.preempt(self.seen.wrapping_add(1));
            }
            if spins.is_multiple_of(1024) {
                if let Some(status) = self.status() {
                    return Err(HostError::Trapped(Box::new(status)));
                }
                let waited = start.elapsed();
                if waited > limit {
                    return Err(HostError::TimedOut {
                        waited,
                        alive: self.heartbeat() != heartbeat,
                    });
                }
                if waited > look_at {
                    let before = std::mem::replace(&mut beats, self.heartbeats());
                    let mut pairs = before.iter().zip(&beats).take(self.devices as usize);
                    let silent = pairs.any(|(before, now)| before == now);
                    // An exception of the kernel, which every later call reports too.
                    let died = |error: HostError| HostError::Died(error.to_string());
                    if silent && gone().map_err(died)? {
                        return self.last_words();
                    }
                    look_at = waited + LOOK_EVERY;
                }
            }
            std::hint::spin_loop();
        }
    }

    /// The last completion of a kernel that is gone: it may have answered after the last poll.
    fn last_words(&mut self) -> Result<Completion, HostError> {
        match (self.poll_completion(), self.status()) {
            (Some(completion), _) => Ok(completion),
            (None, Some(status)) => Err(HostError::Trapped(Box::new(status))),
            (None, None) => Err(HostError::Left),
        }
    }

    /// The poller's clock: it changes while the poller lives.
    pub(crate) fn heartbeat(&self) -> u32 {
        self.heartbeats()[0]
    }

    /// The clocks of all devices.
    fn heartbeats(&self) -> [u32; DEVICES_MAX] {
        let word = INDICES + core::mem::offset_of!(RingIndices, heartbeat);
        let mut beats = [0; DEVICES_MAX];
        for (beat, block) in beats.iter_mut().zip(self.blocks()) {
            *beat = self.load(block + word, Ordering::Relaxed);
        }
        beats
    }

    /// Sequence of the current command if it waits for weights, else zero.
    pub(crate) fn waiting(&self) -> u32 {
        self.load(INDICES + core::mem::offset_of!(RingIndices, waiting), Ordering::Relaxed)
    }

    /// Offsets of the blocks of all devices.
    fn blocks(&self) -> impl Iterator<Item = usize> + use<W> {
        (0..self.devices as usize).map(|device| device * BYTES)
    }

    /// The last heartbeat of a worker, counted over all devices. Pairs with worker.cuh: worker_heartbeat.
    pub(crate) fn worker_heartbeat(&self, worker: u32) -> WorkerHeartbeat {
        let (device, index) = (worker / self.workers.max(1), worker % self.workers.max(1));
        let block = device.min(self.devices - 1) as usize * BYTES;
        let index = (index % WORKERS_MAX) as usize;
        self.copy(block + WORKER_HEARTBEATS + index * size_of::<WorkerHeartbeat>())
    }

    /// Completions posted since the launch. Pairs with poller.cuh: post_completion.
    pub(crate) fn answered(&self) -> u32 {
        self.load(INDICES + core::mem::offset_of!(RingIndices, head), Ordering::Acquire)
    }

    /// A completion that was posted, for a monitor; `None` if its entry may have been overwritten. The device reuses an entry one wrap later,
    /// without announcing it: so entries of the last quarter of a wrap are not trusted.
    pub(crate) fn completion(&self, index: u32) -> Option<Completion> {
        let completion = self.posted(index)?;
        let ahead = self.answered().wrapping_sub(index);
        (ahead <= RING_ENTRIES / 4 * 3).then_some(completion)
    }

    /// Commands published and not answered, for a monitor.
    pub(crate) fn outstanding(&self) -> u32 {
        let answered = self.answered();
        let published = |index: u32| {
            let entry = SUBMISSIONS + (index % RING_ENTRIES) as usize * size_of::<Submission>();
            let sequence = entry + core::mem::offset_of!(Submission, sequence);
            self.load(sequence, Ordering::Acquire) == index.wrapping_add(1)
        };
        (0..RING_ENTRIES).take_while(|ahead| published(answered.wrapping_add(*ahead))).count()
            as u32
    }

    /// Makes all devices leave. Pairs with poller.cuh: poller_wait, poller_run, and devices.cuh: device_look.
    pub(crate) fn abort(&self) {
        let word = INDICES + core::mem::offset_of!(RingIndices, abort);
        self.blocks().for_each(|block| self.store(block + word, 1, Ordering::Release));
    }

    /// Makes a decode command end after the current step. No effect on one that has ended. Pairs with poller.cuh: poller_wait.
    pub(crate) fn preempt(&self, sequence: u32) {
        let word = INDICES + core::mem::offset_of!(RingIndices, preempt);
        self.store(word, sequence, Ordering::Relaxed);
    }

    /// The first status block that a device has completed. Pairs with worker.cuh: trap.
    pub(crate) fn status(&self) -> Option<Status> {
        let valid = STATUS + core::mem::offset_of!(Status, valid);
        let mut blocks = self.blocks();
        let block = blocks.find(|block| self.load(block + valid, Ordering::Acquire) != 0)?;
        Some(self.copy(block + STATUS))
    }

    /// Waits for the status block of a device whose completion reports a trap, at most until `limit`. The poller leaves on any abort, and the
    /// reporting worker may still be writing (tests/src/explore/models/trap.rs).
    pub(crate) fn await_status(&self, limit: Duration) -> Option<Status> {
        let start = Instant::now();
        loop {
            let status = self.status();
            if status.is_some() || start.elapsed() > limit {
                return status;
            }
            std::hint::spin_loop();
        }
    }

    /// Resets all words for a new launch. No kernel is resident.
    pub(crate) fn reset(&mut self) {
        for offset in (0..self.devices as usize * BYTES).step_by(4) {
            self.store(offset, 0, Ordering::Relaxed);
        }
        (self.tail, self.seen) = (0, 0);
    }
}

#[cfg(debug_assertions)]
#[path = "ring_faults_tests.rs"]
mod faults;
#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
