//! The order of phases in the memory model: which counters a task must wait for besides that of its input. `verify`
//! proves it again, task by task.
//!
//! Counters order everything before them; a flag-in-data hand-off orders nothing besides its own words. So a worker has
//! acquired a phase only if it has waited for that phase's counter or a later one; a flag-in-data phase in between does
//! not count.

use std::ops::Range;

use crate::assign::Shares;
use crate::flow::{Flow, Op, Phase, ValueId};

/// For each worker, the number of its leading phases whose accesses are all known to have happened.
type Known = Vec<usize>;

/// The order between a step's phases and workers.
pub(crate) struct PhaseOrder {
    /// By phase and worker: whether the worker has tasks of the phase.
    takes_part: Vec<Vec<bool>>,
    /// By phase and worker: whether its tasks must wait for the counter of the residual that they add.
    catches_up: Vec<Vec<bool>>,
}

/// The rows of the residual stream that a worker writes or adds to, unless it reads all of them.
fn rows(phase: &Phase, share: &Range<u32>) -> Range<u32> {
    let each = if matches!(phase.op, Op::Matvec(_)) { abi::UNIT_ROWS } else { 1 };
    share.start * each..share.end * each
}

fn join(mine: &mut Known, theirs: &Known) {
    mine.iter_mut().zip(theirs).for_each(|(m, t)| *m = (*m).max(*t));
}

impl PhaseOrder {
    pub(crate) fn new(flow: &Flow, shares: &[Shares]) -> Self {
        let phases = &flow.phases;
        let workers = shares.first().map_or(0, Vec::len);
        let takes_part: Vec<Vec<bool>> =
            shares.iter().map(|s| s.iter().map(|range| !range.is_empty()).collect()).collect();
        let writer = |value: ValueId| flow.writer(value).filter(|_| flow.counted(value));
        let mut order = Self { catches_up: vec![vec![false; workers]; phases.len()], takes_part };
        let mut now: Vec<Known> = vec![vec![0; workers]; workers];
        // What a wait for the counter of each phase acquires.
        let mut released: Vec<Option<Known>> = Vec::new();
        for phase in 0..phases.len() {
            let input = writer(phases[phase].input);
            let residual = phases[phase].residual.and_then(writer);
            for worker in 0..workers {
                if !order.takes_part[phase][worker] {
                    continue;
                }
                let mine = &mut now[worker];
                if let Some(theirs) = input.and_then(|before| released[before].as_ref()) {
                    join(mine, theirs);
                }
                let whole = phases[phase].reads_whole_residual();
                let added = |wrote: &Range<u32>| {
                    whole
                        || shares[phase][worker].iter().any(|share| {
                            let added = rows(&phases[phase], share);
                            wrote.start < added.end && added.start < wrote.end
                        })
                };
                let unknown = |&written: &usize| {
                    shares[written].iter().zip(mine.iter()).any(|(part, &known)| {
                        let mut wrote = part.iter().map(|share| rows(&phases[written], share));
                        known <= written && wrote.any(|wrote| added(&wrote))
                    })
                };
                if let Some(written) = residual.filter(unknown) {
                    order.catches_up[phase][worker] = true;
                    released[written].iter().for_each(|theirs| join(mine, theirs));
                }
                mine[worker] = phase + 1;
            }
            let part = || (0..workers).filter(|&w| order.takes_part[phase][w]);
            released.push(phases[phase].output.and_then(writer).map(|_| {
                part().fold(vec![0; workers], |mut all, w| {
                    join(&mut all, &now[w]);
                    all
                })
            }));
        }
        order
    }

    /// Whether this worker's task also waits for the counter of the residual.
    pub(crate) fn catches_up(&self, phase: usize, worker: usize) -> bool {
        self.catches_up[phase][worker]
    }
}
