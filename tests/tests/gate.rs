//! Scores the gate: mutants that change the output must be refused, correct schedules must not.
//!
//! A small part runs by default. `AMK_MUTANTS=4 cargo test -p tests gate -- --nocapture` tries up to 4 mutants of every class on every
//! model in every element type; docs/explanation/trust.md has its figures.

use std::collections::{BTreeMap, BTreeSet};

use ir::DType::{Bf16, F16, F32};
use model::Model;
use rayon::prelude::*;
use reference_vm::Order;
use reference_vm::compare::{Agreement, Reference, Tolerance, compare};
use reference_vm::machine::{Machine, Run};
use search::{Expected, Rejection};
use tests::mutant::{
    Base, Blame, Blamed, Gate, LEFT_TO_THE_GATE, Mutant, Outcome, Plan, Score, defects, families,
    golden, operands, weights,
};
use tests::rng::Rng;

/// Mutants of each model and class that are tried by default.
const FEW: usize = 3;

/// Options for the first model; some others are examined as in a search of a large model.
const PLAN: Plan = Plan { schedules: 6, seed: 5, as_large: false };

/// The default run: each family in one element type, half of them with few steps.
fn smoke() -> Vec<(Model, Plan)> {
    let plan = |index| Plan { as_large: index >= 2, ..PLAN };
    families([Bf16, F16, F32, Bf16]).into_iter().zip((0..6).map(plan)).collect()
}

/// The long run: each family in each element type, with many steps and with few, and the golden models.
fn everything() -> Vec<(Model, Plan)> {
    let plan = Plan { schedules: 20, ..PLAN };
    let large = Plan { as_large: true, seed: 6, ..plan };
    let families = || [Bf16, F16, F32].into_iter().flat_map(|dtype| families([dtype; 4]));
    let with = |plan: Plan| move |model: Model| (model, plan);
    let seeded = families().map(with(plan)).chain(families().map(with(large)));
    seeded.chain(golden().into_iter().map(with(plan))).collect()
}

/// Some mutants of each class of a model: those that can run first, otherwise at random.
fn mutants(base: &Base, of_a_class: usize) -> Vec<Mutant<'_>> {
    let mut all = weights(base, 11);
    all.extend(defects(base));
    all.extend(operands(base));
    let legal: Vec<bool> = all.par_iter().map(|mutant| mutant.is_legal(base)).collect();
    let (mut run, mut refused) = (Vec::new(), Vec::new());
    for (mutant, legal) in all.into_iter().zip(legal) {
        if legal { run.push(mutant) } else { refused.push(mutant) }
    }
    // Each class draws for itself, so that a new class leaves the others' mutants as they were.
    let mut drawn = Vec::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for all in [run, refused] {
        let mut classes: BTreeMap<String, Vec<Mutant<'_>>> = BTreeMap::new();
        for mutant in all {
            classes.entry(mutant.class.clone()).or_default().push(mutant);
        }
        for (class, mut rest) in classes {
            let mut rng = Rng::new(13 + class.len() as u64);
            let count = counts.entry(class).or_default();
            while *count < of_a_class && !rest.is_empty() {
                drawn.push(rest.swap_remove(rng.below(rest.len())));
                *count += 1;
            }
        }
    }
    drawn
}

fn say(base: &Base, outcomes: &[Outcome]) {
    let score = Score::of(outcomes);
    let [least, most] = base.expected().allowed();
    println!(
        "{}: allowed {least:.1e} to {most:.1e}; {} of {} honest schedules refused, logits up to {:.2e} apart, {:.0} % of a tolerance used; {} of {} mutants passed\n{}",
        base.name,
        base.false_alarms.0.len(),
        base.false_alarms.1,
        base.honest(),
        100.0 * base.closest,
        score.survivors.len(),
        outcomes.len(),
        score.report(),
    );
}

