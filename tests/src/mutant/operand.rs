//! Mutants of the program: every operand of every op, in one task or in all that do the same.

use std::collections::BTreeMap;

use abi::{MatvecParams, Opcode};
use ir::SlotId;
use ir::program::{Access, Program, Task};

use super::{Base, Mistake, Mutant};
use crate::edit::restream;

/// What tells tasks apart that do the same at different places: op, layer, matrix, prologue and epilogue.
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
    /// In every task of its kind.
    everywhere: bool,
    change: Change,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    /// A word of the parameters.
    Param(usize, u32),
    /// Other products, with a load stream that follows.
    Stream(MatvecParams),
    /// A slot that is read.
    Read(usize, Option<Access>),
    /// A slot that is written.
    Write(usize, Option<Access>),
}

impl Edit {
    /// The changed program.
    pub(super) fn apply(self, right: &Program) -> Program {
        let mut program = right.clone();
        let edited = kind(&right.workers[self.place.0].tasks[self.place.1]);
        for (worker, queue) in program.workers.iter_mut().enumerate() {
            for (index, task) in queue.tasks.iter_mut().enumerate() {
                let here = (worker, index) == self.place;
                if here || (self.everywhere && kind(task) == edited) {
                    self.change.apply(task);
                }
            }
        }
        if matches!(self.change, Change::Stream(_)) {
            restream(&mut program);
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

/// Every operand of the first and last task of each kind changed, in each schedule's program.
#[must_use]
pub fn operands<'b>(base: &Base) -> Vec<Mutant<'b>> {
    let mut all = Vec::new();
    for schedule in 0..base.schedules() {
        let program: &Program = base.program(schedule);
        for place in places(program) {
            let mut mutants = Mutants { program, schedule, place, list: &mut all };
            mutants.params();
            mutants.accesses();
        }
    }
    all
}

/// Mutants of one task.
struct Mutants<'p, 'l, 'b> {
    program: &'p Program,
    schedule: usize,
    place: Place,
    list: &'l mut Vec<Mutant<'b>>,
}

impl Mutants<'_, '_, '_> {
    fn task(&self) -> &Task {
        &self.program.workers[self.place.0].tasks[self.place.1]
    }

    /// In this task, and once more in all of its kind.
    fn push(&mut self, class: &str, what: &str, change: Change) {
        let mut changed = self.task().clone();
        change.apply(&mut changed);
        if changed == *self.task() {
            return;
        }
        let (task, (worker, index)) = (self.task(), self.place);
        let (op, layer) = (task.opcode.info().name, task.layer);
        for everywhere in [false, true] {
            if everywhere && matches!(change, Change::Stream(_)) {
                continue;
            }
            let whose = if everywhere { "every task like" } else { "task" };
            let what = format!(
                "{what} of {whose} {index} of worker {worker}, layer {layer}, schedule {}",
                self.schedule
            );
            let edit = Edit { place: self.place, everywhere, change };
            self.list.push(Mutant {
                class: format!("{op}.{class}"),
                what,
                schedule: self.schedule,
                mistake: Mistake::Program(edit),
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
            } else if matches!(field.name, "eps" | "scale") {
                for factor in [0.0, 0.5, 0.99, 1.01, 2.0, 100.0] {
                    let value = f32::from_bits(word) * factor;
                    let what = format!("{} {value} for {}", field.name, f32::from_bits(word));
                    self.push(field.name, &what, Change::Param(first, value.to_bits()));
                }
            } else {
                let near = [word.wrapping_add(1), word.wrapping_sub(1), word ^ 2, word / 2];
                let twice = word.wrapping_mul(2);
                for value in near.into_iter().chain([twice, 0, 1, 8, 32, u32::MAX]) {
                    let what = format!("{} {value} for {word}", field.name);
                    self.push(field.name, &what, Change::Param(first, value));
                }
            }
        }
        if self.task().opcode == Opcode::Matvec {
            self.stream();
        }
    }

    /// Other tiles or another matrix, with a load stream that follows.
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
            self.push(name, &format!("{name} with its loads"), Change::Stream(p));
        }
    }

    /// Each slot read and written, and its generation.
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

    /// What could stand in place of an access: nothing, another generation, slots of the same kind and size, and any other.
    fn others(&self, access: Option<Access>) -> Vec<(String, Option<Access>)> {
        let slots = &self.program.slots;
        let at = |index: usize| Access { slot: SlotId(index as u32), generation: 0 };
        let Some(access) = access else {
            let other = at(self.place.1 % slots.len());
            return vec![(format!("slot {} for none", other.slot), Some(other))];
        };
        let own = &slots[access.slot.index()];
        let mut all = vec![(format!("none for slot {}", access.slot), None)];
        for generation in [access.generation + 1, access.generation.saturating_sub(1)] {
            let other = Access { generation, ..access };
            all.push((format!("generation {generation} of slot {}", access.slot), Some(other)));
        }
        let twins = (0..slots.len()).filter(|&i| {
            i != access.slot.index() && slots[i].kind == own.kind && slots[i].words == own.words
        });
        let next = (access.slot.index() + 1) % slots.len();
        for index in twins.chain([next]) {
            let other = Access { generation: access.generation, ..at(index) };
            let names = (&slots[index].name, &own.name);
            all.push((format!("slot {} for {}", names.0, names.1), Some(other)));
        }
        all
    }
}
