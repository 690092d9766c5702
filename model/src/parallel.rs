//! Fills a buffer with every core.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Least bytes for which threads pay.
const PARALLEL_MIN: usize = 1 << 19;
/// Least bytes that a thread draws, which takes it 0.1 to 0.7 ms. Starting one of many takes up to 0.1 ms.
const DRAWN_BY_THREAD: usize = 1 << 20;
/// Most threads of a buffer beside which others may be filled.
const FEW: usize = 4;

/// The cores of this machine, or fewer if the process may not use all.
pub(crate) fn threads() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The threads that draw this many random bytes. Starting one on every core for the matrix of one expert takes longer than drawing it.
pub(crate) fn threads_to_draw(bytes: usize, threads: &dyn Fn() -> usize) -> usize {
    match bytes / DRAWN_BY_THREAD {
        0 | 1 => 1,
        parts => threads().min(parts),
    }
}

/// Zeros to be filled. Large buffers ask for huge pages: with small ones the system takes longer to find the pages
/// than a core to fill them.
pub(crate) fn zeroed(bytes: usize) -> Vec<u8> {
    const PAGE: usize = 1 << 12;
    let mut out = vec![0; bytes];
    let pages = out.as_mut_ptr().align_offset(PAGE);
    if let Some(len) = bytes.checked_sub(pages).map(|len| len / PAGE * PAGE)
        && bytes >= PARALLEL_MIN
    {
        // SAFETY: the range is inside of the buffer, and this advice changes no contents.
        let advised = unsafe {
            let first = out.as_mut_ptr().add(pages).cast();
            rustix::mm::madvise(first, len, rustix::mm::Advice::LinuxHugepage)
        };
        // A system without huge pages fills small ones.
        let _ = advised;
    }
    out
}

/// Calls `work` with parts of `out` and the index of each part's first unit. A part is a whole number of units of
/// `unit` bytes, except for the last.
pub(crate) fn fill(
    out: &mut [u8],
    unit: usize,
    threads: &dyn Fn() -> usize,
    work: impl Fn(usize, &mut [u8]) + Sync,
) {
    // Large buffers use every core, so two at once would only compete. Small ones do not wait for each other.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // Counting cores reads files, so it is done for large buffers only.
    let threads = if out.len() < PARALLEL_MIN { 1 } else { threads() };
    if threads <= 1 {
        return work(0, out);
    }
    let turn = || ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let _turn = (threads > FEW).then(turn);
    let units = out.len().div_ceil(unit).div_ceil(threads);
    let parts = Mutex::new(out.chunks_mut(units * unit).enumerate());
    on_all(threads, &|| {
        // The lock is not held while a part is filled.
        while let Some((i, part)) = next(&parts) {
            work(i * units, part);
        }
    });
}

/// The next part, for any of several threads.
pub(crate) fn next<T: Iterator>(parts: &Mutex<T>) -> Option<T::Item> {
    parts.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// Calls `work` on this thread and on others beside it. Plain threads rather than a work-stealing pool: a pool's worker
/// that waits here could steal a job that needs the very tensor that is made, and wait for itself.
fn on_all(threads: usize, work: &(impl Fn() + Sync)) {
    thread::scope(|scope| {
        for _ in 1..threads {
            // Where the system gives no more threads, those that there are do it all.
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Calls `work` on every core at once, or only here if it is about few bytes.
pub(crate) fn run(bytes: usize, work: &(impl Fn() + Sync)) {
    on_all(if bytes < PARALLEL_MIN { 1 } else { threads() }, work);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of qwen3-30b-a3b-fp8-block: an expert's matrix, two of them, the embedding; on 32 cores.
    #[test]
    fn an_experts_matrix_is_drawn_by_one_thread() {
        let of = |rows: usize| threads_to_draw(rows * 2112, &|| 32);
        assert_eq!([of(768), of(2 * 768), of(151_936)], [1, 3, 32]);
        assert_eq!(threads_to_draw(1 << 19, &|| unreachable!("counting cores reads files")), 1);
    }
}
