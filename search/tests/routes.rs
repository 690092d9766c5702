//! Devices that choose other experts than the graph: within rounding they are followed, beyond it they are refused.

use std::path::Path;
use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::{KernelConfig, neutral_config};
use ir::{BufferId, FeedForward, Graph, Target, TensorId, Weights};
use model::Model;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::routes::{Routed, Routes, places};
use search::{
    Contender, Device, DeviceError, DeviceInfo, Expected, Gate, Handle, Plan, Ran, Samples, Timing,
    Verdict, assess,
};

const SEED: u64 = 5;
/// The cache's capacity: the reference VM runs so small a model at all of them, and so does the device.
const POSITIONS: u32 = 64;

/// A mixture whose first two experts have the same router row in every layer, so that each can stand for the other.
struct Mixture {
    model: Model,
    rows: Vec<(TensorId, Vec<u8>)>,
}

impl Mixture {
    fn new() -> Self {
        let folder = tests::root().join("corpus/families/qwen3-moe-bf16");
        let model = model::import(Path::new(&folder)).unwrap();
        let mut rows = Vec::new();
        for layer in &model.graph.layers {
            let FeedForward::Experts(experts) = &layer.mlp.body else { continue };
            let mut bytes = model.weights.bytes(experts.router.weight).to_vec();
            let row = bytes.len() / experts.experts.len();
            bytes.copy_within(..row, row);
            rows.push((experts.router.weight, bytes));
        }
        Self { model, rows }
    }

    fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// The graph's own routes on the gate's tokens.
    fn routed(&self, tokens: &[u32]) -> Routed {
        let mut evaluator = Evaluator::new(self.graph(), self).unwrap().recording_routes();
        evaluator.run(tokens, Logits::Skip).unwrap();
        evaluator.routed().unwrap()
    }
}

impl Weights for Mixture {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        let changed = self.rows.iter().find(|(id, _)| *id == tensor);
        changed.map_or_else(|| self.model.weights.bytes(tensor), |(_, bytes)| bytes)
    }
}

/// Routes with one set changed.
fn changed(
    routed: &Routed,
    at: (usize, usize),
    change: impl Fn(&[u32], &[f32]) -> Vec<u32>,
) -> Routes {
    let layers = routed.routes.layers();
    let mut routes = Routes::new(layers);
    for position in 0..routed.routes.positions() {
        routes.push((0..layers).map(|layer| {
            let set = routed.routes.set(position, layer).unwrap();
            match (position, layer) == at {
                true => change(set, &routed.logits[position * layers + layer]),
                false => set.to_vec(),
            }
        }));
    }
    routes
}

/// A device that takes these routes, and says that it took those.
struct Routing<'a> {
    mixture: &'a Mixture,
    takes: Routes,
    says: Routes,
    position: usize,
    steps: usize,
}

impl Routing<'_> {
    fn rows(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let evaluator = Evaluator::new(self.mixture.graph(), self.mixture).unwrap();
        evaluator.on_routes(0, self.takes.clone()).run(tokens, Logits::All).unwrap()
    }
}

impl Device for Routing<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo { name: "routes".to_owned(), ..DeviceInfo::default() }
    }

    fn prepare(
        &mut self,
        _: &Arc<Verified<Program>>,
        _: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        Ok(Handle(0))
    }

    fn run(&mut self, _: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        self.position = tokens.len() - 1;
        self.steps += 1;
        let logits = self.rows(tokens).split_off(first);
        let chosen = logits.iter().map(|row| reference_vm::argmax(row)).collect();
        Ok(Ran { logits, chosen, ..Ran::default() })
    }

    fn buffers(
        &mut self,
        _: Handle,
        which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        let words = |layer: usize| {
            let set = self.says.set(self.position, layer).unwrap_or_default();
            let numbers = set.iter().map(|&expert| expert as f32);
            numbers.chain(set.iter().map(|_| 0.5)).collect()
        };
        Ok(Some((0..which.len()).map(words).collect()))
    }

    fn time(&mut self, _: [Contender<'_>; 2], plan: &Plan<'_>) -> Result<Samples, DeviceError> {
        let last = self.rows(plan.tokens).pop().unwrap();
        let chosen = reference_vm::argmax(&last);
        let rounds = vec![[100.0; 4]; plan.rounds];
        let (last_logits, last_chosen) = ([last.clone(), last], [chosen; 2]);
        Ok(Samples { rounds, last_logits, last_chosen, ..Samples::default() })
    }

    fn release(&mut self, _: &Arc<Verified<Program>>, _: &KernelConfig) {}
}

