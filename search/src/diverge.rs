//! Locates where a rejected candidate goes wrong: the first task of the program that stored something else than the
//! graph computes from the task's inputs.
//!
//! This runs only after a gate has rejected the candidate. The gates compare final outputs, so it adds nothing to their
//! cost.

use ir::BufferId;
use ir::program::{Program, Verified};
use reference_vm::compare::Disagreement;
use reference_vm::divergence::{Divergence, Examiner};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Fired, Order, Stored};

use crate::cpu::Candidate;
use crate::device::{Device, DeviceError};
use crate::divergence::{DivergenceClass, FirstDivergence};
use crate::expected::Expected;
use crate::gate::Gate;
use crate::rejection::{BitsDiffer, Rejection};

/// The position at which a gate saw the disagreement.
fn position_of(at: &Disagreement) -> Option<usize> {
    match *at {
        Disagreement::Nothing { position, .. }
        | Disagreement::Elements { position, .. }
        | Disagreement::NotFinite { position, .. }
        | Disagreement::Chosen { position, .. }
        | Disagreement::Beyond { position, .. }
        | Disagreement::Stray { position, .. } => Some(position),
        Disagreement::Positions { .. } => None,
    }
}

impl Gate<'_> {
    /// Finds where a rejected candidate first goes wrong. `None` for other kinds of rejection.
    pub fn locate(
        &self,
        device: Option<&mut (dyn Device + '_)>,
        candidate: &Candidate,
        dropped: &Rejection,
    ) -> Option<FirstDivergence> {
        let program = &candidate.program;
        match dropped {
            Rejection::Halted(run) => FirstDivergence::halted(program, run),
            Rejection::Sampled { position, .. } => self.on_reference(program, Some(*position)),
            Rejection::Disagreed { by: "reference", at } => {
                self.on_reference(program, position_of(at))
            }
            Rejection::Unrepeatable(at) => Some(Self::race(candidate, at)),
            Rejection::Disagreed { by, at } => {
                // After a timed run the buffers hold the values of its last position.
                let timed = (*by == "timed").then(|| self.expected().tokens.len() - 1);
                let position = timed.or_else(|| position_of(at))?;
                let found = self.on_device(device?, candidate, position);
                Some(found.unwrap_or_else(|error| {
                    let detail = format!("the device did not run it again: {error}");
                    FirstDivergence::new(DivergenceClass::Wrong, "device", detail)
                }))
            }
            Rejection::Rejected(_)
            | Rejection::Unloadable(_)
            | Rejection::Unrunnable(_)
            | Rejection::Unevaluated(_)
            | Rejection::Failed(_)
            | Rejection::BelowBound(_) => None,
        }
    }

    /// The divergence of a device whose runs agree with the graph and differ in their bits.
    fn race(candidate: &Candidate, at: &BitsDiffer) -> FirstDivergence {
        let found = FirstDivergence::new(DivergenceClass::Race, "device", at.to_string());
        let found = FirstDivergence {
            position: Some(at.position as u64),
            buffer: Some("logits".to_owned()),
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

    /// Runs the device up to the position, twice, and checks what its tasks stored there.
    fn on_device(
        &self,
        device: &mut dyn Device,
        candidate: &Candidate,
        position: usize,
    ) -> Result<FirstDivergence, DeviceError> {
        let program = &candidate.program;
        let tokens = &self.expected().tokens[..=position.min(self.expected().tokens.len() - 1)];
        let mut rows = Vec::new();
        let mut buffers = None;
        for _ in 0..2 {
            rows.push(candidate.run(device, tokens, 0)?.logits);
            let handle = candidate.load(device)?;
            let all: Vec<_> = (0..program.buffers.len() as u32).map(BufferId).collect();
            buffers = device.buffers(handle, &all)?;
        }
        let bits = |rows: &Vec<Vec<f32>>| -> Vec<u32> {
            rows.iter().flatten().map(|value| value.to_bits()).collect()
        };
        let same = bits(&rows[0]) == bits(&rows[1]);
        let found = match buffers {
            Some(buffers) => self.among_buffers(program, tokens, &buffers, rows[1].last()),
            None => FirstDivergence::new(
                DivergenceClass::Wrong,
                "device",
                "this device cannot say what its buffers hold".to_owned(),
            ),
        };
        Ok(if same { found } else { found.as_race(program) })
    }

    /// Checks the contents of a device's buffers against a reference VM that ran the same steps.
    fn among_buffers(
        &self,
        program: &Verified<Program>,
        tokens: &[u32],
        buffers: &[Vec<f32>],
        logits: Option<&Vec<f32>>,
    ) -> FirstDivergence {
        let cpu = &self.ahead.cpu;
        let none = |detail: &str| {
            FirstDivergence::new(DivergenceClass::Wrong, "device", detail.to_owned())
        };
        let (Ok(examiner), Ok(mut machine)) =
            (Examiner::of_device(cpu.graph, cpu.weights), cpu.machine(program))
        else {
            return none("the reference VM does not run it");
        };
        let Some((&token, before)) = tokens.split_last() else { return none("nothing was run") };
        let ran =
            machine.run(before, Order::Waves).and_then(|_| machine.traced(token, Order::Waves));
        let Ok((Run::Finished(_), fired)) = ran else {
            return none("the reference VM does not run it");
        };
        let (left, overwritten) = left_in(program, &fired, buffers, logits);
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
                "no task of position {} stands out in what the device left in its buffers{said}",
                tokens.len() - 1
            )),
        }
    }
}

/// What each task of a step left in the buffers, in the order of `fired`, and the number of writes that later tasks
/// have overwritten.
#[must_use]
pub fn left_in(
    program: &Program,
    fired: &[Fired],
    buffers: &[Vec<f32>],
    logits: Option<&Vec<f32>>,
) -> (Vec<Fired>, usize) {
    let bytes = |stored: &Stored| {
        let buffer = &program.buffers[stored.buffer.index()];
        let first = buffer.offset + u64::from(stored.start) * 4;
        (buffer.arena_bytes() > 0).then_some(first..first + stored.values.len() as u64 * 4)
    };
    let mut overwritten = 0;
    let mut left = Vec::new();
    // From the last task to the first: `later` holds the ranges written after the current task.
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
                Some(_) => buffers.get(stored.buffer.index()),
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
    /// Finds the first task that goes wrong at the gate's positions, up to `until`, where the gate saw the disagreement.
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
