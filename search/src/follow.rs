//! The graph's values on the experts that a run chose, where rounding explains each choice.

use std::sync::{Arc, Mutex, PoisonError};

use ir::{Graph, Weights};
use reference_vm::compare::Tolerance;
use reference_vm::eval::{EvalError, Evaluator, Kept, Logits, Sharing};
use reference_vm::machine::Machine;
use reference_vm::routes::{RoutePlace, Routed, Routes, places};

use crate::device::Ran;
use crate::expected::{Expected, Segment};
use crate::gate::Gate;
use crate::rejection::{ExpectedError, Rejection};

/// Rows of logits, one for each position.
pub(crate) type Rows = Arc<Vec<Vec<f32>>>;

/// Bytes of the evaluations that are kept. Schedules that add in one order choose alike, so there are few of them.
const KEPT_BYTES: usize = 1 << 30;

/// Evaluations that are kept whatever their bytes: those of the incumbent and of a candidate.
const KEPT_MIN: usize = 2;

/// The graph's own routes over the gate's tokens, and how far a device's router logits may be from the graph's.
#[derive(Clone, Debug)]
pub(crate) struct OwnRoutes {
    pub(crate) routes: Routed,
    pub(crate) on_device: Tolerance,
    /// What evaluations on other routes take over.
    pub(crate) kept: Option<Arc<Kept>>,
}

/// The last evaluations on routes of devices that rounding explains, the last used first.
#[derive(Debug, Default)]
pub(crate) struct Followed(Mutex<Vec<Arc<Evaluated>>>);

/// The graph on a device's routes.
#[derive(Debug)]
pub(crate) struct Evaluated {
    rows: Rows,
    kept: Kept,
}

impl Evaluated {
    fn routes(&self) -> &Routes {
        &self.kept.routed().routes
    }

    fn bytes(&self) -> usize {
        self.kept.bytes() + self.rows.iter().map(|row| size_of_val(&**row)).sum::<usize>()
    }
}

impl Followed {
    /// The evaluation that begins with these routes.
    fn known(&self, routes: &Routes) -> Option<Arc<Evaluated>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().position(|known| routes.begins(known.routes()))?;
        kept[..=found].rotate_right(1);
        kept.first().cloned()
    }

    fn all(&self) -> Vec<Arc<Evaluated>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn keep(&self, evaluated: Arc<Evaluated>, bytes_max: usize) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A first stage whose candidate went on.
        kept.retain(|known| !known.routes().begins(evaluated.routes()));
        kept.insert(0, evaluated);
        let mut bytes = 0;
        let fits = kept.iter().take_while(|known| {
            bytes += known.bytes();
            bytes <= bytes_max
        });
        let fits = fits.count().max(KEPT_MIN);
        kept.truncate(fits);
    }
}

impl Gate<'_> {
    /// The expected logits of a run from position zero on, and maybe of positions behind it, if its routes differ from
    /// the graph's own.
    pub(crate) fn followed(&self, ran: &Ran) -> Result<Option<Rows>, Rejection> {
        let (Some(routes), Some(own)) = (&ran.routes, &self.expected().routes) else {
            return Ok(None);
        };
        if routes.begins(&own.routes.routes) {
            return Ok(None);
        }
        if let Some(known) = self.followed.known(routes) {
            return Ok(Some(known.rows.clone()));
        }
        let began = (self.clock)();
        let evaluated = self.evaluate_sharing(routes, own);
        self.evaluating.add((self.clock)() - began);
        evaluated.map(Some)
    }

    /// Evaluates the gate's tokens on a device's routes, and keeps the evaluation if rounding explains them.
    fn evaluate_sharing(&self, routes: &Routes, own: &OwnRoutes) -> Result<Rows, Rejection> {
        let (cpu, expected) = (&self.ahead.cpu, self.expected());
        let known = self.followed.all();
        let own_kept = own.kept.iter().map(|kept| Sharing { kept, rows: &expected.logits });
        let others = known.iter().map(|known| Sharing { kept: &known.kept, rows: &known.rows });
        let sharing: Vec<_> = own_kept.chain(others).collect();
        let tokens = expected.tokens.get(..routes.positions()).unwrap_or(&expected.tokens);
        let evaluator = Evaluator::new(cpu.graph, cpu.weights).map_err(unevaluated)?;
        let found = evaluator.run_sharing(tokens, routes, &sharing).map_err(unevaluated)?;
        let rows = Arc::new(found.rows);
        if let Some(kept) = found.kept {
            let explained = own.on_device.explains(kept.routed());
            explained.map_err(|at| Rejection::Disagreed { by: "device", at })?;
            let evaluated = Evaluated { rows: rows.clone(), kept };
            self.followed.keep(Arc::new(evaluated), KEPT_BYTES);
        }
        Ok(rows)
    }

    /// The graph's logits of these tokens on a device's routes, at some positions or at all.
    ///
    /// # Errors
    /// If rounding does not explain a route.
    pub fn follow(
        &self,
        tokens: &[u32],
        routes: &Routes,
        positions: Option<&[usize]>,
    ) -> Result<Vec<Vec<f32>>, Rejection> {
        let cpu = &self.ahead.cpu;
        let evaluator = Evaluator::new(cpu.graph, cpu.weights).map_err(unevaluated)?;
        let mut evaluator = evaluator.on_routes(0, routes.clone()).recording_routes();
        let rows = match positions {
            None => evaluator.run(tokens, Logits::All),
            Some(positions) => evaluator.run_at(tokens, positions),
        };
        let rows = rows.map_err(unevaluated)?;
        if let (Some(routed), Some(own)) = (evaluator.routed(), &self.expected().routes) {
            let explained = own.on_device.explains(&routed);
            explained.map_err(|at| Rejection::Disagreed { by: "device", at })?;
        }
        Ok(rows)
    }

    /// What is to be said of a run's routes: the number that the graph would not have taken.
    pub(crate) fn said_of_routes(&self, ran: &Ran) -> Option<String> {
        let (routes, own) = ran.routes.as_ref().zip(self.expected().routes.as_ref())?;
        let all = routes.positions() * routes.layers();
        if routes.begins(&own.routes.routes) {
            return Some(format!("all {all} choices of experts are the graph's"));
        }
        let strays = self.followed.known(routes)?.kept.routed().strays(routes.positions());
        Some(format!(
            "{strays} of {all} choices of experts are other ones than the graph's, within rounding; expected values are those on the device's choices"
        ))
    }
}

