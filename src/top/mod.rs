//! `amk top`: shows what a running `amk` is doing, from its telemetry page. It only reads, at no cost to the observed process.

pub(crate) mod document;
mod draw;
#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use telemetry::Rates;

use crate::cli::TopArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::process::{Look, Process};
use crate::report;

/// The longest delay until a key is handled.
const KEYS_EVERY: Duration = Duration::from_millis(50);
/// A process without a heartbeat for this long counts as silent.
const SILENT_NS: u64 = 2_000_000_000;

/// What is shown: the last snapshot, and the changes since the one before.
pub(crate) struct View<'a> {
    now: &'a Look,
    before: &'a Look,
    rates: Rates,
    /// The number of other processes that could be shown.
    others: usize,
    paused: bool,
}

impl<'a> View<'a> {
    fn new(before: &'a Look, now: &'a Look, others: usize, paused: bool) -> Self {
        let rates = Rates::between((&before.page, before.at_ns), (&now.page, now.at_ns));
        Self { now, before, rates, others, paused }
    }

    /// Why the page may be out of date.
    fn silent(&self) -> Option<String> {
        let silent = self.now.at_ns.saturating_sub(self.now.page.head.beat_ns);
        if self.now.is_last() {
            return Some("the process has ended".to_owned());
        }
        (silent > SILENT_NS)
            .then(|| format!("silent for {:.1} s: stopped, or busy elsewhere", silent as f64 / 1e9))
    }
}

/// Shows a process until the user quits.
pub(crate) fn run(args: &TopArgs) -> Outcome {
    let subject = Process::find(&telemetry::folder(), args.pid)?;
    if args.once {
        return once(&subject, args);
    }
    if args.json {
        return lines(&subject, args);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::usage(
            "standard output is no terminal; `amk top --once` prints one look, `--json` a document per look",
        ));
    }
    let terminal = ratatui::try_init();
    let terminal = terminal.map_err(|e| Failure::usage(format!("no terminal to draw on: {e}")));
    // The terminal is restored whatever happens in the loop: on panics by the library's hook.
    let shown = terminal.and_then(|mut terminal| live(&mut terminal, &subject, args));
    let restored = ratatui::try_restore();
    let shown = shown?;
    restored.map_err(|e| Failure::usage(format!("the terminal cannot be restored: {e}")))?;
    Ok(shown)
}

fn once(subject: &Process, args: &TopArgs) -> Outcome {
    let before = subject.look()?;
    std::thread::sleep(Duration::from_millis(args.every));
    let now = subject.look()?;
    let view = View::new(&before, &now, subject.others, false);
    if args.json {
        report::document(&document::document(&view))?;
    } else {
        report::text(&draw::text(&view))?;
    }
    Ok(Exit::Yes)
}

/// A document per look, each on a line, until the process has ended or nobody reads them.
fn lines(subject: &Process, args: &TopArgs) -> Outcome {
    let mut before = subject.look()?;
    loop {
        std::thread::sleep(Duration::from_millis(args.every));
        let now = subject.look()?;
        let read =
            report::line(&document::document(&View::new(&before, &now, subject.others, false)))?;
        if !read || now.is_last() || now.is_gone() {
            return Ok(Exit::Yes);
        }
        before = now;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Leave,
    Pause,
    Redraw,
    Nothing,
}

fn wish(event: &Event) -> Wish {
    if let Event::Resize(..) = event {
        return Wish::Redraw;
    }
    let Event::Key(key) = event else { return Wish::Nothing };
    let held = key.modifiers.contains(KeyModifiers::CONTROL);
    if key.kind != KeyEventKind::Press {
        Wish::Nothing
    } else if key.code == KeyCode::Esc || key.code == KeyCode::Char(if held { 'c' } else { 'q' }) {
        Wish::Leave
    } else if matches!(key.code, KeyCode::Char('p' | ' ')) {
        Wish::Pause
    } else {
        Wish::Nothing
    }
}

fn live(terminal: &mut DefaultTerminal, subject: &Process, args: &TopArgs) -> Outcome {
    let failed = |error: std::io::Error| Failure::usage(format!("the terminal failed: {error}"));
    let every = Duration::from_millis(args.every);
    let colours = draw::Colours::of_environment();
    let mut before = subject.look()?;
    let mut now = subject.look()?;
    let (mut looked, mut paused, mut dirty) = (Instant::now(), false, true);
    loop {
        if !paused && looked.elapsed() >= every {
            before = std::mem::replace(&mut now, subject.look()?);
            (looked, dirty) = (Instant::now(), true);
        }
        if std::mem::take(&mut dirty) {
            let view = View::new(&before, &now, subject.others, paused);
            terminal.draw(|frame| draw::draw(frame, &view, colours)).map_err(failed)?;
        }
        if event::poll(KEYS_EVERY).map_err(failed)? {
            match wish(&event::read().map_err(failed)?) {
                Wish::Leave => return Ok(Exit::Yes),
                Wish::Pause => (paused, dirty) = (!paused, true),
                Wish::Redraw => dirty = true,
                Wish::Nothing => {}
            }
        }
    }
}
