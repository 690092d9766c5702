//! The schedule of a program that several sessions share.

use ir::schedule::{ScheduleConfig, Value, legal_values, validate};
use ir::{Graph, Knob, Target};

/// The schedule with as many splits of the keys as there are workers for. One session at a short context is fastest with few: it has work for
/// one or two, and each further one is a hand-off more. Lanes take their first splits on different workers (decision 022), so eight of them at
/// a short context keep eight times as many busy. A schedule that a knob's value makes illegal stays as it is.
pub(crate) fn spread(config: ScheduleConfig, graph: &Graph, target: &Target) -> ScheduleConfig {
    let knob = Knob::TilingAttentionKvSplit;
    let most = target.sms / graph.kv_heads.max(1);
    let values = legal_values(knob, graph, target).into_iter();
    let fitting = values.filter_map(|value| match value {
        Value::Number(splits) if u64::from(splits) <= u64::from(most) => Some(value),
        _ => None,
    });
    let mut best = config;
    for value in fitting {
        let mut tried = config;
        if tried.set(knob, value).is_ok() && validate(tried, graph, target).is_ok() {
            best = tried;
        }
    }
    if best.tiling.attention.kv_split < config.tiling.attention.kv_split { config } else { best }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_contexts_get_a_split_for_each_worker() {
        let target = Target::by_name("h200").expect("a known target");
        for (model, context, splits) in
            [("llama-3.2-1b", 128, 16), ("llama-3.2-1b", 16_384, 16), ("smollm2-135m", 128, 32)]
        {
            let model = model::preset(model).expect("a preset");
            let shipped = corpus::shipped("h200", &model.graph.name, context).expect("shipped");
            let config = ir::schedule::read_config(shipped.schedule, &model.graph, &target);
            let config = *config.expect("a legal schedule");
            let got = spread(config, &model.graph, &target);
            assert_eq!(got.tiling.attention.kv_split, splits, "{}", model.graph.name);
            let mut back = got;
            back.tiling.attention.kv_split = config.tiling.attention.kv_split;
            assert_eq!(back, config, "nothing else changes");
            assert!(validate(got, &model.graph, &target).is_ok());
        }
    }
}
