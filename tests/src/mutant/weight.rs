//! Mutants of the model as the machine under test sees it: stored tensors, and the numbers of the graph.

use std::collections::BTreeMap;

use abi::{Activation, Epilogue, MatvecParams, Opcode, Prologue};
use half::{bf16, f16};
use ir::program::{Program, Task};
use ir::{Attention, DType, FeedForward, Gated, Graph, Linear, Scalar, TensorId, Weights};
use model::{Rope, Scaling};

use super::blame::reads;
use super::{Base, Mistake, Mutant};
use crate::rng::Rng;

/// Weights with some tensors replaced.
pub(super) struct Patched<'b> {
    base: &'b dyn Weights,
    tensors: BTreeMap<TensorId, Vec<u8>>,
}

impl Weights for Patched<'_> {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        self.tensors.get(&tensor).map_or_else(|| self.base.bytes(tensor), Vec::as_slice)
    }
}

impl Patched<'_> {
    /// Whether a task uses a changed part.
    pub(super) fn touch(&self, base: &Base, program: &Program, task: &Task, graph: &Graph) -> bool {
        let right = base.graph();
        let layer = usize::from(task.layer);
        let merges = task.opcode == Opcode::AttentionMerge
            || task.opcode == Opcode::Matvec
                && task.params::<MatvecParams>().prologue == Prologue::Merge as u32;
        let attends = task.opcode == Opcode::Attention;
        let prologues = [Prologue::Rms, Prologue::PostNorm].map(|prologue| prologue as u32);
        let norms = task.opcode == Opcode::Matvec
            && prologues.contains(&task.params::<MatvecParams>().prologue)
            || attends && task.reads[1].is_some()
            || task.opcode == Opcode::Norm;
        let epilogue = |which: Epilogue| {
            task.opcode == Opcode::Matvec && task.params::<MatvecParams>().epilogue == which as u32
        };
        let window =
            |graph: &Graph| graph.layers.get(layer).and_then(|layer| layer.attention.body.window);
        reads(program, task, &|tensor| self.tensors.contains_key(&tensor))
            || attends && scoring(graph) != scoring(right)
            || task.opcode == Opcode::Embed && graph.embed_scale != right.embed_scale
            || epilogue(Epilogue::SiluMul) && graph.activation != right.activation
            || epilogue(Epilogue::Logits) && graph.logit_cap != right.logit_cap
            || norms && graph.norm_eps != right.norm_eps
            || (attends || merges) && window(graph) != window(right)
    }
}

/// What scores are computed from beside the tensors.
fn scoring(graph: &Graph) -> impl PartialEq {
    let tables: Vec<_> = graph.layers.iter().map(|layer| graph.rotary_of(layer).to_vec()).collect();
    (graph.attn_scale, graph.score_cap, tables)
}

/// A collection of mutants of a model.
struct Mutants<'b> {
    base: &'b Base,
    rng: Rng,
    list: Vec<Mutant<'b>>,
}

/// Every class of mutants of the model, with places drawn from the seed.
#[must_use]
pub fn weights(base: &Base, seed: u64) -> Vec<Mutant<'_>> {
    let mut mutants = Mutants { base, rng: Rng::new(seed), list: Vec::new() };
    let graph = base.graph();
    let head = if graph.tied() { "embedding and lm_head" } else { "embedding" };
    mutants.tensor(head, graph.embed);
    if !graph.tied() {
        mutants.tensor("lm_head", graph.lm_head);
    }
    mutants.tensor("final norm", graph.final_norm);
    for layer in &graph.layers {
        let attention = &layer.attention.body;
        let mut linears = vec![
            ("q_proj", attention.q),
            ("k_proj", attention.k),
            ("v_proj", attention.v),
            ("o_proj", attention.o),
        ];
        linears.extend(mlp_linears(&layer.mlp.body));
        attention.sinks.iter().for_each(|&sinks| mutants.tensor("sinks", sinks));
        for (class, linear) in linears {
            mutants.tensor(class, linear.weight);
            if let Some(bias) = linear.bias {
                mutants.tensor("bias", bias);
            }
        }
        let norms = [
            ("input norm", layer.attention.norm),
            ("post-attention norm", layer.mlp.norm),
            ("norm of a block's result", layer.attention.post_norm),
            ("norm of a block's result", layer.mlp.post_norm),
        ];
        for (class, norm) in norms {
            norm.iter().for_each(|&norm| mutants.tensor(class, norm));
        }
        for norm in [attention.q_norm, attention.k_norm].into_iter().flatten() {
            mutants.tensor("q and k norms", norm);
        }
    }
    mutants.swapped_tensors();
    mutants.heads();
    mutants.numbers();
    mutants.rotations();
    mutants.windows();
    mutants.list
}

