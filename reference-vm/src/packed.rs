//! Packed matrices and vectors of a program, read from the stored tensors of their maps.
//!
//! The machine never packs: it looks up each row's origin in the map. So a packing error that mixes up rows cannot be
//! repeated here.

use std::sync::Arc;

use ir::program::RowMap;
use ir::{DType, Graph, MatrixId, TensorId, Weights};

use crate::math;
use crate::products::{Products, Rows, Stored as Place, Vector};
use crate::trap::MachineError;

/// A packed matrix bound to its tensors.
pub(crate) struct Packed<'a> {
    map: &'a RowMap,
    rows: u32,
    cols: u32,
    units_per_tile: u32,
    unit_cols: u32,
    scaled: bool,
    experts: u32,
    parts: Vec<Option<Part<'a>>>,
}

/// One part of a map: a stored matrix.
struct Part<'a> {
    tensor: TensorId,
    view: math::Matrix<'a>,
    place: Place,
}

/// Cached products of a packed matrix with one vector, by part of its map.
pub(crate) struct Known(Vec<Option<Arc<Rows>>>);

impl<'a> Packed<'a> {
    /// Binds a matrix, checking every part against the graph.
    pub(crate) fn new(
        id: MatrixId,
        matrix: &'a ir::program::Matrix,
        graph: &Graph,
        weights: &'a dyn Weights,
    ) -> Result<Self, MachineError> {
        let empty = MachineError::Matrix(id);
        let rows = rows(&matrix.map).filter(|&rows| rows > 0 && matrix.cols > 0).ok_or(empty)?;
        let part = |&(tensor, part_rows): &(Option<TensorId>, u32)| {
            let Some(tensor) = tensor else { return Ok(None) };
            let stored = stored(tensor, graph, weights)?;
            let fits = stored.shape.len() == 2
                && stored.dtype == matrix.format.stored()
                && stored.shape[0] >= part_rows
                && stored.shape[1] == matrix.cols;
            let misfit = MachineError::Tensor(tensor);
            if !fits {
                return Err(misfit);
            }
            let (rows, cols) = (stored.shape[0] as usize, stored.shape[1] as usize);
            let view = math::Matrix::new(stored.dtype, rows, cols, stored.bytes).ok_or(misfit)?;
            let address = stored.bytes.as_ptr().addr();
            let place = Place { address, dtype: stored.dtype, rows, cols };
            Ok(Some(Part { tensor, view, place }))
        };
        Ok(Self {
            map: &matrix.map,
            rows,
            cols: matrix.cols,
            units_per_tile: matrix.units_per_tile(),
            unit_cols: matrix.format.unit_cols(),
            scaled: matrix.format.is_scaled(),
            experts: matrix.experts,
            parts: matrix.map.parts.iter().map(part).collect::<Result<_, _>>()?,
        })
    }

    pub(crate) fn rows(&self) -> u32 {
        self.rows
    }

    pub(crate) fn cols(&self) -> u32 {
        self.cols
    }

    /// Columns of whole units, padding included.
    pub(crate) fn whole_cols(&self) -> u32 {
        self.cols.next_multiple_of(self.unit_cols)
    }

    /// Experts, whose rows lie one after the other; 1 for any other matrix.
    pub(crate) fn experts(&self) -> u32 {
        self.experts
    }

    pub(crate) fn expert_rows(&self) -> u32 {
        self.rows / self.experts.max(1)
    }

    pub(crate) fn units_per_tile(&self) -> u32 {
        self.units_per_tile
    }

    /// Whether each row has a scale.
    pub(crate) fn is_scaled(&self) -> bool {
        self.scaled
    }

    /// Packed row `row` times `x`, which is not longer than a row. Padding is zero.
    pub(crate) fn dot_row(&self, row: u32, x: &[f32]) -> f32 {
        self.locate(row).map_or(0.0, |(_, view, row)| view.dot_row(row, x))
    }

    /// The cached products of this matrix and `x`.
    pub(crate) fn known(&self, products: &Products<'_>, x: &[f32]) -> Known {
        let vector = Vector::new(x);
        let of = |part: &Option<Part<'_>>| products.of(part.as_ref()?.place, &vector);
        Known(self.parts.iter().map(of).collect())
    }

    /// Computes the missing products of `known` on the thread pool of `products`, once. A vector that is shorter than
    /// the rows is left to [`dot_row_known`](Self::dot_row_known).
    pub(crate) fn fill(&self, products: &Products<'_>, x: &[f32], known: &Known) {
        for (part, rows) in self.parts.iter().zip(&known.0) {
            if let (Some(part), Some(rows)) = (part, rows)
                && part.view.cols() == x.len()
            {
                products.fill(rows, &part.view, x);
            }
        }
    }

