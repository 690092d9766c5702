//! Programs that sessions may run side by side, each in a lane of its own.
//!
//! Every task does the work of all lanes, lane after lane, before it signals. Lanes share queues, counters and weights, and nothing that is
//! written: each has activations, logits and a session of its own. So that short contexts do not queue up on the few workers of split 0, lane
//! `l` runs, in the task of split `s` of `n`, split `(s + l) % n`. What a lane runs is thus a program like any other, the [`rotated`] one, and
//! must be accepted like any other: the bytes of a split may have been somebody else's before, and who waited until they are free is the task
//! that writes them in lane 0.
//!
//! That each lane by itself comes to an end does not say that all do: a task of which one lane waits keeps the lanes behind it waiting too. It
//! follows here, because all lanes wait for the same tasks. Queues and counters are shared. Of the hand-offs only those of attention change
//! their writers, within a head; and whoever reads a head's partials reads those of all its splits (`K-SPLIT`), so it waits for the same
//! tasks whichever lane it is in.

use abi::{AttentionParams, Opcode};

use super::{Verified, check};
use crate::program::Program;
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
    /// Verifies what each lane runs.
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
        for lane in 1..lanes {
            check(&rotated(&program, lane))?;
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
