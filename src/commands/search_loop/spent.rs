//! Where the time of a search went: the sum over its trials, resumed ones included.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use search::{Spent, Trial};
use serde_json::{Value, json};

/// Time since the first call. The search asks for it only to say what it spent on what.
pub(super) fn clock() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The sum over trials.
pub(super) struct Sum {
    trials: usize,
    spent: Spent,
}

impl Sum {
    pub(super) fn of(trials: &[Trial]) -> Self {
        let mut spent = Spent::default();
        for trial in trials {
            spent += trial.spent;
        }
        Self { trials: trials.len(), spent }
    }

    fn per_second(&self) -> f64 {
        if self.spent.total_s > 0.0 { self.trials as f64 / self.spent.total_s } else { 0.0 }
    }

    /// A part's share of all the time.
    fn share(&self, seconds: f64) -> f64 {
        if self.spent.total_s > 0.0 { seconds / self.spent.total_s } else { 0.0 }
    }

    /// The parts that follow one another, with the seconds of each; what is left is `other`.
    fn parts(&self) -> [(&'static str, f64); 5] {
        let spent = &self.spent;
        let known = spent.propose_s + spent.lower_s + spent.gates_s + spent.timing_s;
        [
            ("propose", spent.propose_s),
            ("lower", spent.lower_s),
            ("gates", spent.gates_s),
            ("timing", spent.timing_s),
            ("other", (spent.total_s - known).max(0.0)),
        ]
    }

    /// One line for people.
    pub(super) fn line(&self) -> String {
        let shares = self.parts().map(|(part, s)| format!("{part} {:.0} %", 100.0 * self.share(s)));
        let Spent { total_s, reference_s, device, .. } = &self.spent;
        let mut line = format!(
            "{} trials in {total_s:.1} s, {:.2} a second: {}; reference machine {reference_s:.1} s of the gates",
            self.trials,
            self.per_second(),
            shares.join(", ")
        );
        if device.loads > 0 {
            line += &format!(
                "; {} builds {:.1} s, {} launches {:.1} s, {} uploads {:.1} s",
                device.compiles,
                device.compile_s,
                device.launches,
                device.launch_s,
                device.loads,
                device.load_s
            );
        }
        line
    }

    pub(super) fn to_json(&self) -> Value {
        let parts = self.parts();
        let seconds: serde_json::Map<String, Value> =
            parts.iter().map(|(part, s)| ((*part).to_owned(), json!(s))).collect();
        let shares: serde_json::Map<String, Value> =
            parts.iter().map(|(part, s)| ((*part).to_owned(), json!(self.share(*s)))).collect();
        json!({
            "trials": self.trials,
            "total_s": self.spent.total_s,
            "trials_per_s": self.per_second(),
            "seconds": seconds,
            "shares": shares,
            "reference_s": self.spent.reference_s,
            "device": self.spent.device,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_whole() {
        let spent = Spent {
            total_s: 10.0,
            propose_s: 1.0,
            lower_s: 2.0,
            gates_s: 3.0,
            reference_s: 2.5,
            timing_s: 2.5,
            ..Spent::default()
        };
        let sum = Sum { trials: 50, spent };
        let document = sum.to_json();
        assert_eq!(document["trials_per_s"], 5.0);
        assert_eq!(document["seconds"]["other"], 1.5);
        let shares = document["shares"].as_object().unwrap();
        let all: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((all - 1.0).abs() < 1e-9);
        assert!(sum.line().starts_with("50 trials in 10.0 s, 5.00 a second: propose 10 %"));
    }

    #[test]
    fn nothing_divides_by_nothing() {
        let sum = Sum::of(&[]);
        assert_eq!(sum.to_json()["trials_per_s"], 0.0);
        assert!(sum.line().contains("0.00 a second"));
    }
}
