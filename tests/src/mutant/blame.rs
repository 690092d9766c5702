//! Checks that the blamed task is one that contains the mistake.

use std::collections::BTreeMap;
use std::fmt::Write;

use abi::{Epilogue, MatvecParams, Opcode, Prologue};
use ir::program::{BufferSource, Program, Task, Verified};
use ir::{BufferId, Graph, TensorId, Weights};
use reference_vm::Defect;
use reference_vm::divergence::Examiner;
use reference_vm::machine::Machine;
use search::Expected;

use super::{Base, Fate, Mistake, Mutant, Outcome};

/// The blamed task of a refused mutant.
#[derive(Clone, Debug, PartialEq)]
pub enum Blame {
    /// A task that contains the mistake.
    Right,
    /// Another one.
    Other(String),
    /// No task stands out.
    Nobody,
}

/// Blamed tasks, by class of mutant.
#[derive(Clone, Debug, Default)]
pub struct Blamed {
    /// Right, other, nobody.
    pub classes: BTreeMap<String, [usize; 3]>,
    /// Descriptions of those that are not right.
    pub wrong: Vec<String>,
}

impl Blamed {
    /// Adds a mutant.
    pub fn add(&mut self, mutant: &Mutant<'_>, base: &str, blame: &Blame) {
        let counts = self.classes.entry(mutant.class.clone()).or_default();
        let (place, said) = match blame {
            Blame::Right => (0, None),
            Blame::Other(named) => (1, Some(named.as_str())),
            Blame::Nobody => (2, Some("nobody")),
        };
        counts[place] += 1;
        let told = |said| format!("{base}, {}: {}: {said}", mutant.class, mutant.what);
        self.wrong.extend(said.map(told));
    }

    /// Number of mutants, and of those with the right task blamed.
    #[must_use]
    pub fn sum(&self) -> (usize, usize) {
        let all = self.classes.values().flatten().sum();
        (all, self.classes.values().map(|counts| counts[0]).sum())
    }

    /// One line per class.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::from("| class | right | other | nobody |\n|---|---|---|---|\n");
        for (class, [right, other, nobody]) in &self.classes {
            let _ = writeln!(text, "| {class} | {right} | {other} | {nobody} |");
        }
        text
    }
}

impl Mutant<'_> {
    /// The blame for a mutant; `None` where values were not compared, or are right. A trap names its task itself.
    #[must_use]
    pub fn blame(&self, base: &Base, outcome: &Outcome) -> Option<Blame> {
        if !matches!(outcome.fate, Fate::Gate { .. }) {
            return None;
        }
        let right = base.program(self.schedule);
        match &self.mistake {
            Mistake::Model(changed) => {
                let (graph, patched) = &**changed;
                let program = base.lower(graph, base.config(self.schedule)).ok()?;
                let is_wrong = |task: &Task| patched.touch(base, &program, task, graph);
                name(base, (&program, graph, patched), None, &is_wrong)
            }
            Mistake::Machine(defect, layer) => {
                let is_wrong = |task: &Task| {
                    layer.is_none_or(|layer| layer == task.layer) && has(right, *defect, task)
                };
                let defect = Some((*defect, *layer));
                name(base, (right, base.graph(), base.weights()), defect, &is_wrong)
            }
            Mistake::Program(edit) => {
                let program = ir::program::verify(edit.apply(right)).ok()?;
                let tasks = |program: &Program| {
                    program
                        .workers
                        .iter()
                        .flat_map(|worker| worker.tasks.clone())
                        .collect::<Vec<_>>()
                };
                let pairs = tasks(right).into_iter().zip(tasks(&program));
                let changed: Vec<Task> =
                    pairs.filter(|(old, new)| old != new).map(|(_, new)| new).collect();
                let is_wrong = |task: &Task| changed.contains(task);
                name(base, (&program, base.graph(), base.weights()), None, &is_wrong)
            }
        }
    }
}

