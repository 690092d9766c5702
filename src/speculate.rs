//! Guesses of the next tokens, by looking the last ones up in the text so far or by a draft model, and when they are worth a
//! window.
//!
//! Everything here is a function of the tokens and of the times that it is given: it reads no clock. A guess never changes a
//! token: the machine chooses each token as without it, and a guess only decides how many positions a step has.

use std::collections::HashMap;

use serde_json::{Value, json};

mod draft;
mod share;
mod worth;

pub(crate) use draft::{Draft, Guessed};
pub(crate) use share::{Offer, Sharing};
pub(crate) use worth::Worth;
use worth::{Expected, expected};

/// Most guesses of a window, beside the next token.
pub(crate) const GUESSES_MAX: u32 = abi::SEQS_MAX as u32 - 1;

/// Sequences of the smallest kernel that runs windows with this many guesses.
pub(crate) fn kernel_seqs(guesses: u32) -> u32 {
    (guesses.min(GUESSES_MAX) + 1).next_power_of_two().max(2)
}

/// The longest run of last tokens that is looked up, and the shortest.
const RUNS: [usize; 3] = [4, 3, 2];
/// Part of the acceptance that each further guess keeps: the last 16 or so decide.
const KEEPS: f64 = 0.94;
/// Gain in tokens per time from which on windows begin, and below which they end: a switch of kernels takes time.
const BEGINS: f64 = 1.1;
const ENDS: f64 = 1.0;
/// Times that are kept of each width, of which the median counts.
const TIMES: usize = 9;

/// The text so far, and where each run of tokens was last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lookup {
    tokens: Vec<u32>,
    /// By length: the position behind the last occurrence that has a token behind it.
    behind: [HashMap<Vec<u32>, usize>; RUNS.len()],
}

impl Lookup {
    pub(crate) fn new(tokens: &[u32]) -> Self {
        let mut lookup = Self::default();
        tokens.iter().for_each(|&token| lookup.push(token));
        lookup
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn text(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn push(&mut self, token: u32) {
        let end = self.tokens.len();
        for (behind, run) in self.behind.iter_mut().zip(RUNS) {
            if let Some(last) = end.checked_sub(run).and_then(|start| self.tokens.get(start..)) {
                behind.insert(last.to_vec(), end);
            }
        }
        self.tokens.push(token);
    }

    /// What followed the last time that the text ended as it does now, at most `most` tokens: behind the longest run that
    /// was there before. Where that reaches the end of the text, it goes on with the guesses themselves.
    pub(crate) fn guess(&self, most: usize) -> Vec<u32> {
        let end = self.tokens.len();
        let of = |(behind, run): (&HashMap<Vec<u32>, usize>, usize)| {
            behind.get(self.tokens.get(end.checked_sub(run)?..)?).copied()
        };
        let Some(from) = self.behind.iter().zip(RUNS).find_map(of) else { return Vec::new() };
        let mut guesses: Vec<u32> = Vec::with_capacity(most);
        for at in from..from + most {
            let known = self.tokens.get(at).copied();
            guesses.extend(known.or_else(|| guesses.get(at - end).copied()));
        }
        guesses
    }
}

/// What steps of some number of positions take.
#[derive(Clone, Debug, Default)]
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, us: f64) {
        if self.0.len() == TIMES {
            self.0.remove(0);
        }
        self.0.push(us);
    }

    fn median(&self) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }
}

/// What windows gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Windows, those without a guess among them.
    pub(crate) windows: u64,
    /// Guesses of these.
    pub(crate) guessed: u64,
    /// Guesses that were right, and behind right ones only.
    pub(crate) accepted: u64,
    /// Windows with a wrong guess.
    pub(crate) rejected: u64,
    /// Tokens of these steps.
    pub(crate) tokens: u64,
    /// Of all guesses, of those that were right, and of windows with a wrong one: those of a draft.
    pub(crate) drafted: u64,
    pub(crate) drafts_accepted: u64,
    pub(crate) drafts_rejected: u64,
    /// Times that a draft guessed beside steps of one position.
    pub(crate) looks: u64,
}

