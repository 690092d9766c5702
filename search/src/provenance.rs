//! Numbers in pages, and the evidence that each follows from.
//!
//! A page names its evidence in comments, which a reader of the page does not see:
//!
//! - `<!-- from FILE#/POINTER .2 -->1.42<!-- / -->` is one number of a JSON file, with two decimals. `over /POINTER`
//!   divides it, `%` and `T` change its unit, `e` writes an exponent.
//! - `<!-- rows from FOLDER: | {/model} | {/median_us .1} | -->` makes the rows of the table below it: one for each
//!   bundle in the folder, or for each element of a file with a list. The table's two first lines stay.
//! - `<!-- by hand: REASON -->772<!-- / -->` is a number without evidence.
//!
//! Where a value is the text `FILE#/POINTER`, the number is the one there. In a section with one of these, a number
//! with a unit of time or in a cell of a table needs one too.

mod picture;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// JSON files by path, as pages name them.
pub type Documents = BTreeMap<String, Value>;

const FROM: &str = "from ";
const BY_HAND: &str = "by hand: ";
const END: &str = "<!-- / -->";

/// Units of measured numbers in running text.
const UNITS: [&str; 6] = ["µs", "ms", "us", "TB/s", "times", "tokens/s"];

/// A number of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Number {
    /// The line, from 1.
    pub line: usize,
    /// What the page says.
    pub shown: String,
    /// What the evidence says; `None` without evidence.
    pub expected: Option<String>,
    /// The values that it follows from, each as `FILE#/POINTER`.
    pub from: Vec<String>,
    /// Why there is no evidence.
    pub reason: Option<String>,
}

impl Number {
    /// Whether the page says what the evidence says.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.expected.as_ref().is_none_or(|expected| *expected == self.shown)
    }
}

/// A page with its numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The numbers, in order.
    pub numbers: Vec<Number>,
    /// The page, with every number that has evidence as the evidence says.
    pub text: String,
}

/// The files and folders that a page or a list of values names as evidence.
#[must_use]
pub fn sources(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for mark in ["<!-- from ", "<!-- rows from ", "<!-- bars from "] {
        let named = text.split(mark).skip(1).filter_map(|rest| rest.split(['#', ':', ' ']).next());
        found.extend(named.map(str::to_owned));
    }
    let linked = text.split('"').filter_map(|text| text.split_once(".json#/"));
    found.extend(linked.map(|(stem, _)| format!("{stem}.json")).filter(|path| !path.contains(' ')));
    found
}

/// Reads a page beside the files that it names.
#[must_use]
pub fn read_page(text: &str, documents: &Documents) -> Page {
    let mut reader = Reader { documents, page: Page::default(), marked: false, loose: Vec::new() };
    if let Some((_, rest)) = text.split_once("<!-- bars from ").filter(|_| text.starts_with("<svg"))
    {
        let list = rest.split(' ').next().unwrap_or_default();
        reader.bars(text, list);
        return reader.page;
    }
    let lines: Vec<&str> = text.lines().collect();
    let (mut at, mut fenced) = (0, false);
    while let Some(line) = lines.get(at) {
        fenced ^= line.starts_with("```");
        let rows = line.strip_prefix("<!-- rows from ").and_then(|rest| rest.strip_suffix(" -->"));
        let table = rows.filter(|_| !fenced).and_then(|rows| {
            let end = lines[at..].iter().position(|line| *line == END)?;
            // Its header has two lines.
            let table = &lines[at..at + end];
            table.get(2).filter(|line| line.starts_with("|--")).map(|_| (rows, table))
        });
        if rows.is_some() && !fenced && table.is_none() {
            reader.endless(line, at + 1);
        }
        match table {
            Some((rows, table)) => {
                reader.rows(rows, table, at + 1);
                at += table.len();
            }
            None if fenced => reader.push(line),
            None => reader.line(line, at + 1),
        }
        at += 1;
    }
    reader.end_section();
    reader.page.numbers.sort_by_key(|number| number.line);
    reader.page
}

struct Reader<'a> {
    documents: &'a Documents,
    page: Page,
    /// Whether the section names evidence.
    marked: bool,
    /// Numbers of the section that name none.
    loose: Vec<Number>,
}

/// One JSON object that a row of a table is made from: a file, and the place in it.
struct Item {
    file: String,
    base: String,
}

