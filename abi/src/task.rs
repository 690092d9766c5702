//! The program as the device sees it: tasks, load stream, queues, buffers, step state.

use crate::layout::wire_struct;
use crate::limits::{
    DEVICES_MAX, EXCHANGE_SLOTS, READS_STAGED, SEQS_MAX, STOP_TOKENS_MAX, WAITS_MAX, WRITES_MAX,
};
use crate::op::wire_enum;

wire_struct! {
    /// One task: a fixed record of one L2 line.
    amk_task align(16) size(128)
    pub struct Task {
        /// An `Opcode`.
        pub opcode: u16,
        /// Layer, for reports only.
        pub layer: u16,
        /// Waits in use.
        pub wait_len: u8,
        /// For a matvec of one sequence: units of a tile that a warp takes into registers at once with all others of a stage; 0 where tiles are not
        /// taken so.
        pub warp_units: u8,
        /// For a matvec: units of a stage. A tile that is longer lies in several, each full but its last.
        pub stage_units: u8,
        /// For a matvec: tiles of a stage, 1 where a tile lies in several.
        pub stage_tiles: u8,
        /// Counter that gains one when the task's stores are visible, or none.
        pub signal: u32,
        /// Buffers read; meaning by op.
        pub reads: [u32; READS_STAGED],
        /// Buffers written; meaning by op.
        pub writes: [u32; WRITES_MAX],
        /// For a matvec of several sequences: parts that a tile is cut into, each as long as the vectors that the warps' registers hold.
        pub tile_parts: u16,
        /// For a matvec: an `Unpack`.
        pub unpack: u16,
        /// The fifth buffer read: a route, or sinks.
        pub aside: u32,
        /// Zero.
        pub reserved: [u16; 2],
        /// Counters waited for.
        pub wait_counter: [u32; WAITS_MAX],
        /// Arrivals per epoch of each such counter; the wait is for `epoch * count`.
        pub wait_count: [u32; WAITS_MAX],
        /// Parameters by op.
        pub params: [u32; 16],
    }
}

wire_enum! {
    /// What a load brings.
    LoadKind {
        /// A contiguous run of units of a matrix.
        Weights = 0 "weights",
        /// The keys and values of an attention task; the position says how many.
        Cache = 1 "cache",
        /// Units of experts that a router's logits choose.
        Routed = 2 "routed",
    }
}

wire_struct! {
    /// Where a load's units are among a layer's experts. Unit `u` of the load, counted from `unit0`, is of slot `u / segment % slots`, and unit
    /// `u / (segment * slots) * segment + u % segment` of the expert with the slot's rank among the logits.
    amk_routed align(16) size(48)
    pub struct Routed {
        /// Device address of the experts' logits, which are flag-in-data.
        pub logits: u64,
        /// Device address of the first expert's first unit.
        pub experts: u64,
        /// Units of an expert.
        pub expert_units: u32,
        /// Units that lie one after the other before the next slot's.
        pub segment: u32,
        /// First unit of the load.
        pub unit0: u32,
        /// Slots of the route.
        pub slots: u32,
        /// Experts that are ranked.
        pub expert_len: u32,
        /// 1 if the worker's routed load before is of the same route: its experts are still known.
        pub again: u32,
        /// Zero.
        pub reserved: [u32; 2],
    }
}

wire_struct! {
    /// The data that a worker's loader fetches for one task.
    amk_load align(16) size(32)
    pub struct Load {
        /// Device address: of the first unit, of a head's keys in page zero, or of an `amk_routed`.
        pub address: u64,
        /// Weights: units.
        pub units: u32,
        /// A `LoadKind`.
        pub kind: u8,
        /// Weights: units of a stage.
        pub stage_units: u8,
        /// Weights: units after which a new stage begins even if the last is not full: those of a tile that spans several stages.
        pub period: u16,
        /// Weights: units that must have arrived before, in stream order.
        pub watermark: u32,
        /// Cache: keys of a block of the task's splits. Weights: bytes of a unit.
        pub size: u32,
        /// Cache: sliding window, or zero for full attention.
        pub window: u32,
        /// Cache: the task's split. Weights: tiles whose parts share a stage, in a kernel of several sequences.
        pub split: u16,
        /// Cache: splits of the head.
        pub splits: u16,
    }
}

