//! The host half of the ring protocol. Pairs with `vm-device/cuda/ring.cuh` and `poller.cuh`, function by function.
//!
//! Entry `i` of both rings carries sequence `i + 1`, written last with release and read first with acquire. The host writes
//! submissions and `abort`, the device writes completions, `heartbeat` and `head`: every word has one writer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::{Completion, RING_ENTRIES, RingIndices, Status, Submission};

use crate::error::HostError;

/// Byte offsets of the parts in the mapped block.
pub(crate) const SUBMISSIONS: usize = 0;
/// Completions behind the submissions.
pub(crate) const COMPLETIONS: usize = SUBMISSIONS + RING_ENTRIES as usize * size_of::<Submission>();
/// Then the indices, on lines of their own.
pub(crate) const INDICES: usize =
    (COMPLETIONS + RING_ENTRIES as usize * size_of::<Completion>()).next_multiple_of(128);
/// Then the status block.
pub(crate) const STATUS: usize = (INDICES + size_of::<RingIndices>()).next_multiple_of(128);
/// Bytes of all of it.
pub(crate) const BYTES: usize = (STATUS + size_of::<Status>()).next_multiple_of(4096);

/// How often a wait asks the driver for the kernel: a fraction of a step's time, and far cheaper than one.
const ASK_EVERY: Duration = Duration::from_millis(1);

/// The host's end of a ring that lives in memory shared with the device.
pub(crate) struct RingHost {
    base: *mut u8,
    tail: u32, // submissions published
    seen: u32, // completions taken
}

// SAFETY: the ring's memory outlives it (the machine owns both) and all access goes through this one value.
unsafe impl Send for RingHost {}

