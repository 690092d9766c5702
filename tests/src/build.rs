//! Builds valid programs by construction, without `lower`: one phase after the other, each partitioned over the
//! workers.

use abi::{
    AttentionMergeParams, AttentionParams, BufferKind, EmbedParams, Epilogue, MatvecParams, Opcode,
    Prologue, SampleParams,
};
use ir::program::{
    Buffer, BufferSource, Dims, Matrix, Pipeline, Program, RowMap, Task, Topology, Wait, Worker,
    group_parts,
};
use ir::{BufferId, CounterId, Graph, Layer, MatrixId, TensorId};

use crate::toy::{Shape, graph};

/// The phases whose hand-off can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding.
    Embed,
    /// Query, key and value projection.
    Qkv,
    /// Attention.
    Attention,
    /// Merge of the splits.
    Merge,
    /// Output projection.
    OProj,
    /// Gate and up projection.
    GateUp,
    /// Down projection.
    Down,
    /// Logits.
    LmHead,
}

/// Options of a program.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Workers.
    pub workers: u32,
    /// Bit per [`Phase`]: flag-in-data instead of counter.
    pub flag_in_data: u8,
    /// Layer 0 reads the embedding itself.
    pub embed_fused: bool,
    /// `o_proj` merges the splits.
    pub merge_fused: bool,
    /// Splits of the keys.
    pub splits: u32,
    /// Keys per block.
    pub kv_block: u32,
    /// Tiles assigned at once.
    pub block_tiles: u32,
    /// Added to the first worker of each phase.
    pub rotate: u32,
    /// Tokens of the cache.
    pub kv_capacity: u32,
}

/// The output of a phase.
#[derive(Clone, Copy)]
struct Output {
    buffer: BufferId,
    wait: Option<Wait>,
}

/// A program of about this many tasks: as many layers of a large model as needed, with about five tasks per worker and
/// layer.
#[must_use]
pub fn sized(tasks: u32, workers: u32, flag_in_data: u8) -> Program {
    let shape = Shape {
        hidden: 8192,
        heads: 64,
        kv_heads: 8,
        head_dim: 128,
        ffn: 28_672,
        vocab: 128_256,
        layers: (tasks / (5 * workers)).max(1),
        tied: false,
        bias: false,
        qk_norm: false,
        window: None,
    };
    let plan = Plan {
        workers,
        flag_in_data,
        embed_fused: false,
        merge_fused: true,
        splits: workers.div_ceil(8),
        kv_block: 128,
        block_tiles: 2,
        rotate: 1,
        kv_capacity: 4096,
    };
    build(&graph(&shape), &plan)
}

struct Builder<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    program: Program,
    phases: u32,
}

/// Builds the program of `graph`.
#[must_use]
pub fn build(graph: &Graph, plan: &Plan) -> Program {
    let mut b = Builder { graph, plan, program: empty(graph, plan), phases: 0 };
    let embedding = b.matrix("embed", RowMap::single(graph.embed, graph.vocab), graph.hidden);
    let inv_freq =
        b.buffer("inv_freq", BufferKind::Constant, graph.head_dim / 2, BufferSource::Rotary(0));
    let mut x = b.embed(embedding);
    for layer in 0..graph.layers.len() as u32 {
        x = b.layer(layer, x, inv_freq);
    }
    let head = if graph.tied() {
        embedding
    } else {
        b.matrix("lm_head", RowMap::single(graph.lm_head, graph.vocab), graph.hidden)
    };
    b.lm_head(head, x);
    b.program
}

fn empty(graph: &Graph, plan: &Plan) -> Program {
    Program {
        model: graph.name.clone(),
        dims: Dims::from(graph),
        kv_capacity: plan.kv_capacity,
        pipeline: Pipeline { stage_units: 32, stages: 8, in_flight: 4, in_flight_before_wait: 2 },
        matrices: Vec::new(),
        buffers: Vec::new(),
        counters: 0,
        arena_bytes: 0,
        workers: vec![Worker::default(); plan.workers as usize],
        topology: Topology::default(),
    }
}

