//! The cost model against measurements: its ranking, its errors, and rates that fit better.
//!
//! A fit is a damped least-squares search (Levenberg-Marquardt) over the named rates. The residuals are the logarithms
//! of predicted over measured, of times and of ratios by one change; each model has the same weight, and its changes as
//! much as its times; residuals beyond [`HUBER`] count linearly; and a weak pull towards the previous rates keeps those
//! in place that the rows do not determine. It is deterministic: the same rows and rates give the same rates.

use ir::schedule::ScheduleConfig;
use ir::{Graph, Target};
use lower::{Predictor, Rates};
use rayon::prelude::*;
use serde::Serialize;

use crate::checks::{Check, Checked, Checks, Line};
use crate::measured_grid::{Answer, MEASURED_GRID_SCHEMA, Measured, Row, Space, Terms};
use crate::rejection::Rejection;

/// Residuals up to this are squared; larger ones count linearly, so that a few odd rows do not decide.
const HUBER: f64 = 0.15;

/// Weight of the pull towards the previous rates, for a rate that moved over its whole range.
const PRIOR: f64 = 0.02;

/// Maximum iterations, and the dampings that each tries.
const ITERATIONS: usize = 12;
const DAMPINGS: [f64; 5] = [1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// Step of a finite difference, as a fraction of a rate's range.
const PROBE: f64 = 0.01;

/// The fit ends after an iteration that reduces the loss by less than this fraction.
const ENOUGH: f64 = 2e-3;

/// One row in `HELD_OUT` is held out of a fit.
const HELD_OUT: usize = 4;

/// The measured points of a file of a measured grid.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredPoints {
    /// Its terms.
    pub terms: Terms,
    /// Each point's number and result.
    pub points: Vec<(u32, Measured)>,
}

/// Reads the measured points of a file of a measured grid.
///
/// # Errors
/// The first line, from one, that is malformed, and what is wrong.
pub fn read(text: &str) -> Result<MeasuredPoints, (usize, String)> {
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    let first = lines.next().map_or("", |(_, line)| line);
    let terms: Terms = serde_json::from_str(first).map_err(|error| (1, error.to_string()))?;
    if terms.schema != MEASURED_GRID_SCHEMA {
        return Err((1, format!("its schema is {}", terms.schema)));
    }
    let mut points = Vec::new();
    for (number, line) in lines {
        let row: Row = serde_json::from_str(line).map_err(|error| (number, error.to_string()))?;
        if let Answer::Measured(result) = row.answer {
            points.push((row.point, result));
        }
    }
    Ok(MeasuredPoints { terms, points })
}

/// A measured schedule, ready to be predicted.
pub struct Case {
    /// The model, as `--model` takes it.
    pub model: String,
    /// Tokens before the timed ones.
    pub context: u32,
    /// The schedule.
    pub config: ScheduleConfig,
    /// Measured microseconds per token.
    pub measured_us: f64,
    /// Whether the schedule still lowers to the program that was measured.
    pub same_program: bool,
    predictor: Predictor,
}

impl Case {
    /// Lowers the schedule.
    ///
    /// # Errors
    /// If it is not legal any more, or cannot be lowered.
    pub fn new(
        terms: &Terms,
        config: ScheduleConfig,
        measured: &Measured,
        graph: &Graph,
        target: &Target,
    ) -> Result<Self, Rejection> {
        let (program_id, predictor) = predictor(terms, config, graph, target)?;
        Ok(Self {
            model: terms.model.clone(),
            context: terms.context,
            config,
            measured_us: measured.us,
            same_program: program_id == measured.program_id,
            predictor,
        })
    }

    /// Predicts with these rates.
    #[must_use]
    pub fn point(&self, rates: &Rates) -> Point {
        let predicted = self.predictor.predict(rates);
        Point {
            measured_us: self.measured_us,
            predicted_us: predicted.latency_us,
            bound_us: predicted.bound_us,
        }
    }
}

/// The id of the program that a schedule lowers to, and what predicts it at the timed positions.
fn predictor(
    terms: &Terms,
    config: ScheduleConfig,
    graph: &Graph,
    target: &Target,
) -> Result<(String, Predictor), Rejection> {
    let valid = ir::schedule::validate(config, graph, target).map_err(Rejection::Rejected)?;
    let options = lower::Options { kv_capacity: terms.kv_capacity };
    let program = lower::lower(&valid, graph, target, options).map_err(Rejection::Unloadable)?;
    let middle = terms.context + terms.timed_tokens / 2;
    Ok((program.id(), Predictor::new(&program, &valid.kernel, target, middle)))
}

