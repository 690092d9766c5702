//! Mutants of the program: every operand of every op, in one task or in all similar ones.

use std::collections::{BTreeMap, BTreeSet};

use abi::{Activation, Epilogue, MatvecParams, Opcode, Prologue};
use ir::BufferId;
use ir::program::{Program, Task};
use rayon::prelude::*;

use super::{Base, Mistake, Mutant};

/// Parameters that the attention of a layer and the merges of its splits must agree on.
const JOINT: [&str; 4] = ["window", "kv_block", "splits", "head_dim"];

/// Identifies tasks that do the same at different places: op, layer, matrix, prologue and epilogue.
type Kind = (Opcode, u16, [u32; 3]);

fn kind(task: &Task) -> Kind {
    let of_matvec = if task.opcode == Opcode::Matvec {
        let p: MatvecParams = task.params();
        [p.matrix, p.prologue, p.epilogue]
    } else {
        [0; 3]
    };
    (task.opcode, task.layer, of_matvec)
}

/// A task's place: worker and index.
type Place = (usize, usize);

/// The first and the last task of each kind.
fn places(program: &Program) -> Vec<Place> {
    let mut ends: BTreeMap<Kind, (Place, Place)> = BTreeMap::new();
    for (worker, queue) in program.workers.iter().enumerate() {
        for (index, task) in queue.tasks.iter().enumerate() {
            let place = (worker, index);
            ends.entry(kind(task)).and_modify(|ends| ends.1 = place).or_insert((place, place));
        }
    }
    let mut all: Vec<Place> = ends.into_values().flat_map(|(first, last)| [first, last]).collect();
    all.dedup();
    all
}

/// One operand changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    place: Place,
    scope: Scope,
    change: Change,
}

/// The tasks to change.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scope {
    /// The one at the place.
    Task,
    /// All of its kind.
    Kind,
    /// All tasks of its layer whose op reads a parameter of this name, so that they still agree with each other.
    Layer(&'static str),
}

#[derive(Clone, Copy, Debug)]
enum Change {
    /// A word of the parameters.
    Param(usize, u32),
    /// Other products, and so another load stream.
    Stream(MatvecParams),
    /// A buffer that is read.
    Read(usize, Option<BufferId>),
    /// A buffer that is written.
    Write(usize, Option<BufferId>),
}

impl Edit {
    /// The changed program.
    pub(super) fn apply(self, right: &Program) -> Program {
        let mut program = right.clone();
        let edited = kind(&right.workers[self.place.0].tasks[self.place.1]);
        for (worker, queue) in program.workers.iter_mut().enumerate() {
            for (index, task) in queue.tasks.iter_mut().enumerate() {
                let here = (worker, index) == self.place;
                match self.scope {
                    Scope::Layer(name) if task.layer == edited.1 => {
                        if let (Some(word), Change::Param(_, value)) =
                            (read_word(task, name), self.change)
                        {
                            task.params[word] = value;
                        }
                    }
                    Scope::Kind if kind(task) == edited => self.change.apply(task),
                    Scope::Task | Scope::Kind | Scope::Layer(_) if here => self.change.apply(task),
                    Scope::Task | Scope::Kind | Scope::Layer(_) => {}
                }
            }
        }
        program
    }
}

impl Change {
    fn apply(self, task: &mut Task) {
        match self {
            Self::Param(word, value) => task.params[word] = value,
            Self::Stream(params) => task.params = bytemuck::cast(params),
            Self::Read(operand, access) => task.reads[operand] = access,
            Self::Write(operand, access) => task.writes[operand] = access,
        }
    }
}

/// The place of an op's parameter.
fn word_of(opcode: Opcode, name: &str) -> Option<usize> {
    let c_name = format!("amk_{}_params", opcode.info().name);
    let layout = abi::structs().into_iter().find(|layout| layout.c_name == c_name)?;
    layout.fields.iter().find(|field| field.name == name).map(|field| field.offset / 4)
}

/// The same, if this task uses it: some words of a product are only used with one prologue or epilogue.
fn read_word(task: &Task, name: &str) -> Option<usize> {
    let read = match task.opcode {
        Opcode::Matvec => {
            let p: MatvecParams = task.params();
            match name {
                "splits" | "head_dim" | "kv_block" | "window" => {
                    p.prologue == Prologue::Merge as u32
                }
                "eps" => {
                    [Prologue::Rms, Prologue::PostNorm].map(|of| of as u32).contains(&p.prologue)
                }
                "candidate" => p.epilogue == Epilogue::Logits as u32,
                "cap" => {
                    p.epilogue == Epilogue::Logits as u32
                        || p.activation == Activation::ClampedSilu as u32
                }
                "activation" => p.epilogue == Epilogue::SiluMul as u32,
                _ => true,
            }
        }
        // The epsilon of the norms of queries and keys, if there are any.
        Opcode::Attention => name != "eps" || task.reads[1].is_some(),
        Opcode::Nop
        | Opcode::Embed
        | Opcode::AttentionMerge
        | Opcode::Sample
        | Opcode::Norm
        | Opcode::Route => true,
    };
    word_of(task.opcode, name).filter(|_| read)
}

