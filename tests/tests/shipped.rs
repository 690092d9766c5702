//! Shipped schedules and the bundles that prove them.

use std::collections::BTreeSet;

use corpus::Shipped;
use ir::Target;
use search::Bundle;

/// Schedules whose measurement is still to be made. A new one must not be added without its bundle: this list only gets shorter.
const WITHOUT_BUNDLE: &[(&str, &str, u32)] = &[];

const RENEW: &str = "renew it on the card: amk bench --model MODEL --context CONTEXT --device cuda --peers none \
    --config corpus/schedules/TARGET/MODEL/CONTEXT.json --bundle corpus/schedules/TARGET/MODEL/CONTEXT.bundle.json";

fn name(shipped: &Shipped) -> String {
    format!("{}/{}/{}", shipped.target, shipped.model, shipped.context)
}

#[test]
fn every_bundle_holds_and_is_of_the_schedule_beside_it() {
    for shipped in corpus::all_shipped() {
        let Some(text) = shipped.bundle else { continue };
        let name = name(shipped);
        let bundle = Bundle::read(text).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
        let target = Target::by_name(shipped.target).expect("a target of the table");
        let graph = model::preset(shipped.model).expect("a preset").graph;
        let beside = ir::schedule::read_config(shipped.schedule, &graph, &target);
        assert_eq!(bundle.config, *beside.expect("it is legal"), "{name} is of another schedule");
        let of = (bundle.target.as_str(), bundle.model.as_str(), bundle.context);
        assert_eq!(of, (shipped.target, shipped.model, shipped.context), "{name}");
        if let Err(refusal) = bundle.rebuild(&graph, &target) {
            panic!("{name}: {refusal}; {RENEW}");
        }
    }
}

#[test]
fn every_schedule_has_a_bundle() {
    let without = corpus::all_shipped().iter().filter(|shipped| shipped.bundle.is_none());
    let without: BTreeSet<_> = without.map(|s| (s.target, s.model, s.context)).collect();
    let known: BTreeSet<_> = WITHOUT_BUNDLE.iter().copied().collect();
    let new: Vec<_> = without.difference(&known).collect();
    assert!(new.is_empty(), "no bundle for {new:?}; {RENEW}");
    let proven: Vec<_> = known.difference(&without).collect();
    assert!(
        proven.is_empty(),
        "take {proven:?} out of WITHOUT_BUNDLE: it has its bundle, or is gone"
    );
}
