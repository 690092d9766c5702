//! Chooses experts by their logits.

use abi::{RouteParams, Scoring};

use super::{Context, Effects, reserved};
use crate::memory::Span;
use crate::packed::Packed;
use crate::trap::Fault;

pub(super) fn inputs(context: Context<'_>, p: &RouteParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    Ok(vec![context.span(0, p.first, p.experts)?])
}

/// The numbers of the chosen experts, the largest logit first, and their weights.
pub(super) fn fire(context: Context<'_>, p: &RouteParams) -> Result<Effects, Fault> {
    let scoring =
        Scoring::new(p.scoring).ok_or(Fault::Parameter { name: "scoring", value: p.scoring })?;
    if p.slots == 0 || p.slots > p.experts {
        return Err(Fault::Parameter { name: "slots", value: p.slots });
    }
    let logits = context.read(0, p.first, p.experts)?;
    let order = ranked(&logits);
    let (chosen, all) = (&order[..p.slots as usize], &order[..]);
    let best = f64::from(logits[order[0]]);
    let above = |&expert: &usize| (f64::from(logits[expert]) - best).exp();
    let total: f64 = match scoring {
        Scoring::All => all.iter().map(above).sum(),
        Scoring::Chosen => chosen.iter().map(above).sum(),
        Scoring::Sigmoid => 1.0,
    };
    let weight = |expert: &usize| match scoring {
        Scoring::All | Scoring::Chosen => above(expert) / total,
        Scoring::Sigmoid => 1.0 / (1.0 + (-f64::from(logits[*expert])).exp()),
    };
    let numbers = chosen.iter().map(|&expert| expert as f32);
    let words: Vec<f32> =
        numbers.chain(chosen.iter().map(|expert| weight(expert) as f32)).collect();
    Ok(Effects::store(context.writes(0)?, 0, &words))
}

/// Experts by rank: the largest logit first, of equal ones the first expert.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order
}

/// A route as a product reads it: the expert and the weight of each slot.
pub(super) struct Route(Vec<(u32, f32)>);

impl Route {
    /// The words of a task's route, if it has one.
    pub(super) fn span(context: Context<'_>) -> Result<Option<Span>, Fault> {
        let Some(buffer) = context.task.reads[4] else { return Ok(None) };
        context.span(4, 0, context.memory.words(buffer)).map(Some)
    }

    /// The words of the logits that a task's loader ranks the experts by, if it does.
    pub(super) fn logits(context: Context<'_>, experts: u32) -> Result<Option<Span>, Fault> {
        context.task.reads[5].map(|_| context.span(5, 0, experts)).transpose()
    }

    /// The route of a task, if it has one, over the experts of this matrix. Where the loader ranks them, its numbers are
    /// what is multiplied.
    pub(super) fn read(context: Context<'_>, matrix: &Packed<'_>) -> Result<Option<Self>, Fault> {
        let Some(span) = Self::span(context)? else { return Ok(None) };
        let words = context.read(4, 0, span.len)?;
        let (numbers, weights) = words.split_at(words.len() / 2);
        let loaded = match Self::logits(context, matrix.experts())? {
            Some(span) => ranked(&context.read(5, 0, span.len)?),
            None => Vec::new(),
        };
        let slot = |(slot, (&number, &weight)): (usize, (&f32, &f32))| {
            let (value, experts) = (number as u32, matrix.experts());
            if value >= experts || value as f32 != number {
                return Err(Fault::NoExpert { slot: slot as u32, value, experts });
            }
            Ok((loaded.get(slot).map_or(value, |&expert| expert as u32), weight))
        };
        let slots = numbers.iter().zip(weights).enumerate().map(slot);
        slots.collect::<Result<_, _>>().map(|slots| Some(Self(slots)))
    }

    /// The expert of each slot.
    pub(super) fn experts(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|&(expert, _)| expert)
    }

    pub(super) fn slots(&self) -> u32 {
        self.0.len() as u32
    }

    /// The row of a matrix behind row `row` of the slots' rows, one after the other, and the slot's weight.
    pub(super) fn row(&self, matrix: &Packed<'_>, row: u32) -> (u32, f32) {
        let each = matrix.expert_rows();
        let (expert, weight) = self.0[(row / each) as usize];
        (expert * each + row % each, weight)
    }

    /// The row of each slot's expert, and the slot's weight.
    pub(super) fn rows(&self, matrix: &Packed<'_>, row: u32) -> impl Iterator<Item = (u32, f32)> {
        let each = matrix.expert_rows();
        self.0.iter().map(move |&(expert, weight)| (expert * each + row, weight))
    }
}