#[test]
fn the_gate_refuses_every_mutant_and_no_honest_schedule() {
    let asked = std::env::var("AMK_MUTANTS").ok().and_then(|text| text.parse().ok());
    let of_a_class = asked.unwrap_or(FEW);
    let positions = asked.is_none().then_some(8);
    let (mut outcomes, mut alarms, mut honest) = (Vec::new(), Vec::new(), 0);
    let mut blamed = Blamed::default();
    for (model, plan) in if asked.is_some() { everything() } else { smoke() } {
        let base = Base::new(model, plan);
        let mutants = mutants(&base, of_a_class);
        let found: Vec<Outcome> = mutants.par_iter().map(|mutant| mutant.judge(&base)).collect();
        say(&base, &found);
        let pairs = mutants.par_iter().zip(&found);
        let named: Vec<Option<Blame>> = pairs.map(|(mutant, o)| mutant.blame(&base, o)).collect();
        for (mutant, blame) in mutants.iter().zip(named) {
            blame.iter().for_each(|blame| blamed.add(mutant, &base.name, blame));
        }
        assert_eq!(base.blames(positions), None, "an honest program of {} is blamed", base.name);
        alarms.extend(base.false_alarms.0.clone());
        honest += base.false_alarms.1;
        outcomes.extend(found);
    }
    let score = Score::of(&outcomes);
    println!("{}{:?}; {honest} honest schedules", score.table(), score.sum());
    let (named, right) = blamed.sum();
    assert!(named > 300 && right == named, "not the right task: {}", blamed.wrong.join("\n"));
    println!(
        "{}the right task named for {right} of {named} refused mutants\n{}",
        blamed.table(),
        blamed.wrong.join("\n")
    );
    assert!(alarms.is_empty(), "honest schedules were refused:\n{}", alarms.join("\n"));
    assert_eq!(score.survivors.len(), 0, "mutants passed:\n{}", score.report());
    // A class without mutants that ran proves nothing.
    let classes: BTreeSet<&str> = score.counts.keys().map(|(class, _)| class.as_str()).collect();
    let of = |class: &str| {
        score
            .counts
            .iter()
            .filter(|((name, _), _)| name == class)
            .map(|(_, c)| c.total())
            .sum::<usize>()
    };
    // The default run tries three of each: they may all be equivalent.
    let left = LEFT_TO_THE_GATE.iter().filter(|_| asked.is_some()).copied();
    for class in classes.iter().filter(|class| !class.contains('.')).copied().chain(left) {
        assert!(of(class) > 0, "no mutant of `{class}` changes the output");
    }
    assert!(classes.len() > 70, "only {} classes", classes.len());
    assert!(honest >= 30, "only {honest} honest schedules");
}

/// An earlier, looser gate: logits alone, six positions from zero, the tolerance of a device.
fn loosened(
    expected: &Expected,
    machine: &mut Machine<'_>,
) -> Result<Agreement<Reference>, Rejection> {
    let run = machine.run(&expected.tokens[..6], Order::Waves).map_err(Rejection::Unrunnable)?;
    match run {
        Run::Finished(outputs) => {
            compare(&expected.logits[..6], &outputs.logits, Tolerance::DEVICE)
                .map_err(|at| Rejection::Disagreed { by: "reference", at })
        }
        halted @ (Run::Trapped(_) | Run::Stuck { .. }) => Err(Rejection::Halted(halted)),
    }
}

/// Tests that the score can fail: a looser gate lets mutants pass, and they are reported by class.
#[test]
fn a_loosened_gate_is_found_out() {
    let mistral = families([F16; 4]).remove(1);
    let base = Base::new(mistral, PLAN);
    let gate: &Gate<'_> = &loosened;
    let mutants = mutants(&base, 6);
    let outcomes: Vec<Outcome> =
        mutants.par_iter().map(|mutant| mutant.judge_by(&base, gate)).collect();
    let score = Score::of(&outcomes);
    println!("{}", score.report());
    let passed: BTreeSet<&str> = score.survivors.iter().map(|o| o.class.as_str()).collect();
    // Not reached by six positions, not visible in the logits, or too small.
    for class in ["sliding window", "machine: joining splits", "machine: sampling", "v_proj"] {
        assert!(passed.contains(class), "`{class}` is not among the survivors {passed:?}");
        assert!(score.report().contains(class));
    }
}