wire_struct! {
    /// One worker's part of the program.
    amk_queue align(16) size(16)
    pub struct Queue {
        /// Index of the first task.
        pub task0: u32,
        /// Tasks.
        pub tasks: u32,
        /// Index of the first load.
        pub load0: u32,
        /// Loads.
        pub loads: u32,
    }
}

wire_enum! {
    /// How the device addresses a buffer.
    BufferKind {
        /// f32 words, ordered by counters.
        Plain = 0 "plain",
        /// f32 words whose lowest bits are a tag: the reader polls the data itself.
        FlagInData = 1 "flag_in_data",
        /// f32 constants: norm weights, biases, inverse frequencies.
        Constant = 2 "constant",
        /// Key/value cache of one layer. A session's is `[2][kv_heads][capacity][head_dim]` of the cache's element type. On the device it
        /// is paged, `[pages][2][kv_heads][KV_PAGE][head_dim]`, and `amk_launch.pages` maps sessions to pages.
        KvCache = 3 "kv_cache",
        /// The embedding matrix, in units; the token of the step picks the row.
        Embedding = 4 "embedding",
        /// Logits, `[rows][vocab]` f32; the step picks the row.
        Logits = 5 "logits",
        /// As `kv_cache`, of e4m3: a row of `head_dim` codes, behind them `KV_SCALE_BYTES` that begin with their scale, a power of two as f16.
        KvCacheE4m3 = 6 "kv_cache_e4m3",
    }
}

wire_struct! {
    /// One buffer, its address patched in when the program is loaded.
    amk_buffer align(16) size(32)
    pub struct BufferDesc {
        /// Device address.
        pub address: u64,
        /// A `BufferKind`.
        pub kind: u32,
        /// Words (elements) of the buffer; for `kv_cache`, of one session.
        pub words: u32,
        /// Units along a row, for `embedding`.
        pub units: u32,
        /// Nonzero: a store goes to the copies of all devices.
        pub replicated: u32,
        /// Zero.
        pub reserved: [u32; 2],
    }
}

wire_struct! {
    /// A loaded program.
    amk_program align(16) size(112)
    pub struct ProgramHeader {
        /// `amk_task[]`.
        pub tasks: u64,
        /// `amk_load[]`.
        pub loads: u64,
        /// `amk_queue[workers]`.
        pub queues: u64,
        /// `amk_buffer[]`.
        pub buffers: u64,
        /// Counters, one per 32-byte sector.
        pub counters: u64,
        /// Stages of the weight ring.
        pub stages: u32,
        /// Units of one stage, a power of two.
        pub stage_units: u32,
        /// Bytes of one stage: of that many of the longest units.
        pub stage_bytes: u32,
        /// Stages in flight at once, at most.
        pub in_flight: u32,
        /// The same while the worker is about to receive a hand-off.
        pub in_flight_before_wait: u32,
        /// Byte offset of the activation buffer in shared memory.
        pub x_offset: u32,
        /// Bytes of the activation buffer.
        pub x_bytes: u32,
        /// Tokens of a session's key/value cache.
        pub kv_capacity: u32,
        /// Bytes from the keys of a head to its values: half a page of a layer.
        pub kv_values: u32,
        /// Buffers, for bounds checks.
        pub buffer_len: u32,
        /// Rows of the logits buffer.
        pub logits_rows: u32,
        /// Vocabulary, for token checks.
        pub vocab: u32,
        /// Steps run since it was loaded. The poller maintains it, so that a program can be left and resumed.
        pub epoch: u32,
        /// Sequences that the tables, activations and logits are allocated for; those of the kernel.
        pub seqs: u32,
        /// Bytes from a scratch buffer of one sequence to that of the next.
        pub seq_bytes: u32,
        /// Current run of each sequence, of three, two bits per sequence, sequence 0 lowest: part of its tags. The poller maintains it, as `epoch`.
        pub seq_runs: u32,
        /// Sequences of the last command. The poller maintains it.
        pub last_seqs: u32,
        /// Zero.
        pub reserved: u32,
    }
}

wire_enum! {
    /// What the workers do next.
    Action {
        /// Run a step.
        Step = 1 "step",
        /// Adopt another program.
        Switch = 2 "switch",
        /// Leave the kernel.
        Leave = 3 "leave",
        /// Help the cooperative sampler with this step's token.
        Choose = 4 "choose",
    }
}

