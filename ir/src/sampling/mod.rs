//! Token sampling: a pure function of the row of logits, the tokens before it, the settings, a seed and a position.
//!
//! **Promises.** The same inputs give the same token, bit for bit, on every machine, whatever else is computed beside
//! it. Every operation is an IEEE 754 or an integer operation, in the order that [decision
//! 015](../../../docs/decisions/015-sampling.md) defines. Ties go to the lowest id.

mod philox;
#[cfg(test)]
mod tests;
mod weight;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use weight::{BLOCK, ONE, weights};

/// Sampling settings. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the highest.
    pub temperature: f32,
    /// Keeps this many of the likeliest tokens; 0 for all.
    pub top_k: u32,
    /// Of these, keeps the likeliest that together have this probability; 1 for all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the likeliest token's probability.
    pub min_p: f32,
    /// Divisor of positive logits, and factor on negative ones, of tokens that occurred before; 1 for no penalty.
    pub repetition_penalty: f32,
    /// Added to logits; negative infinity bans a token.
    pub bias: BTreeMap<u32, f32>,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            bias: BTreeMap::new(),
            seed: 0,
        }
    }
}

/// The settings in fixed point, the same on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fixed {
    /// Factor that converts differences from the highest logit to octaves.
    pub scale: f32,
    /// `top_p` in 32 binary places, rounded up, so that the kept probability is never below `top_p`. `2^32` and more is
    /// no filter.
    pub share: u64,
    /// The least weight that passes `min_p`.
    pub least: u64,
}

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Improper {
    /// The field of [`Sampling`].
    pub field: &'static str,
    /// The given value.
    pub got: String,
    /// The legal values.
    pub legal: String,
}

impl std::fmt::Display for Improper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is {}; legal: {}", self.field, self.got, self.legal)
    }
}

impl Sampling {
    /// Every setting that is invalid for a vocabulary of this size.
    #[must_use]
    pub fn problems(&self, vocab: u32) -> Vec<Improper> {
        let mut problems = Vec::new();
        let mut number = |field, got: f32, fits: bool, legal: &str| {
            if !fits {
                problems.push(Improper { field, got: got.to_string(), legal: legal.to_owned() });
            }
        };
        let (t, r) = (self.temperature, self.repetition_penalty);
        number("temperature", t, t.is_finite() && t >= 0.0, "a number, 0 (greedy) or more");
        for (field, share) in [("top_p", self.top_p), ("min_p", self.min_p)] {
            number(field, share, (0.0..=1.0).contains(&share), "0 to 1");
        }
        number("repetition_penalty", r, r.is_finite() && r > 0.0, "a number above 0 (1: none)");
        for (&token, &bias) in &self.bias {
            if bias.is_nan() || bias == f32::INFINITY || token >= vocab {
                let got = format!("{bias} for token {token}");
                let last = vocab.saturating_sub(1);
                let legal = format!("numbers or -inf, for tokens 0 to {last}");
                problems.push(Improper { field: "logit_bias", got, legal });
            }
        }
        problems
    }

    /// Whether sampling needs no random bits.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Whether the result is the highest unmodified logit: what the device's own sampler computes.
    #[must_use]
    pub fn is_plain_greedy(&self) -> bool {
        self.is_greedy() && self.repetition_penalty == 1.0 && self.bias.is_empty()
    }

    /// The token for `position`, after the tokens `seen`; `None` if every token is banned. Settings with
    /// [problems](Self::problems) give an unspecified token.
    #[must_use]
    pub fn choose(&self, logits: &[f32], seen: &Seen, position: u32) -> Option<u32> {
        self.place(&self.adjusted(logits, seen), position)
    }

    /// The same where all tokens but these, ascending, are banned: in the time of these.
    #[must_use]
    pub fn choose_among(&self, logits: &[(u32, f32)], seen: &Seen, position: u32) -> Option<u32> {
        let adjusted = |&(token, logit): &(u32, f32)| {
            let logit = if seen.has(token) { self.penalised(logit) } else { logit };
            proper(self.bias.get(&token).map_or(logit, |bias| logit + bias))
        };
        let adjusted: Vec<f32> = logits.iter().map(adjusted).collect();
        let place = self.place(&adjusted, position)?;
        Some(logits[place as usize].0)
    }

