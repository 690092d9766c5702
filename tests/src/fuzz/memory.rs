//! A counting allocator: a request by a header that claims 2^60 bytes is detected and refused.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Largest single request that is allowed.
pub const REQUEST_MAX: usize = 1 << 30;

/// The system's allocator, with each thread's live bytes counted. A request beyond [`REQUEST_MAX`] is refused, which ends the process
/// with the number. Make it the global one.
pub struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn grew(bytes: usize) {
    // A thread that is ending has no cells any more; its last bytes are not counted.
    let _ = LIVE.try_with(|live| {
        let now = live.get().saturating_add(bytes);
        live.set(now);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now)));
    });
}

fn shrank(bytes: usize) {
    let _ = LIVE.try_with(|live| live.set(live.get().saturating_sub(bytes)));
}

// SAFETY: every call is passed on to the system's allocator with the arguments that it came with, or refused with a null pointer, which is
// how an allocator refuses. The counters are plain cells of the thread and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are the same.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    // SAFETY: the trait's requirements on the caller are those of the system's allocator.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrank(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are the same.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    // SAFETY: as `dealloc`, and a refusal leaves the old block unchanged, as the trait requires.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are the same.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            // Both blocks may exist for a moment.
            grew(size);
            shrank(layout.size());
        }
        moved
    }
}

/// Runs a function, and returns the most bytes that this thread allocated beyond its initial ones. Zero if [`Counting`]
/// is not the global allocator.
pub fn peak<R>(body: impl FnOnce() -> R) -> (R, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = body();
    (result, PEAK.get().saturating_sub(before))
}
