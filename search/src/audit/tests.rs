//! Rows forged as consistently as possible, and the audit's findings.

use std::time::Duration;

use ir::Knob;
use ir::Target;
use ir::schedule::KernelConfig;

use super::*;
use crate::budget::Budget;
use crate::expected::Expected;
use crate::gate::Gate;
use crate::run::{Search, Step};
use crate::scripted::{Behaviour, ScriptedDevice};
use crate::settings::Settings;

const KV_CAPACITY: u32 = 32;

/// A search of the toy model that keeps its second schedule, with the parameters that its audit needs.
struct Ran {
    trials: Vec<Trial>,
    confirmation: Confirmation,
    terms: Terms,
    bound: RooflineBound,
}

fn ran(measured: bool) -> Ran {
    let model = model::preset("toy").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let target = Target::by_name("h200").unwrap();
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 1, Some(32)).unwrap();
    let next = std::cell::Cell::new(100.0);
    let script = |_: &_, _: &_| Behaviour::takes(next.replace(90.0)).with_noise(0.002);
    let mut device = ScriptedDevice::new(expected().logits, 1, script).with_bandwidth(4.6e12);
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected());
    let knobs = [Knob::SyncDown, Knob::PipelineStages, Knob::KernelPollSleepNs];
    let space = knobs.map(|knob| (knob, ir::schedule::legal_values(knob, graph, &target)));
    let (seed, min_gain, timing) = (5, if measured { 0.01 } else { 0.001 }, Timing::default());
    let settings = Settings {
        seed,
        budget: Budget::Trials(if measured { 2 } else { 8 }),
        explore: 8,
        min_gain,
        default: ir::schedule::neutral_config(graph, &target),
        space: space.to_vec(),
        timing,
        finalists: 0,
        simplest: None,
    };
    let kind = if measured { LatencyKind::MeasuredGpu } else { LatencyKind::Predicted };
    let device = measured.then_some(&mut device as &mut dyn crate::device::Device);
    let mut search = Search::new(gate, device, settings);
    while let Step::Trial(_) = search.step(Duration::ZERO).unwrap() {}
    let confirmation = search.confirm().unwrap().expect("something leads");
    let trials = search.trials().to_vec();
    let bytes = StepBytes::of(graph, &target, KV_CAPACITY);
    let bound = RooflineBound { bytes, card: Some(target.clone()) };
    let terms = Terms { seed, min_gain, timing, kind: Some(kind), cache_bytes: 0 };
    Ran { trials, confirmation, terms, bound }
}

impl Ran {
    fn audit(&self) -> Result<(), String> {
        let mut audit = Audit::new(self.terms).with_bound(self.bound.clone());
        self.trials.iter().try_for_each(|trial| audit.trial(trial))?;
        audit.confirmation(&self.confirmation)
    }

    /// Asserts that the audit of an edited search fails with a reason that contains `is`.
    #[track_caller]
    fn refused(&self, is: &str) {
        let said = self.audit().expect_err(is);
        assert!(said.contains(is), "says {said:?}, not {is:?}");
    }
}

#[test]
fn honest_searches_pass() {
    for measured in [true, false] {
        let ran = ran(measured);
        assert!(ran.confirmation.champion > 0, "nothing was kept");
        assert_eq!(ran.audit(), Ok(()));
    }
}

