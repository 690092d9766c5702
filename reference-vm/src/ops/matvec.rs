//! Multiplies rows of a streamed matrix with a vector.

use std::collections::BTreeMap;

use abi::{Activation, Epilogue, MatvecParams, Prologue, UNIT_ROWS};
use ir::MatrixId;
use ir::program::stream_part;
use rayon::prelude::*;

use super::attention_merge::Partials;
use super::route::Route;
use super::{Context, Effects, bits, reserved};
use crate::defect::Defect;
use crate::math::{TASK_MACS, argmax, capped, root_mean_square};
use crate::memory::Span;
use crate::packed::Packed;
use crate::trap::Fault;
use crate::wave::Operand;

/// A store of a task: buffer, first word, words.
type Store = (ir::BufferId, u32, Vec<u32>);

/// The rows that a task multiplies: packed rows `row0..row1` of its tiles, without padding.
struct Rows {
    row0: u32,
    row1: u32,
}

impl Rows {
    fn new(p: &MatvecParams) -> Result<Self, Fault> {
        let end = p.tile0.checked_add(p.tiles).and_then(|end| end.checked_mul(UNIT_ROWS));
        let end = end.ok_or(Fault::Parameter { name: "tiles", value: p.tiles })?;
        let row0 = p.tile0 * UNIT_ROWS;
        if row0 >= end.min(p.rows) {
            return Err(Fault::Parameter { name: "tile0", value: p.tile0 });
        }
        Ok(Self { row0, row1: end.min(p.rows) })
    }

    fn len(&self) -> u32 {
        self.row1 - self.row0
    }
}

fn prologue(p: &MatvecParams) -> Result<Prologue, Fault> {
    Prologue::new(p.prologue).ok_or(Fault::Parameter { name: "prologue", value: p.prologue })
}

fn epilogue(p: &MatvecParams) -> Result<Epilogue, Fault> {
    Epilogue::new(p.epilogue).ok_or(Fault::Parameter { name: "epilogue", value: p.epilogue })
}

fn partials(p: &MatvecParams) -> Result<Partials, Fault> {
    if p.head_dim == 0 || !p.k_len.is_multiple_of(p.head_dim) {
        return Err(Fault::Parameter { name: "head_dim", value: p.head_dim });
    }
    let heads = p.k_len / p.head_dim;
    Ok(Partials {
        head0: 0,
        heads,
        heads_total: heads,
        head_dim: p.head_dim,
        splits: p.splits,
        kv_block: p.kv_block,
        window: p.window,
    })
}

pub(super) fn inputs(context: Context<'_>, p: &MatvecParams) -> Result<Vec<Span>, Fault> {
    let clamped = p.activation == Activation::ClampedSilu as u32;
    match epilogue(p)? {
        Epilogue::SiluMul if clamped => {}
        Epilogue::SiluMul => reserved(&[p.cap.to_bits()])?,
        Epilogue::Logits => reserved(&[p.activation])?,
        Epilogue::Store | Epilogue::Residual => reserved(&[p.activation, p.cap.to_bits()])?,
    }
    let mut spans = match prologue(p)? {
        Prologue::Copy | Prologue::Rms => vec![context.span(0, 0, p.k_len)?],
        Prologue::PostNorm => vec![context.span(0, 0, p.k_len)?, context.span(3, 0, p.k_len)?],
        Prologue::Merge => partials(p)?.spans(context, context.step)?,
    };
    if epilogue(p)? == Epilogue::Residual {
        let rows = Rows::new(p)?;
        spans.push(context.span(3, rows.row0, rows.len())?);
    }
    spans.extend(Route::span(context)?);
    if let Some(matrix) = context.packed.get(MatrixId(p.matrix).index()) {
        spans.extend(Route::logits(context, matrix.experts())?);
    }
    Ok(spans)
}

