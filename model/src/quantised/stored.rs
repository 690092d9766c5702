//! Quantised matrices that are streamed as codes: those of 8 bits with a scale for each row as they are stored, others in
//! blocks with their scales; and those whose values are of 16 bits, as these.
//!
//! A program multiplies all matrices in one element type, so a model is taken this way as a whole or not at all: codes,
//! and beside them matrices of 16 bits, are multiplied in f16.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use ir::{Attention, DType, Experts, FeedForward, Gated, Graph, Layer, Linear, Tensor, TensorId};

use super::Source;
use super::codes::Codes;
use super::grouped::Grouped;
use super::matrix::{Layout, Matrix, Zeros};
use crate::parallel;
use crate::store::{Files, Place};

/// Bytes of a matrix that a thread looks through at a time.
const PART_BYTES: usize = 1 << 22;

/// A matrix as it is streamed.
struct Streamed {
    from: From,
    dtype: DType,
    /// The factor of each row, of codes.
    scales: Vec<f32>,
}

/// Where its elements come from.
enum From {
    File(Place),
    /// Rows of this many bytes at a place, in another order.
    Rows(Matrix, Place, usize),
    Blocks(Grouped),
    /// Its values, which are of 16 bits.
    Values(Matrix),
}

/// Makes the graph one of codes, and `sources` those of its tensors, if every matrix can be streamed as it is stored.
/// Says whether it did.
pub(super) fn stream(graph: &mut Graph, sources: &mut Vec<Source>, files: &Files) -> bool {
    let Some(all) = streamed(graph, sources, files) else { return false };
    let table = table(graph, sources).cloned();
    // An embedding in f32 has a format beside operands in f16 alone (ir/src/format.rs).
    let operand = if table.is_some() { DType::F16 } else { operand(&all) };
    if table.is_none() && all[&graph.embed].dtype.is_scaled()
        || !graph.layers.iter().all(|layer| fits(layer, &all))
        || operand == DType::F16 && beyond_f16(&all, files)
    {
        return false;
    }
    if let Some(table) = table {
        split_table(graph, sources, table);
    }
    let scales = scales(graph, sources, &all);
    for (id, matrix) in all {
        graph.tensors[id.index()].dtype = matrix.dtype;
        sources[id.index()] = match matrix.from {
            From::File(place) => Source::Stored(place),
            From::Rows(matrix, place, row_bytes) => Source::Rows(matrix, place, row_bytes),
            From::Blocks(grouped) => Source::Grouped(grouped),
            From::Values(values) => Source::Made(values, matrix.dtype),
        };
    }
    for layer in &mut graph.layers {
        for linear in layer.linears_mut() {
            linear.scale = scales.get(&linear.weight).copied();
        }
    }
    graph.lm_head_scale = scales.get(&graph.lm_head).copied();
    graph.dtype = operand;
    true
}

/// The embedding, if it is of blocks of GGUF: it is given in f32, since a row is read without scales.
fn table<'a>(graph: &Graph, sources: &'a [Source]) -> Option<&'a Matrix> {
    made(&sources[graph.embed.index()]).filter(|matrix| matches!(matrix.layout, Layout::Blocks(..)))
}

/// Gives an embedding that was the output matrix too a tensor of its own.
fn split_table(graph: &mut Graph, sources: &mut Vec<Source>, table: Matrix) {
    if !graph.tied() {
        return;
    }
    let both = &mut graph.tensors[graph.embed.index()];
    let name = std::mem::replace(&mut both.name, "lm_head.weight".to_owned());
    let shape = both.shape.clone();
    graph.embed = TensorId(graph.tensors.len() as u32);
    graph.tensors.push(Tensor { name, dtype: DType::F32, shape });
    sources.push(Source::Made(table, DType::F32));
}

/// Whether the parts of each packed matrix of a layer are of one type.
fn fits(layer: &Layer, all: &HashMap<TensorId, Streamed>) -> bool {
    let dtype = |linear: &Linear| all[&linear.weight].dtype;
    let alike = |parts: &[Linear]| parts.iter().all(|part| dtype(part) == dtype(&parts[0]));
    let Attention { q, k, v, .. } = layer.attention.body;
    let mlp = match &layer.mlp.body {
        FeedForward::Gated(Gated { gate, up, .. }) => {
            // Rows that alternate have no place for both (ir/src/program/rules/task.rs).
            let biased = [gate, up].iter().any(|linear| linear.bias.is_some());
            alike(&[*gate, *up]) && !(biased && dtype(gate).is_scaled())
        }
        FeedForward::Experts(experts) => {
            let [gates, ups, downs] = parts_of(experts);
            let shared = experts.shared.as_ref().is_none_or(|shared| {
                alike(&[experts.router, shared.gate]) && alike(&[shared.mlp.gate, shared.mlp.up])
            });
            alike(&[gates, ups].concat()) && alike(&downs) && shared
        }
    };
    alike(&[q, k, v]) && mlp
}

