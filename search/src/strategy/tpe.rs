//! A tree-structured Parzen estimator (Bergstra et al., 2011) with independent knobs. The best quarter of the trials
//! gives one distribution per knob, the others another one. Samples are drawn from the first; those with the highest
//! ratio of the first density to the second are proposed.

use ir::schedule::{Knob, ScheduleConfig, Value};
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;

use super::{Form, Proposals, Question, SearchSpace};
use crate::propose::{Origin, TrialRecord, TrialRecords, edited, generator};

/// Number of random trials before the estimator is used.
const RANDOM_FIRST: usize = 8;

/// Fraction of the trials that count as good.
const GOOD: f64 = 0.25;

/// Number of samples that are ranked for a proposal.
const CANDIDATES: usize = 64;

/// Weight of the uniform prior over the values, in trials.
const EVEN: f64 = 1.0;

pub(super) fn ask<'s>(search_space: &'s SearchSpace, question: &Question<'s>) -> Proposals<'s> {
    let space = &search_space.space;
    let mut rng = generator(search_space.seed, question.trial);
    let incumbent = question.incumbent;
    let weights = |of: &[&TrialRecord]| -> Vec<Vec<f64>> {
        space.iter().map(|axis| shares(axis, of)).collect()
    };
    let mut planned = Vec::new();
    if question.past.len() >= RANDOM_FIRST {
        let [good, rest] = halves(question.past).map(|half| weights(&half));
        planned = likely(space, incumbent, &good, &rest, &mut rng);
    }
    let even = weights(&[]);
    let random = std::iter::repeat_with(move || {
        (Origin::Jump, edited(incumbent, &draw(space, &even, &mut rng).0))
    });
    Box::new(planned.into_iter().chain(random))
}

/// The best trials, and the others. Trials without a latency are among the others.
fn halves(past: &TrialRecords) -> [Vec<&TrialRecord>; 2] {
    let mut all: Vec<&TrialRecord> = past.iter().collect();
    all.sort_by(|a, b| {
        a.score.unwrap_or(f64::INFINITY).total_cmp(&b.score.unwrap_or(f64::INFINITY))
    });
    let count = ((GOOD * all.len() as f64).ceil() as usize).max(2);
    let rest = all.split_off(count.min(all.len()));
    [all, rest]
}

/// Smoothed relative frequency of each value of a knob.
fn shares((knob, values): &(Knob, Vec<Value>), among: &[&TrialRecord]) -> Vec<f64> {
    let all = among.len() as f64 + EVEN;
    let of = |value: &Value| {
        let count = among.iter().filter(|past| past.config.get(*knob) == *value).count();
        (count as f64 + EVEN / values.len() as f64) / all
    };
    values.iter().map(of).collect()
}

/// Draws a value for every knob from these frequencies; returns the values and their indices.
fn draw(
    space: &[(Knob, Vec<Value>)],
    shares: &[Vec<f64>],
    rng: &mut Xoshiro256PlusPlus,
) -> (Form, Vec<usize>) {
    let mut picks = Vec::with_capacity(shares.len());
    let mut form = Vec::with_capacity(shares.len());
    for ((knob, values), shares) in space.iter().zip(shares) {
        let mut left: f64 = rng.random();
        let found = shares.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        let pick = found.unwrap_or(values.len() - 1);
        form.push((*knob, values[pick]));
        picks.push(pick);
    }
    (form, picks)
}

fn likely(
    space: &[(Knob, Vec<Value>)],
    incumbent: &ScheduleConfig,
    good: &[Vec<f64>],
    rest: &[Vec<f64>],
    rng: &mut Xoshiro256PlusPlus,
) -> Vec<(Origin, ScheduleConfig)> {
    let mut drawn: Vec<(f64, Form)> = (0..CANDIDATES)
        .map(|_| {
            let (form, picks) = draw(space, good, rng);
            let ratio = |(axis, &pick): (usize, &usize)| (good[axis][pick] / rest[axis][pick]).ln();
            (picks.iter().enumerate().map(ratio).sum(), form)
        })
        .collect();
    drawn.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let with = |(_, form): (f64, Vec<_>)| (Origin::Model, edited(incumbent, &form));
    drawn.into_iter().map(with).collect()
}
