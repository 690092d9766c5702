//! Tests shipped schedules and the bundles that prove them.

use corpus::Shipped;
use ir::Target;
use ir::program::GraphShape;
use search::{Bundle, Refusal};

const RENEW: &str = "renew it on the card: amk bench --model MODEL --context CONTEXT --device cuda --peers none \
    --config corpus/schedules/TARGET/MODEL/CONTEXT.json --bundle corpus/schedules/TARGET/MODEL/CONTEXT.bundle.json";

fn name(shipped: &Shipped) -> String {
    format!("{}/{}/{}", shipped.target, shipped.folder, shipped.context)
}

#[test]
fn every_bundle_holds_and_is_of_the_schedule_beside_it() {
    for shipped in corpus::all_shipped() {
        let Some(text) = shipped.bundle else { continue };
        let name = name(shipped);
        let bundle = Bundle::read(text).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
        let target = Target::by_name(shipped.target).expect("a target of the table");
        let graph = model::preset(&bundle.model).expect("a preset").graph;
        let beside = ir::schedule::read_config(shipped.schedule, &graph, &target);
        assert_eq!(bundle.config, *beside.expect("it is legal"), "{name} is of another schedule");
        let of = (bundle.target.as_str(), GraphShape::from(&graph), bundle.context);
        assert_eq!(of, (shipped.target, shipped.shape, shipped.context), "{name}");
        match bundle.rebuild(&graph, &target) {
            // Of an older program: a release measures it again (.ci/release), a build need not.
            Ok(_) => {}
            Err(Refusal::Stale(why)) if why.contains("lowers to program") => {}
            Err(refusal) => panic!("{name}: {refusal}; {RENEW}"),
        }
    }
}

#[test]
fn every_schedule_has_a_bundle() {
    let all = corpus::all_shipped();
    assert!(!all.is_empty(), "no schedule is shipped");
    let without: Vec<_> = all.iter().filter(|shipped| shipped.bundle.is_none()).map(name).collect();
    assert!(without.is_empty(), "no bundle for {without:?}; {RENEW}");
}
