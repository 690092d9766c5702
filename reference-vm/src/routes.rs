//! The experts that a run chose, and whether rounding explains a choice that differs from the graph's.
//!
//! A route is a step function of its logits: where two experts are nearer to each other than rounding moves them,
//! either choice is right, and what follows belongs to the choice. So a run's values are compared with the graph's on
//! the run's own routes, and each route with the logits that the graph has for it.

use ir::BufferId;
use ir::program::Program;

use abi::{Params, Scoring};

/// The experts chosen at consecutive positions: for each position one set for each layer with experts, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Routes {
    layers: usize,
    sets: Vec<Vec<u32>>,
}

impl Routes {
    /// No positions, of a model with this many layers of experts.
    #[must_use]
    pub fn new(layers: usize) -> Self {
        Self { layers, sets: Vec::new() }
    }

    /// Adds a position: the numbers of the chosen experts of each layer, in any order.
    pub fn push(&mut self, position: impl IntoIterator<Item = Vec<u32>>) {
        let sorted = |mut set: Vec<u32>| {
            set.sort_unstable();
            set
        };
        self.sets.extend(position.into_iter().map(sorted));
    }

    /// Positions.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.sets.len() / self.layers.max(1)
    }

    /// Layers with experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// The experts of a layer, counted among those with experts, at a position.
    #[must_use]
    pub fn set(&self, position: usize, layer: usize) -> Option<&[u32]> {
        self.sets.get(position * self.layers + layer).map(Vec::as_slice)
    }

    /// Adds the positions of a run that went on.
    pub fn extend(&mut self, more: Self) {
        self.sets.extend(more.sets);
    }

    /// Whether these are the first positions of `other`.
    #[must_use]
    pub fn begins(&self, other: &Self) -> bool {
        other.sets.starts_with(&self.sets)
    }
}

/// The routes of an evaluation and the logits that they were chosen by, a row for each set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// The routes.
    pub routes: Routes,
    /// The logits of all experts.
    pub logits: Vec<Vec<f32>>,
    /// The number of experts that each layer chooses.
    pub sizes: Vec<usize>,
}

/// The route that its logits explain least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stray {
    /// The position, from the first of the routes.
    pub position: usize,
    /// The layer, counted among those with experts.
    pub layer: usize,
    /// How far the best expert left out is above the worst one chosen, as a share of the greatest logit's magnitude.
    pub gap: f64,
}

impl Routed {
    /// Distance of the logits behind the same routes, as [`distance`](crate::compare::distance) has it.
    #[must_use]
    pub fn distance(&self, other: &Self) -> f64 {
        let [own, other] = [self, other].map(|routed| routed.logits.iter().map(Vec::as_slice));
        crate::compare::distance(own, other)
    }

    /// The number of routes at the first positions that do not choose the best experts.
    #[must_use]
    pub fn strays(&self, positions: usize) -> usize {
        let routes = positions * self.routes.layers;
        self.gaps().take(routes).filter(|gap| *gap > 0.0).count()
    }

    /// The route with the greatest gap; its gap is zero if all of them choose the best experts.
    #[must_use]
    pub fn worst(&self) -> Stray {
        let mut worst = Stray::default();
        for (index, gap) in self.gaps().enumerate() {
            if gap > worst.gap {
                let layers = self.routes.layers.max(1);
                worst = Stray { position: index / layers, layer: index % layers, gap };
            }
        }
        worst
    }

    /// The gap of each route.
    fn gaps(&self) -> impl Iterator<Item = f64> {
        let sets = self.routes.sets.iter().zip(&self.logits).zip(self.sizes.iter().cycle());
        sets.map(
            |((set, logits), size)| {
                if set.len() == *size { gap(set, logits) } else { f64::INFINITY }
            },
        )
    }
}

