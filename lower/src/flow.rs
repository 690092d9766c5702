//! The phases of a step and the values between them. This pass alone knows the model; the later ones work on phases and
//! values.

use abi::{
    Activation, AttentionMergeParams, AttentionParams, BufferKind, EmbedParams, Epilogue,
    MatvecParams, NormParams, Prologue, READS_MAX, RouteParams, Scoring, UNIT_ROWS, WRITES_MAX,
};
use ir::program::{
    Buffer, BufferSource, PackedAttention, PackedMatrix, PackedMlp, PackedModel, PackedRouter,
    RowMap, group_parts,
};
use ir::schedule::{EmbedGrouping, Handoff, MergeGrouping};
use ir::{
    Attention, Block, BufferId, Experts, FeedForward, Graph, Layer, PhaseClass, ScheduleConfig,
    TensorId,
};

use crate::devices::Split;

/// Least elements of the embedding row that one task copies: four per thread of a small worker.
const EMBED_BLOCK: u32 = 512;

/// Least elements that one task norms: each reads the whole vector.
const NORM_BLOCK: u32 = 64;

/// The work of a phase's tasks, without their ranges.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Embed(EmbedParams),
    Matvec(MatvecParams),
    Attention(AttentionParams),
    Merge(AttentionMergeParams),
    Norm(NormParams),
    Route(RouteParams),
    Sample,
}

/// A phase: `items` in blocks of `block`, dealt to the workers.
#[derive(Clone, Debug)]
pub(crate) struct Phase {
    pub(crate) class: PhaseClass,
    /// The layer; the number of layers for phases after the last layer.
    pub(crate) layer: u32,
    pub(crate) op: Op,
    /// How its output is handed over, if a knob decides.
    pub(crate) handoff: Option<Handoff>,
    /// First input of its tasks.
    pub(crate) input: ValueId,
    /// The value that its products are added to; with the prologue `post_norm` what its input's norm is added to.
    pub(crate) residual: Option<ValueId>,
    /// The residual stream that it stores beside its output, with that prologue.
    pub(crate) stream: Option<ValueId>,
    /// The route that its products follow.
    pub(crate) route: Option<ValueId>,
    /// The logits by which its loaders rank the experts, where there is a choice.
    pub(crate) logits: Option<ValueId>,
    /// `None` for `sample`, which has no reader.
    pub(crate) output: Option<ValueId>,
    /// Constants at their places among the op's reads.
    pub(crate) reads: [Option<BufferId>; READS_MAX],
    /// Other outputs, at their places among the op's writes: `output` takes the first free one.
    pub(crate) writes: [Option<BufferId>; WRITES_MAX],
    /// Tiles of the matrix; elements of the embedding; (head, split) pairs; heads to merge.
    pub(crate) items: u32,
    /// Items assigned at once.
    pub(crate) block: u32,
    /// Bytes that one item adds to a worker, for balance.
    pub(crate) item_bytes: u64,
    /// Which items each device does.
    pub(crate) split: Split,
}

impl Phase {
    /// Whether each of its tasks reads the whole residual, and not only its own rows.
    pub(crate) fn reads_whole_residual(&self) -> bool {
        matches!(self.op, Op::Matvec(p) if p.prologue == Prologue::PostNorm as u32)
    }
}

/// A value of a flow, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueId(pub(crate) usize);

/// An output of a phase that others read. The first value is the embedding table, which no phase writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Value {
    /// The writing phase, by index.
    pub(crate) writer: Option<usize>,
    pub(crate) handoff: Option<Handoff>,
    pub(crate) name: String,
    /// Words of the buffer; per task of the phase if `per_task`.
    pub(crate) words: u64,
    pub(crate) per_task: bool,
    /// Whether all devices have a whole copy, of which each writes a part.
    pub(crate) replicated: bool,
}

/// The phases of a step, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flow {
    pub(crate) phases: Vec<Phase>,
    /// The embedding table, then the outputs of phases in their order.
    pub(crate) values: Vec<Value>,
    /// The embedding table, constants, caches and logits. Buffers of values follow them.
    pub(crate) buffers: Vec<Buffer>,
}

