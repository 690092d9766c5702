//! Who follows a search while it runs, and may end it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use search::Budget;

use crate::failure::Exit;
use crate::{interrupt, report};

#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pub(crate) folder: PathBuf,
    pub(crate) model: String,
    pub(crate) target: String,
    /// `cpu`, or the device's name.
    pub(crate) device: String,
    /// `measured-gpu` or `predicted`.
    pub(crate) latency_kind: String,
    pub(crate) budget: Budget,
    /// Trials that are on the disk, those before a resume included.
    pub(crate) trials: u64,
    /// Time that it took, sessions before a resume included.
    pub(crate) elapsed: Duration,
    /// Latency of the schedule that leads, in microseconds a token.
    pub(crate) best_us: Option<f64>,
    pub(crate) best_trial: Option<u64>,
    /// The last trial, in a line.
    pub(crate) last: Option<String>,
    pub(crate) resume: String,
}

pub(crate) trait Watch {
    /// Whether to end before the next trial.
    fn stopped(&self) -> bool;

    /// The files are open; the graph is evaluated next, which may take a while. `resume`: the command that goes on with the search.
    fn prepares(&self, _resume: &str) {}

    /// All is ready and the first trial is next.
    fn begins(&self, progress: &Progress);

    /// Another trial is on the disk.
    fn trial(&self, progress: &Progress);
}

/// Set when there is a trial to wait for.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The command line, where Ctrl-C ends a search.
pub(super) struct Interrupts;

impl Watch for Interrupts {
    fn stopped(&self) -> bool {
        interrupt::came()
    }

    fn prepares(&self, resume: &str) {
        let resume = resume.to_owned();
        interrupt::catch("trials", move |again| {
            let begun = BEGUN.load(Ordering::SeqCst);
            if !begun {
                report::say(&format!("interrupted before the next trial; continue with: {resume}"));
            }
            if again || !begun {
                std::process::exit(Exit::Interrupted.code());
            }
            report::say("stopping after this trial (again: at once; finished trials are safe)");
        });
    }

    fn begins(&self, _: &Progress) {
        BEGUN.store(true, Ordering::SeqCst);
    }

    // The bar and the lines of the trials are the session's own.
    fn trial(&self, _: &Progress) {}
}