/// Checked changes of one schedule, ready to be predicted.
pub struct Changes {
    /// The model, as `--model` takes it.
    pub model: String,
    /// The schedule that they changed.
    pub base: ScheduleConfig,
    unchanged: Predictor,
    each: Vec<(Check, Predictor)>,
}

impl Changes {
    /// Lowers the checks of a grid's model and context that changed the schedule checked last; `None` if there is none.
    /// Those of older schedules were made with older kernels.
    ///
    /// # Errors
    /// The change that is not legal any more, or cannot be lowered, and why.
    pub fn new(
        checks: &Checks,
        terms: &Terms,
        graph: &Graph,
        target: &Target,
    ) -> Result<Option<Self>, String> {
        let of = |check: &&Check| check.model == graph.name && check.context == terms.context;
        let Some(last) = checks.each.iter().rfind(of) else { return Ok(None) };
        let Some(&base) = checks.schedule(last) else { return Ok(None) };
        let (_, unchanged) =
            predictor(terms, base, graph, target).map_err(|why| format!("the schedule: {why}"))?;
        let same = |check: &&Check| of(check) && check.program_id == last.program_id;
        let one = |check: &Check| {
            let at = |why: String| format!("{}: {why}", check.change);
            let (config, _) = base.with_change(&check.change).map_err(at)?;
            let changed = predictor(terms, config, graph, target);
            Ok((check.clone(), changed.map_err(|why| at(why.to_string()))?.1))
        };
        let same: Vec<&Check> = checks.each.iter().filter(same).collect();
        let each: Result<_, String> = same.into_par_iter().map(one).collect();
        Ok(Some(Self { model: terms.model.clone(), base, unchanged, each: each? }))
    }

    /// The checks with the gains that these rates predict.
    #[must_use]
    pub fn predicted(&self, rates: &Rates) -> Vec<Check> {
        let unchanged = self.unchanged.predict(rates).latency_us;
        let one = |(check, changed): &(Check, Predictor)| {
            let ratio = changed.predict(rates).latency_us / unchanged;
            Check { predicted_pct: 100.0 * (1.0 - ratio), ..check.clone() }
        };
        self.each.par_iter().map(one).collect()
    }

    /// The schedule and its checks with these predictions, as a file of checks has them.
    #[must_use]
    pub fn lines(&self, rates: &Rates) -> Vec<Line> {
        let Some((first, _)) = self.each.first() else { return Vec::new() };
        let schedule = Checked { program_id: first.program_id.clone(), schedule_config: self.base };
        let checks = self.predicted(rates).into_iter().map(Line::Check);
        std::iter::once(Line::Schedule(schedule)).chain(checks).collect()
    }

    /// Number of checks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.each.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.each.is_empty()
    }
}

/// A measurement beside its prediction. The two are never mixed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Measured microseconds per token.
    pub measured_us: f64,
    /// Predicted microseconds per token.
    pub predicted_us: f64,
    /// The bound that no prediction may be below.
    pub bound_us: f64,
}

/// The quality of predictions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Rows.
    pub rows: usize,
    /// Spearman's rank correlation of predicted and measured.
    pub rank_correlation: f64,
    /// Median of `|predicted / measured - 1|`.
    pub error_median: f64,
    /// 90th percentile of `|predicted / measured - 1|`.
    pub error_p90: f64,
    /// Median of `predicted / measured - 1`: positive if predictions are too slow.
    pub bias: f64,
    /// Predictions below the bound.
    pub below_bound: usize,
}

impl Calibration {
    /// Computes the figures; NaN without points.
    #[must_use]
    pub fn of(points: &[Point]) -> Self {
        let values = |of: fn(&Point) -> f64| points.iter().map(of).collect::<Vec<f64>>();
        let signed = values(|point| point.predicted_us / point.measured_us - 1.0);
        let errors: Vec<f64> = signed.iter().map(|error| error.abs()).collect();
        Self {
            rows: points.len(),
            rank_correlation: rank_correlation(
                &values(|point| point.measured_us),
                &values(|point| point.predicted_us),
            ),
            error_median: quantile(&errors, 0.5),
            error_p90: quantile(&errors, 0.9),
            bias: quantile(&signed, 0.5),
            below_bound: points.iter().filter(|point| point.predicted_us < point.bound_us).count(),
        }
    }
}

