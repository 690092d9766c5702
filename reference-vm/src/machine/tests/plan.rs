//! Programs made by hand: the simplest way to run a graph on a few workers, with every kind of hand-off and fusion.

use abi::{
    AttentionMergeParams, AttentionParams, BufferKind, EmbedParams, Epilogue, MatvecParams, Opcode,
    Prologue, SampleParams,
};
use ir::program::{
    Buffer, BufferSource, Dims, Matrix, Pipeline, Program, RowMap, Task, Topology, Wait, Worker,
    group_parts,
};
use ir::{Attention, BufferId, CounterId, Format, Gated, Graph, Layer, Linear, MatrixId, TensorId};

/// Options of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) workers: usize,
    /// Every hand-off but those after attention uses flag-in-data words instead of counters.
    pub(super) flag_in_data: bool,
    pub(super) splits: u32,
    pub(super) kv_block: u32,
    /// The o projection merges the splits itself.
    pub(super) fuse_merge: bool,
    /// The first layer reads the embedding itself.
    pub(super) fuse_embed: bool,
    pub(super) capacity: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            workers: 3,
            flag_in_data: false,
            splits: 2,
            kv_block: 8,
            fuse_merge: false,
            fuse_embed: false,
            capacity: 128,
        }
    }
}

/// The buffers and options of a matvec besides its matrix.
#[derive(Clone, Copy, Default)]
struct Around {
    x: Option<BufferId>,
    norm: Option<BufferId>,
    bias: Option<BufferId>,
    residual: Option<BufferId>,
}

struct Builder<'a> {
    graph: &'a Graph,
    plan: Plan,
    program: Program,
    /// What the next phase waits for.
    wait: Option<Wait>,
    turn: usize,
}

/// The program of `graph` with these options.
pub(super) fn program(graph: &Graph, plan: Plan) -> Program {
    let program = Program {
        model: graph.name.clone(),
        dims: Dims::from(graph),
        kv_capacity: plan.capacity,
        pipeline: Pipeline { stage_units: 16, stages: 4, in_flight: 2, in_flight_before_wait: 2 },
        matrices: Vec::new(),
        buffers: Vec::new(),
        counters: 0,
        arena_bytes: 0,
        workers: vec![Worker::default(); plan.workers],
        topology: Topology::default(),
    };
    let mut builder = Builder { graph, plan, program, wait: None, turn: 0 };
    builder.build();
    builder.program
}

