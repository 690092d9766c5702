//! What the ledger keeps of a trial, and what a search concludes.

use derive_more::AddAssign;
use ir::schedule::ScheduleConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use strum::IntoStaticStr;

use crate::decide::Decision;
use crate::device::{Costs, DeviceError};
use crate::measure::Interval;
use crate::propose::{Change, Origin};
use crate::rejection::Rejection;
use crate::verdict::Verdict;

/// Version of how trials are gated, timed and decided. It rises when figures of before and after may not stand beside each other.
pub const PROTOCOL: u32 = 1;

/// Proposals that a record describes among those that cost no trial; the rest are counted.
pub(crate) const SKIPPED_SHOWN: usize = 8;

/// How a trial ended.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Default,
    Serialize,
    Deserialize,
    IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Outcome {
    /// The schedule that the search begins with, which the others are compared with.
    #[default]
    Baseline,
    /// Better than the incumbent: it is the incumbent now.
    Kept,
    /// Not better.
    Reverted,
    /// The samples do not tell.
    Inconclusive,
    /// The schedule breaks rules. Only the baseline can end so: other illegal proposals cost no trial.
    Rejected,
    /// Legal, but it cannot be lowered.
    Unloadable,
    /// The program gets stuck or traps on the reference VM.
    Broken,
    /// Wrong values.
    Disagreed,
    /// Two runs on the device agree with the graph and differ in their bits.
    Unrepeatable,
    /// The kernel does not compile.
    CompileFailed,
    /// A device worker gave up.
    Trapped,
    /// The host gave up.
    TimedOut,
    /// Does not fit the device.
    OutOfMemory,
    /// The driver reported a fault.
    Fault,
    /// Faster than it can be.
    BelowBound,
}

impl Outcome {
    /// The name as in the ledger.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the candidate became the incumbent.
    #[must_use]
    pub fn leads(self) -> bool {
        matches!(self, Self::Baseline | Self::Kept)
    }

    /// Whether the candidate was correct, and compared.
    pub(crate) fn is_judged(self) -> bool {
        self.leads() || matches!(self, Self::Reverted | Self::Inconclusive)
    }
}

impl From<Decision> for Outcome {
    fn from(decision: Decision) -> Self {
        match decision {
            Decision::Kept => Self::Kept,
            Decision::Reverted => Self::Reverted,
            Decision::Inconclusive => Self::Inconclusive,
        }
    }
}

impl From<&Rejection> for Outcome {
    fn from(dropped: &Rejection) -> Self {
        match dropped {
            Rejection::Rejected(_) => Self::Rejected,
            Rejection::Unloadable(_) => Self::Unloadable,
            Rejection::Unrunnable(_) | Rejection::Unevaluated(_) | Rejection::Halted(_) => {
                Self::Broken
            }
            Rejection::Disagreed { .. } | Rejection::Sampled { .. } => Self::Disagreed,
            Rejection::Unrepeatable(_) => Self::Unrepeatable,
            Rejection::BelowBound(_) => Self::BelowBound,
            Rejection::Failed(error) => match error {
                DeviceError::Compile { .. } => Self::CompileFailed,
                DeviceError::Trapped { .. } => Self::Trapped,
                DeviceError::TimedOut { .. } => Self::TimedOut,
                DeviceError::OutOfMemory { .. } => Self::OutOfMemory,
                DeviceError::Fault { .. } | DeviceError::Unavailable { .. } => Self::Fault,
            },
        }
    }
}

/// A proposal that cost no trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SkippedProposal {
    /// The knobs in which it differs from the config that it was drawn from.
    pub changed: Map<String, Value>,
    /// Why it was not tried.
    pub why: String,
}

/// Proposals that were drawn for a trial and cost none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// Illegal ones.
    pub rejected: u64,
    /// Those that lower to a program and kernel that were tried.
    pub repeated: u64,
    /// The first few.
    pub examples: Vec<SkippedProposal>,
}

/// What a trial spent its seconds on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, AddAssign)]
pub struct Spent {
    /// All of it.
    pub total_s: f64,
    /// Drawing and validating proposals.
    pub propose_s: f64,
    /// Lowering and verifying, those included that repeat a trial.
    pub lower_s: f64,
    /// The gates: reference VM and device, which run side by side in the first stage.
    pub gates_s: f64,
    /// The part of that in which the device waited for the reference VM.
    #[serde(default)]
    pub waiting_s: f64,
    /// The reference VM's own seconds, which may be from before the trial began: helpers work ahead.
    pub reference_s: f64,
    /// Timing against the incumbent.
    pub timing_s: f64,
    /// What of the device's parts went into making programs run.
    pub device: Costs,
}

