//! Output: one JSON document on stdout, everything for people on stderr. A terminal gets the document only with
//! `--json`, since people read the lines on stderr.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::error::ErrorKind;
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::{Exit, Failure, Outcome};
use crate::spinner;

/// Whether `--json` was given.
static JSON: AtomicBool = AtomicBool::new(false);

/// The answer of a command.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) document: T,
    pub(crate) exit: Exit,
}

impl<T: Serialize> Answer<T> {
    pub(crate) fn print(&self) -> Outcome {
        document(&self.document)?;
        Ok(self.exit)
    }
}

/// Prints documents on a terminal too.
pub(crate) fn json_wanted() {
    JSON.store(true, Ordering::Relaxed);
}

/// Whether a document would be printed: a terminal without `--json` gets none. Asks the file and not std's `stdout`,
/// whose first use allocates under a lock: a process that has no memory left asks too, and would wait for itself.
pub(crate) fn prints_documents() -> bool {
    JSON.load(Ordering::Relaxed) || !rustix::stdio::stdout().is_terminal()
}

/// Prints the command's only document: on one line, or indented on a terminal, which gets it only with `--json`.
pub(crate) fn document(value: &impl Serialize) -> Result<(), Failure> {
    if !prints_documents() {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    let text = text.map_err(|e| Failure::usage(format!("cannot write the answer as JSON: {e}")))?;
    let text = if out.is_terminal() { harmless_json(&text) } else { text };
    text_to(&mut out, &text).map(|_| ())
}

/// Prints one of many documents, on a line of its own. `false` if nobody reads them any more.
pub(crate) fn line(value: &impl Serialize) -> Result<bool, Failure> {
    let text = serde_json::to_string(value);
    let text = text.map_err(|e| Failure::usage(format!("cannot write the answer as JSON: {e}")))?;
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { harmless_json(&text) } else { text };
    text_to(&mut out, &text)
}

/// Prints text instead of a document, for the commands whose answer is text.
pub(crate) fn text(text: &str) -> Result<(), Failure> {
    text_to(&mut std::io::stdout().lock(), text).map(|_| ())
}

/// `false` if the reader has closed the pipe.
fn text_to(out: &mut impl Write, text: &str) -> Result<bool, Failure> {
    match writeln!(out, "{}", text.trim_end_matches('\n')).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::usage(format!("cannot write to standard output: {error}"))),
    }
}

/// Prints a line for people. A closed stderr is no reason to stop.
pub(crate) fn say(line: &str) {
    if !spinner::is_quiet() {
        print_line(line);
    }
}

/// Prints the reason of a failure, even with `--quiet`.
pub(crate) fn say_failure(line: &str) {
    if !spinner::is_silent() {
        print_line(line);
    }
}

fn print_line(line: &str) {
    spinner::above(|| {
        let _ = writeln!(std::io::stderr(), "{}", plain(line));
    });
}

/// A colour for people: only on a terminal that has colours, and without `NO_COLOR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ink {
    Plain,
    Green,
    Red,
}

impl Ink {
    /// Text from a file must be [`plain`] before it is coloured.
    pub(crate) fn on(self, text: &str) -> Cow<'_, str> {
        let number = match self {
            Self::Green if has_colours() => 32,
            Self::Red if has_colours() => 31,
            Self::Plain | Self::Green | Self::Red => return Cow::Borrowed(text),
        };
        Cow::Owned(format!("\u{1b}[{number}m{text}\u{1b}[0m"))
    }
}

/// A line that is cut where the terminal of standard error ends.
pub(crate) fn fitting(line: &str) -> Cow<'_, str> {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stderr());
    size.map_or(Cow::Borrowed(line), |size| cut(line, size.ws_col.into()))
}

/// A terminal of no columns does not know its width.
fn cut(line: &str, columns: usize) -> Cow<'_, str> {
    if columns < 8 || line.chars().count() <= columns {
        return Cow::Borrowed(line);
    }
    let kept: String = line.chars().take(columns - 3).collect();
    Cow::Owned(format!("{}...", kept.trim_end()))
}

fn has_colours() -> bool {
    let set = |name| std::env::var_os(name).unwrap_or_default();
    set("NO_COLOR").is_empty() && set("TERM") != "dumb" && std::io::stderr().is_terminal()
}

/// Prints a line for people after a mark in this colour.
pub(crate) fn say_marked(ink: Ink, mark: &str, line: &str) {
    if !spinner::is_quiet() {
        spinner::above(|| {
            let _ = writeln!(std::io::stderr(), "  {} {}", ink.on(mark), plain(line));
        });
    }
}

/// Prints a text of several lines for people.
pub(crate) fn say_text(text: &str) {
    text.lines().for_each(say);
}

/// Prints a piece of a text for people as it comes, without a line end of its own.
pub(crate) fn say_piece(piece: &str) {
    if spinner::is_quiet() || piece.is_empty() {
        return;
    }
    spinner::above(|| {
        let mut out = std::io::stderr().lock();
        let _ = out.write_all(plain_text(piece).as_bytes()).and_then(|()| out.flush());
    });
}