wire_enum! {
    /// Element type of a stored tensor, and of the matrices that a kernel is compiled for.
    DType {
        /// IEEE binary32.
        F32 = 0 "f32",
        /// IEEE binary16.
        F16 = 1 "f16",
        /// The upper half of a binary32.
        Bf16 = 2 "bf16",
        /// 8 bits, of which 4 are exponent and 3 mantissa; bias 7, no infinities.
        E4m3 = 3 "e4m3",
        /// Two's complement integer of 8 bits.
        Int8 = 4 "int8",
        /// Blocks of 64 e4m3 codes and a scale in f32, which 8 rows share.
        E4m3G64 = 5 "e4m3_g64",
        /// Blocks of 64 codes of 8 bits and a scale for each 32.
        Int8G32 = 6 "int8_g32",
        /// Groups of 128 codes of 4 bits and a scale. A code is 8 more than it means.
        Int4G128 = 7 "int4_g128",
        /// The same with a zero point for each scale, which a code is more than it means.
        Int4G128Zero = 8 "int4_g128_zero",
        /// Blocks of 128 codes of 4 bits and a scale for each 32. A code is 8 more than it means.
        Int4G32 = 9 "int4_g32",
        /// Blocks of 64 e4m3 codes and a scale.
        E4m3G64Row = 10 "e4m3_g64_row",
        /// Blocks of 128 e2m1 codes and a power of two for each 32.
        Mxfp4 = 11 "mxfp4",
        /// Blocks of 128 codes of 4 bits, with factors of a scale and of an offset for each 32.
        Int4K = 12 "int4_k",
        /// Blocks of 64 codes of 8 bits, with factors of a scale and of an offset for each 16.
        Int8K = 13 "int8_k",
    }
}

/// What one element of a stored tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// A code of 8 bits, of which 4 are exponent and 3 mantissa; bias 7, no infinities.
    E4m3,
    /// A code of 8 bits: a two's complement integer.
    Int8,
    /// A code of 4 bits: an unsigned integer, two to a byte, the first in its lower half.
    Int4,
    /// A code of 4 bits, of which 2 are exponent and 1 mantissa; bias 1. Two to a byte, the first in its lower half.
    E2m1,
}

impl Scalar {
    /// Bits of one element.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::Int8 => 8,
            Self::Int4 | Self::E2m1 => 4,
        }
    }

    /// Whether it means nothing without a scale.
    #[must_use]
    pub const fn is_code(self) -> bool {
        self.bits() <= 8
    }
}

/// What lies behind the codes of a block and gives them their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// For each group a scale, f16.
    Each,
    /// For each group a scale and a zero point, f16.
    WithZeros,
    /// A scale of the whole block, f32, which the 8 rows of a tile share.
    Shared,
    /// For each group a byte: the exponent of a power of two, 127 more than it is (e8m0).
    Powers,
    /// A scale and an offset of the block, f16; then for each group their factors, bytes, of which the scale's is 128 more
    /// than it is. A code means `(scale * factor) * code - (offset * factor)`.
    Factors,
}

/// How a row of codes with scales of their own is stored: blocks of 64 bytes of codes, and behind each what scales them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeBlock {
    /// Codes of a block.
    pub codes: u32,
    /// Codes of a group.
    pub group: u32,
    /// What scales them.
    pub scales: Scales,
}

impl CodeBlock {
    /// Bytes of the codes of a block.
    pub const CODE_BYTES: usize = 64;

    /// Groups of a block.
    #[must_use]
    pub const fn groups(self) -> usize {
        (self.codes / self.group) as usize
    }

    /// Bytes that come before those of the first group.
    #[must_use]
    pub const fn head_bytes(self) -> usize {
        if matches!(self.scales, Scales::Factors) { 4 } else { 0 }
    }

    /// Bytes that scale one group.
    #[must_use]
    pub const fn group_scale_bytes(self) -> usize {
        match self.scales {
            Scales::Powers => 1,
            Scales::Each | Scales::Factors => 2,
            Scales::WithZeros | Scales::Shared => 4,
        }
    }

    /// Bytes that scale a block.
    #[must_use]
    pub const fn scale_bytes(self) -> usize {
        self.head_bytes() + self.groups() * self.group_scale_bytes()
    }

    /// Whether the 8 rows of a tile have the same scale.
    #[must_use]
    pub const fn shared(self) -> bool {
        matches!(self.scales, Scales::Shared)
    }

