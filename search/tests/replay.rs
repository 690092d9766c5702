//! Replays of trials, on a scripted device and without one.

use std::time::Duration;

use ir::Target;
use ir::schedule::{KernelConfig, Knob};
use model::Model;
use search::replay::{Place, Repeated, Stage, replay};
use search::{Budget, Device, Expected, Gate, Search, Settings, Step, Timing, Trial};
use tests::scripted::{Behaviour, ScriptedDevice};

/// A way to change a record.
type Forge = fn(&mut Trial);

const KV_CAPACITY: u32 = 24;

fn expected(model: &Model) -> Expected {
    Expected::new(&model.graph, &*model.weights, KV_CAPACITY, 1, Some(144)).unwrap()
}

fn device<'a>(model: &Model, us: f64) -> ScriptedDevice<'a> {
    let behaves = move |_: &_, _: &_| Behaviour::takes(us).with_noise(0.002);
    ScriptedDevice::new(expected(model).logits, 7, behaves)
}

struct Bench {
    model: Model,
    target: Target,
}

impl Bench {
    fn new() -> Self {
        let target = Target::by_name("h200").unwrap();
        Self { model: model::preset("toy").unwrap(), target }
    }

    fn gate(&self) -> Gate<'_> {
        let options = lower::Options { kv_capacity: KV_CAPACITY };
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        Gate::new(graph, weights, &self.target, options, &KernelConfig::id, expected(&self.model))
    }

    /// The trials of a search with two trials.
    fn trials<'a>(&'a self, device: Option<&'a mut (dyn Device + 'a)>) -> Vec<Trial> {
        let (graph, target) = (&self.model.graph, &self.target);
        let values = |knob| (knob, ir::schedule::legal_values(knob, graph, target));
        let settings = Settings {
            seed: 5,
            budget: Budget::Trials(2),
            explore: 1,
            min_gain: 0.01,
            default: ir::schedule::neutral_config(graph, target),
            space: [Knob::SyncQkv, Knob::PipelineStages].map(values).to_vec(),
            timing: Timing::default(),
            finalists: 0,
            simplest: None,
        };
        let mut search = Search::new(self.gate(), device, settings);
        while let Step::Trial(_) = search.step(Duration::ZERO).unwrap() {}
        search.trials().to_vec()
    }

    fn again(&self, place: Place<'_, '_>, trial: &Trial) -> Vec<Stage> {
        replay(&mut self.gate(), place, trial, 0.001, 9).unwrap()
    }
}

fn results(stages: &[Stage]) -> Vec<(&'static str, Repeated)> {
    stages.iter().map(|stage| (stage.stage, stage.result)).collect()
}

fn last(stages: &[Stage]) -> (&'static str, Repeated) {
    results(stages)[stages.len() - 1]
}

#[test]
fn a_predicted_trial_is_repeated_exactly() {
    let bench = Bench::new();
    let nowhere = || Place::Elsewhere("no device".to_owned());
    for trial in bench.trials(None) {
        let stages = bench.again(nowhere(), &trial);
        let names = ["schedule", "program", "kernel", "reference", "predict"];
        assert_eq!(results(&stages), names.map(|name| (name, Repeated::Same)), "{stages:?}");
        let edits: [(&str, Forge); 5] = [
            ("schedule", |t| t.verdict.schedule_id = Some("0".into())),
            ("program", |t| t.verdict.program_id = Some("0".into())),
            ("kernel", |t| t.verdict.kernel_id = None),
            ("reference", |t| t.verdict.max_abs_err = Some(0.5)),
            ("predict", |t| t.verdict.latency_us = t.verdict.latency_us.map(|us| us * 1.000_001)),
        ];
        for (stage, edit) in edits {
            let mut forged = trial.clone();
            edit(&mut forged);
            let differs: Vec<_> = results(&bench.again(nowhere(), &forged));
            let wrong: Vec<_> = differs.iter().filter(|(_, r)| *r == Repeated::Differs).collect();
            assert_eq!(wrong, [&(stage, Repeated::Differs)]);
        }
    }
}

#[test]
fn a_measured_trial_is_measured_again_on_its_card_only() {
    let bench = Bench::new();
    let trials = bench.trials(Some(&mut device(&bench.model, 100.0)));
    let baseline = &trials[0];
    let stages = bench.again(Place::Here(&mut device(&bench.model, 100.0)), baseline);
    assert!(stages.iter().all(|stage| stage.result == Repeated::Same), "{stages:?}");
    for us in [97.0, 103.0] {
        let stages = bench.again(Place::Here(&mut device(&bench.model, us)), baseline);
        assert_eq!(last(&stages), ("measure", Repeated::Differs), "{us}: {stages:?}");
    }
    let stages = bench.again(Place::Elsewhere("the card was another".into()), baseline);
    assert_eq!(last(&stages), ("measure", Repeated::Skipped));
    assert_eq!(stages[stages.len() - 1].detail, "the card was another");
    // A program other than the recorded one is not timed.
    let mut other = baseline.clone();
    other.verdict.program_id = Some("0".into());
    let mut card = device(&bench.model, 100.0);
    let stages = bench.again(Place::Here(&mut card), &other);
    assert_eq!((last(&stages), card.timings), (("measure", Repeated::Skipped), 0));
    // Wrong values are a difference, whatever the latency.
    let expected = expected(&bench.model).logits;
    let wrong = |_: &_, _: &_| Behaviour { wrong: true, ..Behaviour::takes(100.0) };
    let mut card = ScriptedDevice::new(expected, 7, wrong);
    let stages = bench.again(Place::Here(&mut card), baseline);
    assert_eq!(last(&stages), ("measure", Repeated::Differs), "{stages:?}");
}
