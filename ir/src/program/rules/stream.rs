//! The load stream of each worker is the concatenation of its tasks' units.

use abi::{
    AttentionMergeParams, AttentionParams, EmbedParams, MatvecParams, NopParams, OpVisitor,
    SampleParams, visit,
};

use crate::id::{MatrixId, WorkerId};
use crate::program::{Load, Program, Worker};
use crate::violation::{At, Rule, Violations};

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    for (index, worker) in program.workers.iter().enumerate() {
        let at = At::Worker(WorkerId(index as u32));
        let before = found.total();
        bounds(program, worker, &at, found);
        if found.total() == before
            && let Some(detail) = mismatch(worker)
        {
            found.push(Rule::LStream, at, detail);
        }
    }
}

fn bounds(program: &Program, worker: &Worker, at: &At, found: &mut Violations) {
    for (index, load) in worker.loads.iter().enumerate() {
        let Some(matrix) = program.matrices.get(load.matrix.index()) else {
            found.push(
                Rule::LBounds,
                at.clone(),
                format!("load {index} is of {}, which does not exist", load.matrix),
            );
            continue;
        };
        let end = load.unit0.checked_add(load.units.into());
        if load.units == 0 || end.is_none_or(|end| end > matrix.units()) {
            let detail = format!(
                "load {index} is units {}..+{} of {}, which has {}",
                load.unit0,
                load.units,
                load.matrix,
                matrix.units()
            );
            found.push(Rule::LBounds, at.clone(), detail);
        }
    }
}

/// A run of units: matrix, first unit, units.
type Run = (MatrixId, u64, u64);

/// The units that a task consumes.
struct Consumed;

impl OpVisitor for Consumed {
    type Output = Option<Run>;

    fn nop(&mut self, _: &NopParams) -> Option<Run> {
        None
    }

    fn embed(&mut self, _: &EmbedParams) -> Option<Run> {
        None
    }

    fn matvec(&mut self, p: &MatvecParams) -> Option<Run> {
        let units = u64::from(p.units);
        Some((MatrixId(p.matrix), u64::from(p.tile0) * units, u64::from(p.tiles) * units))
    }

    fn attention(&mut self, _: &AttentionParams) -> Option<Run> {
        None
    }

    fn attention_merge(&mut self, _: &AttentionMergeParams) -> Option<Run> {
        None
    }

    fn sample(&mut self, _: &SampleParams) -> Option<Run> {
        None
    }
}

/// Walks both streams at once; the first difference.
fn mismatch(worker: &Worker) -> Option<String> {
    let mut loads =
        worker.loads.iter().map(|&Load { matrix, unit0, units }| (matrix, unit0, u64::from(units)));
    let mut tasks = worker
        .tasks
        .iter()
        .enumerate()
        .filter_map(|(i, t)| visit(t.opcode, &t.params, &mut Consumed).map(|run| (i, run)));
    let mut load: Option<Run> = None;
    let mut task: Option<(usize, Run)> = None;
    loop {
        load = load.filter(|l| l.2 > 0).or_else(|| loads.next());
        task = task.filter(|t| t.1.2 > 0).or_else(|| tasks.next());
        match (load.as_mut(), task.as_mut()) {
            (None, None) => return None,
            (Some((matrix, unit, _)), None) => {
                return Some(format!("unit {unit} of {matrix} is loaded and no task consumes it"));
            }
            (None, Some((index, (matrix, unit, _)))) => {
                return Some(format!(
                    "task {index} consumes unit {unit} of {matrix}, but the loads have ended"
                ));
            }
            (Some(l), Some((index, t))) => {
                if (l.0, l.1) != (t.0, t.1) {
                    return Some(format!(
                        "task {index} consumes unit {} of {}, but the next load is unit {} of {}",
                        t.1, t.0, l.1, l.0
                    ));
                }
                let units = l.2.min(t.2);
                *l = (l.0, l.1 + units, l.2 - units);
                *t = (t.0, t.1 + units, t.2 - units);
            }
        }
    }
}
