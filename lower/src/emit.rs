//! Writes the tasks and load streams of every worker, phase by phase.
//!
//! Each phase reads the output of the one before it. The residual stream `x` is the output of the last phase that wrote it.

use abi::{
    AttentionMergeParams, AttentionParams, EmbedParams, Epilogue, MatvecParams, Opcode, Prologue,
    SampleParams, UNIT_ROWS,
};
use ir::program::{Access, Load, Matrix, Task, Wait, Worker};
use ir::schedule::{Handoff, MergeGrouping};
use ir::{CounterId, Graph, MatrixId, ScheduleConfig, SlotId};

use crate::assign::Shares;
use crate::order::{PhaseOrder, residual};
use crate::phase::{Op, Phase};
use crate::slots::Slots;

/// The counter of each phase that has one, and its arrivals.
pub(crate) fn counters(phases: &[Phase], shares: &[Shares]) -> Vec<Option<Wait>> {
    let mut next = 0;
    phases
        .iter()
        .zip(shares)
        .map(|(phase, shares)| {
            if phase.handoff != Some(Handoff::Counter) {
                return None;
            }
            let counter = CounterId(next);
            next += 1;
            Some(Wait { counter, count: task_count(phase, shares) })
        })
        .collect()
}

/// Attention has a task for each (head, split); a share of any other phase is one task.
pub(crate) fn task_count(phase: &Phase, shares: &Shares) -> u32 {
    if phase.op == Op::Attention {
        return phase.items;
    }
    shares.iter().filter(|share| !share.is_empty()).count() as u32
}

/// Everything that the passes before found out.
pub(crate) struct Plan<'a> {
    pub(crate) config: &'a ScheduleConfig,
    pub(crate) graph: &'a Graph,
    pub(crate) matrices: &'a [Matrix],
    pub(crate) phases: &'a [Phase],
    pub(crate) shares: &'a [Shares],
    pub(crate) counters: &'a [Option<Wait>],
    pub(crate) order: &'a PhaseOrder,
    pub(crate) slots: &'a Slots,
    /// Output of each phase that has one.
    pub(crate) outputs: Vec<Option<Access>>,
}

/// What the tasks of a phase have in common.
#[derive(Clone, Copy)]
struct Edge {
    input: Access,
    /// The residual stream before this phase.
    x: Access,
    output: Option<Access>,
    /// The counter of the residual stream, for a task that does not know it to be over, and that of the input.
    waits: [Option<Wait>; 2],
    signal: Option<CounterId>,
}

fn constant(slot: SlotId) -> Access {
    Access { slot, generation: 0 }
}