/// The linear maps of a layer's second block with the classes of their mutants. Of experts those of the first two.
fn mlp_linears(mlp: &FeedForward) -> Vec<(&'static str, Linear)> {
    let of = |[gate, up, down]: [&'static str; 3], mlp: &Gated| {
        [(gate, mlp.gate), (up, mlp.up), (down, mlp.down)]
    };
    let experts = match mlp {
        FeedForward::Gated(gated) => {
            return of(["gate_proj", "up_proj", "down_proj"], gated).to_vec();
        }
        FeedForward::Experts(experts) => experts,
    };
    let mut linears = vec![("router", experts.router)];
    for expert in experts.experts.iter().take(2) {
        linears.extend(of(["expert gate", "expert up", "expert down"], expert));
    }
    if let Some(shared) = &experts.shared {
        linears.extend(of(["shared gate", "shared up", "shared down"], &shared.mlp));
    }
    linears
}

impl<'b> Mutants<'b> {
    fn push(
        &mut self,
        class: &str,
        what: String,
        graph: Graph,
        tensors: BTreeMap<TensorId, Vec<u8>>,
    ) {
        let patched = Patched { base: self.base.weights(), tensors };
        let schedule = self.list.len() % self.base.schedules();
        let mistake = Mistake::Model(Box::new((graph, patched)));
        self.list.push(Mutant { class: class.to_owned(), what, schedule, mistake });
    }

    /// Replaces a tensor's values, unless the stored values are the same.
    fn values(&mut self, class: &str, id: TensorId, what: &str, values: &[f32]) {
        let graph = self.base.graph();
        let tensor = graph.tensor(id);
        let bytes = encode(tensor.dtype, values);
        if bytes != self.base.weights().bytes(id) {
            let what = format!("{}: {what}", tensor.name);
            self.push(class, what, graph.clone(), BTreeMap::from([(id, bytes)]));
        }
    }

    fn tensor(&mut self, class: &str, id: TensorId) {
        match self.base.graph().tensor(id).shape[..] {
            [rows, cols] => self.matrix(class, id, rows as usize, cols as usize),
            _ => self.vector(class, id),
        }
    }

    fn stored(&self, id: TensorId) -> Vec<f32> {
        decode(self.base.graph(), self.base.weights(), id)
    }

