//! The ledger's records: trials, and the confirmation at the end of a search.

use derive_more::AddAssign;
use ir::schedule::ScheduleConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use strum::IntoStaticStr;

use crate::assess;
use crate::decide::Decision;
use crate::device::{Costs, DeviceError};
use crate::measure::Interval;
use crate::propose::{Change, Origin};
use crate::rejection::Rejection;
use crate::verdict::Verdict;

/// Version of the gates, the timing and the decision rule. It increases if figures before and after the change are not
/// comparable.
pub const PROTOCOL: u32 = 1;

/// Maximum proposals without a trial that a record describes; the others are only counted.
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
    /// The schedule that the search begins with. The others are compared with it.
    #[default]
    Baseline,
    /// Better than the incumbent: it is the incumbent now.
    Kept,
    /// Not better.
    Reverted,
    /// The samples are not decisive.
    Inconclusive,
    /// The schedule breaks rules. Only the baseline can end like this: other illegal proposals cost no trial.
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
    /// A worker trapped on the device.
    Trapped,
    /// The host stopped waiting for the device.
    TimedOut,
    /// Does not fit the device.
    OutOfMemory,
    /// The driver reported a fault.
    Fault,
    /// Faster than possible.
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

    /// Whether the candidate was correct and was compared.
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

/// Proposals that were drawn for a trial and cost no trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// Illegal ones.
    pub rejected: u64,
    /// Proposals that lower to a program and kernel that were tried already.
    pub repeated: u64,
    /// The first few.
    pub examples: Vec<SkippedProposal>,
}

/// The seconds of a trial by activity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, AddAssign)]
pub struct Spent {
    /// All of the trial.
    pub total_s: f64,
    /// Drawing and validating proposals.
    pub propose_s: f64,
    /// Lowering and verifying, including proposals that repeat a trial.
    pub lower_s: f64,
    /// The gates: reference VM and device, which run side by side in the first stage.
    pub gates_s: f64,
    /// The part of that in which the device waited for the reference VM.
    #[serde(default)]
    pub waiting_s: f64,
    /// The part of the gates in which the graph was evaluated on the experts that the device chose.
    #[serde(default)]
    pub evaluating_s: f64,
    /// The reference VM's own seconds, which may be from before the trial began: helpers work ahead.
    pub reference_s: f64,
    /// Timing against the incumbent.
    pub timing_s: f64,
    /// The part of the device's time that went into making programs run.
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
    /// Fraction of the incumbent's time that it saves.
    pub gain: Option<Interval>,
    /// The threshold for the gain.
    pub threshold: Option<f64>,
    /// The noise floor, if the trial measured it.
    pub noise_floor: Option<f64>,
    /// For a measured trial: predicted µs per token at the position where it was timed. It decides nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_us: Option<f64>,
    /// For a trial of the race that is simpler than the incumbent and leads if it is as fast: the number of knobs in which it and the
    /// incumbent depart from the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simpler: Option<[usize; 2]>,
    /// Raw samples: microseconds per token of each round's four blocks (incumbent, candidate, candidate, incumbent).
    pub samples_us: Vec<[f64; 4]>,
    /// The card that measured it, if the search has several: its number in the header's `cards`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<u32>,
    /// The baseline's measurements on the other cards, which give each its noise floor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// Cards that are left out of the search from this trial on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// The verdict.
    pub verdict: Verdict,
    /// Proposals that were drawn before this one and cost no trial.
    pub skipped: Skipped,
    /// The seconds of the trial by activity.
    #[serde(default)]
    pub spent: Spent,
    /// Seconds of search when the trial began.
    pub began_s: f64,
    /// Seconds of search when it ended. The caller sets it from its clock.
    pub ended_s: f64,
}

impl Trial {
    /// Makes a trial that was to be kept one that failed the caller's gate: what is wrong has no time.
    pub(crate) fn fail(&mut self, why: &Rejection) {
        let verdict = Verdict {
            latency_us: None,
            latency_kind: None,
            ci_us: None,
            bound_us: None,
            pct_of_roofline: None,
            ..std::mem::take(&mut self.verdict)
        };
        *self = Self {
            outcome: Outcome::from(why),
            why: format!("before it was to lead: {why}"),
            gain: None,
            threshold: None,
            predicted_us: None,
            simpler: None,
            samples_us: Vec::new(),
            verdict,
            ..std::mem::take(self)
        };
        assess::refuse(&mut self.verdict, why);
    }
}

/// The champion's confirmation: on fresh tokens and, if there is a device, against the baseline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Confirmation {
    /// Trials that were finished.
    pub trials: u64,
    /// The champion's trial.
    pub champion: u64,
    /// Whether it is confirmed: kept if it agrees again and, if it was measured, is better than the baseline again.
    pub decision: Decision,
    /// Why, in one line.
    pub why: String,
    /// Positions that the reference VM ran on fresh tokens.
    pub positions: usize,
    /// Fraction of the baseline's time that it saves.
    pub gain: Option<Interval>,
    /// The threshold for the gain.
    pub threshold: Option<f64>,
    /// Raw samples.
    pub samples_us: Vec<[f64; 4]>,
    /// The card of these figures, if the search has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<u32>,
    /// The same on the other cards. The decision is that of all: kept if every card keeps it, reverted if one reverts it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// The champion's verdict, with the new latency.
    pub verdict: Verdict,
}

/// The same program on another card of the search. Its figures are that card's own and are compared with no other card's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Beside {
    /// The card.
    pub card: u32,
    /// Its decision on the champion; none for a baseline.
    pub decision: Option<Decision>,
    /// Why, in one line.
    pub why: String,
    /// Microseconds per token.
    pub latency_us: Option<f64>,
    /// Interval of that median.
    pub ci_us: Option<[f64; 2]>,
    /// The roofline bound there.
    pub bound_us: Option<f64>,
    /// The card's noise floor, for a baseline.
    pub noise_floor: Option<f64>,
    /// Fraction of the baseline's time that the champion saves.
    pub gain: Option<Interval>,
    /// The threshold for the gain.
    pub threshold: Option<f64>,
    /// Raw samples.
    pub samples_us: Vec<[f64; 4]>,
    /// The clock readings, and what else a reader should know.
    pub notes: Vec<String>,
}

/// A card that is left out of the rest of a search.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeftOut {
    /// The card.
    pub card: u32,
    /// The reason.
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
            // These figures are from the card of the champion's trial.
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

/// The joint decision of several cards.
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
