//! What a terminal shows while something is under way: what it is and for how long; of what is counted, how much of it and how long the rest will take.
//! Nothing is shown where standard error is no terminal.

use std::fmt::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};

/// What is said to people.
static SAID: AtomicU8 = AtomicU8::new(ALL);
const ALL: u8 = 0;
const FAILURES: u8 = 1;
const NOTHING: u8 = 2;

const TICK: Duration = Duration::from_millis(250);

/// From here on people are told why something failed, and nothing else.
pub(crate) fn only_failures() {
    SAID.store(FAILURES, Ordering::Relaxed);
}

/// From here on nothing is said to people: nobody may be reading, and a full pipe would stop the work.
pub(crate) fn quiet() {
    SAID.store(NOTHING, Ordering::Relaxed);
}

/// Whether people are told neither what goes on nor what was found.
pub(crate) fn is_quiet() -> bool {
    SAID.load(Ordering::Relaxed) != ALL
}

/// Whether people are not even told of failures.
pub(crate) fn is_silent() -> bool {
    SAID.load(Ordering::Relaxed) == NOTHING
}

/// A line that is taken away at the end.
pub(crate) struct Spinner(ProgressBar);

impl Spinner {
    /// Something of which nobody knows how long it takes: the time so far is all that can be said.
    pub(crate) fn on(what: impl Into<String>) -> Self {
        Self::with(ProgressBar::no_length(), "  {spinner} {msg}, {elapsed}", what)
    }

    /// So many things that take about the same time each.
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

    /// Takes the line away before its time.
    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }

    /// Another one is done.
    pub(crate) fn done(&self) {
        self.0.inc(1);
    }
}

/// The line that is shown now, or was last.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A line in this style, out of which what is said from here on is kept. Nothing is shown where people are told nothing.
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

/// Says something above the line that is shown.
pub(crate) fn above(say: impl FnOnce()) {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match shown {
        Some(bar) => bar.suspend(say),
        None => say(),
    }
}

/// A style whose `left` is what the rest will take: guessed from what is done, so nothing is said before anything is.
fn style(template: &str) -> Option<ProgressStyle> {
    let left = |state: &ProgressState, out: &mut dyn Write| {
        let written = match state.pos() {
            0 => out.write_str("how long is not known yet"),
            _ => write!(out, "{} left", HumanDuration(state.eta())),
        };
        // A line that cannot be drawn is left out.
        let _ = written;
    };
    Some(ProgressStyle::with_template(template).ok()?.with_key("left", left))
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
