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

use weight::{ONE, weight};

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
        let adjusted = self.adjusted(logits, seen);
        let best = highest(&adjusted)?;
        if self.is_greedy() {
            return Some(best);
        }
        Some(pick(&self.kept(&adjusted, best), philox::bits(self.seed, position)))
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
            for (logit, token) in adjusted.iter_mut().zip(0..) {
                if seen.has(token) {
                    let r = self.repetition_penalty;
                    *logit = if *logit > 0.0 { *logit / r } else { *logit * r };
                }
            }
        }
        for (&token, bias) in &self.bias {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for logit in &mut adjusted {
            *logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
        }
        adjusted
    }

    /// The candidate tokens and their weights, by id.
    fn kept(&self, adjusted: &[f32], best: u32) -> Vec<(u32, u64)> {
        let greatest = adjusted[best as usize];
        let Fixed { scale, share, least } = self.fixed();
        let weigh = |logit: f32| match logit {
            f32::NEG_INFINITY => 0,
            logit => weight((logit - greatest) * scale),
        };
        let mut kept: Vec<(u32, u64)> =
            (0..).zip(adjusted.iter().map(|&logit| weigh(logit))).filter(|&(_, w)| w > 0).collect();
        if self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0 {
            return kept;
        }
        kept.sort_by(|a, b| {
            let [a_logit, b_logit] = [a, b].map(|(token, _)| adjusted[*token as usize]);
            // There is no NaN here, and zero equals minus zero.
            b_logit.partial_cmp(&a_logit).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
        });
        if self.top_k > 0 {
            kept.truncate(self.top_k as usize);
        }
        if self.top_p < 1.0 {
            kept.truncate(nucleus(&kept, share));
        }
        kept.retain(|&(_, weight)| weight >= least);
        kept.sort_unstable();
        kept
    }
}

/// The highest of the logits that are not banned; the first of equals.
fn highest(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (token, &logit) in (0..).zip(logits) {
        if logit > best.map_or(f32::NEG_INFINITY, |(_, highest)| highest) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token)
}

/// Number of the likeliest tokens that together have `share` of the total weight: the fewest, and at least one.
fn nucleus(ranked: &[(u32, u64)], share: u64) -> usize {
    let total: u64 = ranked.iter().map(|(_, weight)| weight).sum();
    let needed = (u128::from(total) * u128::from(share)).div_ceil(1 << 32);
    let mut sum = 0_u128;
    let enough = ranked.iter().position(|(_, weight)| {
        sum += u128::from(*weight);
        sum >= needed
    });
    enough.map_or(ranked.len(), |last| last + 1)
}

/// The token at a random place among all weights, concatenated by id.
fn pick(kept: &[(u32, u64)], bits: u64) -> u32 {
    let total: u64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut place = ((u128::from(bits) * u128::from(total)) >> 64) as u64;
    for &(token, weight) in kept {
        if place < weight {
            return token;
        }
        place -= weight;
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