impl Builder<'_> {
    fn build(&mut self) {
        let graph = self.graph;
        let embed = self.matrix("embed", RowMap::single(graph.embed, graph.vocab), graph.hidden);
        let mut x = self.buffer(
            "embedding",
            BufferKind::Embedding,
            graph.hidden,
            BufferSource::Embedding(embed),
        );
        if !self.plan.fuse_embed {
            x = self.embed(x);
        }
        let inv_freq = self.buffer(
            "inv_freq",
            BufferKind::Constant,
            graph.head_dim / 2,
            BufferSource::Rotary(0),
        );
        for (index, layer) in graph.layers.iter().enumerate() {
            x = self.attend(index as u16, layer, x, inv_freq);
            x = self.feed_forward(index as u16, layer, x);
        }
        let lm_head = if graph.tied() {
            embed
        } else {
            self.matrix("lm_head", RowMap::single(graph.lm_head, graph.vocab), graph.hidden)
        };
        let norm = self.constant("final_norm", RowMap::single(graph.final_norm, graph.hidden));
        let logits = self.buffer("logits", BufferKind::Logits, graph.vocab, BufferSource::Scratch);
        let tiles = self.program.matrices[lm_head.index()].tiles();
        let candidates = tiles.min(self.plan.workers as u32);
        let pairs = self.activation("candidates", candidates * 2, false); // rows leave no bits for a tag
        let around = Around { x: Some(x), norm: Some(norm), ..Around::default() };
        let params =
            MatvecParams { epilogue: Epilogue::Logits as u32, ..bytemuck::Zeroable::zeroed() };
        let layers = graph.layers.len() as u16;
        self.matvec(layers, lm_head, around, params, [Some(logits), Some(pairs)]);
        let params = SampleParams { candidates, reserved: [0; 15] };
        let mut sample = Task::new(Opcode::Sample, layers, params);
        sample.reads[0] = Some(pairs);
        self.phase(vec![sample], false);
    }

    fn embed(&mut self, embedding: BufferId) -> BufferId {
        let hidden = self.graph.hidden;
        let x = self.activation("x", hidden, true);
        let part = hidden.div_ceil(2);
        let tasks = [(0, part), (part, hidden - part)].map(|(offset, len)| {
            let mut task = Task::new(
                Opcode::Embed,
                0,
                EmbedParams { offset, len, scale: 0.0, reserved: [0; 13] },
            );
            (task.reads[0], task.writes[0]) = (Some(embedding), Some(x));
            task
        });
        self.phase(tasks.to_vec(), true);
        x
    }

    fn attend(&mut self, index: u16, layer: &Layer, x: BufferId, inv_freq: BufferId) -> BufferId {
        let graph = self.graph;
        let (q_width, kv_width) = (graph.q_width(), graph.kv_width());
        let Attention { q, k, v, o, window, .. } = layer.attention.body;
        let parts = [(q, q_width), (k, kv_width), (v, kv_width)];
        let around = Around {
            x: Some(x),
            norm: layer
                .attention
                .norm
                .map(|norm| self.constant("attn_norm", RowMap::single(norm, graph.hidden))),
            bias: self.bias(&parts, false),
            residual: None,
        };
        let map = rows(&parts, false);
        let matrix = self.matrix("qkv", map, graph.hidden);
        let qkv = self.activation("qkv", q_width + 2 * kv_width, true);
        self.matvec(index, matrix, around, bytemuck::Zeroable::zeroed(), [Some(qkv), None]);

        let partials = self.attention(index, layer, qkv, inv_freq);
        let (splits, kv_block, window) =
            (self.plan.splits, self.plan.kv_block, window.unwrap_or(0));
        let head_dim = graph.head_dim;
        let params = MatvecParams {
            epilogue: Epilogue::Residual as u32,
            prologue: Prologue::Merge as u32,
            splits,
            head_dim,
            kv_block,
            window,
            ..bytemuck::Zeroable::zeroed()
        };
        let parts = [(o, graph.hidden)];
        let matrix = self.matrix("o", rows(&parts, false), q_width);
        let mut around = Around {
            x: Some(partials),
            bias: self.bias(&parts, false),
            residual: Some(x),
            ..Around::default()
        };
        let out = self.activation("x", graph.hidden, true);
        if self.plan.fuse_merge {
            self.matvec(index, matrix, around, params, [Some(out), None]);
            return out;
        }
        let attn = self.activation("attn", q_width, true);
        let task = |head0| {
            let params = AttentionMergeParams {
                head0,
                heads: 1,
                heads_total: graph.heads,
                head_dim,
                splits,
                kv_block,
                window,
                reserved: [0; 9],
            };
            let mut task = Task::new(Opcode::AttentionMerge, index, params);
            (task.reads[0], task.writes[0]) = (Some(partials), Some(attn));
            task
        };
        self.phase((0..graph.heads).map(task).collect(), true);
        around.x = Some(attn);
        let params =
            MatvecParams { epilogue: Epilogue::Residual as u32, ..bytemuck::Zeroable::zeroed() };
        self.matvec(index, matrix, around, params, [Some(out), None]);
        out
    }

    fn attention(
        &mut self,
        index: u16,
        layer: &Layer,
        qkv: BufferId,
        inv_freq: BufferId,
    ) -> BufferId {
        let graph = self.graph;
        let splits = self.plan.splits;
        let partials = self.activation(
            "partials",
            splits * graph.heads * (graph.head_dim + abi::PARTIAL_HEADER),
            false,
        );
        let words = 2 * graph.kv_width() * self.plan.capacity;
        let cache = self.buffer(
            "kv",
            BufferKind::KvCache,
            words,
            BufferSource::KvCache { layer: index.into() },
        );
        let Attention { q_norm, k_norm, window, .. } = layer.attention.body;
        let norms = [q_norm, k_norm].map(|norm| {
            norm.map(|norm| self.constant("head_norm", RowMap::single(norm, graph.head_dim)))
        });
        let parts = group_parts(graph.group());
        let task = |item| {
            let (of_group, split) = (item / splits, item % splits);
            let (kv_head, part) = (of_group / parts, of_group % parts);
            let params = AttentionParams {
                kv_head,
                kv_heads: graph.kv_heads,
                group: graph.group(),
                head_dim: graph.head_dim,
                split,
                splits,
                kv_block: self.plan.kv_block,
                window: window.unwrap_or(0),
                scale: graph.attn_scale,
                eps: graph.norm_eps,
                cap: 0.0,
                part,
                reserved: [0; 4],
            };
            let mut task = Task::new(Opcode::Attention, index, params);
            task.reads = [Some(qkv), norms[0], norms[1], Some(inv_freq), None, None];
            task.writes = [Some(partials), Some(cache)];
            task
        };
        let tasks = (0..graph.kv_heads * parts * splits).map(task).collect();
        self.phase(tasks, false);
        partials
    }

    fn feed_forward(&mut self, index: u16, layer: &Layer, x: BufferId) -> BufferId {
        let graph = self.graph;
        let Gated { gate, up, down } = *layer.gated().unwrap();
        let parts = [(gate, graph.ffn), (up, graph.ffn)];
        let around = Around {
            x: Some(x),
            norm: layer
                .mlp
                .norm
                .map(|norm| self.constant("mlp_norm", RowMap::single(norm, graph.hidden))),
            bias: self.bias(&parts, true),
            residual: None,
        };
        let matrix = self.matrix("gate_up", rows(&parts, true), graph.hidden);
        let h = self.activation("h", graph.ffn, true);
        let params =
            MatvecParams { epilogue: Epilogue::SiluMul as u32, ..bytemuck::Zeroable::zeroed() };
        self.matvec(index, matrix, around, params, [Some(h), None]);

        let parts = [(down, graph.hidden)];
        let around = Around {
            x: Some(h),
            bias: self.bias(&parts, false),
            residual: Some(x),
            ..Around::default()
        };
        let matrix = self.matrix("down", rows(&parts, false), graph.ffn);
        let out = self.activation("x", graph.hidden, true);
        let params =
            MatvecParams { epilogue: Epilogue::Residual as u32, ..bytemuck::Zeroable::zeroed() };
        self.matvec(index, matrix, around, params, [Some(out), None]);
        out
    }

    /// Assigns the tiles of a matrix to the workers, in contiguous ranges.
    fn matvec(
        &mut self,
        layer: u16,
        id: MatrixId,
        around: Around,
        params: MatvecParams,
        writes: [Option<BufferId>; 2],
    ) {
        let matrix = self.program.matrices[id.index()].clone();
        let granule = if params.epilogue == Epilogue::SiluMul as u32 { 2 } else { 1 };
        let blocks = matrix.tiles() / granule;
        let workers = (self.plan.workers as u32).min(blocks);
        let mut tasks = Vec::new();
        for share in 0..workers {
            let (tile0, end) =
                (blocks * share / workers * granule, blocks * (share + 1) / workers * granule);
            let params = MatvecParams {
                matrix: id.0,
                tile0,
                tiles: end - tile0,
                units: matrix.units_per_tile(),
                k_len: matrix.cols,
                rows: matrix.rows(),
                prologue: if around.norm.is_some() {
                    Prologue::Rms as u32
                } else {
                    params.prologue
                },
                eps: if around.norm.is_some() { self.graph.norm_eps } else { 0.0 },
                candidate: if params.epilogue == Epilogue::Logits as u32 { share } else { 0 },
                ..params
            };
            let mut task = Task::new(Opcode::Matvec, layer, params);
            task.reads = [around.x, around.norm, around.bias, around.residual, None, None];
            task.writes = writes;
            tasks.push(task);
        }
        self.phase(tasks, params.epilogue != Epilogue::Logits as u32);
    }

    /// Assigns tasks to workers in turn. Each waits for all of the last phase; `may_tag` allows readers to poll the
    /// data instead.
    fn phase(&mut self, mut tasks: Vec<Task>, may_tag: bool) {
        let counted = !(self.plan.flag_in_data && may_tag) && tasks[0].opcode != Opcode::Sample;
        let signal = counted.then(|| {
            self.program.counters += 1;
            CounterId(self.program.counters - 1)
        });
        let count = tasks.len() as u32;
        for task in &mut tasks {
            task.waits.extend(self.wait);
            task.signal = signal;
        }
        for task in tasks {
            let worker = &mut self.program.workers[self.turn % self.plan.workers];
            worker.tasks.push(task);
            self.turn += 1;
        }
        self.wait = signal.map(|counter| Wait { counter, count });
    }

    fn matrix(&mut self, name: &str, map: RowMap, cols: u32) -> MatrixId {
        self.program.matrices.push(Matrix {
            name: name.into(),
            map,
            cols,
            format: Format::of(self.graph.dtype, self.graph.dtype),
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
        let mut buffer = Buffer { name: name.into(), kind, words, source, offset: 0 };
        if buffer.arena_bytes() > 0 {
            buffer.offset = self.program.arena_bytes;
            self.program.arena_bytes += buffer.arena_bytes().next_multiple_of(128);
        }
        self.program.buffers.push(buffer);
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    fn activation(&mut self, name: &str, words: u32, may_tag: bool) -> BufferId {
        let kind = if self.plan.flag_in_data && may_tag {
            BufferKind::FlagInData
        } else {
            BufferKind::Plain
        };
        self.buffer(name, kind, words, BufferSource::Scratch)
    }

    fn constant(&mut self, name: &str, map: RowMap) -> BufferId {
        self.buffer(name, BufferKind::Constant, map.rows(), BufferSource::Vector(map))
    }

    fn bias(&mut self, parts: &[(Linear, u32)], interleaved: bool) -> Option<BufferId> {
        parts.iter().any(|(linear, _)| linear.bias.is_some()).then(|| {
            let parts: Vec<(Option<TensorId>, u32)> =
                parts.iter().map(|&(linear, rows)| (linear.bias, rows)).collect();
            self.constant("bias", RowMap { parts, interleaved })
        })
    }
}

fn rows(parts: &[(Linear, u32)], interleaved: bool) -> RowMap {
    RowMap {
        parts: parts.iter().map(|&(linear, rows)| (Some(linear.weight), rows)).collect(),
        interleaved,
    }
}
