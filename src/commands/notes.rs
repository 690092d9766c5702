//! `amk notes`: what is written about a question, in decisions, lab notebooks and ledgers, by ranked text search.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::NotesArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::report::{self, Answer};

mod index;
mod passages;
mod words;

use index::Index;
use passages::{Passage, Source};

/// Where notes are looked for if no place is named; those that exist.
const PLACES: [&str; 3] = ["docs/decisions", "docs/lab", "runs"];

/// Longest quote of a passage in characters: five notes stay below 4 KB.
const QUOTE_MAX: usize = 360;

/// The answer of `amk notes`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Notes {
    #[schemars(extend("const" = "amk.notes.v1"))]
    schema: &'static str,
    question: String,
    /// Passages that were searched.
    passages: usize,
    /// Ledgers that could not be read, and why.
    refused: Vec<String>,
    /// The best matches; failures come first, each group by rank.
    notes: Vec<Note>,
}

/// A passage that matches.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Note {
    /// `FILE:LINE` of a page, or `RUN trial N`.
    pub(crate) id: String,
    pub(crate) file: PathBuf,
    /// Its first and last line in the file.
    pub(crate) lines: [usize; 2],
    /// Whether it tells of something that did not work.
    pub(crate) failure: bool,
    /// The page's title and headings; of a trial, the model and GPU.
    pub(crate) title: String,
    /// The passage, or the part of it that matches best.
    pub(crate) text: String,
    /// BM25; comparable within one answer.
    pub(crate) score: f64,
}

pub(crate) fn run(args: &NotesArgs) -> Outcome {
    answer(args)?.print()
}

pub(crate) fn answer(args: &NotesArgs) -> Result<Answer<Notes>, Failure> {
    let mut places = args.places.clone();
    if places.is_empty() {
        places = PLACES.iter().map(PathBuf::from).filter(|place| place.is_dir()).collect();
    }
    if places.is_empty() {
        return Err(Failure::usage(format!(
            "there is no {} here; name a page, a folder of pages or a run with --in",
            PLACES.join(", no ")
        )));
    }
    let mut source = Source::default();
    for place in &places {
        source.read(place)?;
    }
    let notes = best(&Index::of(&source.passages), &args.question, args.most.into());
    for note in &notes {
        let mark = if note.failure { "failed: " } else { "" };
        report::say(&format!("{}  {}", note.id, note.title));
        report::say(&format!("    {mark}{}", note.text));
    }
    if notes.is_empty() {
        report::say("nothing is written about it; other words may be: `amk explain` lists terms");
    }
    let exit = if notes.is_empty() { Exit::No } else { Exit::Yes };
    let document = Notes {
        schema: "amk.notes.v1",
        question: args.question.clone(),
        passages: source.passages.len(),
        refused: source.refused,
        notes,
    };
    Ok(Answer { document, exit })
}

/// The best matches, failures first.
fn best(index: &Index<'_>, question: &str, most: usize) -> Vec<Note> {
    let mut found = index.best(question, most);
    found.sort_by_key(|(passage, _)| !passage.failure);
    found.iter().map(|(passage, score)| note(passage, *score, question)).collect()
}

fn note(passage: &Passage, score: f64, question: &str) -> Note {
    let file = passage.file.clone();
    let id = match passage.trial {
        Some(trial) => {
            format!("{} trial {trial}", file.parent().unwrap_or(Path::new("")).display())
        }
        None => format!("{}:{}", file.display(), passage.lines[0]),
    };
    Note {
        id,
        file,
        lines: passage.lines,
        failure: passage.failure,
        title: passage.title.clone(),
        // A trial begins with how it ended.
        text: match passage.trial {
            Some(_) => quote(&passage.text, ""),
            None => quote(&passage.text, question),
        },
        score: (score * 1000.0).round() / 1000.0,
    }
}

/// The passage, if it is short; else the sentences from the one that shares most words with the question.
fn quote(text: &str, question: &str) -> String {
    if text.chars().count() <= QUOTE_MAX {
        return text.to_owned();
    }
    let asked = words::words(question);
    let matches =
        |sentence: &str| words::words(sentence).iter().filter(|&word| asked.contains(word)).count();
    let mut best = (0, 0);
    let mut at = 0;
    for sentence in text.split_inclusive([';', '.', '|']) {
        let found = matches(sentence);
        if found > best.0 {
            best = (found, at);
        }
        at += sentence.len();
    }
    let from = &text[best.1..];
    let cut: String = from.trim().chars().take(QUOTE_MAX).collect();
    let before = if best.1 > 0 { "… " } else { "" };
    let after = if from.trim().chars().count() > QUOTE_MAX { " …" } else { "" };
    format!("{before}{}{after}", cut.trim())
}

#[cfg(test)]
mod tests;
