//! The program: the result of lowering a schedule, executed by both VMs.
//!
//! A program is position-free: token, position and number of keys are run-time values of the step. Each worker has a
//! queue of tasks. The sequence of loads that these take from its weight ring is its [stream](Worker::stream). Workers
//! synchronise only through counters and flag-in-data buffers, so a program whose accesses are all ordered by those
//! gives the same result in every execution order.

mod access;
mod packed;
mod rules;
pub mod smem;
pub mod staging;
mod stream;
mod topology;
mod verify;

pub use access::{Accesses, Region, accesses, read_late, stream_part};
pub use packed::{
    PackedAttention, PackedLayer, PackedMatrix, PackedMlp, PackedModel, PackedRouter,
};
pub use rules::order::Order;
pub use rules::words::Unordered;
pub use stream::{Load, Selection};
pub use topology::{DEVICES_MAX, Topology};
pub use verify::{
    Seal, SealKey, Together, Unsealed, Verified, check, check_seqs, unordered, verify, window_reads,
};

use std::ops::Range;

use abi::{BufferKind, Opcode};
use serde::{Deserialize, Serialize};

use crate::format::Format;
use crate::graph::{DType, Graph};
use crate::id::{BufferId, CounterId, MatrixId, TensorId};
use crate::kv::KvDtype;
use crate::phase::PhaseClass;
use crate::program::smem::Vectors;

/// Maps rows of a packed matrix, or elements of a packed vector, to stored tensors.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowMap {
    /// The tensors, with the rows that each contributes. `None` stands for zeros (a missing bias).
    pub parts: Vec<(Option<TensorId>, u32)>,
    /// False: the parts are concatenated. True: tiles of 8 rows of each two parts (gate and up) alternate.
    pub interleaved: bool,
}

impl RowMap {
    /// The map of one whole tensor.
    #[must_use]
    pub fn single(tensor: TensorId, rows: u32) -> Self {
        Self { parts: vec![(Some(tensor), rows)], interleaved: false }
    }

    /// Number of rows, with each part of an interleaved map padded to whole tiles.
    #[must_use]
    pub fn rows(&self) -> u32 {
        if self.interleaved {
            self.parts.iter().map(|&(_, rows)| rows.next_multiple_of(abi::UNIT_ROWS)).sum()
        } else {
            self.parts.iter().map(|&(_, rows)| rows).sum()
        }
    }

    /// The tensor and row of packed row `row`; `None` for padding or zeros.
    #[must_use]
    pub fn locate(&self, row: u32) -> Option<(TensorId, u32)> {
        self.locate_among(0..self.parts.len(), row)
    }

    /// As [`locate`](Self::locate), for a row counted from the first of these parts, such as those of one expert.
    #[must_use]
    pub fn locate_among(&self, parts: Range<usize>, row: u32) -> Option<(TensorId, u32)> {
        let (mut row, parts) = (row, self.parts.get(parts)?);
        if self.interleaved {
            for pair in parts.chunks(2) {
                let of_pair = |rows: u32| rows.next_multiple_of(abi::UNIT_ROWS) * pair.len() as u32;
                let all = pair.first().map_or(0, |&(_, rows)| of_pair(rows));
                if row < all {
                    let (tile, inner) = (row / abi::UNIT_ROWS, row % abi::UNIT_ROWS);
                    let parts = pair.len() as u32;
                    let (tensor, rows) = pair[(tile % parts) as usize];
                    let source = tile / parts * abi::UNIT_ROWS + inner;
                    return tensor.filter(|_| source < rows).map(|tensor| (tensor, source));
                }
                row -= all;
            }
            return None;
        }
        for &(tensor, rows) in parts {
            if row < rows {
                return tensor.map(|t| (t, row));
            }
            row -= rows;
        }
        None
    }
}

/// A packed matrix: tiles of 8 rows, each a run of units of 8 rows by 64 bytes. The packing depends on the graph alone, so every
/// schedule streams the same bytes and a new program needs no repacking.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Matrix {
    /// Such as `layers.3.qkv`.
    pub name: String,
    /// Where the rows come from.
    pub map: RowMap,
    /// Elements of a row.
    pub cols: u32,
    /// Element format.
    pub format: Format,
    /// Experts, whose rows lie one after the other; 1 for any other matrix.
    pub experts: u32,
}