    /// Bytes behind a unit of 8 rows by one block, a multiple of what a bulk copy takes.
    #[must_use]
    pub const fn unit_scale_bytes(self) -> usize {
        if self.shared() { 16 } else { crate::UNIT_ROWS as usize * self.scale_bytes() }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn bytes(self) -> usize {
        Self::CODE_BYTES + self.scale_bytes()
    }
}

impl DType {
    /// What its elements are and, for codes in groups, the codes of a group and what scales them.
    const fn layout(self) -> (Scalar, Option<(u32, Scales)>) {
        match self {
            Self::F32 => (Scalar::F32, None),
            Self::F16 => (Scalar::F16, None),
            Self::Bf16 => (Scalar::Bf16, None),
            Self::E4m3 => (Scalar::E4m3, None),
            Self::Int8 => (Scalar::Int8, None),
            Self::E4m3G64 => (Scalar::E4m3, Some((64, Scales::Shared))),
            Self::Int8G32 => (Scalar::Int8, Some((32, Scales::Each))),
            Self::Int4G128 => (Scalar::Int4, Some((128, Scales::Each))),
            Self::Int4G128Zero => (Scalar::Int4, Some((128, Scales::WithZeros))),
            Self::Int4G32 => (Scalar::Int4, Some((32, Scales::Each))),
            Self::E4m3G64Row => (Scalar::E4m3, Some((64, Scales::Each))),
            Self::Mxfp4 => (Scalar::E2m1, Some((32, Scales::Powers))),
            Self::Int4K => (Scalar::Int4, Some((32, Scales::Factors))),
            Self::Int8K => (Scalar::Int8, Some((16, Scales::Factors))),
        }
    }

    /// What one element is.
    #[must_use]
    pub const fn scalar(self) -> Scalar {
        self.layout().0
    }

    /// How its elements lie in blocks, if they do.
    #[must_use]
    pub const fn block(self) -> Option<CodeBlock> {
        let (scalar, Some((group, scales))) = self.layout() else { return None };
        let codes = 8 * CodeBlock::CODE_BYTES as u32 / scalar.bits();
        Some(CodeBlock { codes, group, scales })
    }

    /// Bytes of one element.
    ///
    /// # Panics
    /// If the elements lie in blocks.
    #[must_use]
    pub const fn bytes(self) -> usize {
        assert!(self.block().is_none(), "these elements lie in blocks");
        self.scalar().bits() as usize / 8
    }

    /// Bytes of a row of this many elements. A row has whole blocks.
    #[must_use]
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self.block() {
            Some(block) => cols.div_ceil(block.codes as usize) * block.bytes(),
            None => cols * self.bytes(),
        }
    }

    /// Whether it is a code of which each row of a matrix has a factor.
    #[must_use]
    pub const fn is_scaled(self) -> bool {
        self.scalar().is_code()
    }
}

wire_enum! {
    /// What a kernel does to the elements of a unit before it multiplies them.
    Unpack {
        /// Nothing: they are operands.
        None = 0 "none",
        /// e4m3 to f16.
        E4m3 = 1 "e4m3",
        /// Integers of 8 bits to f16.
        Int8 = 2 "int8",
        /// e4m3 to f16, each unit with scales.
        E4m3G64 = 3 "e4m3_g64",
        /// Integers of 8 bits to f16, each unit with scales.
        Int8G32 = 4 "int8_g32",
        /// Integers of 4 bits to f16, each unit with scales.
        Int4G128 = 5 "int4_g128",
        /// The same with zero points.
        Int4G128Zero = 6 "int4_g128_zero",
        /// Integers of 4 bits to f16, each unit with scales of 32 columns.
        Int4G32 = 7 "int4_g32",
        /// e4m3 to f16, each row of a unit with a scale.
        E4m3G64Row = 8 "e4m3_g64_row",
        /// e2m1 to f16, each 32 columns of a row with a power of two.
        Mxfp4 = 9 "mxfp4",
        /// Integers of 4 bits to f16, each 32 columns of a row with factors of the unit's scale and offset.
        Int4K = 10 "int4_k",
        /// Integers of 8 bits to f16, each 16 columns of a row with factors of the unit's scale and offset.
        Int8K = 11 "int8_k",
    }
}

