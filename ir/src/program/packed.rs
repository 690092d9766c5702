//! The packed matrices of a model and their tensors. They depend on the graph alone, never on a schedule.

use crate::block::{Attention, Gated, Layer};
use crate::format::Format;
use crate::graph::{Graph, Linear};
use crate::id::{MatrixId, TensorId};
use crate::program::{Matrix, RowMap};

/// Every matrix of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedModel {
    /// Matrices in program order: `embed`, per layer `qkv`, `o`, `gate_up`, `down`, then `lm_head` when untied.
    pub matrices: Vec<Matrix>,
    /// The embedding.
    pub embed: PackedMatrix,
    /// The matrices of each layer.
    pub layers: Vec<PackedLayer>,
    /// The logits: the embedding when tied.
    pub lm_head: PackedMatrix,
}

/// The matrices of one layer, by block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayer {
    /// Attention.
    pub attention: PackedAttention,
    /// The MLP; `None` if a router chooses among experts, which have no packed form yet.
    pub mlp: Option<PackedMlp>,
}

/// The matrices of an attention block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedAttention {
    /// Queries, keys and values, concatenated.
    pub qkv: PackedMatrix,
    /// The output projection.
    pub o: PackedMatrix,
}

/// The matrices of an MLP block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedMlp {
    /// Gate and up, tiles of 8 rows alternating.
    pub gate_up: PackedMatrix,
    /// The down projection.
    pub down: PackedMatrix,
}

/// One matrix and the constants of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedMatrix {
    /// Its index in [`PackedModel::matrices`] and in every program of the graph.
    pub id: MatrixId,
    /// The scales in row order if the format has them, then the biases if there are any.
    pub constants: Option<RowMap>,
}

impl PackedModel {
    /// Builds the packed matrices of a graph whose widest matrix has fewer than 2^32 rows.
    #[must_use]
    pub fn new(graph: &Graph) -> Self {
        let mut list = List { graph, matrices: Vec::new() };
        let table = |weight, scale| [(Linear { weight, scale, bias: None }, graph.vocab)];
        let embed = list.add("embed".into(), &table(graph.embed, None), false, graph.hidden);
        let layers = graph.layers.iter().enumerate().map(|(n, layer)| list.layer(n, layer));
        let layers = layers.collect();
        let lm_head = match graph.tied() {
            true => embed.clone(),
            false => {
                let table = table(graph.lm_head, graph.lm_head_scale);
                list.add("lm_head".into(), &table, false, graph.hidden)
            }
        };
        Self { matrices: list.matrices, embed, layers, lm_head }
    }
}

struct List<'a> {
    graph: &'a Graph,
    matrices: Vec<Matrix>,
}

impl List<'_> {
    fn layer(&mut self, n: usize, layer: &Layer) -> PackedLayer {
        let graph = self.graph;
        let (hidden, q, kv, ffn) = (graph.hidden, graph.q_width(), graph.kv_width(), graph.ffn);
        let name = |part: &str| format!("layers.{n}.{part}");
        let Attention { q: query, k, v, o, .. } = layer.attention.body;
        let qkv = [(query, q), (k, kv), (v, kv)];
        PackedLayer {
            attention: PackedAttention {
                qkv: self.add(name("qkv"), &qkv, false, hidden),
                o: self.add(name("o"), &[(o, hidden)], false, q),
            },
            mlp: layer.gated().map(|&Gated { gate, up, down }| PackedMlp {
                gate_up: self.add(name("gate_up"), &[(gate, ffn), (up, ffn)], true, hidden),
                down: self.add(name("down"), &[(down, hidden)], false, ffn),
            }),
        }
    }

    fn add(
        &mut self,
        name: String,
        parts: &[(Linear, u32)],
        interleaved: bool,
        cols: u32,
    ) -> PackedMatrix {
        let of = |tensor: fn(&Linear) -> Option<TensorId>| -> Vec<_> {
            parts.iter().map(|(linear, rows)| (tensor(linear), *rows)).collect()
        };
        let stored = self.graph.tensor(parts[0].0.weight).dtype;
        let format = Format::of(stored, self.graph.dtype);
        let id = MatrixId(self.matrices.len() as u32);
        let map = RowMap { parts: of(|linear| Some(linear.weight)), interleaved };
        self.matrices.push(Matrix { name, map, cols, format });
        let mut constants = Vec::new();
        if format.is_scaled() {
            constants.extend(of(|linear| linear.scale));
        }
        if parts.iter().any(|(linear, _)| linear.bias.is_some()) {
            constants.extend(of(|linear| linear.bias));
        }
        let constants = (!constants.is_empty()).then_some(RowMap { parts: constants, interleaved });
        PackedMatrix { id, constants }
    }
}
