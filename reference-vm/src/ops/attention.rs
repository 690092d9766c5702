//! Attention of a part of one key/value head's query group over one split of the keys. The first part of the split that
//! has the newest key appends it.

use abi::AttentionParams;
use ir::program::{Dims, part_heads, split_range};
use ir::{BufferId, KvDtype};

use super::{Context, Effects, Splits, bits, product, reserved};
use crate::codes::to_e4m3;
use crate::defect::{Defect, Rotated, WindowDefect};
use crate::math::{capped, dot, rms_norm, softmax_parts};
use crate::memory::{Append, Span, Step};
use crate::trap::Fault;

/// Offsets of this task's rows in qkv.
struct Layout {
    q: u32,
    k: u32,
    v: u32,
    /// The task's first query head, and how many it has.
    head: u32,
    count: u32,
    /// Query heads of the model.
    heads: u32,
}

impl Layout {
    fn new(p: &AttentionParams, dims: Dims) -> Result<Self, Fault> {
        let checks = [
            ("kv_heads", p.kv_heads, p.kv_heads == dims.kv_heads),
            ("kv_head", p.kv_head, p.kv_head < dims.kv_heads),
            ("group", p.group, p.group == dims.heads / dims.kv_heads.max(1)),
            ("head_dim", p.head_dim, p.head_dim == dims.head_dim),
            ("part", p.part, !part_heads(p.group, p.part).is_empty()),
        ];
        if let Some(&(name, value, _)) = checks.iter().find(|(_, _, holds)| !holds) {
            return Err(Fault::Parameter { name, value });
        }
        let heads = p.kv_heads * p.group;
        let part = part_heads(p.group, p.part);
        let (head, count) = (p.kv_head * p.group + part.start, part.len() as u32);
        let k = (heads + p.kv_head) * p.head_dim;
        Ok(Self { q: head * p.head_dim, k, v: k + p.kv_heads * p.head_dim, head, count, heads })
    }
}

/// The parameters of the sequence's own program, in which the splits are rotated (`ir::program::Together`).
fn rotated(context: Context<'_>, p: &AttentionParams) -> AttentionParams {
    match context.step.seq {
        0 => *p,
        seq => AttentionParams { split: (p.split + seq) % p.splits.max(1), ..*p },
    }
}

/// The sequences of the window, up to this one, whose position is one of this task's keys: their rows are new in this step,
/// and their words hold them, not the cache. The last one is this sequence if the split has the newest key.
fn fresh<'m>(
    context: Context<'m>,
    p: &AttentionParams,
    splits: Splits,
) -> impl Iterator<Item = Context<'m>> {
    let first = context.step.position + 1 - splits.keys;
    let range = split_range(splits.keys, p.kv_block, splits.active, p.split);
    let Step { seq, before, .. } = context.step;
    let seqs = (seq - before..=seq).map(move |seq| context.in_seq(seq));
    seqs.filter(move |of| {
        of.step.position.checked_sub(first).is_some_and(|key| range.contains(&key))
    })
}

pub(super) fn inputs(context: Context<'_>, p: &AttentionParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    let p = &rotated(context, p);
    let splits = Splits::new(context.step, p.window, p.kv_block, p.splits)?;
    if p.split >= splits.active {
        return Ok(Vec::new());
    }
    let at = Layout::new(p, context.memory.dims())?;
    let mut spans = vec![context.span(0, at.q, at.count * p.head_dim)?];
    for of in fresh(context, p, splits) {
        spans.push(of.span(0, at.k, p.head_dim)?);
        spans.push(of.span(0, at.v, p.head_dim)?);
    }
    Ok(spans)
}

