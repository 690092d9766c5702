//! The verdict of a job, from the audited rows of its ledger and from nothing else.

use fleet::{Finding, Kind, Spec};
use search::{Confirmation, LatencyKind, Outcome, Trial};
use serde_json::json;

use crate::commands::runs::recorded::Recorded;
use crate::failure::Failure;

/// What a finished job found. `run` has passed the audit of `runs verify`.
pub(super) fn finding(spec: &Spec, run: &Recorded) -> Result<Finding, Failure> {
    follows(spec, run)?;
    let baseline = run.trials.first();
    let subject = match &spec.race {
        None => run.champion(),
        // A race is about its candidate, whether it led or not; at the end it may have raced again.
        Some(race) => {
            let own = run.trials.iter().filter(|trial| json!(trial.config) == race.champion);
            own.clone().rfind(|trial| trial.outcome.leads()).or(own.clone().next_back())
        }
    };
    let (Some(baseline), Some(subject)) = (baseline, subject) else {
        return Err(Failure::refused(format!(
            "{} holds no correct schedule to report",
            run.ledger.display()
        )));
    };
    let confirmed = run.confirmation.as_ref();
    let confirmed = match spec.kind {
        // A start that nothing beat is confirmed too, but it has won nothing.
        Kind::Leg => confirmed.filter(|c| c.champion != baseline.trial),
        Kind::Race => confirmed.filter(|c| c.champion == subject.trial),
    };
    let (decision, why) = decided(spec.kind, confirmed, subject);
    let own = confirmed.filter(|c| c.champion == subject.trial);
    let measured = word(run, "latency_kind") == LatencyKind::MeasuredGpu.name();
    let verdict = own.map_or(&subject.verdict, |confirmation| &confirmation.verdict);
    Ok(Finding {
        decision,
        why,
        latency_kind: word(run, "latency_kind").to_owned(),
        latency_us: verdict.latency_us,
        saved: saved(own, baseline, subject, measured),
        schedule_id: verdict.schedule_id.clone(),
        program_id: verdict.program_id.clone(),
        kernel_id: verdict.kernel_id.clone(),
        config: json!(subject.config),
        start_config: json!(baseline.config),
        trials: run.trials.len() as u64,
    })
}

fn word<'r>(run: &'r Recorded, key: &str) -> &'r str {
    run.word(key).unwrap_or_default()
}

/// Refuses a ledger that is of another job.
fn follows(spec: &Spec, run: &Recorded) -> Result<(), Failure> {
    let number = |key: &str| run.header.get(key).and_then(serde_json::Value::as_u64);
    let contexts = run.header.get("contexts").cloned().unwrap_or_else(|| json!([]));
    let start = run.trials.first().map(|trial| json!(trial.config));
    let raced = spec.race.as_ref();
    let pairs = [
        ("model", word(run, "model") == spec.model),
        ("target", word(run, "target") == spec.target),
        ("seed", number("seed") == Some(spec.seed)),
        ("contexts", contexts == json!(spec.contexts)),
        ("budget", word(run, "budget") == spec.budget),
        ("strategy", word(run, "strategy") == spec.strategy),
        (
            "priors",
            run.header.get("prior").is_some_and(|prior| spec.proposes_from(&prior.to_string())),
        ),
        ("start", raced.is_none_or(|race| start.as_ref() == Some(&race.start))),
        (
            "candidate",
            raced.is_none_or(|race| {
                run.trials.get(1).is_none_or(|trial| json!(trial.config) == race.champion)
            }),
        ),
    ];
    match pairs.into_iter().find(|(_, same)| !same) {
        None => Ok(()),
        Some((what, _)) => Err(Failure::integrity(format!(
            "{} is the ledger of another job: its {what} differs",
            run.ledger.display()
        ))),
    }
}

/// The decision on the subject, and why: by the confirmation on fresh tokens if there was one, else by its trial.
fn decided(
    kind: Kind,
    confirmed: Option<&Confirmation>,
    subject: &Trial,
) -> (Option<String>, String) {
    if let Some(confirmation) = confirmed {
        let decision = serde_json::to_value(confirmation.decision).ok();
        let decision = decision.and_then(|value| value.as_str().map(str::to_owned));
        return (decision, confirmation.why.clone());
    }
    let decision = match (kind, subject.outcome) {
        (Kind::Leg, _) => None,
        (Kind::Race, Outcome::Kept | Outcome::Inconclusive) => Some("inconclusive"),
        // Not better, or refused by a gate: either way this card does not keep it.
        (Kind::Race, _) => Some("reverted"),
    };
    (decision.map(str::to_owned), subject.why.clone())
}

/// The share of the baseline's time that the subject saves.
fn saved(
    confirmed: Option<&Confirmation>,
    baseline: &Trial,
    subject: &Trial,
    measured: bool,
) -> Option<[f64; 2]> {
    if subject.trial == baseline.trial {
        return Some([0.0, 0.0]);
    }
    if let Some(gain) = confirmed.and_then(|confirmation| confirmation.gain) {
        return Some([gain.low, gain.high]);
    }
    if measured {
        return subject.gain.map(|gain| [gain.low, gain.high]);
    }
    let share = 1.0 - subject.verdict.latency_us? / baseline.verdict.latency_us?;
    Some([share, share])
}
