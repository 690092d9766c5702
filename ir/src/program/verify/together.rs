//! Programs that sessions may run side by side, each in a lane of its own.
//!
//! Every task does the work of all lanes, lane after lane, before it signals. Lanes share queues, counters and weights, and nothing that is
//! written: each has activations, logits and a session of its own. So that short contexts do not queue up on the few workers of split 0, lane
//! `l` runs, in the task of split `s` of `n`, split `(s + l) % n`. What a lane runs is thus a program like any other, the [`rotated`] one, and
//! must be accepted like any other. One thing more is needed: a task of which one lane waits keeps the lanes behind it waiting too, so
//! there must be one sequence of tasks that suits all lanes. Without it two of them could wait for each other through two lanes.

use abi::{AttentionParams, Opcode};

use super::{Verified, check};
use crate::program::Program;
use crate::program::rules::order::{self, Order};
use crate::violation::{At, Rule, Violations};

/// What lane `lane` of a batch runs: the program with the splits of each head's keys dealt to its tasks anew.
#[must_use]
pub fn rotated(program: &Program, lane: u32) -> Program {
    let mut program = program.clone();
    let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
    for task in tasks.filter(|task| task.opcode == Opcode::Attention) {
        let p: AttentionParams = task.params();
        let split = (p.split + lane) % p.splits.max(1);
        task.params = bytemuck::cast(AttentionParams { split, ..p });
    }
    program
}

/// A program that so many lanes may share. Only [`Together::new`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    program: Verified<Program>,
    lanes: u32,
}

impl Together {
    /// Verifies what each lane runs, and that they can run beside each other.
    ///
    /// # Errors
    /// All violations of the first lane that has any.
    pub fn new(program: Verified<Program>, lanes: u32) -> Result<Self, Violations> {
        let most = abi::LANES_MAX as u32;
        if !(1..=most).contains(&lanes) {
            let mut found = Violations::default();
            found.push(Rule::PLimit, At::Whole, format!("{lanes} lanes, not within 1..={most}"));
            return Err(found);
        }
        let order = Order::of(&program);
        for lane in 1..lanes {
            let mine = rotated(&program, lane);
            if mine != *program {
                check(&mine)?;
                suits(&mine, &order, lane)?;
            }
        }
        Ok(Self { program, lanes })
    }

    /// Lanes that may share it.
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.lanes
    }

    /// The program of lane 0.
    #[must_use]
    pub fn program(&self) -> &Verified<Program> {
        &self.program
    }

    /// The program of a lane, if there is such a lane.
    #[must_use]
    pub fn lane(&self, lane: u32) -> Option<Verified<Program>> {
        (lane < self.lanes).then(|| Verified(rotated(&self.program, lane)))
    }
}

/// A lane's hand-offs go forward in the sequence of the first lane. Queues and counters, which all lanes share, do anyway.
fn suits(program: &Program, order: &Order, lane: u32) -> Result<(), Violations> {
    let Some((writer, reader)) = order::backward(program, order) else { return Ok(()) };
    let mut found = Violations::default();
    let detail = format!(
        "lane {lane} waits for words of {}, which comes later in lane 0",
        order.at(writer)
    );
    found.push(Rule::OAcyclic, order.at(reader), detail);
    Err(found)
}