    /// Changes of a matrix, from one element to all.
    fn matrix(&mut self, class: &str, id: TensorId, rows: usize, cols: usize) {
        let stored = self.stored(id);
        let is_embed = id == self.base.graph().embed && !self.base.graph().tied();
        // Rows of the embedding that are never fed change nothing.
        let fed: Vec<u32> = self.base.expected().reference_tokens().collect();
        let row =
            if is_embed { fed[self.rng.below(fed.len())] as usize } else { self.rng.below(rows) };
        let (col, other) = (self.rng.below(cols), (row + 1 + self.rng.below(rows - 1)) % rows);
        let element = row * cols + col;
        let tile = row / 8 * 8;
        let mut edit = |what: &str, change: &dyn Fn(&mut [f32])| {
            let mut values = stored.clone();
            change(&mut values);
            self.values(class, id, what, &values);
        };
        edit(&format!("element {row}, {col} doubled"), &|v| v[element] *= 2.0);
        edit(&format!("element {row}, {col} negated"), &|v| v[element] = -v[element]);
        edit(&format!("element {row}, {col} up by a sixteenth"), &|v| v[element] *= 1.0625);
        edit(&format!("row {row} zero"), &|v| v[row * cols..][..cols].fill(0.0));
        edit(&format!("row {row} up by 1/64"), &|v| scale(&mut v[row * cols..][..cols], 1.015_625));
        edit(&format!("row {row} one element on"), &|v| v[row * cols..][..cols].rotate_right(1));
        edit(&format!("rows {row} and {other} swapped"), &|v| {
            for c in 0..cols {
                v.swap(row * cols + c, other * cols + c);
            }
        });
        edit(&format!("column {col} zero"), &|v| {
            v.iter_mut().skip(col).step_by(cols).for_each(|x| *x = 0.0);
        });
        edit(&format!("columns {col} and the next swapped"), &|v| {
            for r in 0..rows {
                v.swap(r * cols + col, r * cols + (col + 1) % cols);
            }
        });
        let end = (tile + 8).min(rows);
        edit(&format!("tile from row {tile} zero"), &|v| v[tile * cols..end * cols].fill(0.0));
        edit(&format!("tile from row {tile} one row on"), &|v| {
            v[tile * cols..end * cols].rotate_right(cols);
        });
        edit("all up by 1/128", &|v| scale(v, 1.007_812_5));
        edit("all one row on", &|v| v.rotate_right(cols));
        edit("all zero", &|v| v.fill(0.0));
    }

    fn vector(&mut self, class: &str, id: TensorId) {
        let stored = self.stored(id);
        let at = self.rng.below(stored.len());
        let mut edit = |what: &str, change: &dyn Fn(&mut [f32])| {
            let mut values = stored.clone();
            change(&mut values);
            self.values(class, id, what, &values);
        };
        edit(&format!("element {at} zero"), &|v| v[at] = 0.0);
        edit(&format!("element {at} up by a sixteenth"), &|v| v[at] *= 1.0625);
        edit(&format!("element {at} swapped with the next"), &|v| v.swap(at, (at + 1) % v.len()));
        edit("all up by 1/128", &|v| scale(v, 1.007_812_5));
        edit("all one element on", &|v| v.rotate_right(1));
        edit("all one", &|v| v.fill(1.0));
        edit("all zero", &|v| v.fill(0.0));
    }

    /// Swaps tensors of one shape: within a layer, and between the first two.
    fn swapped_tensors(&mut self) {
        let graph = self.base.graph();
        let mut pairs = Vec::new();
        for layer in &graph.layers {
            let (attention, Some(gated)) = (&layer.attention.body, layer.gated()) else { continue };
            pairs.extend([
                ("gate_proj", gated.gate.weight, gated.up.weight),
                ("k_proj", attention.k.weight, attention.v.weight),
            ]);
            if let (Some(attn), Some(mlp)) = (layer.attention.norm, layer.mlp.norm) {
                pairs.push(("input norm", attn, mlp));
                pairs.push(("final norm", graph.final_norm, attn));
            }
            if let (Some(attn), Some(mlp)) = (layer.attention.post_norm, layer.mlp.post_norm) {
                pairs.push(("norm of a block's result", attn, mlp));
            }
            if let (Some(q), Some(k)) = (attention.q_norm, attention.k_norm)
                && graph.tensor(q).len() == graph.tensor(k).len()
            {
                pairs.push(("q and k norms", q, k));
            }
            if let (Some(k), Some(v)) = (attention.k.bias, attention.v.bias) {
                pairs.push(("bias", k, v));
            }
        }
        if let [first, second, ..] = &graph.layers[..]
            && let (Some(c), Some(d)) = (first.gated(), second.gated())
        {
            let (a, b) = (&first.attention.body, &second.attention.body);
            pairs.extend([
                ("q_proj", a.q.weight, b.q.weight),
                ("k_proj", a.k.weight, b.k.weight),
                ("v_proj", a.v.weight, b.v.weight),
                ("o_proj", a.o.weight, b.o.weight),
                ("up_proj", c.up.weight, d.up.weight),
                ("down_proj", c.down.weight, d.down.weight),
            ]);
            if let (Some(first), Some(second)) = (first.mlp.norm, second.mlp.norm) {
                pairs.push(("post-attention norm", first, second));
            }
        }
        for (class, a, b) in pairs {
            let names = [a, b].map(|id| graph.tensor(id).name.clone()).join(" and ");
            let bytes = |id| self.base.weights().bytes(id).to_vec();
            let tensors = BTreeMap::from([(a, bytes(b)), (b, bytes(a))]);
            self.push(class, format!("{names} swapped"), graph.clone(), tensors);
        }
    }