/// Finds the task to blame for a mutant that the gate has refused.
fn name(
    base: &Base,
    (program, graph, weights): (&Verified<Program>, &Graph, &dyn Weights),
    defect: Option<(Defect, Option<u16>)>,
    is_wrong: &dyn Fn(&Task) -> bool,
) -> Option<Blame> {
    let machine = Machine::new(program, graph, weights).ok()?;
    let mut machine = match defect {
        Some((defect, layer)) => machine.with_defect(defect, layer),
        None => machine,
    };
    let place = first(base.expected(), base, &mut machine);
    let Some((worker, index)) = place else { return Some(Blame::Nobody) };
    let task = &program.workers[worker].tasks[index as usize];
    if is_wrong(task) {
        return Some(Blame::Right);
    }
    let op = task.opcode.info().name;
    Some(Blame::Other(format!("{op} of layer {} (task {index} of worker {worker})", task.layer)))
}

/// The first task with a wrong store.
fn first(expected: &Expected, base: &Base, machine: &mut Machine<'_>) -> Option<(usize, u32)> {
    let examiner = Examiner::new(base.graph(), base.weights()).unwrap_or_else(|e| panic!("{e}"));
    let found = expected.diverges(&examiner, machine, None)?;
    Some((found.worker.index(), found.task))
}

/// Whether a task reads stored values of these tensors.
pub(super) fn reads(program: &Program, task: &Task, tensors: &dyn Fn(TensorId) -> bool) -> bool {
    let of_matrix = |matrix: usize| {
        let parts = program.matrices.get(matrix).map_or(&[][..], |matrix| &matrix.map.parts);
        parts.iter().any(|part| part.0.is_some_and(tensors))
    };
    let of_buffer = |buffer: BufferId| match &program.buffers[buffer.index()].source {
        BufferSource::Vector(map) => map.parts.iter().any(|part| part.0.is_some_and(tensors)),
        BufferSource::Embedding(matrix) => of_matrix(matrix.index()),
        BufferSource::Scratch | BufferSource::Rotary(_) | BufferSource::KvCache { .. } => false,
    };
    let multiplied =
        task.opcode == Opcode::Matvec && of_matrix(task.params::<MatvecParams>().matrix as usize);
    multiplied || task.reads.iter().flatten().any(|&buffer| of_buffer(buffer))
}

/// Whether a machine's defect affects a task.
fn has(program: &Program, defect: Defect, task: &Task) -> bool {
    let matvec = (task.opcode == Opcode::Matvec).then(|| task.params::<MatvecParams>());
    let prologue = |p: Prologue| matvec.is_some_and(|m| m.prologue == p as u32);
    let epilogue = |e: Epilogue| matvec.is_some_and(|m| m.epilogue == e as u32);
    match defect {
        Defect::NextToken => task.reads.iter().flatten().any(|buffer| {
            matches!(program.buffers[buffer.index()].source, BufferSource::Embedding(_))
        }),
        Defect::NoNormScale => {
            prologue(Prologue::Rms) || prologue(Prologue::PostNorm) || task.opcode == Opcode::Norm
        }
        Defect::LateQueries
        | Defect::LateKeys
        | Defect::LateBoth
        | Defect::Backwards
        | Defect::Neighbours
        | Defect::ShiftedKeys
        | Defect::NextHead
        | Defect::TurnedValues
        | Defect::NoOldest
        | Defect::NoNewest
        | Defect::NoTotals
        | Defect::NoGreatest => task.opcode == Opcode::Attention,
        Defect::NoResidual | Defect::TwiceResidual => {
            epilogue(Epilogue::Residual) || prologue(Prologue::PostNorm)
        }
        Defect::Relu | Defect::Gelu | Defect::Linear => epilogue(Epilogue::SiluMul),
        Defect::LeastLikely => task.opcode == Opcode::Sample,
    }
}
