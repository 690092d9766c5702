//! `--tune-plant`: two levers that a search must not keep, so that a test on a card sees both ways in which one ends.

use ir::ScheduleConfig;
use ir::schedule::{Knob, legal_values};

use crate::context::Context;
use crate::schedule_choice::for_steps;

/// The levers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plant {
    /// The schedule that serves, with the shortest ring and the longest sleeps between polls.
    pub(super) slow: ScheduleConfig,
    /// The rule-based default, which is fast. Its gate before a switch gets wrong values.
    pub(super) wrong: ScheduleConfig,
}

impl Plant {
    pub(super) fn of(context: &Context, start: &ScheduleConfig) -> Self {
        let legal = |knob| legal_values(knob, context.graph(), &context.target);
        let least = legal(Knob::PipelineStages).first().copied();
        let longest = legal(Knob::KernelPollSleepNs).last().copied();
        let mut slow = *start;
        for (knob, value) in [(Knob::PipelineStages, least), (Knob::KernelPollSleepNs, longest)] {
            // A value of the knob's own list: it is set.
            let _ = value.map(|value| slow.set(knob, value));
        }
        search::fit_caps(&mut slow);
        Self { slow, wrong: for_steps(context, context.default_config()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::PlaceArgs;

    /// An illegal lever would be skipped, and a test on a card would see another trial in its place.
    #[test]
    fn planted_levers_are_legal_and_new_from_the_neutral_start() {
        for (model, seqs) in [("toy", 1), ("toy", 8), ("smollm2-135m", 1), ("smollm2-135m", 8)] {
            let context = Context::load(model, &PlaceArgs::default());
            let context = context.and_then(|context| context.for_steps_of(seqs));
            let context = context.unwrap_or_else(|failure| panic!("{}", failure.message));
            let start = for_steps(&context, context.neutral_config());
            let Plant { slow, wrong } = Plant::of(&context, &start);
            for lever in [slow, wrong] {
                let legal = ir::schedule::validate(lever, context.graph(), &context.target);
                assert!(legal.is_ok(), "{model} {seqs}: {legal:?}");
            }
            assert!(slow != start && wrong != start && slow != wrong, "{model} {seqs}");
        }
    }
}
