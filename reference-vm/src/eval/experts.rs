//! Experts: a router chooses some of many MLPs for each position.

use ir::{Clamped, Graph};
use rayon::prelude::*;

use super::routing::Router;
use super::{BoundGated, BoundLinear, Rounding, add};

pub(super) struct BoundExperts<'a> {
    pub(super) router: BoundLinear<'a>,
    pub(super) top_k: usize,
    pub(super) normalised: bool,
    pub(super) experts: Vec<BoundGated<'a>>,
    pub(super) clamped: Option<Clamped>,
    pub(super) shared: Option<BoundShared<'a>>,
}

pub(super) struct BoundShared<'a> {
    pub(super) gate: BoundLinear<'a>,
    pub(super) mlp: BoundGated<'a>,
}

impl BoundExperts<'_> {
    /// What the block adds to the residual stream for normed inputs `h`.
    ///
    /// Each expert's weights are read once for all positions that chose it. A position's sum is in the order of the
    /// experts' numbers, so it does not depend on the other positions.
    pub(super) fn feed_forward(
        &self,
        graph: &Graph,
        rounding: Rounding,
        h: &[f32],
        mut router: Router<'_>,
    ) -> Vec<f32> {
        let hidden = graph.hidden as usize;
        let logits = self.router.apply(h);
        let rows = logits.chunks_exact(self.experts.len()).enumerate();
        let choices: Vec<_> = rows.map(|(row, logits)| router.choose(self, row, logits)).collect();
        // Products of an expert are too small for all threads, so experts run beside each other.
        let parts = self.experts.par_iter().enumerate().map(|(number, expert)| {
            let chosen = choices.iter().enumerate().filter_map(|(position, choice)| {
                let weight = choice.iter().find(|(expert, _)| *expert == number)?.1;
                Some((position, weight))
            });
            let chosen: Vec<_> = chosen.collect();
            let inputs = chosen.iter().flat_map(|(p, _)| h[p * hidden..][..hidden].iter().copied());
            let inputs: Vec<f32> = inputs.collect();
            let outs = match inputs.is_empty() {
                true => inputs,
                false => expert.feed_forward(graph, self.clamped, rounding, &inputs),
            };
            (chosen, outs)
        });
        let mut sums = vec![0.0; h.len()];
        for (chosen, mut outs) in parts.collect::<Vec<_>>() {
            for (out, (position, weight)) in outs.chunks_exact_mut(hidden).zip(chosen) {
                out.iter_mut().for_each(|value| *value *= weight);
                add(&mut sums[position * hidden..][..hidden], out);
            }
        }
        if let Some(shared) = &self.shared {
            let gates = shared.gate.apply(h);
            let mut outs = shared.mlp.feed_forward(graph, None, rounding, h);
            for (out, gate) in outs.chunks_exact_mut(hidden).zip(gates) {
                out.iter_mut().for_each(|value| *value *= sigmoid(gate));
            }
            add(&mut sums, &outs);
        }
        sums
    }

    /// The experts of a position with their weights, the largest logit first: the best ones, or those of `given`.
    pub(super) fn choose(&self, logits: &[f32], given: Option<&[u32]>) -> Vec<(usize, f32)> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let is_chosen = |expert: &usize| given.is_none_or(|set| set.contains(&(*expert as u32)));
        let chosen: Vec<usize> = order.iter().copied().filter(is_chosen).take(self.top_k).collect();
        let best = f64::from(logits[order[0]]);
        let weight = |expert: &usize| (f64::from(logits[*expert]) - best).exp();
        let among = if self.normalised { &chosen } else { &order };
        let total: f64 = among.iter().map(weight).sum();
        chosen.iter().map(|expert| (*expert, (weight(expert) / total) as f32)).collect()
    }
}

/// The product of an expert's halves.
pub(super) fn clamped_product(clamped: Clamped, gate: f32, up: f32) -> f32 {
    let Clamped { limit, alpha } = clamped;
    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
    (up + 1.0) * (gate * sigmoid(alpha * gate))
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
