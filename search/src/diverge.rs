//! Where a refused candidate goes wrong: the first task of the program that stored something else than the graph makes of what it had.
//!
//! Looked for when a gate has said no, never before: the gates compare what comes out at the end, and cost what they did.

use ir::program::{Program, Verified, unordered};
use reference_vm::compare::Disagreement;
use reference_vm::divergence::{Divergence, Examiner, Place, ulps};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Fired, Order, Stored};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cpu::Candidate;
use crate::device::{Device, DeviceError};
use crate::expected::Expected;
use crate::gate::{BitsDiffer, Dropped, Gate};

/// What kind of mistake it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DivergenceClass {
    /// Repeats give the same wrong values.
    Wrong,
    /// Repeats of the program on the same input differ among themselves.
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
    /// Its layer; the number of layers for what follows the last.
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

/// The first task that went wrong, in the order in which the reference machine runs the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FirstDivergence {
    /// wrong, race or halted.
    pub class: DivergenceClass,
    /// Whose values they are: reference or device.
    pub by: String,
    /// The position.
    pub position: Option<u64>,
    /// The task; null where none stands out.
    pub task: Option<TaskAt>,
    /// Where it stored: a slot's name, `layers.N.keys`, `layers.N.values` or `token`.
    pub slot: Option<String>,
    /// The word of the slot that is furthest off.
    pub index: Option<u64>,
    /// What is there; null for what is not finite.
    pub got: Option<f64>,
    /// What the graph makes of what the task had.
    pub want: Option<f64>,
    /// How many numbers of f32 they are apart.
    pub ulp: Option<u64>,
    /// How far they may be apart.
    pub allowed: Option<f64>,
    /// Words of this task that are further off than they may be.
    pub words: Option<u64>,
    /// Of a race: two tasks that touch the same bytes, of which one writes, with nothing that orders them. Empty where there are none.
    #[serde(default)]
    pub unordered: Vec<TaskAt>,
    /// All of it in words, and what could not be found out.
    pub detail: String,
    /// The command that runs only that task again.
    #[serde(default)]
    pub rerun: Option<String>,
}

impl FirstDivergence {
    fn new(class: DivergenceClass, by: &str, detail: String) -> Self {
        Self {
            class,
            by: by.to_owned(),
            position: None,
            task: None,
            slot: None,
            index: None,
            got: None,
            want: None,
            ulp: None,
            allowed: None,
            words: None,
            unordered: Vec::new(),
            detail,
            rerun: None,
        }
    }

    /// A task that stored what does not belong there.
    #[must_use]
    pub fn of(program: &Program, by: &str, at: &Divergence) -> Self {
        let task = TaskAt::of(program, at.worker.0, at.task);
        let slot = place_name(program, at.place);
        let finite = |value: f32| value.is_finite().then_some(f64::from(value));
        let ulp = ulps(at.got, at.want);
        let apart = ulp.map_or(String::new(), |ulp| format!(", {ulp} ulp"));
        let detail = format!(
            "position {}: {task} stored {} in word {} of {slot} where {} belongs (allowed {:.1e}{apart}); {} of its words are wrong",
            at.position, at.got, at.index, at.want, at.allowed, at.words
        );
        Self {
            position: Some(at.position as u64),
            task: Some(task),
            slot: Some(slot),
            index: Some(at.index as u64),
            got: finite(at.got),
            want: finite(at.want),
            ulp,
            allowed: Some(at.allowed),
            words: Some(at.words as u64),
            ..Self::new(DivergenceClass::Wrong, by, detail)
        }
    }

    fn halted(program: &Program, run: &Run) -> Option<Self> {
        let (worker, task) = match run {
            Run::Trapped(trap) => (trap.worker.0, trap.task),
            Run::Stuck { waiting } => waiting.first().map(|w| (w.worker.0, w.task))?,
            Run::Finished(_) | Run::OutOfFuel { .. } => return None,
        };
        let task = TaskAt::of(program, worker, task);
        let detail = format!("{task}: {}", Dropped::Halted(run.clone()));
        let found = Self::new(DivergenceClass::Halted, "reference", detail);
        Some(Self { task: Some(task), ..found })
    }