impl Reader<'_> {
    fn push(&mut self, line: &str) {
        self.page.text += line;
        self.page.text.push('\n');
    }

    fn end_section(&mut self) {
        let loose = std::mem::take(&mut self.loose);
        if std::mem::take(&mut self.marked) {
            self.page.numbers.extend(loose);
        }
    }

    fn endless(&mut self, shown: &str, line: usize) {
        let reason = Some(format!("no number or table that ends with {END} follows it"));
        self.page.numbers.push(Number {
            line,
            shown: shown.to_owned(),
            reason,
            ..Number::default()
        });
    }

    /// A line outside generated tables.
    fn line(&mut self, line: &str, number: usize) {
        if line.starts_with('#') {
            self.end_section();
        }
        let (mut rest, mut written, mut plain, mut ticks) = (line, String::new(), String::new(), 0);
        while let Some((before, mark, inner, after)) = marker(rest) {
            ticks += before.matches('`').count();
            let begins = plain.trim().is_empty() && before.trim().is_empty();
            match after.split_once(END) {
                Some((shown, after)) if ticks % 2 == 0 => {
                    let text = self.marked(mark, inner, shown, (number, begins));
                    written += &format!("{before}<!-- {mark}{inner} -->{text}{END}");
                    plain += before;
                    rest = after;
                }
                // Without an end, or in code.
                end => {
                    if end.is_none() && ticks % 2 == 0 {
                        self.endless(rest, number);
                    }
                    let skipped = &rest[..rest.len() - after.len()];
                    (written, plain) = (written + skipped, plain + skipped);
                    rest = after;
                }
            }
        }
        let bare = unmarked(&(plain + rest)).into_iter();
        self.loose.extend(bare.map(|shown| Number {
            line: number,
            shown,
            reason: Some("it names no evidence".to_owned()),
            ..Number::default()
        }));
        self.push(&(written + rest));
    }

    /// A number with a comment before it; returns the text that belongs there.
    fn marked(&mut self, mark: &str, inner: &str, shown: &str, at: (usize, bool)) -> String {
        let (line, begins) = at;
        let mut found = Number { line, shown: shown.to_owned(), ..Number::default() };
        let value = match inner.split_once('#') {
            _ if begins => Err("a comment that begins a line ends the paragraph".to_owned()),
            _ if mark != FROM => Err(inner.to_owned()),
            None => Err("it names no FILE#/POINTER".to_owned()),
            Some((file, term)) => {
                let item = Item { file: file.to_owned(), base: String::new() };
                self.term(&item, term, &mut found.from)
            }
        };
        match value {
            Ok(value) => found.expected = Some(value),
            Err(reason) => found.reason = Some(reason),
        }
        let text = found.expected.as_ref().unwrap_or(&found.shown).clone();
        self.page.numbers.push(found);
        self.marked = true;
        text
    }

    /// A table: its first line has the template, the next two stay, the others are generated.
    fn rows(&mut self, rows: &str, lines: &[&str], number: usize) {
        self.marked = true;
        let (source, template) = rows.split_once(": ").unwrap_or((rows, ""));
        let (head, held) = lines.split_at(lines.len().min(3));
        head.iter().for_each(|line| self.push(line));
        let items = self.items(source);
        let first = number + head.len();
        for (index, item) in items.iter().enumerate() {
            let line = self.row(item, template, held.get(index).unwrap_or(&""), first + index);
            self.push(&line);
        }
        for (index, held) in held.iter().enumerate().skip(items.len()) {
            let mut extra = Number { line: first + index, ..Number::default() };
            extra.shown = (*held).to_owned();
            if items.is_empty() {
                extra.reason = Some(format!("{source} has no evidence"));
                self.push(held);
            } else {
                (extra.expected, extra.from) = (Some(String::new()), vec![source.to_owned()]);
            }
            self.page.numbers.push(extra);
        }
        self.push(END);
    }

    fn row(&mut self, item: &Item, template: &str, held: &str, line: usize) -> String {
        let mut row = String::from("|");
        let held: Vec<&str> = cells(held).collect();
        for (index, cell) in cells(template).enumerate() {
            let shown = (*held.get(index).unwrap_or(&"")).to_owned();
            let mut number = Number { line, shown, ..Number::default() };
            match self.cell(item, cell, &mut number.from) {
                Ok(text) => number.expected = Some(text),
                Err(reason) => number.reason = Some(reason),
            }
            let text = number.expected.as_ref().unwrap_or(&number.shown).clone();
            row += &format!(" {text} |");
            // A label is no number, but it must be right.
            if cell.contains(" .") || number.expected.as_ref() != Some(&number.shown) {
                self.page.numbers.push(number);
            }
        }
        row
    }

    /// Fills in the terms of a cell, each in braces.
    fn cell(&self, item: &Item, cell: &str, from: &mut Vec<String>) -> Result<String, String> {
        let mut text = String::new();
        for (index, part) in cell.split(['{', '}']).enumerate() {
            text += &if index % 2 == 1 { self.term(item, part, from)? } else { part.to_owned() };
        }
        Ok(text)
    }

    /// `/POINTER`, then `over /POINTER` and a format if there are any.
    fn term(&self, item: &Item, term: &str, from: &mut Vec<String>) -> Result<String, String> {
        let (pointers, format) = match term.rsplit_once(" .") {
            Some((pointers, format)) => (pointers, Some(format)),
            None => (term, None),
        };
        let mut value = |pointer: &str| {
            let (place, value) = self.find(item, pointer.trim())?;
            from.push(place);
            Ok::<_, String>(value)
        };
        let (of, over) = pointers.split_once(" over ").unwrap_or((pointers, ""));
        let of = value(of)?;
        let Some(format) = format else {
            return Ok(of.as_str().map_or_else(|| of.to_string(), str::to_owned));
        };
        let divisor = if over.is_empty() { Some(1.0) } else { value(over)?.as_f64() };
        let number = of.as_f64().zip(divisor).map(|(of, divisor)| of / divisor);
        let text = number.filter(|number| number.is_finite()).and_then(|n| formatted(n, format));
        text.ok_or_else(|| format!("{{{term}}} makes no number"))
    }

    /// A value and its place, links followed.
    fn find(&self, item: &Item, pointer: &str) -> Result<(String, &Value), String> {
        let mut place = (item.file.clone(), item.base.clone() + pointer);
        for _ in 0..2 {
            let (file, pointer) = &place;
            let document = self.documents.get(file).ok_or_else(|| format!("{file} is missing"))?;
            let value = document.pointer(pointer);
            let value = value.ok_or_else(|| format!("{file} has nothing at {pointer}"))?;
            match value.as_str().and_then(|text| text.split_once('#')) {
                Some((file, pointer)) if file.ends_with(".json") => {
                    place = (file.to_owned(), pointer.to_owned());
                }
                Some(_) | None => return Ok((format!("{file}#{pointer}"), value)),
            }
        }
        Err(format!("{} is a link to a link", item.file))
    }

    /// What the rows of a table are made from: the elements of a list, or the bundles of a folder, small models and short
    /// contexts first.
    fn items(&self, source: &str) -> Vec<Item> {
        if let Some(Value::Array(list)) = self.documents.get(source) {
            let element = |index| Item { file: source.to_owned(), base: format!("/{index}") };
            return (0..list.len()).map(element).collect();
        }
        let inside = |path: &str| path.strip_prefix(source).is_some_and(|p| p.starts_with('/'));
        let mut files: Vec<_> = self.documents.iter().filter(|(path, _)| inside(path)).collect();
        let size = |document: &Value, name: &str| document.get(name).and_then(Value::as_u64);
        files.sort_by_key(|(_, of)| (size(of, "bytes_per_token"), size(of, "context")));
        let item = |(file, _): (&String, _)| Item { file: file.clone(), base: String::new() };
        files.into_iter().map(item).collect()
    }
}