impl Flow {
    pub(crate) fn new(
        config: &ScheduleConfig,
        graph: &Graph,
        packed: &PackedModel,
        kv_words: u32,
    ) -> Self {
        let flow = Self { values: vec![Value::default()], ..Self::default() };
        let rotary = Vec::new();
        let mut builder = Builder { config, graph, packed, kv_words, rotary, flow };
        builder.model();
        builder.flow.replicate();
        builder.flow
    }

    /// Finds the values of which a device reads more than it writes. Candidates are not among them: `sample` reads those
    /// of its own device, and the devices exchange the best of them.
    fn replicate(&mut self) {
        for phase in self.phases.iter().filter(|phase| phase.class != PhaseClass::Sample) {
            let whole = [Some(phase.input), phase.route, phase.logits];
            let reads = whole.into_iter().flatten().map(|value| (value, false));
            let own = !phase.reads_whole_residual();
            for (value, own) in reads.chain(phase.residual.map(|value| (value, own))) {
                let Some(writer) = self.values[value.0].writer else { continue };
                let written = &self.phases[writer].split;
                self.values[value.0].replicated |= match (written, &phase.split) {
                    (Split::Whole, _) | (Split::Heads { .. }, Split::Heads { .. }) => false,
                    // What a device adds to its rows is of the same rows.
                    (Split::Even { .. }, read) if own => written != read,
                    (Split::Heads { .. } | Split::Even { .. }, _) => true,
                };
            }
        }
    }

    pub(crate) fn buffer(&self, value: ValueId) -> BufferId {
        BufferId(value.0.checked_sub(1).map_or(0, |written| self.buffers.len() + written) as u32)
    }

    pub(crate) fn counted(&self, value: ValueId) -> bool {
        self.values[value.0].handoff == Some(Handoff::Counter)
    }

    pub(crate) fn writer(&self, value: ValueId) -> Option<usize> {
        self.values[value.0].writer
    }
}

/// The residual stream between two blocks.
#[derive(Clone, Debug)]
struct Stream {
    x: ValueId,
    /// What is still to be added to it: the first reader does that.
    pending: Option<Pending>,
}

/// The result of a block that ends with a norm.
#[derive(Clone, Debug)]
struct Pending {
    sums: ValueId,
    norm: TensorId,
    /// The name of the stream with it.
    name: String,
}

/// How a product reads the residual stream.
struct Reading {
    prologue: Prologue,
    input: ValueId,
    weights: Option<BufferId>,
    residual: Option<ValueId>,
    stream: Option<ValueId>,
}

/// Adds phases, and their constants in the same order.
struct Builder<'a> {
    config: &'a ScheduleConfig,
    graph: &'a Graph,
    packed: &'a PackedModel,
    kv_words: u32,
    /// The buffer of each of the graph's rotary tables.
    rotary: Vec<BufferId>,
    flow: Flow,
}