/// How the next tokens are run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// One position per step, on the kernel that is fastest for one.
    Plain,
    /// A window with these guesses; without any, one position on the kernel of windows.
    Window(Vec<u32>),
    /// A window with this many guesses of the draft.
    Draft(usize),
    /// As [`Plan::Plain`], compared with this many guesses of the draft: whether it has become better.
    Look(usize),
}

/// What a window of this many positions is expected to take, in steps of the kernel for one sequence: more than batches of
/// llama-3.1-8b take (docs/lab/2026-11-28-speculation.md).
pub(crate) fn price(positions: usize) -> f64 {
    1.15 + 0.015 * positions as f64
}

impl Tally {
    /// Counts a window: its guesses, how many were right and whether one was wrong, its tokens, and whether a draft guessed.
    pub(crate) fn add(
        &mut self,
        guesses: usize,
        (right, wrong): (usize, bool),
        tokens: usize,
        drafted: bool,
    ) {
        self.windows += 1;
        self.guessed += guesses as u64;
        self.accepted += right as u64;
        self.rejected += u64::from(wrong);
        self.tokens += tokens as u64;
        if drafted {
            self.drafted += guesses as u64;
            self.drafts_accepted += right as u64;
            self.drafts_rejected += u64::from(wrong);
        }
    }

    /// The fields of documents.
    pub(crate) fn to_json(self) -> Value {
        let Self { windows, guessed, accepted, rejected, tokens, .. } = self;
        let Self { drafted, drafts_accepted, drafts_rejected, looks, .. } = self;
        let found = (accepted - drafts_accepted, rejected - drafts_rejected);
        let over = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
        json!({
            "windows": windows,
            "guessed": guessed,
            "accepted": accepted,
            "tokens": tokens,
            "rejected": rejected,
            "acceptance": over(accepted, accepted + rejected),
            "tokens_per_window": over(tokens, windows),
            "drafted": drafted,
            "drafts_accepted": drafts_accepted,
            "drafts_acceptance": over(drafts_accepted, drafts_accepted + drafts_rejected),
            "lookups_acceptance": over(found.0, found.0 + found.1),
            "draft_looks": looks,
        })
    }
}

/// Decides how many guesses a step has, by what they gave so far and what steps take.
#[derive(Clone, Debug)]
pub(crate) struct Guesser {
    lookup: Lookup,
    /// The most guesses of a window.
    most: usize,
    /// Probability that a guess behind right ones is right, and that there is a guess, from the last ones.
    acceptance: f64,
    coverage: f64,
    /// Whether it is running windows.
    windows: bool,
    /// A step of the kernel for one sequence, and windows by their number of positions.
    plain: Times,
    times: Vec<Times>,
    pub(crate) tally: Tally,
    /// The part of it that is on the telemetry page.
    published: Tally,
}

impl Guesser {
    /// Guesses at most `most` tokens at a time behind `tokens`. It begins in doubt: a text must have shown that it can be
    /// guessed.
    pub(crate) fn new(tokens: &[u32], most: usize) -> Self {
        Self {
            lookup: Lookup::new(tokens),
            most,
            acceptance: 0.3,
            coverage: 0.3,
            windows: false,
            plain: Times::default(),
            times: vec![Times::default(); most + 2],
            tally: Tally::default(),
            published: Tally::default(),
        }
    }

    /// What windows gave since this was last called.
    pub(crate) fn unpublished(&mut self) -> Tally {
        let before = std::mem::replace(&mut self.published, self.tally);
        Tally {
            windows: self.tally.windows - before.windows,
            guessed: self.tally.guessed - before.guessed,
            accepted: self.tally.accepted - before.accepted,
            rejected: self.tally.rejected - before.rejected,
            tokens: self.tally.tokens - before.tokens,
            drafted: self.tally.drafted - before.drafted,
            drafts_accepted: self.tally.drafts_accepted - before.drafts_accepted,
            drafts_rejected: self.tally.drafts_rejected - before.drafts_rejected,
            looks: self.tally.looks - before.looks,
        }
    }

