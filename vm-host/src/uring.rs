//! Interruptible waits for io_uring.

use std::io::{Error, Result};
use std::time::{Duration, Instant};

use io_uring::{IoUring, types};

/// Submits what is queued and waits for a completion, at most until the limit. A signal that interrupts the wait (EINTR: Ctrl-Z and `fg`, a
/// debugger, a profiler) does not end it: neither one that the kernel reports, nor one that it hides behind the number of entries that it
/// took.
pub(crate) fn submit_and_wait(ring: &mut IoUring, limit: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        let timespec = types::Timespec::from(left);
        let arguments = types::SubmitArgs::new().timespec(&timespec);
        match ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => {}
            Err(error) if is(&error, libc::ETIME) || is(&error, libc::EINTR) => {}
            Err(error) => return Err(error),
        }
        if !ring.completion().is_empty() || left.is_zero() {
            return Ok(());
        }
    }
}

/// Submits what is queued; retries if a signal interrupts it.
pub(crate) fn submit(ring: &mut IoUring) -> Result<()> {
    loop {
        match ring.submit() {
            Ok(_) => return Ok(()),
            Err(error) if is(&error, libc::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn is(error: &Error, code: i32) -> bool {
    error.raw_os_error() == Some(code)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use io_uring::opcode;

    use super::*;

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handle(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    /// Handles SIGUSR2 without restarting the interrupted system call.
    fn handle_signal() {
        // SAFETY: all zeroes is a valid `sigaction`; the handler only adds to an atomic.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut())
        };
        assert_eq!(installed, 0);
    }

    #[test]
    fn a_signal_does_not_end_the_wait_for_a_read() {
        let Ok(mut ring) = IoUring::new(4) else {
            eprintln!("skipped: io_uring is refused here");
            return;
        };
        handle_signal();
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut byte = [0_u8; 1];
        let fd = types::Fd(std::os::fd::AsRawFd::as_raw_fd(&reader));
        let entry = opcode::Read::new(fd, byte.as_mut_ptr(), 1).build();
        // SAFETY: the byte and the pipe live until the completion has been taken, below.
        unsafe { ring.submission().push(&entry) }.expect("room");
        // SAFETY: obtains this thread's own handle.
        let waiting = unsafe { libc::pthread_self() };
        let sender = std::thread::spawn(move || {
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(2));
                // SAFETY: the waiting thread is joined to this one below, so its handle is valid.
                assert_eq!(unsafe { libc::pthread_kill(waiting, libc::SIGUSR2) }, 0);
            }
            std::io::Write::write_all(&mut &writer, b"x").expect("written");
        });
        submit_and_wait(&mut ring, Duration::from_secs(20)).expect("interrupted waits go on");
        let results: Vec<i32> = ring.completion().map(|done| done.result()).collect();
        sender.join().expect("no panic");
        assert_eq!((results, byte), (vec![1], *b"x"));
        assert!(HANDLED.load(Ordering::Relaxed) > 0, "no signal came");
    }

    #[test]
    fn the_wait_ends_at_its_limit() {
        let Ok(mut ring) = IoUring::new(4) else {
            eprintln!("skipped: io_uring is refused here");
            return;
        };
        submit_and_wait(&mut ring, Duration::from_millis(5)).expect("no completion is no error");
        assert_eq!(ring.completion().count(), 0);
    }
}