/// Lowers measured points of a grid: `count` of them, or all if there are fewer, spread evenly over the file.
///
/// # Errors
/// The number and error of a point that cannot be lowered.
pub fn cases(
    MeasuredPoints { terms, points }: &MeasuredPoints,
    space: &Space,
    count: usize,
    graph: &Graph,
    target: &Target,
) -> Result<Vec<Case>, (u32, Rejection)> {
    let count = count.min(points.len());
    let one = |index: usize| {
        let (point, result) = &points[index * points.len() / count];
        Case::new(terms, space.config(*point), result, graph, target)
            .map_err(|dropped| (*point, dropped))
    };
    (0..count).into_par_iter().map(one).collect()
}

/// Predicts every case.
#[must_use]
pub fn points(cases: &[Case], rates: &Rates) -> Vec<Point> {
    cases.par_iter().map(|case| case.point(rates)).collect()
}

/// Spearman's rank correlation; equal values share their mean rank. NaN if one side does not vary.
#[must_use]
pub fn rank_correlation(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (mean_a, mean_b) = (mean(&a), mean(&b));
    let (mut both, mut square_a, mut square_b) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(&b) {
        both += (a - mean_a) * (b - mean_b);
        square_a += (a - mean_a).powi(2);
        square_b += (b - mean_b).powi(2);
    }
    both / (square_a * square_b).sqrt()
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&i, &j| values[i].total_cmp(&values[j]));
    let mut ranks = vec![0.0; values.len()];
    for group in order.chunk_by(|&i, &j| values[i] == values[j]) {
        let before = values.iter().filter(|&&value| value < values[group[0]]).count();
        let rank = before as f64 + (group.len() - 1) as f64 / 2.0;
        group.iter().for_each(|&index| ranks[index] = rank);
    }
    ranks
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len() as f64) as usize;
    sorted.get(index.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// Splits the rows into those of the fit and those held out to judge it.
#[must_use]
pub fn split(cases: Vec<Case>) -> (Vec<Case>, Vec<Case>) {
    let (mut fitted, mut held) = (Vec::new(), Vec::new());
    for (index, case) in cases.into_iter().enumerate() {
        let side = if index % HELD_OUT == HELD_OUT - 1 { &mut held } else { &mut fitted };
        side.push(case);
    }
    (fitted, held)
}

/// Rates that predict the rows and the changes better. `progress` is called with the loss after each iteration.
#[must_use]
pub fn fit(
    cases: &[Case],
    changes: &[Changes],
    start: &Rates,
    mut progress: impl FnMut(usize, f64),
) -> Rates {
    let problem = Problem::new(cases, changes, start);
    let mut at = problem.start.clone();
    let mut residuals = problem.residuals(&at);
    let mut loss = problem.loss(&residuals, &at);
    progress(0, loss);
    for iteration in 1..=ITERATIONS {
        let step = problem.step(&at, &residuals, loss);
        let Some((next, its_residuals, its_loss)) = step else { break };
        let gained = loss - its_loss;
        (at, residuals, loss) = (next, its_residuals, its_loss);
        progress(iteration, loss);
        if gained < ENOUGH * loss {
            break;
        }
    }
    problem.rates(&at)
}

/// Weights that give each model the same sum.
fn even(models: &[&str]) -> Vec<f64> {
    let of = |model: &str| models.iter().filter(|other| **other == model).count();
    models.iter().map(|model| 1.0 / of(model) as f64).collect()
}

/// A least-squares problem. Each unknown is a rate's position in its range, from zero to one.
struct Problem<'a> {
    cases: &'a [Case],
    changes: &'a [Changes],
    /// Of the cases, then of the changes.
    weights: Vec<f64>,
    base: Rates,
    start: Vec<f64>,
}

