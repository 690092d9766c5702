//! Shapes whose matrices are codes, as published models of them are stored.

use ir::{Attention, DType, FeedForward, Gated, Graph, Linear, Tensor, TensorId};

/// Which matrices are codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coded {
    /// Some of the layers'; the others, and both tables, are of 16 bits.
    Layers {
        /// Of attention and of layers without experts, if these matrices are codes.
        dense: Option<DType>,
        /// Of experts, whose rows share their factors.
        experts: DType,
    },
    /// All, as in a GGUF file, of which the embedding is read in f32. For models without experts.
    File {
        /// Of most matrices.
        dtype: DType,
        /// Of the output matrix, and in some layers of `down`, of the values and with these of queries and keys.
        larger: DType,
    },
}

/// The formats that a preset of 16 bits can have too: what its name ends in, and its codes.
pub const CODED: &[(&str, Coded)] = &[
    ("fp8", Coded::Layers { dense: Some(DType::E4m3), experts: DType::E4m3G64Row }),
    ("fp8-block", Coded::Layers { dense: Some(DType::E4m3G64), experts: DType::E4m3G64 }),
    ("int8", Coded::Layers { dense: Some(DType::Int8), experts: DType::Int8G32 }),
    ("int4-g128", Coded::Layers { dense: Some(DType::Int4G128), experts: DType::Int4G128 }),
    ("int4-g32", Coded::Layers { dense: Some(DType::Int4G32), experts: DType::Int4G32 }),
    ("q8-0", Coded::File { dtype: DType::Int8G32, larger: DType::Int8G32 }),
    ("q4-k-m", Coded::File { dtype: DType::Int4K, larger: DType::Int8K }),
];

/// Layers in which llama.cpp's Q4_K_M keeps more bits of values and of `down`: the first and the last eighth, and every third
/// between (`use_more_bits` in its src/llama-quant.cpp).
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

impl Coded {
    /// Whether a model with experts can have these codes.
    pub(crate) fn has_experts(self) -> bool {
        matches!(self, Self::Layers { .. })
    }

    /// Makes the graph one of these codes, as an imported one is (`quantised/stored.rs`): scales behind all other tensors,
    /// one for each part of a layer's experts, and products in f16.
    pub(crate) fn apply(self, graph: &mut Graph) {
        let mut layers = std::mem::take(&mut graph.layers);
        let count = layers.len();
        for (n, layer) in layers.iter_mut().enumerate() {
            let Attention { q, k, v, o, .. } = &mut layer.attention.body;
            let [first, rest, last] = self.of_layer(n, count);
            let mut dense = vec![(q, first), (k, first), (v, first), (o, rest)];
            match &mut layer.mlp.body {
                FeedForward::Gated(Gated { gate, up, down }) => {
                    dense.extend([(gate, rest), (up, rest), (down, last)]);
                }
                FeedForward::Experts(experts) => {
                    let (mut gates, mut ups, mut downs) = (Vec::new(), Vec::new(), Vec::new());
                    for Gated { gate, up, down } in &mut experts.experts {
                        gates.push(gate);
                        ups.push(up);
                        downs.push(down);
                    }
                    let Self::Layers { experts, .. } = self else { continue };
                    [gates, ups, downs].into_iter().for_each(|part| code(graph, experts, part));
                }
            }
            for (linear, dtype) in dense {
                if let Some(dtype) = dtype {
                    code(graph, dtype, vec![linear]);
                }
            }
        }
        graph.layers = layers;
        graph.dtype = DType::F16;
        if let Self::File { larger, .. } = self {
            tables(graph, larger);
        }
    }

    /// The types of a layer's queries, keys and values, of `down`, and of what is between.
    fn of_layer(self, layer: usize, layers: usize) -> [Option<DType>; 3] {
        match self {
            Self::Layers { dense, .. } => [dense; 3],
            Self::File { dtype, larger } => {
                let some = if has_more_bits(layer, layers) { larger } else { dtype };
                [Some(some), Some(dtype), Some(some)]
            }
        }
    }
}

/// Makes the output matrix one of codes and the embedding another one, of f32.
fn tables(graph: &mut Graph, dtype: DType) {
    let embed = graph.tensors[graph.embed.index()].clone();
    if graph.tied() {
        graph.tensors[graph.lm_head.index()].name = "lm_head.weight".to_owned();
        graph.embed = TensorId(graph.tensors.len() as u32);
        graph.tensors.push(embed);
    }
    graph.tensors[graph.embed.index()].dtype = DType::F32;
    let mut head = Linear { weight: graph.lm_head, scale: None, bias: None };
    code(graph, dtype, vec![&mut head]);
    graph.lm_head_scale = head.scale;
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
