//! Draws of a survey, and what may become a row, on a scripted device.

use std::collections::BTreeSet;

use ir::Target;
use ir::schedule::{KernelConfig, Knob, ScheduleConfig, default_config, validate};
use model::Model;
use search::scripted::{Behaviour, ScriptedDevice};
use search::survey::{Drawn, Passage, Survey, observe};
use search::{Dropped, Expected, Gate, Timing, changes};

const KV_CAPACITY: u32 = 24;

fn model(name: &str) -> (Model, Target) {
    (model::preset(name).unwrap(), Target::by_name("h200").unwrap())
}

#[test]
fn draws_are_legal_repeatable_and_cover_every_knob() {
    let (model, target) = model("llama-3.2-1b");
    let known = [default_config(&model.graph, &target)];
    let survey = |seed| Survey { graph: &model.graph, target: &target, known: &known, seed };
    let draws: Vec<_> = survey(1).draws().take(200).collect();
    assert_eq!(draws, survey(1).draws().take(200).collect::<Vec<_>>());
    assert_ne!(draws[..10], survey(2).draws().take(10).collect::<Vec<_>>()[..]);
    for (drawn, config) in &draws {
        assert!(validate(*config, &model.graph, &target).is_ok());
        if let Drawn::Near { of, edits } = drawn {
            assert_eq!(*of, known[0].id());
            // The caps of the ring may follow a changed size.
            assert!((1..=6).contains(edits), "{edits} edits");
            assert_eq!(*edits, changes(&known[0], config).len());
        }
    }
    let wide = draws.iter().filter(|(drawn, _)| *drawn == Drawn::Wide);
    assert_eq!(wide.clone().count(), 100);
    for &knob in Knob::ALL {
        let values: BTreeSet<_> = wide.clone().map(|(_, config)| config.get(knob)).collect();
        assert!(values.len() > 1, "{knob} never varies");
    }
}

/// Observes the neutral schedule of the toy model on a device that behaves like this.
fn observed(behaviour: &Behaviour, context: usize) -> Result<(f64, usize), Dropped> {
    let (model, target) = model("toy");
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 1, Some(144)).unwrap();
    let logits = expected().logits;
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let mut gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected());
    let passage = Passage {
        tokens: expected().tokens[..context + 4].to_vec(),
        first: context,
        last: logits[context + 3].clone(),
    };
    let mut device = ScriptedDevice::new(logits, 1, |_, _| behaviour.clone());
    let config: ScheduleConfig = default_config(graph, &target);
    let candidate = gate.lower(gate.validate(&config)?)?;
    let timing = Timing { rounds: 4, warmup: 1 };
    let timed = observe(&mut gate, &mut device, candidate, &passage, timing, 3)?;
    Ok((timed.latency.median_us(), timed.samples.rounds.len()))
}

#[test]
fn what_agrees_is_timed() {
    assert_eq!(observed(&Behaviour::takes(25.0), 8).unwrap(), (25.0, 4));
}

#[test]
fn what_disagrees_has_no_row() {
    let right = Behaviour::takes(25.0);
    let late = Behaviour { wrong_from: Some(20), ..right.clone() };
    assert!(matches!(observed(&late, 8), Err(Dropped::Disagreed { by: "device", .. })));
    let timed = Behaviour { wrong_when_timed: true, ..right };
    assert!(matches!(observed(&timed, 8), Err(Dropped::Disagreed { by: "timed", .. })));
}
