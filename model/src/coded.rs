//! Shapes whose matrices are codes, as published models of them are stored.

use ir::{Attention, DType, FeedForward, Gated, Graph, Linear, Tensor, TensorId};

/// The matrices of a model with experts that are codes; the others are of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Of the experts.
    pub experts: DType,
    /// Of attention, if its matrices are codes too.
    pub attention: Option<DType>,
}

impl Coded {
    /// Makes the graph one of these codes, as an imported one is (`quantised/stored.rs`): scales behind all other tensors,
    /// one for each part of a layer's experts, and products in f16.
    pub(crate) fn apply(self, graph: &mut Graph) {
        let mut layers = std::mem::take(&mut graph.layers);
        for layer in &mut layers {
            let Attention { q, k, v, o, .. } = &mut layer.attention.body;
            if let Some(dtype) = self.attention {
                [q, k, v, o].into_iter().for_each(|linear| code(graph, dtype, vec![linear]));
            }
            if let FeedForward::Experts(experts) = &mut layer.mlp.body {
                let (mut gates, mut ups, mut downs) = (Vec::new(), Vec::new(), Vec::new());
                for Gated { gate, up, down } in &mut experts.experts {
                    gates.push(gate);
                    ups.push(up);
                    downs.push(down);
                }
                [gates, ups, downs].into_iter().for_each(|part| code(graph, self.experts, part));
            }
        }
        graph.layers = layers;
        graph.dtype = DType::F16;
    }
}

/// Makes matrices of one size codes whose rows have the same scales.
fn code(graph: &mut Graph, dtype: DType, linears: Vec<&mut Linear>) {
    let Some(first) = linears.first() else { return };
    let first = graph.tensor(first.weight);
    let (name, shape) = (format!("{}_scale", first.name), first.shape[..1].to_vec());
    let scale = TensorId(graph.tensors.len() as u32);
    for linear in linears {
        graph.tensors[linear.weight.index()].dtype = dtype;
        linear.scale = Some(scale);
    }
    graph.tensors.push(Tensor { name, dtype: DType::F32, shape });
}