    /// Changes the mapping of query heads to key/value heads.
    fn heads(&mut self) {
        let graph = self.base.graph();
        let (heads, kv_heads) = (graph.heads as usize, graph.kv_heads as usize);
        let dim = graph.head_dim as usize;
        let group = heads / kv_heads;
        // Head `h` is served as if it belonged to `h % kv_heads`.
        let interleaved: Vec<usize> =
            (0..heads).map(|h| h % group * kv_heads + h / group).collect();
        let turned: Vec<usize> = (0..heads).map(|h| (h + group) % heads).collect();
        let one_on: Vec<usize> = (0..heads).map(|h| (h + 1) % heads).collect();
        let orders =
            [("interleaved", interleaved), ("one group on", turned), ("one head on", one_on)];
        for Attention { q, o, .. } in graph.layers.iter().map(|layer| &layer.attention.body) {
            for (name, order) in &orders {
                let cols = graph.hidden as usize;
                let mut tensors = BTreeMap::new();
                let mut permute = |id: TensorId, len: usize| {
                    let values = self.stored(id);
                    let moved: Vec<f32> = order
                        .iter()
                        .flat_map(|&h| values[h * dim * len..][..dim * len].to_vec())
                        .collect();
                    tensors.insert(id, encode(graph.tensor(id).dtype, &moved));
                };
                permute(q.weight, cols);
                if let Some(bias) = q.bias {
                    permute(bias, 1);
                }
                let columns = self.stored(o.weight);
                let moved: Vec<f32> = columns
                    .chunks_exact(heads * dim)
                    .flat_map(|row| order.iter().flat_map(|&h| row[h * dim..][..dim].to_vec()))
                    .collect();
                tensors.insert(o.weight, encode(graph.dtype, &moved));
                if tensors.iter().any(|(&id, bytes)| bytes != self.base.weights().bytes(id)) {
                    let what = format!("{}: heads {name}", graph.tensor(q.weight).name);
                    self.push("head mapping", what, graph.clone(), tensors);
                }
            }
        }
    }

    fn graph(&mut self, class: &str, what: &str, change: impl Fn(&mut Graph)) {
        let mut graph = self.base.graph().clone();
        change(&mut graph);
        if graph != *self.base.graph() {
            self.push(class, what.to_owned(), graph, BTreeMap::new());
        }
    }

    fn numbers(&mut self) {
        for factor in [0.5, 0.99, 1.001, 1.01, 2.0] {
            let what = format!("times {factor}");
            self.graph("attention scale", &what, |g| g.attn_scale *= factor);
        }
        self.graph("attention scale", "one", |g| g.attn_scale = 1.0);
        self.graph("attention scale", "of the width", |g| {
            g.attn_scale = (g.hidden as f32).powf(-0.5)
        });
        for factor in [0.99, 1.01, 2.0] {
            let what = format!("times {factor}");
            self.graph("embedding scale", &what, |g| g.embed_scale *= factor);
            self.graph("score cap", &what, |g| g.score_cap = g.score_cap.map(|cap| cap * factor));
            self.graph("logit cap", &what, |g| g.logit_cap = g.logit_cap.map(|cap| cap * factor));
        }
        self.graph("score cap", "none", |g| g.score_cap = None);
        self.graph("logit cap", "none", |g| g.logit_cap = None);
        self.graph("embedding scale", "none", |g| g.embed_scale = 1.0);
        if self.base.graph().activation != Activation::Silu {
            self.graph("activation", "silu", |g| g.activation = Activation::Silu);
        }
        for factor in [0.0, 0.1, 10.0, 100.0, 1000.0] {
            self.graph("norm eps", &format!("times {factor}"), |g| g.norm_eps *= factor);
        }
    }

