//! `--verbose`: the libraries' log as lines on standard error, above a progress line if there is one.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};

use tracing::level_filters::LevelFilter;

use crate::report;

/// How often `--verbose` was given.
static VERBOSE: AtomicU8 = AtomicU8::new(0);

/// Enables the log: nothing, events, or all details.
pub(crate) fn begin(verbose: u8) {
    VERBOSE.store(verbose, Ordering::Relaxed);
    let level = match verbose {
        0 => return,
        1 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    };
    let log =
        tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_writer(|| Lines);
    // The first call wins: only tests call it twice.
    let _ = log.without_time().try_init();
}

/// The arguments that give a child process the same verbosity.
pub(crate) fn arguments() -> impl Iterator<Item = &'static str> {
    (0..VERBOSE.load(Ordering::Relaxed)).map(|_| "--verbose")
}

/// A writer that prints each event at once, as a line.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        report::say(String::from_utf8_lossy(line).trim_end());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
