//! Writes the tasks of every worker, phase by phase.

use std::ops::Range;

use abi::{
    AttentionMergeParams, AttentionParams, EmbedParams, Epilogue, MatvecParams, NormParams, Opcode,
    SampleParams,
};
use ir::CounterId;
use ir::program::{Task, Wait, Worker, group_parts, stream_part};

use crate::assign::Shares;
use crate::flow::{Flow, Op, Phase, ValueId};
use crate::order::PhaseOrder;

/// For each value, the counter that hands it over, if any, and its arrivals.
pub(crate) fn counters(flow: &Flow, shares: &[Shares]) -> Vec<Option<Wait>> {
    let mut next = (0..).map(CounterId);
    let values = (0..flow.values.len()).map(ValueId);
    values
        .map(|value| {
            let writer = flow.writer(value).filter(|_| flow.counted(value))?;
            let count = task_count(&flow.phases[writer], &shares[writer]);
            next.next().map(|counter| Wait { counter, count })
        })
        .collect()
}

/// Number of tasks of a phase on a device: attention has one for each (head, part of its group, split); other phases have one for each range
/// of items of a worker.
pub(crate) fn task_count(phase: &Phase, shares: &Shares) -> u32 {
    let ranges = shares.iter().flatten();
    match phase.op {
        Op::Attention(_) => ranges.map(|range| range.end - range.start).sum(),
        Op::Embed(_) | Op::Matvec(_) | Op::Merge(_) | Op::Norm(_) | Op::Route(_) | Op::Sample => {
            ranges.count() as u32
        }
    }
}

/// The results of the passes before.
pub(crate) struct Plan<'a> {
    pub(crate) flow: &'a Flow,
    pub(crate) shares: &'a [Shares],
    pub(crate) counters: &'a [Option<Wait>],
    pub(crate) order: &'a PhaseOrder,
}

impl Plan<'_> {
    pub(crate) fn emit(&self, workers: usize) -> Vec<Worker> {
        let mut out = vec![Worker::default(); workers];
        for (index, phase) in self.flow.phases.iter().enumerate() {
            let counter = |value: ValueId| self.counters[value.0];
            let written = phase.residual.and_then(counter);
            let common = self.common(phase);
            let ranges = |(w, ranges)| std::iter::repeat(w).zip::<&Vec<Range<u32>>>(ranges);
            let shares = self.shares[index].iter().enumerate().flat_map(ranges);
            for (candidate, (w, share)) in (0..).zip(shares) {
                // This wait comes first, since it ends long before the input is there.
                let late = written.filter(|_| self.order.catches_up(index, w));
                let waits = late.into_iter().chain(counter(phase.input));
                // A device may have no task that writes the value.
                let waits = waits.filter(|wait| wait.count > 0).collect();
                let task = Task { waits, ..common.clone() };
                self.share(phase, &task, share.clone(), candidate, &mut out[w]);
            }
        }
        out
    }

    fn common(&self, phase: &Phase) -> Task {
        let nothing = abi::NopParams::default();
        let mut task = Task::new(phase.class.opcode(), phase.layer as u16, nothing);
        (task.reads, task.writes) = (phase.reads, phase.writes);
        task.reads[0] = Some(self.flow.buffer(phase.input));
        if let Some(residual) = phase.residual {
            task.reads[3] = Some(self.flow.buffer(residual));
        }
        if let Some(route) = phase.route {
            task.reads[4] = Some(self.flow.buffer(route));
        }
        task.reads[5] = phase.logits.map(|logits| self.flow.buffer(logits));
        if let (Some(output), Some(free)) =
            (phase.output, task.writes.iter_mut().find(|place| place.is_none()))
        {
            *free = Some(self.flow.buffer(output));
            task.signal = self.counters[output.0].map(|wait| wait.counter);
        }
        task
    }

    fn share(
        &self,
        phase: &Phase,
        common: &Task,
        items: Range<u32>,
        candidate: u32,
        worker: &mut Worker,
    ) {
        let (opcode, layer, len) = (common.opcode, common.layer, items.len() as u32);
        let mut push = |task: Task| {
            worker.tasks.push(Task { params: task.params, ..common.clone() });
        };
        match phase.op {
            Op::Embed(p) => {
                let params = EmbedParams { offset: items.start, len, ..p };
                push(Task::new(opcode, layer, params));
            }
            Op::Matvec(p) => {
                let candidate = if p.epilogue == Epilogue::Logits as u32 { candidate } else { 0 };
                let params = MatvecParams { tile0: items.start, tiles: len, candidate, ..p };
                push(Task::new(opcode, layer, params));
                let stream = phase.stream.filter(|_| !stream_part(&params).is_empty());
                if let (Some(stream), Some(task)) = (stream, worker.tasks.last_mut()) {
                    task.writes[1] = Some(self.flow.buffer(stream));
                }
            }
            // The splits of a head go to neighbouring workers, so that the split which is always active is spread over
            // all workers.
            Op::Attention(p) => items.for_each(|item| {
                let (of_group, split) = (item / p.splits, item % p.splits);
                let parts = group_parts(p.group);
                let (kv_head, part) = (of_group / parts, of_group % parts);
                push(Task::new(opcode, layer, AttentionParams { kv_head, part, split, ..p }));
            }),
            Op::Merge(p) => {
                let params = AttentionMergeParams { head0: items.start, heads: len, ..p };
                push(Task::new(opcode, layer, params));
            }
            Op::Norm(p) => {
                let params = NormParams { offset: items.start, len, ..p };
                push(Task::new(opcode, layer, params));
            }
            Op::Route(p) => push(Task::new(opcode, layer, p)),
            Op::Sample => {
                let writer = self.flow.writer(phase.input);
                let candidates =
                    writer.map_or(0, |w| task_count(&self.flow.phases[w], &self.shares[w]));
                let params = SampleParams { candidates, ..SampleParams::default() };
                push(Task::new(opcode, layer, params));
            }
        }
    }
}

/// Makes `sample` wait for the workers that it does not yet wait for: those without a task, which get one that only
/// signals, and those that end with a task that hands over by tags alone. Nothing else releases their stores (keys and
/// values among them) to the next step, and a worker that falls behind could miss its announcement. Returns the number
/// of counters in use.
pub(crate) fn join_stragglers(workers: &mut [Worker], layer: u32, counters: u32) -> u32 {
    let counter = CounterId(counters);
    let mut count = 0;
    for worker in workers.iter_mut() {
        if worker.tasks.is_empty() {
            let params = abi::NopParams::default();
            worker.tasks.push(Task::new(Opcode::Nop, layer as u16, params));
        }
        let last = worker.tasks.len() - 1;
        let task = &mut worker.tasks[last];
        if task.opcode != Opcode::Sample && task.signal.is_none() {
            task.signal = Some(counter);
            count += 1;
        }
    }
    if count == 0 {
        return counters;
    }
    let tasks = workers.iter_mut().flat_map(|worker| &mut worker.tasks);
    for sample in tasks.filter(|task| task.opcode == Opcode::Sample) {
        sample.waits.push(Wait { counter, count });
    }
    counters + 1
}
