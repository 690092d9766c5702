//! The packed matrices of a model and their tensors. They depend on the graph alone, never on a schedule.

use crate::block::{Attention, Experts, FeedForward, Gated, Layer};
use crate::format::Format;
use crate::graph::{Graph, Linear};
use crate::id::{MatrixId, TensorId};
use crate::program::{Matrix, RowMap};

/// Every matrix of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedModel {
    /// Matrices in program order: `embed`, per layer `qkv`, `o`, perhaps `router`, `shared_up` and `shared_down`, then `gate_up` and
    /// `down`; last `lm_head` when untied.
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
    /// The MLP, or the experts.
    pub mlp: PackedMlp,
    /// What chooses among the experts, if there are any.
    pub router: Option<PackedRouter>,
}

/// The matrices of experts besides those of [`PackedMlp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRouter {
    /// The logits of the experts, and behind them that of the shared expert's gate.
    pub router: PackedMatrix,
    /// The expert that every position has.
    pub shared: Option<PackedMlp>,
}

/// The matrices of an attention block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedAttention {
    /// Queries, keys and values, concatenated.
    pub qkv: PackedMatrix,
    /// The output projection.
    pub o: PackedMatrix,
}

/// The matrices of an MLP block. Those of experts lie one after the other in each.
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
    /// The scales in row order if the format has them, then the biases if there are any. Experts share the scales of their
    /// rows, since a row of several is summed before it is scaled; each has its own biases.
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
        let (hidden, q, kv) = (graph.hidden, graph.q_width(), graph.kv_width());
        let name = |part: &str| format!("layers.{n}.{part}");
        let Attention { q: query, k, v, o, .. } = layer.attention.body;
        let qkv = [(query, q), (k, kv), (v, kv)];
        let attention = PackedAttention {
            qkv: self.add(name("qkv"), &qkv, false, hidden),
            o: self.add(name("o"), &[(o, hidden)], false, q),
        };
        let names = [name("gate_up"), name("down")];
        match &layer.mlp.body {
            FeedForward::Gated(gated) => {
                PackedLayer { attention, mlp: self.mlp(names, gated, graph.ffn), router: None }
            }
            FeedForward::Experts(experts) => {
                let router = self.router(n, experts);
                PackedLayer { attention, mlp: self.experts(names, experts), router: Some(router) }
            }
        }
    }

    fn mlp(&mut self, names: [String; 2], mlp: &Gated, ffn: u32) -> PackedMlp {
        let ([gate_up, down], hidden) = (names, self.graph.hidden);
        PackedMlp {
            gate_up: self.add(gate_up, &[(mlp.gate, ffn), (mlp.up, ffn)], true, hidden),
            down: self.add(down, &[(mlp.down, hidden)], false, ffn),
        }
    }

    fn router(&mut self, n: usize, experts: &Experts) -> PackedRouter {
        let (hidden, count) = (self.graph.hidden, experts.experts.len() as u32);
        let gate = experts.shared.as_ref().map(|shared| (shared.gate, 1));
        let logits: Vec<_> = [(experts.router, count)].into_iter().chain(gate).collect();
        let name = |part: &str| format!("layers.{n}.{part}");
        let router = self.add(name("router"), &logits, false, hidden);
        let names = [name("shared_up"), name("shared_down")];
        let shared = experts.shared.as_ref();
        PackedRouter {
            router,
            shared: shared.map(|shared| self.mlp(names, &shared.mlp, shared.ffn)),
        }
    }

    /// The experts one after the other, each with rows of zeros up to whole units of the hidden layer.
    fn experts(&mut self, [gate_up, down]: [String; 2], experts: &Experts) -> PackedMlp {
        let (hidden, ffn) = (self.graph.hidden, experts.ffn);
        let padding = self.graph.expert_width(experts) - ffn.next_multiple_of(abi::UNIT_ROWS);
        let (mut pairs, mut downs) = (Vec::new(), Vec::new());
        for Gated { gate, up, down } in &experts.experts {
            pairs.extend([(Some(*gate), ffn), (Some(*up), ffn)]);
            if padding > 0 {
                pairs.extend([(None, padding); 2]);
            }
            downs.push((Some(*down), hidden));
        }
        let count = experts.experts.len() as u32;
        PackedMlp {
            gate_up: self.add_experts(gate_up, &pairs, true, hidden, count),
            down: self.add_experts(down, &downs, false, ffn, count),
        }
    }

    fn add(
        &mut self,
        name: String,
        parts: &[(Linear, u32)],
        interleaved: bool,
        cols: u32,
    ) -> PackedMatrix {
        let parts: Vec<_> = parts.iter().map(|&(linear, rows)| (Some(linear), rows)).collect();
        self.add_experts(name, &parts, interleaved, cols, 1)
    }

    /// Adds a matrix; parts without a linear map are zeros.
    fn add_experts(
        &mut self,
        name: String,
        parts: &[(Option<Linear>, u32)],
        interleaved: bool,
        cols: u32,
        experts: u32,
    ) -> PackedMatrix {
        let of = |parts: &[(Option<Linear>, u32)], tensor: fn(&Linear) -> Option<TensorId>| {
            let one =
                |&(linear, rows): &(Option<Linear>, u32)| (linear.as_ref().and_then(tensor), rows);
            parts.iter().map(one).collect::<Vec<_>>()
        };
        let first = parts.iter().find_map(|(linear, _)| *linear);
        let stored = first.map_or(self.graph.dtype, |first| self.graph.tensor(first.weight).dtype);
        let format = Format::of(stored, self.graph.dtype);
        let id = MatrixId(self.matrices.len() as u32);
        let map = RowMap { parts: of(parts, |linear| Some(linear.weight)), interleaved };
        self.matrices.push(Matrix { name, map, cols, format, experts });
        let mut constants = Vec::new();
        if format.is_scaled() {
            let first = &parts[..parts.len() / experts.max(1) as usize];
            constants.extend(of(first, |linear| linear.scale));
        }
        if parts.iter().any(|(linear, _)| linear.is_some_and(|linear| linear.bias.is_some())) {
            constants.extend(of(parts, |linear| linear.bias));
        }
        let constants = (!constants.is_empty()).then_some(RowMap { parts: constants, interleaved });
        PackedMatrix { id, constants }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_lie_one_after_the_other_each_filled_up_with_zeros() {
        let tensor = |id| Some(TensorId(id));
        let mut parts = Vec::new();
        for expert in 0..2 {
            parts.extend([(tensor(2 * expert), 12), (tensor(2 * expert + 1), 12)]);
            parts.extend([(None, 16); 2]);
        }
        let map = RowMap { parts, interleaved: true };
        assert_eq!(map.rows(), 2 * 2 * (16 + 16));
        let at = |row| map.locate(row).map(|(tensor, row)| (tensor.0, row));
        // A tile of gate, one of up, the second of gate with four rows, the second of up.
        assert_eq!([at(0), at(7), at(8), at(16)], [(0, 0), (0, 7), (1, 0), (0, 8)].map(Some));
        assert_eq!([at(19), at(20), at(27), at(28)], [Some((0, 11)), None, Some((1, 11)), None]);
        assert_eq!([at(32), at(63)], [None, None], "zeros behind the first expert");
        assert_eq!([at(64), at(72), at(91)], [(2, 0), (3, 0), (3, 11)].map(Some));
        assert_eq!([at(92), at(127), at(128)], [None, None, None]);
    }
}
