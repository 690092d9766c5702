//! What is taken over from a kept evaluation has the bits of an evaluation from the start, and is not computed again.

use ir::{FeedForward, Graph};
use model::{ExpertShape, Model, Options, Shape};
use reference_vm::eval::{Evaluator, Followed, Kept, Logits, Sharing};
use reference_vm::routes::Routes;

use crate::each_with_experts;

/// A model and tokens for it.
struct Case<'m> {
    model: &'m Model,
    tokens: Vec<u32>,
}

/// A kept evaluation with its logits.
type Known = (Kept, Vec<Vec<f32>>);

impl Case<'_> {
    fn graph(&self) -> &Graph {
        &self.model.graph
    }

    fn evaluator(&self) -> Evaluator<'_> {
        Evaluator::new(self.graph(), &*self.model.weights).unwrap()
    }

    /// On the graph's own routes.
    fn own(&self) -> Known {
        let mut evaluator = self.evaluator().keeping();
        // In two parts, as the gate's segments are.
        let (first, rest) = self.tokens.split_at(7);
        let mut rows = evaluator.run(first, Logits::All).unwrap();
        rows.extend(evaluator.run(rest, Logits::All).unwrap());
        (evaluator.into_kept(&self.tokens).unwrap(), rows)
    }

    /// Follows routes over the first tokens, and compares with an evaluation that takes nothing over.
    fn follow(&self, routes: &Routes, kept: &[&Known]) -> (Known, usize) {
        let tokens = &self.tokens[..routes.positions()];
        let kept: Vec<_> = kept.iter().map(|(kept, rows)| Sharing { kept, rows }).collect();
        let found = self.evaluator().run_sharing(tokens, routes, &kept).unwrap();
        let Followed { rows, kept, computed } = found;
        let kept = kept.unwrap();
        let mut fresh = self.evaluator().on_routes(0, routes.clone()).keeping();
        assert_eq!(rows, fresh.run(tokens, Logits::All).unwrap());
        assert_eq!(*kept.routed(), fresh.routed().unwrap());
        assert_eq!(kept.routed().routes, *routes);
        // All that a next one may take over.
        let fresh = fresh.into_kept(tokens).unwrap();
        assert_eq!(format!("{:?}", kept.inputs()), format!("{:?}", fresh.inputs()));
        assert_eq!(kept.bytes(), fresh.bytes());
        ((kept, rows), computed)
    }

    /// The numbers of the layers with experts.
    fn expert_layers(&self) -> Vec<usize> {
        let layers = self.graph().layers.iter().enumerate();
        let experts = layers.filter(|(_, l)| matches!(l.mlp.body, FeedForward::Experts(_)));
        experts.map(|(index, _)| index).collect()
    }

    /// The same routes with another expert at each of these places, of the first `positions`.
    fn changed(&self, routes: &Routes, positions: usize, at: &[(usize, usize)]) -> Routes {
        let FeedForward::Experts(experts) = &self.graph().layers[self.expert_layers()[0]].mlp.body
        else {
            unreachable!("a layer with experts")
        };
        let count = experts.experts.len() as u32;
        let mut changed = Routes::new(routes.layers());
        for position in 0..positions {
            changed.push((0..routes.layers()).map(|layer| {
                let mut set = routes.set(position, layer).unwrap().to_vec();
                if at.contains(&(position, layer)) {
                    set[0] = (0..count).find(|expert| !set.contains(expert)).unwrap();
                }
                set
            }));
        }
        changed
    }
}

fn check(case: &Case<'_>) {
    let (all, layers) = (case.tokens.len(), case.graph().layers.len());
    let experts = case.expert_layers();
    let last = experts.len() - 1;
    let own = case.own();
    let routes = own.0.routed().routes.clone();
    // The same routes: nothing is computed, of all positions or of some.
    for positions in [all, 20] {
        let (_, computed) = case.follow(&case.changed(&routes, positions, &[]), &[&own]);
        assert_eq!(computed, 0);
    }
    // One choice: this layer and those behind it, from its position on.
    for (position, layer) in [(0, 0), (11, last), (all - 1, 0), (30, last / 2)] {
        let one = case.changed(&routes, all, &[(position, layer)]);
        let (_, computed) = case.follow(&one, &[&own]);
        assert_eq!(computed, (all - position) * (layers - experts[layer]));
        assert_eq!(case.follow(&one, &[]).1, all * layers, "nothing to take over");
    }
    // A first stage, then all positions: each layer takes over from whichever has more of it.
    let both = [(5, last), (25, 0)];
    let (stage, computed) = case.follow(&case.changed(&routes, 20, &both), &[&own]);
    assert_eq!(computed, 15 * (layers - experts[last]));
    let (whole, computed) = case.follow(&case.changed(&routes, all, &both), &[&own, &stage]);
    let before = experts[last] - experts[0];
    assert_eq!(computed, (all - 25) * before + (all - 20) * (layers - experts[last]));
    // From what was itself taken over, and back.
    let (_, computed) = case.follow(&case.changed(&routes, all, &[(5, last), (40, 0)]), &[&whole]);
    assert_eq!(computed, (all - 25) * (layers - experts[0]));
    let (_, computed) = case.follow(&routes, &[&whole, &stage]);
    assert_eq!(
        computed,
        (all - 25) * before + (all - 5) * (layers - experts[last]),
        "the graph's own routes"
    );
    assert_eq!(case.follow(&routes, &[&whole, &own]).1, 0);
}

#[test]
fn what_other_routes_do_not_change_is_taken_over() {
    each_with_experts(|_, golden| {
        check(&Case { model: &golden.model, tokens: golden.tokens.clone() });
    });
}

#[test]
fn layers_without_experts_between_those_with_some_are_taken_over_too() {
    let experts = ExpertShape {
        count: 6,
        top_k: 2,
        ffn: 64,
        shared: None,
        normalised: true,
        dense: vec![true, false, true, false],
    };
    let options = Options { experts: Some(experts), ..Options::default() };
    let family = model::Family::Qwen3Moe;
    let model = Model::random(Shape { family, layers: 4, options, ..Shape::default() }, 3);
    let tokens = (0..48).map(|i| i * 37 % model.graph.vocab).collect();
    check(&Case { model: &model, tokens });
}

/// Other tokens have other values whatever their routes, and a kept evaluation of them is worth their common beginning.
#[test]
fn only_equal_tokens_are_taken_over() {
    each_with_experts(|_, golden| {
        let case = Case { model: &golden.model, tokens: golden.tokens.clone() };
        let own = case.own();
        let mut tokens = case.tokens.clone();
        tokens[30] = (tokens[30] + 1) % case.graph().vocab;
        let other = Case { tokens, ..case };
        let (_, computed) = other.follow(&own.0.routed().routes, &[&own]);
        assert_eq!(computed, (48 - 30) * other.graph().layers.len());
    });
}
