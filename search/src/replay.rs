//! Replays a recorded trial: the same program from the schedule, the same values on the reference VM, the same latency.
//!
//! Everything that needs no device is repeated exactly. A time is not: on the card, driver and compiler of the record
//! it is measured again, and the recorded median must lie in the new interval, widened by the noise floor of the
//! recorded search. The caller, which has the conditions, decides whether this is that card.

use serde::Serialize;

use crate::assess::{self, Timing};
use crate::device::{Device, DeviceError};
use crate::gate::Gate;
use crate::measure::Interval;
use crate::rejection::Rejection;
use crate::trial::Trial;
use crate::verdict::{LatencyKind, Verdict};

/// How a stage of a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Repeated {
    /// The same as recorded.
    Same,
    /// Not the same as recorded.
    Differs,
    /// Not run; the detail gives the reason.
    Skipped,
}

/// One stage of a replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// `schedule`, `program`, `kernel`, `reference`, `predict`, `measure`.
    pub stage: &'static str,
    /// How it ended.
    pub result: Repeated,
    /// What was compared, or why it was not compared.
    pub detail: String,
}

impl Stage {
    /// A stage that was not run.
    #[must_use]
    pub fn skipped(stage: &'static str, why: impl Into<String>) -> Self {
        Self { stage, result: Repeated::Skipped, detail: why.into() }
    }

    fn of(stage: &'static str, same: bool, detail: impl Into<String>) -> Self {
        let result = if same { Repeated::Same } else { Repeated::Differs };
        Self { stage, result, detail: detail.into() }
    }
}

/// The device to measure on, or why there is none.
pub enum Place<'d, 'a> {
    /// The card of the record.
    Here(&'d mut (dyn Device + 'a)),
    /// No device, or another card than the record's.
    Elsewhere(String),
}

/// Replays a trial. `noise_floor` is that of its search.
///
/// # Errors
/// If the device is lost.
pub fn replay(
    gate: &mut Gate<'_>,
    place: Place<'_, '_>,
    trial: &Trial,
    noise_floor: f64,
    seed: u64,
) -> Result<Vec<Stage>, Rejection> {
    let mut stages = Vec::new();
    let id = trial.config.id();
    let named = trial.verdict.schedule_id.as_deref();
    stages.push(Stage::of("schedule", named == Some(&id), format!("{} now {id}", was(named))));
    let candidate = match gate.lower(&trial.config) {
        Ok(candidate) => candidate,
        Err(dropped) => {
            let same = trial.verdict.program_id.is_none();
            stages.push(Stage::of("program", same, format!("it does not lower: {dropped}")));
            return Ok(stages);
        }
    };
    let same = |stage, recorded: Option<&str>, now: &str| {
        Stage::of(stage, recorded == Some(now), format!("{} now {now}", was(recorded)))
    };
    stages.push(same("program", trial.verdict.program_id.as_deref(), &candidate.program_id));
    stages.push(same("kernel", trial.verdict.kernel_id.as_deref(), &candidate.kernel_id));
    let (verdict, outcome) = assess::evaluate(gate, None, &trial.config, Timing::default(), 0);
    stages.push(reference(gate, trial, &verdict, outcome.err()));
    let measured = trial.verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
    stages.push(match place {
        _ if trial.verdict.latency_us.is_none() => {
            Stage::skipped("measure", "the trial has no latency")
        }
        _ if !measured => predict(trial, &verdict),
        _ if stages
            .iter()
            .any(|stage| stage.stage != "schedule" && stage.result == Repeated::Differs) =>
        {
            Stage::skipped("measure", "what would be measured is not what was recorded")
        }
        Place::Elsewhere(why) => Stage::skipped("measure", why),
        Place::Here(device) => measure(gate, device, trial, noise_floor, seed)?,
    });
    Ok(stages)
}

fn was(recorded: Option<&str>) -> String {
    recorded.map_or_else(|| "recorded: none,".to_owned(), |id| format!("recorded {id},"))
}

/// Checks that the reference VM agrees with the graph if and only if it did. If the record is a prediction, its errors
/// must have the same bits.
fn reference(
    gate: &Gate<'_>,
    trial: &Trial,
    verdict: &Verdict,
    dropped: Option<Rejection>,
) -> Stage {
    let agreed = |verdict: &Verdict| {
        verdict.gates.iter().any(|gate| gate.gate == "reference" && gate.passed)
    };
    let scope = || format!("agrees with the graph at {}", gate.expected().reference_scope());
    let detail = dropped.map_or_else(scope, |dropped| dropped.to_string());
    let mut same = agreed(verdict) == agreed(&trial.verdict);
    if same && trial.verdict.latency_kind == Some(LatencyKind::Predicted) {
        same = verdict.max_abs_err == trial.verdict.max_abs_err
            && verdict.max_rel_err == trial.verdict.max_rel_err;
        let bits = if same { "the same bits" } else { "other values" };
        return Stage::of("reference", same, format!("{detail}; {bits} as recorded"));
    }
    Stage::of("reference", same, detail)
}

fn predict(trial: &Trial, verdict: &Verdict) -> Stage {
    let same = verdict.latency_us == trial.verdict.latency_us;
    let us = |us: Option<f64>| us.map_or_else(|| "none".to_owned(), |us| format!("{us:.4} us"));
    let (then, now) = (us(trial.verdict.latency_us), us(verdict.latency_us));
    Stage::of("predict", same, format!("recorded {then}, now {now}"))
}

fn measure(
    gate: &mut Gate<'_>,
    device: &mut (dyn Device + '_),
    trial: &Trial,
    noise_floor: f64,
    seed: u64,
) -> Result<Stage, Rejection> {
    let Some(then) = trial.verdict.latency_us.filter(|_| trial.verdict.ci_us.is_some()) else {
        let why = "it was given up after a few rounds at early positions: its latency is no median to be found again";
        return Ok(Stage::skipped("measure", why));
    };
    let timing = Timing::default();
    let (verdict, outcome) = assess::evaluate(gate, Some(device), &trial.config, timing, seed);
    if let Err(dropped) = outcome {
        let lost = matches!(dropped, Rejection::Failed(DeviceError::Unavailable { .. }));
        let stage = Stage::of("measure", false, dropped.to_string());
        return if lost { Err(dropped) } else { Ok(stage) };
    }
    let (Some(now), Some([low, high])) = (verdict.latency_us, verdict.ci_us) else {
        return Ok(Stage::of("measure", false, "it gave no interval"));
    };
    let wide = widened(Interval { low, high }, noise_floor);
    let same = (wide.low..=wide.high).contains(&then);
    let detail = format!(
        "recorded {then:.2} us; now {now:.2} us, interval {low:.2} to {high:.2}, with the noise floor of {:.2} % {:.2} to {:.2}",
        100.0 * noise_floor,
        wide.low,
        wide.high
    );
    Ok(Stage::of("measure", same, detail))
}

fn widened(interval: Interval, noise: f64) -> Interval {
    Interval { low: interval.low * (1.0 - noise), high: interval.high * (1.0 + noise) }
}
