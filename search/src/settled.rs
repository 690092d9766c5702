//! Knobs that a search does not vary: for each of them one value was at least as good as every other in all checks that
//! come with amk (`corpus/checks`, moves of one knob measured on a card), so trials of the others are wasted. Whoever
//! edits a schedule may still set them.

use ir::schedule::{Knob, Value, legal_values};
use ir::{Graph, Target};

/// The value of such a knob, by its path.
fn value(path: &str) -> Option<Value> {
    let name = match path {
        "kernel.poll_sleep_ns" => return Some(Value::Number(0)),
        "fusion_grouping.embed" => "qkv",
        "sync.embed" | "sync.qkv" | "sync.attention" | "sync.o_proj" | "sync.gate_up"
        | "sync.down" => "flag_in_data",
        _ => return None,
    };
    Some(Value::Name(name))
}

/// Every knob with the values that a search draws from: the legal ones, or only the settled one if it is legal.
#[must_use]
pub fn searched_values(graph: &Graph, target: &Target) -> Vec<(Knob, Vec<Value>)> {
    let values = |&knob: &Knob| {
        let legal = legal_values(knob, graph, target);
        let settled = value(knob.path()).filter(|value| legal.contains(value));
        (knob, settled.map_or(legal, |value| vec![value]))
    };
    Knob::ALL.iter().map(values).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::{Check, Checks};

    /// A newer check in which another value is better by more than its noise reopens the knob.
    #[test]
    fn no_check_has_found_a_better_value_for_a_settled_knob() {
        let checks = Checks::read(include_str!("../../corpus/checks/h200.jsonl"));
        let mut seen = std::collections::BTreeSet::new();
        for check in checks.expect("a file of checks").each {
            let (path, to) = check.change.split_once('=').expect("KNOB=VALUE");
            let Some(settled) = value(path).filter(|settled| settled.to_string() != to) else {
                continue;
            };
            seen.insert(path.to_owned());
            let Check { change, model, measured_pct, .. } = &check;
            assert!(*measured_pct < 0.5, "{model}: {change} gained {measured_pct}% over {settled}");
        }
        // The hand-off of an embedding that is no phase of its own has no check: it changes nothing.
        let settled = Knob::ALL.iter().filter(|knob| value(knob.path()).is_some()).count();
        assert_eq!(seen.len() + 1, settled, "{seen:?}");
    }

    #[test]
    fn settled_knobs_have_one_legal_value_and_others_all() {
        let graph = model::preset("smollm2-135m").expect("a preset").graph;
        let target = Target::by_name("h200").expect("a target");
        for (knob, values) in searched_values(&graph, &target) {
            let legal = legal_values(knob, &graph, &target);
            match value(knob.path()) {
                Some(settled) => assert_eq!(values, [settled], "{knob}"),
                None => assert_eq!(values, legal, "{knob}"),
            }
        }
    }
}