/// The gate's verdict on a device, by the routes that it takes and says, made from the graph's own.
fn verdict(devices: impl Fn(&Routed) -> [Routes; 2]) -> (Verdict, usize) {
    let (mut verdicts, steps) = verdicts(|own| vec![devices(own)]);
    (verdicts.remove(0), steps)
}

/// The verdicts of one gate on several devices, one after the other, and the steps that they ran.
fn verdicts(devices: impl Fn(&Routed) -> Vec<[Routes; 2]>) -> (Vec<Verdict>, usize) {
    let mixture = Mixture::new();
    let target = Target::by_name("h200").unwrap();
    let expected = Expected::new(mixture.graph(), &mixture, POSITIONS, SEED, Some(24)).unwrap();
    let devices = devices(&mixture.routed(&expected.tokens));
    let options = lower::Options { kv_capacity: 64 };
    let mut gate =
        Gate::new(mixture.graph(), &mixture, &target, options, &KernelConfig::id, expected);
    let config = neutral_config(mixture.graph(), &target);
    let timing = Timing { rounds: 4, warmup: 0 };
    let mut steps = 0;
    let judge = |[takes, says]: [Routes; 2]| {
        let mut device = Routing { mixture: &mixture, takes, says, position: 0, steps: 0 };
        let judged = assess::evaluate(&mut gate, Some(&mut device), &config, timing, SEED);
        steps += device.steps;
        judged.0
    };
    let verdicts = devices.into_iter().map(judge).collect();
    (verdicts, steps)
}

/// A place where exactly one of the two equal experts is chosen, so that the other is as good.
fn tied(routed: &Routed) -> (usize, usize) {
    *all_tied(routed).first().expect("a tie at the border of a route")
}

fn all_tied(routed: &Routed) -> Vec<(usize, usize)> {
    let layers = routed.routes.layers();
    let places = (0..routed.routes.positions()).flat_map(|p| (0..layers).map(move |l| (p, l)));
    let one = |set: &[u32]| set.contains(&0) != set.contains(&1);
    places.filter(|&(p, l)| one(routed.routes.set(p, l).unwrap())).collect()
}

fn swapped(set: &[u32], _: &[f32]) -> Vec<u32> {
    set.iter().map(|&expert| if expert < 2 { 1 - expert } else { expert }).collect()
}

/// The best expert replaced by the worst.
fn worse(set: &[u32], logits: &[f32]) -> Vec<u32> {
    let by = |a: &u32, b: &u32| logits[*a as usize].total_cmp(&logits[*b as usize]);
    let (best, all) = (set.iter().copied().max_by(by).unwrap(), 0..logits.len() as u32);
    let worst = all.min_by(by).unwrap();
    set.iter().map(|&expert| if expert == best { worst } else { expert }).collect()
}

#[test]
fn a_device_on_the_graphs_own_routes_agrees_step_by_step() {
    let (verdict, steps) = verdict(|own| [own.routes.clone(), own.routes.clone()]);
    assert!(verdict.correct, "{verdict:?}");
    assert_eq!(steps, 2 * POSITIONS as usize);
    let said = verdict.notes.iter().any(|note| note.contains("choices of experts are the graph's"));
    assert!(said, "{:?}", verdict.notes);
}

#[test]
fn a_choice_within_rounding_is_followed_and_said() {
    let (verdict, _) = verdict(|own| {
        let routes = changed(own, tied(own), swapped);
        [routes.clone(), routes]
    });
    assert!(verdict.correct, "{verdict:?}");
    let said = verdict.notes.iter().any(|note| note.contains("other ones than the graph's"));
    assert!(said, "{:?}", verdict.notes);
}