pub(super) fn fire(context: Context<'_>, p: &AttentionParams) -> Result<Effects, Fault> {
    let p = &rotated(context, p);
    let splits = Splits::new(context.step, p.window, p.kv_block, p.splits)?;
    let at = Layout::new(p, context.memory.dims())?;
    let stride = p.head_dim + abi::PARTIAL_HEADER;
    let head = product("split", p.split, at.heads)? + at.head;
    let start = product("split", head, stride)?;
    if p.split >= splits.active {
        // The words are written even so, so that no word of an earlier step can be taken for a later one's.
        let nothing = vec![0; product("part", at.count, stride)? as usize];
        let writes = vec![(context.writes(0)?, start, nothing)];
        return Ok(Effects { writes, ..Effects::default() });
    }
    let queries =
        shaped(context, p, context.read(0, at.q, at.count * p.head_dim)?, Rotated::Queries)?;
    let cache = context.writes(1)?;
    let rows = fresh(context, p, splits)
        .map(|of| Ok((of.step.position, new_row(context, of, p, (&at, cache))?)))
        .collect::<Result<Vec<(u32, Append)>, Fault>>()?;

    let first = context.step.position + 1 - splits.keys;
    let range = split_range(splits.keys, p.kv_block, splits.active, p.split);
    let key_value = |position: u32| match rows.iter().find(|(at, _)| *at == position) {
        Some(_)
            if position != context.step.position
                && context.window_defect == Some(WindowDefect::StaleRows) =>
        {
            context.memory.stale(cache, p.kv_head, position)
        }
        Some((_, row)) => Ok((&row.key[..], &row.value[..])),
        None => context.memory.key_value(cache, p.kv_head, position, context.step),
    };
    let mut keys = range.map(|key| key_value(first + key)).collect::<Result<Vec<_>, _>>()?;
    Defect::keys(context.defect, &mut keys);
    let mut out = Vec::new();
    let newest = rows.last().is_some_and(|(position, _)| *position == context.step.position);
    let sinks = context.read_optional(4, at.head, at.count)?.filter(|_| newest);
    for (head, query) in queries.chunks_exact(p.head_dim as usize).enumerate() {
        let sink = sinks.as_ref().map(|sinks| f64::from(sinks[head]));
        partial(query, &keys, sink, p, &mut out);
    }
    let out = Defect::partials(context.defect, out, stride as usize);
    drop(keys);
    let append = rows
        .into_iter()
        .next_back()
        .filter(|_| newest && p.part == 0)
        .map(|(_, append)| Defect::append(context.defect, append, p.kv_heads));
    let writes = vec![(context.writes(0)?, start, bits(&out))];
    Ok(Effects { writes, append, ..Effects::default() })
}

/// Heads after norm and rotation, at the position of a sequence's step.
fn shaped(
    of: Context<'_>,
    p: &AttentionParams,
    x: Vec<f32>,
    which: Rotated,
) -> Result<Vec<f32>, Fault> {
    let words = of.task.reads[3].map_or(0, |table| of.memory.words(table));
    let table = of.read(3, 0, words)?;
    let norm = of.read_optional(which.norm(), 0, p.head_dim)?;
    let turned = (&table[..], p.head_dim);
    let rotation = Defect::rotation(of.defect, which, of.step.position, turned);
    let mut out = x.clone();
    let heads = x.chunks_exact(p.head_dim as usize);
    for (x, out) in heads.zip(out.chunks_exact_mut(p.head_dim as usize)) {
        if let Some(norm) = &norm {
            rms_norm(x, norm, p.eps, out);
        }
        rotation.apply(out);
    }
    Ok(out)
}

/// The new key and value of the sequence `of`, as they are in its row of the cache.
fn new_row(
    context: Context<'_>,
    of: Context<'_>,
    p: &AttentionParams,
    (at, cache): (&Layout, BufferId),
) -> Result<Append, Fault> {
    let from = if context.window_defect == Some(WindowDefect::OwnRows) { context } else { of };
    let at_position =
        if context.window_defect == Some(WindowDefect::OwnPosition) { context } else { of };
    let mut key = shaped(at_position, p, from.read(0, at.k, p.head_dim)?, Rotated::Keys)?;
    let mut value = from.read(0, at.v, p.head_dim)?;
    if context.memory.kv_dtype() == KvDtype::E4m3 {
        to_e4m3(&mut key);
        to_e4m3(&mut value);
    }
    Ok(Append { buffer: cache, kv_head: p.kv_head, key, value })
}

/// Appends one query's greatest score, sum of exponentials and weighted mean of the values to
/// `out`. A sink is a score whose value is zero.
fn partial(
    query: &[f32],
    keys: &[(&[f32], &[f32])],
    sink: Option<f64>,
    p: &AttentionParams,
    out: &mut Vec<f32>,
) {
    let cap = (p.cap != 0.0).then_some(p.cap);
    let score = |key: &[f32]| f64::from(capped(cap, dot(query, key) * p.scale));
    let mut weights: Vec<f64> = keys.iter().map(|(key, _)| score(key)).chain(sink).collect();
    let (greatest, total) = softmax_parts(&mut weights);
    out.extend([greatest as f32, total as f32, 0.0, 0.0]);
    let mut sums = vec![0f64; query.len()];
    for (weight, (_, values)) in weights.into_iter().zip(keys) {
        for (sum, &value) in sums.iter_mut().zip(*values) {
            *sum += weight * f64::from(value);
        }
    }
    out.extend(sums.into_iter().map(|sum| (sum / total) as f32));
}
