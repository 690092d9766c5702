//! Ctrl-C. It ends a command at once, with an answer and without its half-written folders; during work whose finished
//! parts are on the disk, the work ends after the current part.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::failure::{Exit, Failure};
use crate::{report, spinner};

/// The number of interrupts.
static TIMES: AtomicU32 = AtomicU32::new(0);

/// What Ctrl-C does where it does not end the process, from whether it is a repeated one.
type Then = Box<dyn Fn(bool) + Send>;
static CAUGHT: Mutex<Option<Then>> = Mutex::new(None);

/// How long an interrupt may take to end the process.
const GRACE: Duration = Duration::from_secs(2);

/// Whether the handler is in place.
static HANDLED: OnceLock<bool> = OnceLock::new();

/// From now on Ctrl-C ends the process with exit code 130 and a document. A process that ignores it, as one in the
/// background of a script does, goes on to.
pub(crate) fn answered() {
    HANDLED.get_or_init(|| ctrlc::try_set_handler(came_now).is_ok());
}

fn came_now() {
    let again = TIMES.fetch_add(1, Ordering::SeqCst) > 0;
    let caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(then) = &*caught {
        return then(again);
    }
    // A second one ends even a process that cannot write its answer, since nobody reads it.
    if !again {
        // On a thread of its own, so that this one hears the second.
        let _ = std::thread::Builder::new().spawn(|| {
            model::remove_unfinished();
            spinner::end();
            let message = "interrupted".to_owned();
            report::fail(&Failure { exit: Exit::Interrupted, message });
            end_now();
        });
        return;
    }
    end_now();
}

/// Gives way to an interrupt that is ending the process, before a failure is reported that it caused: a writer whose
/// folder is gone fails.
pub(crate) fn first() {
    let caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    if came() && !caught {
        std::thread::sleep(GRACE);
    }
}

fn end_now() {
    // SAFETY: `_exit` ends the process and runs nothing else: destructors and exit handlers would meet running threads.
    unsafe { libc::_exit(Exit::Interrupted.code()) }
}

/// From now on Ctrl-C does not end the process. Each one calls `then` with whether it is a repeated one. `parts` names
/// the safe parts for the message.
pub(crate) fn catch(parts: &str, then: impl Fn(bool) + Send + 'static) {
    *CAUGHT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(then));
    let handled = *HANDLED.get_or_init(|| ctrlc::set_handler(came_now).is_ok());
    if !handled && ctrlc::set_handler(came_now).is_err() {
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