impl Builder<'_> {
    fn model(&mut self) {
        let (graph, packed) = (self.graph, self.packed);
        let source = BufferSource::Embedding(packed.embed.id);
        self.buffer("embedding".into(), BufferKind::Embedding, graph.hidden, source);
        for (n, table) in (0..).zip(std::iter::once(&graph.inv_freq).chain(&graph.rotary)) {
            let name = if n == 0 { "inv_freq".to_owned() } else { format!("rotary.{n}") };
            let (words, source) = (table.len() as u32, BufferSource::Rotary(n));
            let buffer = self.buffer(name, BufferKind::Constant, words, source);
            self.rotary.push(buffer);
        }
        let mut x = ValueId(0);
        if self.config.fusion_grouping.embed == EmbedGrouping::Separate {
            let item_bytes = graph.dtype.bytes() as u64;
            let scale = if graph.embed_scale == 1.0 { 0.0 } else { graph.embed_scale };
            let params = EmbedParams { scale, ..EmbedParams::default() };
            let embed = self.phase(PhaseClass::Embed, 0, Op::Embed(params), x);
            let split = Split::Whole;
            let embed =
                Phase { items: graph.hidden, block: EMBED_BLOCK, item_bytes, split, ..embed };
            x = self.push(embed, graph.hidden.into());
        }
        let mut stream = Stream { x, pending: None };
        for (n, (layer, packed)) in (0_u32..).zip(graph.layers.iter().zip(&packed.layers)) {
            stream = self.attention_block(n, layer, &packed.attention, stream);
            stream = match (&layer.mlp.body, &packed.router) {
                (FeedForward::Experts(experts), Some(router)) => {
                    self.experts_block(n, &layer.mlp, (experts, router, &packed.mlp), stream)
                }
                _ => self.mlp_block(n, &layer.mlp, &packed.mlp, stream),
            };
        }
        self.head(graph.layers.len() as u32, stream);
    }

    /// How the next product reads the stream, after a norm if there is one. What is pending is added by this product; it
    /// also stores the sum, which is then the stream, unless it is the last reader.
    fn read_stream(
        &mut self,
        stream: &mut Stream,
        norm: Option<TensorId>,
        name: String,
        last: bool,
    ) -> Reading {
        let hidden = self.graph.hidden;
        let x = stream.x;
        let Some(pending) = stream.pending.take() else {
            let weights = norm.map(|norm| self.vector(name, norm, hidden));
            let prologue = if norm.is_some() { Prologue::Rms } else { Prologue::Copy };
            return Reading { prologue, input: x, weights, residual: None, stream: None };
        };
        let parts = std::iter::once(pending.norm).chain(norm);
        let parts = parts.map(|norm| (Some(norm), hidden)).collect();
        let weights = self.constant(name, RowMap { parts, interleaved: false });
        // The tasks that store it signal for their output, so that only its own words can announce it.
        let stored = (!last).then(|| {
            self.value(pending.name, Handoff::FlagInData, hidden.into(), self.flow.phases.len())
        });
        stream.x = stored.unwrap_or(x);
        Reading {
            prologue: Prologue::PostNorm,
            input: pending.sums,
            weights: Some(weights),
            residual: Some(x),
            stream: stored,
        }
    }

    fn attention_block(
        &mut self,
        n: u32,
        layer: &Layer,
        packed: &PackedAttention,
        mut stream: Stream,
    ) -> Stream {
        let (graph, tiling) = (self.graph, self.config.tiling.attention);
        let (head_dim, kv_block, splits) = (graph.head_dim, tiling.kv_block, tiling.kv_split);
        let Block { norm, post_norm, body } = &layer.attention;
        let window = body.window.unwrap_or(0);
        let name = |part: &str| format!("layers.{n}.{part}");
        let reading = self.read_stream(&mut stream, *norm, name("attn_norm"), false);
        let params = product(reading.prologue, Epilogue::Store);
        let mut qkv = self.reader(PhaseClass::Qkv, n, &packed.qkv, params, &reading);
        if !graph.norms_all_heads(layer) {
            let (q, kv) = (graph.q_width(), graph.kv_width());
            let parts = vec![(0, q), (q, kv), (q + kv, kv)];
            qkv.split = self.heads(parts, UNIT_ROWS);
        }
        let mut qkv = self.push(qkv, u64::from(graph.q_width()) + 2 * u64::from(graph.kv_width()));
        let (mut q_norm, mut k_norm) = (None, None);
        if graph.norms_all_heads(layer) {
            qkv = self.norm_heads(n, body, qkv);
        } else {
            q_norm = body.q_norm.map(|t| self.vector(name("q_norm"), t, head_dim));
            k_norm = body.k_norm.map(|t| self.vector(name("k_norm"), t, head_dim));
        }
        let params = AttentionParams {
            kv_heads: graph.kv_heads,
            group: graph.group(),
            head_dim,
            splits,
            kv_block,
            window,
            scale: graph.attn_scale,
            eps: graph.norm_eps,
            cap: graph.score_cap.unwrap_or(0.0),
            ..AttentionParams::default()
        };
        let rope = self.rotary[body.rotary as usize];
        let sinks = body.sinks.map(|sinks| self.vector(name("sinks"), sinks, graph.heads));
        let source = BufferSource::KvCache { layer: n };
        let kv = self.buffer(name("kv"), graph.kv_dtype.buffer_kind(), self.kv_words, source);
        // The sequence length is not known here: one block of keys stands for it.
        let key_bytes = 2 * u64::from(head_dim) * graph.dtype.bytes() as u64;
        let items = graph.kv_heads * group_parts(graph.group()) * splits;
        let attention = Phase {
            reads: [None, q_norm, k_norm, Some(rope), sinks, None],
            writes: [None, Some(kv)],
            items,
            item_bytes: key_bytes * u64::from(kv_block),
            split: self.heads(vec![(0, items)], 1),
            ..self.phase(PhaseClass::Attention, n, Op::Attention(params), qkv)
        };
        let words = u64::from(graph.heads) * u64::from(head_dim + abi::PARTIAL_HEADER);
        let partials = self.push(attention, u64::from(splits) * words);
        let (attended, params) = match self.config.fusion_grouping.merge {
            MergeGrouping::Separate => {
                let merged = self.merge(n, window, partials);
                (merged, product(Prologue::Copy, Epilogue::Store))
            }
            MergeGrouping::OProj => {
                let params = product(Prologue::Merge, Epilogue::Store);
                (partials, MatvecParams { splits, head_dim, kv_block, window, ..params })
            }
        };
        let o = self.matvec(PhaseClass::OProj, n, &packed.o, params, attended, None);
        self.end_block(o, *post_norm, stream)
    }

    /// Adds the product that ends a block. It adds its result to the residual stream, or leaves that to the next reader
    /// if the result is normed before: each reader needs all of it for that.
    fn end_block(&mut self, last: Phase, post_norm: Option<TensorId>, stream: Stream) -> Stream {
        let (hidden, x) = (self.graph.hidden, stream.x);
        let (Op::Matvec(params), Some(name)) = (last.op, last.class.buffer(last.layer)) else {
            return stream;
        };
        let Some(norm) = post_norm else {
            let op = Op::Matvec(MatvecParams { epilogue: Epilogue::Residual as u32, ..params });
            let x = self.push(Phase { op, residual: Some(x), ..last }, hidden.into());
            return Stream { x, pending: None };
        };
        let sums = self.push_named(last, format!("{name}.sums"), hidden.into());
        Stream { x, pending: Some(Pending { sums, norm, name }) }
    }

    /// Adds the norm of all queries and of all keys; values pass through.
    fn norm_heads(&mut self, n: u32, body: &Attention, qkv: ValueId) -> ValueId {
        let (q, kv) = (self.graph.q_width(), self.graph.kv_width());
        let parts = vec![(body.q_norm, q), (body.k_norm, kv)];
        let map = RowMap { parts, interleaved: false };
        let weight = self.constant(format!("layers.{n}.qk_norm"), map);
        let width = q + 2 * kv;
        let eps = self.graph.norm_eps;
        let params = NormParams { width, first: q, second: kv, eps, ..NormParams::default() };
        let norm = Phase {
            handoff: PhaseClass::Qkv.handoff(self.config),
            reads: [None, Some(weight), None, None, None, None],
            items: width,
            block: NORM_BLOCK,
            item_bytes: 4,
            split: Split::Whole,
            ..self.phase(PhaseClass::Norm, n, Op::Norm(params), qkv)
        };
        self.push_named(norm, format!("layers.{n}.qkv.normed"), width.into())
    }

    fn merge(&mut self, n: u32, window: u32, partials: ValueId) -> ValueId {
        let (graph, tiling) = (self.graph, self.config.tiling.attention);
        let params = AttentionMergeParams {
            heads_total: graph.heads,
            head_dim: graph.head_dim,
            splits: tiling.kv_split,
            kv_block: tiling.kv_block,
            window,
            ..AttentionMergeParams::default()
        };
        let words = u64::from(graph.head_dim + abi::PARTIAL_HEADER);
        let merge = Phase {
            items: graph.heads,
            item_bytes: u64::from(tiling.kv_split) * words * 4,
            split: self.heads(vec![(0, graph.heads)], 1),
            ..self.phase(PhaseClass::Merge, n, Op::Merge(params), partials)
        };
        self.push(merge, graph.q_width().into())
    }

    fn mlp_block<B>(
        &mut self,
        n: u32,
        block: &Block<B>,
        packed: &PackedMlp,
        mut stream: Stream,
    ) -> Stream {
        let graph = self.graph;
        let name = format!("layers.{n}.mlp_norm");
        let reading = self.read_stream(&mut stream, block.norm, name, false);
        let params = gated(graph.activation, reading.prologue);
        let h = self.reader(PhaseClass::GateUp, n, &packed.gate_up, params, &reading);
        let h = self.push(h, graph.ffn.into());
        let params = product(Prologue::Copy, Epilogue::Store);
        let down = self.matvec(PhaseClass::Down, n, &packed.down, params, h, None);
        self.end_block(down, block.post_norm, stream)
    }

    /// A layer's experts: a router's logits, the route, and the products that follow it. Those of the shared expert come
    /// before, so that its weights stream while the route is not known.
    fn experts_block(
        &mut self,
        n: u32,
        block: &Block<FeedForward>,
        (experts, router, packed): (&Experts, &PackedRouter, &PackedMlp),
        mut stream: Stream,
    ) -> Stream {
        let graph = self.graph;
        let name = || format!("layers.{n}.mlp_norm");
        // The router's tasks store what they add, so that later products read it like any residual.
        let reading = self.read_stream(&mut stream, block.norm, name(), false);
        let count = experts.experts.len() as u32;
        let params = product(reading.prologue, Epilogue::Store);
        let logits = self.reader(PhaseClass::Router, n, &router.router, params, &reading);
        // Loaders poll them, so they are always flag-in-data.
        let logits = Phase { handoff: Some(Handoff::FlagInData), ..logits };
        let logits = self.push(logits, u64::from(count + u32::from(router.shared.is_some())));
        let reading = match reading.residual {
            Some(_) => self.read_stream(&mut stream, block.norm, name(), false),
            None => reading,
        };
        let scoring = if experts.normalised { Scoring::Chosen } else { Scoring::All };
        let route = self.route(n, "route", logits, (0, count, experts.top_k, scoring));
        let (up, down) = (PhaseClass::GateUp, PhaseClass::Down);
        let ranked = Some(logits).filter(|_| count > 1);
        let mut hidden = None;
        if let (Some(packed), Some(shared)) = (&router.shared, &experts.shared) {
            let route = self.route(n, "shared_route", logits, (count, 1, 1, Scoring::Sigmoid));
            let params = gated(graph.activation, reading.prologue);
            let h = self.reader(PhaseClass::SharedUp, n, &packed.gate_up, params, &reading);
            let h = Phase { route: Some(route), ..self.like(up, h) };
            hidden = Some((packed, self.push(h, shared.ffn.into())));
        }
        let mut params = gated(graph.activation, reading.prologue);
        if let Some(clamped) = experts.clamped {
            params.activation = Activation::ClampedSilu as u32;
            params.cap = clamped.limit;
        }
        params.rows = experts.top_k;
        let h = self.reader(up, n, &packed.gate_up, params, &reading);
        let width = u64::from(experts.top_k) * u64::from(graph.expert_width(experts));
        let h = self.push(Phase { route: Some(route), logits: ranked, ..h }, width);
        if let Some((packed, h)) = hidden {
            let params = product(Prologue::Copy, Epilogue::Residual);
            let shared = self.matvec(PhaseClass::SharedDown, n, &packed.down, params, h, None);
            let shared = Phase { residual: Some(stream.x), ..self.like(down, shared) };
            stream.x = self.push(shared, graph.hidden.into());
        }
        let params = product(Prologue::Copy, Epilogue::Store);
        let params = MatvecParams { units: experts.top_k, ..params };
        let last = self.matvec(down, n, &packed.down, params, h, None);
        let last = Phase { route: Some(route), logits: ranked, ..last };
        self.end_block(last, block.post_norm, stream)
    }

    /// Adds a route of `slots` among `experts`, by logits from `first` on. Products read its words while they multiply, so
    /// they are always flag-in-data.
    fn route(
        &mut self,
        n: u32,
        name: &str,
        logits: ValueId,
        (first, experts, slots, scoring): (u32, u32, u32, Scoring),
    ) -> ValueId {
        let scoring = scoring as u32;
        let params = RouteParams { first, experts, slots, scoring, ..RouteParams::default() };
        let route = self.phase(PhaseClass::Route, n, Op::Route(params), logits);
        let handoff = Some(Handoff::FlagInData);
        let item_bytes = 4 * u64::from(experts);
        let split = Split::Whole;
        let route = Phase { items: 1, item_bytes, handoff, split, ..route };
        self.push_named(route, format!("layers.{n}.{name}"), 2 * u64::from(slots))
    }

    /// A phase that is handed over and dealt like those of another class.
    fn like(&self, class: PhaseClass, phase: Phase) -> Phase {
        let granule = if class == PhaseClass::GateUp { 2 } else { 1 };
        let block = class.rows(self.config).map_or(1, |rows| rows / UNIT_ROWS) * granule;
        Phase { handoff: class.handoff(self.config), block, ..phase }
    }

    /// Adds the logits and the sampling of a token; each product also writes the best of its rows as two words.
    fn head(&mut self, n: u32, mut stream: Stream) {
        let (graph, packed) = (self.graph, self.packed);
        let norm = Some(graph.final_norm);
        let reading = self.read_stream(&mut stream, norm, "final_norm".into(), true);
        let logits =
            self.buffer("logits".into(), BufferKind::Logits, graph.vocab, BufferSource::Scratch);
        let cap = graph.logit_cap.unwrap_or(0.0);
        let params = MatvecParams { cap, ..product(reading.prologue, Epilogue::Logits) };
        let lm_head = self.reader(PhaseClass::LmHead, n, &packed.lm_head, params, &reading);
        let candidates = self.push(Phase { writes: [Some(logits), None], ..lm_head }, 2);
        self.flow.values[candidates.0].per_task = true;
        let sample = self.phase(PhaseClass::Sample, n, Op::Sample, candidates);
        self.push(Phase { items: 1, split: Split::Whole, ..sample }, 0);
    }

    /// The product of a matrix with the residual stream.
    fn reader(
        &mut self,
        class: PhaseClass,
        n: u32,
        packed: &PackedMatrix,
        params: MatvecParams,
        reading: &Reading,
    ) -> Phase {
        let &Reading { input, weights, residual, stream, .. } = reading;
        Phase { residual, stream, ..self.matvec(class, n, packed, params, input, weights) }
    }

    /// Adds the product of a matrix with the prologue's result on `input`. `params.rows` and `params.units` are the slots
    /// whose rows or columns it has, zero for one.
    fn matvec(
        &mut self,
        class: PhaseClass,
        n: u32,
        packed: &PackedMatrix,
        params: MatvecParams,
        input: ValueId,
        norm: Option<BufferId>,
    ) -> Phase {
        let matrix = &self.packed.matrices[packed.id.index()];
        let what = if matrix.format.is_scaled() { "scale" } else { "bias" };
        let constants = packed.constants.clone();
        let constants = constants.map(|map| self.constant(format!("{}_{what}", matrix.name), map));
        let (slots, sections) = (params.units.max(1), params.rows.max(1));
        let units = matrix.units_per_tile() * slots;
        // Several slots' columns are whole units of each.
        let whole = matrix.cols.next_multiple_of(matrix.format.unit_cols()) * slots;
        let k_len = if params.units > 0 { whole } else { matrix.cols };
        let params = MatvecParams {
            matrix: packed.id.0,
            units,
            k_len,
            rows: matrix.expert_rows() * sections,
            eps: norm.map_or(0.0, |_| self.graph.norm_eps),
            ..params
        };
        // Rows of h: each comes from a gate row and an up row.
        let interleaved = if matrix.map.interleaved { 2 } else { 1 };
        Phase {
            reads: [None, norm, constants, None, None, None],
            items: params.rows.div_ceil(UNIT_ROWS),
            block: class.rows(self.config).map_or(1, |rows| rows / UNIT_ROWS) * interleaved,
            item_bytes: u64::from(params.units) * u64::from(matrix.format.unit_bytes()),
            split: Split::Even { granule: interleaved, sections },
            ..self.phase(class, n, Op::Matvec(params), input)
        }
    }

    fn phase(&self, class: PhaseClass, layer: u32, op: Op, input: ValueId) -> Phase {
        Phase {
            class,
            layer,
            op,
            handoff: class.handoff(self.config),
            input,
            residual: None,
            stream: None,
            route: None,
            logits: None,
            output: None,
            reads: [None; READS_MAX],
            writes: [None; WRITES_MAX],
            items: 0,
            block: 1,
            item_bytes: 0,
            split: Split::Even { granule: 1, sections: 1 },
        }
    }

    /// The split of items of which each part belongs to the key/value heads in order, with `granule` of its units in an
    /// item.
    fn heads(&self, parts: Vec<(u32, u32)>, granule: u32) -> Split {
        Split::Heads { kv_heads: self.graph.kv_heads, parts, granule }
    }

    /// Adds a phase whose output has this many words; returns the value that the next phase reads.
    fn push(&mut self, phase: Phase, words: u64) -> ValueId {
        match phase.class.buffer(phase.layer) {
            Some(name) => self.push_named(phase, name, words),
            None => {
                let next = phase.input;
                self.flow.phases.push(phase);
                next
            }
        }
    }

    fn push_named(&mut self, phase: Phase, name: String, words: u64) -> ValueId {
        // A candidate holds a row number, which leaves no bits for a tag: it has no knob.
        let handoff = phase.handoff.unwrap_or(Handoff::Counter);
        let next = self.value(name, handoff, words, self.flow.phases.len());
        self.flow.phases.push(Phase { output: Some(next), ..phase });
        next
    }

    /// Adds a value that the phase of this number writes.
    fn value(&mut self, name: String, handoff: Handoff, words: u64, writer: usize) -> ValueId {
        let (writer, handoff) = (Some(writer), Some(handoff));
        let value = Value { writer, handoff, name, words, ..Value::default() };
        self.flow.values.push(value);
        ValueId(self.flow.values.len() - 1)
    }

    fn buffer(
        &mut self,
        name: String,
        kind: BufferKind,
        words: u32,
        source: BufferSource,
    ) -> BufferId {
        self.flow.buffers.push(Buffer { name, kind, words, source, offset: 0 });
        BufferId(self.flow.buffers.len() as u32 - 1)
    }

    fn vector(&mut self, name: String, tensor: TensorId, len: u32) -> BufferId {
        self.constant(name, RowMap::single(tensor, len))
    }

    fn constant(&mut self, name: String, map: RowMap) -> BufferId {
        self.buffer(name, BufferKind::Constant, map.rows(), BufferSource::Vector(map))
    }
}

fn product(prologue: Prologue, epilogue: Epilogue) -> MatvecParams {
    let (prologue, epilogue) = (prologue as u32, epilogue as u32);
    MatvecParams { prologue, epilogue, ..MatvecParams::default() }
}

/// The first product of an MLP.
fn gated(activation: Activation, prologue: Prologue) -> MatvecParams {
    let params = product(prologue, Epilogue::SiluMul);
    MatvecParams { activation: activation as u32, ..params }
}

const _: () = assert!(UNIT_ROWS == 8, "tiling knobs are multiples of a tile");