/// Gate, up and down of all experts.
fn parts_of(experts: &Experts) -> [Vec<Linear>; 3] {
    let of = |part: fn(&Gated) -> Linear| experts.experts.iter().map(part).collect();
    [of(|expert| expert.gate), of(|expert| expert.up), of(|expert| expert.down)]
}

/// Matrices of experts, each list of one part of one layer.
fn of_experts(graph: &Graph) -> Vec<Vec<TensorId>> {
    let experts = graph.layers.iter().filter_map(|layer| match &layer.mlp.body {
        FeedForward::Experts(experts) => Some(parts_of(experts)),
        FeedForward::Gated(_) => None,
    });
    let ids = |part: Vec<Linear>| part.into_iter().map(|linear| linear.weight).collect();
    experts.flatten().map(ids).collect()
}

/// The type that all are multiplied in: their own if they have one without codes, else f16.
fn operand(all: &HashMap<TensorId, Streamed>) -> DType {
    let mut dtypes = all.values().map(|matrix| matrix.dtype);
    let first = dtypes.next().unwrap_or(DType::F16);
    if !first.is_scaled() && dtypes.all(|dtype| dtype == first) { first } else { DType::F16 }
}

/// Every matrix, if all are of kinds that are streamed. The codes of experts are in blocks, and the factors of their rows
/// are the same for all, so that several experts' products can be added before they are multiplied by them.
fn streamed(
    graph: &Graph,
    sources: &[Source],
    files: &Files,
) -> Option<HashMap<TensorId, Streamed>> {
    let mut all = HashMap::new();
    for part in of_experts(graph) {
        let matrices = part.iter().map(|id| made(&sources[id.index()]));
        let matrices: Vec<_> = matrices.collect::<Option<_>>()?;
        let codes = |matrix: &&Matrix| matches!(matrix.layout, Layout::Scaled { .. });
        if matrices.iter().any(codes) {
            let grouped = Grouped::together(&matrices, files)?.into_iter().map(Streamed::blocks);
            all.extend(part.into_iter().zip(grouped));
        }
    }
    if let Some(table) = table(graph, sources).filter(|_| !graph.tied()) {
        let from = From::Values(table.clone());
        all.insert(graph.embed, Streamed { from, dtype: DType::F32, scales: Vec::new() });
    }
    let joint = joint(graph, sources);
    for (source, id) in sources.iter().zip((0..).map(TensorId)) {
        if let Some(matrix) = made(source)
            && let Entry::Vacant(vacant) = all.entry(id)
        {
            vacant.insert(match matrix.layout {
                Layout::Blocks(_, kind) if !kind.coded().is_empty() => {
                    let dtype = joint.get(&id).copied().unwrap_or(kind.coded()[0]);
                    Streamed::blocks(Grouped::recoded(matrix, dtype)?)
                }
                Layout::Floats(..)
                | Layout::Scaled { .. }
                | Layout::Blocks(..)
                | Layout::Nf4(_) => one(matrix, files)?,
            });
        }
    }
    Some(all)
}

/// The smallest type that holds all parts of a packed matrix, where these are blocks of GGUF and one does: files often have
/// larger codes for values than for queries and keys.
fn joint(graph: &Graph, sources: &[Source]) -> HashMap<TensorId, DType> {
    let mut joint = HashMap::new();
    for layer in &graph.layers {
        let Attention { q, k, v, .. } = layer.attention.body;
        let gated = layer.gated().map(|Gated { gate, up, .. }| vec![*gate, *up]);
        for parts in [Some(vec![q, k, v]), gated].into_iter().flatten() {
            let coded =
                parts.iter().map(|part| match made(&sources[part.weight.index()])?.layout {
                    Layout::Blocks(_, kind) => Some(kind.coded()),
                    Layout::Floats(..) | Layout::Scaled { .. } | Layout::Nf4(_) => None,
                });
            let Some(coded) = coded.collect::<Option<Vec<_>>>() else { continue };
            let all_have = |dtype: &&DType| coded.iter().all(|coded| coded.contains(dtype));
            if let Some(&dtype) = coded[0].iter().find(all_have) {
                joint.extend(parts.iter().map(|part| (part.weight, dtype)));
            }
        }
    }
    joint
}

/// The matrix that a source is made of.
fn made(source: &Source) -> Option<&Matrix> {
    match source {
        Source::Made(matrix, _) => Some(matrix),
        Source::Stored(_)
        | Source::Piece(_)
        | Source::Rows(..)
        | Source::Grouped(_)
        | Source::Scales(_) => None,
    }
}

