//! Finds the first task whose stores differ from the graph's result for the buffers that it read.
//!
//! The graph is evaluated op by op, each op on the values that this executor itself had handed over, and each task's
//! words are compared with their part of the result. So a mistake does not propagate: later tasks are judged by their
//! own inputs, and the tolerance is that of one op ([`Allowance`]), far below that of a whole model. Tasks are judged
//! in the order in which they ran.

use std::collections::BTreeMap;
use std::ops::Range;

use abi::{AttentionParams, Epilogue, MatvecParams, Opcode, Prologue, RouteParams, Scoring};
use ir::program::{Program, Task, active_splits, attended, part_heads, split_range};
use ir::{BufferId, FeedForward, Gated, Graph, Layer, TensorId, Weights, WorkerId};

use crate::eval::{Belongs, EvalError, Evaluator, greatest};
use crate::machine::Machine;
use crate::math::argmax;
use crate::trace::{Fired, Stored};

/// A task with a wrong store, and its word with the largest error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// Its worker.
    pub worker: WorkerId,
    /// Its index in the worker's queue.
    pub task: u32,
    /// Its op.
    pub opcode: Opcode,
    /// Its layer; the number of layers for what follows the last.
    pub layer: u16,
    /// The position.
    pub position: usize,
    /// The place of the store.
    pub place: Place,
    /// Index of the word there.
    pub index: usize,
    /// The stored value.
    pub got: f32,
    /// The graph's result for the task's inputs.
    pub want: f32,
    /// Allowed difference.
    pub allowed: f64,
    /// Number of this task's words that exceed the allowed difference.
    pub words: usize,
}

/// A place that tasks store to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A buffer.
    Buffer(BufferId),
    /// The keys of a layer, at the step's position.
    Keys(u16),
    /// The values of a layer, at the step's position.
    Values(u16),
    /// The token chosen.
    Token,
}

/// Allowed errors of one op's words.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    /// Relative to each word's own magnitude.
    word: f64,
    /// Relative to the magnitude of the summed terms.
    sum: f64,
    /// Relative to the magnitude of an attention score.
    score: f64,
}

impl Allowance {
    /// The reference VM: a word may be rounded to make room for its tag, and sums of this many products are in another
    /// order.
    fn reference(longest: usize) -> Self {
        let sum = 8.0 * 2f64.powi(-24) * (longest.max(1) as f64).sqrt();
        Self { word: 2f64.powi(abi::TAG_BITS as i32 - 24), sum, score: sum }
    }

    /// A device splits the vectors that it multiplies into two halves of the operands' type or takes one of f16, sums in
    /// an order of its own, and stores keys and values as f16: two units in the last place of f16. Sums are truncated
    /// ([`Tolerance::of_device`](crate::compare::Tolerance::of_device)).
    fn device(longest: usize) -> Self {
        let cut_off = 2f64.powi(-23) * longest.div_ceil(16) as f64;
        let Self { word, .. } = Self::reference(longest);
        Self { word, sum: 2f64.powi(-10) + cut_off, score: 2f64.powi(-9) }
    }

    fn of(&self, want: f32, scale: f32) -> f64 {
        self.word * f64::from(want.abs()) + self.sum * f64::from(scale)
    }
}

/// The role of a buffer, in the order of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Embedded,
    Qkv(usize),
    /// The same with queries and keys normed over all heads.
    NormedQkv(usize),
    Partials(usize),
    Mixed(usize),
    /// What is normed before it is added to the residual stream.
    AttentionSums(usize),
    AfterAttention(usize),
    /// Logits of experts.
    Router(usize),
    Route(usize),
    SharedRoute(usize),
    SharedHidden(usize),
    Hidden(usize),
    /// With the shared expert, but not yet with those that are chosen.
    AfterShared(usize),
    MlpSums(usize),
    AfterMlp(usize),
    Logits,
    Candidates,
}

/// Judges steps of one model.
pub struct Examiner<'a> {
    graph: &'a Graph,
    ops: Evaluator<'a>,
    allowance: Allowance,
}

impl<'a> Examiner<'a> {
    /// An examiner for the reference VM.
    ///
    /// # Errors
    /// If the graph cannot be evaluated.
    pub fn new(graph: &'a Graph, weights: &'a dyn Weights) -> Result<Self, EvalError> {
        let allowance = Allowance::reference(longest(graph));
        Ok(Self { graph, ops: Evaluator::new(graph, weights)?, allowance })
    }

