//! Knobs that a search does not vary: for each of them one value was at least as good as every other in all checks that
//! come with amk (`corpus/checks`, moves of one knob measured on a card), so trials of the others are wasted. Whoever
//! edits a schedule may still set them.

use ir::schedule::{Knob, ScheduleConfig, Value, decides_bits, legal_values};
use ir::{Graph, Target};

const FLAG_IN_DATA: Value = Value::Name("flag_in_data");
/// These knobs and their values.
const SETTLED: [(Knob, Value); 8] = [
    (Knob::KernelPollSleepNs, Value::Number(0)),
    (Knob::FusionGroupingEmbed, Value::Name("qkv")),
    (Knob::SyncEmbed, FLAG_IN_DATA),
    (Knob::SyncQkv, FLAG_IN_DATA),
    (Knob::SyncAttention, FLAG_IN_DATA),
    (Knob::SyncOProj, FLAG_IN_DATA),
    (Knob::SyncGateUp, FLAG_IN_DATA),
    (Knob::SyncDown, FLAG_IN_DATA),
];

fn settled(knob: Knob) -> Option<Value> {
    SETTLED.iter().find(|(of, _)| *of == knob).map(|(_, value)| *value)
}

/// Every knob with the values that a search draws from: the legal ones, or only the settled one if it is legal. With
/// `bits_of`, every schedule gives the bits of this one: knobs that decide them have its values.
#[must_use]
pub fn searched_values(
    graph: &Graph,
    target: &Target,
    bits_of: Option<&ScheduleConfig>,
) -> Vec<(Knob, Vec<Value>)> {
    let values = |&knob: &Knob| {
        let legal = legal_values(knob, graph, target);
        let kept = bits_of.filter(|_| decides_bits(knob)).map(|config| config.get(knob));
        let only = kept.or_else(|| settled(knob).filter(|value| legal.contains(value)));
        (knob, only.map_or(legal, |value| vec![value]))
    };
    Knob::ALL.iter().map(values).collect()
}

#[cfg(test)]
mod tests {
    use ir::schedule::neutral_config;

    use super::*;
    use crate::checks::{Check, Checks};

    /// A newer check in which another value is better by more than its noise reopens the knob.
    #[test]
    fn no_check_has_found_a_better_value_for_a_settled_knob() {
        let checks = Checks::read(include_str!("../../corpus/checks/h200.jsonl"));
        let mut seen = std::collections::BTreeSet::new();
        for check in checks.expect("a file of checks").each {
            let (path, to) = check.change.split_once('=').expect("KNOB=VALUE");
            let knob = Knob::from_path(path).expect("a knob");
            let Some(only) = settled(knob).filter(|only| only.to_string() != to) else { continue };
            seen.insert(knob);
            let Check { change, model, measured_pct, .. } = &check;
            assert!(*measured_pct < 0.5, "{model}: {change} gained {measured_pct}% over {only}");
        }
        // The hand-off of an embedding that is no phase of its own has no check: it changes nothing.
        let knobs = SETTLED.iter().map(|(knob, _)| *knob);
        let unseen: Vec<_> = knobs.filter(|knob| !seen.contains(knob)).collect();
        assert_eq!(unseen, [Knob::SyncEmbed]);
    }

    #[test]
    fn settled_knobs_have_one_legal_value_and_others_all() {
        let graph = model::preset("smollm2-135m").expect("a preset").graph;
        let target = Target::by_name("h200").expect("a target");
        for (knob, values) in searched_values(&graph, &target, None) {
            let legal = legal_values(knob, &graph, &target);
            match settled(knob) {
                Some(only) => assert_eq!(values, [only], "{knob}"),
                None => assert_eq!(values, legal, "{knob}"),
            }
        }
    }

    #[test]
    fn schedules_with_the_bits_of_one_differ_in_other_knobs_only() {
        let graph = model::preset("smollm2-135m").expect("a preset").graph;
        let target = Target::by_name("h200x2").expect("a target");
        let mut one = neutral_config(&graph, &target);
        // A value that a search would not draw is kept too.
        let drawn = legal_values(Knob::TilingAttentionKvSplit, &graph, &target);
        one.tiling.attention.kv_split =
            (2..).find(|&n| !drawn.contains(&Value::Number(n))).unwrap();
        for (knob, values) in searched_values(&graph, &target, Some(&one)) {
            if decides_bits(knob) {
                assert_eq!(values, [one.get(knob)], "{knob}");
            } else {
                assert!(settled(knob).is_some() || values == legal_values(knob, &graph, &target));
            }
        }
    }
}
