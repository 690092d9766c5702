//! Compares guesses with the trials that the search then runs.

use std::cell::Cell;

use ir::Target;
use ir::schedule::{KernelConfig, Knob};

use super::*;
use crate::assess::Timing;
use crate::expected::Expected;
use crate::history::Tried;
use crate::scripted::{Behaviour, ScriptedDevice};

const KV_CAPACITY: u32 = 32;
const TRIALS: u64 = 24;

/// Runs a search whose candidates behave as `script` gives for their number, and at each trial asks for the guesses of
/// the case that it ends as `kept` says. Returns, per trial, its outcome, the schedules that followed, and the guesses.
fn guessed(
    script: impl Fn(u64) -> Behaviour,
    kept: bool,
) -> Vec<(Outcome, Vec<String>, Vec<String>)> {
    let model = model::preset("toy").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let target = Target::by_name("h200").unwrap();
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 1, Some(144)).unwrap();
    let number = Cell::new(0);
    let mut device = ScriptedDevice::new(expected().logits, 1, |_, _| {
        number.set(number.get() + 1);
        script(number.get() - 1)
    });
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected());
    let values = |&knob: &Knob| (knob, ir::schedule::legal_values(knob, graph, &target));
    let settings = Settings {
        seed: 3,
        budget: Budget::Trials(TRIALS),
        explore: TRIALS / 2,
        min_gain: 0.01,
        default: ir::schedule::neutral_config(graph, &target),
        space: Knob::ALL.iter().map(values).collect(),
        timing: Timing::default(),
        finalists: 0,
        simplest: None,
    };
    let mut search = Search::new(gate, Some(&mut device), settings);
    let mut guesses = Vec::new();
    loop {
        let (index, history) = (search.trials().len() as u64, search.history());
        let Step::Trial(trial) = search.step(Duration::ZERO).unwrap() else { break };
        let ahead = &*search.gate.ahead;
        let candidate = ahead.lower(&trial.config).unwrap();
        let asked = search.asked();
        let mut guess = Guess::after(asked, history, index, &candidate, kept && index > 0);
        let lower = |config: &ScheduleConfig, tried: &Tried| ahead.lower_new(config, tried);
        let next = std::iter::from_fn(|| guess.next(lower)).map(|candidate| candidate.schedule_id);
        guesses.push((trial.outcome, next.collect::<Vec<_>>()));
    }
    let tried: Vec<String> = search.trials().iter().map(|trial| trial.config.id()).collect();
    let followed = |index: usize, len: usize| tried[index + 1..][..len].to_vec();
    let guesses = guesses.into_iter().enumerate();
    guesses.map(|(i, (end, next))| (end, followed(i, next.len()), next)).collect()
}

#[test]
fn a_search_without_a_gain_is_foreseen_to_its_end() {
    let slower = |number| Behaviour::takes(if number == 0 { 100.0 } else { 120.0 });
    let guesses = guessed(slower, false);
    assert_eq!(guesses.len() as u64, TRIALS);
    let far = guesses.iter().filter(|(_, _, guess)| guess.len() >= 8).count();
    assert!(far >= 8, "{far} guesses reach eight trials");
    for (index, (_, followed, guess)) in guesses.iter().enumerate() {
        assert_eq!(guess, followed, "after trial {index}");
    }
}

#[test]
fn what_follows_a_kept_candidate_of_the_sweep_is_foreseen_too() {
    // Every third candidate is better than all before it.
    let script = |number: u64| {
        let better = 100.0 - 5.0 * (number / 3) as f64;
        Behaviour::takes(if number.is_multiple_of(3) { better } else { 140.0 })
    };
    let guesses = guessed(script, true);
    let sweep = guesses.iter().take(TRIALS as usize / 2 - 2).enumerate();
    let kept: Vec<_> = sweep.filter(|(_, guess)| guess.0 == Outcome::Kept).collect();
    assert!(kept.len() >= 2, "{} were kept", kept.len());
    for (index, (_, followed, guess)) in kept {
        assert_eq!(guess, followed, "after trial {index}");
    }
}
