//! Every limit, with asserted relations between them.

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $value:expr;)+) => {
        $($(#[$doc])* pub const $name: $ty = $value;)+
        /// Every limit as `(name, value)`, for the generated header.
        pub(crate) const LIMITS: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),+];
    };
}

limits! {
    /// Bumped on every change of meaning that the layout hash does not cover.
    ABI_VERSION: u32 = 1;
    /// Bytes of one weight unit: 8 rows by 64 bytes of a row, contiguous, row after row. Scales of its own lie behind it.
    UNIT_BYTES: u32 = 512;
    /// Matrix rows of one unit, and so the row granule of every tile.
    UNIT_ROWS: u32 = 8;
    /// Bytes of one row in a unit.
    UNIT_ROW_BYTES: u32 = 64;
    /// Vectors that are multiplied in f16 are divided by this before, so that elements up to a million are in its range.
    F16_VECTOR_DIVISOR: u32 = 16;
    /// Buffers that a task may read.
    READS_MAX: usize = 6;
    /// Those of them that every kernel stages. Only kernels of models with routes or sinks stage the fifth; the sixth is the loader's.
    READS_STAGED: usize = 4;
    /// Buffers that a task may write.
    WRITES_MAX: usize = 2;
    /// Experts of a layer.
    EXPERTS_MAX: u32 = 1024;
    /// Slots of a route.
    SLOTS_MAX: u32 = 16;
    /// Counters that a task may wait for.
    WAITS_MAX: usize = 2;
    /// Bytes of a task's parameters.
    PARAM_BYTES: usize = 64;
    /// Bytes of a task: one L2 line.
    TASK_BYTES: usize = 128;
    /// Tasks of a program.
    TASKS_MAX: u32 = 1 << 20;
    /// Buffers of a program.
    BUFFERS_MAX: u32 = 1 << 16;
    /// Counters of a program.
    COUNTERS_MAX: u32 = 1 << 16;
    /// Devices of a program: GPUs of one host behind one switch.
    DEVICES_MAX: usize = 8;
    /// Words in which a device passes on its best candidate.
    EXCHANGE_WORDS: usize = 4;
    /// Steps whose candidates are kept apart.
    EXCHANGE_STEPS: usize = 4;
    /// Words of the candidates of all devices.
    EXCHANGE_SLOTS: usize = EXCHANGE_STEPS * DEVICES_MAX * EXCHANGE_WORDS;
    /// Workers of a device: more than the multiprocessors of any GPU.
    WORKERS_MAX: u32 = 256;
    /// Bytes of an element of the device's key/value cache: f16.
    KV_ELEMENT_BYTES: u64 = 2;
    /// Bytes behind the codes of a row of a cache of e4m3, of which the scale takes two: rows are copied 16 bytes at a time.
    KV_SCALE_BYTES: u32 = 16;
    /// Stages of the weight ring of a worker.
    STAGES_MAX: u32 = 32;
    /// Splits of the keys of one head group over workers.
    SPLITS_MAX: u32 = 32;
    /// Elements of one head.
    HEAD_DIM_MAX: u32 = 256;
    /// Elements of one head on the device are a multiple of this: its attention works on blocks of 16.
    HEAD_DIM_STEP: u32 = 16;
    /// Query heads per key/value head.
    GROUP_MAX: u32 = 64;
    /// Tokens of a session's key/value cache.
    KV_CAPACITY_MAX: u32 = 1 << 18;
    /// Positions of a page of the key/value cache: a block of keys as the loader copies them.
    KV_PAGE: u32 = 128;
    /// Pages of the key/value cache, including page zero, which belongs to no session: a word of the tables has 16 bits.
    KV_PAGES_MAX: u32 = 1 << 16;
    /// Distance of the tags of two epochs: a tag is `epoch * TAG_RUNS + run`, of which a word keeps the lowest `TAG_BITS`. Every word is
    /// written in every step, so a stale one is at most a step old and the bits suffice. A sequence of a batch that skipped some steps
    /// distinguishes its words by its run, one of three; all other words have run 0.
    TAG_RUNS: u32 = 4;
    /// Lowest bits of a flag-in-data f32 that hold its tag; the value keeps the other bits, rounded.
    TAG_BITS: u32 = 4;
    /// Words before the outputs of a head in the attention partials: greatest score, sum of exponentials, two of padding.
    PARTIAL_HEADER: u32 = 4;
    /// Units of a stage of the weight ring, at most.
    STAGE_UNITS_MAX: u32 = 64;
    /// Warps of a worker that run its tasks.
    CONSUMER_WARPS: u32 = 8;
    /// Other warps of a worker: the loader, the task prefetcher, the watchdog that also polls the host ring, and the heartbeat's writer, which also ranks experts.
    /// They complete the group of four that gives registers to the consumers.
    HELPER_WARPS: u32 = 4;
    /// Bytes of a worker's shared memory for reductions, barriers and task records, whatever the program.
    FIXED_BYTES: u32 = 11 * 1024;
    /// Elements of the longest vector of a dense model up to which it is staged in two 16-bit halves: 64 KB.
    TWO_HALVES_MAX: u32 = 16384;
    /// Query heads of an attention task, at most: columns of its operand.
    ATTENTION_GROUP: u32 = 4;
    /// Tiles of which a worker keeps the sums of all sequences before an epilogue, if a step has several sequences (decision 022).
    BATCH_TILES: u32 = 8;
    /// Threads per block of the prompt kernels that process vectors.
    PREFILL_THREADS: u32 = 256;
    /// Tokens per block of the prompt's attention.
    ATTEND_TOKENS: u32 = 64;
    /// Keys per stage of the prompt's attention, double-buffered.
    ATTEND_KEYS: u32 = 64;
    /// Entries of each host ring, a power of two.
    RING_ENTRIES: u32 = 64;
    /// Stop tokens of a submission.
    STOP_TOKENS_MAX: usize = 8;
    /// Sessions of one resident kernel.
    SESSIONS_MAX: u32 = 64;
    /// Sessions that one decode command runs at once, one per sequence: the columns of one matrix product.
    SEQS_MAX: usize = 8;
    /// Bytes of shared memory for the new keys and values of a step's sequences, as f16: rows of a window's sequences lie there together.
    FRESH_BYTES: u32 = 7168;
    /// Tokens after its first that a sequence of a batch may take from its token buffer in one command: a byte in `seq_forced`.
    SEQ_FORCED_MAX: u32 = 255;
    /// Bits per sequence in `seq_endings`.
    SEQ_ENDING_BITS: u32 = 4;
    /// Watermark value: every weight has arrived.
    WATERMARK_ALL: u32 = u32::MAX;
    /// Watermark value: no more weights will arrive. Waiting readers continue with what there is, and the step's result is void.
    WATERMARK_ABANDONED: u32 = u32::MAX - 1;
    /// Biases of a session's sampling.
    BIAS_MAX: u32 = 512;
    /// Tokens of a vocabulary that is sampled from: the sum of this many weights fits into 64 bits.
    SAMPLED_VOCAB_MAX: u32 = 1 << 22;
    /// Bytes of the cooperative sampler's memory, after the settings of the sessions.
    SAMPLER_BYTES: u32 = 10752;
    /// Alignment of that memory.
    SAMPLER_ALIGN: u32 = 128;
    /// Bytes of a listed token, one that may be drawn.
    LISTED_BYTES: u32 = 16;
    /// Bit of `amk_sampling::greedy`: each token is sampled under a mask that the host gives while its step runs. Only kernels with masks know it.
    SAMPLING_MASKED: u32 = 2;
    /// Words before a mask: the first is the position of the token that it is for, or 0.
    MASK_HEAD_WORDS: u32 = 4;
    /// A mask is waited for as long as this part of the deadline.
    MASK_DEADLINE_PART: u32 = 4;
    /// Flag of a decode command: each step's logits go to their own row.
    FLAG_KEEP_LOGITS: u32 = 1;
    /// Flag of a decode command: tokens are sampled by the session's `amk_sampling`, not greedily.
    FLAG_SAMPLE: u32 = 2;
    /// "No buffer", "no counter" and "no token" in a wire struct.
    NONE: u32 = u32::MAX;
}

const _: () =
    assert!(1 << TAG_BITS >= 4 * TAG_RUNS, "a tag differs from those of the step before and after");
const _: () = assert!(RING_ENTRIES.is_power_of_two());
const _: () = assert!(SEQS_MAX as u32 * SEQ_ENDING_BITS <= 32 && SESSIONS_MAX <= 256);
const _: () = assert!(UNIT_BYTES == UNIT_ROWS * UNIT_ROW_BYTES);
const _: () = assert!(TASK_BYTES == 64 + PARAM_BYTES);
