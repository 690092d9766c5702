//! Outcomes of mutants, by class.

use std::collections::BTreeMap;
use std::fmt::Write;

use ir::DType;
use reference_vm::compare::{Agreement, Disagreement, Reference, What};
use search::Rejection;

/// The fate of a mutant.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// It did not lower or verify, with the broken rule.
    Verify(String),
    /// It trapped, got stuck, or could not be bound.
    Trapped(String),
    /// The gate refused its results.
    Gate {
        /// What differed.
        by: &'static str,
        /// The difference in tolerances.
        beyond: f64,
    },
    /// It passed.
    Survived,
}

impl Fate {
    /// The fate that the gate's verdict means.
    #[must_use]
    pub fn of(verdict: Result<Agreement<Reference>, Rejection>) -> Self {
        let at = match verdict {
            Ok(_) => return Self::Survived,
            Err(Rejection::Sampled { .. }) => {
                return Self::Gate { by: "tokens", beyond: f64::INFINITY };
            }
            Err(Rejection::Disagreed { at, .. }) => at,
            Err(other) => return Self::Trapped(other.to_string()),
        };
        match at {
            Disagreement::Beyond { what, got, want, bound, .. } => {
                let beyond = f64::from((got - want).abs()) / bound;
                let by = match what {
                    What::Keys(_) => "keys",
                    What::Values(_) => "values",
                    What::Logits | What::Buffer(_) => "logits",
                    What::Chosen => "tokens",
                };
                Self::Gate { by, beyond }
            }
            Disagreement::Stray { gap, bound, .. } => {
                Self::Gate { by: "routes", beyond: gap / bound }
            }
            Disagreement::Chosen { .. } => Self::Gate { by: "tokens", beyond: f64::INFINITY },
            Disagreement::Nothing { .. }
            | Disagreement::Positions { .. }
            | Disagreement::Elements { .. }
            | Disagreement::NotFinite { .. } => Self::Gate { by: "shape", beyond: f64::INFINITY },
        }
    }
}

/// The outcome of a mutant.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The model.
    pub base: String,
    /// Its element type.
    pub dtype: DType,
    /// The class for scoring.
    pub class: String,
    /// The mutation and its place.
    pub what: String,
    /// Its fate.
    pub fate: Fate,
    /// Its change of the logits, relative to that of the worst correct schedule; `None` if it cannot be run.
    pub change: Option<f64>,
    /// Its change is small enough to be rounding.
    pub equivalent: bool,
}

impl Outcome {
    /// Whether it ran and changes the output.
    #[must_use]
    pub fn changes(&self) -> bool {
        !self.equivalent && !matches!(self.fate, Fate::Verify(_))
    }
}

/// Mutants of one class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Count {
    /// Mutants whose change is small enough to be rounding, whatever the gate's verdict.
    pub equivalent: usize,
    /// Of the others: refused by `verify`.
    pub verify: usize,
    /// Trapped.
    pub trapped: usize,
    /// Refused by the gate: tokens, logits, keys, values, shape.
    pub gate: [usize; 5],
    /// Passed.
    pub survived: usize,
    /// The least refused difference, in tolerances.
    pub weakest: Option<f64>,
}

const CHECKS: [&str; 5] = ["tokens", "logits", "keys", "values", "shape"];

impl Count {
    /// Mutants that ran and change the output.
    #[must_use]
    pub fn total(&self) -> usize {
        self.killed() + self.survived
    }

    /// Mutants among these that trapped or were refused by the gate.
    #[must_use]
    pub fn killed(&self) -> usize {
        self.trapped + self.gate.iter().sum::<usize>()
    }

    fn add(&mut self, outcome: &Outcome) {
        if outcome.equivalent {
            self.equivalent += 1;
            return;
        }
        match &outcome.fate {
            Fate::Verify(_) => self.verify += 1,
            Fate::Trapped(_) => self.trapped += 1,
            Fate::Survived => self.survived += 1,
            Fate::Gate { by, beyond } => {
                let check = CHECKS.iter().position(|check| check == by).unwrap_or(0);
                self.gate[check] += 1;
                self.weakest = Some(self.weakest.map_or(*beyond, |least| least.min(*beyond)));
            }
        }
    }
}

/// All classes.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// By class and element type.
    pub counts: BTreeMap<(String, &'static str), Count>,
    /// Mutants that change the output and passed.
    pub survivors: Vec<Outcome>,
}

impl Score {
    /// Counts outcomes.
    #[must_use]
    pub fn of(outcomes: &[Outcome]) -> Self {
        let mut score = Self::default();
        for outcome in outcomes {
            let key = (outcome.class.clone(), outcome.dtype.name());
            score.counts.entry(key).or_default().add(outcome);
            if !outcome.equivalent && outcome.fate == Fate::Survived {
                score.survivors.push(outcome.clone());
            }
        }
        score
    }

    /// A table for `docs/explanation/trust.md`: by class, the mutants that trapped or were refused by the gate, and the
    /// total that ran and change the output.
    #[must_use]
    pub fn table(&self) -> String {
        let mut classes: BTreeMap<&str, BTreeMap<&str, &Count>> = BTreeMap::new();
        for ((class, dtype), count) in &self.counts {
            classes.entry(class).or_default().insert(dtype, count);
        }
        let mut text = String::from(
            "| class | bf16 | f16 | f32 | verify | trap | tokens, logits | keys, values | equivalent | weakest |\n|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for (class, dtypes) in classes {
            let of = |dtype| {
                dtypes.get(dtype).map_or_else(
                    || "-".to_owned(),
                    |count| format!("{}/{}", count.killed(), count.total()),
                )
            };
            let sum = |of: &dyn Fn(&Count) -> usize| dtypes.values().map(|c| of(c)).sum::<usize>();
            let weakest = dtypes.values().filter_map(|c| c.weakest).fold(f64::INFINITY, f64::min);
            let _ = writeln!(
                text,
                "| {class} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                of("bf16"),
                of("f16"),
                of("f32"),
                sum(&|c| c.verify),
                sum(&|c| c.trapped),
                sum(&|c| c.gate[0] + c.gate[1] + c.gate[4]),
                sum(&|c| c.gate[2] + c.gate[3]),
                sum(&|c| c.equivalent),
                if weakest.is_finite() { format!("{weakest:.1}") } else { "-".to_owned() },
            );
        }
        text
    }

    /// The survivors, one per line.
    #[must_use]
    pub fn report(&self) -> String {
        let line = |o: &Outcome| {
            let change = o.change.map_or_else(String::new, |c| format!("{c:.1}"));
            format!(
                "{} {}: {} (changes the logits {change} times as much as an honest schedule)\n",
                o.base, o.class, o.what
            )
        };
        self.survivors.iter().map(line).collect()
    }

    /// The sum of all classes.
    #[must_use]
    pub fn sum(&self) -> Count {
        let mut sum = Count::default();
        for count in self.counts.values() {
            sum.equivalent += count.equivalent;
            sum.verify += count.verify;
            sum.trapped += count.trapped;
            sum.survived += count.survived;
            sum.gate.iter_mut().zip(count.gate).for_each(|(sum, gate)| *sum += gate);
        }
        sum
    }
}
