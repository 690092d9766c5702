//! Progress display on a terminal: the activity and its duration; for counted work also the count and the time left.
//! Nothing is shown if standard error is not a terminal.

use std::fmt::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};

/// The verbosity of the output for people: a program that uses the library has its own.
static SAID: AtomicU8 = AtomicU8::new(NOTHING);
const ALL: u8 = 0;
const FAILURES: u8 = 1;
const NOTHING: u8 = 2;

const TICK: Duration = Duration::from_millis(250);

/// From now on everything for people is printed: the command line.
pub(crate) fn all() {
    SAID.store(ALL, Ordering::Relaxed);
}

/// From now on only the reasons of failures are printed.
pub(crate) fn only_failures() {
    SAID.store(FAILURES, Ordering::Relaxed);
}

/// From now on nothing is printed for people: possibly no one reads it, and a full pipe would block the work.
pub(crate) fn quiet() {
    SAID.store(NOTHING, Ordering::Relaxed);
}

/// Whether progress and results are suppressed.
pub(crate) fn is_quiet() -> bool {
    SAID.load(Ordering::Relaxed) != ALL
}

/// Whether even failures are suppressed.
pub(crate) fn is_silent() -> bool {
    SAID.load(Ordering::Relaxed) == NOTHING
}

/// A progress line that is removed on drop.
pub(crate) struct Spinner(ProgressBar);

impl Spinner {
    /// Work of unknown length: shows only the elapsed time.
    pub(crate) fn on(what: impl Into<String>) -> Self {
        Self::with(ProgressBar::no_length(), "  {spinner} {msg}, {elapsed}", what)
    }

    /// This many items that take about the same time each.
    pub(crate) fn through(count: usize, what: impl Into<String>) -> Self {
        let bar = ProgressBar::new(count as u64);
        Self::with(bar, "  [{bar:30}] {pos}/{len} {msg}, {elapsed}, {left}", what)
    }

    fn with(bar: ProgressBar, template: &str, what: impl Into<String>) -> Self {
        let bar = shown(bar, template);
        if !bar.is_hidden() {
            bar.enable_steady_tick(TICK);
        }
        bar.set_message(what.into());
        Self(bar)
    }

    /// Counts a finished item.
    pub(crate) fn done(&self) {
        self.0.inc(1);
    }
}

/// The current or last progress line.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A line in this style; later output is printed above it. Hidden if output for people is suppressed.
pub(crate) fn shown(bar: ProgressBar, template: &str) -> ProgressBar {
    if is_quiet() {
        return ProgressBar::hidden();
    }
    if let Some(style) = style(template) {
        bar.set_style(style);
    }
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
    bar
}

/// Removes the progress line, for a process that ends now.
pub(crate) fn end() {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
    shown.iter().for_each(ProgressBar::finish_and_clear);
}

/// Prints above the progress line.
pub(crate) fn above(say: impl FnOnce()) {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match shown {
        Some(bar) => bar.suspend(say),
        None => say(),
    }
}

/// A style whose `left` is the estimated time left; nothing is estimated before the first finished item.
fn style(template: &str) -> Option<ProgressStyle> {
    let left = |state: &ProgressState, out: &mut dyn Write| {
        let written = match state.pos() {
            0 => out.write_str("how long is not known yet"),
            all if Some(all) == state.len() => out.write_str("done"),
            _ => write!(out, "{} left", HumanDuration(state.eta())),
        };
        // A failed write leaves the field out.
        let _ = written;
    };
    Some(ProgressStyle::with_template(template).ok()?.with_key("left", left))
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
