//! How good predicted gains were on a card: what was predicted of changes, and what was measured.

use serde::{Deserialize, Serialize};

/// The schema id of a check.
pub const CHECK_SCHEMA: &str = "amk.check.v1";
/// Below this number of past checks on a card nothing is predicted for it.
pub const CHECKS_MIN: usize = 20;
/// The share of measured gains that an interval should hold.
const HELD: f64 = 0.8;
/// Measured gains whose sign counts, in percent.
const SIGN_FROM_PCT: f64 = 1.0;

/// One change of one knob: predicted, then measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// [`CHECK_SCHEMA`].
    pub schema: String,
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
    /// By how many percent the step was predicted to be faster.
    pub predicted_pct: f64,
    /// By how many it was.
    pub measured_pct: f64,
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
}

/// The past checks of a card.
#[derive(Clone, Debug, Default)]
pub struct Past(Vec<Check>);

impl Past {
    /// Those of `all` that were made on `card`.
    #[must_use]
    pub fn new(all: &[Check], card: &str) -> Self {
        Self(all.iter().filter(|check| check.card == card).cloned().collect())
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

    /// The 80% interval of what `predicted` percent turn out to be; `None` below [`CHECKS_MIN`] checks. Errors grow with
    /// the predicted change. Checks of the same model count alone if there are enough.
    #[must_use]
    pub fn interval(&self, model: &str, predicted: f64) -> Option<[f64; 2]> {
        let same = || self.0.iter().filter(|check| check.model == model);
        let checks: Vec<&Check> =
            if same().count() >= CHECKS_MIN { same().collect() } else { self.0.iter().collect() };
        if checks.len() < CHECKS_MIN {
            return None;
        }
        let error = |check: &&Check| check.error() / scale(check.predicted_pct);
        let mut errors: Vec<f64> = checks.iter().map(error).collect();
        errors.sort_by(f64::total_cmp);
        // The rank for which the next error is within with this probability, whatever their distribution is.
        let rank = (HELD * (errors.len() + 1) as f64).ceil() as usize;
        let most = errors[rank.min(errors.len()) - 1] * scale(predicted);
        Some([predicted - most, predicted + most])
    }

    /// How many of these later checks ended in the interval that the past ones give, and how many have one.
    #[must_use]
    pub fn held(&self, later: &[Check]) -> (usize, usize) {
        let interval = |check: &&Check| self.interval(&check.model, check.predicted_pct);
        let all: Vec<_> = later.iter().filter_map(|c| Some((c, interval(&c)?))).collect();
        let within = |(check, [low, high]): &&(&Check, [f64; 2])| {
            (*low..=*high).contains(&check.measured_pct)
        };
        (all.iter().filter(within).count(), all.len())
    }

    /// How good the predictions of these checks were.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let large = || self.0.iter().filter(|check| check.measured_pct.abs() > SIGN_FROM_PCT);
        let right = large().filter(|check| check.measured_pct * check.predicted_pct > 0.0);
        let mut errors: Vec<f64> = self.0.iter().map(Check::error).collect();
        errors.sort_by(f64::total_cmp);
        Figures {
            checks: self.len(),
            above_1_pct: large().count(),
            sign_right: right.count(),
            median_error_pct: errors.get(errors.len() / 2).copied(),
        }
    }

    /// The figures in a line.
    #[must_use]
    pub fn say(&self) -> String {
        let Figures { checks, above_1_pct, sign_right, median_error_pct } = self.figures();
        let median = median_error_pct.unwrap_or(0.0);
        format!(
            "{checks} checks, median error {median:.2}%, sign right for {sign_right} of {above_1_pct} above 1%"
        )
    }
}

impl Check {
    /// The difference of predicted and measured gain.
    fn error(&self) -> f64 {
        (self.measured_pct - self.predicted_pct).abs()
    }
}

/// The unit of an error beside a prediction, in percent.
fn scale(predicted: f64) -> f64 {
    1.0 + predicted.abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(model: &str, predicted_pct: f64, measured_pct: f64) -> Check {
        Check {
            schema: CHECK_SCHEMA.to_owned(),
            card: "a card".to_owned(),
            kernel_id: "k".to_owned(),
            program_id: "p".to_owned(),
            model: model.to_owned(),
            context: 128,
            change: "knob=value".to_owned(),
            predicted_pct,
            measured_pct,
        }
    }

    #[test]
    fn intervals_need_enough_checks_of_the_card_and_hold_four_of_five() {
        // Errors of 0.1 to 4 percent of predictions of zero.
        let all: Vec<Check> = (1..=40).map(|i| check("one", 0.0, f64::from(i) / 10.0)).collect();
        assert_eq!(Past::new(&all[..CHECKS_MIN - 1], "a card").interval("one", 0.0), None);
        assert_eq!(Past::new(&all, "another card").interval("one", 0.0), None);
        let past = Past::new(&all, "a card");
        assert_eq!(past.interval("one", 0.0), Some([-3.3, 3.3]));
        let [low, high] = past.interval("one", -2.0).unwrap();
        assert!((low + 11.9).abs() < 1e-9 && (high - 7.9).abs() < 1e-9, "three times as wide");
        assert_eq!(past.held(&all), (33, 40));
        assert_eq!(Past::default().held(&all), (0, 0));
        let Figures { above_1_pct, sign_right, median_error_pct, .. } = past.figures();
        assert_eq!((above_1_pct, sign_right, median_error_pct), (30, 0, Some(2.1)));
    }

    #[test]
    fn a_models_own_checks_count_alone_if_there_are_enough() {
        let exact = (0..20).map(|_| check("exact", 1.0, 1.0));
        let all: Vec<Check> = (0..20).map(|_| check("off", 1.0, 5.0)).chain(exact).collect();
        let past = Past::new(&all, "a card");
        assert_eq!(past.interval("exact", 2.0), Some([2.0, 2.0]));
        assert_eq!(past.interval("unknown", 1.0), Some([-3.0, 5.0]));
    }
}