    /// Turns a finding into one of a race, and names two tasks that nothing orders.
    #[must_use]
    pub fn as_race(mut self, program: &Program) -> Self {
        self.class = DivergenceClass::Race;
        let pairs = unordered(program).unwrap_or_default();
        let (named, why) = match pairs.first() {
            Some(pair) => {
                let at = |(worker, task): (ir::WorkerId, u32)| TaskAt::of(program, worker.0, task);
                let (writer, reader) = (at(pair.writer), at(pair.reader));
                let slot = place_name(program, Place::Slot(pair.slot));
                let why = format!(
                    "{writer} writes words {}..{} of {slot}, {reader} reads them, and nothing orders the two ({} such pairs)",
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
        Place::Slot(slot) => program
            .slots
            .get(slot.index())
            .map_or_else(|| slot.to_string(), |found| found.name.clone()),
        Place::Keys { layer } => format!("layers.{layer}.keys"),
        Place::Values { layer } => format!("layers.{layer}.values"),
        Place::Token => "token".to_owned(),
    }
}

/// Where the gates saw it.
fn position_of(at: &Disagreement) -> Option<usize> {
    match *at {
        Disagreement::Nothing { position, .. }
        | Disagreement::Elements { position, .. }
        | Disagreement::NotFinite { position, .. }
        | Disagreement::Chosen { position, .. }
        | Disagreement::Beyond { position, .. } => Some(position),
        Disagreement::Positions { .. } => None,
    }
}

impl Gate<'_> {
    /// Where a candidate that was refused goes wrong first. Nothing for what is refused for other reasons.
    pub fn locate(
        &self,
        device: Option<&mut (dyn Device + '_)>,
        candidate: &Candidate,
        dropped: &Dropped,
    ) -> Option<FirstDivergence> {
        let program = &candidate.program;
        match dropped {
            Dropped::Halted(run) => FirstDivergence::halted(program, run),
            Dropped::Sampled { position, .. } => self.on_reference(program, Some(*position)),
            Dropped::Disagreed { by: "reference", at } => {
                self.on_reference(program, position_of(at))
            }
            Dropped::Unrepeatable(at) => Some(Self::race(candidate, at)),
            Dropped::Disagreed { by, at } => {
                // What a timed run left is that of its last position.
                let timed = (*by == "timed").then(|| self.expected().tokens.len() - 1);
                let position = timed.or_else(|| position_of(at))?;
                let found = self.on_device(device?, candidate, position);
                Some(found.unwrap_or_else(|error| {
                    let detail = format!("the device did not run it again: {error}");
                    FirstDivergence::new(DivergenceClass::Wrong, "device", detail)
                }))
            }
            Dropped::Rejected(_)
            | Dropped::Unloadable(_)
            | Dropped::Unrunnable(_)
            | Dropped::Unevaluated(_)
            | Dropped::Failed(_)
            | Dropped::BelowFloor(_) => None,
        }
    }

    /// Of a device whose runs agree and yet differ in bits.
    fn race(candidate: &Candidate, at: &BitsDiffer) -> FirstDivergence {
        let found = FirstDivergence::new(DivergenceClass::Race, "device", at.to_string());
        let found = FirstDivergence {
            position: Some(at.position as u64),
            slot: Some("logits".to_owned()),
            index: Some(at.word as u64),
            ..found
        };
        found.as_race(&candidate.program)
    }

    fn on_reference(
        &self,
        program: &Verified<Program>,
        until: Option<usize>,
    ) -> Option<FirstDivergence> {
        let cpu = &self.ahead.cpu;
        let examiner = Examiner::new(cpu.graph, cpu.weights).ok()?;
        let mut machine = cpu.machine(program).ok()?;
        let found = self.expected().diverges(&examiner, &mut machine, until);
        let found = found.map(|at| FirstDivergence::of(program, "reference", &at));
        Some(found.unwrap_or_else(|| {
            let detail = "no single task stands out: each stored what follows from what it had, within the roundings of one op".to_owned();
            FirstDivergence::new(DivergenceClass::Wrong, "reference", detail)
        }))
    }

    /// Runs the device again as far as the position, twice, and looks at what its tasks have stored there.
    fn on_device(
        &self,
        device: &mut dyn Device,
        candidate: &Candidate,
        position: usize,
    ) -> Result<FirstDivergence, DeviceError> {
        let program = &candidate.program;
        let tokens = &self.expected().tokens[..=position.min(self.expected().tokens.len() - 1)];
        let mut rows = Vec::new();
        let mut slots = None;
        for _ in 0..2 {
            let handle = device.prepare(program, &candidate.config.kernel)?;
            rows.push(device.run(handle, tokens, 0)?.logits);
            slots = device.slots(handle)?;
        }
        let bits = |rows: &Vec<Vec<f32>>| -> Vec<u32> {
            rows.iter().flatten().map(|value| value.to_bits()).collect()
        };
        let same = bits(&rows[0]) == bits(&rows[1]);
        let found = match slots {
            Some(slots) => self.among_slots(program, tokens, &slots, rows[1].last()),
            None => FirstDivergence::new(
                DivergenceClass::Wrong,
                "device",
                "this device cannot say what its slots hold".to_owned(),
            ),
        };
        Ok(if same { found } else { found.as_race(program) })
    }

    /// Judges what a device left in its slots beside a reference machine that made the same steps.
    fn among_slots(
        &self,
        program: &Verified<Program>,
        tokens: &[u32],
        slots: &[Vec<f32>],
        logits: Option<&Vec<f32>>,
    ) -> FirstDivergence {
        let cpu = &self.ahead.cpu;
        let none = |detail: &str| {
            FirstDivergence::new(DivergenceClass::Wrong, "device", detail.to_owned())
        };
        let (Ok(examiner), Ok(mut machine)) =
            (Examiner::of_device(cpu.graph, cpu.weights), cpu.machine(program))
        else {
            return none("the reference machine does not run it");
        };
        let Some((&token, before)) = tokens.split_last() else { return none("nothing was run") };
        let ran =
            machine.run(before, Order::Waves).and_then(|_| machine.traced(token, Order::Waves));
        let Ok((Run::Finished(_), fired)) = ran else {
            return none("the reference machine does not run it");
        };
        let (left, overwritten) = left_in(program, &fired, slots, logits);
        let said = match overwritten {
            0 => String::new(),
            n => {
                format!("; what {n} tasks stored was overwritten later in the step and not judged")
            }
        };
        match examiner.first(&machine, token, &left) {
            Some(at) => {
                let mut found = FirstDivergence::of(program, "device", &at);
                found.detail.push_str(&said);
                found
            }
            None => none(&format!(
                "no task of position {} stands out in what the device left in its slots{said}",
                tokens.len() - 1
            )),
        }
    }
}

/// What each task of a step has left in the slots, in the order of `fired`, and how many left nothing: others have written there since.
#[must_use]
pub fn left_in(
    program: &Program,
    fired: &[Fired],
    slots: &[Vec<f32>],
    logits: Option<&Vec<f32>>,
) -> (Vec<Fired>, usize) {
    let bytes = |stored: &Stored| {
        let slot = &program.slots[stored.slot.index()];
        let first = slot.offset + u64::from(stored.start) * 4;
        (slot.arena_bytes() > 0).then_some(first..first + stored.values.len() as u64 * 4)
    };
    let mut overwritten = 0;
    let mut left = Vec::new();
    // From the last one on: what is behind a write in time is in front of it here.
    let mut later: Vec<std::ops::Range<u64>> = Vec::new();
    for task in fired.iter().rev() {
        let mut writes = Vec::new();
        for stored in &task.writes {
            let range = bytes(stored);
            let hit = |range: &std::ops::Range<u64>| {
                later.iter().any(|other| other.start < range.end && range.start < other.end)
            };
            if range.as_ref().is_some_and(hit) {
                overwritten += 1;
                continue;
            }
            let held = match range {
                Some(_) => slots.get(stored.slot.index()),
                None => logits,
            };
            let words = stored.start as usize..stored.start as usize + stored.values.len();
            if let Some(values) = held.and_then(|held| held.get(words)) {
                writes.push(Stored { values: values.to_vec(), ..stored.clone() });
            }
        }
        later.extend(task.writes.iter().filter_map(bytes));
        left.push(Fired::elsewhere(task.worker, task.task, writes));
    }
    left.reverse();
    (left, overwritten)
}

impl Expected {
    /// The first task that goes wrong at the positions of the gate, up to the one where the gate saw it.
    #[must_use]
    pub fn diverges(
        &self,
        examiner: &Examiner<'_>,
        machine: &mut Machine<'_>,
        until: Option<usize>,
    ) -> Option<Divergence> {
        let mut found = None;
        self.each_position(machine, until, |machine, token, fired| {
            found = examiner.first(machine, token, fired);
            found.is_none()
        });
        found
    }
}

#[cfg(test)]
mod tests;