    /// The index of the token that adjusted logits give for a position.
    fn place(&self, adjusted: &[f32], position: u32) -> Option<u32> {
        let best = highest(adjusted)?;
        if self.is_greedy() {
            return Some(best);
        }
        let bits = philox::bits(self.seed, position);
        if self.has_filter() {
            return Some(pick(&self.kept(adjusted, best), bits));
        }
        Some(pick_of_all(adjusted, (adjusted[best as usize], self.fixed().scale), bits))
    }

    fn has_filter(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// The settings in fixed point.
    #[must_use]
    pub fn fixed(&self) -> Fixed {
        Fixed {
            scale: (std::f32::consts::LOG2_E / self.temperature).min(f32::MAX),
            share: (f64::from(self.top_p) * f64::from(1_u32 << 31) * 2.0).ceil() as u64,
            least: (f64::from(self.min_p) * ONE as f64).ceil() as u64,
        }
    }

    /// Logits after penalty and bias. NaN counts as banned.
    fn adjusted(&self, logits: &[f32], seen: &Seen) -> Vec<f32> {
        let mut adjusted = logits.to_vec();
        if self.repetition_penalty != 1.0 {
            for token in seen.tokens().take_while(|token| (*token as usize) < logits.len()) {
                let logit = &mut adjusted[token as usize];
                *logit = self.penalised(*logit);
            }
        }
        for (&token, bias) in &self.bias {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for logit in &mut adjusted {
            *logit = proper(*logit);
        }
        adjusted
    }

    /// The logit of a token that occurred before.
    fn penalised(&self, logit: f32) -> f32 {
        let r = self.repetition_penalty;
        if logit > 0.0 { logit / r } else { logit * r }
    }

    /// The candidate tokens and their weights, by id.
    fn kept(&self, adjusted: &[f32], best: u32) -> Vec<(u32, u64)> {
        let Fixed { scale, share, least } = self.fixed();
        let how = (adjusted[best as usize], scale);
        let mut all = 0;
        weights(adjusted, how, |_, weights| all += weights.iter().sum::<u64>());
        let (logit, weight) = self.floors(adjusted, all, share);
        let mut kept: Vec<(u32, u64)> = Vec::new();
        weights(adjusted, how, |first, weights| {
            let candidates = (first as u32..).zip(&adjusted[first..]).zip(weights);
            let candidates = candidates.filter(|((_, l), w)| **l >= logit && **w >= weight);
            kept.extend(candidates.map(|((token, _), w)| (token, *w)));
        });
        if !self.has_filter() {
            return kept;
        }
        kept.sort_by(|a, b| {
            let [a_logit, b_logit] = [a, b].map(|(token, _)| adjusted[*token as usize]);
            // There is no NaN here, and zero equals minus zero.
            b_logit.partial_cmp(&a_logit).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
        });
        let mut total = all;
        if self.top_k > 0 {
            kept.truncate(self.top_k as usize);
            total = kept.iter().map(|(_, weight)| weight).sum();
        }
        if self.top_p < 1.0 {
            kept.truncate(nucleus(&kept, total, share));
        }
        kept.retain(|&(_, weight)| weight >= least);
        kept.sort_unstable();
        kept
    }

    /// A logit and a weight below which no token passes the filters: most of a vocabulary need not be sorted.
    fn floors(&self, adjusted: &[f32], all: u64, share: u64) -> (f32, u64) {
        if self.top_k > 0 {
            // Of the blocks' greatest, `top_k` are not below the least of the first `top_k`.
            let mut greatest: Vec<f32> = adjusted.chunks(BLOCK).map(greatest).collect();
            greatest.sort_unstable_by(|a, b| b.total_cmp(a));
            let logit = greatest.get(self.top_k as usize - 1);
            return (logit.copied().unwrap_or(f32::NEG_INFINITY), 1);
        }
        // What is lighter than `light` weighs less together than what `top_p` leaves out. Half of that, since weights are
        // rounded: the order is that of logits.
        let spare = all - needed(all, share).min(all);
        let light = spare / adjusted.len().max(1) as u64;
        (f32::NEG_INFINITY, (light / 2).max(1))
    }
}

/// A logit that is no NaN, which counts as banned, and not infinite.
fn proper(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
}

/// The greatest of some logits: of every sixteenth first, which a compiler does by vectors.
fn greatest(logits: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut columns = [f32::NEG_INFINITY; 16];
    let whole = logits.chunks_exact(columns.len());
    let rest = whole.remainder().iter().copied().fold(f32::NEG_INFINITY, greater);
    for chunk in whole {
        for (column, logit) in columns.iter_mut().zip(chunk) {
            *column = greater(*column, *logit);
        }
    }
    columns.into_iter().fold(rest, greater)
}

/// The highest of the logits that are not banned; the first of equals.
fn highest(logits: &[f32]) -> Option<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    for (block, part) in logits.chunks(BLOCK).enumerate() {
        let here = greatest(part);
        if here > best.1 {
            best = (block, here);
        }
    }
    let first = best.0 * BLOCK;
    let inside = logits.get(first..)?.iter().position(|logit| *logit == best.1)?;
    (best.1 > f32::NEG_INFINITY).then_some((first + inside) as u32)
}

/// The weight of which `share` is the part of a total.
fn needed(total: u64, share: u64) -> u64 {
    u64::try_from((u128::from(total) * u128::from(share)).div_ceil(1 << 32)).unwrap_or(u64::MAX)
}

/// Number of the likeliest tokens that together have `share` of the total weight: the fewest, and at least one.
fn nucleus(ranked: &[(u32, u64)], total: u64, share: u64) -> usize {
    let needed = needed(total, share);
    let mut sum = 0;
    let enough = ranked.iter().position(|(_, weight)| {
        sum += weight;
        sum >= needed
    });
    enough.map_or(ranked.len(), |last| last + 1)
}

/// A random place below a total.
fn place_of(total: u64, bits: u64) -> u64 {
    ((u128::from(bits) * u128::from(total)) >> 64) as u64
}

/// The token at a random place among all weights, concatenated by id.
fn pick(kept: &[(u32, u64)], bits: u64) -> u32 {
    let total: u64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut place = place_of(total, bits);
    for &(token, weight) in kept {
        if place < weight {
            return token;
        }
        place -= weight;
    }
    unreachable!("a place below the sum of all weights lies in one of them")
}

/// The same of all logits, with the greatest and the scale of their weights.
fn pick_of_all(logits: &[f32], how: (f32, f32), bits: u64) -> u32 {
    let mut sums = Vec::with_capacity(logits.len().div_ceil(BLOCK));
    weights(logits, how, |_, weights| sums.push(weights.iter().sum::<u64>()));
    let mut place = place_of(sums.iter().sum(), bits);
    for (block, sum) in sums.into_iter().enumerate() {
        if place >= sum {
            place -= sum;
            continue;
        }
        let first = block * BLOCK;
        let part = &logits[first..logits.len().min(first + BLOCK)];
        let mut token = first as u32;
        weights(part, how, |_, weights| {
            let mut before = 0;
            let below = |weight: &&u64| {
                before += **weight;
                before <= place
            };
            token += weights.iter().take_while(below).count() as u32;
        });
        return token;
    }
    unreachable!("a place below the sum of all weights lies in one of them")
}

/// The tokens of a sequence, as a set.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    words: Vec<u64>,
}

