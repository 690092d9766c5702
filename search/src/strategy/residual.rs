//! Ranks schedules by the cost model's prediction and a learned residual: `ln(time)` is linear in `ln(prediction)` and
//! in the knobs' values. The weights are those of a Bayesian linear regression with its conjugate prior (normal and
//! inverse gamma), which expects that the prediction is right. Each trial draws weights from the posterior, narrowed
//! (Thompson sampling, Thompson, 1933), and proposes the schedules that are best under the draw.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use ir::program::GraphShape;
use ir::schedule::{Domain, Knob, ScheduleConfig, Value};
use ir::{Graph, Target};
use lower::Rates;
use rand::RngExt;
use rand::rngs::Xoshiro256PlusPlus;
use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{Form, Proposals, Question, SearchSpace};
use crate::measure::geometric_mean;
use crate::propose::{Origin, TrialRecords, changes, edited, generator, sweep_forms};

/// Expected error of a prediction, as a fraction, and the number of trials that this expectation counts for.
const ERROR: f64 = 0.03;
const ERROR_TRIALS: f64 = 4.0;

/// Prior standard deviation of the weight of one feature, of the weight of one number of a list beside the one of its place
/// in the list, and of the weight of the prediction, whose mean is one.
const WEIGHT: f64 = 0.05;
const NUMBER: f64 = 0.02;
const PREDICTION: f64 = 0.3;

/// How the trials of a search are proposed.
struct Effort {
    /// The spread of the drawn weights over that of the posterior. With as many weights as trials, draws of the whole spread
    /// change every knob at once (docs/lab/2026-11-23-residual-model.md).
    drawn: f64,
    /// Maximum number of rounds of single moves, the first from the incumbent and each other from the best schedule so far.
    rounds: usize,
}

/// Short searches stay near to what is known, and two rounds find what is best under it. Long ones that stay there end at a
/// local optimum (docs/lab/2026-11-25-sixteen-trials-again.md).
const SHORT: Effort = Effort { drawn: 0.3, rounds: 2 };
const LONG: Effort = Effort { drawn: 0.6, rounds: 1 };

/// Number of trials of this shape with another kernel that count as one of this search.
const OTHER_KERNEL: f64 = 4.0;

/// Number of trials of another shape that count as one of this search. Those that count fully outweigh a short search where
/// the shapes differ: it repeats what was best elsewhere (docs/lab/2026-11-25-cost-model-of-today.md).
const OTHER_SHAPE: f64 = 10.0;

/// Number of schedules that a round predicts beside the single moves.
const PREDICTED: usize = 24;

/// The cost model as a strategy uses it: a pure function of the schedule.
pub trait Predictions: fmt::Debug + Send + Sync {
    /// Predicted µs per token; `None` if the schedule is illegal or cannot be lowered.
    fn us(&self, config: &ScheduleConfig) -> Option<f64>;
}

/// What a trial of an earlier search counts for: all, a fraction if it is of another shape, or of this one and another
/// kernel, and nothing where the shapes cannot be compared, such as with another format. Kernels are built for a model,
/// so those of two shapes always differ.
#[must_use]
pub fn weight(same_kernel: bool, here: &GraphShape, there: &GraphShape) -> f64 {
    match corpus::shape_distance(here, there) {
        None => 0.0,
        Some(_) if here != there => 1.0 / OTHER_SHAPE,
        Some(_) if !same_kernel => 1.0 / OTHER_KERNEL,
        Some(_) => 1.0,
    }
}

/// The cost model for one graph and target, at one position or several. It remembers its answers.
pub struct CostModel {
    graph: Graph,
    target: Target,
    options: lower::Options,
    positions: Vec<u32>,
    rates: Rates,
    known: Mutex<FxHashMap<ScheduleConfig, Option<f64>>>,
}

impl CostModel {
    /// Predicts programs with a cache of `kv_capacity` tokens at these positions: the geometric mean.
    #[must_use]
    pub fn new(
        graph: &Graph,
        target: &Target,
        kv_capacity: u32,
        positions: &[u32],
        rates: &Rates,
    ) -> Self {
        let (graph, target) = (graph.clone(), target.clone());
        let options = lower::Options { kv_capacity };
        let positions = positions.to_vec();
        Self { graph, target, options, positions, rates: *rates, known: Mutex::default() }
    }

