//! The ops of a layer with experts one at a time, as `ops.rs` has the others: on a program's own route.

use super::experts::{BoundExperts, clamped_product, sigmoid};
use super::ops::{Belongs, added, greatest};
use super::{BoundFeedForward, BoundGated, Evaluator, activate};

impl Evaluator<'_> {
    fn experts(&self, layer: usize) -> Option<&BoundExperts<'_>> {
        match &self.layers[layer].mlp.body {
            BoundFeedForward::Experts(experts) => Some(experts),
            BoundFeedForward::Gated(_) => None,
        }
    }

    fn normed(&self, layer: usize, x: &[f32]) -> Vec<f32> {
        self.layers[layer].mlp.normed(self.graph, self.rounding, x)
    }

    /// The logits of the experts, and behind them that of the shared one's gate.
    pub(crate) fn router(&self, layer: usize, x: &[f32]) -> Option<Belongs> {
        let experts = self.experts(layer)?;
        let h = self.normed(layer, x);
        let gate = experts.shared.iter().flat_map(|shared| shared.gate.apply(&h));
        Some(Belongs::sums(experts.router.apply(&h).into_iter().chain(gate).collect()))
    }

    /// The numbers of the chosen experts and their weights, or those of the shared one.
    pub(crate) fn route(&self, layer: usize, logits: &[f32], shared: bool) -> Option<Belongs> {
        let experts = self.experts(layer)?;
        let (logits, gate) = logits.split_at_checked(experts.experts.len())?;
        let chosen =
            if shared { vec![(0, sigmoid(*gate.first()?))] } else { experts.choose(logits, None) };
        let numbers = chosen.iter().map(|(number, _)| *number as f32);
        let values: Vec<f32> = numbers.chain(chosen.iter().map(|(_, weight)| *weight)).collect();
        let scales = (0..values.len()).map(|word| if word < chosen.len() { 0.0 } else { 1.0 });
        Some(Belongs { scales: scales.collect(), values })
    }

    /// The first half of every slot's expert times its weight, each filled up with zeros; or of the shared one.
    pub(crate) fn routed_hidden(
        &self,
        layer: usize,
        x: &[f32],
        route: &[f32],
        shared: bool,
    ) -> Option<Belongs> {
        let experts = self.experts(layer)?;
        let (h, width) = (self.normed(layer, x), self.slot_width(layer, shared)?);
        let (numbers, weights) = route.split_at(route.len() / 2);
        let mut belongs = Belongs::default();
        for (number, weight) in numbers.iter().zip(weights) {
            let (mlp, clamped) = match shared {
                true => (&experts.shared.as_ref()?.mlp, None),
                false => (experts.experts.get(*number as usize)?, experts.clamped),
            };
            let [gate, up] = mlp.gate_up(&h);
            let scale = (greatest(&gate) * (greatest(&up) + 1.0) * weight).abs();
            let product = |(&gate, &up): (&f32, &f32)| match clamped {
                Some(clamped) => clamped_product(clamped, gate, up),
                None => activate(self.graph.activation, gate) * up,
            };
            let end = belongs.values.len() + width;
            belongs.values.extend(gate.iter().zip(&up).map(|pair| product(pair) * weight));
            belongs.values.resize(end, 0.0);
            belongs.scales.resize(end, scale);
        }
        Some(belongs)
    }

    /// The residual stream `x` with the second half of the chosen experts, or of the shared one, for their first halves.
    pub(crate) fn after_experts(
        &self,
        layer: usize,
        x: &[f32],
        (hidden, route): (&[f32], &[f32]),
    ) -> Option<Belongs> {
        let experts = self.experts(layer)?;
        let (numbers, weights) = route.split_at(route.len() / 2);
        let mut sums = vec![0.0; x.len()];
        let slots = numbers.iter().zip(weights).zip(hidden.chunks(self.slot_width(layer, false)?));
        for ((number, weight), hidden) in slots {
            let mlp = experts.experts.get(*number as usize)?;
            // The weight is in the first half, but not in the bias.
            let bias = mlp.down.bias.as_deref().unwrap_or(&[]);
            let mut out = self.second_half(mlp, hidden)?;
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += (weight - 1.0) * bias);
            sums.iter_mut().zip(out).for_each(|(sum, out)| *sum += out);
        }
        Some(added(x, sums))
    }

    /// The residual stream `x` with the second half of the shared expert.
    pub(crate) fn after_shared(&self, layer: usize, x: &[f32], hidden: &[f32]) -> Option<Belongs> {
        let shared = self.experts(layer)?.shared.as_ref()?;
        Some(added(x, self.second_half(&shared.mlp, hidden)?))
    }

    fn second_half(&self, mlp: &BoundGated<'_>, hidden: &[f32]) -> Option<Vec<f32>> {
        Some(mlp.contract(self.rounding, hidden.get(..mlp.gate.weight.rows())?.to_vec()))
    }

    /// Words of each slot's hidden layer.
    fn slot_width(&self, layer: usize, shared: bool) -> Option<usize> {
        let ir::FeedForward::Experts(experts) = &self.graph.layers[layer].mlp.body else {
            return None;
        };
        Some(match shared {
            true => experts.shared?.ffn as usize,
            false => self.graph.expert_width(experts) as usize,
        })
    }

    /// Words of a layer's router logits, and of the hidden layers of the chosen experts and of the shared one.
    pub(crate) fn routed_words(&self, layer: usize) -> Option<[usize; 3]> {
        let experts = self.experts(layer)?;
        let logits = experts.experts.len() + usize::from(experts.shared.is_some());
        let hidden = experts.top_k * self.slot_width(layer, false)?;
        Some([logits, hidden, self.slot_width(layer, true).unwrap_or(0)])
    }
}