pub(super) fn fire(context: Context<'_>, p: &MatvecParams) -> Result<Effects, Fault> {
    let id = MatrixId(p.matrix);
    let matrix = context.packed.get(id.index()).ok_or(Fault::BadMatrix(id))?;
    let route = Route::read(context, matrix)?;
    check(p, matrix, route.as_ref())?;
    let rows = Rows::new(p)?;
    if let Some(route) = route {
        let writes = routed(context, p, (matrix, &route), &rows)?;
        return Ok(Effects { writes, ..Effects::default() });
    }
    let (mut y, stream) = products(context, p, matrix, &rows)?;
    if matrix.is_scaled() {
        let scales = context.read(2, rows.row0, rows.len())?;
        y.iter_mut().zip(scales).for_each(|(y, scale)| *y *= scale);
    }
    if let Some(bias) = biases(context, p, matrix, &rows)? {
        y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
    }
    let mut writes = finish(context, p, &rows, y, &[])?;
    writes.extend(stream);
    Ok(Effects { writes, ..Effects::default() })
}

/// Checks that the task has no more rows and columns than the matrix, or than its experts in all slots.
fn check(p: &MatvecParams, matrix: &Packed<'_>, route: Option<&Route>) -> Result<(), Fault> {
    let slots = route.map_or(1, Route::slots);
    let gated = p.epilogue == Epilogue::SiluMul as u32;
    let (row_slots, col_slots) = if gated { (slots, 1) } else { (1, slots) };
    let rows = if route.is_some() { matrix.expert_rows() * row_slots } else { matrix.rows() };
    if p.units != matrix.units_per_tile() * col_slots {
        return Err(Fault::Parameter { name: "units", value: p.units });
    }
    // What the slots' second matrix reads has whole units for each slot, also if there is one slot.
    let cols = if route.is_some() && !gated { matrix.whole_cols() } else { matrix.cols() };
    if u64::from(p.k_len) > u64::from(cols) * u64::from(col_slots) {
        return Err(Fault::Parameter { name: "k_len", value: p.k_len });
    }
    if p.rows > rows {
        return Err(Fault::Parameter { name: "rows", value: p.rows });
    }
    if u64::from(p.tile0) + u64::from(p.tiles) > u64::from(rows.div_ceil(UNIT_ROWS)) {
        return Err(Fault::Parameter { name: "tiles", value: p.tiles });
    }
    Ok(())
}

