//! The gate's own score: mutants that change the output must be refused, honest schedules must not.
//!
//! A small part runs by default. `AMK_MUTANTS=all cargo test -p tests gate -- --nocapture` runs every mutant of every model in every
//! element type; docs/trust.md has its figures.

use std::collections::BTreeSet;

use ir::DType::{self, Bf16, F16, F32};
use rayon::prelude::*;
use reference_vm::Order;
use reference_vm::compare::{Agreement, Reference, Tolerance, compare};
use reference_vm::machine::{Machine, Run};
use search::{Dropped, Expected};
use tests::mutant::{
    Base, Gate, Mutant, Outcome, Plan, Score, bases, defects, golden_bases, operands, weights,
};
use tests::rng::Rng;

/// Mutants of each model and class that are tried by default.
const FEW: usize = 3;

/// What the default run tries: each family in one element type, half of them as a search of a large model would.
fn smoke() -> Vec<Base> {
    let plan = Plan { schedules: 6, seed: 5, as_large: false };
    let mut all = bases(&[[Bf16, F16, F32, Bf16]], plan);
    all.truncate(2);
    let mut large = bases(&[[Bf16, F16, F32, Bf16]], Plan { as_large: true, ..plan });
    all.extend(large.drain(2..));
    all
}

/// What the long run tries: each family in each element type, with many steps and with few, and the golden models.
fn everything() -> Vec<Base> {
    let plan = Plan { schedules: 40, seed: 5, as_large: false };
    let dtypes: Vec<[DType; 4]> = [Bf16, F16, F32].iter().map(|&dtype| [dtype; 4]).collect();
    let mut all = bases(&dtypes, plan);
    all.extend(bases(&dtypes, Plan { as_large: true, seed: 6, ..plan }));
    all.extend(golden_bases(plan));
    all
}

/// All mutants of a model, or a few of each class.
fn mutants(base: &Base, few: Option<usize>) -> Vec<Mutant<'_>> {
    let mut all = weights(base, 11);
    all.extend(defects(base));
    all.extend(operands(base));
    let Some(few) = few else { return all };
    let mut rng = Rng::new(13);
    let mut drawn: Vec<Mutant<'_>> = Vec::new();
    while !all.is_empty() {
        let mutant = all.swap_remove(rng.below(all.len()));
        if drawn.iter().filter(|other| other.class == mutant.class).count() < few {
            drawn.push(mutant);
        }
    }
    drawn
}

fn say(base: &Base, outcomes: &[Outcome]) {
    let survivors = Score::of(outcomes).survivors.len();
    println!(
        "{}: {} of {} honest schedules refused, logits up to {:.2e} apart, {:.0} % of a tolerance used; {survivors} of {} mutants passed",
        base.name,
        base.false_alarms.0.len(),
        base.false_alarms.1,
        base.honest(),
        100.0 * base.closest,
        outcomes.len(),
    );
}

#[test]
fn the_gate_refuses_every_mutant_and_no_honest_schedule() {
    let all = std::env::var_os("AMK_MUTANTS").is_some_and(|value| value == "all");
    let (mut outcomes, mut alarms, mut honest) = (Vec::new(), Vec::new(), 0);
    for base in if all { everything() } else { smoke() } {
        let mutants = mutants(&base, (!all).then_some(FEW));
        let found: Vec<Outcome> = mutants.par_iter().map(|mutant| mutant.judge(&base)).collect();
        say(&base, &found);
        alarms.extend(base.false_alarms.0.clone());
        honest += base.false_alarms.1;
        outcomes.extend(found);
    }
    let score = Score::of(&outcomes);
    println!("{}{:?}; {honest} honest schedules", score.table(), score.sum());
    println!("{}", score.report());
    assert!(alarms.is_empty(), "honest schedules were refused:\n{}", alarms.join("\n"));
    assert!(score.survivors.is_empty(), "mutants passed:\n{}", score.report());
    // A class of which nothing ran proves nothing.
    let classes: BTreeSet<&str> = score.counts.keys().map(|(class, _)| class.as_str()).collect();
    let of = |class: &str| {
        score
            .counts
            .iter()
            .filter(|((name, _), _)| name == class)
            .map(|(_, c)| c.total())
            .sum::<usize>()
    };
    for class in classes.iter().filter(|class| !class.contains('.')) {
        assert!(of(class) > 0, "no mutant of `{class}` changes the output");
    }
    assert!(classes.len() > 70, "only {} classes", classes.len());
    assert!(honest >= 30, "only {honest} honest schedules");
}

/// The gate as it was once: logits alone, six positions from zero, as wide as a device is allowed.
fn loosened(
    expected: &Expected,
    machine: &mut Machine<'_>,
) -> Result<Agreement<Reference>, Dropped> {
    let run = machine.run(&expected.tokens[..6], Order::Waves).map_err(Dropped::Unrunnable)?;
    match run {
        Run::Finished(outputs) => {
            compare(&expected.logits[..6], &outputs.logits, Tolerance::DEVICE)
                .map_err(|at| Dropped::Disagreed { by: "reference", at })
        }
        halted @ (Run::Trapped(_) | Run::OutOfFuel { .. } | Run::Stuck { .. }) => {
            Err(Dropped::Halted(halted))
        }
    }
}

/// The score itself can fail: a gate that looks less closely lets mutants pass, and they are reported by class.
#[test]
fn a_loosened_gate_is_found_out() {
    let base =
        bases(&[[Bf16, F16, F32, Bf16]], Plan { schedules: 4, seed: 5, as_large: false }).remove(1);
    let gate: &Gate = &loosened;
    let mutants = mutants(&base, Some(6));
    let outcomes: Vec<Outcome> =
        mutants.par_iter().map(|mutant| mutant.judge_by(&base, gate)).collect();
    let score = Score::of(&outcomes);
    println!("{}", score.report());
    let passed: BTreeSet<&str> = score.survivors.iter().map(|o| o.class.as_str()).collect();
    // Never reached by six positions, not in the logits, and too small.
    for class in ["sliding window", "machine: joining splits", "machine: sampling", "q_proj"] {
        assert!(passed.contains(class), "`{class}` is not among the survivors {passed:?}");
        assert!(score.report().contains(class));
    }
}
