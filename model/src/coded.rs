//! Shapes whose matrices are codes, as published models of them are stored.

use ir::{Attention, DType, FeedForward, Gated, Graph, Linear, Tensor, TensorId};

/// The matrices of the layers that are codes; the others are of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Of attention and of layers without experts, if these matrices are codes.
    pub dense: Option<DType>,
    /// Of experts, whose rows share their factors.
    pub experts: DType,
}

/// The formats that a preset of 16 bits can have too: what its name ends in, and its codes.
pub const CODED: &[(&str, Coded)] = &[
    ("fp8", Coded { dense: Some(DType::E4m3), experts: DType::E4m3G64Row }),
    ("fp8-block", Coded { dense: Some(DType::E4m3G64), experts: DType::E4m3G64 }),
    ("int8", Coded { dense: Some(DType::Int8), experts: DType::Int8G32 }),
    ("int4-g128", Coded { dense: Some(DType::Int4G128), experts: DType::Int4G128 }),
    ("int4-g32", Coded { dense: Some(DType::Int4G32), experts: DType::Int4G32 }),
];

impl Coded {
    /// Makes the graph one of these codes, as an imported one is (`quantised/stored.rs`): scales behind all other tensors,
    /// one for each part of a layer's experts, and products in f16.
    pub(crate) fn apply(self, graph: &mut Graph) {
        let mut layers = std::mem::take(&mut graph.layers);
        for layer in &mut layers {
            let Attention { q, k, v, o, .. } = &mut layer.attention.body;
            let mut dense = vec![q, k, v, o];
            match &mut layer.mlp.body {
                FeedForward::Gated(Gated { gate, up, down }) => dense.extend([gate, up, down]),
                FeedForward::Experts(experts) => {
                    let (mut gates, mut ups, mut downs) = (Vec::new(), Vec::new(), Vec::new());
                    for Gated { gate, up, down } in &mut experts.experts {
                        gates.push(gate);
                        ups.push(up);
                        downs.push(down);
                    }
                    [gates, ups, downs]
                        .into_iter()
                        .for_each(|part| code(graph, self.experts, part));
                }
            }
            if let Some(dtype) = self.dense {
                dense.into_iter().for_each(|linear| code(graph, dtype, vec![linear]));
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