    fn compute(&self, config: &ScheduleConfig) -> Option<f64> {
        let valid = ir::schedule::validate(*config, &self.graph, &self.target).ok()?;
        let (graph, target, positions) = (&self.graph, &self.target, &self.positions);
        let work = lower::unverified_work(&valid, graph, target, self.options, positions).ok()?;
        Some(geometric_mean(work.iter().map(|work| work.predict(&self.rates).latency_us)))
    }
}

impl fmt::Debug for CostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CostModel").field("positions", &self.positions).finish_non_exhaustive()
    }
}

impl Predictions for CostModel {
    fn us(&self, config: &ScheduleConfig) -> Option<f64> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known().get(config).copied();
        if let Some(found) = found {
            return found;
        }
        let us = self.compute(config);
        known().insert(*config, us);
        us
    }
}

/// The measured trials of an earlier search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownRun {
    /// Hash of its graph.
    pub graph: String,
    /// What its trials count for, from zero to one: less for another kernel or shape.
    pub weight: f64,
    /// The trials.
    pub trials: Vec<KnownTrial>,
}

/// A measured trial of an earlier search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownTrial {
    /// Paths of the knobs that differ from the neutral schedule, with their values.
    pub to: BTreeMap<String, Json>,
    /// Measured µs per token.
    pub us: f64,
    /// Predicted µs per token.
    pub predicted_us: f64,
}

impl KnownTrial {
    /// The trial of a schedule.
    #[must_use]
    pub fn new(config: &ScheduleConfig, us: f64, predicted_us: f64) -> Self {
        let changed = changes(&ScheduleConfig::default(), config).into_iter();
        let to = changed.map(|c| (c.knob.path().to_owned(), c.to.to_json())).collect();
        Self { to, us, predicted_us }
    }

    /// Its schedule; `None` if it has a knob or value that no longer exists.
    fn config(&self) -> Option<ScheduleConfig> {
        let mut config = ScheduleConfig::default();
        for (path, json) in &self.to {
            let knob = Knob::from_path(path)?;
            let value = knob.values().into_iter().find(|value| value.to_json() == *json)?;
            config.set(knob, value).ok()?;
        }
        Some(config)
    }
}

/// The features of a knob's value: one indicator per choice, and for numbers also the steps from the neutral value, since
/// neighbours are often, but not always, alike; in a range the binary logarithm of the ratio to the neutral value.
///
/// Features are scaled so that each weight has the prior standard deviation [`WEIGHT`].
fn features_of(knob: Knob, value: Value, out: &mut Vec<f64>) {
    let Domain::Choices(values) = knob.domain() else {
        let log2 = |value| if let Value::Number(n) = value { f64::from(n).log2() } else { 0.0 };
        return out.push(log2(value) - log2(knob.default()));
    };
    let place = |value: Value| values.iter().position(|&other| other == value).unwrap_or(0);
    let chosen = if knob.domain().is_names() { 1.0 } else { NUMBER / WEIGHT };
    let is = |index| if index == place(value) { chosen } else { 0.0 };
    out.extend((1..values.len()).map(is));
    if !knob.domain().is_names() {
        out.push(place(value) as f64 - place(knob.default()) as f64);
    }
}

/// The features of a schedule: the logarithm of its prediction, and those of its knobs.
fn features(config: &ScheduleConfig, predicted_us: f64) -> Vec<f64> {
    let mut out = vec![predicted_us.ln()];
    Knob::ALL.iter().for_each(|&knob| features_of(knob, config.get(knob), &mut out));
    out
}

/// A regression: the precision of the weights and its product with their mean, both relative to the variance of an
/// error, and the parameters of that variance.
#[derive(Clone, Debug)]
pub(super) struct Regression {
    precision: Vec<Vec<f64>>,
    weighted: Vec<f64>,
    count: f64,
    squares: f64,
}

