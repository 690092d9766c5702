//! The graph's ops one at a time, for one position, on given inputs: the expected contents of a buffer, computed from
//! the actual contents of the buffers before it.

use super::{Cache, Evaluator, activate, attend, norm_rows, rotations};

/// Expected values, and the magnitudes that rounding errors scale with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Belongs {
    pub(crate) values: Vec<f32>,
    /// For each element: the magnitude of the summed terms.
    pub(crate) scales: Vec<f32>,
}

impl Belongs {
    /// Sums of one matrix, which share one error scale.
    pub(super) fn sums(values: Vec<f32>) -> Self {
        let scales = vec![greatest(&values); values.len()];
        Self { values, scales }
    }

    /// Copied values have no summation error.
    fn copied(values: Vec<f32>) -> Self {
        Self { scales: vec![0.0; values.len()], values }
    }

    fn and(mut self, other: Self) -> Self {
        self.values.extend(other.values);
        self.scales.extend(other.scales);
        self
    }
}

pub(crate) fn greatest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |greatest, value| value.abs().max(greatest))
}

impl Evaluator<'_> {
    pub(crate) fn embedded(&self, token: u32) -> Belongs {
        let mut x = vec![0.0; self.graph.hidden as usize];
        self.embed.decode_row(token as usize, 0, &mut x);
        x.iter_mut().for_each(|x| *x *= self.graph.embed_scale);
        Belongs::copied(x)
    }

    /// Queries, keys and values before the norms of heads and rotation.
    pub(crate) fn qkv(&self, layer: usize, x: &[f32]) -> Belongs {
        let block = &self.layers[layer].attention;
        let [q, k, v] =
            block.body.qkv(&block.normed(self.graph, self.rounding, x)).map(Belongs::sums);
        q.and(k).and(v)
    }

    /// The same after norms and rotation: queries, keys and values of this position.
    pub(crate) fn heads(&self, layer: usize, qkv: &[f32], position: u32) -> [Vec<f32>; 3] {
        let (graph, bound) = (self.graph, &self.layers[layer].attention.body);
        let (q, rest) = qkv.split_at(graph.q_width() as usize);
        let (k, v) = rest.split_at(graph.kv_width() as usize);
        let [mut q, mut k, mut v] = [q, k, v].map(<[f32]>::to_vec);
        let table = graph.rotary_of(&graph.layers[layer]);
        let angles = [rotations(position, table, graph.head_dim)];
        bound.shape_heads(graph, &mut q, &mut k, &angles);
        self.rounding.cache(self.graph, &mut k);
        self.rounding.cache(self.graph, &mut v);
        [q, k, v]
    }

    /// Attention over all keys and values up to this position, which are `[positions, kv_width]`.
    pub(crate) fn mixed(&self, layer: usize, q: &[f32], keys: &[f32], values: &[f32]) -> Belongs {
        let (graph, width) = (self.graph, self.graph.kv_width() as usize);
        let mut cache = Cache::default();
        cache.extend(keys, values, width);
        let mixed = attend(graph, &cache, q, self.layers[layer].attention.body.sees());
        Belongs { scales: vec![greatest(values); mixed.len()], values: mixed }
    }

    /// Queries and keys normed over all heads, and the values.
    pub(crate) fn normed_qkv(&self, layer: usize, qkv: &[f32]) -> Belongs {
        let graph = self.graph;
        let (q, rest) = qkv.split_at(graph.q_width() as usize);
        let (k, v) = rest.split_at(graph.kv_width() as usize);
        let (q, k) = self.layers[layer].attention.body.norm_heads(graph, q, k);
        Belongs::sums(q).and(Belongs::sums(k)).and(Belongs::copied(v.to_vec()))
    }

    /// What attention adds to the residual stream, before its norm.
    pub(crate) fn attention_sums(&self, layer: usize, mixed: Vec<f32>) -> Belongs {
        Belongs::sums(self.layers[layer].attention.body.project(self.rounding, mixed))
    }

    /// What the MLP adds to the residual stream, before its norm.
    pub(crate) fn mlp_sums(&self, layer: usize, hidden: Vec<f32>) -> Belongs {
        Belongs::sums(self.contracted(layer, hidden))
    }

    /// The residual stream after a block whose result `sums` is normed: `mlp` tells which of a layer's two.
    pub(crate) fn after_norm(&self, layer: usize, mlp: bool, x: &[f32], sums: &[f32]) -> Belongs {
        let bound = &self.layers[layer];
        let norm = if mlp { &bound.mlp.post_norm } else { &bound.attention.post_norm };
        added(x, norm_rows(sums, norm.as_deref(), self.graph.norm_eps, sums.len()))
    }

    pub(crate) fn after_attention(&self, layer: usize, x: &[f32], mixed: Vec<f32>) -> Belongs {
        added(x, self.layers[layer].attention.body.project(self.rounding, mixed))
    }

    pub(crate) fn hidden(&self, layer: usize, x: &[f32]) -> Belongs {
        let block = &self.layers[layer].mlp;
        let Some(mlp) = block.body.gated() else { return Belongs::default() };
        let [gate, up] = mlp.gate_up(&block.normed(self.graph, self.rounding, x));
        let scale = greatest(&gate) * greatest(&up);
        let activate = |gate| activate(self.graph.activation, gate);
        let values: Vec<f32> =
            gate.iter().zip(&up).map(|(&gate, up)| activate(gate) * up).collect();
        Belongs { scales: vec![scale; values.len()], values }
    }

    pub(crate) fn after_mlp(&self, layer: usize, x: &[f32], hidden: Vec<f32>) -> Belongs {
        added(x, self.contracted(layer, hidden))
    }

    /// The down projection; a program has no layers with experts.
    fn contracted(&self, layer: usize, hidden: Vec<f32>) -> Vec<f32> {
        let mlp = self.layers[layer].mlp.body.gated();
        mlp.map_or_else(Vec::new, |mlp| mlp.contract(self.rounding, hidden))
    }

    pub(crate) fn logits_of(&self, x: &[f32]) -> Belongs {
        let mut last = norm_rows(x, Some(&self.final_norm), self.graph.norm_eps, x.len());
        self.rounding.factor(&self.lm_head.weight, &mut last);
        Belongs::sums(self.logits(&last))
    }

    /// The window of a layer; zero for none.
    pub(crate) fn window(&self, layer: usize) -> u32 {
        self.layers[layer].attention.body.window.unwrap_or(0)
    }

    /// The sinks of a layer's heads.
    pub(crate) fn sinks(&self, layer: usize) -> Option<&[f32]> {
        self.layers[layer].attention.body.sinks.as_deref()
    }

    /// Keys or values as rounded by this evaluator's executor for its cache.
    pub(crate) fn kept(&self, mut cached: Vec<f32>) -> Vec<f32> {
        self.rounding.cache(self.graph, &mut cached);
        cached
    }
}

pub(super) fn added(x: &[f32], sums: Vec<f32>) -> Belongs {
    let scale = greatest(&sums);
    let values: Vec<f32> = x.iter().zip(sums).map(|(x, sum)| x + sum).collect();
    Belongs { scales: vec![scale; values.len()], values }
}
