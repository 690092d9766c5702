//! The schedule of a program that several sessions share.

use ir::schedule::{ScheduleConfig, legal_values, validate};
use ir::{Graph, Knob, Target};

/// The schedule with at least as many splits of the keys as there are lanes. One session at a short context is fastest with few: it has work for
/// one or two, and each further one is a hand-off more. Lanes take their first splits on different workers (decision 022), so with a split for
/// each of them eight sessions at a short context have eight times as many workers. There are no more splits than workers for them, and a
/// value that makes the schedule illegal is passed over.
pub(crate) fn spread(
    config: ScheduleConfig,
    graph: &Graph,
    target: &Target,
    lanes: u32,
) -> ScheduleConfig {
    let knob = Knob::TilingAttentionKvSplit;
    let most = target.sms / graph.kv_heads.max(1);
    let mut best = config;
    for value in legal_values(knob, graph, target) {
        let mut tried = config;
        let set = tried.set(knob, value).is_ok() && validate(tried, graph, target).is_ok();
        let splits = |config: &ScheduleConfig| config.tiling.attention.kv_split;
        if set && splits(&best) < lanes && splits(&best) < splits(&tried) && splits(&tried) <= most
        {
            best = tried;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_get_a_split_each() {
        let target = Target::by_name("h200").expect("a known target");
        for (model, context, lanes, splits) in [
            ("llama-3.2-1b", 128, 8, 8),
            ("llama-3.2-1b", 128, 2, 2),
            ("llama-3.2-1b", 128, 1, 1),
            ("llama-3.2-1b", 16_384, 8, 16),
            ("smollm2-135m", 128, 8, 8),
        ] {
            let model = model::preset(model).expect("a preset");
            let shape = ir::program::Dims::from(&model.graph);
            let shipped = corpus::shipped(&shape, &target, context)[0].shipped;
            let config = ir::schedule::read_config(shipped.schedule, &model.graph, &target);
            let config = *config.expect("a legal schedule");
            let got = spread(config, &model.graph, &target, lanes);
            assert_eq!(got.tiling.attention.kv_split, splits, "{}", model.graph.name);
            let mut back = got;
            back.tiling.attention.kv_split = config.tiling.attention.kv_split;
            assert_eq!(back, config, "nothing else changes");
            assert!(validate(got, &model.graph, &target).is_ok());
        }
    }
}
