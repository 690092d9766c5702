//! How good predicted gains were on a card: what was predicted of changes, and what was measured. What the cost model misses
//! in a change it mostly misses again, so past checks correct the prediction of the same change, and say how far off it may be.

use ir::schedule::{Knob, ScheduleConfig, Value};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

/// Below this number of past checks on a card nothing is predicted for it.
pub const CHECKS_MIN: usize = 20;
/// The share of measured gains that an interval should hold.
const HELD: f64 = 0.8;
/// Measured gains whose sign counts, in percent.
const SIGN_FROM_PCT: f64 = 1.0;
/// The number of newest checks of a change that count as much as the cost model alone does. Chosen on the checks of
/// 2026-11-23 to 2026-11-25, each predicted from those before it (docs/lab/2026-11-25-corrected-predictions.md).
const MODEL_COUNTS: f64 = 2.0;
/// What a check counts for, over the next newer one of the same change: kernels and schedules change.
const OLDER: f64 = 0.5;

/// A line of a file of checks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schema")]
pub enum Line {
    /// A change, predicted and measured.
    #[serde(rename = "amk.check.v1")]
    Check(Check),
    /// The schedule that checks changed.
    #[serde(rename = "amk.checked_schedule.v1")]
    Schedule(Checked),
}

/// One change of one knob: predicted, then measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// Name of the card.
    pub card: String,
    /// Id of the kernel that ran the schedule before the change.
    pub kernel_id: String,
    /// Id of its program.
    pub program_id: String,
    /// Name of the graph.
    pub model: String,
    /// Tokens before the step.
    pub context: u32,
    /// `KNOB=VALUE`.
    pub change: String,
    /// By how many percent the step was faster by the cost model alone.
    pub predicted_pct: f64,
    /// By how many it was.
    pub measured_pct: f64,
}

/// A schedule that checks changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checked {
    /// Id of its program when it was measured.
    pub program_id: String,
    /// The schedule.
    pub schedule_config: ScheduleConfig,
}

/// The checks of a file, oldest first, with the schedules that they changed.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// The checks.
    pub each: Vec<Check>,
    schedules: FxHashMap<String, ScheduleConfig>,
}

impl Checks {
    /// Reads a file of JSON lines.
    ///
    /// # Errors
    /// The first line, from one, that is malformed, and what is wrong.
    pub fn read(text: &str) -> Result<Self, (usize, String)> {
        let mut checks = Self::default();
        for (index, line) in text.lines().enumerate() {
            match serde_json::from_str(line).map_err(|error| (index + 1, error.to_string()))? {
                Line::Check(check) => checks.each.push(check),
                Line::Schedule(of) => {
                    _ = checks.schedules.insert(of.program_id, of.schedule_config)
                }
            }
        }
        Ok(checks)
    }

    /// The schedule that a check changed, if the file has it.
    #[must_use]
    pub fn schedule(&self, check: &Check) -> Option<&ScheduleConfig> {
        self.schedules.get(&check.program_id)
    }
}

/// How good predictions were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Number of checks.
    pub checks: usize,
    /// Checks with a measured gain or loss of more than one percent.
    pub above_1_pct: usize,
    /// Of these, the ones with the sign of the gain predicted right.
    pub sign_right: usize,
    /// Median difference of predicted and measured gain, in percent of the step.
    pub median_error_pct: Option<f64>,
    /// The same of the cost model alone.
    pub cost_model_median_error_pct: Option<f64>,
}

/// A check with what was expected of it from the ones before.
#[derive(Clone, Debug)]
struct Judged {
    check: Check,
    /// The value of its knob before the change, if known.
    was: Option<Value>,
    expected: Expected,
}

/// What a change is expected to bring.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// By how many percent the step is faster.
    pct: f64,
    /// The number of past checks of the same change of the same model, as equal ones that would say as much.
    past: f64,
}

/// The past checks of a card, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Past(Vec<Judged>);

impl Past {
    /// Those of `all` that were made on `card`. Each is judged by what the ones before it say.
    #[must_use]
    pub fn new(all: &Checks, card: &str) -> Self {
        let mut past = Self::default();
        for check in all.each.iter().filter(|check| check.card == card) {
            let judged = past.judged(check, all.schedule(check));
            past.0.push(judged);
        }
        past
    }

    /// Later checks of one schedule, each judged by what these ones say.
    #[must_use]
    pub fn judge(&self, later: &[Check], schedule: &ScheduleConfig) -> Self {
        Self(later.iter().map(|check| self.judged(check, Some(schedule))).collect())
    }

    fn judged(&self, check: &Check, schedule: Option<&ScheduleConfig>) -> Judged {
        let was = schedule.and_then(|schedule| value_before(schedule, &check.change));
        let expected = self.corrected(&check.model, was, &check.change, check.predicted_pct);
        Judged { check: check.clone(), was, expected }
    }

