//! Passages: paragraphs, items and table rows of pages, and trials of ledgers.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::commands::runs::LEDGER;
use crate::failure::Failure;
use crate::files;

/// Largest page in bytes.
const PAGE_MAX: u64 = 16 << 20;
/// Most characters of the text above a table that count for its rows.
const LEAD_MAX: usize = 120;
/// Most passages: a bound for a folder that was named by mistake.
const PASSAGES_MAX: usize = 1 << 20;

/// Beginnings and phrases of what did not work. A heading counts for all below it.
const FAILURES: &[&str] = &[
    "failed",
    "not kept",
    "did not help",
    "no better",
    "refuted",
    "removed",
    "misses",
    "no gain",
    "not adopted",
    "worse",
    "hangs",
    "slower",
    "does not pay",
    "was unsound",
    "a race",
    "red on a card",
];

/// A piece of text with its place.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Passage {
    pub(super) file: PathBuf,
    /// First and last line, from 1.
    pub(super) lines: [usize; 2],
    pub(super) title: String,
    pub(super) text: String,
    pub(super) failure: bool,
    pub(super) trial: Option<u64>,
}

/// All passages of some places.
#[derive(Default)]
pub(super) struct Source {
    pub(super) passages: Vec<Passage>,
    pub(super) refused: Vec<String>,
}

impl Source {
    /// Reads a page, a ledger, or a folder of pages and runs.
    pub(super) fn read(&mut self, place: &Path) -> Result<(), Failure> {
        let is_page = |path: &Path| path.extension().is_some_and(|end| end == "md");
        if is_page(place) {
            self.page(place)?;
        } else if place.is_file() {
            self.ledger(place);
        } else {
            let entries = std::fs::read_dir(place).map_err(|e| files::unreadable(place, e))?;
            let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
            paths.sort();
            for path in paths {
                if is_page(&path) {
                    self.page(&path)?;
                } else if path.join(LEDGER).is_file() {
                    self.ledger(&path.join(LEDGER));
                }
            }
            if place.join(LEDGER).is_file() {
                self.ledger(&place.join(LEDGER));
            }
        }
        if self.passages.len() > PASSAGES_MAX {
            let many = "holds more than a million passages; name fewer pages with --in";
            return Err(Failure::usage(format!("{} {many}", place.display())));
        }
        Ok(())
    }

    fn page(&mut self, path: &Path) -> Result<(), Failure> {
        self.passages.extend(page(path, &files::read_text(path, PAGE_MAX)?));
        Ok(())
    }

    /// Adds the trials of a ledger, as far as it holds.
    fn ledger(&mut self, path: &Path) {
        match corpus::read(path) {
            Ok(contents) => {
                let word = |key: &str| contents.header[key].as_str().unwrap_or("-").to_owned();
                let title =
                    format!("{} on {}, {}", word("model"), word("target"), word("latency_kind"));
                let rows = contents.records.iter().enumerate();
                self.passages.extend(rows.filter_map(|(at, row)| trial(path, at + 2, &title, row)));
            }
            Err(error) => self.refused.push(error.to_string()),
        }
    }
}

/// A trial as a passage; `None` for other rows.
fn trial(path: &Path, line: usize, title: &str, row: &Value) -> Option<Passage> {
    let (number, outcome) = (row["trial"].as_u64()?, row["outcome"].as_str()?);
    let knob = |(path, pair): (&String, &Value)| {
        format!(
            "{path} {} to {}",
            crate::report::word(pair.get(0)),
            crate::report::word(pair.get(1))
        )
    };
    let changed: Vec<String> = row["changed"].as_object()?.iter().map(knob).collect();
    let gain = |end: &str| row["gain"][end].as_f64().map(|gain| format!("{:.1}", 100.0 * gain));
    let gain = gain("low").zip(gain("high"));
    let gain = gain.map_or_else(String::new, |(low, high)| format!(", {low}..{high} % saved"));
    let latency = row["verdict"]["latency_us"].as_f64();
    let latency = latency.map_or_else(String::new, |us| format!(", {us:.1} us"));
    let why = row["why"].as_str().unwrap_or_default();
    Some(Passage {
        file: path.to_path_buf(),
        lines: [line, line],
        title: title.to_owned(),
        text: format!("{outcome}{gain}{latency}: {why}; {}", changed.join(", ")),
        failure: !matches!(outcome, "kept" | "baseline"),
        trial: Some(number),
    })
}