    /// An examiner for a device, which rounds more.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_device(graph: &'a Graph, weights: &'a dyn Weights) -> Result<Self, EvalError> {
        let ops = Evaluator::new(graph, weights)?.with_device_roundings();
        Ok(Self { graph, ops, allowance: Allowance::device(longest(graph)) })
    }

    /// The first of `fired` with a wrong store. The machine must have just run this step, with this token; it provides
    /// the program and the keys and values of the positions before. A device's stores are judged with the help of a
    /// machine that ran the same step.
    #[must_use]
    pub fn first(&self, machine: &Machine<'_>, token: u32, fired: &[Fired]) -> Option<Divergence> {
        let mut step = Step::new(self, machine, token, fired);
        fired.iter().find_map(|fired| step.judge(fired))
    }

    /// Every word that one of the tasks has stored, with its expected value.
    #[must_use]
    pub fn words(
        &self,
        machine: &Machine<'_>,
        token: u32,
        all: &[Fired],
        one: &Fired,
    ) -> Vec<Word> {
        Step::new(self, machine, token, all).words(one)
    }
}

/// A word that a task has stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Word {
    /// The place of the store.
    pub place: Place,
    /// Index of the word there.
    pub index: usize,
    /// The stored value.
    pub got: f32,
    /// The expected value, if it is known.
    pub want: Option<f32>,
    /// Allowed difference.
    pub allowed: f64,
}

impl Word {
    /// Whether the error exceeds the allowed difference. There is none where the expected value is not finite.
    #[must_use]
    pub fn is_wrong(&self) -> bool {
        let finite = self.want.filter(|want| want.is_finite());
        let differs = finite.is_some_and(|want| want.to_bits() != self.got.to_bits());
        let off = self.off();
        differs && (off.is_nan() || self.allowed.is_nan() || off > self.allowed)
    }

    fn off(&self) -> f64 {
        (f64::from(self.got) - f64::from(self.want.unwrap_or(f32::NAN))).abs()
    }

    /// The error as a multiple of the allowed difference.
    fn excess(&self) -> f64 {
        let excess = self.off() / self.allowed.max(f64::MIN_POSITIVE);
        if excess.is_finite() { excess } else { f64::INFINITY }
    }
}

fn longest(graph: &Graph) -> usize {
    graph.hidden.max(graph.ffn).max(graph.q_width()) as usize
}

fn task_of<'p>(program: &'p Program, fired: &Fired) -> Option<&'p Task> {
    program.workers.get(fired.worker.index())?.tasks.get(fired.task as usize)
}

/// The inputs of a step's tasks, and the expected results.
struct Step<'s, 'a> {
    examiner: &'s Examiner<'a>,
    machine: &'s Machine<'s>,
    program: &'s Program,
    token: u32,
    position: usize,
    /// The handed-over values.
    had: BTreeMap<Role, Vec<f32>>,
    belongs: BTreeMap<Role, Option<Belongs>>,
    /// Queries, keys and values of a layer at this position.
    heads: BTreeMap<usize, [Vec<f32>; 3]>,
}

impl<'s, 'a> Step<'s, 'a> {
    fn new(
        examiner: &'s Examiner<'a>,
        machine: &'s Machine<'s>,
        token: u32,
        fired: &[Fired],
    ) -> Self {
        let position = machine.positions().saturating_sub(1);
        let program = machine.program();
        let mut step = Self {
            examiner,
            machine,
            program,
            token,
            position,
            had: BTreeMap::new(),
            belongs: BTreeMap::new(),
            heads: BTreeMap::new(),
        };
        for fired in fired {
            let Some(task) = task_of(program, fired) else { continue };
            for (index, stored) in fired.writes.iter().enumerate() {
                step.note(task, index, stored);
            }
        }
        step
    }