    /// Number of checks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// By how many percent a change of a schedule is expected to make the step faster, and the 80% interval; `None` below
    /// [`CHECKS_MIN`] checks. `predicted` is what the cost model says.
    #[must_use]
    pub fn expected(
        &self,
        model: &str,
        schedule: &ScheduleConfig,
        change: &str,
        predicted: f64,
    ) -> Option<(f64, [f64; 2])> {
        let was = value_before(schedule, change);
        let expected = self.corrected(model, was, change, predicted);
        Some((expected.pct, self.interval(model, expected)?))
    }

    /// The cost model's prediction and what past checks of the same change of the same model missed in the mean, where the
    /// cost model counts for [`MODEL_COUNTS`] checks that missed nothing.
    fn corrected(&self, model: &str, was: Option<Value>, change: &str, predicted: f64) -> Expected {
        let same = |of: &&Judged| {
            was.is_some() && of.was == was && of.check.model == model && of.check.change == change
        };
        let (mut weight, mut sum, mut squares, mut missed) = (1.0, 0.0, 0.0, 0.0);
        for Judged { check, .. } in self.0.iter().rev().filter(same) {
            missed += weight * (check.measured_pct - check.predicted_pct);
            sum += weight;
            squares += weight * weight;
            weight *= OLDER;
        }
        let past = if squares == 0.0 { 0.0 } else { sum * sum / squares };
        Expected { pct: predicted + missed / (sum + MODEL_COUNTS), past }
    }

    /// The 80% interval of what is `expected`; `None` below [`CHECKS_MIN`] checks. Errors grow with the expected change and
    /// shrink with the past checks of it. Checks of the same model count alone if there are enough.
    fn interval(&self, model: &str, expected: Expected) -> Option<[f64; 2]> {
        let same = || self.0.iter().filter(|of| of.check.model == model);
        let checks: Vec<&Judged> =
            if same().count() >= CHECKS_MIN { same().collect() } else { self.0.iter().collect() };
        if checks.len() < CHECKS_MIN {
            return None;
        }
        let error = |of: &&Judged| of.error() / scale(of.expected);
        let mut errors: Vec<f64> = checks.iter().map(error).collect();
        errors.sort_by(f64::total_cmp);
        // The rank for which the next error is within with this probability, whatever their distribution is.
        let rank = (HELD * (errors.len() + 1) as f64).ceil() as usize;
        let most = errors[rank.min(errors.len()) - 1] * scale(expected);
        Some([expected.pct - most, expected.pct + most])
    }

    /// How many of these later checks ended in the interval that the past ones give, and how many have one.
    #[must_use]
    pub fn held(&self, later: &Self) -> (usize, usize) {
        let interval = |of: &&Judged| self.interval(&of.check.model, of.expected);
        let all: Vec<_> = later.0.iter().filter_map(|of| Some((of, interval(&of)?))).collect();
        let within = |(of, [low, high]): &&(&Judged, [f64; 2])| {
            (*low..=*high).contains(&of.check.measured_pct)
        };
        (all.iter().filter(within).count(), all.len())
    }

    /// How good the predictions of these checks were.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let large = || self.0.iter().filter(|of| of.check.measured_pct.abs() > SIGN_FROM_PCT);
        let right = large().filter(|of| of.check.measured_pct * of.expected.pct > 0.0);
        Figures {
            checks: self.len(),
            above_1_pct: large().count(),
            sign_right: right.count(),
            median_error_pct: median(self.0.iter().map(Judged::error)),
            cost_model_median_error_pct: median(self.0.iter().map(|of| of.check.error())),
        }
    }

    /// The figures in a line.
    #[must_use]
    pub fn say(&self) -> String {
        let figures = self.figures();
        let Figures { checks, above_1_pct, sign_right, .. } = figures;
        let median = figures.median_error_pct.unwrap_or(0.0);
        let alone = figures.cost_model_median_error_pct.unwrap_or(0.0);
        format!(
            "{checks} checks, median error {median:.2}% (cost model alone {alone:.2}%), sign right for {sign_right} of \
             {above_1_pct} above 1%"
        )
    }
}

impl Judged {
    /// The difference of expected and measured gain.
    fn error(&self) -> f64 {
        (self.check.measured_pct - self.expected.pct).abs()
    }
}

impl Check {
    /// The difference of the cost model's and the measured gain.
    fn error(&self) -> f64 {
        (self.measured_pct - self.predicted_pct).abs()
    }
}

/// The value that a change, `KNOB=VALUE`, replaces in a schedule.
fn value_before(schedule: &ScheduleConfig, change: &str) -> Option<Value> {
    let (path, _) = change.split_once('=')?;
    Some(schedule.get(Knob::from_path(path)?))
}

fn median(errors: impl Iterator<Item = f64>) -> Option<f64> {
    let mut errors: Vec<f64> = errors.collect();
    errors.sort_by(f64::total_cmp);
    errors.get(errors.len() / 2).copied()
}