    /// Tokens of the text that it knows.
    pub(crate) fn len(&self) -> usize {
        self.lookup.len()
    }

    /// What it could have in a step beside other sequences, with no more than `room` guesses.
    pub(crate) fn offer(&self, room: usize) -> Offer {
        let (acceptance, most) = (self.acceptance, self.most.min(room));
        Offer { acceptance, guesses: self.lookup.guess(most) }
    }

    /// The text so far.
    pub(crate) fn text(&self) -> &[u32] {
        self.lookup.text()
    }

    /// How the next step is run, with no more than `room` guesses. Those that are looked up cost nothing, so a draft guesses
    /// only where there are none, or where they are right so rarely that its own give more tokens per time. It has not read
    /// the last `unread` tokens of the text.
    pub(crate) fn next(&mut self, room: usize, draft: Option<(&Worth, usize)>) -> Plan {
        let worth = draft.map(|(worth, _)| worth);
        if let Some(us) = worth.and_then(Worth::plain).filter(|_| self.plain.median().is_none()) {
            self.plain.add(us); // of the texts before
        }
        let worth = worth.filter(|worth| !worth.waits() && room > 0);
        let left = (draft.map_or(0, |(_, unread)| unread), room);
        let drafts = worth.and_then(|worth| worth.best(self.most, left, |width| self.price(width)));
        let (width, gain) = self.best(drafts);
        let goes_on = self.windows && drafts.is_some() && worth.is_some_and(Worth::saved);
        self.windows = goes_on || gain >= if self.windows { ENDS } else { BEGINS };
        let look = worth.and_then(|worth| worth.look(left.0, left.1));
        let look = look.map(|look| look.min(self.most).min(room));
        if !self.windows {
            return look.map_or(Plan::Plain, Plan::Look);
        }
        let guesses = self.lookup.guess(width.min(room));
        let found = self.looked_up(guesses.len());
        match (drafts, look) {
            (Some(drafts), _) if guesses.is_empty() || drafts.gain() > found.gain() => {
                Plan::Draft(drafts.guesses.min(room))
            }
            (None, Some(look)) if guesses.is_empty() => Plan::Draft(look),
            _ => Plan::Window(guesses),
        }
    }

    /// The best number of guesses of a window that are looked up, and the tokens per time with it, in those of steps of one
    /// position. Where there are none, or a draft's are better, a window has those of a draft, or one position.
    fn best(&self, drafts: Option<Expected>) -> (usize, f64) {
        let without = drafts.unwrap_or_else(|| self.looked_up(0));
        let gain = |guesses: usize| {
            let found = self.looked_up(guesses);
            let better = drafts.filter(|drafts| drafts.gain() > found.gain());
            let with = better.unwrap_or(found);
            let mean =
                |with: f64, without: f64| self.coverage * with + (1.0 - self.coverage) * without;
            mean(with.tokens, without.tokens) / mean(with.price, without.price)
        };
        let better = |best: (usize, f64), guesses| {
            if gain(guesses) > best.1 { (guesses, gain(guesses)) } else { best }
        };
        (1..=self.most).fold((0, 0.0), better)
    }

    /// What a window with this many guesses that are looked up is expected to give and take.
    fn looked_up(&self, guesses: usize) -> Expected {
        let (tokens, price) = (expected(self.acceptance, guesses), self.price(guesses + 1));
        Expected { guesses, tokens, price }
    }

    /// What a window of this many positions takes, in steps of the kernel for one sequence. Before one was timed: what the
    /// nearest one took, or what is expected.
    fn price(&self, positions: usize) -> f64 {
        let expected = price(positions);
        let Some(plain) = self.plain.median() else { return expected };
        let timed = self.times.iter().enumerate().filter_map(|(of, t)| Some((of, t.median()?)));
        let nearest = timed.min_by_key(|(of, _)| of.abs_diff(positions));
        nearest.map_or(expected, |(_, us)| us / plain)
    }

