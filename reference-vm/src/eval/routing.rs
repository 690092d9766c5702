//! Routes that an evaluation takes: the graph's own or given ones, and a record of them.

use super::Evaluator;
use super::experts::BoundExperts;
use crate::routes::{Routed, Routes};

/// The given routes, and the record.
#[derive(Default)]
pub(super) struct Routing {
    /// The routes to take from a position on.
    pub(super) given: Option<(usize, Routes)>,
    /// Of each layer with experts, what was chosen at each recorded position and by which logits.
    pub(super) record: Option<Vec<Vec<Choice>>>,
}

/// A set of experts and the logits of all.
pub(super) type Choice = (Vec<u32>, Vec<f32>);

/// Chooses the experts of one layer.
pub(super) struct Router<'r> {
    pub(super) routing: &'r mut Routing,
    /// The layer, counted among those with experts.
    pub(super) layer: usize,
    /// The position of row zero.
    pub(super) first: usize,
}

impl Router<'_> {
    pub(super) fn choose(
        &mut self,
        experts: &BoundExperts<'_>,
        row: usize,
        logits: &[f32],
    ) -> Vec<(usize, f32)> {
        let position = self.first + row;
        let given = self
            .routing
            .given
            .as_ref()
            .and_then(|(first, routes)| routes.set(position.checked_sub(*first)?, self.layer));
        let chosen = experts.choose(logits, given);
        if let Some(record) = &mut self.routing.record {
            let numbers = given.map_or_else(
                || chosen.iter().map(|&(number, _)| number as u32).collect(),
                <[u32]>::to_vec,
            );
            if record.len() <= self.layer {
                record.resize_with(self.layer + 1, Vec::new);
            }
            record[self.layer].push((numbers, logits.to_vec()));
        }
        chosen
    }
}

impl Evaluator<'_> {
    /// Takes these routes instead of its own at the positions from `first` on that they cover. Whether they could be its
    /// own is for the caller to judge, from [`routed`](Self::routed).
    #[must_use]
    pub fn on_routes(mut self, first: usize, routes: Routes) -> Self {
        self.routing.given = Some((first, routes));
        self
    }

    /// Keeps the routes of the positions fed from now on, and the logits behind them.
    #[must_use]
    pub fn recording_routes(mut self) -> Self {
        self.routing.record = Some(Vec::new());
        self
    }

    /// The recorded routes; none for a model without experts.
    #[must_use]
    pub fn routed(&self) -> Option<Routed> {
        let record = self.routing.record.as_ref().filter(|layers| !layers.is_empty())?;
        let sizes = self.expert_layers().map(|(_, experts)| experts.top_k).collect();
        let mut routed = Routed { routes: Routes::new(record.len()), logits: Vec::new(), sizes };
        for position in 0..record[0].len() {
            let choices = || record.iter().filter_map(|layer| layer.get(position));
            routed.routes.push(choices().map(|(set, _)| set.clone()));
            routed.logits.extend(choices().map(|(_, logits)| logits.clone()));
        }
        Some(routed)
    }
}