/// Every operand of the first and last task of each kind changed, in each schedule's program.
#[must_use]
pub fn operands<'b>(base: &Base) -> Vec<Mutant<'b>> {
    all(base, false)
}

fn all<'b>(base: &Base, wide: bool) -> Vec<Mutant<'b>> {
    let mut all = Vec::new();
    for schedule in 0..base.schedules() {
        let program: &Program = base.program(schedule);
        for place in places(program) {
            let mut mutants = Mutants { program, schedule, place, wide, list: &mut all };
            mutants.params();
            mutants.accesses();
        }
    }
    all
}

/// Results of [`verify`](ir::program::verify()) for the changes of one class.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// Changes that were tried.
    pub tried: usize,
    /// Accepted changes of operands that the task uses.
    pub read: usize,
    /// Accepted changes of words that the task ignores.
    pub ignored: usize,
    /// Such a change that does change the result.
    pub not_ignored: Option<String>,
}

/// Changes every operand to many more values than [`operands`] tries, and counts what `verify` accepts. Some changes of
/// ignored words are run, to check that they have no effect.
#[must_use]
pub fn left_to_the_gate(base: &Base) -> BTreeMap<String, Left> {
    const RUN: usize = 2;
    let mutants = all(base, true);
    let of = |mutant: &Mutant<'_>| {
        let Mistake::Program(edit) = &mutant.mistake else {
            unreachable!("operands edit programs")
        };
        let right = base.program(mutant.schedule);
        let accepted = ir::program::verify(edit.apply(right)).ok();
        let task = &right.workers[edit.place.0].tasks[edit.place.1];
        let name = mutant.class.rsplit('.').next().unwrap_or_default();
        let ignored = matches!(edit.change, Change::Param(..)) && read_word(task, name).is_none();
        (accepted, ignored)
    };
    let judged: Vec<_> = mutants.par_iter().map(|m| (m, of(m))).collect();
    let mut classes: BTreeMap<String, Left> = BTreeMap::new();
    for (mutant, (accepted, ignored)) in judged {
        let left = classes.entry(mutant.class.clone()).or_default();
        left.tried += 1;
        let Some(program) = accepted else { continue };
        if !ignored {
            left.read += 1;
            continue;
        }
        left.ignored += 1;
        if left.ignored <= RUN && base.bits(&program) != base.bits(base.program(mutant.schedule)) {
            left.not_ignored = Some(mutant.what.clone());
        }
    }
    classes
}

/// Mutants of one task.
struct Mutants<'p, 'l, 'b> {
    program: &'p Program,
    schedule: usize,
    place: Place,
    /// Many values of each word, and every buffer.
    wide: bool,
    list: &'l mut Vec<Mutant<'b>>,
}