impl Regression {
    /// The prior, and what these searches add to it.
    pub(super) fn new(known: &[KnownRun]) -> Self {
        let size = features(&ScheduleConfig::default(), 1.0).len();
        let mut precision = vec![vec![0.0; size]; size];
        for (index, row) in precision.iter_mut().enumerate() {
            row[index] = (ERROR / if index == 0 { PREDICTION } else { WEIGHT }).powi(2);
        }
        let mut weighted = vec![0.0; size];
        weighted[0] = precision[0][0];
        let (count, squares) = (ERROR_TRIALS, ERROR_TRIALS * ERROR * ERROR + precision[0][0]);
        let mut prior = Self { precision, weighted, count, squares };
        for run in known {
            let row = |trial: &KnownTrial| {
                Some((features(&trial.config()?, trial.predicted_us), trial.us.ln()))
            };
            prior.add(run.trials.iter().filter_map(row).collect(), run.weight);
        }
        prior
    }

    /// Adds the features and results of one search. They are centred, so that its level is free.
    fn add(&mut self, mut rows: Vec<(Vec<f64>, f64)>, weight: f64) {
        let size = self.weighted.len();
        let count = rows.len().max(1) as f64;
        let mean: Vec<f64> =
            (0..size).map(|i| rows.iter().map(|(x, _)| x[i]).sum::<f64>() / count).collect();
        let level = rows.iter().map(|(_, y)| y).sum::<f64>() / count;
        for (x, y) in &mut rows {
            x.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
            *y -= level;
            for i in (0..size).filter(|&i| x[i] != 0.0) {
                self.weighted[i] += weight * x[i] * *y;
                for j in 0..=i {
                    self.precision[i][j] += weight * x[i] * x[j];
                }
            }
            self.squares += weight * *y * *y;
        }
        self.count += weight * (count - 1.0);
    }

    /// The factor of the precision, the weights' mean as [`backward`] takes it, and the standard deviation of an error.
    fn solved(&self) -> (Vec<Vec<f64>>, Vec<f64>, f64) {
        let factor = cholesky(&self.precision);
        let half = forward(&factor, &self.weighted);
        let explained: f64 = half.iter().map(|x| x * x).sum();
        let error = ((self.squares - explained).max(0.0) / self.count).sqrt();
        (factor, half, error)
    }

    /// Weights drawn from the posterior, with this fraction of its spread.
    fn draw(&self, spread: f64, rng: &mut Xoshiro256PlusPlus) -> Vec<f64> {
        let (factor, half, error) = self.solved();
        let drawn: Vec<f64> = half.iter().map(|x| x + spread * error * normal(rng)).collect();
        backward(&factor, &drawn)
    }
}

/// What past searches say of a move: the posterior that a search draws from.
#[derive(Clone, Debug)]
pub struct Learned(Regression);

impl Learned {
    /// From the measured trials of these searches.
    #[must_use]
    pub fn new(known: &[KnownRun]) -> Self {
        Self(Regression::new(known))
    }

    /// By how many percent a schedule is expected to be faster than another, and the 80% interval; each with the time
    /// that the cost model predicts for it.
    #[must_use]
    pub fn gain_pct(&self, from: (&ScheduleConfig, f64), to: (&ScheduleConfig, f64)) -> [f64; 3] {
        /// Standard deviations of the normal distribution that hold 80%.
        const HELD: f64 = 1.2816;
        let [mut step, before] = [to, from].map(|(config, us)| features(config, us));
        step.iter_mut().zip(before).for_each(|(to, from)| *to -= from);
        let (factor, half, error) = self.0.solved();
        let mean = value(&backward(&factor, &half), &step);
        let spread = forward(&factor, &step).iter().map(|x| x * x).sum::<f64>().sqrt() * error;
        [mean, mean + HELD * spread, mean - HELD * spread].map(|ln| 100.0 * (1.0 - ln.exp()))
    }
}

