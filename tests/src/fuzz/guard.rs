//! Memory and time limits for templates within the fuzzing process, since libFuzzer sees the edges of its own process
//! only.
//!
//! The allocator counts the memory of the rendering thread. A request beyond the limit never returns: the thread sleeps
//! for ever and keeps its memory. (An allocator may not unwind, and a refusal would end the process.) `amk` uses a
//! separate process instead, which returns everything.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Stack of the thread: as much as a main thread has.
const STACK: usize = 8 << 20;

/// Interval at which the caller checks whether the thread went to sleep.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// An allocator that counts the memory of threads that run untrusted code. Make it the global one.
#[derive(Debug)]
pub struct Guarded<A>(pub A);

thread_local! {
    /// Bytes that this thread may still allocate; unlimited if there is no flag.
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// The flag to set when they are used up; null on threads that are not guarded.
    static BEYOND: Cell<*const AtomicBool> = const { Cell::new(std::ptr::null()) };
}

/// The flag of this thread if it is guarded. A thread that is ending is not.
fn flag() -> Option<*const AtomicBool> {
    BEYOND.try_with(Cell::get).ok().filter(|flag| !flag.is_null())
}

/// Subtracts bytes from the budget; does not return if there are too few.
fn take(bytes: usize) {
    let Some(flag) = flag() else { return };
    let left = LEFT.get();
    // A panic's report takes locks that others need, and memory for names, so it may exceed the limit.
    if bytes <= left || std::thread::panicking() {
        LEFT.set(left.saturating_sub(bytes));
        return;
    }
    // SAFETY: `within` keeps the flag alive for as long as its thread has the pointer, which is for good if it sleeps here.
    unsafe { &*flag }.store(true, Ordering::Release);
    loop {
        std::thread::park();
    }
}

fn give(bytes: usize) {
    if flag().is_some() {
        LEFT.set(LEFT.get().saturating_add(bytes));
    }
}

// SAFETY: every call is passed on with its own arguments, or never returns; an allocator may do either. The budget is
// made of plain cells of the thread and allocates nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Guarded<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.0.dealloc(pointer, layout) };
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}

/// Why untrusted code gave no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// It exceeded the memory limit.
    Memory,
    /// It exceeded the time limit.
    Time,
    /// It panicked.
    Panic,
}

/// Runs a function on a thread of its own, with limits of memory and time. A stopped thread is abandoned.
pub fn within<R: Send + 'static>(
    bytes: usize,
    limit: Duration,
    body: impl FnOnce() -> R + Send + 'static,
) -> Result<R, Stopped> {
    let beyond = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = channel();
    let raised = beyond.clone();
    let run = move || {
        LEFT.set(bytes);
        BEYOND.set(Arc::as_ptr(&raised));
        let result = body();
        BEYOND.set(std::ptr::null());
        // There is no receiver any more if the time was up.
        let _ = sender.send(result);
    };
    if std::thread::Builder::new().name("guarded".into()).stack_size(STACK).spawn(run).is_err() {
        return Err(Stopped::Memory);
    }
    let began = Instant::now();
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(Stopped::Panic),
            Err(RecvTimeoutError::Timeout) if beyond.load(Ordering::Acquire) => {
                return Err(Stopped::Memory);
            }
            Err(RecvTimeoutError::Timeout) if began.elapsed() > limit => return Err(Stopped::Time),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Guarded<std::alloc::System> = Guarded(std::alloc::System);

    const MIB: usize = 1 << 20;

    #[test]
    fn a_thread_gets_what_it_may_have_and_no_more() {
        let limit = Duration::from_secs(30);
        let kept = within(4 * MIB, limit, || vec![1_u8; 3 * MIB].len());
        assert_eq!(kept, Ok(3 * MIB));
        // Freed memory is available again.
        let often =
            || (0..64).map(|_| std::hint::black_box(vec![1_u8; 3 * MIB]).len()).sum::<usize>();
        assert_eq!(within(4 * MIB, limit, often), Ok(192 * MIB));
        let doubled = || (0..40).fold(String::from("x"), |text, _| format!("{text}{text}")).len();
        assert_eq!(within(4 * MIB, limit, doubled), Err(Stopped::Memory));
        assert_eq!(within(4 * MIB, limit, || vec![0_u8; 1 << 50].len()), Err(Stopped::Memory));
    }

    #[test]
    fn a_thread_gets_its_time_and_no_more() {
        let short = Duration::from_millis(50);
        assert_eq!(
            within(MIB, short, || loop {
                std::thread::park()
            }),
            Err::<(), _>(Stopped::Time)
        );
        // The report of a panic may exceed either limit: with RUST_BACKTRACE=1 the thread once slept for ever with the
        // lock of backtraces.
        let limit = Duration::from_secs(30);
        assert_eq!(within(1 << 14, limit, || panic!("as asked")), Err::<(), _>(Stopped::Panic));
    }
}