/// The first comment of a line that marks a number: what is before it, its word, its contents, and what is after it.
fn marker(line: &str) -> Option<(&str, &str, &str, &str)> {
    let end = line.rfind(" -->")?;
    line.match_indices("<!-- ").take_while(|(at, _)| *at < end).find_map(|(at, open)| {
        let tail = &line[at + open.len()..];
        let mark = [FROM, BY_HAND].into_iter().find(|mark| tail.starts_with(mark))?;
        let (inner, after) = tail[mark.len()..].split_once(" -->")?;
        Some((&line[..at], mark, inner, after))
    })
}

fn cells(row: &str) -> impl Iterator<Item = &str> {
    row.trim().trim_start_matches('|').trim_end_matches('|').split('|').map(str::trim)
}

/// A number in a format: decimals, then `e` for an exponent, `%` for per cent, `k` and `T` for 10^3 and 10^12 of its unit.
fn formatted(number: f64, format: &str) -> Option<String> {
    let decimals = format.trim_end_matches(['e', '%', 'k', 'T']);
    let places: usize = decimals.parse().ok().filter(|places| *places <= 9)?;
    match &format[decimals.len()..] {
        "" => Some(format!("{number:.places$}")),
        "e" => Some(format!("{number:.places$e}")),
        "%" => Some(format!("{:.places$}%", 100.0 * number)),
        "k" => Some(format!("{:.places$}", number / 1e3)),
        "T" => Some(format!("{:.places$}", number / 1e12)),
        _ => None,
    }
}

/// The numbers of a line that look measured: with a unit behind them, or at the beginning of a cell.
fn unmarked(line: &str) -> Vec<String> {
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let words: Vec<&str> =
        line.split_whitespace().map(|w| w.trim_matches(['(', ')', ',', '.'])).collect();
    let with_unit = words.windows(2).filter(|w| is_number(w[0]) && UNITS.contains(&w[1]));
    let mut found: Vec<String> = with_unit.map(|w| w.join(" ")).collect();
    if line.starts_with('|') && found.is_empty() {
        found.extend(cells(line).skip(1).filter(|cell| is_number(cell)).map(str::to_owned));
    }
    found
}
