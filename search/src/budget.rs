//! The budget of a search: a number of trials or a time. The caller supplies the elapsed time.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// When a search ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// After this many trials, the baseline included.
    Trials(u64),
    /// Time after which no trial begins. The current one is finished.
    Time(Duration),
}

/// Longest time budget, so that sums cannot overflow: a year.
const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Minimum length of a sweep, in trials.
const SWEEP_MIN: u64 = 32;

/// Maximum length of a sweep, in trials.
const SWEEP_MAX: u64 = 40;

/// Most trials of a short search.
const SHORT: u64 = 16;

/// Largest trial budget.
const TRIALS_MAX: u64 = 1_000_000;

impl Budget {
    /// Whether a search that did `trials` in `elapsed` is over.
    #[must_use]
    pub fn is_spent(self, trials: u64, elapsed: Duration) -> bool {
        match self {
            Self::Trials(most) => trials >= most,
            Self::Time(most) => trials > 0 && elapsed >= most,
        }
    }

    /// Whether a search proposes what is best by what is known rather than what may be.
    #[must_use]
    pub fn is_short(self) -> bool {
        matches!(self, Self::Trials(most) if most <= SHORT)
    }

    /// The smaller of `trials` and the number of the trial before which the search ends.
    pub(crate) fn end(self, trials: u64) -> u64 {
        match self {
            Self::Trials(most) => trials.min(most),
            Self::Time(_) => trials,
        }
    }

    /// Number of trials, after the baseline, that a sweep over the knobs may take. A short search sweeps to its end:
    /// the moves that it would leave out may gain more than all steps that it could take instead
    /// (docs/explanation/search.md).
    #[must_use]
    pub fn explore(self) -> u64 {
        match self {
            Self::Trials(most) => (most / 2).clamp(SWEEP_MIN, SWEEP_MAX),
            Self::Time(_) => SWEEP_MAX,
        }
    }
}

/// A budget that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "budget {0:?} is neither a number of trials (64) nor a time (90s, 10m, 2h), at least 1 and at most a million trials or a year"
)]
pub struct BadBudget(String);

impl FromStr for Budget {
    type Err = BadBudget;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadBudget(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let number: u64 = digits.parse().map_err(|_| bad())?;
        let seconds = match &trimmed[digits.len()..] {
            "" if (1..=TRIALS_MAX).contains(&number) => return Ok(Self::Trials(number)),
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            _ => return Err(bad()),
        };
        let time = number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(bad)?;
        if time.is_zero() || time > TIME_MAX {
            return Err(bad());
        }
        Ok(Self::Time(time))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trials(trials) => write!(f, "{trials}"),
            Self::Time(time) => write!(f, "{}s", time.as_secs()),
        }
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Budget {
    fn schema_name() -> Cow<'static, str> {
        "Budget".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "minimum": 1,
            "maximum": TRIALS_MAX,
            "pattern": "^\\s*0*[1-9][0-9]*(s|m|min|h)?\\s*$"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_and_times_are_read_and_written() {
        let time = |s| Budget::Time(Duration::from_secs(s));
        let table =
            [("64", Budget::Trials(64)), ("90s", time(90)), ("10m", time(600)), ("2h", time(7200))];
        for (text, want) in table {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget, want);
            assert_eq!(budget.to_string().parse(), Ok(want));
        }
        for text in ["", "0", "0m", "-3", "3 parsecs", "m", "1.5", "99999999999999999999", "é"] {
            assert!(text.parse::<Budget>().is_err(), "{text}");
        }
    }

    #[test]
    fn json_gives_a_number_or_a_text() {
        let read = serde_json::from_str::<Budget>;
        assert_eq!(read("64").unwrap(), Budget::Trials(64));
        assert_eq!(read("\"64\"").unwrap(), Budget::Trials(64));
        assert_eq!(read("\"10m\"").unwrap(), Budget::Time(Duration::from_secs(600)));
        for text in ["0", "-1", "1.5", "null", "[64]", "\"soon\""] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_short_search_sweeps_to_its_end() {
        for trials in 1..=32 {
            assert!(Budget::Trials(trials).explore() >= trials);
        }
        assert_eq!([64, 80, 1000].map(|trials| Budget::Trials(trials).explore()), [32, 40, 40]);
    }

    #[test]
    fn the_first_trial_is_always_run() {
        let hour = Duration::from_secs(3600);
        assert!(!Budget::Time(Duration::from_secs(1)).is_spent(0, hour));
        assert!(Budget::Time(Duration::from_secs(1)).is_spent(1, hour));
        assert!(Budget::Trials(2).is_spent(2, Duration::ZERO));
        assert!(!Budget::Trials(2).is_spent(1, hour));
    }
}