fn unevaluated(error: EvalError) -> Rejection {
    Rejection::Unevaluated(ExpectedError::Eval(error))
}

impl Expected {
    /// The same inputs with the graph's values on the routes of a program that ran them on the reference VM; `None` if
    /// these are the graph's own.
    pub(crate) fn on_routes_of(
        &self,
        graph: &Graph,
        weights: &dyn Weights,
        machine: &mut Machine<'_>,
    ) -> Result<Option<Self>, Rejection> {
        let [near, far] = self.routes_of(machine);
        let is_own = |segment: &Segment, routes: &Routes| {
            segment.routed.as_ref().is_none_or(|own| routes.begins(&own.routes))
        };
        if is_own(&self.near, &near) && self.far.as_ref().is_none_or(|own| is_own(own, &far)) {
            return Ok(None);
        }
        let near = self.near.on_routes(graph, weights, near)?;
        let far = self.far.as_ref().map(|own| own.on_routes(graph, weights, far)).transpose()?;
        Ok(Some(Self { near, far, ..self.clone() }))
    }

    /// The routes of a program's run of the near and of the far segment.
    fn routes_of(&self, machine: &mut Machine<'_>) -> [Routes; 2] {
        let places = places(machine.program());
        let mut taken = [Routes::new(places.len()), Routes::new(places.len())];
        let near = self.near.tokens.len();
        let mut position = 0;
        self.each_position(machine, None, |_, _, fired| {
            let stored = |place: &RoutePlace| {
                let mut writes = fired.iter().flat_map(|task| &task.writes);
                let stored = writes.find(|stored| stored.buffer == place.buffer);
                stored.map_or_else(Vec::new, |stored| RoutePlace::experts(&stored.values))
            };
            taken[usize::from(position >= near)].push(places.iter().map(stored));
            position += 1;
            true
        });
        taken
    }
}

impl Segment {
    /// This segment with the graph's values on these routes.
    fn on_routes(
        &self,
        graph: &Graph,
        weights: &dyn Weights,
        routes: Routes,
    ) -> Result<Self, Rejection> {
        let evaluator = Evaluator::new(graph, weights).map_err(unevaluated)?;
        let mut evaluator = evaluator.on_routes(self.first, routes).recording_routes();
        let (logits, cache) = self.evaluated(&mut evaluator, graph).map_err(unevaluated)?;
        let routed = evaluator.routed();
        if let Some(routed) = &routed {
            self.allowed.routes.explains(routed).map_err(|at| Rejection::Disagreed {
                by: "reference",
                at: at.from_position(self.first),
            })?;
        }
        Ok(Self { logits, cache, routed, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An evaluation on no routes but these, a set for each position.
    fn evaluated(sets: &[u32], bytes: usize) -> Arc<Evaluated> {
        let model = model::import(&::tests::root().join("corpus/families/qwen3-moe-bf16")).unwrap();
        let layers = model.graph.layers.len();
        let mut routes = Routes::new(layers);
        sets.iter().for_each(|&set| routes.push((0..layers).map(|_| vec![set, set + 1])));
        let evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
        let tokens: Vec<u32> = (0..sets.len() as u32).collect();
        let found = evaluator.run_sharing(&tokens, &routes, &[]).unwrap();
        let kept = found.kept.unwrap();
        let rows = Arc::new(vec![vec![0.0; (bytes - kept.bytes()) / size_of::<f32>()]]);
        Arc::new(Evaluated { rows, kept })
    }

    #[test]
    fn evaluations_are_found_by_how_their_routes_begin_and_the_last_used_stay() {
        const EACH: usize = 1 << 20;
        let followed = Followed::default();
        let keep = |sets: &[u32]| followed.keep(evaluated(sets, EACH), 3 * EACH);
        let knows = |sets: &[u32]| {
            let routes = evaluated(sets, EACH).routes().clone();
            followed.known(&routes).map(|known| {
                assert!(routes.begins(known.routes()));
                known.routes().positions()
            })
        };
        keep(&[0, 1]);
        assert_eq!([knows(&[0]), knows(&[0, 1])], [Some(2); 2]);
        assert_eq!([knows(&[1]), knows(&[0, 2]), knows(&[0, 1, 2])], [None; 3]);
        // One that goes on takes the place of its beginning.
        keep(&[0, 1, 2]);
        assert_eq!((knows(&[0, 1]), followed.all().len()), (Some(3), 1));
        keep(&[1]);
        keep(&[2]);
        assert_eq!(knows(&[0, 1, 2]), Some(3));
        keep(&[3]);
        assert_eq!(
            [knows(&[0]), knows(&[1]), knows(&[2]), knows(&[3])].map(|k| k.is_some()),
            [true, false, true, true]
        );
        // A limit below two evaluations leaves two.
        followed.keep(evaluated(&[4], EACH), 1);
        assert_eq!(followed.all().len(), KEPT_MIN);
        assert!(knows(&[4]).is_some());
    }
}