impl<'a> Problem<'a> {
    fn new(cases: &'a [Case], changes: &'a [Changes], start: &Rates) -> Self {
        let times: Vec<&str> = cases.iter().map(|case| case.model.as_str()).collect();
        let ratios: Vec<&str> =
            changes.iter().flat_map(|of| vec![of.model.as_str(); of.len()]).collect();
        let mut weights = even(&times);
        weights.extend(even(&ratios));
        let sum: f64 = weights.iter().sum();
        let place = |(index, &(_, low, high)): (usize, &(&str, f64, f64))| {
            ((start.get(index) - low) / (high - low)).clamp(0.0, 1.0)
        };
        Self {
            cases,
            changes,
            weights: weights.into_iter().map(|weight| weight / sum).collect(),
            base: *start,
            start: Rates::TABLE.iter().enumerate().map(place).collect(),
        }
    }

    fn rates(&self, at: &[f64]) -> Rates {
        let with = |rates: Rates, (index, &(_, low, high)): (usize, &(&str, f64, f64))| {
            rates.with(index, low + at[index] * (high - low))
        };
        Rates::TABLE.iter().enumerate().fold(self.base, with)
    }

    fn residuals(&self, at: &[f64]) -> Vec<f64> {
        let rates = self.rates(at);
        let points = points(self.cases, &rates);
        let left = |gain_pct: f64| 1.0 - gain_pct / 100.0;
        let ratio = |of: Check| (left(of.predicted_pct) / left(of.measured_pct)).ln();
        let ratios = self.changes.iter().flat_map(|of| of.predicted(&rates)).map(ratio);
        let times = points.iter().map(|point| (point.predicted_us / point.measured_us).ln());
        times.chain(ratios).collect()
    }

    fn loss(&self, residuals: &[f64], at: &[f64]) -> f64 {
        let huber = |r: f64| {
            let size = r.abs();
            if size <= HUBER { r * r } else { HUBER * (2.0 * size - HUBER) }
        };
        let data: f64 = residuals.iter().zip(&self.weights).map(|(r, w)| w * huber(*r)).sum();
        let pull: f64 = at.iter().zip(&self.start).map(|(x, x0)| (PRIOR * (x - x0)).powi(2)).sum();
        data + pull
    }

    /// The best of the damped steps, if it reduces the loss.
    fn step(&self, at: &[f64], residuals: &[f64], loss: f64) -> Option<(Vec<f64>, Vec<f64>, f64)> {
        let count = at.len();
        let slope = |index: usize| {
            let mut probe = at.to_vec();
            let by = if at[index] + PROBE <= 1.0 { PROBE } else { -PROBE };
            probe[index] += by;
            let moved = self.residuals(&probe);
            moved.iter().zip(residuals).map(|(m, r)| (m - r) / by).collect::<Vec<f64>>()
        };
        let slopes: Vec<Vec<f64>> = (0..count).map(slope).collect();
        // Residuals beyond [`HUBER`] have less weight, as their loss grows only linearly.
        let robust = |r: f64| if r.abs() <= HUBER { 1.0 } else { HUBER / r.abs() };
        let weight: Vec<f64> =
            residuals.iter().zip(&self.weights).map(|(r, w)| w * robust(*r)).collect();
        let dot = |a: &[f64], b: &[f64]| {
            a.iter().zip(b).zip(&weight).map(|((a, b), w)| a * b * w).sum::<f64>()
        };
        let mut normal = vec![vec![0.0; count]; count];
        let mut right = vec![0.0; count];
        for i in 0..count {
            for j in 0..count {
                normal[i][j] = dot(&slopes[i], &slopes[j]);
            }
            normal[i][i] += PRIOR * PRIOR;
            right[i] = -dot(&slopes[i], residuals) - PRIOR * PRIOR * (at[i] - self.start[i]);
        }
        let tried = DAMPINGS.iter().map(|damping| {
            let by = solve_within(&normal, &right, *damping, at);
            let next: Vec<f64> = at.iter().zip(by).map(|(x, d)| (x + d).clamp(0.0, 1.0)).collect();
            let residuals = self.residuals(&next);
            let loss = self.loss(&residuals, &next);
            (next, residuals, loss)
        });
        let best = tried.min_by(|a, b| a.2.total_cmp(&b.2))?;
        (best.2 < loss).then_some(best)
    }
}

