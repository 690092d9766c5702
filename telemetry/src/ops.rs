//! Tasks by op, derived: what a program has of an op is fixed, and how often its queues passed is counted.

use abi::{Opcode, TELEMETRY_OPS};

use crate::page::Page;

/// Tasks by opcode.
pub type Ops = [u64; TELEMETRY_OPS];

/// Names of opcodes with their tasks, without those that no program has.
pub fn named(ops: &Ops) -> impl Iterator<Item = (&'static str, u64)> {
    let named = Opcode::ALL.iter().map(|op| (op.info().name, ops[*op as usize]));
    named.filter(|(_, tasks)| *tasks > 0)
}

/// Tasks of all workers so far.
#[must_use]
pub fn tasks(page: &Page) -> Ops {
    let mut sum = Ops::default();
    for program in &page.programs {
        for (sum, tasks) in sum.iter_mut().zip(program.all) {
            *sum = sum.wrapping_add(tasks.wrapping_mul(program.passes));
        }
    }
    sum
}

/// Tasks between two looks by worker; of workers beyond those of the page there are only the sums.
#[must_use]
pub fn tasks_by_worker(before: &Page, now: &Page) -> Vec<Ops> {
    let workers = now.programs.iter().map(|program| program.workers).max().unwrap_or(0);
    let mut all = vec![Ops::default(); (workers as usize).min(now.workers.len())];
    for (before, now) in before.programs.iter().zip(&now.programs) {
        let passes = now.passes.saturating_sub(before.passes);
        for (sums, tasks) in all.iter_mut().zip(now.tasks.chunks_exact(TELEMETRY_OPS)) {
            for (sum, tasks) in sums.iter_mut().zip(tasks) {
                *sum = sum.wrapping_add(u64::from(*tasks).wrapping_mul(passes));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_those_of_a_pass_times_the_passes() {
        let (mut before, mut now) = (Page::boxed(), Page::boxed());
        for (number, (passes, matvecs)) in [(10, 3), (1, 5)].into_iter().enumerate() {
            let program = &mut now.programs[number];
            (program.passes, program.workers) = (passes, 2);
            program.all[Opcode::Matvec as usize] = 2 * matvecs;
            program.tasks[Opcode::Matvec as usize] = matvecs as u32;
            program.tasks[TELEMETRY_OPS + Opcode::Matvec as usize] = matvecs as u32;
        }
        before.programs = now.programs;
        before.programs[0].passes = 4;
        assert_eq!(named(&tasks(&now)).collect::<Vec<_>>(), [("matvec", 70)]);
        let by_worker = tasks_by_worker(&before, &now);
        assert_eq!(by_worker.len(), 2);
        assert!(by_worker.iter().all(|ops| ops[Opcode::Matvec as usize] == 18), "{by_worker:?}");
    }
}