impl RingHost {
    /// Takes over a zeroed block.
    ///
    /// # Safety
    /// `base` points to `BYTES` bytes, 128-byte aligned, that outlive the ring and that only the device shares.
    pub(crate) unsafe fn new(base: *mut u8) -> Self {
        debug_assert_eq!(base as usize % 128, 0);
        Self { base, tail: 0, seen: 0 }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= BYTES && offset.is_multiple_of(4));
        // SAFETY: in range and aligned; the word is only ever accessed atomically, on both sides.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
    }

    /// Publishes a command and returns its sequence. Pairs with ring.cuh: ring_acquire in poller_run.
    ///
    /// # Errors
    /// If the ring is full.
    pub(crate) fn publish(&mut self, submission: &Submission) -> Result<u32, HostError> {
        if self.tail.wrapping_sub(self.seen) >= RING_ENTRIES {
            return Err(HostError::Request(format!(
                "the ring holds {RING_ENTRIES} commands already: take a completion first"
            )));
        }
        let sequence = self.tail.wrapping_add(1);
        let entry = SUBMISSIONS + (self.tail % RING_ENTRIES) as usize * size_of::<Submission>();
        let words: [u32; size_of::<Submission>() / 4] =
            bytemuck::cast(Submission { sequence: 0, ..*submission });
        let last = words.len() - 1; // the sequence
        for (i, word) in words[..last].iter().enumerate() {
            self.word(entry + i * 4).store(*word, Ordering::Relaxed);
        }
        self.word(entry + last * 4).store(sequence, Ordering::Release);
        self.tail = sequence;
        Ok(sequence)
    }

    /// The next completion, if it is there. Pairs with poller.cuh: post_completion.
    pub(crate) fn poll_completion(&mut self) -> Option<Completion> {
        let entry = COMPLETIONS + (self.seen % RING_ENTRIES) as usize * size_of::<Completion>();
        let words = size_of::<Completion>() / 4;
        if self.word(entry + (words - 1) * 4).load(Ordering::Acquire) != self.seen.wrapping_add(1) {
            return None;
        }
        let mut copy = [0_u32; size_of::<Completion>() / 4];
        for (i, word) in copy.iter_mut().enumerate() {
            *word = self.word(entry + i * 4).load(Ordering::Relaxed);
        }
        self.seen = self.seen.wrapping_add(1);
        Some(bytemuck::cast(copy))
    }

    /// Waits for the next completion, at most until `limit`. Now and then `gone` is asked whether the kernel is: one that died posts
    /// nothing any more.
    ///
    /// # Errors
    /// What the status block says if the device stopped, what the driver says if the kernel died, else a time-out.
    pub(crate) fn wait_completion(
        &mut self,
        limit: Duration,
        mut gone: impl FnMut() -> Result<bool, HostError>,
    ) -> Result<Completion, HostError> {
        let start = Instant::now();
        let heartbeat = self.heartbeat();
        let mut spins = 0_u32;
        let mut ask_at = ASK_EVERY;
        loop {
            if let Some(completion) = self.poll_completion() {
                return Ok(completion);
            }
            spins = spins.wrapping_add(1);
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
                if waited > ask_at {
                    // An exception of the kernel, which every later call reports too.
                    let died = |error: HostError| HostError::Died { message: error.to_string() };
                    if gone().map_err(died)? {
                        return self.last_words();
                    }
                    ask_at = waited + ASK_EVERY;
                }
            }
            std::hint::spin_loop();
        }
    }

    /// What a kernel that is gone left: it may have answered after it was last looked at.
    fn last_words(&mut self) -> Result<Completion, HostError> {
        match (self.poll_completion(), self.status()) {
            (Some(completion), _) => Ok(completion),
            (None, Some(status)) => Err(HostError::Trapped(Box::new(status))),
            (None, None) => Err(HostError::Left),
        }
    }

    /// The poller's clock: it changes while the poller lives.
    pub(crate) fn heartbeat(&self) -> u32 {
        self.word(INDICES + core::mem::offset_of!(RingIndices, heartbeat)).load(Ordering::Relaxed)
    }

    /// Asks the device to leave. Pairs with poller.cuh: poller_wait, poller_run.
    pub(crate) fn abort(&self) {
        self.word(INDICES + core::mem::offset_of!(RingIndices, abort)).store(1, Ordering::Release);
    }

    /// The status block, once the device has completed it. Pairs with worker.cuh: trap.
    pub(crate) fn status(&self) -> Option<Status> {
        if self.word(STATUS + core::mem::offset_of!(Status, valid)).load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut copy = [0_u32; size_of::<Status>() / 4];
        for (i, word) in copy.iter_mut().enumerate() {
            *word = self.word(STATUS + i * 4).load(Ordering::Relaxed);
        }
        Some(bytemuck::cast(copy))
    }

    /// Forgets everything, for a new launch. No kernel is resident.
    pub(crate) fn reset(&mut self) {
        for offset in (0..BYTES).step_by(4) {
            self.word(offset).store(0, Ordering::Relaxed);
        }
        (self.tail, self.seen) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> (Vec<u128>, RingHost) {
        let mut block = vec![0_u128; BYTES / 16 + 8];
        let base = block.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(128));
        // SAFETY: the block is long enough, aligned above, and returned beside the ring.
        let ring = unsafe { RingHost::new(base) };
        (block, ring)
    }

    /// Plays the device: answers the oldest submission.
    fn answer(ring: &RingHost, index: u32, token: u32) {
        let entry = COMPLETIONS + (index % RING_ENTRIES) as usize * size_of::<Completion>();
        let words: [u32; 16] = bytemuck::cast(Completion { token, ..Completion::default() });
        for (i, word) in words[..15].iter().enumerate() {
            ring.word(entry + i * 4).store(*word, Ordering::Relaxed);
        }
        ring.word(entry + 60).store(index + 1, Ordering::Release);
    }

    fn running() -> Result<bool, HostError> {
        Ok(false)
    }

    #[test]
    fn completions_arrive_in_order_over_several_laps() {
        let (_block, mut ring) = ring();
        for i in 0..RING_ENTRIES * 3 + 5 {
            assert_eq!(ring.publish(&Submission::default()).ok(), Some(i + 1));
            assert!(ring.poll_completion().is_none());
            answer(&ring, i, i * 7);
            assert_eq!(
                ring.wait_completion(Duration::from_secs(1), running).map(|c| c.token).ok(),
                Some(i * 7)
            );
        }
    }

    #[test]
    fn a_full_ring_refuses() {
        let (_block, mut ring) = ring();
        for _ in 0..RING_ENTRIES {
            assert!(ring.publish(&Submission::default()).is_ok());
        }
        assert!(matches!(ring.publish(&Submission::default()), Err(HostError::Request(_))));
        answer(&ring, 0, 1);
        assert!(ring.poll_completion().is_some());
        assert!(ring.publish(&Submission::default()).is_ok());
    }

    #[test]
    fn silence_is_a_time_out_and_a_trap_is_named() {
        let (_block, mut ring) = ring();
        let silent = ring.wait_completion(Duration::from_millis(5), running);
        assert!(matches!(silent, Err(HostError::TimedOut { alive: false, .. })));
        ring.word(STATUS).store(abi::Trap::CounterDeadline as u32, Ordering::Relaxed);
        ring.word(STATUS + core::mem::offset_of!(Status, valid)).store(1, Ordering::Release);
        let trapped = ring.wait_completion(Duration::from_secs(1), running);
        assert!(
            matches!(trapped, Err(HostError::Trapped(status)) if status.trap == abi::Trap::CounterDeadline as u32)
        );
        ring.reset();
        assert!(ring.status().is_none());
    }

    #[test]
    fn a_dead_kernel_is_reported_at_once() {
        let (_block, mut ring) = ring();
        let limit = Duration::from_secs(60);
        let message = "an illegal memory access was encountered".to_owned();
        let dead = || Err(HostError::Driver { call: "cuStreamQuery", message: message.clone() });
        let start = Instant::now();
        let error = ring.wait_completion(limit, dead).unwrap_err();
        assert!(start.elapsed() < limit / 10);
        assert!(matches!(&error, HostError::Died { message: said } if said.contains(&message)));
        assert!(error.to_string().contains("run it again"), "{error}");
        assert!(matches!(ring.wait_completion(limit, || Ok(true)), Err(HostError::Left)));
    }

    #[test]
    fn what_a_kernel_said_before_it_left_counts() {
        let (_block, mut ring) = ring();
        assert!(ring.publish(&Submission::default()).is_ok());
        // It answers between the last look and the question.
        let twin = RingHost { base: ring.base, tail: 0, seen: 0 };
        let answered = ring.wait_completion(Duration::from_secs(60), || {
            answer(&twin, 0, 7);
            Ok(true)
        });
        assert_eq!(answered.map(|c| c.token).ok(), Some(7));
        let trapped = ring.wait_completion(Duration::from_secs(60), || {
            twin.word(STATUS + core::mem::offset_of!(Status, valid)).store(1, Ordering::Release);
            Ok(true)
        });
        assert!(matches!(trapped, Err(HostError::Trapped(_))));
    }
}
