//! Combines the partial results of the active splits of some heads.

use abi::AttentionMergeParams;

use super::{Context, Effects, Splits, product, reserved};
use crate::memory::{Span, Step};
use crate::trap::Fault;

/// The partials of some heads, and their number of splits.
#[derive(Clone, Copy)]
pub(super) struct Partials {
    pub(super) head0: u32,
    pub(super) heads: u32,
    pub(super) heads_total: u32,
    pub(super) head_dim: u32,
    pub(super) splits: u32,
    pub(super) kv_block: u32,
    pub(super) window: u32,
}

impl Partials {
    /// The words of the active splits, one span per split. Inactive splits have no words of this step.
    pub(super) fn spans(self, context: Context<'_>, step: Step) -> Result<Vec<Span>, Fault> {
        let Splits { active, .. } = Splits::new(step, self.window, self.kv_block, self.splits)?;
        let stride = self
            .head_dim
            .checked_add(abi::PARTIAL_HEADER)
            .ok_or(Fault::Parameter { name: "head_dim", value: self.head_dim })?;
        let len = product("heads", self.heads, stride)?;
        let span = |split: u32| {
            let head = product("heads_total", self.heads_total, split)?.checked_add(self.head0);
            let head = head.ok_or(Fault::Parameter { name: "head0", value: self.head0 })?;
            context.span(0, product("head0", head, stride)?, len)
        };
        (0..active).map(span).collect()
    }

    /// The heads' results, `[heads, head_dim]`.
    pub(super) fn merge(self, context: Context<'_>) -> Result<Vec<f32>, Fault> {
        let read = |span: Span| context.memory.read(span, context.step, context.packed);
        let splits: Vec<Vec<f32>> =
            self.spans(context, context.step)?.into_iter().map(read).collect::<Result<_, _>>()?;
        let (head_dim, stride) =
            (self.head_dim as usize, (self.head_dim + abi::PARTIAL_HEADER) as usize);
        let mut out = Vec::with_capacity(self.heads as usize * head_dim);
        for head in 0..self.heads as usize {
            let of_head = || {
                splits.iter().map(|split| {
                    split[head * stride..][..stride].split_at(abi::PARTIAL_HEADER as usize)
                })
            };
            let greatest = of_head().map(|(stats, _)| stats[0]).fold(f32::NEG_INFINITY, f32::max);
            let mut sums = vec![0f64; head_dim];
            let mut total = 0f64;
            for (stats, values) in of_head() {
                let weight =
                    f64::from(stats[1]) * (f64::from(stats[0]) - f64::from(greatest)).exp();
                total += weight;
                for (sum, &value) in sums.iter_mut().zip(values) {
                    *sum += weight * f64::from(value);
                }
            }
            out.extend(sums.into_iter().map(|sum| (sum / total) as f32));
        }
        Ok(out)
    }
}

fn partials(p: &AttentionMergeParams) -> Partials {
    Partials {
        head0: p.head0,
        heads: p.heads,
        heads_total: p.heads_total,
        head_dim: p.head_dim,
        splits: p.splits,
        kv_block: p.kv_block,
        window: p.window,
    }
}

pub(super) fn inputs(context: Context<'_>, p: &AttentionMergeParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    partials(p).spans(context, context.step)
}

pub(super) fn fire(context: Context<'_>, p: &AttentionMergeParams) -> Result<Effects, Fault> {
    let merged = partials(p).merge(context)?;
    Ok(Effects::store(context.writes(0)?, product("head0", p.head0, p.head_dim)?, &merged))
}