    /// Records the handed-over values. Partials and candidates are not needed again.
    fn note(&mut self, task: &Task, index: usize, stored: &Stored) {
        let graph = self.examiner.graph;
        let Some(role) = role(graph, self.program, task, index) else { return };
        let routed = |layer, part: usize| {
            self.examiner.ops.routed_words(layer).map_or(graph.ffn, |words| words[part] as u32)
        };
        let words = match role {
            Role::Router(layer) => routed(layer, 0),
            Role::Route(_) | Role::SharedRoute(_) => stored.values.len() as u32,
            Role::SharedHidden(layer) => routed(layer, 2),
            Role::AfterShared(_)
            | Role::Embedded
            | Role::AttentionSums(_)
            | Role::AfterAttention(_)
            | Role::MlpSums(_)
            | Role::AfterMlp(_) => graph.hidden,
            Role::Qkv(_) | Role::NormedQkv(_) => graph.q_width() + 2 * graph.kv_width(),
            Role::Mixed(_) => graph.q_width(),
            Role::Hidden(layer) => routed(layer, 1),
            Role::Logits => graph.vocab,
            Role::Partials(_) | Role::Candidates => return,
        };
        let had = self.had.entry(role).or_insert_with(|| vec![f32::NAN; words as usize]);
        for (place, value) in had.iter_mut().skip(stored.start as usize).zip(&stored.values) {
            *place = *value;
        }
    }

    /// The residual at the start of a layer, as the layer's first product has it.
    fn before(&self, layer: usize) -> Option<Vec<f32>> {
        match layer.checked_sub(1) {
            Some(before) => self.after_block(before, true),
            None => self.stored_before(layer),
        }
    }

    /// The same as later products read it: what was stored.
    fn stored_before(&self, layer: usize) -> Option<Vec<f32>> {
        match layer.checked_sub(1) {
            Some(before) => self.had.get(&Role::AfterMlp(before)).cloned(),
            None => match self.had.get(&Role::Embedded) {
                Some(x) => Some(x.clone()),
                None => Some(self.examiner.ops.embedded(self.token).values),
            },
        }
    }

    /// The residual after a block, the MLP's if `mlp`, as the product behind it has it: what was stored, or, where the
    /// block's result is normed, the sum that this product computes itself.
    fn after_block(&self, layer: usize, mlp: bool) -> Option<Vec<f32>> {
        let (sums, after) = match mlp {
            true => (Role::MlpSums(layer), Role::AfterMlp(layer)),
            false => (Role::AttentionSums(layer), Role::AfterAttention(layer)),
        };
        let Some(sums) = self.had.get(&sums) else { return self.had.get(&after).cloned() };
        let x = match mlp {
            true => self.had.get(&Role::AfterAttention(layer)).cloned(),
            false => self.stored_before(layer),
        };
        Some(self.examiner.ops.after_norm(layer, mlp, &x?, sums).values)
    }

    fn heads(&mut self, layer: usize) -> Option<&[Vec<f32>; 3]> {
        if !self.heads.contains_key(&layer) {
            let qkv = self.had.get(&Role::NormedQkv(layer)).or(self.had.get(&Role::Qkv(layer)))?;
            let heads = self.examiner.ops.heads(layer, qkv, self.position as u32);
            self.heads.insert(layer, heads);
        }
        self.heads.get(&layer)
    }

    /// Keys and values of a layer up to this position; the last ones are this step's own.
    fn cache(&mut self, layer: usize) -> Option<[Vec<f32>; 2]> {
        let words = self.position * self.examiner.graph.kv_width() as usize;
        let ops = &self.examiner.ops;
        let earlier = |all: &[f32]| Some(ops.kept(all.get(..words)?.to_vec()));
        let mut cache = [earlier(self.machine.keys(layer))?, earlier(self.machine.values(layer))?];
        let [_, key, value] = self.heads(layer)?;
        cache[0].extend(key);
        cache[1].extend(value);
        Some(cache)
    }

    fn mixed(&mut self, layer: usize) -> Option<Belongs> {
        let [keys, values] = self.cache(layer)?;
        let q = self.heads(layer)?[0].clone();
        Some(self.examiner.ops.mixed(layer, &q, &keys, &values))
    }

    /// The expected values of all tasks of a role together.
    fn whole(&mut self, role: Role) -> Option<&Belongs> {
        if !self.belongs.contains_key(&role) {
            let found = self.evaluate(role);
            self.belongs.insert(role, found);
        }
        self.belongs.get(&role)?.as_ref()
    }

