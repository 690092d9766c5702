//! Route rules: a product with a route reads one that a `route` writes, over as many experts as its matrix has. So every
//! number that it holds is one of an expert, whatever the logits are, and what is proven holds for each route. Where its
//! loader ranks the experts itself, it does so by the logits that the route is made by, from the first on.
//!
//! Relies on sound tasks, and on every word being written once.

use abi::{Opcode, RouteParams};
use rustc_hash::FxHashMap;

use crate::id::BufferId;
use crate::program::Program;
use crate::violation::{Rule, Violations};

use super::{buffer_name, tasks};

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    let mut routes: FxHashMap<BufferId, (u32, Option<BufferId>)> = FxHashMap::default();
    for (_, task) in tasks(program).filter(|(_, task)| task.opcode == Opcode::Route) {
        let p: RouteParams = task.params();
        if let Some(buffer) = task.writes[0] {
            routes.insert(buffer, (p.experts, task.reads[0].filter(|_| p.first == 0)));
        }
    }
    for (at, task) in tasks(program).filter(|(_, task)| task.opcode == Opcode::Matvec) {
        let Some(route) = task.reads[4] else { continue };
        let matrix = task.params::<abi::MatvecParams>().matrix as usize;
        let Some(matrix) = program.matrices.get(matrix) else { continue };
        let name = buffer_name(program, route);
        match routes.get(&route) {
            None => found.push(Rule::LRoute, at, format!("{name} is written by no `route`")),
            Some(&(experts, _)) if experts != matrix.experts => {
                let detail = format!(
                    "{name} is a route among {experts} experts, and {} has {}",
                    matrix.name, matrix.experts
                );
                found.push(Rule::LRoute, at, detail);
            }
            Some(&(_, logits)) if task.reads[5].is_some() && task.reads[5] != logits => {
                let detail = format!("{name} is made by other logits than those of its loads");
                found.push(Rule::LRoute, at, detail);
            }
            Some(_) => {}
        }
    }
}
