//! What a job asks for.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A whole search on one card.
    Leg,
    /// A champion against its start, on another card.
    Race,
}

impl Kind {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Leg => "leg",
            Self::Race => "race",
        }
    }
}

/// What a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// No GPU: latencies are predicted for the target.
    Cpu,
    /// A GPU that is the target.
    Cuda,
}

/// The two schedules of a race.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raced {
    /// The leg that found the champion.
    pub leg: u64,
    /// The card that it was found on, which does not race it again. Empty without a GPU.
    pub card: String,
    /// The schedule that the leg began with.
    pub start: Value,
    /// The champion.
    pub champion: Value,
    /// The number of this race: each goes to a card of its own.
    pub number: u32,
}

/// The whole of a job. Equal specs are one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Leg or race.
    pub kind: Kind,
    /// The model, as for `--model`; a folder by its absolute path.
    pub model: String,
    /// The GPU to schedule for.
    pub target: String,
    /// What it needs.
    pub device: Device,
    /// Tokens of context that schedules are judged at; empty: the default of a search.
    pub contexts: Vec<u32>,
    /// Random seed.
    pub seed: u64,
    /// The budget, as for `--budget`.
    pub budget: String,
    /// The strategy, as for `--strategy`.
    pub strategy: String,
    /// The version of gates, timing and decisions that the job is of.
    pub protocol: u32,
    /// The hash of the snapshot of priors that the leg proposes from; empty: none.
    pub priors: String,
    /// The round. Its legs propose from one snapshot, which may hold the results of the rounds before.
    #[serde(default, skip_serializing_if = "is_first")]
    pub round: u32,
    /// The schedules, of a race.
    pub race: Option<Raced>,
}

/// The first round is left out of the text: jobs of older boards keep their keys.
fn is_first(round: &u32) -> bool {
    *round == 0
}

impl Spec {
    /// The hash that makes equal specs one job.
    #[must_use]
    pub fn key(&self) -> String {
        hash(&serde_json::to_string(self).unwrap_or_default())
    }

    /// Whether these priors are the snapshot that the leg is to propose from.
    #[must_use]
    pub fn proposes_from(&self, priors: &str) -> bool {
        if self.priors.is_empty() { priors == "[]" } else { hash(priors) == self.priors }
    }

    /// The target that a worker must have; empty if it needs no GPU.
    pub(crate) fn needs(&self) -> &str {
        match self.device {
            Device::Cpu => "",
            Device::Cuda => &self.target,
        }
    }

    /// Races of one champion have one subject; legs have none.
    pub(crate) fn subject(&self) -> String {
        self.race.as_ref().map_or_else(String::new, |race| format!("leg {}", race.leg))
    }
}

/// The hash of a text.
pub(crate) fn hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}
