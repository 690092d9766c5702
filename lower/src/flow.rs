//! The phases of a step and the values between them. This pass alone knows the model; the later ones work on phases and
//! values.

use abi::{
    Activation, AttentionMergeParams, AttentionParams, BufferKind, EmbedParams, Epilogue,
    MatvecParams, NormParams, Prologue, READS_MAX, RouteParams, Scoring, UNIT_ROWS, WRITES_MAX,
};
use ir::program::{
    Buffer, BufferSource, PackedAttention, PackedMatrix, PackedMlp, PackedModel, PackedRouter,
    RowMap,
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
    /// The value that its products are added to.
    pub(crate) residual: Option<ValueId>,
    /// The route that its products follow.
    pub(crate) route: Option<ValueId>,
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
            let whole = [Some(phase.input), phase.route];
            let reads = whole.into_iter().flatten().map(|value| (value, false));
            for (value, own) in reads.chain(phase.residual.map(|value| (value, true))) {
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
        for (n, (layer, packed)) in (0_u32..).zip(graph.layers.iter().zip(&packed.layers)) {
            x = self.attention_block(n, layer, &packed.attention, x);
            x = match (&layer.mlp.body, &packed.router) {
                (FeedForward::Experts(experts), Some(router)) => {
                    self.experts_block(n, &layer.mlp, (experts, router, &packed.mlp), x)
                }
                _ => self.mlp_block(n, &layer.mlp, &packed.mlp, x),
            };
        }
        self.head(graph.layers.len() as u32, x);
    }

    fn attention_block(
        &mut self,
        n: u32,
        layer: &Layer,
        packed: &PackedAttention,
        x: ValueId,
    ) -> ValueId {
        let (graph, tiling) = (self.graph, self.config.tiling.attention);
        let (head_dim, kv_block, splits) = (graph.head_dim, tiling.kv_block, tiling.kv_split);
        let Block { norm, post_norm, body } = &layer.attention;
        let window = body.window.unwrap_or(0);
        let name = |part: &str| format!("layers.{n}.{part}");
        let norm = norm.map(|norm| self.vector(name("attn_norm"), norm, graph.hidden));
        let params = product(first_prologue(norm), Epilogue::Store);
        let mut qkv = self.matvec(PhaseClass::Qkv, n, &packed.qkv, params, x, norm);
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
        let kv = self.buffer(name("kv"), BufferKind::KvCache, self.kv_words, source);
        // The sequence length is not known here: one block of keys stands for it.
        let key_bytes = 2 * u64::from(head_dim) * graph.dtype.bytes() as u64;
        let attention = Phase {
            reads: [None, q_norm, k_norm, Some(rope), sinks],
            writes: [None, Some(kv)],
            items: graph.kv_heads * splits,
            item_bytes: key_bytes * u64::from(kv_block),
            split: self.heads(vec![(0, graph.kv_heads * splits)], 1),
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
        self.end_block(o, *post_norm, x)
    }

    /// Adds the product that ends a block, and what adds it to the residual stream `x`: the product itself, or a norm
    /// of its result.
    fn end_block(&mut self, last: Phase, post_norm: Option<TensorId>, x: ValueId) -> ValueId {
        let hidden = self.graph.hidden;
        let Op::Matvec(params) = last.op else { return x };
        let Some(norm) = post_norm else {
            let op = Op::Matvec(MatvecParams { epilogue: Epilogue::Residual as u32, ..params });
            return self.push(Phase { op, residual: Some(x), ..last }, hidden.into());
        };
        let (class, layer) = (last.class, last.layer);
        let Some(name) = class.buffer(layer) else { return x };
        let sums = self.push_named(last, format!("{name}.sums"), hidden.into());
        let weight = self.vector(format!("{name}.norm"), norm, hidden);
        let params = NormParams { width: hidden, first: hidden, ..NormParams::default() };
        let norm = self.norm(class, layer, params, sums, weight);
        self.push_named(Phase { residual: Some(x), ..norm }, name, hidden.into())
    }

    /// Adds the norm of all queries and of all keys; values pass through.
    fn norm_heads(&mut self, n: u32, body: &Attention, qkv: ValueId) -> ValueId {
        let (q, kv) = (self.graph.q_width(), self.graph.kv_width());
        let parts = vec![(body.q_norm, q), (body.k_norm, kv)];
        let map = RowMap { parts, interleaved: false };
        let weight = self.constant(format!("layers.{n}.qk_norm"), map);
        let width = q + 2 * kv;
        let params = NormParams { width, first: q, second: kv, ..NormParams::default() };
        let norm = self.norm(PhaseClass::Qkv, n, params, qkv, weight);
        self.push_named(norm, format!("layers.{n}.qkv.normed"), width.into())
    }

    /// A norm after a product of this class; it is handed over like the product's result.
    fn norm(
        &self,
        after: PhaseClass,
        layer: u32,
        params: NormParams,
        input: ValueId,
        weight: BufferId,
    ) -> Phase {
        let params = NormParams { eps: self.graph.norm_eps, ..params };
        Phase {
            handoff: after.handoff(self.config),
            reads: [None, Some(weight), None, None, None],
            items: params.width,
            block: NORM_BLOCK,
            item_bytes: 4,
            split: Split::Whole,
            ..self.phase(PhaseClass::Norm, layer, Op::Norm(params), input)
        }
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
        x: ValueId,
    ) -> ValueId {
        let graph = self.graph;
        let norm =
            block.norm.map(|norm| self.vector(format!("layers.{n}.mlp_norm"), norm, graph.hidden));
        let params = gated(graph.activation, norm);
        let h = self.matvec(PhaseClass::GateUp, n, &packed.gate_up, params, x, norm);
        let h = self.push(h, graph.ffn.into());
        let params = product(Prologue::Copy, Epilogue::Store);
        let down = self.matvec(PhaseClass::Down, n, &packed.down, params, h, None);
        self.end_block(down, block.post_norm, x)
    }

    /// A layer's experts: a router's logits, the route, and the products that follow it. Those of the shared expert come
    /// before, so that its weights stream while the route is not known.
    fn experts_block(
        &mut self,
        n: u32,
        block: &Block<FeedForward>,
        (experts, router, packed): (&Experts, &PackedRouter, &PackedMlp),
        mut x: ValueId,
    ) -> ValueId {
        let graph = self.graph;
        let norm =
            block.norm.map(|norm| self.vector(format!("layers.{n}.mlp_norm"), norm, graph.hidden));
        let count = experts.experts.len() as u32;
        let params = product(first_prologue(norm), Epilogue::Store);
        let logits = self.matvec(PhaseClass::Router, n, &router.router, params, x, norm);
        let logits = Phase { handoff: PhaseClass::GateUp.handoff(self.config), ..logits };
        let logits = self.push(logits, u64::from(count + u32::from(router.shared.is_some())));
        let scoring = if experts.normalised { Scoring::Chosen } else { Scoring::All };
        let route = self.route(n, "route", logits, (0, count, experts.top_k, scoring));
        let (up, down) = (PhaseClass::GateUp, PhaseClass::Down);
        let mut hidden = None;
        if let (Some(packed), Some(shared)) = (&router.shared, &experts.shared) {
            let route = self.route(n, "shared_route", logits, (count, 1, 1, Scoring::Sigmoid));
            let params = gated(graph.activation, norm);
            let h = self.matvec(PhaseClass::SharedUp, n, &packed.gate_up, params, x, norm);
            let h = Phase { route: Some(route), ..self.like(up, h) };
            hidden = Some((packed, self.push(h, shared.ffn.into())));
        }
        let mut params = gated(graph.activation, norm);
        if let Some(clamped) = experts.clamped {
            params.activation = Activation::ClampedSilu as u32;
            params.cap = clamped.limit;
        }
        params.rows = experts.top_k;
        let h = self.matvec(up, n, &packed.gate_up, params, x, norm);
        let width = u64::from(experts.top_k) * u64::from(graph.expert_width(experts));
        let h = self.push(Phase { route: Some(route), ..h }, width);
        if let Some((packed, h)) = hidden {
            let params = product(Prologue::Copy, Epilogue::Residual);
            let shared = self.matvec(PhaseClass::SharedDown, n, &packed.down, params, h, None);
            let shared = Phase { residual: Some(x), ..self.like(down, shared) };
            x = self.push(shared, graph.hidden.into());
        }
        let params = product(Prologue::Copy, Epilogue::Store);
        let params = MatvecParams { units: experts.top_k, ..params };
        let last = self.matvec(down, n, &packed.down, params, h, None);
        self.end_block(Phase { route: Some(route), ..last }, block.post_norm, x)
    }

    /// Adds a route of `slots` among `experts`, by logits from `first` on. Loaders poll its words, so they are always
    /// flag-in-data.
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
    fn head(&mut self, n: u32, x: ValueId) {
        let (graph, packed) = (self.graph, self.packed);
        let norm = self.vector("final_norm".into(), graph.final_norm, graph.hidden);
        let logits =
            self.buffer("logits".into(), BufferKind::Logits, graph.vocab, BufferSource::Scratch);
        let cap = graph.logit_cap.unwrap_or(0.0);
        let params = MatvecParams { cap, ..product(Prologue::Rms, Epilogue::Logits) };
        let lm_head = self.matvec(PhaseClass::LmHead, n, &packed.lm_head, params, x, Some(norm));
        let candidates = self.push(Phase { writes: [Some(logits), None], ..lm_head }, 2);
        self.flow.values[candidates.0].per_task = true;
        let sample = self.phase(PhaseClass::Sample, n, Op::Sample, candidates);
        self.push(Phase { items: 1, split: Split::Whole, ..sample }, 0);
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
        let slots = params.units.max(1);
        let units = matrix.units_per_tile() * slots;
        // Several slots' columns are whole units of each.
        let whole = matrix.cols.next_multiple_of(matrix.format.unit_cols()) * slots;
        let k_len = if params.units > 0 { whole } else { matrix.cols };
        let params = MatvecParams {
            matrix: packed.id.0,
            units,
            k_len,
            rows: matrix.expert_rows() * params.rows.max(1),
            eps: norm.map_or(0.0, |_| self.graph.norm_eps),
            ..params
        };
        // Rows of h: each comes from a gate row and an up row.
        let interleaved = if matrix.map.interleaved { 2 } else { 1 };
        Phase {
            reads: [None, norm, constants, None, None],
            items: params.rows.div_ceil(UNIT_ROWS),
            block: class.rows(self.config).map_or(1, |rows| rows / UNIT_ROWS) * interleaved,
            item_bytes: u64::from(params.units) * u64::from(matrix.format.unit_bytes()),
            split: Split::Even { granule: interleaved },
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
            route: None,
            output: None,
            reads: [None; READS_MAX],
            writes: [None; WRITES_MAX],
            items: 0,
            block: 1,
            item_bytes: 0,
            split: Split::Even { granule: 1 },
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
        let (writer, handoff) = (Some(self.flow.phases.len()), Some(handoff));
        self.flow.values.push(Value {
            writer,
            handoff,
            name,
            words,
            per_task: false,
            replicated: false,
        });
        let next = ValueId(self.flow.values.len() - 1);
        self.flow.phases.push(Phase { output: Some(next), ..phase });
        next
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

fn first_prologue(norm: Option<BufferId>) -> Prologue {
    if norm.is_some() { Prologue::Rms } else { Prologue::Copy }
}

fn product(prologue: Prologue, epilogue: Epilogue) -> MatvecParams {
    let (prologue, epilogue) = (prologue as u32, epilogue as u32);
    MatvecParams { prologue, epilogue, ..MatvecParams::default() }
}

/// The first product of an MLP.
fn gated(activation: Activation, norm: Option<BufferId>) -> MatvecParams {
    let params = product(first_prologue(norm), Epilogue::SiluMul);
    MatvecParams { activation: activation as u32, ..params }
}

const _: () = assert!(UNIT_ROWS == 8, "tiling knobs are multiples of a tile");
