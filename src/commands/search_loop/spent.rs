//! The time breakdown of a search: the sum over its candidates, resumed ones included.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use search::{Spent, Trial, WastedSpeculation};
use serde_json::{Value, json};

/// Time since the first call. The search uses it only to report where its time went.
pub(super) fn clock() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The sum over candidates: the trials after the baseline, whose time includes boot, launch and the first kernel.
pub(super) struct Sum {
    candidates: usize,
    spent: Spent,
    baseline: Spent,
    /// Seconds from the end of the baseline to the end of the last trial; only with several cards, whose times overlap.
    wall_s: Option<f64>,
    dropped: WastedSpeculation,
}

impl Sum {
    /// `dropped` is the wasted speculation of several cards.
    pub(super) fn of(trials: &[Trial], dropped: WastedSpeculation) -> Self {
        let mut sum = Self {
            candidates: 0,
            spent: Spent::default(),
            baseline: Spent::default(),
            wall_s: None,
            dropped,
        };
        if let [first, .., last] = trials
            && trials.iter().any(|trial| trial.card.is_some())
        {
            sum.wall_s = Some((last.ended_s - first.ended_s).max(0.0));
        }
        for trial in trials {
            if trial.trial == 0 {
                sum.baseline = trial.spent;
            } else {
                sum.candidates += 1;
                sum.spent += trial.spent;
            }
        }
        sum
    }

    /// The seconds that the candidates took: wall time with several cards.
    fn took_s(&self) -> f64 {
        self.wall_s.unwrap_or(self.spent.total_s)
    }

    fn per_second(&self) -> f64 {
        if self.took_s() > 0.0 { self.candidates as f64 / self.took_s() } else { 0.0 }
    }

    fn share(&self, seconds: f64) -> f64 {
        if self.spent.total_s > 0.0 { seconds / self.spent.total_s } else { 0.0 }
    }

    /// The consecutive parts, with the seconds of each; the rest is `other`.
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

    /// One line for people. `wall` is the time since the command began.
    pub(super) fn line(&self, wall: Duration) -> String {
        let shares = self.parts().map(|(part, s)| format!("{part} {:.0} %", 100.0 * self.share(s)));
        let Spent { total_s, waiting_s, evaluating_s, reference_s, device, .. } = &self.spent;
        // Only a mixture chooses otherwise than the graph.
        let evaluated = match *evaluating_s > 0.0 {
            true => format!(", evaluations on the device's routes {evaluating_s:.1} s"),
            false => String::new(),
        };
        let cards = match self.wall_s {
            None => String::new(),
            Some(_) => format!(
                " ({total_s:.1} s of cards, and {:.1} s for {} trials that were begun for nothing)",
                self.dropped.seconds, self.dropped.trials
            ),
        };
        let mut line = format!(
            "{} candidates in {:.1} s{cards}, {:.2} per second: {}; reference VM {reference_s:.1} s, waited for {waiting_s:.1} s{evaluated}; baseline {:.1} s, the whole command {:.1} s",
            self.candidates,
            self.took_s(),
            self.per_second(),
            shares.join(", "),
            self.baseline.total_s,
            wall.as_secs_f64()
        );
        if device.loads > 0 {
            line += &format!(
                "; {} builds {:.1} s, {} launches {:.1} s, {} uploads {:.1} s, steps of the gates {:.1} s, their logits {:.1} s",
                device.compiles,
                device.compile_s,
                device.launches,
                device.launch_s,
                device.loads,
                device.load_s,
                device.run_s,
                device.read_s
            );
        }
        line
    }

    pub(super) fn to_json(&self, wall: Duration) -> Value {
        let parts = self.parts();
        let seconds: serde_json::Map<String, Value> =
            parts.iter().map(|(part, s)| ((*part).to_owned(), json!(s))).collect();
        let shares: serde_json::Map<String, Value> =
            parts.iter().map(|(part, s)| ((*part).to_owned(), json!(self.share(*s)))).collect();
        json!({
            "candidates": self.candidates,
            "candidates_s": self.took_s(),
            "cards_s": self.spent.total_s,
            "wasted": {"trials": self.dropped.trials, "seconds": self.dropped.seconds},
            "candidates_per_s": self.per_second(),
            "baseline_s": self.baseline.total_s,
            "wall_s": wall.as_secs_f64(),
            "seconds": seconds,
            "shares": shares,
            "evaluating_s": self.spent.evaluating_s,
            "reference_s": self.spent.reference_s,
            "waiting_s": self.spent.waiting_s,
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
        let baseline = Spent { total_s: 3.0, ..spent };
        let dropped = WastedSpeculation::default();
        let sum = Sum { candidates: 50, spent, baseline, wall_s: None, dropped };
        let wall = Duration::from_secs(20);
        let document = sum.to_json(wall);
        assert_eq!(document["candidates_per_s"], 5.0);
        assert_eq!(document["baseline_s"], 3.0);
        assert_eq!(document["seconds"]["other"], 1.5);
        let shares = document["shares"].as_object().unwrap();
        let all: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((all - 1.0).abs() < 1e-9);
        let line = sum.line(wall);
        assert!(
            line.starts_with("50 candidates in 10.0 s, 5.00 per second: propose 10 %"),
            "{line}"
        );
        assert!(line.ends_with("baseline 3.0 s, the whole command 20.0 s"), "{line}");
        assert!(!line.contains("evaluations"), "a dense model: {line}");
        let of_experts = Spent { evaluating_s: 1.25, ..spent };
        let mixture = Sum { spent: of_experts, ..Sum::of(&[], dropped) };
        let line_of_mixture = mixture.line(wall);
        assert!(
            line_of_mixture.contains("waited for 0.0 s, evaluations on the device's routes 1.2 s;"),
            "{line_of_mixture}"
        );
        assert_eq!(mixture.to_json(wall)["evaluating_s"], 1.25);
        // Two cards: wall time, and the sum over the cards.
        let dropped = WastedSpeculation { trials: 3, seconds: 0.6 };
        let sum = Sum { wall_s: Some(5.0), dropped, ..sum };
        assert_eq!(sum.to_json(wall)["candidates_per_s"], 10.0);
        assert_eq!(sum.to_json(wall)["cards_s"], 10.0);
        let line = sum.line(wall);
        let cards = "50 candidates in 5.0 s (10.0 s of cards, and 0.6 s for 3 trials that were begun for nothing), 10.00 per second";
        assert!(line.starts_with(cards), "{line}");
    }

    #[test]
    fn nothing_divides_by_nothing() {
        let sum = Sum::of(&[], WastedSpeculation::default());
        assert_eq!(sum.to_json(Duration::ZERO)["candidates_per_s"], 0.0);
        assert!(sum.line(Duration::ZERO).contains("0.00 per second"));
    }
}