impl Matrix {
    /// Rows without the padding of the last tile.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.map.rows()
    }

    /// Tiles of 8 rows, the last padded.
    #[must_use]
    pub fn tiles(&self) -> u32 {
        self.rows().div_ceil(abi::UNIT_ROWS)
    }

    /// Rows of each expert.
    #[must_use]
    pub fn expert_rows(&self) -> u32 {
        self.rows() / self.experts.max(1)
    }

    /// Units of one tile along a row, the last padded.
    #[must_use]
    pub fn units_per_tile(&self) -> u32 {
        self.format.units_per_tile(self.cols)
    }

    /// Units of the whole matrix.
    #[must_use]
    pub fn units(&self) -> u64 {
        u64::from(self.tiles()) * u64::from(self.units_per_tile())
    }

    /// Bytes of a tile.
    #[must_use]
    pub fn tile_bytes(&self) -> usize {
        self.units_per_tile() as usize * self.format.unit_bytes() as usize
    }

    /// Bytes of the packed matrix.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.units() * u64::from(self.format.unit_bytes())
    }
}

/// The contents of a buffer before the first step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BufferSource {
    /// Nothing: tasks write it.
    Scratch,
    /// Stored tensors, as f32.
    Vector(RowMap),
    /// A rotary table of the graph, by the number that layers name it by.
    Rotary(u32),
    /// The key/value cache of a layer.
    KvCache {
        /// The layer.
        layer: u32,
    },
    /// The rows of a packed matrix, selected by the step's token.
    Embedding(MatrixId),
}

/// A buffer that tasks name by index.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Buffer {
    /// Such as `layers.3.h`.
    pub name: String,
    /// The addressing mode on the device.
    pub kind: BufferKind,
    /// Elements; for a key/value cache those of one session.
    pub words: u32,
    /// Initial contents.
    pub source: BufferSource,
    /// Byte offset in the activation arena, for `plain` and `flag_in_data` scratch buffers; 128-byte aligned.
    pub offset: u64,
}

impl Buffer {
    /// Bytes in the activation arena (zero for buffers that live elsewhere).
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        match self.kind {
            BufferKind::Plain | BufferKind::FlagInData => u64::from(self.words) * 4,
            BufferKind::Constant
            | BufferKind::KvCache
            | BufferKind::KvCacheE4m3
            | BufferKind::Embedding
            | BufferKind::Logits => 0,
        }
    }
}

/// Waits until `counter` has had `count` arrivals in this epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Wait {
    /// The counter.
    pub counter: CounterId,
    /// Arrivals per epoch; must be all of them.
    pub count: u32,
}

/// One task of a worker's queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Task {
    /// The op.
    pub opcode: Opcode,
    /// Layer, for reports; the layer count for what follows the last layer.
    pub layer: u16,
    /// Buffers read; the op's documentation says which is which.
    pub reads: [Option<BufferId>; abi::READS_MAX],
    /// Buffers written.
    pub writes: [Option<BufferId>; abi::WRITES_MAX],
    /// Counters waited for before anything is read.
    pub waits: Vec<Wait>,
    /// Counter that gains one after all stores.
    pub signal: Option<CounterId>,
    /// Parameters, to be read through [`Task::params`].
    pub params: [u32; 16],
}

impl Task {
    /// A task with these parameters and nothing else.
    #[must_use]
    pub fn new<P: bytemuck::Pod>(opcode: Opcode, layer: u16, params: P) -> Self {
        const { assert!(size_of::<P>() == abi::PARAM_BYTES) };
        Self {
            opcode,
            layer,
            reads: [None; abi::READS_MAX],
            writes: [None; abi::WRITES_MAX],
            waits: Vec::new(),
            signal: None,
            params: bytemuck::cast(params),
        }
    }

    /// The parameters as the op's struct. The caller names the struct that fits `opcode`.
    #[must_use]
    pub fn params<P: bytemuck::Pod>(&self) -> P {
        const { assert!(size_of::<P>() == abi::PARAM_BYTES) };
        bytemuck::cast(self.params)
    }

    /// The parameters by the op that they are of.
    #[must_use]
    pub fn op(&self) -> abi::Params<'_> {
        abi::Params::new(self.opcode, &self.params)
    }
}

/// The work partition of one persistent thread block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Worker {
    /// Tasks, in the order in which they run.
    pub tasks: Vec<Task>,
}

