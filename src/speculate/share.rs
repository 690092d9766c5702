//! Guesses of several sequences in one step: who has how many of its positions, and when that is worth its time.
//!
//! Every sequence has its own position first. The positions that are left go one by one to the sequence whose next guess is
//! right most often: its acceptance to the power of the guesses that must be right before. Nobody waits for the guesses of
//! others: while some sequence has none, a step takes little longer than without any.

use super::{BEGINS, ENDS, Times, price};

/// Positions of a batch between two looks whether a step is worth guesses, while it is not, and while it was.
const LOOKED: usize = 32;
const LOOKED_OFTEN: usize = 4;
/// The most that a step may take, in those without guesses, for a sequence that has none.
const SLOWER: f64 = 1.1;

/// What a sequence could have in the next step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Offer {
    /// Probability that a guess behind right ones is right.
    pub(crate) acceptance: f64,
    /// The guesses behind its next token; none if it does not guess.
    pub(crate) guesses: Vec<u32>,
}

/// Shares the positions of steps, by what they take.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sharing {
    /// Whether the last step had guesses.
    windows: bool,
    /// Steps without guesses by their number of sequences, and with guesses by their number of positions.
    plain: Vec<Times>,
    wide: Vec<Times>,
}

impl Sharing {
    /// How many guesses each sequence has in the next step of at most `most` positions. `None`: nobody has any.
    pub(crate) fn next(&mut self, offers: &[Offer], most: usize) -> Option<Vec<usize>> {
        let seqs = offers.len();
        let (mut counts, mut given) = (vec![0; seqs], Vec::new());
        let mut tokens = seqs as f64;
        while seqs + given.len() < most
            && let Some((seq, right)) = likeliest(offers, &counts)
        {
            let positions = seqs + given.len();
            if (tokens + right) / self.wide(positions + 1) <= tokens / self.wide(positions) {
                break;
            }
            tokens += right;
            counts[seq] += 1;
            given.push((seq, right));
        }
        let plain = self.plain(seqs);
        let slow = |positions: usize| self.wide(positions) > SLOWER * plain;
        while counts.contains(&0)
            && slow(seqs + given.len())
            && let Some((seq, right)) = given.pop()
        {
            tokens -= right;
            counts[seq] -= 1;
        }
        let gain = tokens / self.wide(seqs + given.len()) * plain / seqs as f64;
        let enough = gain >= if self.windows { ENDS } else { BEGINS };
        // Where nobody has a guess right now, it is still worth a look soon.
        let offered = offers.iter().any(|offer| !offer.guesses.is_empty());
        self.windows = if offered { enough && !given.is_empty() } else { self.windows };
        (self.windows && !given.is_empty()).then_some(counts)
    }

    /// The most positions of a command without guesses, if some sequence may guess.
    pub(crate) fn slice(&self) -> usize {
        if self.windows { LOOKED_OFTEN } else { LOOKED }
    }

    /// Notes what a step of this many sequences took, without guesses.
    pub(crate) fn stepped(&mut self, seqs: usize, us: f64) {
        add(&mut self.plain, seqs, us);
    }

    /// Notes what a step of this many positions took, some of them guessed.
    pub(crate) fn ran(&mut self, positions: usize, us: f64) {
        add(&mut self.wide, positions, us);
    }

    fn plain(&self, seqs: usize) -> f64 {
        let other = || nearest(&self.wide, seqs);
        nearest(&self.plain, seqs).or_else(other).unwrap_or_else(|| price(seqs))
    }

    fn wide(&self, positions: usize) -> f64 {
        let other = || nearest(&self.plain, positions);
        nearest(&self.wide, positions).or_else(other).unwrap_or_else(|| price(positions))
    }
}

/// The sequence whose next guess is right most often, the first of equal ones, and how often that is.
fn likeliest(offers: &[Offer], counts: &[usize]) -> Option<(usize, f64)> {
    let offered = offers.iter().zip(counts).enumerate();
    let more = offered.filter(|(_, (offer, count))| **count < offer.guesses.len());
    let right = more.map(|(seq, (offer, count))| (seq, offer.acceptance.powi(*count as i32 + 1)));
    right.reduce(|best, of| if of.1 > best.1 { of } else { best })
}

fn add(all: &mut Vec<Times>, index: usize, us: f64) {
    if all.len() <= index {
        all.resize(index + 1, Times::default());
    }
    all[index].add(us);
}

/// What this many positions take, by the nearest number that was timed.
fn nearest(all: &[Times], positions: usize) -> Option<f64> {
    let timed = all.iter().enumerate().filter_map(|(of, times)| Some((of, times.median()?)));
    let (of, us) = timed.min_by_key(|(of, _)| of.abs_diff(positions))?;
    Some(us * price(positions) / price(of))
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
