//! Names of knobs and values in the previous version, for messages and for `amk migrate`.

use super::{Knob, ScheduleConfig};

/// Earlier paths of knobs.
pub const RENAMED_KNOBS: &[(&str, Knob)] =
    &[("pipeline.in_flight_near_bytes", Knob::PipelineInFlightBeforeWaitBytes)];

/// Earlier names of the values of the `sync` knobs.
pub const RENAMED_VALUES: &[(&str, &str)] = &[("tagged", "flag_in_data")];

/// The knob that had this path.
#[must_use]
pub fn renamed_knob(path: &str) -> Option<Knob> {
    RENAMED_KNOBS.iter().find(|(old, _)| *old == path).map(|(_, knob)| *knob)
}

/// The current name of a value.
#[must_use]
pub fn renamed_value(name: &str) -> Option<&'static str> {
    RENAMED_VALUES.iter().find(|(old, _)| *old == name).map(|(_, new)| *new)
}

/// The id of this schedule under the earlier names.
#[must_use]
pub fn earlier_schedule_id(config: &ScheduleConfig) -> String {
    let mut text = serde_json::to_string(config).unwrap_or_default();
    let last = |path: &'static str| path.rsplit('.').next().unwrap_or(path);
    for (old, knob) in RENAMED_KNOBS {
        text = text.replace(&format!("\"{}\":", last(knob.path())), &format!("\"{}\":", last(old)));
    }
    for (old, new) in RENAMED_VALUES {
        text = text.replace(&format!(":\"{new}\""), &format!(":\"{old}\""));
    }
    super::id_of("schedule", &text)
}
