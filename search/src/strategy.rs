//! Strategies, which choose the schedules to try. One trait: **ask** a strategy for proposals and **tell** it the results.
//!
//! The results are the list of finished trials, which is passed with each question; a strategy has no state of its own.
//! So it is a function of its seed and that list: a resumed search continues with the proposals that would have come,
//! and helpers can query the proposals for the case that the current trial is reverted. The caller checks whether a
//! proposal is legal and new. It takes further proposals until one is; the others cost no trial.

use std::fmt;
use std::sync::Arc;

use ir::schedule::{Knob, ScheduleConfig, Value};
use rand::seq::IndexedRandom;
use serde::{Deserialize, Serialize};

use crate::propose::{Origin, TrialRecords, edited, generator};

mod residual;

use residual::Regression;
pub use residual::{CostModel, KnownRun, KnownTrial, Learned, Predictions, weight};

/// Knobs with the values to set them to.
type Form = Vec<(Knob, Value)>;

/// Proposals in the order in which to try them, with an endless tail of random ones unless the strategy can run out.
pub type Proposals<'s> = Box<dyn Iterator<Item = (Origin, ScheduleConfig)> + 's>;

/// The input of a strategy.
#[derive(Clone, Copy, Debug)]
pub struct Question<'q> {
    /// The trial to propose for. Trial 0 is the baseline, which needs no proposal.
    pub trial: u64,
    /// The current incumbent.
    pub incumbent: &'q ScheduleConfig,
    /// The results of the trials before it, without the baseline.
    pub past: &'q TrialRecords,
}

/// A search strategy.
pub trait Strategy: fmt::Debug + Send + Sync {
    /// Its name, as in the ledger's header.
    fn name(&self) -> &'static str;

    /// Proposals for a trial. Equal questions give equal proposals.
    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s>;

    /// Whether it may be queried about trials that have not ended yet, any number of times.
    fn may_be_guessed(&self) -> bool {
        true
    }
}

/// The built-in strategies.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum StrategyName {
    /// Every knob at random, each time.
    Random,
    /// A sweep over knobs that belong together, then single steps, combinations and jumps from the incumbent.
    HillClimb,
    /// The cost model's prediction and a residual learned from the trials, those of earlier searches among them.
    #[default]
    Residual,
}

impl StrategyName {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Random, Self::HillClimb, Self::Residual];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// An unknown strategy name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown strategy {0:?}; the strategies are {names}", names = StrategyName::ALL.map(StrategyName::name).join(", "))]
pub struct UnknownStrategy(String);

impl std::str::FromStr for StrategyName {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|strategy| strategy.name() == name);
        found.ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// The space that every strategy draws from.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchSpace {
    /// The knobs to vary, with the values to draw from. One with a single value is not varied: each proposal has it.
    pub space: Vec<(Knob, Vec<Value>)>,
    /// Seed of random choices, combined with the trial's number.
    pub seed: u64,
    /// Maximum number of trials, after the baseline, in a sweep.
    pub sweep: u64,
    /// Whether the search is short ([`Budget::is_short`](crate::Budget::is_short)).
    pub short: bool,
}

impl SearchSpace {
    /// A schedule with the value of each knob that has only one.
    fn settled(&self, config: &ScheduleConfig) -> ScheduleConfig {
        let only = |(knob, values): &(Knob, Vec<Value>)| match values[..] {
            [value] => Some((*knob, value)),
            _ => None,
        };
        edited(config, &self.space.iter().filter_map(only).collect::<Form>())
    }
}

/// What [`StrategyName::Residual`] knows when a search begins.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The cost model. Without it, residuals are those of a constant prediction.
    pub predictions: Option<Arc<dyn Predictions>>,
    /// Earlier searches.
    pub runs: Vec<KnownRun>,
}

/// Creates the strategy of a name. Only [`StrategyName::Residual`] uses what is known.
#[must_use]
pub fn strategy(name: StrategyName, search_space: SearchSpace, known: Known) -> Arc<dyn Strategy> {
    let prior = Regression::new(&known.runs);
    Arc::new(Builtin { name, search_space, predictions: known.predictions, prior })
}

/// A built-in strategy.
#[derive(Debug)]
struct Builtin {
    name: StrategyName,
    search_space: SearchSpace,
    predictions: Option<Arc<dyn Predictions>>,
    /// The residual's weights before the first trial.
    prior: Regression,
}

impl Strategy for Builtin {
    fn name(&self) -> &'static str {
        self.name.name()
    }

    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s> {
        let Question { trial, incumbent, past } = *question;
        let incumbent = self.search_space.settled(incumbent);
        match self.name {
            StrategyName::Random => random(&self.search_space, trial, incumbent),
            StrategyName::HillClimb => Box::new(self.search_space.draws(trial, incumbent, past)),
            StrategyName::Residual => {
                let predictions = self.predictions.as_deref();
                residual::ask(&self.search_space, predictions, &self.prior, question, incumbent)
            }
        }
    }
}

/// Every knob at random, each time: the baseline for other strategies.
fn random(search_space: &SearchSpace, trial: u64, incumbent: ScheduleConfig) -> Proposals<'_> {
    let mut rng = generator(search_space.seed, trial);
    Box::new(std::iter::repeat_with(move || {
        let any =
            |(knob, values): &(Knob, Vec<Value>)| Some((*knob, values.choose(&mut rng).copied()?));
        let form: Form = search_space.space.iter().filter_map(any).collect();
        (Origin::Jump, edited(&incumbent, &form))
    }))
}

#[cfg(test)]
mod tests;
