//! Schedules that were found and are shipped: what `bench` and `generate` use when no schedule is named.

/// Target, model and the text of the schedule. The files' README has the measurements.
const SHIPPED: &[(&str, &str, &str)] =
    &[("h200", "llama-3.2-1b", include_str!("../schedules/h200-llama-3.2-1b.json"))];

/// The shipped schedule for a model on a target, as JSON, if there is one. It may have been found for other dimensions than those of a
/// folder of the same name, so it must be validated like any other.
#[must_use]
pub fn shipped(target: &str, model: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(t, m, _)| *t == target && *m == model).map(|(_, _, text)| *text)
}

/// Every schedule that is shipped for a target, whatever the model.
pub fn shipped_for(target: &str) -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().filter(move |(t, _, _)| *t == target).map(|(_, _, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_schedules_are_json_objects_and_found_by_both_names() {
        for (target, model, text) in SHIPPED {
            assert_eq!(shipped(target, model), Some(*text));
            let parsed: serde_json::Value = serde_json::from_str(text).expect(model);
            assert!(parsed.is_object(), "{target} {model}");
        }
        assert_eq!(shipped("h200", "toy"), None);
    }
}