/// Solves the damped equations. Positions that would leave their range are fixed at its end, and the others solved again.
fn solve_within(normal: &[Vec<f64>], right: &[f64], damping: f64, at: &[f64]) -> Vec<f64> {
    let mut fixed: Vec<Option<f64>> = vec![None; at.len()];
    loop {
        let by = solve(normal, right, damping, &fixed);
        let mut changed = false;
        for (index, step) in by.iter().enumerate() {
            let end = (at[index] + step).clamp(0.0, 1.0) - at[index];
            if fixed[index].is_none() && (end - step).abs() > 1e-12 {
                fixed[index] = Some(end);
                changed = true;
            }
        }
        if !changed {
            return by;
        }
    }
}

/// Solves `(normal + damping * I) x = right` for the unknowns that are not fixed, by elimination.
fn solve(normal: &[Vec<f64>], right: &[f64], damping: f64, fixed: &[Option<f64>]) -> Vec<f64> {
    let free: Vec<usize> = (0..right.len()).filter(|&index| fixed[index].is_none()).collect();
    let known = |row: usize| -> f64 {
        let terms = fixed.iter().enumerate();
        terms.filter_map(|(index, step)| step.map(|step| normal[row][index] * step)).sum()
    };
    let mut rows: Vec<Vec<f64>> = free
        .iter()
        .map(|&i| {
            let mut row: Vec<f64> = free.iter().map(|&j| normal[i][j]).collect();
            row.push(right[i] - known(i));
            row
        })
        .collect();
    let count = free.len();
    for (index, row) in rows.iter_mut().enumerate() {
        row[index] += damping;
    }
    // Symmetric and positive with the damping: no pivoting is needed.
    for pivot in 0..count {
        for row in pivot + 1..count {
            let factor = rows[row][pivot] / rows[pivot][pivot];
            let above = rows[pivot].clone();
            for (value, above) in rows[row].iter_mut().zip(&above).skip(pivot) {
                *value -= factor * above;
            }
        }
    }
    let mut steps: Vec<f64> = fixed.iter().map(|step| step.unwrap_or(0.0)).collect();
    for pivot in (0..count).rev() {
        let rest: f64 = (pivot + 1..count).map(|j| rows[pivot][j] * steps[free[j]]).sum();
        steps[free[pivot]] = (rows[pivot][count] - rest) / rows[pivot][pivot];
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_correlation_knows_order_and_ties() {
        let up = [1.0, 2.0, 3.0, 4.0];
        assert!((rank_correlation(&up, &[10.0, 20.0, 30.0, 1000.0]) - 1.0).abs() < 1e-12);
        assert!((rank_correlation(&up, &[4.0, 3.0, 2.0, 1.0]) + 1.0).abs() < 1e-12);
        // Computed by hand: ranks 0 1 2 3 and 0.5 0.5 2 3.
        let tied = rank_correlation(&up, &[7.0, 7.0, 8.0, 9.0]);
        assert!((tied - 0.948_683_298_050_513_8).abs() < 1e-12, "{tied}");
        assert!(rank_correlation(&up, &[1.0; 4]).is_nan());
    }

    #[test]
    fn figures_are_those_of_the_points() {
        let point = |measured_us, predicted_us| Point { measured_us, predicted_us, bound_us: 90.0 };
        let points =
            [point(100.0, 110.0), point(200.0, 190.0), point(300.0, 300.0), point(95.0, 85.0)];
        let found = Calibration::of(&points);
        assert_eq!((found.rows, found.below_bound), (4, 1));
        assert!((found.rank_correlation - 1.0).abs() < 1e-12);
        assert!((found.error_median - 0.1).abs() < 1e-12, "{found:?}");
        assert!((found.error_p90 - 10.0 / 95.0).abs() < 1e-12, "{found:?}");
        assert!(Calibration::of(&[]).rank_correlation.is_nan());
    }

    #[test]
    fn equations_are_solved_within_their_bounds() {
        let normal = vec![vec![4.0, 1.0], vec![1.0, 3.0]];
        let found = solve_within(&normal, &[1.0, 2.0], 0.0, &[0.1, 0.1]);
        assert!((4.0 * found[0] + found[1] - 1.0).abs() < 1e-12, "{found:?}");
        assert!((found[0] + 3.0 * found[1] - 2.0).abs() < 1e-12, "{found:?}");
        // The second may move by 0.5 only; the first is solved for with that value.
        let found = solve_within(&normal, &[1.0, 2.0], 0.0, &[0.1, 0.5]);
        assert!((found[1] - 0.5).abs() < 1e-12, "{found:?}");
        assert!((found[0] - 0.125).abs() < 1e-12, "{found:?}");
    }
}
