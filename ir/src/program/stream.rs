//! The load stream: what a worker's tasks take from its weight ring, in execution order.
//!
//! The stream is derived from the tasks, so it cannot disagree with them. The cost model times it, the host resolves
//! its addresses, and the device copies it into the ring.

use abi::{AttentionParams, Epilogue, MatvecParams, Params};

use super::staging::{Staging, Stagings};
use super::{Program, Task, Worker};
use crate::id::{BufferId, MatrixId};

/// What one task takes from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Whole tiles of a matrix.
    Weights {
        /// The matrix.
        matrix: MatrixId,
        /// First unit within the matrix.
        unit0: u64,
        /// Units.
        units: u32,
        /// Where they lie if a route decides: `unit0` is then counted among those of all slots.
        selection: Option<Selection>,
    },
    /// The keys and values of a head that one split attends to. Their number depends on the position.
    Cache {
        /// The key/value cache.
        buffer: BufferId,
        /// Key/value head.
        kv_head: u32,
        /// Keys per block of a split.
        kv_block: u32,
        /// Sliding window, zero for full attention.
        window: u32,
        /// The task's split.
        split: u32,
        /// Splits of the head.
        splits: u32,
    },
}

/// Where a load's units are among experts. Unit `u`, counted among those of all slots, is of slot `u / segment % slots`,
/// and unit `u / (segment * slots) * segment + u % segment` of the expert that has this rank among the logits, as the
/// route has it too. Logits change addresses only: how many units a load has, and of which stages, is the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The experts' logits, by which the loader ranks them.
    pub logits: BufferId,
    /// Units that lie one after the other before the next slot's.
    pub segment: u32,
    /// Slots of the route.
    pub slots: u32,
}

impl Program {
    /// What a task takes from its worker's ring, if anything.
    #[must_use]
    pub fn load(&self, task: &Task) -> Option<Load> {
        match task.op() {
            Params::Matvec(p) => Some(Load::Weights {
                matrix: MatrixId(p.matrix),
                unit0: u64::from(p.tile0) * u64::from(p.units),
                units: p.tiles.saturating_mul(p.units),
                selection: self.selection(task, p),
            }),
            Params::Attention(p) => {
                let &AttentionParams { kv_head, kv_block, window, split, splits, .. } = p;
                let buffer = task.writes[1]?;
                Some(Load::Cache { buffer, kv_head, kv_block, window, split, splits })
            }
            Params::Nop(_)
            | Params::Embed(_)
            | Params::AttentionMerge(_)
            | Params::Sample(_)
            | Params::Norm(_)
            | Params::Route(_) => None,
        }
    }

    /// How a route decides where a product's units lie, if it does: there is no choice of one expert.
    fn selection(&self, task: &Task, p: &MatvecParams) -> Option<Selection> {
        let matrix = self.matrices.get(p.matrix as usize).filter(|matrix| matrix.experts > 1)?;
        let route = task.reads[4]?;
        let slots = self.buffers.get(route.index())?.words / 2;
        let logits = task.reads[5]?;
        let segment = match p.epilogue == Epilogue::SiluMul as u32 {
            true => p.units.saturating_mul(matrix.expert_rows() / abi::UNIT_ROWS),
            false => matrix.units_per_tile(),
        };
        Some(Selection { logits, segment, slots })
    }

    /// The loads of a worker's tasks, in the order in which they are consumed.
    pub fn stream<'p>(&'p self, worker: &'p Worker) -> impl Iterator<Item = Load> + 'p {
        worker.tasks.iter().filter_map(|task| self.load(task))
    }

    /// How tiles lie in the stages of the ring, in a kernel with this many sequences.
    #[must_use]
    pub fn stagings(&self, sequences: u32) -> Stagings {
        let scaled = self.matrices.iter().any(|m| m.format.unit_bytes() > abi::UNIT_BYTES);
        let group = self.matrices.iter().map(|matrix| matrix.format.operand_units()).max();
        let stage_units = self.pipeline.stage_units;
        Stagings { stage_units, scaled, sequences, group: group.unwrap_or(1) }
    }
}

impl Program {
    /// Bytes of weights that a load brings. Keys and values are not counted, since their number depends on the position.
    #[must_use]
    pub fn weight_bytes(&self, load: Load) -> u64 {
        match load {
            Load::Weights { units, matrix, .. } => {
                u64::from(units) * u64::from(self.matrices[matrix.index()].format.unit_bytes())
            }
            Load::Cache { .. } => 0,
        }
    }

    /// Bytes of a stage of the ring.
    #[must_use]
    pub fn stage_bytes(&self) -> u32 {
        let longest = self.matrices.iter().map(|matrix| matrix.format.unit_bytes()).max();
        self.pipeline.stage_units * longest.unwrap_or(abi::UNIT_BYTES)
    }
}

/// The reason why the device cannot count the stages of tiles of this many units, if it cannot, in a kernel of one
/// sequence. Scales behind units change layouts of small tiles only, which it can count.
pub(super) fn uncountable(program: &Program, tile: u32) -> Option<String> {
    uncounted(tile, Staging::new(tile, program.pipeline.stage_units, false))
}

/// The same of a layout.
pub(super) fn uncounted(tile: u32, staging: Staging) -> Option<String> {
    let Staging { period, stage_units, .. } = staging;
    let fits = period <= u32::from(u16::MAX) && stage_units <= u32::from(u8::MAX);
    (!fits).then(|| {
        format!(
            "tiles of {} units in stages of {}: tiles of at most {} units and stages of {} are possible; change pipeline.stage_bytes",
            tile,
            stage_units,
            u16::MAX,
            u8::MAX
        )
    })
}

#[cfg(test)]
mod tests {
    use abi::{MatvecParams, NopParams, Opcode};

    use super::*;

    #[test]
    fn products_take_tiles_and_attention_takes_a_cache() {
        let matvec = MatvecParams { matrix: 2, tile0: 3, tiles: 4, units: 5, ..Default::default() };
        let attention = AttentionParams {
            kv_head: 1,
            kv_block: 64,
            window: 7,
            split: 2,
            splits: 3,
            ..Default::default()
        };
        let mut attends = Task::new(Opcode::Attention, 0, attention);
        attends.writes[1] = Some(BufferId(9));
        let worker = Worker {
            tasks: vec![
                Task::new(Opcode::Nop, 0, NopParams::default()),
                attends,
                Task::new(Opcode::Matvec, 0, matvec),
            ],
        };
        let cache = Load::Cache {
            buffer: BufferId(9),
            kv_head: 1,
            kv_block: 64,
            window: 7,
            split: 2,
            splits: 3,
        };
        let weights = Load::Weights { matrix: MatrixId(2), unit0: 15, units: 20, selection: None };
        let program = Program::default();
        assert_eq!(program.stream(&worker).collect::<Vec<_>>(), [cache, weights]);
    }
}