impl Mutants<'_, '_, '_> {
    fn task(&self) -> &Task {
        &self.program.workers[self.place.0].tasks[self.place.1]
    }

    /// Adds the change in this task, and again in all of its kind.
    fn push(&mut self, class: &str, what: &str, change: Change) {
        let mut changed = self.task().clone();
        change.apply(&mut changed);
        if changed == *self.task() {
            return;
        }
        let (task, (worker, index)) = (self.task(), self.place);
        let (op, layer) = (task.opcode.info().name, task.layer);
        let joint = JOINT.iter().find(|&&name| name == class && op == "attention");
        let scopes = [Some(Scope::Task), Some(Scope::Kind), joint.map(|&name| Scope::Layer(name))];
        for scope in scopes.into_iter().flatten() {
            if scope == Scope::Kind && matches!(change, Change::Stream(_)) {
                continue;
            }
            let (op, whose) = match scope {
                Scope::Task => (op, "task"),
                Scope::Kind => (op, "every task like"),
                Scope::Layer(_) => ("attention and merge", "every task that agrees with"),
            };
            let what = format!(
                "{what} of {whose} {index} of worker {worker}, layer {layer}, schedule {}",
                self.schedule
            );
            self.list.push(Mutant {
                class: format!("{op}.{class}"),
                what,
                schedule: self.schedule,
                mistake: Mistake::Program(Edit { place: self.place, scope, change }),
            });
        }
    }

    /// Each word of the parameters.
    fn params(&mut self) {
        let op = self.task().opcode.info().name;
        let layouts = abi::structs();
        let c_name = format!("amk_{op}_params");
        let Some(layout) = layouts.iter().find(|layout| layout.c_name == c_name) else { return };
        for field in layout.fields {
            let first = field.offset / 4;
            let word = self.task().params[first];
            if field.name == "reserved" {
                self.push("reserved", "reserved word set", Change::Param(first, 1));
            } else if matches!(field.name, "cap" | "scale") && word == 0 {
                for value in [0.5_f32, 2.0] {
                    let what = format!("{} {value} for none", field.name);
                    self.push(field.name, &what, Change::Param(first, value.to_bits()));
                }
            } else if matches!(field.name, "eps" | "scale" | "cap") {
                for factor in [0.0, 0.5, 0.99, 1.01, 2.0, 100.0, 1e4, 1e6] {
                    let value = f32::from_bits(word) * factor;
                    let what = format!("{} {value} for {}", field.name, f32::from_bits(word));
                    self.push(field.name, &what, Change::Param(first, value.to_bits()));
                }
            } else {
                for value in self.values(word) {
                    let what = format!("{} {value} for {word}", field.name);
                    self.push(field.name, &what, Change::Param(first, value));
                }
            }
        }
        if self.task().opcode == Opcode::Matvec {
            self.stream();
        }
    }

    /// Replacement values of a word.
    fn values(&self, word: u32) -> BTreeSet<u32> {
        let near = [word.wrapping_add(1), word.wrapping_sub(1), word ^ 2, word / 2];
        let mut values = BTreeSet::from([word.wrapping_mul(2), 0, 1, 8, 32, u32::MAX]);
        values.extend(near);
        if self.wide {
            values.extend(0..=16);
            values.extend((0..32).map(|bit| word ^ (1 << bit)));
            values.extend([3, 4, 5].map(|factor| word.wrapping_mul(factor)));
        }
        values
    }

    /// Other tiles or another matrix.
    fn stream(&mut self) {
        let p: MatvecParams = self.task().params();
        let matrices = self.program.matrices.len() as u32;
        let changes = [
            ("tile0", MatvecParams { tile0: p.tile0 + 1, ..p }),
            ("tile0", MatvecParams { tile0: p.tile0.saturating_sub(1), ..p }),
            ("tile0", MatvecParams { tile0: p.tile0 + 2, ..p }),
            ("tiles", MatvecParams { tiles: p.tiles + 1, ..p }),
            ("tiles", MatvecParams { tiles: (p.tiles - 1).max(1), ..p }),
            ("matrix", MatvecParams { matrix: (p.matrix + 1) % matrices, ..p }),
            // The same matrix of the next layer.
            ("matrix", MatvecParams { matrix: (p.matrix + 4) % matrices, ..p }),
        ];
        for (name, p) in changes {
            self.push(name, name, Change::Stream(p));
        }
    }

    /// Each buffer read and written.
    fn accesses(&mut self) {
        let (reads, writes) = (self.task().reads, self.task().writes);
        for (operand, access) in reads.into_iter().enumerate() {
            for (what, other) in self.others(access) {
                self.push(&format!("reads[{operand}]"), &what, Change::Read(operand, other));
            }
        }
        for (operand, access) in writes.into_iter().enumerate() {
            for (what, other) in self.others(access) {
                self.push(&format!("writes[{operand}]"), &what, Change::Write(operand, other));
            }
        }
    }

    /// Replacements of an access: nothing, buffers of the same kind and size, and any other.
    fn others(&self, buffer: Option<BufferId>) -> Vec<(String, Option<BufferId>)> {
        let buffers = &self.program.buffers;
        let at = |index: usize| BufferId(index as u32);
        let Some(buffer) = buffer else {
            let some = self.place.1 % buffers.len();
            let others = (0..buffers.len()).filter(|&index| self.wide || index == some).map(at);
            return others.map(|other| (format!("buffer {other} for none"), Some(other))).collect();
        };
        let own = &buffers[buffer.index()];
        let mut all = vec![(format!("none for buffer {buffer}"), None)];
        let twins = (0..buffers.len()).filter(|&i| {
            let alike = buffers[i].kind == own.kind && buffers[i].words == own.words;
            i != buffer.index() && (self.wide || alike)
        });
        let next = (buffer.index() + 1) % buffers.len();
        for index in twins.chain([next]) {
            let names = (&buffers[index].name, &own.name);
            all.push((format!("buffer {} for {}", names.0, names.1), Some(at(index))));
        }
        all
    }
}
