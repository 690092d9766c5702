//! The reference VM as a device process: the process that a soak kills if there is no card.

use std::sync::Arc;

use ir::KernelConfig;
use ir::program::{Program, Verified};
use reference_vm::Order;
use reference_vm::machine::{Machine, Run};
use remote::{Board, Served, Watch};
use search::{DeviceError, DeviceInfo, Handle, Plan};

use crate::Subject;

/// One program, and one sequence at a time, which is all that a device must hold.
struct Reference<'a> {
    subject: &'a Subject,
    program: Option<Arc<Verified<Program>>>,
    fed: Vec<u32>,
}

fn fault(reason: impl ToString) -> DeviceError {
    DeviceError::Fault { reason: reason.to_string() }
}

impl Served for Reference<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: "reference VM".to_owned(),
            bandwidth: None,
            cache_bytes: 0,
            ..DeviceInfo::default()
        }
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        _kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.program = Some(program.clone());
        self.fed.clear();
        Ok(Handle(0))
    }

    fn run(
        &mut self,
        _program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        let program = self.program.clone().ok_or_else(|| fault("no program"))?;
        let vocab = self.subject.model.graph.vocab as usize;
        if first > self.fed.len() || self.fed[..first] != tokens[..first] {
            return Err(fault(format!("no sequence of {first} positions to go on with")));
        }
        let (graph, weights) = (&self.subject.model.graph, &*self.subject.model.weights);
        let mut machine = Machine::new(&program, graph, weights).map_err(fault)?;
        let rows = match machine.run(tokens, Order::Waves).map_err(fault)? {
            Run::Finished(outputs) => outputs,
            halted @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                self.fed.clear();
                return Err(fault(search::Rejection::Halted(halted)));
            }
        };
        self.fed = tokens.to_vec();
        let new = &rows.logits[first..];
        for (row, place) in new.iter().zip(logits.chunks_mut(vocab)) {
            place.copy_from_slice(row);
        }
        Ok(rows.tokens[first..].to_vec())
    }

    fn time(
        &mut self,
        _programs: [Handle; 2],
        _plan: &Plan<'_>,
        _last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        Err(fault("the reference VM is not timed"))
    }

    fn release(&mut self, _program: Handle) {}
}

/// There is no kernel to observe.
struct Nothing;

impl Watch for Nothing {
    fn look(&mut self, _board: &Board) {}

    fn leave(&mut self) {}
}

/// Runs programs on the reference VM for the parent that started this process.
pub(super) fn serve(subject: &Subject) {
    let open = |_: &Board| Ok(Reference { subject, program: None, fed: Vec::new() });
    remote::serve(Nothing, open).unwrap();
}
