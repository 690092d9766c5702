//! Packed matrices of a graph. They depend on the graph alone, never on a schedule.

use abi::UNIT_ROWS;
use ir::program::{Matrix, RowMap};
use ir::{Graph, Layer, MatrixId};

/// The packed matrices, in the order of the contract, and where to find them.
pub(crate) struct Matrices {
    /// `embed`, then per layer `qkv`, `o`, `gate_up`, `down`, then `lm_head` when untied.
    pub(crate) list: Vec<Matrix>,
    tied: bool,
}

/// Matrices of one layer.
const PER_LAYER: usize = 4;

impl Matrices {
    pub(crate) fn new(graph: &Graph) -> Self {
        let matrix = |name: String, map, cols| Matrix { name, map, cols, dtype: graph.dtype };
        let vocab = |tensor| RowMap::single(tensor, graph.vocab);
        let mut list = vec![matrix("embed".into(), vocab(graph.embed), graph.hidden)];
        for (n, layer) in graph.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{n}.{part}");
            list.push(matrix(name("qkv"), qkv_map(graph, layer), graph.hidden));
            list.push(matrix(
                name("o"),
                RowMap::single(layer.o.weight, graph.hidden),
                graph.q_width(),
            ));
            list.push(matrix(name("gate_up"), gate_up_map(graph, layer), graph.hidden));
            list.push(matrix(
                name("down"),
                RowMap::single(layer.down.weight, graph.hidden),
                graph.ffn,
            ));
        }
        if !graph.tied() {
            list.push(matrix("lm_head".into(), vocab(graph.lm_head), graph.hidden));
        }
        Self { list, tied: graph.tied() }
    }

    pub(crate) fn embed(&self) -> MatrixId {
        MatrixId(0)
    }

    pub(crate) fn lm_head(&self) -> MatrixId {
        if self.tied { self.embed() } else { MatrixId(self.list.len() as u32 - 1) }
    }

    /// Part 0 to 3 of a layer: qkv, o, gate_up, down.
    fn part(&self, layer: u32, part: usize) -> MatrixId {
        MatrixId((1 + layer as usize * PER_LAYER + part) as u32)
    }

    pub(crate) fn qkv(&self, layer: u32) -> MatrixId {
        self.part(layer, 0)
    }

    pub(crate) fn o_proj(&self, layer: u32) -> MatrixId {
        self.part(layer, 1)
    }

    pub(crate) fn gate_up(&self, layer: u32) -> MatrixId {
        self.part(layer, 2)
    }

    pub(crate) fn down(&self, layer: u32) -> MatrixId {
        self.part(layer, 3)
    }

    pub(crate) fn get(&self, id: MatrixId) -> &Matrix {
        &self.list[id.index()]
    }
}

fn qkv_map(graph: &Graph, layer: &Layer) -> RowMap {
    let kv = graph.kv_width();
    let parts = [(layer.q, graph.q_width()), (layer.k, kv), (layer.v, kv)]
        .map(|(l, n)| (Some(l.weight), n));
    RowMap { parts: parts.to_vec(), interleaved: false }
}

fn gate_up_map(graph: &Graph, layer: &Layer) -> RowMap {
    let parts = [layer.gate, layer.up].map(|linear| (Some(linear.weight), graph.ffn));
    RowMap { parts: parts.to_vec(), interleaved: true }
}

/// The biases of q, k and v in the order of the rows, if there is any.
pub(crate) fn qkv_bias(graph: &Graph, layer: &Layer) -> Option<RowMap> {
    let kv = graph.kv_width();
    let parts = [(layer.q.bias, graph.q_width()), (layer.k.bias, kv), (layer.v.bias, kv)];
    bias(RowMap { parts: parts.to_vec(), interleaved: false })
}

/// The biases of gate and up, alternating as the rows do, if there is any.
pub(crate) fn gate_up_bias(graph: &Graph, layer: &Layer) -> Option<RowMap> {
    let parts = [layer.gate.bias, layer.up.bias].map(|tensor| (tensor, graph.ffn));
    bias(RowMap { parts: parts.to_vec(), interleaved: true })
}

fn bias(map: RowMap) -> Option<RowMap> {
    map.parts.iter().any(|(tensor, _)| tensor.is_some()).then_some(map)
}

/// Rows of the widest packed matrix: the sum of padded parts must fit into a row number.
pub(crate) fn rows_max(graph: &Graph) -> u64 {
    let granule = u64::from(UNIT_ROWS);
    let qkv = u64::from(graph.heads) + 2 * u64::from(graph.kv_heads);
    let gate_up = 2 * u64::from(graph.ffn).next_multiple_of(granule);
    (qkv * u64::from(graph.head_dim)).max(gate_up).max(u64::from(graph.vocab))
}