impl Builder<'_> {
    fn matrix(&mut self, name: &str, map: RowMap, cols: u32) -> MatrixId {
        self.program.matrices.push(Matrix {
            name: name.into(),
            map,
            cols,
            format: ir::Format::of(self.graph.dtype, self.graph.dtype),
            experts: 1,
        });
        MatrixId(self.program.matrices.len() as u32 - 1)
    }

    fn buffer(
        &mut self,
        name: &str,
        kind: BufferKind,
        words: u32,
        source: BufferSource,
    ) -> BufferId {
        self.program.buffers.push(Buffer { name: name.into(), kind, words, source, offset: 0 });
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    fn vector(&mut self, name: String, tensor: TensorId) -> BufferId {
        let words = self.graph.tensor(tensor).shape[0];
        self.buffer(
            &name,
            BufferKind::Constant,
            words,
            BufferSource::Vector(RowMap::single(tensor, words)),
        )
    }

    /// Candidates hold row numbers, which leave no bits for a tag.
    fn is_flag_in_data(&self, phase: Phase) -> bool {
        phase != Phase::LmHead && self.plan.flag_in_data >> phase as u32 & 1 == 1
    }

    /// The buffer that a phase writes.
    fn activation(&mut self, phase: Phase, layer: u32, name: &str, words: u32) -> BufferId {
        let kind =
            if self.is_flag_in_data(phase) { BufferKind::FlagInData } else { BufferKind::Plain };
        let id = self.buffer(&format!("layers.{layer}.{name}"), kind, words, BufferSource::Scratch);
        let buffer = &mut self.program.buffers[id.index()];
        buffer.offset = self.program.arena_bytes;
        self.program.arena_bytes += buffer.arena_bytes().next_multiple_of(128);
        id
    }

    /// Assigns `tasks` (complete but for their signal) to the workers and hands over `buffer`.
    fn phase(
        &mut self,
        phase: Phase,
        buffer: BufferId,
        input: Option<Output>,
        tasks: Vec<Task>,
    ) -> Output {
        let counter = (!self.is_flag_in_data(phase)).then(|| {
            self.program.counters += 1;
            CounterId(self.program.counters - 1)
        });
        let count = tasks.len() as u32;
        for (index, mut task) in tasks.into_iter().enumerate() {
            task.signal = counter;
            task.waits.extend(input.and_then(|input| input.wait));
            let worker = (index as u32 + self.phases * self.plan.rotate) % self.plan.workers;
            self.push(worker, task);
        }
        self.phases += 1;
        Output { buffer, wait: counter.map(|counter| Wait { counter, count }) }
    }

    fn push(&mut self, worker: u32, task: Task) {
        let worker = &mut self.program.workers[worker as usize];
        worker.tasks.push(task);
    }

    /// Splits `tiles` into one contiguous range per worker, in steps of `granule` tiles.
    fn shares(&self, tiles: u32, granule: u32) -> Vec<(u32, u32)> {
        let granule = granule * self.plan.block_tiles;
        let blocks = tiles.div_ceil(granule);
        let shares = blocks.min(self.plan.workers);
        let cut = |i: u32| {
            ((u64::from(blocks) * u64::from(i) / u64::from(shares)) as u32 * granule).min(tiles)
        };
        (0..shares).map(|i| (cut(i), cut(i + 1) - cut(i))).collect()
    }

    fn matvecs(
        &self,
        matrix: MatrixId,
        prologue: Prologue,
        epilogue: Epilogue,
        layer: u32,
    ) -> Vec<Task> {
        let m = &self.program.matrices[matrix.index()];
        let granule = if epilogue == Epilogue::SiluMul { 2 } else { 1 };
        let merge = prologue == Prologue::Merge;
        let window = self
            .graph
            .layers
            .get(layer as usize)
            .and_then(|l| l.attention.body.window)
            .unwrap_or(0);
        let share = |(candidate, (tile0, tiles)): (u32, (u32, u32))| {
            let params = MatvecParams {
                matrix: matrix.0,
                tile0,
                tiles,
                units: m.units_per_tile(),
                k_len: m.cols,
                rows: m.rows(),
                prologue: prologue as u32,
                epilogue: epilogue as u32,
                eps: if prologue == Prologue::Rms { self.graph.norm_eps } else { 0.0 },
                splits: if merge { self.plan.splits } else { 0 },
                head_dim: if merge { self.graph.head_dim } else { 0 },
                kv_block: if merge { self.plan.kv_block } else { 0 },
                window: if merge { window } else { 0 },
                candidate: if epilogue == Epilogue::Logits { candidate } else { 0 },
                activation: 0,
                cap: 0.0,
            };
            Task::new(Opcode::Matvec, layer as u16, params)
        };
        (0..).zip(self.shares(m.tiles(), granule)).map(share).collect()
    }

    fn embed(&mut self, matrix: MatrixId) -> Output {
        let embedding = self.buffer(
            "embedding",
            BufferKind::Embedding,
            self.graph.hidden,
            BufferSource::Embedding(matrix),
        );
        if self.plan.embed_fused {
            return Output { buffer: embedding, wait: None };
        }
        let x = self.activation(Phase::Embed, 0, "x0", self.graph.hidden);
        let shares = self.shares(self.graph.hidden.div_ceil(8), 1);
        let tasks = shares.into_iter().map(|(start, len)| {
            let offset = start * 8;
            let params = EmbedParams {
                offset,
                len: (len * 8).min(self.graph.hidden - offset),
                scale: 0.0,
                reserved: [0; 13],
            };
            let mut task = Task::new(Opcode::Embed, 0, params);
            (task.reads[0], task.writes[0]) = (Some(embedding), Some(x));
            task
        });
        let tasks = tasks.collect();
        self.phase(Phase::Embed, x, None, tasks)
    }

    /// A matvec phase that adds to a residual. The input words may be flag-in-data and then do not order the residual:
    /// its own counter does.
    fn added(
        &mut self,
        phase: Phase,
        mut tasks: Vec<Task>,
        input: Output,
        residual: Output,
        out: BufferId,
    ) -> Output {
        for task in &mut tasks {
            task.waits.extend(residual.wait);
        }
        self.linear(phase, tasks, input, [None, None, Some(residual.buffer)], out)
    }

    /// A matvec phase: input, norm, bias, residual, output.
    fn linear(
        &mut self,
        phase: Phase,
        mut tasks: Vec<Task>,
        input: Output,
        reads: [Option<BufferId>; 3],
        out: BufferId,
    ) -> Output {
        for task in &mut tasks {
            task.reads = [Some(input.buffer), reads[0], reads[1], reads[2], None, None];
            task.writes[0] = Some(out);
        }
        self.phase(phase, out, Some(input), tasks)
    }

    fn layer(&mut self, layer: u32, x: Output, inv_freq: BufferId) -> Output {
        let graph = self.graph;
        let Layer { attention, mlp } = &graph.layers[layer as usize];
        let l = &attention.body;
        let gated = graph.layers[layer as usize].gated().expect("a toy has no experts");
        let name = |part: &str| format!("layers.{layer}.{part}");
        let (q, kv) = (graph.q_width(), graph.kv_width());
        let parts = vec![(Some(l.q.weight), q), (Some(l.k.weight), kv), (Some(l.v.weight), kv)];
        let matrix = self.matrix(&name("qkv"), RowMap { parts, interleaved: false }, graph.hidden);
        let norm = attention.norm.map(|norm| self.vector(name("attn_norm"), norm));
        let bias = l.q.bias.is_some().then(|| {
            let map = RowMap {
                parts: vec![(l.q.bias, q), (l.k.bias, kv), (l.v.bias, kv)],
                interleaved: false,
            };
            self.buffer(
                &name("qkv_bias"),
                BufferKind::Constant,
                q + 2 * kv,
                BufferSource::Vector(map),
            )
        });
        let out = self.activation(Phase::Qkv, layer, "qkv", q + 2 * kv);
        let tasks = self.matvecs(matrix, Prologue::Rms, Epilogue::Store, layer);
        let qkv = self.linear(Phase::Qkv, tasks, x, [norm, bias, None], out);
        let partials = self.attention(layer, qkv, inv_freq);

        let matrix = self.matrix(&name("o"), RowMap::single(l.o.weight, graph.hidden), q);
        let (input, prologue) = if self.plan.merge_fused {
            (partials, Prologue::Merge)
        } else {
            (self.merge(layer, partials), Prologue::Copy)
        };
        let out = self.activation(Phase::OProj, layer, "x_mid", graph.hidden);
        let tasks = self.matvecs(matrix, prologue, Epilogue::Residual, layer);
        let mid = self.added(Phase::OProj, tasks, input, x, out);

        let parts = vec![(Some(gated.gate.weight), graph.ffn), (Some(gated.up.weight), graph.ffn)];
        let matrix =
            self.matrix(&name("gate_up"), RowMap { parts, interleaved: true }, graph.hidden);
        let norm = mlp.norm.map(|norm| self.vector(name("mlp_norm"), norm));
        let out = self.activation(Phase::GateUp, layer, "h", graph.ffn);
        let tasks = self.matvecs(matrix, Prologue::Rms, Epilogue::SiluMul, layer);
        let h = self.linear(Phase::GateUp, tasks, mid, [norm, None, None], out);

        let matrix =
            self.matrix(&name("down"), RowMap::single(gated.down.weight, graph.hidden), graph.ffn);
        let out = self.activation(Phase::Down, layer, "x_out", graph.hidden);
        let tasks = self.matvecs(matrix, Prologue::Copy, Epilogue::Residual, layer);
        self.added(Phase::Down, tasks, h, mid, out)
    }

    fn attention(&mut self, layer: u32, qkv: Output, inv_freq: BufferId) -> Output {
        let (graph, plan) = (self.graph, self.plan);
        let l = &graph.layers[layer as usize].attention.body;
        let q_norm = l.q_norm.map(|tensor| self.vector(format!("layers.{layer}.q_norm"), tensor));
        let k_norm = l.k_norm.map(|tensor| self.vector(format!("layers.{layer}.k_norm"), tensor));
        let words = 2 * graph.kv_width() * plan.kv_capacity;
        let cache = self.buffer(
            &format!("layers.{layer}.kv"),
            BufferKind::KvCache,
            words,
            BufferSource::KvCache { layer },
        );
        let partials = self.activation(
            Phase::Attention,
            layer,
            "partials",
            plan.splits * graph.heads * (graph.head_dim + abi::PARTIAL_HEADER),
        );
        let mut tasks = Vec::new();
        let parts = group_parts(graph.group());
        for item in 0..graph.kv_heads * parts * plan.splits {
            let (of_group, split) = (item / plan.splits, item % plan.splits);
            let (kv_head, part) = (of_group / parts, of_group % parts);
            let params = AttentionParams {
                kv_head,
                kv_heads: graph.kv_heads,
                group: graph.group(),
                head_dim: graph.head_dim,
                split,
                splits: plan.splits,
                kv_block: plan.kv_block,
                window: l.window.unwrap_or(0),
                scale: graph.attn_scale,
                eps: graph.norm_eps,
                cap: 0.0,
                part,
                reserved: [0; 4],
            };
            let mut task = Task::new(Opcode::Attention, layer as u16, params);
            task.reads = [Some(qkv.buffer), q_norm, k_norm, Some(inv_freq), None, None];
            task.writes = [Some(partials), Some(cache)];
            tasks.push(task);
        }
        self.phase(Phase::Attention, partials, Some(qkv), tasks)
    }

    fn merge(&mut self, layer: u32, partials: Output) -> Output {
        let graph = self.graph;
        let out = self.activation(Phase::Merge, layer, "attn", graph.q_width());
        let tasks = (0..graph.kv_heads).map(|head| {
            let params = AttentionMergeParams {
                head0: head * graph.group(),
                heads: graph.group(),
                heads_total: graph.heads,
                head_dim: graph.head_dim,
                splits: self.plan.splits,
                kv_block: self.plan.kv_block,
                window: graph.layers[layer as usize].attention.body.window.unwrap_or(0),
                reserved: [0; 9],
            };
            let mut task = Task::new(Opcode::AttentionMerge, layer as u16, params);
            (task.reads[0], task.writes[0]) = (Some(partials.buffer), Some(out));
            task
        });
        let tasks = tasks.collect();
        self.phase(Phase::Merge, out, Some(partials), tasks)
    }

    fn lm_head(&mut self, matrix: MatrixId, x: Output) {
        let layers = self.graph.layers.len() as u32;
        let norm = self.vector("final_norm".into(), self.graph.final_norm);
        let logits =
            self.buffer("logits", BufferKind::Logits, self.graph.vocab, BufferSource::Scratch);
        let mut tasks = self.matvecs(matrix, Prologue::Rms, Epilogue::Logits, layers);
        let count = tasks.len() as u32;
        let candidates = self.activation(Phase::LmHead, layers, "candidates", 2 * count);
        for task in &mut tasks {
            task.reads = [Some(x.buffer), Some(norm), None, None, None, None];
            task.writes = [Some(logits), Some(candidates)];
        }
        let out = self.phase(Phase::LmHead, candidates, Some(x), tasks);
        let mut sample = Task::new(
            Opcode::Sample,
            layers as u16,
            SampleParams { candidates: count, reserved: [0; 15] },
        );
        sample.reads[0] = Some(candidates);
        sample.waits.extend(out.wait);
        sample.waits.extend(self.loose_ends());
        self.push(0, sample);
    }

    /// Releases the stores of each worker's last task to the next step by a counter: if the task hands over by
    /// flag-in-data words alone, it also signals, and `sample` waits for that.
    fn loose_ends(&mut self) -> Option<Wait> {
        let counter = CounterId(self.program.counters);
        let loose = |task: &&mut Task| task.signal.is_none();
        let mut count = 0;
        for task in self
            .program
            .workers
            .iter_mut()
            .filter_map(|worker| worker.tasks.last_mut())
            .filter(loose)
        {
            task.signal = Some(counter);
            count += 1;
        }
        self.program.counters += u32::from(count > 0);
        (count > 0).then_some(Wait { counter, count })
    }
}
