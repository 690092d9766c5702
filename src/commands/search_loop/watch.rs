//! Observers of a running search, which may also end it.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use schemars::JsonSchema;
use search::{Budget, Rejection, Trial};
use serde::Serialize;

use crate::failure::Exit;
use crate::observe::{Observer, enter_at};
use crate::{interrupt, report};

/// The progress of a search; empty before it begins.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Progress {
    /// The search's folder.
    pub(crate) folder: Option<PathBuf>,
    pub(crate) model: Option<String>,
    pub(crate) target: Option<String>,
    /// cpu, or the device's name.
    pub(crate) device: Option<String>,
    /// measured-gpu or predicted.
    pub(crate) latency_kind: Option<String>,
    #[schemars(with = "Option<String>")]
    pub(crate) budget: Option<Budget>,
    /// Trials that are on the disk.
    pub(crate) trials: u64,
    /// Seconds that it took, sessions before a resume included.
    pub(crate) elapsed_s: f64,
    /// Latency of the best schedule, in microseconds per token.
    pub(crate) best_us: Option<f64>,
    /// Its trial.
    pub(crate) best_trial: Option<u64>,
    /// The last trial, in a line.
    pub(crate) last: Option<String>,
    /// The command that resumes it; as a tool: `loop` with `resume` and `out`.
    pub(crate) resume: Option<String>,
}

/// An observer of a search.
pub(crate) trait Watch {
    /// Whether to end before the next trial.
    fn stopped(&self) -> bool;

    /// The files are open; the graph is evaluated next, which may take a while. `resume`: the command that resumes the search.
    fn prepares(&self, _resume: &str) {}

    /// All is ready and the first trial is next.
    fn begins(&self, progress: &Progress);

    /// The last gate of a trial that is to be kept; an error makes it a failed one.
    fn accepts(&self, _trial: &Trial) -> Result<(), Rejection> {
        Ok(())
    }

    /// Another trial is on the disk.
    fn trial(&self, progress: &Progress, trial: &Trial);
}

/// Set when there is a trial to wait for.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The command line, where Ctrl-C ends a search. Without a GPU it also has the search's page for `amk top`: with one, the
/// process that drives the GPU has it.
#[derive(Default)]
pub(super) struct CommandLine {
    page: OnceLock<Option<Observer>>,
}

impl CommandLine {
    /// Puts the progress on the page, if there is one.
    fn show(&self, progress: &Progress) {
        let Some(page) = self.page.get().and_then(Option::as_ref) else { return };
        let count = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        page.publisher().edit(|edit| {
            let head = edit.head();
            head.search_trials = count(progress.trials);
            head.search_best = count(progress.best_trial.unwrap_or(0));
            head.search_best_ns = (progress.best_us.unwrap_or(0.0) * 1e3).round() as u32;
        });
    }
}

impl Watch for CommandLine {
    fn stopped(&self) -> bool {
        interrupt::came()
    }

    fn prepares(&self, resume: &str) {
        let resume = resume.to_owned();
        interrupt::catch("trials", move |again| {
            let started = BEGUN.load(Ordering::SeqCst);
            if !started {
                report::say(&format!("interrupted before the next trial; continue with: {resume}"));
            }
            if again || !started {
                std::process::exit(Exit::Interrupted.code());
            }
            report::say("stopping after this trial (again: at once; finished trials are safe)");
        });
    }

    fn begins(&self, progress: &Progress) {
        BEGUN.store(true, Ordering::SeqCst);
        self.page.get_or_init(|| {
            let (model, device) = (progress.model.as_deref()?, progress.device.as_deref()?);
            let page = (device == "cpu").then(|| Observer::of_search(model, device))??;
            let now = telemetry::now_ns();
            page.publisher().edit(|edit| enter_at(edit.head(), abi::Activity::Running, now));
            Some(page)
        });
        self.show(progress);
    }

    // The session itself prints the progress bar and the lines of the trials.
    fn trial(&self, progress: &Progress, _: &Trial) {
        self.show(progress);
    }
}