    fn evaluate(&mut self, role: Role) -> Option<Belongs> {
        let ops = &self.examiner.ops;
        let had = |role: Role| self.had.get(&role);
        match role {
            Role::Router(layer) => ops.router(layer, &self.after_block(layer, false)?),
            Role::Route(layer) => ops.route(layer, had(Role::Router(layer))?, false),
            Role::SharedRoute(layer) => ops.route(layer, had(Role::Router(layer))?, true),
            Role::SharedHidden(layer) => {
                let x = had(Role::AfterAttention(layer))?;
                ops.routed_hidden(layer, x, had(Role::SharedRoute(layer))?, true)
            }
            Role::Hidden(layer) if had(Role::Route(layer)).is_some() => {
                let x = had(Role::AfterAttention(layer))?;
                ops.routed_hidden(layer, x, had(Role::Route(layer))?, false)
            }
            Role::AfterShared(layer) => {
                let x = had(Role::AfterAttention(layer))?;
                ops.after_shared(layer, x, had(Role::SharedHidden(layer))?)
            }
            Role::AfterMlp(layer) if had(Role::Route(layer)).is_some() => {
                let x = had(Role::AfterShared(layer)).or(had(Role::AfterAttention(layer)))?;
                ops.after_experts(layer, x, (had(Role::Hidden(layer))?, had(Role::Route(layer))?))
            }
            Role::Embedded => Some(ops.embedded(self.token)),
            Role::Qkv(layer) => Some(ops.qkv(layer, &self.before(layer)?)),
            Role::NormedQkv(layer) => Some(ops.normed_qkv(layer, self.had.get(&Role::Qkv(layer))?)),
            Role::Mixed(layer) => self.mixed(layer),
            Role::AttentionSums(layer) => {
                let mixed = match self.had.get(&Role::Mixed(layer)) {
                    Some(mixed) => mixed.clone(),
                    None => self.mixed(layer)?.values,
                };
                Some(ops.attention_sums(layer, mixed))
            }
            Role::AfterAttention(layer) if self.had.contains_key(&Role::AttentionSums(layer)) => {
                let sums = self.had.get(&Role::AttentionSums(layer))?;
                Some(ops.after_norm(layer, false, &self.stored_before(layer)?, sums))
            }
            Role::AfterAttention(layer) => {
                let mixed = match self.had.get(&Role::Mixed(layer)) {
                    Some(mixed) => mixed.clone(),
                    None => self.mixed(layer)?.values,
                };
                Some(ops.after_attention(layer, &self.stored_before(layer)?, mixed))
            }
            Role::Hidden(layer) => Some(ops.hidden(layer, &self.after_block(layer, false)?)),
            Role::MlpSums(layer) => {
                Some(ops.mlp_sums(layer, self.had.get(&Role::Hidden(layer))?.clone()))
            }
            Role::AfterMlp(layer) if self.had.contains_key(&Role::MlpSums(layer)) => {
                let x = self.had.get(&Role::AfterAttention(layer))?;
                Some(ops.after_norm(layer, true, x, self.had.get(&Role::MlpSums(layer))?))
            }
            Role::AfterMlp(layer) => {
                let x = self.had.get(&Role::AfterAttention(layer))?;
                Some(ops.after_mlp(layer, x, self.had.get(&Role::Hidden(layer))?.clone()))
            }
            Role::Logits => Some(ops.logits_of(&self.before(self.examiner.graph.layers.len())?)),
            Role::Partials(_) | Role::Candidates => None,
        }
    }

    /// The expected values of the words of one write.
    fn part(
        &mut self,
        task: &Task,
        index: usize,
        stored: &Stored,
        fired: &Fired,
    ) -> Option<Belongs> {
        let role = role(self.examiner.graph, self.program, task, index)?;
        if let Role::Partials(layer) = role {
            return self.partials(layer, &task.params());
        }
        if role == Role::Candidates {
            return candidate(fired.writes.first()?);
        }
        let whole = self.whole(role)?;
        let range = stored.start as usize..stored.start as usize + stored.values.len();
        let (values, scales) = (whole.values.get(range.clone())?, whole.scales.get(range)?);
        Some(Belongs { values: values.to_vec(), scales: scales.to_vec() })
    }