/// One finished trial: a row of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Its number, from zero.
    pub trial: u64,
    /// Where the proposal comes from.
    pub origin: Origin,
    /// The trial that was the incumbent, if there was one.
    pub incumbent: Option<u64>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, in one line.
    pub why: String,
    /// The knobs in which it differs from the incumbent: path to `[before, after]`.
    pub changed: Map<String, Value>,
    /// The schedule, whole.
    pub config: ScheduleConfig,
    /// Share of its time that it saves over the incumbent.
    pub gain: Option<Interval>,
    /// What the gain had to beat.
    pub threshold: Option<f64>,
    /// The noise floor, on the trial that measured it.
    pub noise_floor: Option<f64>,
    /// Of a measured trial: microseconds per token that the cost model predicts at the position where it was timed. Nothing is decided by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_us: Option<f64>,
    /// Raw samples: microseconds per token of each round's four blocks (incumbent, candidate, candidate, incumbent).
    pub samples_us: Vec<[f64; 4]>,
    /// The card that measured it, where the search has several: its number in the header's `cards`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<u32>,
    /// The baseline on the other cards, which gives each its noise floor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// Cards that the search does without from this trial on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// The verdict.
    pub verdict: Verdict,
    /// Proposals that were drawn before this one and cost no trial.
    pub skipped: Skipped,
    /// What its time was spent on.
    #[serde(default)]
    pub spent: Spent,
    /// Seconds of search when the trial began.
    pub began_s: f64,
    /// Seconds of search when it ended. The caller, who has the clock, sets it.
    pub ended_s: f64,
}

/// The champion, once more: on fresh tokens and, where there is a device, against the baseline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Confirmation {
    /// Trials that were finished.
    pub trials: u64,
    /// The champion's trial.
    pub champion: u64,
    /// Whether it stands: kept if it agrees again and, where it was measured, is better than the baseline again.
    pub decision: Decision,
    /// Why, in one line.
    pub why: String,
    /// Positions that the reference VM ran on fresh tokens.
    pub positions: usize,
    /// Share of its time that it saves over the baseline.
    pub gain: Option<Interval>,
    /// What the gain had to beat.
    pub threshold: Option<f64>,
    /// Raw samples.
    pub samples_us: Vec<[f64; 4]>,
    /// The card that these are of, where the search has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<u32>,
    /// The same on the other cards. The decision is that of all: kept if every card keeps it, reverted if one reverts it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// The champion's verdict, with the new latency.
    pub verdict: Verdict,
}

/// The same program on another card of the search. Its figures are that card's own: they are compared with nothing of the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Beside {
    /// The card.
    pub card: u32,
    /// What it decides about the champion; nothing of a baseline.
    pub decision: Option<Decision>,
    /// Why, in one line.
    pub why: String,
    /// Microseconds per token.
    pub latency_us: Option<f64>,
    /// Interval of that median.
    pub ci_us: Option<[f64; 2]>,
    /// The bound there.
    pub bound_us: Option<f64>,
    /// The card's noise floor, of a baseline.
    pub noise_floor: Option<f64>,
    /// Share of its time that the champion saves over the baseline.
    pub gain: Option<Interval>,
    /// What the gain had to beat.
    pub threshold: Option<f64>,
    /// Raw samples.
    pub samples_us: Vec<[f64; 4]>,
    /// The clocks, and what else a reader should know.
    pub notes: Vec<String>,
}

/// A card that a search goes on without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeftOut {
    /// The card.
    pub card: u32,
    /// What happened to it.
    pub why: String,
}

impl Beside {
    /// A baseline as another card measured it.
    pub(crate) fn of_trial(card: u32, trial: &Trial) -> Self {
        Self {
            noise_floor: trial.noise_floor,
            gain: trial.gain,
            threshold: trial.threshold,
            samples_us: trial.samples_us.clone(),
            ..Self::of_verdict(card, trial.why.clone(), &trial.verdict)
        }
    }

    /// A champion as another card confirmed it.
    pub(crate) fn of_confirmation(card: u32, confirmation: &Confirmation) -> Self {
        let mut verdict = confirmation.verdict.clone();
        if confirmation.samples_us.is_empty() {
            // What it shows then is what the card of the champion's trial measured.
            (verdict.latency_us, verdict.ci_us, verdict.bound_us) = (None, None, None);
        }
        Self {
            decision: Some(confirmation.decision),
            gain: confirmation.gain,
            threshold: confirmation.threshold,
            samples_us: confirmation.samples_us.clone(),
            ..Self::of_verdict(card, confirmation.why.clone(), &verdict)
        }
    }

    fn of_verdict(card: u32, why: String, verdict: &Verdict) -> Self {
        Self {
            card,
            why,
            latency_us: verdict.latency_us,
            ci_us: verdict.ci_us,
            bound_us: verdict.bound_us,
            notes: verdict.notes.clone(),
            ..Self::default()
        }
    }
}

/// What several cards decide together.
pub(crate) fn together(decisions: impl IntoIterator<Item = Decision>) -> Decision {
    use Decision::{Inconclusive, Kept, Reverted};
    let all: Vec<Decision> = decisions.into_iter().collect();
    let worst = [Reverted, Inconclusive].into_iter().find(|decision| all.contains(decision));
    worst.unwrap_or(Kept)
}

/// A row of the ledger after the header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Row {
    /// A finished trial.
    Trial(Box<Trial>),
    /// The champion's confirmation.
    Confirmation(Box<Confirmation>),
}

/// Changes as a ledger keeps them: path to `[before, after]`.
pub(crate) fn changed(changes: &[Change]) -> Map<String, Value> {
    let entry = |change: &Change| {
        let pair = vec![change.from.to_json(), change.to.to_json()];
        (change.knob.path().to_owned(), Value::Array(pair))
    };
    changes.iter().map(entry).collect()
}
