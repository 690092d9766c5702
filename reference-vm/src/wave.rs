//! Operands that tasks of one wave share.
//!
//! The tasks of a wave read memory before any of them writes, so two with the same operands and parameters multiply
//! with the same vector. It is read, normed and looked up once. The key has all of its inputs; nothing outlives the
//! wave.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use abi::{MatvecParams, Opcode};
use ir::BufferId;
use ir::program::Task;

use crate::packed::Known;
use crate::trap::Fault;

/// The vector that a matvec multiplies its rows with.
pub(crate) struct Operand {
    pub(crate) x: Vec<f32>,
    /// Factor of each product.
    pub(crate) scale: Option<f64>,
    /// The residual stream after the block that ends here, for the prologue `post_norm`; else empty.
    pub(crate) stream: Vec<f32>,
    /// Cached products, if the machine may use them.
    pub(crate) known: Option<Known>,
}

type Shared = Arc<Result<Operand, Fault>>;

/// The device, all reads, and all parameters except those that select a task's rows.
type Key = (u32, [u32; 16], [Option<BufferId>; abi::READS_MAX]);

#[derive(Default)]
pub(crate) struct Wave {
    operands: Mutex<BTreeMap<Key, Arc<OnceLock<Shared>>>>,
}

impl Wave {
    /// The operand of a task, computed by `make` for the first of those that share it.
    pub(crate) fn operand(
        &self,
        (device, task): (u32, &Task),
        p: &MatvecParams,
        make: impl FnOnce() -> Result<Operand, Fault>,
    ) -> Shared {
        let rows = MatvecParams { tile0: 0, tiles: 0, candidate: 0, ..*p };
        let key = (device, Task::new(Opcode::Matvec, 0, rows).params, task.reads);
        let mut operands = self.operands.lock().unwrap_or_else(PoisonError::into_inner);
        let place = operands.entry(key).or_default().clone();
        drop(operands);
        place.get_or_init(|| Arc::new(make())).clone()
    }
}
