//! Ctrl-C during work whose finished parts are on the disk: the work ends after the current part.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::report;

/// The number of interrupts.
static TIMES: AtomicU32 = AtomicU32::new(0);

/// From now on Ctrl-C does not end the process. Each one calls `then` with whether it is a repeated one. `parts` names
/// the safe parts for the message.
pub(crate) fn catch(parts: &str, then: impl Fn(bool) + Send + 'static) {
    let handler = move || then(TIMES.fetch_add(1, Ordering::SeqCst) > 0);
    if ctrlc::set_handler(handler).is_err() {
        report::say(&format!(
            "note: Ctrl-C cannot be caught here; finished {parts} are safe anyway"
        ));
    }
}

/// Forgets the interrupts so far.
pub(crate) fn forget() {
    TIMES.store(0, Ordering::SeqCst);
}

pub(crate) fn came() -> bool {
    TIMES.load(Ordering::SeqCst) > 0
}

/// Set by SIGTERM and by Ctrl-C after [`catch_termination`].
static TERMINATED: AtomicBool = AtomicBool::new(false);

/// From now on SIGTERM and Ctrl-C do not end the process: [`terminated`] says that one came.
pub(crate) fn catch_termination() {
    extern "C" fn note(_: libc::c_int) {
        TERMINATED.store(true, Ordering::SeqCst);
    }
    let handler = note as extern "C" fn(libc::c_int);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler only stores to an atomic, which is safe in a signal handler.
        let before = unsafe { libc::signal(signal, handler as libc::sighandler_t) };
        if before == libc::SIG_ERR {
            report::say("note: SIGTERM cannot be caught here; a lease runs out instead");
        }
    }
}

pub(crate) fn terminated() -> bool {
    TERMINATED.load(Ordering::SeqCst)
}