    /// Notes what a turn by a plan gave, with these guesses of the draft, and the microseconds that it took.
    pub(crate) fn learn(
        &mut self,
        (plan, guessed): (&Plan, &Guessed),
        (tokens, us): (&[u32], Option<f64>),
        worth: Option<&mut Worth>,
    ) {
        match (plan, worth) {
            (Plan::Window(guesses), worth) => {
                self.ran(guesses, tokens, us);
                worth.into_iter().for_each(|worth| worth.gave(tokens.len()));
            }
            (Plan::Draft(_), Some(worth)) => {
                worth.gave(tokens.len());
                self.ran_drafted(worth, guessed, (tokens, us));
            }
            (_, worth) => {
                let each = us.map(|us| us / tokens.len().max(1) as f64);
                self.stepped(tokens, each);
                let Some(worth) = worth else { return };
                worth.stepped(each);
                worth.gave(tokens.len());
                if let Plan::Look(_) = plan {
                    worth.looked(guessed, tokens);
                    self.tally.looks += 1;
                }
            }
        }
    }

    /// Notes tokens that steps of one position gave, and what each step took. The guesses that there would have been are
    /// compared with them, so that a text shows at no cost that it can be guessed.
    pub(crate) fn stepped(&mut self, tokens: &[u32], us_of_each: Option<f64>) {
        for &token in tokens {
            let guess = self.lookup.guess(1);
            self.looked(!guess.is_empty());
            guess.into_iter().for_each(|guess| self.judged(guess == token));
            self.lookup.push(token);
        }
        us_of_each.into_iter().for_each(|us| self.plain.add(us));
    }

    /// Notes what a window with these guesses gave, and what it took.
    pub(crate) fn ran(&mut self, guesses: &[u32], tokens: &[u32], us: Option<f64>) {
        self.looked(!guesses.is_empty());
        let (right, wrong) = self.counted(guesses, tokens, us);
        self.tally.add(guesses.len(), (right, wrong), tokens.len(), false);
        tokens.iter().for_each(|&token| self.lookup.push(token));
        (0..right).for_each(|_| self.judged(true));
        if wrong {
            self.judged(false);
        }
    }

    /// The same of guesses of a draft.
    fn ran_drafted(
        &mut self,
        worth: &mut Worth,
        guessed: &Guessed,
        (tokens, us): (&[u32], Option<f64>),
    ) {
        self.stepped(tokens, None);
        let (right, wrong) = self.counted(&guessed.tokens, tokens, us);
        self.tally.add(guessed.tokens.len(), (right, wrong), tokens.len(), true);
        worth.ran(guessed, (right, wrong), (tokens.len(), us));
    }

    /// Notes the time of a window. Returns how many guesses were right, and whether one was wrong.
    fn counted(&mut self, guesses: &[u32], tokens: &[u32], us: Option<f64>) -> (usize, bool) {
        let times = self.times.get_mut(guesses.len() + 1);
        times.into_iter().zip(us).for_each(|(times, us)| times.add(us));
        compared(guesses, tokens)
    }

    fn looked(&mut self, found: bool) {
        self.coverage = KEEPS * self.coverage + (1.0 - KEEPS) * f64::from(u8::from(found));
    }

    fn judged(&mut self, right: bool) {
        self.acceptance = KEEPS * self.acceptance + (1.0 - KEEPS) * f64::from(u8::from(right));
    }
}

/// How many guesses were right, and whether one behind these was wrong.
fn compared(guesses: &[u32], tokens: &[u32]) -> (usize, bool) {
    let right = tokens.iter().zip(guesses).take_while(|(token, guess)| token == guess).count();
    (right, right < guesses.len() && right < tokens.len())
}

#[cfg(test)]
#[path = "speculate_tests.rs"]
mod tests;
