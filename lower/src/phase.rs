//! The phases of a step, in order: what each multiplies or attends to, and in what blocks it is dealt.

use abi::UNIT_ROWS;
use ir::program::{PackedMatrix, PackedModel};
use ir::schedule::{EmbedGrouping, Handoff, MergeGrouping};
use ir::{Graph, MatrixId, ScheduleConfig};

/// Elements of the embedding row that one task copies, at least: four for each thread of a small worker.
const EMBED_BLOCK: u32 = 512;

/// What a phase does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Embed,
    Qkv,
    Attention,
    Merge,
    OProj,
    GateUp,
    Down,
    LmHead,
    Sample,
}

/// A phase: `items` in blocks of `block`, dealt to the workers.
#[derive(Clone, Debug)]
pub(crate) struct Phase {
    pub(crate) op: Op,
    /// The layer; the number of layers for what follows the last.
    pub(crate) layer: u32,
    /// The matrix that is multiplied.
    pub(crate) matrix: Option<MatrixId>,
    /// Tiles of the matrix; elements of the embedding; (head, split) pairs; heads to merge.
    pub(crate) items: u32,
    /// Items dealt at once.
    pub(crate) block: u32,
    /// Bytes that one item brings to a worker, for balance.
    pub(crate) item_bytes: u64,
    /// How the output is handed over. `None` for `sample`, which has no reader.
    pub(crate) handoff: Option<Handoff>,
}

/// All phases of a step.
pub(crate) fn phases(config: &ScheduleConfig, graph: &Graph, packed: &PackedModel) -> Vec<Phase> {
    let planner = Planner { config, graph, packed };
    let mut list = Vec::new();
    if config.fusion_grouping.embed == EmbedGrouping::Separate {
        list.push(planner.embed());
    }
    for layer in 0..graph.layers.len() as u32 {
        list.push(planner.matvec(Op::Qkv, layer));
        list.push(planner.attention(layer));
        if config.fusion_grouping.merge == MergeGrouping::Separate {
            list.push(planner.merge(layer));
        }
        list.push(planner.matvec(Op::OProj, layer));
        list.push(planner.matvec(Op::GateUp, layer));
        list.push(planner.matvec(Op::Down, layer));
    }
    list.push(planner.matvec(Op::LmHead, graph.layers.len() as u32));
    list.push(Phase { items: 1, ..planner.plain(Op::Sample, graph.layers.len() as u32) });
    list
}

struct Planner<'a> {
    config: &'a ScheduleConfig,
    graph: &'a Graph,
    packed: &'a PackedModel,
}

impl Planner<'_> {
    fn plain(&self, op: Op, layer: u32) -> Phase {
        let sync = &self.config.sync;
        let handoff = match op {
            Op::Embed => Some(sync.embed),
            Op::Qkv => Some(sync.qkv),
            Op::Attention => Some(sync.attention),
            Op::Merge => Some(sync.merge),
            Op::OProj => Some(sync.o_proj),
            Op::GateUp => Some(sync.gate_up),
            Op::Down => Some(sync.down),
            Op::LmHead => Some(Handoff::Counter), // a candidate holds a row, which leaves no room for a tag
            Op::Sample => None,
        };
        Phase { op, layer, matrix: None, items: 0, block: 1, item_bytes: 0, handoff }
    }

    fn embed(&self) -> Phase {
        let item_bytes = self.graph.dtype.bytes() as u64;
        Phase {
            items: self.graph.hidden,
            block: EMBED_BLOCK,
            item_bytes,
            ..self.plain(Op::Embed, 0)
        }
    }

    fn attention(&self, layer: u32) -> Phase {
        let attention = self.config.tiling.attention;
        // The length of the sequence is not known here: one block of keys stands for it.
        let key_bytes = 2 * u64::from(self.graph.head_dim) * self.graph.dtype.bytes() as u64;
        Phase {
            items: self.graph.kv_heads * attention.kv_split,
            item_bytes: key_bytes * u64::from(attention.kv_block),
            ..self.plain(Op::Attention, layer)
        }
    }

    fn merge(&self, layer: u32) -> Phase {
        let splits = u64::from(self.config.tiling.attention.kv_split);
        let item_bytes = splits * (u64::from(self.graph.head_dim) + 2) * 4;
        Phase { items: self.graph.heads, item_bytes, ..self.plain(Op::Merge, layer) }
    }

    fn matvec(&self, op: Op, layer: u32) -> Phase {
        let (tiling, packed) = (&self.config.tiling, self.packed);
        let of = |layer: u32| &packed.layers[layer as usize];
        let (PackedMatrix { id, .. }, rows) = match op {
            Op::Qkv => (&of(layer).attention.qkv, tiling.qkv.rows),
            Op::OProj => (&of(layer).attention.o, tiling.o_proj.rows),
            // Rows of h: each is a gate row and an up row.
            Op::GateUp => (&of(layer).mlp.gate_up, 2 * tiling.gate_up.rows),
            Op::Down => (&of(layer).mlp.down, tiling.down.rows),
            Op::LmHead | Op::Embed | Op::Attention | Op::Merge | Op::Sample => {
                (&packed.lm_head, tiling.lm_head.rows)
            }
        };
        let matrix = &packed.matrices[id.index()];
        Phase {
            matrix: Some(*id),
            items: matrix.tiles(),
            block: rows / UNIT_ROWS,
            item_bytes: u64::from(matrix.units_per_tile()) * u64::from(abi::UNIT_BYTES),
            ..self.plain(op, layer)
        }
    }
}