/// Makes a text of several lines safe for a terminal: line ends and tabs stay.
fn plain_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_harmful(c) && !matches!(c, '\n' | '\t') {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Makes a line safe for a terminal. Text from a file can hold control characters, which move the cursor and overwrite
/// output, and marks that turn the direction of writing: both are escaped.
pub(crate) fn plain(line: &str) -> Cow<'_, str> {
    if !line.contains(is_harmful) {
        return Cow::Borrowed(line);
    }
    let mut out = String::with_capacity(line.len());
    for c in line.chars() {
        if is_harmful(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Makes JSON safe for a terminal: `serde_json` escapes only the control characters below the space.
fn harmless_json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push(c),
            c if is_harmful(c) => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Reports a failure on stdout and stderr.
pub(crate) fn fail(failure: &Failure) -> Exit {
    say_failure(&format!("amk: {}", failure.message.replace('\n', " | ")));
    let _ = document(&error_document(failure.exit, &failure.message));
    failure.exit
}

pub(crate) fn error_document(exit: Exit, message: &str) -> Value {
    json!({
        "schema": "amk.error.v1",
        "error": exit.name(),
        "message": message,
        "exit_code": exit.code(),
    })
}

/// Wrong arguments, or a request for help.
pub(crate) fn usage(error: &clap::Error, arguments: &[OsString]) -> Exit {
    let _ = error.print();
    let asked_for = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    if asked_for.contains(&error.kind()) {
        return Exit::Yes;
    }
    // The parser failed, so the parsed flag is not available.
    if arguments.iter().any(|argument| argument == "--json") {
        json_wanted();
    }
    let rendered = error.render().to_string();
    let message = if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        subcommands(&rendered)
    } else {
        usage_message(&rendered)
    };
    let _ = document(&error_document(Exit::Usage, &message));
    Exit::Usage
}

/// The subcommands in a help page, for an error about a missing one.
fn subcommands(help: &str) -> String {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    // The continuation of a description is indented deeper.
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<&str> = names.filter_map(|line| line.split_whitespace().next()).collect();
    format!("a subcommand is missing: {}", names.join(", "))
}

/// The whole error on one line, including lists and tips of several lines, but without the usage line and the pointer to the help.
fn usage_message(rendered: &str) -> String {
    let text = rendered.trim_start_matches("error: ");
    let is_said = |line: &&str| !line.starts_with("Usage:");
    let lines = text.lines().map(str::trim).take_while(is_said).filter(|line| !line.is_empty());
    let mut message = String::new();
    let mut listing = false;
    for line in lines.filter(|line| !line.starts_with("For more information")) {
        let joint = match (message.is_empty(), listing) {
            (true, _) => "",
            (false, _) if message.ends_with(':') => " ",
            (false, true) if !line.starts_with("tip:") => ", ",
            (false, _) => "; ",
        };
        listing = message.ends_with(':') || (listing && joint == ", ");
        message = message + joint + line;
    }
    message
}

/// Prints two aligned columns.
pub(crate) fn table<N: AsRef<str>>(rows: &[(N, String)]) {
    let names = rows.iter().map(|(name, _)| name.as_ref());
    let width = names.clone().map(|name| name.chars().count()).max().unwrap_or(0);
    for (name, (_, value)) in names.zip(rows) {
        say(&format!("  {name:width$}  {value}"));
    }
}

/// A value as text: a string without its quotes, a dash for null.
pub(crate) fn word(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// A number with its unit, or a dash.
pub(crate) fn maybe(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_ends_where_the_terminal_does() {
        assert_eq!(cut("  12 kept  a.b 1 -> 2", 80), "  12 kept  a.b 1 -> 2");
        assert_eq!(cut("  12 kept  a.b 1 -> 2", 15), "  12 kept  a...");
        assert_eq!(cut("as it is, whole", 0), "as it is, whole");
    }

    #[test]
    fn text_of_a_file_cannot_steer_a_terminal() {
        assert_eq!(plain("\u{e9}\u{4e2d} x"), "\u{e9}\u{4e2d} x");
        assert_eq!(
            plain("a\u{1b}[2J\r\nb\u{9b}1m\u{202e}c\u{7f}"),
            "a\\u{1b}[2J\\r\\nb\\u{9b}1m\\u{202e}c\\u{7f}"
        );
        assert_eq!(plain_text("a\tb\n\u{1b}[2J\r"), "a\tb\n\\u{1b}[2J\\r");
        let text = serde_json::to_string_pretty(&json!({"a": "\u{1b}\u{9b}\u{7f}\u{202e}\n"}));
        let shown = harmless_json(&text.unwrap());
        assert!(!shown.contains(|c: char| is_harmful(c) && c != '\n'), "{shown:?}");
        let read: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(read["a"], "\u{1b}\u{9b}\u{7f}\u{202e}\n");
    }
}