wire_struct! {
    /// The step that all workers run, in device memory; `go` is released last.
    amk_step align(16) size(96)
    pub struct StepState {
        /// Address of the `amk_program`.
        pub program: u64,
        /// An `Action`.
        pub action: u32,
        /// Epoch of the program: steps run since it was loaded, this one included.
        pub epoch: u32,
        /// Input token.
        pub token: u32,
        /// One sequence: position of the input token; keys 0..=position are attended to. Batch: see `amk_seqs.position`.
        pub position: u32,
        /// Session whose key/value cache is used.
        pub session: u32,
        /// Row of the logits buffer; a sequence's rows are `amk_program.logits_rows` after those of the sequence before it.
        pub logits_row: u32,
        /// Steps of the command before this one.
        pub index: u32,
        /// Steps of the command.
        pub steps: u32,
        /// One sequence: positions below this one take their token from the prompt. Batch: see `amk_seqs.forced`.
        pub forced: u32,
        /// Flags of the submission.
        pub flags: u32,
        /// Stop tokens in use.
        pub stop_len: u32,
        /// A generated token among these ends the command.
        pub stop: [u32; STOP_TOKENS_MAX],
        /// Number of the command: `amk_done.sequence` after its end.
        pub command: u32,
        /// Written by the poller at any time: number of the command that must yield.
        pub preempt: u32,
        /// Actions published so far; released last.
        pub go: u32,
    }
}

wire_struct! {
    /// The sequences of a command, in device memory directly after the `amk_step`; read by kernels of several sequences, and released with it.
    amk_seqs align(16) size(144)
    pub struct SeqStates {
        /// Input token of each sequence in this step.
        pub token: [u32; SEQS_MAX],
        /// Position of each sequence in the command's first step; in this step it is `amk_step.index` more.
        pub position: [u32; SEQS_MAX],
        /// Session of each sequence.
        pub session: [u32; SEQS_MAX],
        /// Positions of each sequence below this one take their token from its session's token buffer.
        pub forced: [u32; SEQS_MAX],
        /// Sequences of the command; 1 for a plain decode.
        pub seqs: u32,
        /// A bit per sequence: tokens are sampled by the session's `amk_sampling`.
        pub sample: u32,
        /// Two bits per sequence: the sequence's current run, of three.
        /// A sequence that skipped some steps has old words whose epoch may match this one; the run, part of its tags, distinguishes them.
        pub runs: u32,
        /// Four bits per sequence: how many sequences directly before it run the positions before its own of the same session, in a window.
        /// Zero for a batch without a window.
        pub windows: u32,
    }
}

wire_struct! {
    /// What a kernel is launched with, by value.
    amk_launch align(16) size(160)
    pub struct Launch {
        /// `amk_submission[RING_ENTRIES]` in mapped host memory.
        pub submissions: u64,
        /// `amk_completion[RING_ENTRIES]` in mapped host memory.
        pub completions: u64,
        /// `amk_ring_indices` in mapped host memory.
        pub indices: u64,
        /// `amk_status` in mapped host memory.
        pub status: u64,
        /// Token buffers in mapped host memory. Per session `token_stride` words with its tokens, then as many with the token chosen after each.
        pub tokens: u64,
        /// `amk_step` in device memory.
        pub step: u64,
        /// `amk_done` in device memory.
        pub done: u64,
        /// `amk_record[record_len]` in device memory, then `amk_loader_record[workers]`, for the traced kernel variant; else zero.
        pub records: u64,
        /// Nanoseconds that any wait inside a step may last.
        pub deadline_ns: u64,
        /// Words of a session's tokens; the buffers of two sessions are twice as many apart.
        pub token_stride: u32,
        /// Sessions.
        pub sessions: u32,
        /// Workers of the device.
        pub workers: u32,
        /// Capacity of the task records.
        pub record_len: u32,
        /// First program, loaded before the launch.
        pub program: u64,
        /// `amk_weight_stream` in device memory.
        pub weight_stream: u64,
        /// `amk_worker_heartbeat[workers]` in mapped host memory.
        pub worker_heartbeats: u64,
        /// Nanoseconds between two writes of a worker_heartbeat.
        pub worker_heartbeat_ns: u32,
        /// The first device whose workers are blocks of this launch; the next `workers` blocks are of the next device.
        pub device: u32,
        /// `amk_sampling[sessions]` in device memory.
        pub sampling: u64,
        /// Per session `page_stride` words of 16 bits in device memory: the page of each `KV_PAGE` positions, zero if it has none.
        /// The last is zero.
        pub pages: u64,
        /// Words of a session's pages, a multiple of 8.
        pub page_stride: u32,
        /// Pages of the key/value cache. Page zero belongs to no session and holds zeros.
        pub page_count: u32,
        /// `amk_launch[devices]` in device memory, for a program of several devices; else zero. `step` is at the same distance from every
        /// other word that devices have a copy of.
        pub launches: u64,
        /// `amk_exchange[SEQS_MAX]` in device memory, for a program of several devices; else zero.
        pub exchange: u64,
    }
}