impl Seen {
    /// Adds a token.
    pub fn insert(&mut self, token: u32) {
        let word = token as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (token % 64);
    }

    /// Its tokens, ascending.
    fn tokens(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.words).flat_map(|(index, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// Whether the token is in the set.
    #[must_use]
    pub fn has(&self, token: u32) -> bool {
        self.words.get(token as usize / 64).is_some_and(|word| word >> (token % 64) & 1 == 1)
    }
}

impl Extend<u32> for Seen {
    fn extend<T: IntoIterator<Item = u32>>(&mut self, tokens: T) {
        tokens.into_iter().for_each(|token| self.insert(token));
    }
}

/// The model's log probabilities of some tokens, in nats, from the unmodified logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The chosen token's.
    pub chosen: f64,
    /// The likeliest tokens, likeliest first; the first of equals.
    pub top: Vec<(u32, f64)>,
}

/// The log probabilities of a chosen token and of the `top` likeliest. For display: in f64, and no part of sampling.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: u32, top: usize) -> Logprobs {
    let greatest = logits.iter().copied().filter(|l| !l.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .filter(|logit| !logit.is_nan())
        .map(|&logit| (f64::from(logit) - f64::from(greatest)).exp())
        .sum();
    let log_sum = sum.ln();
    let of = |token: u32| match logits.get(token as usize) {
        Some(logit) if !logit.is_nan() => f64::from(*logit) - f64::from(greatest) - log_sum,
        _ => f64::NEG_INFINITY,
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| of(*b).total_cmp(&of(*a)).then(a.cmp(b));
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, order);
    }
    ids.truncate(top);
    ids.sort_by(order);
    Logprobs { chosen: of(chosen), top: ids.into_iter().map(|token| (token, of(token))).collect() }
}
