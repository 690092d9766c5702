//! The load stream: what a worker's tasks take from its weight ring, in execution order.
//!
//! The stream is derived from the tasks, so it cannot disagree with them. The cost model times it, the host resolves
//! its addresses, and the device copies it into the ring.

use abi::{AttentionParams, Params};

use super::staging::Staging;
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

impl Task {
    /// What the task takes from its worker's ring, if anything.
    #[must_use]
    pub fn load(&self) -> Option<Load> {
        match self.op() {
            Params::Matvec(p) => Some(Load::Weights {
                matrix: MatrixId(p.matrix),
                unit0: u64::from(p.tile0) * u64::from(p.units),
                units: p.tiles.saturating_mul(p.units),
            }),
            Params::Attention(p) => {
                let &AttentionParams { kv_head, kv_block, window, split, splits, .. } = p;
                let buffer = self.writes[1]?;
                Some(Load::Cache { buffer, kv_head, kv_block, window, split, splits })
            }
            Params::Nop(_)
            | Params::Embed(_)
            | Params::AttentionMerge(_)
            | Params::Sample(_)
            | Params::Norm(_) => None,
        }
    }
}

impl Worker {
    /// The loads of all tasks, in the order in which they are consumed.
    pub fn stream(&self) -> impl Iterator<Item = Load> + '_ {
        self.tasks.iter().filter_map(Task::load)
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

    /// The layout of a matrix's tiles in the stages of the ring, in a kernel with this many sequences.
    #[must_use]
    pub fn staging(&self, matrix: MatrixId, sequences: u32) -> Staging {
        let tile_units = self.matrices[matrix.index()].units_per_tile();
        match sequences {
            1 => Staging::new(tile_units, self.pipeline.stage_units),
            _ => Staging::seqs(tile_units, self.pipeline.stage_units),
        }
    }
}

/// The reason why the device cannot count the stages of a matrix in a kernel with this many sequences, if it cannot.
pub(super) fn uncountable(program: &Program, matrix: MatrixId, sequences: u32) -> Option<String> {
    let Staging { period, stage_units, .. } = program.staging(matrix, sequences);
    let fits = period <= u32::from(u16::MAX) && stage_units <= u32::from(u8::MAX);
    (!fits).then(|| {
        format!(
            "tiles of {} units in stages of {}: tiles of at most {} units and stages of {} are possible; change pipeline.stage_bytes",
            program.matrices[matrix.index()].units_per_tile(),
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
        let weights = Load::Weights { matrix: MatrixId(2), unit0: 15, units: 20 };
        assert_eq!(worker.stream().collect::<Vec<_>>(), [cache, weights]);
    }
}