/// How far the best logit outside the set is above the worst within, as a share of the greatest magnitude. Infinite for
/// a set that names an expert twice or one that does not exist, and for logits that are no numbers.
fn gap(set: &[u32], logits: &[f32]) -> f64 {
    let twice = set.windows(2).any(|pair| pair[0] == pair[1]);
    let broken = logits.iter().any(|logit| !logit.is_finite());
    if twice || broken || set.iter().any(|&expert| expert as usize >= logits.len()) {
        return f64::INFINITY;
    }
    let (mut within, mut outside) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut greatest = 0f64;
    for (expert, &logit) in logits.iter().enumerate() {
        let logit = f64::from(logit);
        greatest = greatest.max(logit.abs());
        match set.binary_search(&(expert as u32)) {
            Ok(_) => within = within.min(logit),
            Err(_) => outside = outside.max(logit),
        }
    }
    let gap = outside - within;
    if gap <= 0.0 { 0.0 } else { gap / greatest }
}

/// Where a program keeps a route: the numbers of its experts, then as many weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutePlace {
    /// The layer.
    pub layer: u16,
    /// The buffer.
    pub buffer: BufferId,
}

impl RoutePlace {
    /// The experts in the buffer's words.
    #[must_use]
    pub fn experts(words: &[f32]) -> Vec<u32> {
        words[..words.len() / 2].iter().map(|&number| number as u32).collect()
    }
}

/// The routes of a program by layer, without those of shared experts, which choose nothing.
#[must_use]
pub fn places(program: &Program) -> Vec<RoutePlace> {
    let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
    let place = |task: &ir::program::Task| {
        let Params::Route(params) = task.op() else { return None };
        let chooses = params.scoring != Scoring::Sigmoid as u32;
        let buffer = task.writes[0].filter(|_| chooses)?;
        Some(RoutePlace { layer: task.layer, buffer })
    };
    let mut places: Vec<RoutePlace> = tasks.filter_map(place).collect();
    places.sort_by_key(|place| place.layer);
    places.dedup();
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(sets: &[&[u32]]) -> Routes {
        let mut routes = Routes::new(1);
        sets.iter().for_each(|set| routes.push([set.to_vec()]));
        routes
    }

    #[test]
    fn a_route_of_the_best_experts_has_no_gap_and_another_has_its_distance() {
        let logits = vec![1.0, -4.0, 0.9, 0.5];
        let worst = |set: &[u32]| {
            Routed {
                routes: routes(&[&[0, 2], set]),
                logits: vec![logits.clone(); 2],
                sizes: vec![2],
            }
            .worst()
        };
        assert_eq!(worst(&[2, 0]), Stray::default());
        let logits_of = || vec![logits.clone(); 2];
        let strays = |sets: &[&[u32]]| {
            Routed { routes: routes(sets), logits: logits_of(), sizes: vec![2] }.strays(2)
        };
        assert_eq!([strays(&[&[0, 2], &[2, 0]]), strays(&[&[0, 3], &[0, 1]])], [0, 2]);
        let near = worst(&[0, 3]);
        assert_eq!((near.position, near.layer), (1, 0));
        assert!((near.gap - 0.1).abs() < 1e-7, "{near:?}");
        assert!((worst(&[1, 3]).gap - 1.25).abs() < 1e-7);
        for nonsense in [&[0, 0][..], &[0, 4], &[0], &[], &[0, 1, 2]] {
            assert_eq!(worst(nonsense).gap, f64::INFINITY);
        }
        let logits = vec![vec![f32::NAN, 1.0]];
        let broken = Routed { routes: routes(&[&[0]]), logits, sizes: vec![1] };
        assert_eq!(broken.worst().gap, f64::INFINITY, "a logit that is no number explains nothing");
    }

    #[test]
    fn routes_are_sets_and_have_prefixes() {
        let (one, two) = (routes(&[&[3, 1]]), routes(&[&[1, 3], &[0, 2]]));
        assert!(one.begins(&two) && !two.begins(&one));
        assert_eq!((two.positions(), two.set(1, 0)), (2, Some(&[0, 2][..])));
        let mut longer = one;
        longer.extend(routes(&[&[2, 0]]));
        assert_eq!(longer, two);
    }
}