    /// Expected partials of one key/value head over one split, for each query of a part of its group: the greatest score, the sum
    /// of exponentials, two zeros, the mean of the values. The scales are such that the tolerance of a sum applies to
    /// each.
    fn partials(&mut self, layer: usize, p: &AttentionParams) -> Option<Belongs> {
        let (graph, allowance) = (self.examiner.graph, self.examiner.allowance);
        let (head_dim, width) = (graph.head_dim as usize, graph.kv_width() as usize);
        let (group, part) = (graph.group() as usize, part_heads(graph.group(), p.part));
        if p.kv_head >= graph.kv_heads || p.kv_block == 0 || p.splits == 0 {
            return None;
        }
        let keys_in_all = attended(self.position as u32, self.examiner.ops.window(layer));
        let active = active_splits(keys_in_all, p.kv_block, p.splits);
        let stride = head_dim + abi::PARTIAL_HEADER as usize;
        if p.split >= active {
            let nothing = vec![0.0; part.len() * stride];
            return Some(Belongs { scales: nothing.clone(), values: nothing });
        }
        let [keys, values] = self.cache(layer)?;
        let first = self.position + 1 - keys_in_all as usize;
        let range = split_range(keys_in_all, p.kv_block, active, p.split);
        let at = |cached: &[f32], key: u32| {
            let start = (first + key as usize) * width + p.kv_head as usize * head_dim;
            cached[start..][..head_dim].to_vec()
        };
        let of_range = |cached: &[f32]| -> Vec<Vec<f32>> {
            range.clone().map(|key| at(cached, key)).collect()
        };
        let (keys, values) = (of_range(&keys), of_range(&values));
        let sinks = self.examiner.ops.sinks(layer).filter(|_| p.split + 1 == active);
        let queries = &self.heads(layer)?[0];
        let first_head = p.kv_head as usize * group + part.start as usize;
        let of_part = queries.chunks_exact(head_dim).skip(first_head).take(part.len());
        let mut belongs = Belongs::default();
        for (head, query) in (first_head..).zip(of_part) {
            let sink = sinks.map(|sinks| sinks[head]);
            let scoring = (graph.attn_scale, graph.score_cap, sink);
            partial(query, &keys, &values, scoring, allowance, &mut belongs);
        }
        Some(belongs)
    }

    /// The words that a task has stored, and their expected values. Keys and values come first: attention reads its own
    /// among them.
    fn words(&mut self, fired: &Fired) -> Vec<Word> {
        let Some(task) = task_of(self.program, fired) else { return Vec::new() };
        let allowance = self.examiner.allowance;
        let mut words = Vec::new();
        let mut add = |place: Place, start: usize, got: &[f32], belongs: Option<Belongs>| {
            let belongs = belongs.unwrap_or_default();
            words.extend(got.iter().enumerate().map(|(index, &got)| {
                let want = belongs.values.get(index).copied();
                let scale = belongs.scales.get(index).copied().unwrap_or(0.0);
                let allowed = allowance.of(want.unwrap_or(0.0), scale);
                Word { place, index: start + index, got, want, allowed }
            }));
        };
        if let Some(appended) = &fired.appended {
            let layer = task.layer;
            let start = appended.kv_head as usize * self.examiner.graph.head_dim as usize;
            let sides =
                [(Place::Keys(layer), &appended.key), (Place::Values(layer), &appended.value)];
            for (side, (place, got)) in (1..).zip(sides) {
                let belongs = self.appended(usize::from(layer), side, start..start + got.len());
                add(place, start, got, belongs);
            }
        }
        for (index, stored) in fired.writes.iter().enumerate() {
            let belongs = self.part(task, index, stored, fired);
            add(Place::Buffer(stored.buffer), stored.start as usize, &stored.values, belongs);
        }
        if let Some(chosen) = fired.chosen {
            let want = self.had.get(&Role::Logits).map(|logits| argmax(logits) as f32);
            let belongs = want.map(|want| Belongs { values: vec![want], scales: vec![0.0] });
            add(Place::Token, 0, &[chosen as f32], belongs);
        }
        words
    }

