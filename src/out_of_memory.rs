//! The end of a process that gets no memory: a message, a document and exit code 3, where Rust would abort.
//!
//! [`memory`](crate::memory) refuses in advance what is known not to fit. This is for what nobody foresaw.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write;

use crate::failure::Exit;
use crate::{report, spinner};

/// The system's allocator, which ends the process where it has nothing to give.
struct Ending;

#[global_allocator]
static ALLOCATOR: Ending = Ending;

// SAFETY: every call goes to the system's allocator with the caller's own arguments, whose contract is the same. Where
// that has no memory the process ends, so that a null pointer is never returned.
unsafe impl GlobalAlloc for Ending {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is that of the system's allocator.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        given(unsafe { System.realloc(old, layout, size) }, size)
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() { end(bytes) } else { memory }
}

/// Reports without allocating and without locks, which this thread may hold, and ends the process at once.
#[cold]
fn end(bytes: usize) -> ! {
    if !spinner::is_silent() {
        let mut line = Line::default();
        let _ = writeln!(line, "amk: {}", Reason(bytes));
        let _ = rustix::io::write(rustix::stdio::stderr(), line.bytes());
        if report::prints_documents() {
            let (exit, mut line) = (Exit::Missing, Line::default());
            let _ = writeln!(
                line,
                "{{\"schema\":\"amk.error.v1\",\"error\":\"{}\",\"message\":\"{}\",\"exit_code\":{}}}",
                exit.name(),
                Reason(bytes),
                exit.code()
            );
            let _ = rustix::io::write(rustix::stdio::stdout(), line.bytes());
        }
    }
    // SAFETY: `_exit` has no preconditions. It runs no handlers, which could need memory or a lock.
    unsafe { libc::_exit(Exit::Missing.code()) }
}

struct Reason(usize);

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "out of memory: {} bytes more were refused; lower --kv-capacity, take a smaller model, or end other programs (`amk doctor --model MODEL` says what a model needs)",
            self.0
        )
    }
}

/// A line without a heap; what does not fit is left out.
struct Line {
    text: [u8; 512],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { text: [0; 512], length: 0 }
    }
}

impl Line {
    fn bytes(&self) -> &[u8] {
        &self.text[..self.length]
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let rest = &mut self.text[self.length..];
        let n = text.len().min(rest.len());
        rest[..n].copy_from_slice(&text.as_bytes()[..n]);
        self.length += n;
        Ok(())
    }
}