/// The weight ring of each worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pipeline {
    /// Units of a stage, a power of two.
    pub stage_units: u32,
    /// Stages.
    pub stages: u32,
    /// Most stages in flight at once.
    pub in_flight: u32,
    /// Most stages in flight during the last stages before a wait, until the wait has ended.
    pub in_flight_before_wait: u32,
}

/// The dimensions of the graph that programs depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Width of the widest MLP; of experts all that a position has together.
    pub ffn: u32,
    /// Rows of the logits.
    pub vocab: u32,
    /// Layers.
    pub layers: u32,
    /// Element type of the tensor cores' operands.
    pub dtype: DType,
}

impl Dims {
    /// Elements of the longest vector that a matrix is multiplied with.
    #[must_use]
    pub fn longest_vector(&self) -> u32 {
        self.hidden.max(self.heads.saturating_mul(self.head_dim)).max(self.ffn)
    }

    /// Whether the kernel multiplies with one half of f16 of a vector's elements, so that the ring is longer: if some vector
    /// is long. Mixtures, whose routes follow small differences, get both halves. Same as ONE_HALF in
    /// vm-device/cuda/prelude.cuh.
    #[must_use]
    pub fn one_half(&self, experts: bool) -> bool {
        self.dtype == DType::F16 && self.operand(DType::Bf16, experts) == DType::F16
    }

    /// The type that matrices of these floats are multiplied in: their own; or f16 for bf16 where some vector is long, of
    /// which one half of f16 is enough, where bf16 takes two.
    #[must_use]
    pub fn operand(&self, stored: DType, experts: bool) -> DType {
        let long = self.longest_vector() > abi::TWO_HALVES_MAX;
        if stored == DType::Bf16 && long && !experts { DType::F16 } else { stored }
    }
}

impl From<&Graph> for Dims {
    fn from(graph: &Graph) -> Self {
        Self {
            hidden: graph.hidden,
            heads: graph.heads,
            kv_heads: graph.kv_heads,
            head_dim: graph.head_dim,
            ffn: graph.ffn_width(),
            vocab: graph.vocab,
            layers: graph.layers.len() as u32,
            dtype: graph.dtype,
        }
    }
}

/// What schedules are looked up by: the dimensions of a graph, the element type of its codes, and whether it has experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GraphShape {
    /// The dimensions.
    #[serde(flatten)]
    pub dims: Dims,
    /// Element type of the matrices that are codes, if some are ([`Graph::codes`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<DType>,
    /// Whether layers have experts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub experts: bool,
}

impl From<&Graph> for GraphShape {
    fn from(graph: &Graph) -> Self {
        let experts = graph.has_experts();
        Self { dims: Dims::from(graph), codes: graph.codes(), experts }
    }
}

/// The default topology in postcard: one device, no replicated buffer.
const ONE_DEVICE: [u8; 2] = [1, 0];

/// A lowered program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Program {
    /// Name of the model, for reports.
    pub model: String,
    /// Shapes.
    pub dims: Dims,
    /// Tokens of a session's key/value cache.
    pub kv_capacity: u32,
    /// The weight ring.
    pub pipeline: Pipeline,
    /// Packed matrices.
    pub matrices: Vec<Matrix>,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Number of counters.
    pub counters: u32,
    /// Bytes of the activation arena.
    pub arena_bytes: u64,
    /// Workers, each with its queue of tasks.
    pub workers: Vec<Worker>,
    /// The devices that the workers are on.
    pub topology: Topology,
}

impl Program {
    /// Tasks of all workers.
    #[must_use]
    pub fn task_len(&self) -> usize {
        self.workers.iter().map(|w| w.tasks.len()).sum()
    }

    /// The name of a task's phase in knobs, predictions and traces. A task in no phase has the name of its matrix or
    /// op.
    #[must_use]
    pub fn phase_name(&self, task: &Task) -> &str {
        let matrix = |p: abi::MatvecParams| self.matrices.get(p.matrix as usize);
        let matrix = (task.opcode == Opcode::Matvec).then(|| matrix(task.params())).flatten();
        let part = matrix.and_then(|matrix| matrix.name.rsplit('.').next());
        let part = if part == Some("embed") { Some("lm_head") } else { part }; // tied
        let mut classes = PhaseClass::ALL.iter();
        let class = classes.find(|c| c.opcode() == task.opcode && c.matrix() == part);
        class.map_or(part.unwrap_or(task.opcode.info().name), |class| class.name())
    }