#[test]
fn a_confirmation_passes_the_same_gates_as_a_trial() {
    type Forge = fn(&mut Confirmation);
    let forged: [(&str, Forge); 9] = [
        ("is not correct", |c| c.verdict.correct = false),
        ("the gate reference failed", |c| {
            let gate = c.verdict.gates.iter_mut().find(|gate| gate.gate == "reference");
            gate.unwrap().passed = false;
        }),
        ("the gate verify", |c| c.verdict.gates.retain(|gate| gate.gate != "verify")),
        ("no position", |c| c.positions = 0),
        ("another program", |c| c.verdict.program_id = Some("0".repeat(16))),
        ("another program", |c| c.verdict.schedule_id = None),
        ("its samples", |c| c.decision = Decision::Reverted),
        ("its threshold", |c| c.threshold = Some(0.5)),
        ("has no samples", |c| c.samples_us.clear()),
    ];
    for (is, forge) in forged {
        let mut measured = ran(true);
        forge(&mut measured.confirmation);
        measured.refused(is);
    }
    let forged: [(&str, Forge); 5] = [
        ("is not correct", |c| c.verdict.correct = false),
        ("the gate reference", |c| c.verdict.gates.retain(|gate| gate.gate != "reference")),
        ("no position", |c| c.positions = 0),
        ("a new latency", |c| c.verdict.latency_us = Some(1.0)),
        ("nothing failed", |c| c.decision = Decision::Reverted),
    ];
    for (is, forge) in forged {
        let mut predicted = ran(false);
        forge(&mut predicted.confirmation);
        predicted.refused(is);
    }
}

#[test]
fn a_confirmation_that_failed_a_gate_is_a_refusal_without_a_time() {
    let mut ran = ran(true);
    let confirmation = &mut ran.confirmation;
    confirmation.decision = Decision::Reverted;
    confirmation.verdict.correct = false;
    confirmation.verdict.failed("device", "it disagrees".to_owned());
    let samples = std::mem::take(&mut confirmation.samples_us);
    assert_eq!(ran.audit(), Ok(()));
    ran.confirmation.samples_us = samples;
    ran.refused("has samples");
}

/// A baseline of 0.001 µs with everything that follows from constant samples.
fn impossible(ran: &mut Ran) {
    ran.trials.truncate(1);
    let first = &mut ran.trials[0];
    first.samples_us.iter_mut().for_each(|round| *round = [0.001; 4]);
    first.noise_floor = Some(0.0);
    let verdict = &mut first.verdict;
    (verdict.latency_us, verdict.ci_us) = (Some(0.001), Some([0.001; 2]));
    verdict.pct_of_roofline = Some(100.0 * verdict.bound_us.unwrap() / 0.001);
}

#[test]
fn a_bound_follows_from_the_model_and_the_card_and_not_from_the_row() {
    type Forge = fn(&mut Ran);
    let forged: [(&str, Forge); 4] = [
        ("below the bound", |_| {}),
        ("is not that of", |ran| {
            let verdict = &mut ran.trials[0].verdict;
            (verdict.bound_us, verdict.pct_of_roofline) = (Some(1e-9), Some(100.0 * 1e-9 / 0.001));
        }),
        ("below the bound", |ran| ran.trials[0].verdict.weight_mb = None),
        ("is not that of", |ran| {
            let verdict = &mut ran.trials[0].verdict;
            (verdict.bound_us, verdict.pct_of_roofline) = (Some(50.0), Some(100.0 * 50.0 / 0.001));
        }),
    ];
    for (is, forge) in forged {
        let mut ran = ran(true);
        impossible(&mut ran);
        // The toy model fits into the card's cache, so its bound is effective only without a cache.
        ran.bound.card.as_mut().unwrap().l2_bytes = 0;
        ran.terms.cache_bytes = u64::MAX;
        forge(&mut ran);
        ran.refused(is);
    }
    let mut predicted = ran(false);
    let verdict = &mut predicted.trials[0].verdict;
    (verdict.latency_us, verdict.bound_us) = (Some(1e-6), Some(1e-6));
    verdict.pct_of_roofline = Some(100.0);
    predicted.refused("is not that of");
}

#[test]
fn of_an_unknown_model_the_card_bounds_what_a_row_says() {
    let mut ran = ran(true);
    ran.bound.bytes = None;
    assert_eq!(ran.audit(), Ok(()));
    impossible(&mut ran);
    let verdict = &mut ran.trials[0].verdict;
    (verdict.bound_us, verdict.pct_of_roofline) = (Some(1e-9), Some(100.0 * 1e-9 / 0.001));
    ran.refused("is not that of");
}
