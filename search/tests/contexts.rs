//! Searches that judge schedules at contexts of their own: which one wins depends on them, and what is timed there is
//! checked there.

use std::time::Duration;

use ir::Target;
use ir::program::Program;
use ir::schedule::{Evict, KernelConfig, Knob};
use model::Model;
use search::{
    Budget, Expected, Gate, Outcome, Search, Settings, Step, TIMED_TOKENS, Timing, Trial,
    draw_tokens,
};
use tests::scripted::{Behaviour, ScriptedDevice};

const SEED: u64 = 3;
const KV_CAPACITY: u32 = 256;
/// More positions than the gate runs.
const LONG: u32 = 200;
const SHORT: u32 = 4;

struct Bench {
    model: Model,
    target: Target,
}

impl Bench {
    fn new() -> Self {
        Self { model: model::preset("toy").unwrap(), target: Target::by_name("h200").unwrap() }
    }

    fn gate(&self, contexts: &[u32]) -> Gate<'_> {
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        let expected = Expected::new(graph, weights, KV_CAPACITY, SEED, Some(144)).unwrap();
        let expected = expected.timed_after(graph, weights, SEED, contexts, TIMED_TOKENS).unwrap();
        let options = lower::Options { kv_capacity: KV_CAPACITY };
        Gate::new(graph, weights, &self.target, options, &KernelConfig::id, expected)
            .with_contexts(contexts)
    }

    /// A search of the knob that the script looks at.
    fn search(
        &self,
        contexts: &[u32],
        script: fn(&Program, &KernelConfig) -> Behaviour,
    ) -> Vec<Trial> {
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        let tokens = draw_tokens(SEED, graph.vocab, LONG as usize + TIMED_TOKENS);
        let rows = Expected::on_tokens(graph, weights, tokens).unwrap().logits;
        let mut device = ScriptedDevice::new(rows, 1, script);
        let values = ir::schedule::legal_values(Knob::KernelEvict, graph, &self.target);
        let settings = Settings {
            seed: SEED,
            budget: Budget::Trials(2),
            explore: 0,
            min_gain: 0.01,
            default: ir::schedule::neutral_config(graph, &self.target),
            space: vec![(Knob::KernelEvict, values)],
            timing: Timing { rounds: 4, warmup: 1 },
            finalists: 0,
            simplest: None,
        };
        let mut search = Search::new(self.gate(contexts), Some(&mut device), settings);
        let mut trials = Vec::new();
        while let Step::Trial(trial) = search.step(Duration::ZERO).unwrap() {
            trials.push(*trial);
        }
        trials
    }
}

/// Slower at first, and faster the longer the context is.
fn evict_wins_late(_: &Program, kernel: &KernelConfig) -> Behaviour {
    match kernel.evict {
        Evict::First => Behaviour::takes(100.0),
        Evict::Normal => Behaviour { us_per_position: 1.0, ..Behaviour::takes(80.0) },
    }
}

#[test]
fn the_contexts_decide_which_schedule_wins() {
    let bench = Bench::new();
    for (contexts, baseline_us, candidate, outcome) in [
        (&[SHORT][..], 84.0, 100.0, Outcome::Reverted),
        (&[LONG], 280.0, 100.0, Outcome::Kept),
        (&[SHORT, LONG], (84.0_f64 * 280.0).sqrt(), 100.0, Outcome::Kept),
    ] {
        let trials = bench.search(contexts, evict_wins_late);
        let us = |trial: &Trial| trial.verdict.latency_us.unwrap();
        assert!((us(&trials[0]) - baseline_us).abs() < 1e-9, "{contexts:?}: {}", us(&trials[0]));
        assert!((us(&trials[1]) - candidate).abs() < 1e-9, "{contexts:?}: {}", us(&trials[1]));
        assert_eq!(trials[1].outcome, outcome, "{contexts:?}");
    }
}

#[test]
fn what_is_wrong_at_a_context_is_refused() {
    let script = |_: &Program, kernel: &KernelConfig| Behaviour {
        wrong_when_timed: kernel.evict == Evict::First,
        ..Behaviour::takes(100.0)
    };
    let trials = Bench::new().search(&[SHORT, LONG], script);
    assert_eq!(trials[1].outcome, Outcome::Disagreed, "{}", trials[1].why);
    assert_eq!(trials[1].verdict.latency_us, None);
}

#[test]
fn predictions_and_bounds_are_geometric_means() {
    let bench = Bench::new();
    let config = ir::schedule::neutral_config(&bench.model.graph, &bench.target);
    let of = |contexts: &[u32]| {
        let mut gate = bench.gate(contexts);
        let (verdict, _) = search::assess::evaluate(&mut gate, None, &config, Timing::default(), 0);
        [verdict.latency_us, verdict.bound_us, verdict.chain_us].map(Option::unwrap)
    };
    let (short, long, both) = (of(&[SHORT]), of(&[LONG]), of(&[SHORT, LONG]));
    for ((short, long), both) in short.into_iter().zip(long).zip(both) {
        assert!(long >= short && (both / (short * long).sqrt() - 1.0).abs() < 1e-9);
    }
}

/// Where no bandwidth was measured, the bound is that of all GPUs: each reads its own part of the weights.
#[test]
fn the_bound_of_two_gpus_is_half_of_that_of_one() {
    let bound = |name: &str| {
        let bench = Bench { target: Target::by_name(name).unwrap(), ..Bench::new() };
        let gate = bench.gate(&[SHORT]);
        let card = ScriptedDevice::new(Vec::new(), 1, |_, _| Behaviour::takes(100.0));
        let config = ir::schedule::neutral_config(&bench.model.graph, &bench.target);
        let (candidate, _) = search::measured_grid::prepare(&gate, &config).unwrap();
        let card = card.with_bandwidth(None);
        search::assess::bounds(&gate, &card, &candidate, &[SHORT]).bound_us
    };
    let (one, two) = (bound("h200"), bound("h200x2"));
    assert!((one / two - 2.0).abs() < 1e-9, "{one} {two}");
}