fn one(matrix: &Matrix, files: &Files) -> Option<Streamed> {
    match &matrix.layout {
        &Layout::Floats(place, dtype @ (DType::F16 | DType::Bf16)) => {
            let from = rows_at(matrix, place, matrix.cols * dtype.bytes());
            Some(Streamed { from, dtype, scales: Vec::new() })
        }
        Layout::Scaled { place, codes, zeros: Zeros::None, scales }
            if scales.cols_each >= matrix.cols && scales.groups.is_none() =>
        {
            let dtype = match codes {
                Codes::E4m3 => DType::E4m3,
                Codes::Int8 => DType::Int8,
                Codes::E2m1 | Codes::Int4(_) => return grouped(matrix, files),
            };
            let scale = |row| scales.of_group(files, matrix, matrix.stored_row(row), 0);
            let scales = (0..matrix.given_rows()).map(scale).collect();
            Some(Streamed { from: rows_at(matrix, *place, matrix.cols), dtype, scales })
        }
        Layout::Nf4(nf4) if nf4.dtype() != DType::F32 => Some(Streamed {
            from: From::Values(matrix.clone()),
            dtype: nf4.dtype(),
            scales: Vec::new(),
        }),
        Layout::Floats(..) | Layout::Scaled { .. } | Layout::Blocks(..) | Layout::Nf4(_) => {
            grouped(matrix, files)
        }
    }
}

/// The rows of a matrix whose elements are used as they lie.
fn rows_at(matrix: &Matrix, place: Place, row_bytes: usize) -> From {
    let Some(first) = matrix.run() else { return From::Rows(matrix.clone(), place, row_bytes) };
    let bytes = (matrix.given_rows() * row_bytes) as u64;
    From::File(Place { offset: place.offset + (first * row_bytes) as u64, bytes, ..place })
}

fn grouped(matrix: &Matrix, files: &Files) -> Option<Streamed> {
    Grouped::together(&[matrix], files)?.pop().map(Streamed::blocks)
}

impl Streamed {
    fn blocks(grouped: Grouped) -> Self {
        let (dtype, scales) = (grouped.dtype(), grouped.factors.clone());
        Self { from: From::Blocks(grouped), dtype, scales }
    }
}

/// Whether some bf16 is too large for f16, or may be.
fn beyond_f16(all: &HashMap<TensorId, Streamed>, files: &Files) -> bool {
    /// The least bf16 that is larger than every f16: 65536.
    const LEAST: u16 = 0x4780;
    let unread =
        |matrix: &Streamed| matches!(matrix.from, From::Values(_)) && matrix.dtype == DType::Bf16;
    if all.values().any(unread) {
        return true;
    }
    let found = AtomicBool::new(false);
    let matrices = all.values().filter_map(|matrix| match matrix.from {
        From::File(place) | From::Rows(_, place, _) if matrix.dtype == DType::Bf16 => {
            Some(files.slice(place))
        }
        From::File(_) | From::Rows(..) | From::Blocks(_) | From::Values(_) => None,
    });
    for bytes in matrices {
        let parts = std::sync::Mutex::new(bytes.chunks(PART_BYTES));
        parallel::run(bytes.len(), &|| {
            while let Some(part) = parallel::next(&parts) {
                let words = part.as_chunks::<2>().0.iter();
                if words
                    .fold(false, |any, word| any | (u16::from_le_bytes(*word) & 0x7fff >= LEAST))
                {
                    found.store(true, Ordering::Relaxed);
                }
            }
        });
    }
    found.into_inner()
}

/// Adds a tensor of scales for each matrix of codes, one for each part of experts; returns them by the matrix.
fn scales(
    graph: &mut Graph,
    sources: &mut Vec<Source>,
    all: &HashMap<TensorId, Streamed>,
) -> HashMap<TensorId, TensorId> {
    let experts = of_experts(graph);
    let others: HashSet<TensorId> = experts.iter().flat_map(|part| &part[1..]).copied().collect();
    let mut scaled: Vec<_> = all
        .iter()
        .filter(|(id, matrix)| matrix.dtype.is_scaled() && !others.contains(id))
        .collect();
    // In the order of the matrices, so that a model always has the same graph.
    scaled.sort_by_key(|(id, _)| id.index());
    let mut added = HashMap::new();
    for (&id, matrix) in scaled {
        let name = format!("{}_scale", graph.tensor(id).name);
        let shape = vec![matrix.scales.len() as u32];
        added.insert(id, TensorId(graph.tensors.len() as u32));
        graph.tensors.push(Tensor { name, dtype: DType::F32, shape });
        let bytes = matrix.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        sources.push(Source::Scales(bytes));
    }
    for part in experts {
        if let Some(&scale) = added.get(&part[0]) {
            added.extend(part.into_iter().map(|id| (id, scale)));
        }
    }
    added
}