/// Products that follow a route. Experts share the scales of their rows.
fn routed(
    context: Context<'_>,
    p: &MatvecParams,
    (matrix, route): (&Packed<'_>, &Route),
    rows: &Rows,
) -> Result<Vec<Store>, Fault> {
    // Products are not kept: what is known of a matrix is known of all its experts.
    let Operand { x, scale, .. } = operand(Context { products: None, ..context }, p, matrix)?;
    let ExpertConstants { scales, biases } = expert_constants(context, matrix, route)?;
    let bias = |row: u32| {
        let (expert, row) = (row / matrix.expert_rows(), row % matrix.expert_rows());
        biases.get(&expert).map_or(0.0, |biases| biases[row as usize])
    };
    let row_scale = |row: u32| {
        let row = (row % matrix.expert_rows()) as usize;
        f64::from(scales.as_ref().map_or(1.0, |scales| scales[row]))
    };
    let scaled = |product: f32| scale.map_or(f64::from(product), |s| f64::from(product) * s);
    if epilogue(p)? == Epilogue::SiluMul {
        let of = |row| {
            let (row, weight) = route.row(matrix, row);
            ((scaled(matrix.dot_row(row, &x)) * row_scale(row)) as f32 + bias(row), weight)
        };
        let (y, weights): (Vec<_>, Vec<_>) = (rows.row0..rows.row1).map(of).unzip();
        return finish(context, p, rows, y, &weights);
    }
    // Each slot's part of the vector has whole units; those beyond its expert's columns are zeros.
    let (cols, part) = (matrix.cols() as usize, x.len() / route.slots() as usize);
    let of = |row| {
        let parts = route.rows(matrix, row).zip(x.chunks_exact(part.max(1)));
        let sum: f64 = parts
            .map(|((row, weight), x)| {
                let x = &x[..cols.min(x.len())];
                scaled(matrix.dot_row(row, x)) * row_scale(row)
                    + f64::from(weight) * f64::from(bias(row))
            })
            .sum();
        sum as f32
    };
    finish(context, p, rows, (rows.row0..rows.row1).map(of).collect(), &[])
}

/// What is added to or multiplied with the products of experts.
struct ExpertConstants {
    /// Of the rows of any expert.
    scales: Option<Vec<f32>>,
    /// Of the rows of each chosen expert that has some.
    biases: BTreeMap<u32, Vec<f32>>,
}

/// The scales of an expert's rows, and the biases of the chosen experts, which lie behind the scales with all others.
fn expert_constants(
    context: Context<'_>,
    matrix: &Packed<'_>,
    route: &Route,
) -> Result<ExpertConstants, Fault> {
    let each = matrix.expert_rows();
    let words = context.task.reads[2].map_or(0, |buffer| context.memory.words(buffer));
    let first = if matrix.is_scaled() { each } else { 0 };
    let scales = (first > 0).then(|| context.read(2, 0, first)).transpose()?;
    let mut biases = BTreeMap::new();
    if words > first {
        for expert in route.experts() {
            biases.insert(expert, context.read(2, first + expert * each, each)?);
        }
    }
    Ok(ExpertConstants { scales, biases })
}

/// The biases of a task's rows, if there are any: behind the scales.
fn biases(
    context: Context<'_>,
    p: &MatvecParams,
    matrix: &Packed<'_>,
    rows: &Rows,
) -> Result<Option<Vec<f32>>, Fault> {
    if !matrix.is_scaled() {
        return context.read_optional(2, rows.row0, rows.len());
    }
    let words = context.task.reads[2].map_or(0, |buffer| context.memory.words(buffer));
    if words <= p.rows {
        return Ok(None);
    }
    context.read(2, p.rows + rows.row0, rows.len()).map(Some)
}

/// The vector of a task: `prologue(x)`, with the scale of the norm kept apart.
fn operand(context: Context<'_>, p: &MatvecParams, matrix: &Packed<'_>) -> Result<Operand, Fault> {
    let mut stream = Vec::new();
    let (x, scale) = match prologue(p)? {
        Prologue::Copy => (context.read(0, 0, p.k_len)?, None),
        Prologue::Rms => {
            let x = context.read(0, 0, p.k_len)?;
            let norm = context.read(1, 0, p.k_len)?;
            normed(context, p, &x, &norm)
        }
        Prologue::PostNorm => {
            stream = after_block(context, p)?;
            let words = context.task.reads[1].map_or(0, |buffer| context.memory.words(buffer));
            if words == p.k_len {
                (stream.clone(), None)
            } else {
                normed(context, p, &stream, &context.read(1, p.k_len, p.k_len)?)
            }
        }
        Prologue::Merge => (partials(p)?.merge(context)?, None),
    };
    let known = context.products.map(|(products, _)| matrix.known(products, &x));
    Ok(Operand { x, scale, stream, known })
}

/// A vector times the weights of its norm, and the norm's factor.
fn normed(
    context: Context<'_>,
    p: &MatvecParams,
    x: &[f32],
    norm: &[f32],
) -> (Vec<f32>, Option<f64>) {
    let scale = Defect::norm_scale(context.defect, 1.0 / root_mean_square(x, p.eps));
    (x.iter().zip(norm).map(|(x, norm)| x * norm).collect(), Some(scale))
}

/// The residual stream after a block: the norm of its result, added to the stream before it.
fn after_block(context: Context<'_>, p: &MatvecParams) -> Result<Vec<f32>, Fault> {
    let residual = context.read(3, 0, p.k_len)?;
    let (sums, scale) =
        normed(context, p, &context.read(0, 0, p.k_len)?, &context.read(1, 0, p.k_len)?);
    let scale = scale.unwrap_or(1.0);
    let add = |(sum, residual)| {
        (f64::from(sum) * scale) as f32 + Defect::residual(context.defect, residual)
    };
    Ok(sums.into_iter().zip(residual).map(add).collect())
}

/// The part of the residual stream that a task stores.
fn stream_store(
    context: Context<'_>,
    p: &MatvecParams,
    stream: &[f32],
) -> Result<Option<Store>, Fault> {
    let part = stream_part(p);
    let stores = prologue(p)? == Prologue::PostNorm && epilogue(p)? != Epilogue::Logits;
    let Some(buffer) = context.task.writes[1].filter(|_| stores && !part.is_empty()) else {
        return Ok(None);
    };
    let words = stream.get(part.start as usize..part.end as usize);
    let words = words.ok_or(Fault::Parameter { name: "k_len", value: p.k_len })?;
    Ok(Some((buffer, part.start, bits(words))))
}

/// `W[row] . prologue(x)` of every row, and the part of the residual stream that the task stores.
fn products(
    context: Context<'_>,
    p: &MatvecParams,
    matrix: &Packed<'_>,
    rows: &Rows,
) -> Result<(Vec<f32>, Option<Store>), Fault> {
    let scaled = |product: f32, scale: Option<f64>| {
        scale.map_or(product, |scale| (f64::from(product) * scale) as f32)
    };
    let Some((memo, wave)) = context.products else {
        let Operand { x, scale, stream, .. } = operand(context, p, matrix)?;
        let product = |row| scaled(matrix.dot_row(row, &x), scale);
        let rows_per_task = (TASK_MACS / x.len().max(1)).max(1);
        let rows = (rows.row0..rows.row1).into_par_iter().with_min_len(rows_per_task);
        return Ok((rows.map(product).collect(), stream_store(context, p, &stream)?));
    };
    let shared =
        wave.operand((context.step.device, context.task), p, || operand(context, p, matrix));
    let Operand { x, scale, stream, known } = shared.as_ref().as_ref().map_err(|fault| *fault)?;
    if let Some(known) = known {
        // Outside of the wave's lock: a thread that waits for the thread pool may take up another task of the wave.
        matrix.fill(memo, x, known);
    }
    let product = |row| match known {
        Some(known) => matrix.dot_row_known(row, x, known),
        None => matrix.dot_row(row, x),
    };
    // Most are cached, which leaves too little work to parallelise.
    let y = (rows.row0..rows.row1).map(|row| scaled(product(row), *scale)).collect();
    Ok((y, stream_store(context, p, stream)?))
}

/// Applies the epilogue and returns the stores. `weights`: of rows whose slots have them.
fn finish(
    context: Context<'_>,
    p: &MatvecParams,
    rows: &Rows,
    mut y: Vec<f32>,
    weights: &[f32],
) -> Result<Vec<Store>, Fault> {
    let out = context.writes(0)?;
    match epilogue(p)? {
        Epilogue::Store => Ok(vec![(out, rows.row0, bits(&y))]),
        Epilogue::Residual => {
            let residual = context.read(3, rows.row0, rows.len())?;
            for (y, residual) in y.iter_mut().zip(residual) {
                *y += Defect::residual(context.defect, residual);
            }
            Ok(vec![(out, rows.row0, bits(&y))])
        }
        Epilogue::SiluMul => {
            let tile = UNIT_ROWS as usize;
            if !p.tile0.is_multiple_of(2) || !y.len().is_multiple_of(2 * tile) {
                return Err(Fault::Parameter { name: "tiles", value: p.tiles });
            }
            let function = Activation::new(p.activation)
                .ok_or(Fault::Parameter { name: "activation", value: p.activation })?;
            let (limit, one) = match function {
                Activation::ClampedSilu => (p.cap, 1.0),
                Activation::Silu | Activation::GeluTanh => (f32::INFINITY, 0.0),
            };
            let gated = |gate: f32, up: f32| {
                let gate = Defect::activation(context.defect, function, gate.min(limit));
                gate * (up.clamp(-limit, limit) + one)
            };
            let pairs = y.chunks_exact(2 * tile).map(|pair| pair.split_at(tile));
            let mut h: Vec<f32> = pairs
                .flat_map(|(gate, up)| gate.iter().zip(up).map(|(&gate, &up)| gated(gate, up)))
                .collect();
            let weights = weights.chunks_exact(2 * tile).flat_map(|pair| &pair[..tile]);
            h.iter_mut().zip(weights).for_each(|(h, weight)| *h *= weight);
            // The last tile may be padded where the MLP's width is not a multiple of 8.
            let start = rows.row0 / 2;
            h.truncate(context.memory.words(out).saturating_sub(start) as usize);
            Ok(vec![(out, start, bits(&h))])
        }
        Epilogue::Logits => {
            let cap = (p.cap != 0.0).then_some(p.cap);
            y.iter_mut().for_each(|y| *y = capped(cap, *y));
            let best = argmax(&y);
            let candidate = vec![y[best as usize].to_bits(), rows.row0 + best];
            let at = p
                .candidate
                .checked_mul(2)
                .ok_or(Fault::Parameter { name: "candidate", value: p.candidate })?;
            Ok(vec![(out, rows.row0, bits(&y)), (context.writes(1)?, at, candidate)])
        }
    }
}
