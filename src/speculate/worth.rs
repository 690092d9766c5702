//! What a draft model's guesses are worth: how often they are right, and what they take. It outlives a text, so that a
//! draft which does not pay is learned once.

use super::{Guessed, Times, compared, price};

/// Acceptance of a draft that was never judged: high enough that it is tried.
const HOPED: f64 = 0.7;
/// What a guess takes before one was timed, in steps of the model.
const HOPED_PRICE: f64 = 0.1;
/// Guesses of a look whether a draft has become better, while it does not pay.
const LOOKED: usize = 4;
/// Tokens that a draft reads at most where the text went on as in the last window: the last guess, which it has not run,
/// and the token behind it.
const READS: usize = 2;
/// Tokens of a text whose reading takes much longer than guesses behind it.
const LONG: usize = 64;
/// Steps of the model that each token pays for: of the time of a text that cannot be guessed, this part goes to looks.
pub(super) const PAYS: f64 = 0.015;
/// Steps of the model that guesses saved and may lose again before they end: the last ones may have been wrong by chance.
const CREDIT: f64 = 8.0;
/// Part of the acceptance that each further guess keeps: the last 25 or so decide.
const KEEPS: f64 = 0.96;

/// A number of guesses for one step, and what they are expected to give and take: tokens, and steps of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    pub(super) guesses: usize,
    pub(super) tokens: f64,
    pub(super) price: f64,
}

impl Expected {
    /// Tokens per time, in those of steps of one position.
    pub(super) fn gain(self) -> f64 {
        self.tokens / self.price
    }
}

/// The worth of a draft's guesses.
#[derive(Clone, Debug)]
pub(crate) struct Worth {
    /// Probability that a guess behind right ones is right, from the last ones of all texts.
    acceptance: f64,
    /// Its commands, by the number of guesses.
    times: Vec<Times>,
    /// Reading a token of a long text.
    reads: Times,
    /// A step of the model without guesses.
    plain: Times,
    /// Whether steps take as long as they will: else prices are those expected.
    timed: bool,
    /// Steps of the model that its guesses took beyond the tokens that they gave, and that later tokens have not paid for;
    /// below zero what they saved.
    debt: f64,
}

impl Worth {
    pub(crate) fn new(timed: bool) -> Self {
        let times = vec![Times::default(); super::GUESSES_MAX as usize + 1];
        let (reads, plain) = (Times::default(), Times::default());
        Self { acceptance: HOPED, times, reads, plain, timed, debt: 0.0 }
    }

    /// What a step of the model takes without guesses, in microseconds.
    pub(super) fn plain(&self) -> Option<f64> {
        self.plain.median()
    }

    /// Whether a step of the model must be timed before its guesses can be compared with it.
    pub(crate) fn waits(&self) -> bool {
        self.timed && self.plain.median().is_none()
    }

    /// Whether it has saved more than it has lost.
    pub(super) fn saved(&self) -> bool {
        self.debt < 0.0
    }

    /// The guesses of a look, if one is paid for: also by the tokens that are left, if it has to read the text before.
    pub(super) fn look(&self, unread: usize, left: usize) -> Option<usize> {
        let paid = self.debt <= 0.0 && self.reading(unread) <= PAYS * left as f64;
        paid.then_some(LOOKED)
    }

    /// What reading a text takes, in steps of the model; nothing before it was timed.
    fn reading(&self, unread: usize) -> f64 {
        let us = self.reads.median().zip(self.plain.median()).filter(|_| unread > READS);
        us.map_or(0.0, |(us, plain)| us / plain * unread as f64)
    }

    /// The best number of guesses, if it is better than a window without any, and saves more of the tokens that are left
    /// than reading the text takes. `windows`: what windows take by their positions.
    pub(super) fn best(
        &self,
        most: usize,
        (unread, left): (usize, usize),
        windows: impl Fn(usize) -> f64,
    ) -> Option<Expected> {
        let of = |guesses| {
            let tokens = expected(self.acceptance, guesses);
            Expected { guesses, tokens, price: windows(guesses + 1) + self.price(guesses) }
        };
        let all = (1..=most).map(of).filter(|of| of.gain() > 1.0 / windows(1));
        let best = all.max_by(|a, b| a.gain().total_cmp(&b.gain()))?;
        let saves = (1.0 - best.price / best.tokens) * left as f64;
        let reading = self.reading(unread);
        (reading == 0.0 || reading < saves).then_some(best)
    }

    /// What this many guesses take, in steps of the model.
    fn price(&self, guesses: usize) -> f64 {
        let expected = HOPED_PRICE * guesses as f64;
        let Some(plain) = self.plain.median() else { return expected };
        let timed = self.times.iter().enumerate().filter_map(|(of, t)| Some((of, t.median()?)));
        let nearest = timed.min_by_key(|(of, _)| of.abs_diff(guesses));
        nearest.map_or(expected, |(of, us)| us / plain * guesses as f64 / of as f64)
    }

    /// Notes a step of the model without guesses.
    pub(super) fn stepped(&mut self, us: Option<f64>) {
        us.into_iter().for_each(|us| self.plain.add(us));
    }

    /// Notes what guesses took if there was no more to read before them than a window leaves, else what reading took.
    fn timed(&mut self, Guessed { tokens, us, read }: &Guessed) {
        let Some(us) = us.filter(|_| !tokens.is_empty()) else { return };
        match *read {
            ..=READS => self.times[tokens.len()].add(us),
            LONG.. => self.reads.add(us / *read as f64),
            _ => {}
        }
    }

    /// Notes how many guesses were right, and whether one behind these was wrong.
    fn judged(&mut self, (right, wrong): (usize, bool)) {
        let judged = std::iter::repeat_n(1.0, right).chain(wrong.then_some(0.0));
        judged.for_each(|right| self.acceptance = KEEPS * self.acceptance + (1.0 - KEEPS) * right);
    }

    /// Notes what guesses would have given beside steps of one position.
    pub(super) fn looked(&mut self, guessed: &Guessed, tokens: &[u32]) {
        self.judged(compared(&guessed.tokens, tokens));
        self.timed(guessed);
        self.spent(guessed.tokens.len(), guessed.us, 0.0, 0);
    }

    /// Notes what guesses gave in a window that took so long: some right ones, and perhaps a wrong one.
    pub(super) fn ran(
        &mut self,
        guessed: &Guessed,
        (right, wrong): (usize, bool),
        (tokens, us): (usize, Option<f64>),
    ) {
        self.judged((right, wrong));
        self.timed(guessed);
        let guesses = guessed.tokens.len();
        let window = us.zip(self.plain.median()).map(|(us, plain)| us / plain);
        self.spent(guesses, guessed.us, window.unwrap_or(price(guesses + 1)), tokens);
    }

    /// Notes tokens of a text, which pay for looks.
    pub(super) fn gave(&mut self, tokens: usize) {
        self.debt = (self.debt - PAYS * tokens as f64).max(self.debt.min(0.0));
    }

    /// Notes what guesses and their window took beyond the tokens that they gave.
    fn spent(&mut self, guesses: usize, us: Option<f64>, window: f64, tokens: usize) {
        let steps = us.zip(self.plain.median()).map(|(us, plain)| us / plain);
        let steps = steps.unwrap_or_else(|| self.price(guesses)) + window;
        self.debt = (self.debt + steps - tokens as f64).max(-CREDIT);
    }
}

/// Tokens that a window with this many guesses is expected to give.
pub(super) fn expected(acceptance: f64, guesses: usize) -> f64 {
    (0..=guesses as i32).map(|right| acceptance.powi(right)).sum()
}
