//! Strategies: who decides what is tried next. One trait, to **ask** for proposals and be **told** how they ended.
//!
//! What a strategy is told is the list of finished trials, which it gets with each question; it keeps nothing of its own. So it is a function
//! of its seed and that list: a resumed search goes on with the proposals that would have come, and helpers may ask what it would propose
//! if the trial under way were reverted. Whether a proposal is legal, and new, is for whoever asks to find out: a strategy goes on proposing
//! until one is, and what is not costs no trial.

use std::fmt;
use std::sync::Arc;

use ir::schedule::{Knob, ScheduleConfig, Value};
use rand::seq::IndexedRandom;
use serde::{Deserialize, Serialize};

use crate::propose::{Origin, TrialRecords, edited, generator};

mod prior;
mod tpe;

pub use prior::{MoveStats, PriorMove, rank};

/// Knobs with values to set them to.
type Form = Vec<(Knob, Value)>;

/// Proposals in the order in which they are to be tried. The last ones are random and go on for ever, unless there is nobody to go on.
pub type Proposals<'s> = Box<dyn Iterator<Item = (Origin, ScheduleConfig)> + 's>;

/// What a strategy is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question<'q> {
    /// The trial to propose for; 0 is the baseline, which nobody is asked for.
    pub trial: u64,
    /// The schedule that leads.
    pub incumbent: &'q ScheduleConfig,
    /// How the trials before it ended, the baseline left out.
    pub past: &'q TrialRecords,
}

/// A way of searching.
pub trait Strategy: fmt::Debug + Send + Sync {
    /// Its name, as in the ledger's header.
    fn name(&self) -> &'static str;

    /// Proposals for a trial: the same for the same question.
    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s>;

    /// Whether it may be asked about trials that have not ended yet, as often as one likes.
    fn may_be_guessed(&self) -> bool {
        true
    }
}

/// The strategies that need nobody outside.
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
    /// A sweep over what belongs together, then single steps, combinations and jumps from the schedule that leads.
    #[default]
    HillClimb,
    /// A tree-structured Parzen estimator: values that good trials have more often than others.
    Tpe,
    /// What earlier searches learned, best first; then as `hill_climb`.
    Prior,
}

impl StrategyName {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Random, Self::HillClimb, Self::Tpe, Self::Prior];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A strategy that nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no strategy is called {0:?}; there are {names}", names = StrategyName::ALL.map(StrategyName::name).join(", "))]
pub struct UnknownStrategy(String);

impl std::str::FromStr for StrategyName {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|strategy| strategy.name() == name);
        found.ok_or_else(|| UnknownStrategy(name.to_owned()))
    }
}

/// What every strategy draws from.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchSpace {
    /// The knobs to vary, with the values to draw from.
    pub space: Vec<(Knob, Vec<Value>)>,
    /// What random choices are made with, together with the trial's number.
    pub seed: u64,
    /// Trials, after the baseline, of a sweep at most.
    pub sweep: u64,
}

/// The strategy of a name. What earlier searches learned is used by [`StrategyName::Prior`] alone.
#[must_use]
pub fn strategy(
    name: StrategyName,
    search_space: SearchSpace,
    known: Vec<PriorMove>,
) -> Arc<dyn Strategy> {
    let moves = prior::moves(&search_space, known);
    Arc::new(Builtin { name, search_space, moves })
}

/// One of those that need nobody outside.
#[derive(Debug)]
struct Builtin {
    name: StrategyName,
    search_space: SearchSpace,
    /// What earlier searches learned, best first.
    moves: Vec<Form>,
}

impl Strategy for Builtin {
    fn name(&self) -> &'static str {
        self.name.name()
    }

    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s> {
        let Question { trial, incumbent, past } = *question;
        match self.name {
            StrategyName::Random => random(&self.search_space, question),
            StrategyName::HillClimb => Box::new(self.search_space.draws(trial, incumbent, past)),
            StrategyName::Tpe => tpe::ask(&self.search_space, question),
            StrategyName::Prior => prior::ask(&self.search_space, &self.moves, question),
        }
    }
}

/// Every knob at random, each time: what any other strategy must beat.
fn random<'s>(search_space: &'s SearchSpace, question: &Question<'s>) -> Proposals<'s> {
    let mut rng = generator(search_space.seed, question.trial);
    let incumbent = question.incumbent;
    Box::new(std::iter::repeat_with(move || {
        let any =
            |(knob, values): &(Knob, Vec<Value>)| Some((*knob, values.choose(&mut rng).copied()?));
        let form: Form = search_space.space.iter().filter_map(any).collect();
        (Origin::Jump, edited(incumbent, &form))
    }))
}

#[cfg(test)]
mod tests;