    /// As [`dot_row`](Self::dot_row), using the cached products of the same `x`.
    pub(crate) fn dot_row_known(&self, row: u32, x: &[f32], known: &Known) -> f32 {
        let Some((part, view, row)) = self.locate(row) else { return 0.0 };
        let product = || view.dot_row(row, x);
        match known.0.get(part).and_then(Option::as_ref) {
            Some(rows) => rows.get(row, product),
            None => product(),
        }
    }

    pub(crate) fn decode(&self, row: u32, start: usize, out: &mut [f32]) {
        match self.locate(row) {
            Some((_, view, row)) => view.decode_row(row, start, out),
            None => out.fill(0.0),
        }
    }

    /// Part, view and stored row of a packed row; `None` for padding.
    fn locate(&self, row: u32) -> Option<(usize, &math::Matrix<'a>, usize)> {
        // Every expert has as many parts and rows as another: there are too many to look through for each row.
        let each = self.parts.len() / self.experts.max(1) as usize;
        let expert = (row / self.expert_rows().max(1)) as usize;
        let own = expert * each..(expert + 1) * each;
        let first = expert as u32 * self.expert_rows();
        let (tensor, row) = self.map.locate_among(own.clone(), row - first)?;
        let (index, part) = own
            .filter_map(|index| Some((index, self.parts.get(index)?.as_ref()?)))
            .find(|(_, part)| part.tensor == tensor)?;
        Some((index, &part.view, row as usize))
    }
}

/// The elements of a map whose rows are single elements: norm weights and biases.
pub(crate) fn vector(
    map: &RowMap,
    graph: &Graph,
    weights: &dyn Weights,
) -> Result<Option<Vec<f32>>, MachineError> {
    let Some(rows) = rows(map) else { return Ok(None) };
    let mut out = Vec::with_capacity(rows as usize);
    // The biases of experts have too many parts to look through all of them for each row.
    let together = if map.interleaved { 2 } else { 1 };
    for first in (0..map.parts.len()).step_by(together) {
        let own = first..map.parts.len().min(first + together);
        let mut values = Vec::new();
        let mut rows = 0;
        for &(tensor, part_rows) in &map.parts[own.clone()] {
            rows += padded(map, part_rows).unwrap_or(0);
            let Some(tensor) = tensor else { continue };
            let stored = stored(tensor, graph, weights)?;
            if stored.shape.len() != 1 || stored.shape[0] < part_rows {
                return Err(MachineError::Tensor(tensor));
            }
            let mut elements = vec![0f32; stored.shape[0] as usize];
            ir::decode(stored.dtype, stored.bytes, &mut elements);
            values.push((tensor, elements));
        }
        let element = |row: u32| {
            let (tensor, element) = map.locate_among(own.clone(), row)?;
            let of = values.iter().find(|(id, _)| *id == tensor)?;
            of.1.get(element as usize).copied()
        };
        out.extend((0..rows).map(|row| element(row).unwrap_or(0.0)));
    }
    Ok(Some(out))
}

/// Rows that a part takes.
fn padded(map: &RowMap, rows: u32) -> Option<u32> {
    if map.interleaved { rows.checked_next_multiple_of(abi::UNIT_ROWS) } else { Some(rows) }
}

/// Rows of a map that has parts, unless they overflow.
fn rows(map: &RowMap) -> Option<u32> {
    let add = |sum: u32, &(_, rows): &(_, u32)| sum.checked_add(padded(map, rows)?);
    let sum = map.parts.iter().try_fold(0, add)?;
    (!map.parts.is_empty()).then_some(sum)
}

struct Stored<'g, 'a> {
    dtype: DType,
    shape: &'g [u32],
    bytes: &'a [u8],
}

fn stored<'g, 'a>(
    tensor: TensorId,
    graph: &'g Graph,
    weights: &'a dyn Weights,
) -> Result<Stored<'g, 'a>, MachineError> {
    let misfit = MachineError::Tensor(tensor);
    let meta = graph.tensors.get(tensor.index()).ok_or(misfit)?;
    let bytes = weights.bytes(tensor);
    if Some(bytes.len()) != math::stored_bytes(meta) {
        return Err(misfit);
    }
    Ok(Stored { dtype: meta.dtype, shape: &meta.shape, bytes })
}