    /// Weight bytes that one step streams.
    #[must_use]
    pub fn stream_bytes(&self) -> u64 {
        let loads = self.workers.iter().flat_map(|worker| self.stream(worker));
        loads.map(|load| self.weight_bytes(load)).sum()
    }

    /// The longest vectors that its matrices are multiplied with.
    #[must_use]
    pub fn vectors(&self) -> Vectors {
        let experts = self.matrices.iter().any(|matrix| matrix.experts > 1);
        let matrices = self.matrices.iter().map(|matrix| (matrix.cols, matrix.format));
        Vectors::new(&self.dims, experts, matrices)
    }

    /// Key/value bytes that one step at `position` reads on the device.
    #[must_use]
    pub fn kv_bytes(&self, position: u32) -> u64 {
        let dims = &self.dims;
        let rows = 2 * u64::from(dims.layers) * u64::from(dims.kv_heads);
        let row_bytes = self.kv_dtype().row_bytes(dims.head_dim);
        rows * (u64::from(position) + 1) * u64::from(row_bytes)
    }

    /// Element type of its key/value caches: all have the same ([`Rule::KCache`](crate::Rule::KCache)).
    #[must_use]
    pub fn kv_dtype(&self) -> KvDtype {
        let mut kinds = self.buffers.iter().map(|buffer| KvDtype::of_buffer(buffer.kind));
        kinds.find_map(|dtype| dtype).unwrap_or_default()
    }

    /// The program in postcard. One of a single device ends with its workers, as before there were several.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, postcard::Error> {
        let mut bytes = postcard::to_stdvec(self)?;
        if self.topology == Topology::default() {
            bytes.truncate(bytes.len() - ONE_DEVICE.len());
        }
        Ok(bytes)
    }

    /// The program that [`to_bytes`](Self::to_bytes) wrote.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, postcard::Error> {
        let whole = [bytes, &ONE_DEVICE].concat();
        match postcard::take_from_bytes::<Self>(&whole)? {
            (program, []) => Ok(program),
            (program, rest) if rest == ONE_DEVICE && program.topology != Topology::default() => {
                Ok(program)
            }
            (_, [..]) => Err(postcard::Error::DeserializeBadEncoding),
        }
    }

    /// The stable id of the program: equal programs have equal ids on every machine.
    #[must_use]
    pub fn id(&self) -> String {
        let bytes = self.to_bytes().unwrap_or_default();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&abi::program_hash().to_le_bytes());
        hasher.update(&bytes);
        hasher.finalize().to_hex()[..16].to_string()
    }
}

/// Active splits of the keys of one head group: every active split has at least one block.
///
/// `keys` is the number of keys attended to: `position + 1`, or the window if that is smaller.
#[must_use]
pub fn active_splits(keys: u32, kv_block: u32, splits: u32) -> u32 {
    keys.div_ceil(kv_block).min(splits)
}

/// The keys that split `split` of `active` attends to, as a range relative to the first attended key. A split has whole
/// blocks, and the last block ends at `keys`; the newest key is always in the last active split.
#[must_use]
pub fn split_range(keys: u32, kv_block: u32, active: u32, split: u32) -> std::ops::Range<u32> {
    let blocks = keys.div_ceil(kv_block);
    let start = (u64::from(blocks) * u64::from(split) / u64::from(active)) as u32 * kv_block;
    let end = (u64::from(blocks) * u64::from(split + 1) / u64::from(active)) as u32 * kv_block;
    start.min(keys)..end.min(keys)
}

/// The query heads of an attention task: those of part `part` of a key/value head's `group` query heads, counted from the
/// group's first.
#[must_use]
pub fn part_heads(group: u32, part: u32) -> std::ops::Range<u32> {
    let at = |part: u32| part.saturating_mul(abi::ATTENTION_GROUP).min(group);
    at(part)..at(part.saturating_add(1))
}

/// Parts that a group of this many query heads has.
#[must_use]
pub fn group_parts(group: u32) -> u32 {
    group.div_ceil(abi::ATTENTION_GROUP)
}

/// Number of keys attended to at `position` with this window (zero: all).
#[must_use]
pub fn attended(position: u32, window: u32) -> u32 {
    if window == 0 { position + 1 } else { (position + 1).min(window) }
}
