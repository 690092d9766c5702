//! The graph's values on the experts that a run chose, where rounding explains each choice.

use std::sync::{Arc, Mutex, PoisonError};

use ir::{Graph, Weights};
use reference_vm::compare::Tolerance;
use reference_vm::eval::{EvalError, Evaluator, Logits};
use reference_vm::machine::Machine;
use reference_vm::routes::{RoutePlace, Routed, Routes, places};

use crate::device::Ran;
use crate::expected::{Expected, Segment};
use crate::gate::Gate;
use crate::rejection::{ExpectedError, Rejection};

/// Rows of logits, one for each position.
pub(crate) type Rows = Arc<Vec<Vec<f32>>>;

/// Evaluations that are kept: those of the incumbent, of a candidate, and of their first stages.
const KEPT: usize = 4;

/// The graph's own routes over the gate's tokens, and how far a device's router logits may be from the graph's.
#[derive(Clone, Debug)]
pub(crate) struct OwnRoutes {
    pub(crate) routes: Routed,
    pub(crate) on_device: Tolerance,
}

/// The last evaluations on routes of devices.
#[derive(Debug, Default)]
pub(crate) struct Followed(Mutex<Vec<(Routes, Evaluated)>>);

/// The graph on a device's routes.
#[derive(Clone, Debug)]
struct Evaluated {
    rows: Rows,
    /// Choices that the graph would have made otherwise there.
    strays: usize,
}

impl Followed {
    fn known(&self, routes: &Routes) -> Option<Evaluated> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(of, _)| of == routes).map(|(_, known)| known.clone())
    }

    fn keep(&self, routes: &Routes, evaluated: Evaluated) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(0, (routes.clone(), evaluated));
        kept.truncate(KEPT);
    }
}

impl Gate<'_> {
    /// The expected logits of a run from position zero on, if its routes differ from the graph's own.
    pub(crate) fn followed(&self, ran: &Ran) -> Result<Option<Rows>, Rejection> {
        let (Some(routes), Some(own)) = (&ran.routes, &self.expected().routes) else {
            return Ok(None);
        };
        if routes.begins(&own.routes.routes) {
            return Ok(None);
        }
        if let Some(known) = self.followed.known(routes) {
            return Ok(Some(known.rows));
        }
        let tokens = &self.expected().tokens[..routes.positions()];
        let evaluated = self.evaluated_on(tokens, routes, None)?;
        let rows = evaluated.rows.clone();
        self.followed.keep(routes, evaluated);
        Ok(Some(rows))
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
        let rows = self.evaluated_on(tokens, routes, positions)?.rows;
        Ok(Arc::unwrap_or_clone(rows))
    }

    fn evaluated_on(
        &self,
        tokens: &[u32],
        routes: &Routes,
        positions: Option<&[usize]>,
    ) -> Result<Evaluated, Rejection> {
        let cpu = &self.ahead.cpu;
        let evaluator = Evaluator::new(cpu.graph, cpu.weights).map_err(unevaluated)?;
        let mut evaluator = evaluator.on_routes(0, routes.clone()).recording_routes();
        let rows = match positions {
            None => evaluator.run(tokens, Logits::All),
            Some(positions) => evaluator.run_at(tokens, positions),
        };
        let (rows, mut strays) = (Arc::new(rows.map_err(unevaluated)?), 0);
        if let (Some(routed), Some(own)) = (evaluator.routed(), &self.expected().routes) {
            let explained = own.on_device.explains(&routed);
            explained.map_err(|at| Rejection::Disagreed { by: "device", at })?;
            strays = routed.strays();
        }
        Ok(Evaluated { rows, strays })
    }

    /// What is to be said of a run's routes: the number that the graph would not have taken.
    pub(crate) fn said_of_routes(&self, ran: &Ran) -> Option<String> {
        let (routes, own) = ran.routes.as_ref().zip(self.expected().routes.as_ref())?;
        let all = routes.positions() * routes.layers();
        if routes.begins(&own.routes.routes) {
            return Some(format!("all {all} choices of experts are the graph's"));
        }
        let Evaluated { strays, .. } = self.followed.known(routes)?;
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
