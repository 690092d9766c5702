//! The least time that a step can take, from the model and the card instead of from the rows.
//!
//! The weights that a step streams follow from the graph: every tile is loaded once, whatever the schedule. The table
//! of targets has each card's bandwidth and cache size. Cards of one name differ, so the figures are used with a
//! margin: this check rejects times that no card of the name can have, and is not a measurement.

use ir::{Graph, Target};

/// Largest bandwidth of a card, relative to the table.
const FASTEST: f64 = 1.25;

/// Smallest bandwidth of a card, relative to the table.
const SLOWEST: f64 = 0.25;

/// Bytes that a step reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBytes {
    /// Weights.
    pub weights: u64,
    /// Keys and values that are read at the last position of the cache.
    pub kv_most: u64,
}

impl StepBytes {
    /// The bytes of a graph, from its neutral schedule: all schedules stream the same. `None` if that cannot be lowered.
    #[must_use]
    pub fn of(graph: &Graph, target: &Target, kv_capacity: u32) -> Option<Self> {
        let config = ir::schedule::default_config(graph, target);
        let valid = ir::schedule::validate(config, graph, target).ok()?;
        let program = lower::lower(&valid, graph, target, lower::Options { kv_capacity }).ok()?;
        let kv_most = program.kv_bytes(kv_capacity);
        Some(Self { weights: program.stream_bytes(), kv_most })
    }
}

/// Facts about a search that do not come from its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RooflineBound {
    /// Bytes of a step, where the model is known.
    pub bytes: Option<StepBytes>,
    /// The card, if its name is in the table.
    pub card: Option<Target>,
}

impl RooflineBound {
    /// Checks that a roofline bound is possible for the model on the card.
    pub(super) fn bound(&self, weight_mb: Option<f64>, bound_us: f64) -> Result<(), String> {
        let Some(card) = &self.card else { return Ok(()) };
        let bandwidth = card.total_bandwidth() as f64;
        let (weights, most) = match self.bytes {
            Some(bytes) => {
                let all = bytes.weights.saturating_add(bytes.kv_most);
                (bytes.weights as f64, all as f64 / (bandwidth * SLOWEST) * 1e6)
            }
            None => (weight_mb.unwrap_or(0.0) * 1e6, f64::INFINITY),
        };
        let least = weights / (bandwidth * FASTEST) * 1e6;
        if (least..=most).contains(&bound_us) {
            return Ok(());
        }
        Err(format!(
            "its bound of {bound_us} us is not that of {weights} bytes of weights on a {} ({least} to {most} us)",
            card.name
        ))
    }

    /// Bytes of weights that a step streams: from the model if known, else from the row.
    pub(super) fn weights(&self, weight_mb: Option<f64>) -> f64 {
        let said = weight_mb.unwrap_or(0.0) * 1e6;
        self.bytes.map_or(said, |bytes| bytes.weights as f64)
    }

    /// Bytes that the card's cache may hold from one step to the next.
    pub(super) fn cached(&self, said: u64) -> f64 {
        let most = self.card.as_ref().map_or(f64::INFINITY, |card| card.l2_bytes as f64 * FASTEST);
        (said as f64).min(most)
    }
}

#[cfg(test)]
mod tests {
    use ir::schedule::{legal_values, validate};

    use super::*;

    #[test]
    fn every_schedule_of_a_model_streams_the_same_weights() {
        let target = Target::by_name("h200").expect("a target");
        for name in ["toy", "toy-2l", "smollm2-135m"] {
            let graph = model::preset(name).expect("a preset").graph;
            let bytes = StepBytes::of(&graph, &target, 64).expect("it lowers");
            assert!(bytes.weights > 0 && bytes.kv_most > 0, "{name}: {bytes:?}");
            let mut lowered = 0;
            for knob in ir::Knob::ALL {
                let edits = legal_values(*knob, &graph, &target);
                for value in edits.last().into_iter().chain(edits.first()) {
                    let mut config = ir::schedule::default_config(&graph, &target);
                    config.set(*knob, *value).expect("a value of the knob");
                    let Ok(valid) = validate(config, &graph, &target) else { continue };
                    let options = lower::Options { kv_capacity: 64 };
                    let Ok(program) = lower::lower(&valid, &graph, &target, options) else {
                        continue;
                    };
                    assert_eq!(program.stream_bytes(), bytes.weights, "{name} {knob:?}");
                    lowered += 1;
                }
            }
            assert!(lowered > 10, "{name}: {lowered} schedules");
        }
    }
}