    fn rotations(&mut self) {
        let Rope { theta, scaling } = self.base.model().shape.rope;
        let class = "RoPE";
        for factor in [0.5, 1.001, 1.01, 2.0, 50.0] {
            let rope = Rope { theta: theta * factor, scaling };
            self.graph(class, &format!("theta times {factor}"), |g| {
                g.inv_freq = rope.inv_freq(g.head_dim);
            });
        }
        let scalings = [
            ("no scaling", Scaling::Default),
            ("linear scaling by 4", Scaling::Linear { factor: 4.0 }),
            ("scaling by 1.01", Scaling::Linear { factor: 1.01 }),
            (
                "scaling of a longer original",
                Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 1024 },
            ),
            (
                "scaling by a larger factor",
                Scaling::Llama3 { factor: 9.0, low: 1.0, high: 4.0, original: 512 },
            ),
        ];
        for (what, scaling) in scalings {
            self.graph(class, what, |g| g.inv_freq = Rope { theta, scaling }.inv_freq(g.head_dim));
        }
        for table in 0..self.base.graph().rotary.len() {
            for i in [0, 1] {
                self.graph(
                    "other rotary tables",
                    &format!("table {table}, number {i} up by 1 %"),
                    |g| {
                        g.rotary[table][i] = g.rotary[table][i] * 1.01 + 0.001;
                    },
                );
            }
        }
        for layer in 0..self.base.graph().layers.len() {
            for table in 0..=self.base.graph().rotary.len() as u32 {
                self.graph(
                    "other rotary tables",
                    &format!("layer {layer} by table {table}"),
                    |g| {
                        g.layers[layer].attention.body.rotary = table;
                    },
                );
            }
        }
        let last = self.base.graph().inv_freq.len() - 1;
        for i in [0, last / 2, last] {
            self.graph(class, &format!("frequency {i} up by 1 %"), |g| g.inv_freq[i] *= 1.01);
            self.graph(class, &format!("frequency {i} zero"), |g| g.inv_freq[i] = 0.0);
        }
        self.graph(class, "frequencies reversed", |g| g.inv_freq.reverse());
        self.graph(class, "frequencies one on", |g| g.inv_freq.rotate_right(1));
        self.graph(class, "frequencies rounded to bf16", |g| {
            g.inv_freq.iter_mut().for_each(|f| *f = bf16::from_f32(*f).to_f32());
        });
    }

    fn windows(&mut self) {
        for layer in 0..self.base.graph().layers.len() {
            for window in [None, Some(1), Some(39), Some(41), Some(20), Some(144), Some(1000)] {
                let what = format!("layer {layer}: {window:?}");
                self.graph("sliding window", &what, |g| {
                    g.layers[layer].attention.body.window = window
                });
            }
        }
    }
}

fn scale(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
}

fn decode(graph: &Graph, weights: &dyn Weights, id: TensorId) -> Vec<f32> {
    let tensor = graph.tensor(id);
    let mut values = vec![0.0; tensor.len()];
    ir::decode(tensor.dtype, weights.bytes(id), &mut values);
    values
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype.scalar() {
        Scalar::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Scalar::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Scalar::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        Scalar::E4m3 | Scalar::Int8 | Scalar::Int4 | Scalar::E2m1 => {
            unreachable!("mutants are of models without codes")
        }
    }
}
