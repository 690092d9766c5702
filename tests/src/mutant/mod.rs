//! Mutants that the gate must refuse: models and programs with one mistake each, and their outcomes.
//!
//! A mutant is run through [`Expected::examine`], which is all that the product does with a candidate on the reference
//! VM. Whether it should be refused is decided without the gate: by its logits on other and longer inputs
//! ([`Base::is_equivalent`]).

mod base;
mod blame;
mod machine;
mod operand;
mod score;
mod weight;

pub use base::{AS_LARGE, Base, FACTOR, Plan, families, golden};
pub use blame::{Blame, Blamed};
pub use machine::defects;
pub use operand::{Left, left_to_the_gate, operands};
pub use score::{Count, Fate, Outcome, Score};
pub use weight::weights;

use ir::program::{Program, Verified};
use ir::{Graph, ScheduleConfig, Weights};
use reference_vm::Defect;
use reference_vm::compare::{Agreement, Reference};
use reference_vm::machine::Machine;
use search::{Expected, Rejection};

use crate::mutant::operand::Edit;
use crate::mutant::weight::Patched;

/// Operands that `verify` cannot check: it accepts other values, and the gate must detect them. Of every other operand
/// it accepts the right value alone (tests/tests/operands.rs shows both).
pub const LEFT_TO_THE_GATE: &[&str] = &[
    "attention and merge.window",
    "attention.cap",
    "attention.eps",
    "attention.reads[0]",
    "attention.reads[1]",
    "attention.reads[2]",
    "attention.reads[3]",
    "attention.reads[4]",
    "attention.scale",
    "attention_merge.reads[0]",
    "embed.scale",
    "matvec.activation",
    "matvec.cap",
    "matvec.eps",
    "matvec.matrix",
    "matvec.reads[0]",
    "matvec.reads[1]",
    "matvec.reads[2]",
    "matvec.reads[3]",
    "matvec.reads[4]",
    "norm.eps",
    "norm.reads[0]",
    "norm.reads[1]",
    "route.first",
    "route.reads[0]",
    "route.scoring",
];

/// A check of a machine against expected values.
pub type Gate<'g> =
    dyn Fn(&Expected, &mut Machine<'_>) -> Result<Agreement<Reference>, Rejection> + Sync + 'g;

/// One mistake.
pub struct Mutant<'b> {
    /// The class for scoring, such as `q_proj` or `matvec.eps`.
    pub class: String,
    /// The mutation and its place.
    pub what: String,
    /// Index of the mutated schedule.
    pub schedule: usize,
    mistake: Mistake<'b>,
}

/// The mutated part.
enum Mistake<'b> {
    /// The model as the machine sees it.
    Model(Box<(Graph, Patched<'b>)>),
    /// The machine, which runs the right program.
    Machine(Defect, Option<u16>),
    /// The program.
    Program(Edit),
}

impl<'b> Mutant<'b> {
    /// Whether it can run at all: a changed program must pass `verify`.
    #[must_use]
    pub fn is_legal(&self, base: &Base) -> bool {
        match &self.mistake {
            Mistake::Program(edit) => {
                ir::program::verify(edit.apply(base.program(self.schedule))).is_ok()
            }
            Mistake::Model(_) | Mistake::Machine(..) => true,
        }
    }

    /// Runs the gate, and computes the actual change of the output.
    #[must_use]
    pub fn judge(&self, base: &Base) -> Outcome {
        self.judge_by(base, &Expected::examine)
    }

    /// The same with another gate.
    #[must_use]
    pub fn judge_by(&self, base: &Base, gate: &Gate<'_>) -> Outcome {
        let right = base.program(self.schedule);
        match &self.mistake {
            Mistake::Model(changed) => {
                let (graph, patched) = &**changed;
                match base.lower(graph, base.config(self.schedule)) {
                    Ok(program) => {
                        let change = base.change_of_model(graph, patched);
                        self.examine(base, gate, (&program, graph, patched), None, change)
                    }
                    Err(reason) => self.outcome(base, Fate::Verify(reason), None),
                }
            }
            Mistake::Machine(defect, layer) => {
                let (graph, weights) = (base.graph(), base.weights());
                let defect = Some((*defect, *layer));
                let change = base.change_of_program(right, defect);
                self.examine(base, gate, (right, graph, weights), defect, change)
            }
            Mistake::Program(edit) => match ir::program::verify(edit.apply(right)) {
                Ok(program) => {
                    let change = base.change_of_program(&program, None);
                    self.examine(base, gate, (&program, base.graph(), base.weights()), None, change)
                }
                Err(violations) => {
                    let first =
                        violations.list().first().map_or_else(String::new, |v| v.rule.to_string());
                    self.outcome(base, Fate::Verify(first), None)
                }
            },
        }
    }

    fn examine(
        &self,
        base: &Base,
        gate: &Gate<'_>,
        (program, graph, weights): (&Verified<Program>, &Graph, &dyn Weights),
        defect: Option<(Defect, Option<u16>)>,
        change: Option<f64>,
    ) -> Outcome {
        let fate = match Machine::new(program, graph, weights) {
            Ok(machine) => {
                let mut machine = match defect {
                    Some((defect, layer)) => machine.with_defect(defect, layer),
                    None => machine,
                };
                Fate::of(gate(base.expected(), &mut machine))
            }
            Err(error) => Fate::Trapped(error.to_string()),
        };
        self.outcome(base, fate, change)
    }

    fn outcome(&self, base: &Base, fate: Fate, change: Option<f64>) -> Outcome {
        Outcome {
            base: base.name.clone(),
            dtype: base.graph().dtype,
            class: self.class.clone(),
            what: self.what.clone(),
            equivalent: change.is_some_and(|change| base.is_equivalent(change)),
            change: change.map(|change| change / base.honest()),
            fate,
        }
    }
}

/// The neutral schedule with knob values, in JSON.
fn config(base: &str, graph: &Graph, target: &ir::Target) -> ScheduleConfig {
    let neutral = ir::schedule::neutral_config(graph, target);
    let normed = graph.layers.iter().all(|layer| layer.attention.norm.is_some());
    // S-EMBED
    let embed = if normed && graph.embed_scale == 1.0 { "qkv" } else { "separate" };
    let base = base.replace(r#""embed": "qkv""#, &format!(r#""embed": "{embed}""#));
    *ir::schedule::read_config_over(neutral, &base, graph, target)
        .unwrap_or_else(|v| panic!("{base}: {v}"))
}