#[test]
fn a_choice_that_nothing_explains_is_refused_by_its_place() {
    let (verdict, _) = verdict(|own| {
        let routes = changed(own, (7, 1), worse);
        [routes.clone(), routes]
    });
    assert!(!verdict.correct);
    let reason = verdict.rejected_reason.unwrap();
    assert!(reason.contains("experts were chosen at position 7, layer 1"), "{reason}");
}

#[test]
fn a_device_that_lies_about_its_routes_has_other_values() {
    for lie in [false, true] {
        let (verdict, _) = verdict(|own| {
            let (honest, other) = (own.routes.clone(), changed(own, tied(own), swapped));
            if lie { [honest, other] } else { [other, honest] }
        });
        let reason = verdict.rejected_reason.unwrap();
        assert!(reason.contains("device disagrees with the graph: logits differ"), "{reason}");
    }
}

/// What is known of earlier devices' routes serves later ones, and never in place of their own.
#[test]
fn devices_one_after_the_other_are_each_judged_on_their_own_routes() {
    let (found, _) = verdicts(|own| {
        let ties = all_tied(own);
        let at = |place: (usize, usize)| changed(own, place, swapped);
        let later = *ties.iter().find(|place| place.0 >= 24).expect("a tie behind the first stage");
        let (early, late, last) = (at(ties[0]), at(later), at(*ties.last().unwrap()));
        let honest = [&early, &late, &own.routes, &last, &early, &late];
        let mut devices: Vec<_> = honest.map(|routes| [routes.clone(), routes.clone()]).into();
        // By now all of these are known.
        devices.push([early.clone(), late.clone()]);
        devices.push([late.clone(), early.clone()]);
        devices.push([own.routes.clone(), last.clone()]);
        devices.push([last, own.routes.clone()]);
        devices.push([early.clone(), early]);
        devices
    });
    let correct: Vec<bool> = found.iter().map(|verdict| verdict.correct).collect();
    assert_eq!(correct[..6], [true; 6], "{:?}", found[0].rejected_reason);
    assert_eq!(correct[6..], [false, false, false, false, true]);
    for verdict in &found[6..10] {
        let reason = verdict.rejected_reason.as_ref().unwrap();
        assert!(reason.contains("device disagrees with the graph: logits differ"), "{reason}");
    }
}

/// Routes of the wrong length choose nothing worse than what they leave out, and are refused all the same.
#[test]
fn a_route_of_too_few_experts_is_refused() {
    let (verdict, _) = verdict(|own| {
        let routes = changed(own, (9, 0), |set, _| set[1..].to_vec());
        [routes.clone(), routes]
    });
    let reason = verdict.rejected_reason.unwrap();
    assert!(reason.contains("experts were chosen at position 9, layer 0"), "{reason}");
}

#[test]
fn the_graphs_own_routes_give_its_own_bits() {
    let mixture = Mixture::new();
    let target = Target::by_name("h200").unwrap();
    let expected = Expected::new(mixture.graph(), &mixture, POSITIONS, SEED, Some(24)).unwrap();
    let (tokens, logits) = (expected.tokens.clone(), expected.logits.clone());
    let options = lower::Options { kv_capacity: POSITIONS };
    let gate = Gate::new(mixture.graph(), &mixture, &target, options, &KernelConfig::id, expected);
    let rows = gate.follow(&tokens, &mixture.routed(&tokens).routes, None).unwrap();
    assert_eq!(rows, logits);
}

#[test]
fn a_program_has_one_place_for_each_layer_of_experts() {
    let mixture = Mixture::new();
    let target = Target::by_name("h200").unwrap();
    let config = neutral_config(mixture.graph(), &target);
    let config = ir::schedule::validate(config, mixture.graph(), &target).unwrap();
    let options = lower::Options { kv_capacity: 64 };
    let program = lower::lower(&config, mixture.graph(), &target, options).unwrap();
    let found = places(&program);
    assert_eq!(found.len(), mixture.rows.len());
    assert!(found.is_sorted_by_key(|place| place.layer));
}