/// A number from the standard normal distribution (Box and Muller, 1958).
fn normal(rng: &mut Xoshiro256PlusPlus) -> f64 {
    let (radius, angle) = (1.0 - rng.random::<f64>(), rng.random::<f64>());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// The lower factor of a symmetric positive matrix, of which the lower half is read.
fn cholesky(matrix: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut factor: Vec<Vec<f64>> = Vec::with_capacity(matrix.len());
    for (i, row) in matrix.iter().enumerate() {
        let mut new = Vec::with_capacity(i + 1);
        for j in 0..i {
            let above = &factor[j];
            let sum: f64 = new.iter().zip(above).map(|(a, b): (&f64, &f64)| a * b).sum();
            new.push((row[j] - sum) / above[j]);
        }
        let sum: f64 = new.iter().map(|a| a * a).sum();
        new.push((row[i] - sum).max(f64::MIN_POSITIVE).sqrt());
        factor.push(new);
    }
    factor
}

/// Solves `factor x = right`.
fn forward(factor: &[Vec<f64>], right: &[f64]) -> Vec<f64> {
    let mut x: Vec<f64> = Vec::with_capacity(right.len());
    for (row, right) in factor.iter().zip(right) {
        let sum: f64 = row.iter().zip(&x).map(|(a, b)| a * b).sum();
        x.push((right - sum) / row[x.len()]);
    }
    x
}

/// Solves `factor^T x = right`.
fn backward(factor: &[Vec<f64>], right: &[f64]) -> Vec<f64> {
    let mut x = right.to_vec();
    for (i, row) in factor.iter().enumerate().rev() {
        x[i] /= row[i];
        let solved = x[i];
        x[..i].iter_mut().zip(row).for_each(|(x, a)| *x -= a * solved);
    }
    x
}

/// A schedule near the centre of a round: the knobs that it changes, and `ln(time)` over the centre's under the drawn
/// weights.
struct Move {
    form: Form,
    score: f64,
}

/// A schedule with `ln(time)` under the drawn weights.
type Ranked = (f64, ScheduleConfig);

/// The weights of a trial.
struct Ranking<'q> {
    predictions: Option<&'q dyn Predictions>,
    weights: Vec<f64>,
}

impl Ranking<'_> {
    /// These schedules, the best first, without those that cannot be lowered.
    fn ranked(&self, configs: Vec<ScheduleConfig>) -> Vec<Ranked> {
        let rank = |config: ScheduleConfig| {
            let us = predict(self.predictions, &config)?;
            Some((value(&self.weights, &features(&config, us)), config))
        };
        let mut ranked: Vec<Ranked> = configs.into_par_iter().filter_map(rank).collect();
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
        ranked
    }

    /// The best schedules that no trial tried, from rounds of single moves and their combinations.
    fn best(
        &self,
        incumbent: &ScheduleConfig,
        space: &SearchSpace,
        past: &TrialRecords,
        rounds: usize,
    ) -> Vec<Ranked> {
        let mut seen: FxHashSet<_> = past.iter().map(|past| past.config).collect();
        seen.insert(*incumbent);
        let us = predict(self.predictions, incumbent).unwrap_or(1.0);
        let mut centre = (value(&self.weights, &features(incumbent, us)), *incumbent);
        let mut best = Vec::new();
        for _ in 0..rounds {
            let [moves, combined] = self.round(&centre, space, &mut seen);
            let firsts = moves.first().into_iter().chain(combined.first());
            let least = firsts.copied().min_by(|a, b| a.0.total_cmp(&b.0));
            best.extend(combined);
            let Some(least) = least.filter(|least| least.0 < centre.0) else { break };
            centre = least;
        }
        best.sort_by(|a, b| a.0.total_cmp(&b.0));
        best
    }

    /// The single moves from a centre, and combinations of them that were not seen. These are ranked as if the moves'
    /// effects added up; the first ones are predicted and ranked again.
    fn round(
        &self,
        (base, centre): &Ranked,
        space: &SearchSpace,
        seen: &mut FxHashSet<ScheduleConfig>,
    ) -> [Vec<Ranked>; 2] {
        let forms = sweep_forms(&space.space, centre);
        let mut near: Vec<_> = forms.iter().map(|form| edited(centre, form)).collect();
        let mut unlike = FxHashSet::from_iter([*centre]);
        near.retain(|config| unlike.insert(*config));
        let near = self.ranked(near);
        let form = |config| changes(centre, config).iter().map(|c| (c.knob, c.to)).collect();
        let moves = near.iter().map(|(at, config)| Move { form: form(config), score: at - base });
        let moves: Vec<Move> = moves.collect();
        let together = compatible(moves.iter().filter(|found| found.score < 0.0));
        let all = std::iter::once((score_of(&together), form_of(&together)));
        let others = moves.iter().map(|found| {
            let is_in = together.iter().any(|kept| std::ptr::eq(*kept, found));
            let kept: Vec<&Move> =
                together.iter().copied().filter(|kept| !overlap(kept, found)).collect();
            let (score, mut form) = (score_of(&kept), form_of(&kept));
            if is_in {
                return (score, form);
            }
            form.extend_from_slice(&found.form);
            (score + found.score, form)
        });
        let mut planned: Vec<Ranked> =
            all.chain(others).map(|(score, form)| (score, edited(centre, &form))).collect();
        planned.sort_by(|a, b| a.0.total_cmp(&b.0));
        let new = planned.into_iter().filter(|(_, config)| seen.insert(*config));
        let planned = new.take(PREDICTED).map(|(_, config)| config).collect();
        [near, self.ranked(planned)]
    }
}

