//! A sequence lock: the sequence is odd while the words change, and another even number afterwards.
//!
//! There is one writer at a time (ensured by the page's lock). A reader copies the words and accepts them if the
//! sequence was even and is the same afterwards. Two fences make that sound: the writer's keeps its stores to the words
//! behind the odd sequence; the reader's keeps its second load of the sequence behind its loads of the words. `loom`
//! runs both in every execution, and shows that each fence and the odd sequence are needed. It cannot show that the
//! release at the end and the acquire of the first load are needed: it treats everything that a thread stores after a
//! release fence as ordered by it.

use std::sync::atomic::{AtomicU64, Ordering};

/// The words of a page, by index. A trait, so that a model checker can run the algorithm.
pub(crate) trait Words {
    fn load(&self, index: usize, order: Ordering) -> u64;
    fn store(&self, index: usize, value: u64, order: Ordering);
    fn fence(order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

/// Words in memory that other processes may map.
pub(crate) struct Mapped {
    base: *const AtomicU64,
    len: usize,
}

// SAFETY: all accesses are atomic, and the mapping that `base` lies in outlives this (see `page.rs`).
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// # Safety
    /// `base` points to `len` words, 8-byte aligned, that outlive this value and are only ever accessed atomically. They need not be
    /// writable if nothing is stored.
    pub(crate) unsafe fn new(base: *const AtomicU64, len: usize) -> Self {
        Self { base, len }
    }

    /// Words of these, by themselves: `len` from `from` on.
    pub(crate) fn part(&self, from: usize, len: usize) -> Self {
        assert!(from + len <= self.len, "{len} words from {from} on, of {}", self.len);
        // SAFETY: in range, as asserted; the words are valid as promised to `new`.
        Self { base: unsafe { self.base.add(from) }, len }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: in range, as asserted; the words are valid as promised to `new`.
        unsafe { &*self.base.add(index) }
    }
}

impl Words for Mapped {
    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.word(index).load(order)
    }

    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.word(index).store(value, order);
    }
}

/// Begins a change: makes the sequence odd. Pairs with [`copy`].
pub(crate) fn begin<W: Words>(words: &W, sequence: usize) {
    let before = words.load(sequence, Ordering::Relaxed);
    // A writer that died during a change left it odd: it stays odd.
    words.store(sequence, before | 1, Ordering::Relaxed);
    W::fence(Ordering::Release);
}

/// Ends a change. Pairs with the acquire in [`copy`].
pub(crate) fn end(words: &impl Words, sequence: usize) {
    let now = words.load(sequence, Ordering::Relaxed);
    words.store(sequence, now.wrapping_add(1), Ordering::Release);
}

/// Copies all words; false if they changed during the copy.
pub(crate) fn copy<W: Words>(words: &W, sequence: usize, out: &mut [u64]) -> bool {
    let before = words.load(sequence, Ordering::Acquire);
    if before & 1 != 0 {
        return false;
    }
    for (index, word) in out.iter_mut().enumerate() {
        *word = words.load(index, Ordering::Relaxed);
    }
    W::fence(Ordering::Acquire);
    words.load(sequence, Ordering::Relaxed) == before
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use loom::sync::Arc;

    use super::*;

    /// The parts of the algorithm to leave out.
    #[derive(Clone, Copy, Default)]
    struct Broken {
        writer_fence: bool,
        reader_fence: bool,
        begin: bool,
    }

    #[derive(Clone)]
    struct Modelled(Arc<[loom::sync::atomic::AtomicU64; 3]>);

    impl Words for Modelled {
        fn load(&self, index: usize, order: Ordering) -> u64 {
            self.0[index].load(order)
        }

        fn store(&self, index: usize, value: u64, order: Ordering) {
            self.0[index].store(value, order);
        }

        fn fence(order: Ordering) {
            loom::sync::atomic::fence(order);
        }
    }

    /// The same words without fences.
    struct Unfenced<'a>(&'a Modelled);

    impl Words for Unfenced<'_> {
        fn load(&self, index: usize, order: Ordering) -> u64 {
            self.0.load(index, order)
        }

        fn store(&self, index: usize, value: u64, order: Ordering) {
            self.0.store(index, value, order);
        }

        fn fence(_order: Ordering) {}
    }

    const SEQUENCE: usize = 0;

    fn write(words: &Modelled, broken: Broken) {
        for value in 1..=2 {
            match (broken.begin, broken.writer_fence) {
                (true, _) => {}
                (false, true) => begin(&Unfenced(words), SEQUENCE),
                (false, false) => begin(words, SEQUENCE),
            }
            words.store(1, value, Ordering::Relaxed);
            words.store(2, value, Ordering::Relaxed);
            if broken.begin {
                words.store(SEQUENCE, value * 2, Ordering::Release);
            } else {
                end(words, SEQUENCE);
            }
        }
    }

    /// Two changes of two words beside a reader. Returns the number of executions, or `None` if a reader accepted an
    /// inconsistent copy in one of them.
    fn holds(broken: Broken) -> Option<usize> {
        static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
        let before = EXECUTIONS.load(Ordering::Relaxed);
        let all = catch_unwind(AssertUnwindSafe(|| {
            loom::model(move || {
                EXECUTIONS.fetch_add(1, Ordering::Relaxed);
                let atomics = std::array::from_fn(|_| loom::sync::atomic::AtomicU64::new(0));
                let words = Modelled(Arc::new(atomics));
                let writer = words.clone();
                let there = loom::thread::spawn(move || write(&writer, broken));
                let mut copied = [0; 3];
                let whole = if broken.reader_fence {
                    copy(&Unfenced(&words), SEQUENCE, &mut copied)
                } else {
                    copy(&words, SEQUENCE, &mut copied)
                };
                if whole {
                    assert_eq!(copied[1], copied[2], "half a change was believed");
                    assert_eq!(copied[0], copied[1] * 2, "another change than its sequence says");
                }
                there.join().expect("the writer ends");
            });
        }));
        all.ok().map(|()| EXECUTIONS.load(Ordering::Relaxed) - before)
    }

    #[test]
    fn a_reader_sees_whole_changes_in_every_execution() {
        let executions = holds(Broken::default()).expect("no execution fails");
        println!("{executions} executions");
        assert!(executions > 10);
        for (name, broken) in [
            ("no odd sequence", Broken { begin: true, ..Broken::default() }),
            ("no fence of the writer", Broken { writer_fence: true, ..Broken::default() }),
            ("no fence of the reader", Broken { reader_fence: true, ..Broken::default() }),
        ] {
            assert_eq!(holds(broken), None, "{name} must be found");
        }
    }
}