/// The passages of a page: a table's row, a list's item and a paragraph are one each.
fn page(path: &Path, text: &str) -> Vec<Passage> {
    let mut reader = Reader::default();
    for (at, line) in text.lines().enumerate() {
        reader.line(at + 1, line);
    }
    reader.close();
    for passage in &mut reader.passages {
        passage.file = path.to_path_buf();
        let told = format!("{} {}", passage.title, passage.text).to_lowercase();
        passage.failure = FAILURES.iter().any(|phrase| told.contains(phrase));
    }
    reader.passages
}

/// Cuts a page line by line.
#[derive(Default)]
struct Reader {
    /// The headings above, with their levels.
    headings: Vec<(usize, String)>,
    /// The text before a table, which says what its rows are, and its first row.
    lead: String,
    columns: String,
    open: Option<Passage>,
    fenced: bool,
    passages: Vec<Passage>,
}

impl Reader {
    fn line(&mut self, number: usize, line: &str) {
        let text = line.trim();
        if text.starts_with("```") {
            self.fenced = !self.fenced;
            return;
        }
        let level = text.bytes().take_while(|&c| c == b'#').count();
        if !self.fenced && level > 0 && text[level..].starts_with(' ') {
            self.close();
            self.headings.retain(|(above, _)| *above < level);
            self.headings.push((level, text[level..].trim().to_owned()));
            (self.lead, self.columns) = (String::new(), String::new());
        } else if !self.fenced && text.starts_with('|') {
            self.row(number, text);
        } else if text.is_empty() {
            self.close();
        } else {
            self.columns.clear();
            if !self.fenced && is_item(line) {
                self.close();
            }
            self.more(number, text);
        }
    }

    /// A row of a table; the first one names the columns.
    fn row(&mut self, number: usize, text: &str) {
        self.close();
        if self.columns.is_empty() {
            self.columns = text.to_owned();
        } else if text.chars().any(|c| !matches!(c, '|' | '-' | ':' | ' ')) {
            let mut title = self.title();
            for more in [&self.lead, &self.columns] {
                title += " / ";
                title += more;
            }
            let lines = [number, number];
            self.passages.push(Passage {
                lines,
                title,
                text: text.to_owned(),
                ..Passage::default()
            });
        }
    }

    /// Another line of the passage.
    fn more(&mut self, number: usize, text: &str) {
        let title = self.title();
        let open = self.open.get_or_insert_with(|| Passage {
            title,
            lines: [number, number],
            ..Passage::default()
        });
        if !open.text.is_empty() {
            open.text.push(' ');
        }
        open.text.push_str(text);
        open.lines[1] = number;
    }

    /// Ends the passage. A table after it has it as its lead.
    fn close(&mut self) {
        let Some(passage) = self.open.take() else { return };
        self.lead = passage.text.chars().take(LEAD_MAX).collect();
        self.passages.push(passage);
    }

    fn title(&self) -> String {
        let headings: Vec<&str> = self.headings.iter().map(|(_, text)| text.as_str()).collect();
        headings.join(" / ")
    }
}

/// Whether a line begins an item of a list.
fn is_item(line: &str) -> bool {
    let text = line.trim_start();
    let numbered = text.trim_start_matches(|c: char| c.is_ascii_digit());
    text.starts_with("- ")
        || text.starts_with("* ")
        || (numbered.len() < text.len() && numbered.starts_with(". "))
}