/// The unit of an error beside what is expected, in percent. As of a mean, it shrinks with the root of the number of past
/// checks: replayed over 1040 checks, intervals are a quarter narrower so and hold 79% where they held 87%
/// (docs/lab/2026-11-28-grids-of-today.md).
fn scale(expected: Expected) -> f64 {
    (1.0 + expected.pct.abs()) / (1.0 + expected.past).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(model: &str, change: &str, predicted_pct: f64, measured_pct: f64) -> Check {
        Check {
            card: "a card".to_owned(),
            kernel_id: "k".to_owned(),
            program_id: "p".to_owned(),
            model: model.to_owned(),
            context: 128,
            change: change.to_owned(),
            predicted_pct,
            measured_pct,
        }
    }

    /// Checks of changes that are all different.
    fn past(each: impl Iterator<Item = (&'static str, f64, f64)>) -> Past {
        let one = |(i, (model, predicted, measured))| {
            check(model, &format!("knob={i}"), predicted, measured)
        };
        let each = (0..).zip(each).map(one).collect();
        Past::new(&Checks { each, schedules: FxHashMap::default() }, "a card")
    }

    /// A change without past checks.
    fn new(pct: f64) -> Expected {
        Expected { pct, past: 0.0 }
    }

    #[test]
    fn intervals_need_enough_checks_of_the_card_and_hold_four_of_five() {
        // Errors of 0.1 to 4 percent of predictions of zero.
        let error = |i| ("one", 0.0, f64::from(i) / 10.0);
        assert_eq!(past((1..CHECKS_MIN as i32).map(error)).interval("one", new(0.0)), None);
        let past = past((1..=40).map(error));
        assert_eq!(past.interval("one", new(0.0)), Some([-3.3, 3.3]));
        let [low, high] = past.interval("one", new(-2.0)).unwrap();
        assert!((low + 11.9).abs() < 1e-9 && (high - 7.9).abs() < 1e-9, "three times as wide");
        let [low, high] = past.interval("one", Expected { pct: 0.0, past: 3.0 }).unwrap();
        assert!((low + 1.65).abs() < 1e-9 && (high - 1.65).abs() < 1e-9, "half as wide");
        assert_eq!(past.held(&past), (33, 40));
        assert_eq!(Past::default().held(&past), (0, 0));
        let Figures { above_1_pct, sign_right, median_error_pct, .. } = past.figures();
        assert_eq!((above_1_pct, sign_right, median_error_pct), (30, 0, Some(2.1)));
        let checks = Checks { each: vec![check("one", "knob=0", 0.0, 0.0)], ..Checks::default() };
        assert!(Past::new(&checks, "another card").is_empty());
    }

    #[test]
    fn a_models_own_checks_count_alone_if_there_are_enough() {
        let off = std::iter::repeat_n(("off", 1.0, 5.0), 20);
        let past = past(off.chain(std::iter::repeat_n(("exact", 1.0, 1.0), 20)));
        assert_eq!(past.interval("exact", new(2.0)), Some([2.0, 2.0]));
        assert_eq!(past.interval("unknown", new(1.0)), Some([-3.0, 5.0]));
    }

    #[test]
    fn what_past_checks_of_a_change_missed_corrects_its_prediction() {
        let schedule = ScheduleConfig::default();
        let change = "tiling.qkv.rows=8";
        let checked = Checked { program_id: "p".to_owned(), schedule_config: schedule };
        let each = [check("one", change, 1.0, 4.0), check("one", change, 1.0, 7.0)];
        let lines = std::iter::once(Line::Schedule(checked)).chain(each.map(Line::Check));
        let text: Vec<String> = lines.map(|line| serde_json::to_string(&line).unwrap()).collect();
        let checks = Checks::read(&text.join("\n")).unwrap();
        let past = Past::new(&checks, "a card");
        // The newest missed 6 percent, the one before 3, which counts half; the cost model counts twice.
        let expected = 2.0 + (6.0 + 0.5 * 3.0) / (1.0 + 0.5 + 2.0);
        let was = value_before(&schedule, change);
        let corrected = past.corrected("one", was, change, 2.0);
        assert!((corrected.pct - expected).abs() < 1e-12);
        assert!((corrected.past - 1.5 * 1.5 / 1.25).abs() < 1e-12, "the older one says less");
        assert_eq!(past.0[0].expected.pct, 1.0, "nothing was known before the first");
        assert_eq!(past.0[1].expected.pct, 2.0, "what the first missed, over three");
        let (mut other, knob) = schedule.with_change("tiling.qkv.rows=32").unwrap();
        for (model, was, change) in [
            ("two", was, change),
            ("one", Some(other.get(knob)), change),
            ("one", was, "tiling.qkv.rows=64"),
            ("one", None, change),
        ] {
            let alone = past.corrected(model, was, change, 2.0);
            assert_eq!((alone.pct, alone.past), (2.0, 0.0), "{model} {was:?} {change}");
        }
        assert_eq!(past.expected("one", &schedule, change, 2.0), None, "two checks are too few");
        other.set(knob, schedule.get(knob)).unwrap();
        let later = past.judge(&[check("one", change, 2.0, expected)], &other);
        assert!(later.figures().median_error_pct.unwrap() < 1e-12);
        let (line, what) = Checks::read(&format!("{}\n{{}}", text[0])).unwrap_err();
        assert!(line == 2 && what.contains("missing field `schema`"), "{line} {what}");
    }
}
