//! The structured answer to "what about this schedule?".

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::divergence::FirstDivergence;

/// The schema id of a verdict.
pub const VERDICT_SCHEMA: &str = "amk.verdict.v2";

/// Whether a latency was measured or predicted. The two are never compared.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum LatencyKind {
    /// A device ran the program, agreed, and was timed.
    MeasuredGpu,
    /// The prediction of the cost model, for a program that agrees on the reference VM.
    Predicted,
}

impl LatencyKind {
    /// The name as in a verdict.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// How one gate ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GateReport {
    /// `validate`, `lower`, `verify`, `reference`, `device`, `bound`.
    pub gate: String,
    /// Whether the candidate passed.
    pub passed: bool,
    /// What was checked, or what failed.
    pub detail: String,
}

/// What is known about a schedule after its gates. Fields are absent (`null`) when the gates before them did not pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Verdict {
    /// [`VERDICT_SCHEMA`].
    pub schema: String,
    /// Validated, lowered and verified.
    pub valid: bool,
    /// Why it is not valid, or not correct.
    pub rejected_reason: Option<String>,
    /// Every violation of a rule, with its place, value, legal range and a suggestion.
    pub violations: Vec<Value>,
    /// Agrees with the evaluated graph, on the reference VM and, where there is one, on the device.
    pub correct: bool,
    /// Largest difference of a logit.
    pub max_abs_err: Option<f64>,
    /// Largest difference over the largest expected magnitude of its position.
    pub max_rel_err: Option<f64>,
    /// Fraction of positions with the expected most likely token.
    pub top1_agreement: Option<f64>,
    /// Microseconds per token.
    pub latency_us: Option<f64>,
    /// Where `latency_us` comes from.
    pub latency_kind: Option<LatencyKind>,
    /// Interval of a measured median.
    pub ci_us: Option<[f64; 2]>,
    /// The bound: bytes read over bandwidth.
    pub bound_us: Option<f64>,
    /// `100 * bound_us / latency_us`.
    pub pct_of_roofline: Option<f64>,
    /// The chain bound, which the cost model predicts: the step with an infinitely fast stream. Where it is above
    /// `bound_us`, hand-offs and tasks limit the step, not bytes.
    #[serde(default)]
    pub chain_us: Option<f64>,
    /// Hash of the schedule.
    pub schedule_id: Option<String>,
    /// Hash of the lowered program.
    pub program_id: Option<String>,
    /// Hash of the kernel build.
    pub kernel_id: Option<String>,
    /// Tasks of the program.
    pub tasks: Option<u64>,
    /// Megabytes (10^6) of weights that one step streams.
    pub weight_mb: Option<f64>,
    /// The model.
    pub model: String,
    /// The target.
    pub target: String,
    /// `cpu`, or the device's name.
    pub device: String,
    /// Buffers of the program.
    pub n_buffers: Option<u64>,
    /// Counters of the program.
    pub n_counters: Option<u64>,
    /// The gates that were run, in order.
    pub gates: Vec<GateReport>,
    /// What else a reader should know.
    pub notes: Vec<String>,
    /// Where the program goes wrong first, if values differ.
    #[serde(default)]
    pub first_divergence: Option<FirstDivergence>,
}

impl Verdict {
    /// An empty verdict.
    #[must_use]
    pub fn new(model: &str, target: &str, device: &str) -> Self {
        Self {
            schema: VERDICT_SCHEMA.to_owned(),
            model: model.to_owned(),
            target: target.to_owned(),
            device: device.to_owned(),
            ..Self::default()
        }
    }

    /// Records that a gate was passed.
    pub(crate) fn passed(&mut self, gate: &str, detail: impl Into<String>) {
        self.gates.push(GateReport { gate: gate.into(), passed: true, detail: detail.into() });
    }

    /// Records that a gate was not passed, which ends the trial.
    pub(crate) fn failed(&mut self, gate: &str, detail: impl Into<String>) {
        let detail = detail.into();
        self.rejected_reason = Some(detail.clone());
        self.gates.push(GateReport { gate: gate.into(), passed: false, detail });
    }

    /// Sets the latency and its percentage of the bound.
    pub(crate) fn set_latency(&mut self, us: f64, kind: LatencyKind, bound_us: f64) {
        self.latency_us = Some(us);
        self.latency_kind = Some(kind);
        self.bound_us = Some(bound_us);
        self.pct_of_roofline = (us > 0.0).then_some(100.0 * bound_us / us);
    }
}