fn predict(predictions: Option<&dyn Predictions>, config: &ScheduleConfig) -> Option<f64> {
    predictions.map_or(Some(1.0), |predictions| predictions.us(config))
}

fn value(weights: &[f64], features: &[f64]) -> f64 {
    weights.iter().zip(features).map(|(w, x)| w * x).sum()
}

fn overlap(a: &Move, b: &Move) -> bool {
    a.form.iter().any(|(knob, _)| b.form.iter().any(|(other, _)| knob == other))
}

fn score_of(moves: &[&Move]) -> f64 {
    moves.iter().map(|found| found.score).sum()
}

fn form_of(moves: &[&Move]) -> Form {
    moves.iter().flat_map(|found| found.form.iter().copied()).collect()
}

/// The first moves that change no knob twice.
fn compatible<'m>(moves: impl Iterator<Item = &'m Move>) -> Vec<&'m Move> {
    let mut kept: Vec<&Move> = Vec::new();
    for found in moves {
        if !kept.iter().any(|other| overlap(other, found)) {
            kept.push(found);
        }
    }
    kept
}

/// The schedule that the first trial was compared with.
fn baseline(question: &Question<'_>) -> ScheduleConfig {
    let Some(first) = question.past.iter().next() else { return *question.incumbent };
    let mut config = first.config;
    for change in &first.changes {
        let set = config.set(change.knob, change.from);
        debug_assert!(set.is_ok(), "{} had the value", change.knob);
    }
    config
}

/// Proposes the best untried schedules under weights drawn for this trial, then what `hill-climb` would. `incumbent`: with
/// the only values of settled knobs.
pub(super) fn ask<'s>(
    space: &'s SearchSpace,
    predictions: Option<&'s dyn Predictions>,
    prior: &Regression,
    question: &Question<'s>,
    incumbent: ScheduleConfig,
) -> Proposals<'s> {
    let Question { trial, past, .. } = *question;
    let mut regression = prior.clone();
    let finished = past.iter().filter_map(|past| Some((past.config, past.score?)));
    let row = |(config, score): (ScheduleConfig, f64)| {
        Some((features(&config, predict(predictions, &config)?), score))
    };
    let rows = std::iter::once((baseline(question), 0.0)).chain(finished).filter_map(row);
    regression.add(rows.collect(), 1.0);
    let effort = if space.short { SHORT } else { LONG };
    let weights = regression.draw(effort.drawn, &mut generator(space.seed, trial));
    let best = Ranking { predictions, weights }.best(&incumbent, space, past, effort.rounds);
    let ranked = best.into_iter().map(|(_, config)| (Origin::Model, config));
    Box::new(ranked.chain(space.draws(trial, incumbent, past)))
}