    /// The expected key or value at the place of the store, which belongs to another head if it was stored under
    /// another.
    fn appended(&mut self, layer: usize, side: usize, words: Range<usize>) -> Option<Belongs> {
        if layer >= self.examiner.graph.layers.len() {
            return None;
        }
        let values = self.heads(layer)?[side].get(words)?.to_vec();
        Some(Belongs { scales: vec![greatest(&values); values.len()], values })
    }

    /// At the first place with a wrong word, the word with the largest error relative to its allowance.
    fn judge(&mut self, fired: &Fired) -> Option<Divergence> {
        let task = task_of(self.program, fired)?;
        let wrong: Vec<Word> = self.words(fired).into_iter().filter(Word::is_wrong).collect();
        let first = wrong.chunk_by(|a, b| a.place == b.place).next()?;
        let worst = first.iter().min_by(|a, b| b.excess().total_cmp(&a.excess()))?;
        Some(Divergence {
            worker: fired.worker,
            task: fired.task,
            opcode: task.opcode,
            layer: task.layer,
            position: self.position,
            place: worst.place,
            index: worst.index,
            got: worst.got,
            want: worst.want?,
            allowed: worst.allowed,
            words: first.len(),
        })
    }
}

/// The role of a task's store. It is derived from the op, not from buffer names, which are only for reports.
fn role(graph: &Graph, program: &Program, task: &Task, index: usize) -> Option<Role> {
    let layer = usize::from(task.layer);
    let inside = layer < graph.layers.len();
    match task.opcode {
        Opcode::Nop | Opcode::Sample => None,
        Opcode::Route => {
            let p: RouteParams = task.params();
            let shared = p.scoring == Scoring::Sigmoid as u32;
            inside.then_some(if shared { Role::SharedRoute(layer) } else { Role::Route(layer) })
        }
        Opcode::Embed => Some(Role::Embedded),
        Opcode::Attention => inside.then_some(Role::Partials(layer)),
        Opcode::AttentionMerge => inside.then_some(Role::Mixed(layer)),
        Opcode::Norm => inside.then_some(Role::NormedQkv(layer)),
        Opcode::Matvec => {
            let p: MatvecParams = task.params();
            if p.prologue == Prologue::PostNorm as u32
                && p.epilogue != Epilogue::Logits as u32
                && index > 0
            {
                return stream(role(graph, program, task, 0)?);
            }
            match Epilogue::new(p.epilogue)? {
                Epilogue::Store => {
                    graph.layers.get(layer).map(|of| stored(graph, program, of, &p, layer))
                }
                Epilogue::SiluMul => {
                    let shared = shared(graph, layer)
                        .is_some_and(|mlp| multiplies(program, &p, mlp.gate.weight));
                    let role = if shared { Role::SharedHidden } else { Role::Hidden };
                    inside.then_some(role(layer))
                }
                Epilogue::Residual if !inside => None,
                Epilogue::Residual if task.reads[4].is_some() => Some(Role::AfterMlp(layer)),
                Epilogue::Residual
                    if shared(graph, layer)
                        .is_some_and(|mlp| multiplies(program, &p, mlp.down.weight)) =>
                {
                    Some(Role::AfterShared(layer))
                }
                Epilogue::Residual if ends_layer(graph, program, layer, &p) => {
                    Some(Role::AfterMlp(layer))
                }
                Epilogue::Residual => Some(Role::AfterAttention(layer)),
                Epilogue::Logits if index == 0 => Some(Role::Logits),
                Epilogue::Logits => Some(Role::Candidates),
            }
        }
    }
}

/// The role of the residual stream that a product stores beside this one.
fn stream(product: Role) -> Option<Role> {
    if let Role::Qkv(layer) = product {
        return layer.checked_sub(1).map(Role::AfterMlp);
    }
    let (Role::Router(layer) | Role::Hidden(layer)) = product else { return None };
    Some(Role::AfterAttention(layer))
}

/// The shared expert of a layer.
fn shared(graph: &Graph, layer: usize) -> Option<&Gated> {
    match &graph.layers.get(layer)?.mlp.body {
        FeedForward::Experts(experts) => experts.shared.as_ref().map(|shared| &shared.mlp),
        FeedForward::Gated(_) => None,
    }
}

