//! Ctrl-C during work whose finished parts are on the disk: it ends after the part that is under way.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::report;

/// How often it came.
static TIMES: AtomicU32 = AtomicU32::new(0);

/// From here on Ctrl-C does not end the process. `then` runs each time, with whether it came before. `parts` are what is safe.
pub(crate) fn catch(parts: &str, then: impl Fn(bool) + Send + 'static) {
    let handler = move || then(TIMES.fetch_add(1, Ordering::SeqCst) > 0);
    if ctrlc::set_handler(handler).is_err() {
        report::say(&format!(
            "note: Ctrl-C cannot be caught here; finished {parts} are safe anyway"
        ));
    }
}

pub(crate) fn came() -> bool {
    TIMES.load(Ordering::SeqCst) > 0
}