wire_struct! {
    /// What the other devices of a program store for this one, besides replicated words. One for each sequence of a step.
    amk_exchange align(16) size(544)
    pub struct Exchange {
        /// The best candidate of each device at the end of a step: `EXCHANGE_WORDS` each, `EXCHANGE_STEPS` times `DEVICES_MAX`. Two pairs of a
        /// word and a tag: the value, and the row with the device's decision to preempt in the lowest bit of its tag. In the slot of this device's
        /// own number the first device stores the token of a sampled step, and the number of actions then.
        pub slots: [u32; EXCHANGE_SLOTS],
        /// Nonzero: the kernel of the device of this number is running. That of the first sequence is used.
        pub here: [u32; DEVICES_MAX],
    }
}

wire_struct! {
    /// Progress of streamed weight loading, in device memory. Units are counted in stream order: matrix after matrix, as the host copies them.
    amk_weight_stream align(16) size(32)
    pub struct WeightStream {
        /// Units that have arrived, `WATERMARK_ABANDONED` or `WATERMARK_ALL`; written after the copies, on their stream.
        pub watermark: u32,
        /// Units that must have arrived before a step may begin: those of the embedding, which no load fetches.
        pub embedding: u32,
        /// Deadlines in a row that may pass without an arriving weight before a waiting worker traps.
        pub patience: u32,
        /// Times that a loader began to wait for weights since the launch.
        pub waits: u32,
        /// Times that such a wait ended.
        pub resumed: u32,
        /// Total microseconds of these waits.
        pub waited_us: u32,
        /// Zero.
        pub reserved: [u32; 2],
    }
}

wire_struct! {
    /// What the sampling worker reports to the poller at the end of a command, in device memory.
    amk_done align(16) size(48)
    pub struct Done {
        /// Device-wide: nonzero makes every worker leave.
        pub abort: u32,
        /// Positions that were run.
        pub steps: u32,
        /// Last token chosen.
        pub token: u32,
        /// Value for `amk_completion.ending`.
        pub ending: u32,
        /// Value for `amk_completion.seq_endings`.
        pub seq_endings: u32,
        /// Workers that have switched program, ever.
        pub switched: u32,
        /// Workers that have left.
        pub left: u32,
        /// Claim on the status block: the first worker to take it reports.
        pub reporter: u32,
        /// Zero.
        pub reserved: [u32; 3],
        /// Commands finished; released last.
        pub sequence: u32,
    }
}

wire_struct! {
    /// One task's times in one step, at the task's index; written only by the traced kernel variant.
    amk_record align(16) size(48)
    pub struct TaskRecord {
        /// Nanoseconds, the device's clock, when the worker started the task.
        pub begin: u64,
        /// Cycles of the multiprocessor from `begin` until its waits were over.
        pub ready: u32,
        /// Cycles from `begin` until its input was in shared memory.
        pub staged: u32,
        /// Cycles from `begin` until its products were done.
        pub multiplied: u32,
        /// Cycles from `begin` until its stores were done and signalled.
        pub end: u32,
        /// Cycles that the first consumer warp waited for weights.
        pub starved: u32,
        /// Worker.
        pub worker: u32,
        /// Index of the task.
        pub task: u32,
        /// The op.
        pub opcode: u32,
        /// Cycles to spin before and after the mark of the products. The host writes them, for tests of what explains a slow step.
        pub delays: [u32; 2],
    }
}

wire_struct! {
    /// A worker's loader's waits in one step, in cycles; written only by the traced kernel variant.
    amk_loader_record align(16) size(32)
    pub struct LoaderRecord {
        /// Nanoseconds, the device's clock, when the step's last load was issued.
        pub end_ns: u64,
        /// Waited for a stage that the consumers had read.
        pub stage_free: u32,
        /// Waited for fewer bytes in flight.
        pub in_flight: u32,
        /// The whole step.
        pub step: u32,
        /// Worker.
        pub worker: u32,
        /// Zero.
        pub reserved: [u32; 2],
    }
}