/// Whether a product that is added to the residual is the MLP's. Where both have the same number of columns, the matrix
/// decides.
fn ends_layer(graph: &Graph, program: &Program, layer: usize, p: &MatvecParams) -> bool {
    if p.prologue == Prologue::Merge as u32 || graph.layers[layer].gated().is_none() {
        return false;
    }
    if graph.ffn != graph.q_width() {
        return p.k_len == graph.ffn;
    }
    graph.layers[layer].gated().is_some_and(|mlp| multiplies(program, p, mlp.down.weight))
}

fn multiplies(program: &Program, p: &MatvecParams, weight: TensorId) -> bool {
    let matrix = program.matrices.get(p.matrix as usize);
    matrix.is_some_and(|matrix| matrix.map.parts.iter().any(|part| part.0 == Some(weight)))
}

/// The role of products that are stored as they are. A wrong matrix is one of the same size: then the sizes decide.
fn stored(graph: &Graph, program: &Program, of: &Layer, p: &MatvecParams, layer: usize) -> Role {
    let is = |weight: TensorId| multiplies(program, p, weight);
    let prologue = Prologue::new(p.prologue).unwrap_or_default();
    if let FeedForward::Experts(experts) = &of.mlp.body
        && is(experts.router.weight)
    {
        Role::Router(layer)
    } else if is(of.attention.body.q.weight)
        || [Prologue::Rms, Prologue::PostNorm].contains(&prologue)
        || p.rows != graph.hidden
    {
        Role::Qkv(layer)
    } else if is(of.attention.body.o.weight) || p.prologue == Prologue::Merge as u32 {
        Role::AttentionSums(layer)
    } else if of.gated().is_some_and(|mlp| is(mlp.down.weight)) || p.k_len == graph.ffn {
        Role::MlpSums(layer)
    } else {
        Role::AttentionSums(layer)
    }
}

/// The partial result of one query over some keys.
fn partial(
    query: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    (scale, cap, sink): (f32, Option<f32>, Option<f32>),
    allowance: Allowance,
    belongs: &mut Belongs,
) {
    let wide = |words: &[f32]| words.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
    let norm = |words: &[f32]| wide(words).iter().map(|v| v * v).sum::<f64>().sqrt();
    let query_wide = wide(query);
    let score = |key: &Vec<f32>| {
        let product: f64 = query_wide.iter().zip(key).map(|(q, &k)| q * f64::from(k)).sum();
        let score = product * f64::from(scale);
        cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
    };
    let sink = sink.map(f64::from);
    let scores: Vec<f64> = keys.iter().map(score).chain(sink).collect();
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - best).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut mean = vec![0.0; query.len()];
    for (weight, value) in weights.iter().zip(values) {
        mean.iter_mut().zip(value).for_each(|(sum, &v)| *sum += weight / total * f64::from(v));
    }
    // A score may have this error, which gives weights a relative error of the same size.
    let longest_key = keys.iter().map(|key| norm(key)).fold(0.0, f64::max);
    let off = allowance.score * f64::from(scale.abs()) * norm(query) * longest_key;
    let share = 2.0 * off + allowance.sum;
    let largest = f64::from(values.iter().map(|value| greatest(value)).fold(0.0, f32::max));
    let as_scale = |bound: f64| (bound / allowance.sum) as f32;
    belongs.values.extend([best as f32, total as f32, 0.0, 0.0]);
    belongs.scales.extend([as_scale(off), as_scale(share * total), 0.0, 0.0]);
    belongs.values.extend(mean.iter().map(|&value| value as f32));
    belongs.scales.extend(mean.iter().map(|_| as_scale(share * largest)));
}

/// The best of the logits that a task has stored, and its row.
fn candidate(logits: &Stored) -> Option<Belongs> {
    let best = argmax(&logits.values);
    let row = f32::from_bits(logits.start + best);
    let values = vec![*logits.values.get(best as usize)?, row];
    Some(Belongs { scales: vec![0.0; values.len()], values })
}

/// The distance of two f32 in units in the last place; `None` if either is NaN.
#[must_use]
pub fn ulps(a: f32, b: f32) -> Option<u64> {
    let place = |value: f32| {
        let bits = i64::from(value.to_bits());
        let magnitude = bits & 0x7fff_ffff;
        if value.is_sign_negative() { -magnitude } else { magnitude }
    };
    (!a.is_nan() && !b.is_nan()).then(|| place(a).abs_diff(place(b)))
}
