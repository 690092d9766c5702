//! Schedules that were found and are shipped: what `bench` and `generate` use when no schedule is named.

/// A schedule that is shipped for a model on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// The GPU.
    pub target: &'static str,
    /// The model.
    pub model: &'static str,
    /// Tokens of context that it was found at.
    pub context: u32,
    /// The schedule as JSON. It may have been found for other dimensions than those of a folder of the same name, so it must be
    /// validated like any other.
    pub schedule: &'static str,
    /// What proves it, as JSON.
    pub bundle: Option<&'static str>,
}

/// Every file of `schedules/`, by target, model and name.
const SHIPPED: &[Shipped] = include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// Every shipped schedule.
#[must_use]
pub fn all_shipped() -> &'static [Shipped] {
    SHIPPED
}

/// The schedule for a model on a target at so many tokens of context, if one is shipped: the one whose context is nearest by ratio,
/// the smaller of two. What a schedule must get right, how many workers share the keys of a head, goes with the logarithm of the
/// context: 1 900 tokens want what 2 048 want, and not what 128 want.
#[must_use]
pub fn shipped(target: &str, model: &str, context: u32) -> Option<&'static Shipped> {
    nearest(SHIPPED, target, model, context)
}

fn nearest<'a>(all: &'a [Shipped], target: &str, model: &str, context: u32) -> Option<&'a Shipped> {
    let log = |tokens: u32| f64::from(tokens.max(1)).ln();
    let distance = |shipped: &&Shipped| (log(shipped.context) - log(context)).abs();
    let candidates =
        all.iter().filter(|shipped| shipped.target == target && shipped.model == model);
    candidates.min_by(|a, b| distance(a).total_cmp(&distance(b)).then(a.context.cmp(&b.context)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_schedules_are_json_objects_and_found_by_their_names() {
        for shipped in SHIPPED {
            let found = super::shipped(shipped.target, shipped.model, shipped.context);
            assert_eq!(found, Some(shipped));
            let parsed: serde_json::Value =
                serde_json::from_str(shipped.schedule).expect(shipped.model);
            assert!(parsed.is_object(), "{shipped:?}");
        }
        assert!(SHIPPED.len() >= 4, "the schedules under corpus/schedules/ are listed");
        assert_eq!(shipped("h200", "toy", 128), None);
        assert_eq!(shipped("toy", "llama-3.2-1b", 128), None);
    }

    #[test]
    fn the_nearest_context_by_ratio_is_chosen() {
        let at =
            |context| Shipped { target: "gpu", model: "m", context, schedule: "{}", bundle: None };
        let all = [at(128), at(16384), at(2048), Shipped { model: "other", ..at(1024) }];
        let found = |context| nearest(&all, "gpu", "m", context).map(|shipped| shipped.context);
        let cases = [
            (0, 128),
            (1, 128),
            (128, 128),
            (511, 128),
            (512, 128),
            (513, 2048),
            (1900, 2048),
            (5792, 2048),
            (5793, 16384),
            (u32::MAX, 16384),
        ];
        for (context, expected) in cases {
            assert_eq!(found(context), Some(expected), "context {context}");
        }
    }
}
