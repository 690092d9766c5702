//! The first task of a program that went wrong, as documents and ledgers record it.

use ir::program::{Program, unordered};
use reference_vm::divergence::{Divergence, Place, ulps};
use reference_vm::machine::Run;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rejection::Rejection;

/// The kind of error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DivergenceClass {
    /// Repeats give the same wrong values.
    #[default]
    Wrong,
    /// Repeats of the program on the same input give different values.
    Race,
    /// The program stopped in the middle of a step.
    Halted,
}

/// A task of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskAt {
    /// Its worker.
    pub worker: u32,
    /// Its index in the worker's queue.
    pub task: u32,
    /// Its op.
    pub opcode: String,
    /// Its layer; the number of layers for tasks after the last one.
    pub layer: u16,
}

impl TaskAt {
    /// A task by worker and index.
    #[must_use]
    pub fn of(program: &Program, worker: u32, task: u32) -> Self {
        let found = program.workers.get(worker as usize).and_then(|w| w.tasks.get(task as usize));
        let (opcode, layer) = found.map_or(("?", 0), |task| (task.opcode.info().name, task.layer));
        Self { worker, task, opcode: opcode.to_owned(), layer }
    }
}

impl std::fmt::Display for TaskAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { worker, task, opcode, layer } = self;
        write!(f, "worker {worker}, task {task} ({opcode}, layer {layer})")
    }
}

/// The first task that went wrong, in the order in which the reference VM runs the program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FirstDivergence {
    /// wrong, race or halted.
    pub class: DivergenceClass,
    /// Where the values come from: reference or device.
    pub by: String,
    /// The position.
    pub position: Option<u64>,
    /// The task; null if no single task stands out.
    pub task: Option<TaskAt>,
    /// Where it stored: a buffer's name, `layers.N.keys`, `layers.N.values` or `token`.
    pub buffer: Option<String>,
    /// The word of the buffer with the largest error.
    pub index: Option<u64>,
    /// The value there; null if it is not finite.
    pub got: Option<f64>,
    /// The value that the graph computes from the task's inputs.
    pub want: Option<f64>,
    /// Their distance in units in the last place of f32.
    pub ulp: Option<u64>,
    /// The allowed difference.
    pub allowed: Option<f64>,
    /// Words of this task with a larger difference than allowed.
    pub words: Option<u64>,
    /// Of a race: a task that writes words and one that reads them, which nothing orders. Empty if there are none.
    #[serde(default)]
    pub unordered: Vec<TaskAt>,
    /// A description in words, including what could not be determined.
    pub detail: String,
    /// The command that reruns only that task.
    #[serde(default)]
    pub rerun: Option<String>,
}

impl FirstDivergence {
    pub(crate) fn new(class: DivergenceClass, by: &str, detail: String) -> Self {
        Self { class, by: by.to_owned(), detail, ..Self::default() }
    }

    /// The divergence of a task that stored a wrong value.
    #[must_use]
    pub fn of(program: &Program, by: &str, at: &Divergence) -> Self {
        let task = TaskAt::of(program, at.worker.0, at.task);
        let buffer = place_name(program, at.place);
        let finite = |value: f32| value.is_finite().then_some(f64::from(value));
        let ulp = ulps(at.got, at.want);
        let apart = ulp.map_or(String::new(), |ulp| format!(", {ulp} ulp"));
        let detail = format!(
            "position {}: {task} stored {} in word {} of {buffer} where {} belongs (allowed {:.1e}{apart}); {} of its words are wrong",
            at.position, at.got, at.index, at.want, at.allowed, at.words
        );
        Self {
            position: Some(at.position as u64),
            task: Some(task),
            buffer: Some(buffer),
            index: Some(at.index as u64),
            got: finite(at.got),
            want: finite(at.want),
            ulp,
            allowed: Some(at.allowed),
            words: Some(at.words as u64),
            ..Self::new(DivergenceClass::Wrong, by, detail)
        }
    }

    pub(crate) fn halted(program: &Program, run: &Run) -> Option<Self> {
        let (worker, task) = match run {
            Run::Trapped(trap) => (trap.worker.0, trap.task),
            Run::Stuck { waiting } => waiting.first().map(|w| (w.worker.0, w.task))?,
            Run::Finished(_) => return None,
        };
        let task = TaskAt::of(program, worker, task);
        let detail = format!("{task}: {}", Rejection::Halted(run.clone()));
        let found = Self::new(DivergenceClass::Halted, "reference", detail);
        Some(Self { task: Some(task), ..found })
    }

    /// Turns a divergence into a race, and names two tasks that nothing orders.
    #[must_use]
    pub fn as_race(mut self, program: &Program) -> Self {
        self.class = DivergenceClass::Race;
        let pairs = unordered(program).unwrap_or_default();
        let (named, why) = match pairs.first() {
            Some(pair) => {
                let at = |(worker, task): (ir::WorkerId, u32)| TaskAt::of(program, worker.0, task);
                let (writer, reader) = (at(pair.writer), at(pair.reader));
                let buffer = place_name(program, Place::Buffer(pair.buffer));
                let why = format!(
                    "{writer} writes words {}..{} of {buffer}, {reader} reads them, and nothing orders the two ({} such pairs)",
                    pair.start, pair.end, pairs.len()
                );
                (vec![writer, reader], why)
            }
            None => (
                Vec::new(),
                "every read is ordered after its write by the program, so the fault is in what runs it".to_owned(),
            ),
        };
        self.unordered = named;
        self.detail = format!("repeats differ: {why}; {}", self.detail);
        self
    }
}

/// A place in words.
#[must_use]
pub fn place_name(program: &Program, place: Place) -> String {
    match place {
        Place::Buffer(buffer) => program
            .buffers
            .get(buffer.index())
            .map_or_else(|| buffer.to_string(), |found| found.name.clone()),
        Place::Keys(layer) => format!("layers.{layer}.keys"),
        Place::Values(layer) => format!("layers.{layer}.values"),
        Place::Token => "token".to_owned(),
    }
}