impl Plan<'_> {
    /// The workers with all their tasks and loads.
    pub(crate) fn emit(&self, workers: usize) -> Vec<Worker> {
        let mut out = vec![Worker::default(); workers];
        let mut x = constant(self.slots.embedding);
        let mut input = x;
        for (index, phase) in self.phases.iter().enumerate() {
            let before = index.checked_sub(1).and_then(|i| self.counters[i]);
            let signal = self.counters[index].map(|wait| wait.counter);
            let written = residual(self.phases, index).and_then(|written| self.counters[written]);
            let edge =
                Edge { input, x, output: self.outputs[index], waits: [None, before], signal };
            let mut candidate = 0;
            for (w, (worker, share)) in out.iter_mut().zip(&self.shares[index]).enumerate() {
                if share.is_empty() {
                    continue;
                }
                // First, since it is over long before the input is there.
                let late = written.filter(|_| self.order.catches_up(index, w));
                let edge = Edge { waits: [late, before], ..edge };
                self.share(phase, edge, share.clone(), candidate, worker);
                candidate += 1;
            }
            if let Some(output) = self.outputs[index] {
                input = output;
                if matches!(phase.op, Op::Embed | Op::OProj | Op::Down) {
                    x = output;
                }
            }
        }
        out
    }

    /// One worker's share of a phase.
    fn share(
        &self,
        phase: &Phase,
        edge: Edge,
        items: std::ops::Range<u32>,
        candidate: u32,
        worker: &mut Worker,
    ) {
        let mut push = |mut task: Task| {
            task.waits.extend(edge.waits.iter().flatten());
            task.signal = edge.signal;
            task.writes[0] = task.writes[0].or(edge.output);
            worker.tasks.push(task);
        };
        match phase.op {
            Op::Embed => push(self.embed(phase, items)),
            Op::Attention => items.for_each(|item| push(self.attention(phase, edge, item))),
            Op::Merge => push(self.merge(phase, edge, items)),
            Op::Sample => push(self.sample(phase, edge)),
            Op::Qkv | Op::OProj | Op::GateUp | Op::Down | Op::LmHead => {
                let Some(matrix) = phase.matrix else { return };
                push(self.matvec(phase, matrix, edge, items.clone(), candidate));
                let units = self.matrices[matrix.index()].units_per_tile();
                worker.loads.push(Load {
                    matrix,
                    unit0: u64::from(items.start) * u64::from(units),
                    units: items.len() as u32 * units,
                });
            }
        }
    }

    fn embed(&self, phase: &Phase, items: std::ops::Range<u32>) -> Task {
        let params =
            EmbedParams { offset: items.start, len: items.len() as u32, ..EmbedParams::default() };
        let mut task = Task::new(Opcode::Embed, phase.layer as u16, params);
        task.reads[0] = Some(constant(self.slots.embedding));
        task
    }

    fn matvec(
        &self,
        phase: &Phase,
        id: MatrixId,
        edge: Edge,
        tiles: std::ops::Range<u32>,
        candidate: u32,
    ) -> Task {
        let matrix = &self.matrices[id.index()];
        let mut params = MatvecParams {
            matrix: id.0,
            tile0: tiles.start,
            tiles: tiles.len() as u32,
            units: matrix.units_per_tile(),
            k_len: matrix.cols,
            rows: matrix.rows(),
            ..MatvecParams::default()
        };
        let mut operands = self.operands(phase);
        if operands.prologue == Prologue::Rms {
            params.eps = self.graph.norm_eps;
        }
        if operands.prologue == Prologue::Merge {
            let attention = self.config.tiling.attention;
            params.splits = attention.kv_split;
            params.head_dim = self.graph.head_dim;
            params.kv_block = attention.kv_block;
            params.window = self.window(phase);
        }
        params.prologue = operands.prologue as u32;
        params.epilogue = operands.epilogue as u32;
        operands.reads[0] = Some(edge.input);
        let mut writes = [edge.output, None];
        match operands.epilogue {
            Epilogue::Residual => operands.reads[3] = Some(edge.x),
            Epilogue::Logits => {
                params.candidate = candidate;
                writes = [Some(constant(self.slots.logits)), edge.output];
            }
            Epilogue::Store | Epilogue::SiluMul => {}
        }
        let mut task = Task::new(Opcode::Matvec, phase.layer as u16, params);
        task.reads = operands.reads;
        task.writes = writes;
        task
    }

    /// What is done before and after the multiplication, with which constants.
    fn operands(&self, phase: &Phase) -> Operands {
        let slots = self.slots;
        let layer = slots.layers.get(phase.layer as usize);
        let (prologue, epilogue, norm, bias) = match phase.op {
            Op::Qkv => (
                Prologue::Rms,
                Epilogue::Store,
                layer.map(|l| l.attn_norm),
                layer.and_then(|l| l.qkv_bias),
            ),
            Op::OProj => {
                let prologue = match self.config.fusion_grouping.merge {
                    MergeGrouping::Separate => Prologue::Copy,
                    MergeGrouping::OProj => Prologue::Merge,
                };
                (prologue, Epilogue::Residual, None, layer.and_then(|l| l.o_bias))
            }
            Op::GateUp => (
                Prologue::Rms,
                Epilogue::SiluMul,
                layer.map(|l| l.mlp_norm),
                layer.and_then(|l| l.gate_up_bias),
            ),
            Op::Down => (Prologue::Copy, Epilogue::Residual, None, layer.and_then(|l| l.down_bias)),
            Op::LmHead | Op::Embed | Op::Attention | Op::Merge | Op::Sample => {
                (Prologue::Rms, Epilogue::Logits, Some(slots.final_norm), None)
            }
        };
        Operands { prologue, epilogue, reads: [None, norm.map(constant), bias.map(constant), None] }
    }

    fn window(&self, phase: &Phase) -> u32 {
        self.graph.layers[phase.layer as usize].window.unwrap_or(0)
    }

    /// Item `head * splits + split`: the splits of a head go to neighbouring workers, so that the one that is always active
    /// is spread over all of them.
    fn attention(&self, phase: &Phase, edge: Edge, item: u32) -> Task {
        let (graph, attention) = (self.graph, self.config.tiling.attention);
        let params = AttentionParams {
            kv_head: item / attention.kv_split,
            kv_heads: graph.kv_heads,
            group: graph.group(),
            head_dim: graph.head_dim,
            split: item % attention.kv_split,
            splits: attention.kv_split,
            kv_block: attention.kv_block,
            window: self.window(phase),
            scale: graph.attn_scale,
            eps: graph.norm_eps,
            ..AttentionParams::default()
        };
        let slots = &self.slots.layers[phase.layer as usize];
        let mut task = Task::new(Opcode::Attention, phase.layer as u16, params);
        task.reads = [
            Some(edge.input),
            slots.q_norm.map(constant),
            slots.k_norm.map(constant),
            Some(constant(self.slots.inv_freq)),
        ];
        task.writes = [edge.output, Some(constant(slots.kv))];
        task
    }

    fn merge(&self, phase: &Phase, edge: Edge, heads: std::ops::Range<u32>) -> Task {
        let attention = self.config.tiling.attention;
        let params = AttentionMergeParams {
            head0: heads.start,
            heads: heads.len() as u32,
            heads_total: self.graph.heads,
            head_dim: self.graph.head_dim,
            splits: attention.kv_split,
            kv_block: attention.kv_block,
            window: self.window(phase),
            ..AttentionMergeParams::default()
        };
        let mut task = Task::new(Opcode::AttentionMerge, phase.layer as u16, params);
        task.reads[0] = Some(edge.input);
        task
    }

    fn sample(&self, phase: &Phase, edge: Edge) -> Task {
        let words = self.slots.list[edge.input.slot.index()].words;
        let params = SampleParams { candidates: words / 2, ..SampleParams::default() };
        let mut task = Task::new(Opcode::Sample, phase.layer as u16, params);
        task.reads[0] = Some(edge.input);
        task
    }
}

/// Makes `sample` wait for the workers that nothing else makes it wait for: those without a task, which get one that only signals,
/// and those that end with a task that hands over by tags alone. What these have stored (keys and values among it) is released to the next
/// step by nothing else, and a worker that falls behind could miss its announcement. Returns the counters in use.
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

struct Operands {
    prologue: Prologue,
    epilogue: Epilogue,
    reads: [Option<Access>; abi::READS_MAX],
}

const _: () = assert!(UNIT_ROWS == 8, "tiling knobs are multiples of a tile");
