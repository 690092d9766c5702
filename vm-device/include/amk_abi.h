// Generated from the `abi` crate by its tests (BLESS=1 cargo test -p abi); edits are overwritten.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#define AMK_OFFSETOF(type, field) (uint64_t) __INTADDR__(&(((type*)0)->field))
#else
#include <stdint.h>
#define AMK_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif
#define AMK_ABI_HASH 0x3bdddedce654204aull

#define AMK_ABI_VERSION 1u
#define AMK_UNIT_BYTES 512u
#define AMK_UNIT_ROWS 8u
#define AMK_UNIT_ROW_BYTES 64u
#define AMK_F16_VECTOR_DIVISOR 16u
#define AMK_READS_MAX 6u
#define AMK_READS_STAGED 4u
#define AMK_WRITES_MAX 2u
#define AMK_EXPERTS_MAX 1024u
#define AMK_SLOTS_MAX 16u
#define AMK_WAITS_MAX 2u
#define AMK_PARAM_BYTES 64u
#define AMK_TASK_BYTES 128u
#define AMK_TASKS_MAX 1048576u
#define AMK_BUFFERS_MAX 65536u
#define AMK_COUNTERS_MAX 65536u
#define AMK_DEVICES_MAX 8u
#define AMK_EXCHANGE_WORDS 4u
#define AMK_EXCHANGE_STEPS 4u
#define AMK_EXCHANGE_SLOTS 128u
#define AMK_WORKERS_MAX 256u
#define AMK_KV_ELEMENT_BYTES 2u
#define AMK_KV_SCALE_BYTES 16u
#define AMK_STAGES_MAX 32u
#define AMK_SPLITS_MAX 32u
#define AMK_HEAD_DIM_MAX 256u
#define AMK_HEAD_DIM_STEP 16u
#define AMK_GROUP_MAX 64u
#define AMK_KV_CAPACITY_MAX 262144u
#define AMK_KV_PAGE 128u
#define AMK_KV_PAGES_MAX 65536u
#define AMK_TAG_RUNS 4u
#define AMK_TAG_BITS 4u
#define AMK_PARTIAL_HEADER 4u
#define AMK_STAGE_UNITS_MAX 64u
#define AMK_CONSUMER_WARPS 8u
#define AMK_HELPER_WARPS 4u
#define AMK_FIXED_BYTES 11264u
#define AMK_TWO_HALVES_MAX 16384u
#define AMK_ATTENTION_GROUP 4u
#define AMK_BATCH_TILES 8u
#define AMK_PREFILL_THREADS 256u
#define AMK_ATTEND_TOKENS 64u
#define AMK_ATTEND_KEYS 64u
#define AMK_RING_ENTRIES 64u
#define AMK_STOP_TOKENS_MAX 8u
#define AMK_SESSIONS_MAX 64u
#define AMK_SEQS_MAX 8u
#define AMK_FRESH_BYTES 7168u
#define AMK_SEQ_FORCED_MAX 255u
#define AMK_SEQ_ENDING_BITS 4u
#define AMK_WATERMARK_ALL 0xffffffffu
#define AMK_WATERMARK_ABANDONED 4294967294u
#define AMK_BIAS_MAX 512u
#define AMK_SAMPLED_VOCAB_MAX 4194304u
#define AMK_SAMPLER_BYTES 10752u
#define AMK_SAMPLER_ALIGN 128u
#define AMK_LISTED_BYTES 16u
#define AMK_SAMPLING_MASKED 2u
#define AMK_MASK_HEAD_WORDS 4u
#define AMK_MASK_DEADLINE_PART 4u
#define AMK_FLAG_KEEP_LOGITS 1u
#define AMK_FLAG_SAMPLE 2u
#define AMK_NONE 0xffffffffu

#define AMK_OP_NOP 0u
#define AMK_OP_EMBED 1u
#define AMK_OP_MATVEC 2u
#define AMK_OP_ATTENTION 3u
#define AMK_OP_ATTENTION_MERGE 4u
#define AMK_OP_SAMPLE 5u
#define AMK_OP_NORM 6u
#define AMK_OP_ROUTE 7u

#define AMK_PROLOGUE_COPY 0u
#define AMK_PROLOGUE_RMS 1u
#define AMK_PROLOGUE_MERGE 2u
#define AMK_PROLOGUE_POST_NORM 3u

#define AMK_EPILOGUE_STORE 0u
#define AMK_EPILOGUE_RESIDUAL 1u
#define AMK_EPILOGUE_SILU_MUL 2u
#define AMK_EPILOGUE_LOGITS 3u

#define AMK_ACTIVATION_SILU 0u
#define AMK_ACTIVATION_GELU_TANH 1u
#define AMK_ACTIVATION_CLAMPED_SILU 2u

#define AMK_SCORING_ALL 0u
#define AMK_SCORING_CHOSEN 1u
#define AMK_SCORING_SIGMOID 2u

#define AMK_FEATURE_GELU_TANH 0u
#define AMK_FEATURE_SCORE_CAP 1u
#define AMK_FEATURE_LOGIT_CAP 2u
#define AMK_FEATURE_EMBED_SCALE 3u
#define AMK_FEATURE_NORM 4u
#define AMK_FEATURE_ROUTE 5u
#define AMK_FEATURE_SINKS 6u
#define AMK_FEATURE_CLAMPED_SILU 7u
#define AMK_FEATURE_POST_NORM 8u
#define AMK_FEATURE_KV_E4M3 9u
#define AMK_FEATURE_F32_ROWS 10u

#define AMK_BUFFER_PLAIN 0u
#define AMK_BUFFER_FLAG_IN_DATA 1u
#define AMK_BUFFER_CONSTANT 2u
#define AMK_BUFFER_KV_CACHE 3u
#define AMK_BUFFER_EMBEDDING 4u
#define AMK_BUFFER_LOGITS 5u
#define AMK_BUFFER_KV_CACHE_E4M3 6u

#define AMK_COMMAND_PING 1u
#define AMK_COMMAND_DECODE 2u
#define AMK_COMMAND_LOAD_PROGRAM 3u
#define AMK_COMMAND_FENCE 4u
#define AMK_COMMAND_STOP 5u

#define AMK_ENDING_LENGTH 0u
#define AMK_ENDING_STOP 1u
#define AMK_ENDING_YIELD 2u
#define AMK_ENDING_NO_TOKEN 3u
#define AMK_ENDING_BAD_TOKEN 4u

#define AMK_ACTION_STEP 1u
#define AMK_ACTION_SWITCH 2u
#define AMK_ACTION_LEAVE 3u
#define AMK_ACTION_CHOOSE 4u

#define AMK_LOAD_WEIGHTS 0u
#define AMK_LOAD_CACHE 1u
#define AMK_LOAD_ROUTED 2u

#define AMK_DTYPE_F32 0u
#define AMK_DTYPE_F16 1u
#define AMK_DTYPE_BF16 2u
#define AMK_DTYPE_E4M3 3u
#define AMK_DTYPE_INT8 4u
#define AMK_DTYPE_E4M3_G64 5u
#define AMK_DTYPE_INT8_G32 6u
#define AMK_DTYPE_INT4_G128 7u
#define AMK_DTYPE_INT4_G128_ZERO 8u
#define AMK_DTYPE_INT4_G32 9u
#define AMK_DTYPE_E4M3_G64_ROW 10u
#define AMK_DTYPE_MXFP4 11u
#define AMK_DTYPE_INT4_K 12u
#define AMK_DTYPE_INT8_K 13u

#define AMK_UNPACK_NONE 0u
#define AMK_UNPACK_E4M3 1u
#define AMK_UNPACK_INT8 2u
#define AMK_UNPACK_E4M3_G64 3u
#define AMK_UNPACK_INT8_G32 4u
#define AMK_UNPACK_INT4_G128 5u
#define AMK_UNPACK_INT4_G128_ZERO 6u
#define AMK_UNPACK_INT4_G32 7u
#define AMK_UNPACK_E4M3_G64_ROW 8u
#define AMK_UNPACK_MXFP4 9u
#define AMK_UNPACK_INT4_K 10u
#define AMK_UNPACK_INT8_K 11u

#define AMK_TRAP_NONE 0u
#define AMK_TRAP_ABORTED 1u
#define AMK_TRAP_COUNTER_DEADLINE 2u
#define AMK_TRAP_PAYLOAD_DEADLINE 3u
#define AMK_TRAP_STAGE_DEADLINE 4u
#define AMK_TRAP_STALLED 5u
#define AMK_TRAP_BAD_OPCODE 6u
#define AMK_TRAP_BAD_INDEX 7u
#define AMK_TRAP_BAD_COMMAND 8u
#define AMK_TRAP_WEIGHTS 9u
#define AMK_TRAP_WEIGHTS_DEADLINE 10u
#define AMK_TRAP_DEVICE_DEADLINE 11u

#define AMK_FOR_EACH_OP(X) X(nop, 0) X(embed, 1) X(matvec, 2) X(attention, 3) X(attention_merge, 4) X(sample, 5) X(norm, 6) X(route, 7)

struct alignas(16) amk_task {
  uint16_t opcode; // An `Opcode`.
  uint16_t layer; // Layer, for reports only.
  uint8_t wait_len; // Waits in use.
  uint8_t warp_units; // For a matvec of one sequence: units of a tile that a warp takes into registers at once with all others of a stage; 0 where tiles are not
  uint8_t stage_units; // For a matvec: units of a stage. A tile that is longer lies in several, each full but its last.
  uint8_t stage_tiles; // For a matvec: tiles of a stage, 1 where a tile lies in several.
  uint32_t signal; // Counter that gains one when the task's stores are visible, or none.
  uint32_t reads[4]; // Buffers read; meaning by op.
  uint32_t writes[2]; // Buffers written; meaning by op.
  uint16_t tile_parts; // For a matvec of several sequences: parts that a tile is cut into, each as long as the vectors that the warps' registers hold.
  uint16_t unpack; // For a matvec: an `Unpack`.
  uint32_t aside; // The fifth buffer read: a route, or sinks.
  uint16_t reserved[2]; // Zero.
  uint32_t wait_counter[2]; // Counters waited for.
  uint32_t wait_count[2]; // Arrivals per epoch of each such counter; the wait is for `epoch * count`.
  uint32_t params[16]; // Parameters by op.
};
static_assert(sizeof(amk_task) == 128 && alignof(amk_task) == 16, "layout of amk_task");

struct alignas(16) amk_load {
  uint64_t address; // Device address: of the first unit, of a head's keys in page zero, or of an `amk_routed`.
  uint32_t units; // Weights: units.
  uint8_t kind; // A `LoadKind`.
  uint8_t stage_units; // Weights: units of a stage.
  uint16_t period; // Weights: units after which a new stage begins even if the last is not full: those of a tile that spans several stages.
  uint32_t watermark; // Weights: units that must have arrived before, in stream order.
  uint32_t size; // Cache: keys of a block of the task's splits. Weights: bytes of a unit.
  uint32_t window; // Cache: sliding window, or zero for full attention.
  uint16_t split; // Cache: the task's split. Weights: tiles whose parts share a stage, in a kernel of several sequences.
  uint16_t splits; // Cache: splits of the head.
};
static_assert(sizeof(amk_load) == 32 && alignof(amk_load) == 16, "layout of amk_load");

struct alignas(16) amk_routed {
  uint64_t logits; // Device address of the experts' logits, which are flag-in-data.
  uint64_t experts; // Device address of the first expert's first unit.
  uint32_t expert_units; // Units of an expert.
  uint32_t segment; // Units that lie one after the other before the next slot's.
  uint32_t unit0; // First unit of the load.
  uint32_t slots; // Slots of the route.
  uint32_t expert_len; // Experts that are ranked.
  uint32_t again; // 1 if the worker's routed load before is of the same route: its experts are still known.
  uint32_t reserved[2]; // Zero.
};
static_assert(sizeof(amk_routed) == 48 && alignof(amk_routed) == 16, "layout of amk_routed");

struct alignas(16) amk_queue {
  uint32_t task0; // Index of the first task.
  uint32_t tasks; // Tasks.
  uint32_t load0; // Index of the first load.
  uint32_t loads; // Loads.
};
static_assert(sizeof(amk_queue) == 16 && alignof(amk_queue) == 16, "layout of amk_queue");

struct alignas(16) amk_buffer {
  uint64_t address; // Device address.
  uint32_t kind; // A `BufferKind`.
  uint32_t words; // Words (elements) of the buffer; for `kv_cache`, of one session.
  uint32_t units; // Units along a row, for `embedding`.
  uint32_t replicated; // Nonzero: a store goes to the copies of all devices.
  uint32_t reserved[2]; // Zero.
};
static_assert(sizeof(amk_buffer) == 32 && alignof(amk_buffer) == 16, "layout of amk_buffer");

struct alignas(16) amk_program {
  uint64_t tasks; // `amk_task[]`.
  uint64_t loads; // `amk_load[]`.
  uint64_t queues; // `amk_queue[workers]`.
  uint64_t buffers; // `amk_buffer[]`.
  uint64_t counters; // Counters, one per 32-byte sector.
  uint32_t stages; // Stages of the weight ring.
  uint32_t stage_units; // Units of one stage, a power of two.
  uint32_t stage_bytes; // Bytes of one stage: of that many of the longest units.
  uint32_t in_flight; // Stages in flight at once, at most.
  uint32_t in_flight_before_wait; // The same while the worker is about to receive a hand-off.
  uint32_t x_offset; // Byte offset of the activation buffer in shared memory.
  uint32_t x_bytes; // Bytes of the activation buffer.
  uint32_t kv_capacity; // Tokens of a session's key/value cache.
  uint32_t kv_values; // Bytes from the keys of a head to its values: half a page of a layer.
  uint32_t buffer_len; // Buffers, for bounds checks.
  uint32_t logits_rows; // Rows of the logits buffer.
  uint32_t vocab; // Vocabulary, for token checks.
  uint32_t epoch; // Steps run since it was loaded. The poller maintains it, so that a program can be left and resumed.
  uint32_t seqs; // Sequences that the tables, activations and logits are allocated for; those of the kernel.
  uint32_t seq_bytes; // Bytes from a scratch buffer of one sequence to that of the next.
  uint32_t seq_runs; // Current run of each sequence, of three, two bits per sequence, sequence 0 lowest: part of its tags. The poller maintains it, as `epoch`.
  uint32_t last_seqs; // Sequences of the last command. The poller maintains it.
  uint32_t reserved; // Zero.
};
static_assert(sizeof(amk_program) == 112 && alignof(amk_program) == 16, "layout of amk_program");

struct alignas(16) amk_step {
  uint64_t program; // Address of the `amk_program`.
  uint32_t action; // An `Action`.
  uint32_t epoch; // Epoch of the program: steps run since it was loaded, this one included.
  uint32_t token; // Input token.
  uint32_t position; // One sequence: position of the input token; keys 0..=position are attended to. Batch: see `amk_seqs.position`.
  uint32_t session; // Session whose key/value cache is used.
  uint32_t logits_row; // Row of the logits buffer; a sequence's rows are `amk_program.logits_rows` after those of the sequence before it.
  uint32_t index; // Steps of the command before this one.
  uint32_t steps; // Steps of the command.
  uint32_t forced; // One sequence: positions below this one take their token from the prompt. Batch: see `amk_seqs.forced`.
  uint32_t flags; // Flags of the submission.
  uint32_t stop_len; // Stop tokens in use.
  uint32_t stop[8]; // A generated token among these ends the command.
  uint32_t command; // Number of the command: `amk_done.sequence` after its end.
  uint32_t preempt; // Written by the poller at any time: number of the command that must yield.
  uint32_t go; // Actions published so far; released last.
};
static_assert(sizeof(amk_step) == 96 && alignof(amk_step) == 16, "layout of amk_step");

struct alignas(16) amk_seqs {
  uint32_t token[8]; // Input token of each sequence in this step.
  uint32_t position[8]; // Position of each sequence in the command's first step; in this step it is `amk_step.index` more.
  uint32_t session[8]; // Session of each sequence.
  uint32_t forced[8]; // Positions of each sequence below this one take their token from its session's token buffer.
  uint32_t seqs; // Sequences of the command; 1 for a plain decode.
  uint32_t sample; // A bit per sequence: tokens are sampled by the session's `amk_sampling`.
  uint32_t runs; // Two bits per sequence: the sequence's current run, of three.
  uint32_t windows; // Four bits per sequence: how many sequences directly before it run the positions before its own of the same session, in a window.
};
static_assert(sizeof(amk_seqs) == 144 && alignof(amk_seqs) == 16, "layout of amk_seqs");

struct alignas(16) amk_launch {
  uint64_t submissions; // `amk_submission[RING_ENTRIES]` in mapped host memory.
  uint64_t completions; // `amk_completion[RING_ENTRIES]` in mapped host memory.
  uint64_t indices; // `amk_ring_indices` in mapped host memory.
  uint64_t status; // `amk_status` in mapped host memory.
  uint64_t tokens; // Token buffers in mapped host memory. Per session `token_stride` words with its tokens, then as many with the token chosen after each.
  uint64_t step; // `amk_step` in device memory.
  uint64_t done; // `amk_done` in device memory.
  uint64_t records; // `amk_record[record_len]` in device memory, then `amk_loader_record[workers]`, for the traced kernel variant; else zero.
  uint64_t deadline_ns; // Nanoseconds that any wait inside a step may last.
  uint32_t token_stride; // Words of a session's tokens; the buffers of two sessions are twice as many apart.
  uint32_t sessions; // Sessions.
  uint32_t workers; // Workers of the device.
  uint32_t record_len; // Capacity of the task records.
  uint64_t program; // First program, loaded before the launch.
  uint64_t weight_stream; // `amk_weight_stream` in device memory.
  uint64_t worker_heartbeats; // `amk_worker_heartbeat[workers]` in mapped host memory.
  uint32_t worker_heartbeat_ns; // Nanoseconds between two writes of a worker_heartbeat.
  uint32_t device; // The first device whose workers are blocks of this launch; the next `workers` blocks are of the next device.
  uint64_t sampling; // `amk_sampling[sessions]` in device memory.
  uint64_t pages; // Per session `page_stride` words of 16 bits in device memory: the page of each `KV_PAGE` positions, zero if it has none.
  uint32_t page_stride; // Words of a session's pages, a multiple of 8.
  uint32_t page_count; // Pages of the key/value cache. Page zero belongs to no session and holds zeros.
  uint64_t launches; // `amk_launch[devices]` in device memory, for a program of several devices; else zero. `step` is at the same distance from every
  uint64_t exchange; // `amk_exchange[SEQS_MAX]` in device memory, for a program of several devices; else zero.
};
static_assert(sizeof(amk_launch) == 160 && alignof(amk_launch) == 16, "layout of amk_launch");

struct alignas(16) amk_exchange {
  uint32_t slots[128]; // The best candidate of each device at the end of a step: `EXCHANGE_WORDS` each, `EXCHANGE_STEPS` times `DEVICES_MAX`. Two pairs of a
  uint32_t here[8]; // Nonzero: the kernel of the device of this number is running. That of the first sequence is used.
};
static_assert(sizeof(amk_exchange) == 544 && alignof(amk_exchange) == 16, "layout of amk_exchange");

struct alignas(16) amk_weight_stream {
  uint32_t watermark; // Units that have arrived, `WATERMARK_ABANDONED` or `WATERMARK_ALL`; written after the copies, on their stream.
  uint32_t embedding; // Units that must have arrived before a step may begin: those of the embedding, which no load fetches.
  uint32_t patience; // Deadlines in a row that may pass without an arriving weight before a waiting worker traps.
  uint32_t waits; // Times that a loader began to wait for weights since the launch.
  uint32_t resumed; // Times that such a wait ended.
  uint32_t waited_us; // Total microseconds of these waits.
  uint32_t reserved[2]; // Zero.
};
static_assert(sizeof(amk_weight_stream) == 32 && alignof(amk_weight_stream) == 16, "layout of amk_weight_stream");

struct alignas(16) amk_done {
  uint32_t abort; // Device-wide: nonzero makes every worker leave.
  uint32_t steps; // Positions that were run.
  uint32_t token; // Last token chosen.
  uint32_t ending; // Value for `amk_completion.ending`.
  uint32_t seq_endings; // Value for `amk_completion.seq_endings`.
  uint32_t switched; // Workers that have switched program, ever.
  uint32_t left; // Workers that have left.
  uint32_t reporter; // Claim on the status block: the first worker to take it reports.
  uint32_t reserved[3]; // Zero.
  uint32_t sequence; // Commands finished; released last.
};
static_assert(sizeof(amk_done) == 48 && alignof(amk_done) == 16, "layout of amk_done");

struct alignas(16) amk_record {
  uint64_t begin; // Nanoseconds, the device's clock, when the worker started the task.
  uint32_t ready; // Cycles of the multiprocessor from `begin` until its waits were over.
  uint32_t staged; // Cycles from `begin` until its input was in shared memory.
  uint32_t multiplied; // Cycles from `begin` until its products were done.
  uint32_t end; // Cycles from `begin` until its stores were done and signalled.
  uint32_t starved; // Cycles that the first consumer warp waited for weights.
  uint32_t worker; // Worker.
  uint32_t task; // Index of the task.
  uint32_t opcode; // The op.
  uint32_t delays[2]; // Cycles to spin before and after the mark of the products. The host writes them, for tests of what explains a slow step.
};
static_assert(sizeof(amk_record) == 48 && alignof(amk_record) == 16, "layout of amk_record");

struct alignas(16) amk_loader_record {
  uint64_t end_ns; // Nanoseconds, the device's clock, when the step's last load was issued.
  uint32_t stage_free; // Waited for a stage that the consumers had read.
  uint32_t in_flight; // Waited for fewer bytes in flight.
  uint32_t step; // The whole step.
  uint32_t worker; // Worker.
  uint32_t reserved[2]; // Zero.
};
static_assert(sizeof(amk_loader_record) == 32 && alignof(amk_loader_record) == 16, "layout of amk_loader_record");

struct alignas(64) amk_submission {
  uint32_t command; // A `Command`.
  uint32_t session; // Session.
  uint32_t position; // First position to run.
  uint32_t steps; // Positions to run, at most.
  uint32_t forced; // Positions below this one take their token from the session's token buffer.
  uint32_t flags; // `FLAG_KEEP_LOGITS`, `FLAG_SAMPLE`.
  uint32_t stop_len; // Stop tokens in use.
  uint32_t seqs; // Sequences of a decode command; 0 and 1: it runs `session` at `position`.
  uint64_t program; // Address of the `amk_program`, for `load_program`.
  uint32_t stop[8]; // A generated token among these ends the command.
  uint32_t seq_session[2]; // Sessions of the sequences, a byte each, sequence 0 lowest.
  uint32_t seq_position[8]; // First position of each sequence.
  uint32_t seq_sample; // A bit per sequence: `FLAG_SAMPLE` for that sequence.
  uint32_t seq_forced[2]; // Tokens after its first that each sequence takes from its session's buffer, a byte each, sequence 0 lowest.
  uint32_t sequence; // Index of the entry plus one; written last.
};
static_assert(sizeof(amk_submission) == 128 && alignof(amk_submission) == 64, "layout of amk_submission");

struct alignas(64) amk_completion {
  uint32_t trap; // A `Trap`; zero is success.
  uint32_t steps; // Positions that were run.
  uint32_t token; // The last token that was chosen.
  uint32_t ending; // An `Ending`.
  uint64_t start_ns; // Device nanoseconds when the command was started.
  uint64_t end_ns; // Device nanoseconds when it was completed.
  uint32_t seq_endings; // Batches: the `Ending` of each sequence, `SEQ_ENDING_BITS` each, sequence 0 lowest.
  uint32_t reserved[6]; // Zero.
  uint32_t sequence; // Index of the entry plus one; written last.
};
static_assert(sizeof(amk_completion) == 64 && alignof(amk_completion) == 64, "layout of amk_completion");

struct alignas(16) amk_sampling {
  uint64_t logits; // Address of the rows of logits.
  uint64_t seen; // Address of a bit per token of the vocabulary: it has occurred in the sequence.
  uint64_t biased; // Address of a bit per token of the vocabulary: it has a bias.
  uint64_t bias; // `amk_bias[bias_len]`, by token.
  uint64_t list; // Scratch: 16 bytes for each token of the vocabulary, and for each thread of a worker.
  uint64_t changed; // Scratch: a row after penalty and bias, whole groups of 4 logits.
  uint64_t seed; // Seed of the random numbers.
  uint64_t share; // `top_p` in 32 binary places, rounded up; `2^32` for no limit.
  uint64_t least; // The least weight that passes `min_p`.
  float scale; // Factor on the differences to the highest logit.
  float penalty; // Repetition penalty; 1 for none.
  uint32_t top_k; // `top_k`: only this many likeliest tokens; 0 for no limit.
  uint32_t bias_len; // Number of biases.
  uint32_t greedy; // Bit 0: greedy, the highest logit after penalty and bias. [`SAMPLING_MASKED`](crate::SAMPLING_MASKED): `biased` is
  uint32_t upto; // Positions whose tokens are in `seen`; the host writes zero when a sequence begins.
};
static_assert(sizeof(amk_sampling) == 96 && alignof(amk_sampling) == 16, "layout of amk_sampling");

struct alignas(8) amk_bias {
  uint32_t token; // Token.
  float value; // Value added to its logit.
};
static_assert(sizeof(amk_bias) == 8 && alignof(amk_bias) == 8, "layout of amk_bias");

struct alignas(128) amk_ring_indices {
  uint32_t abort; // Written by the host: nonzero makes every worker leave.
  uint32_t preempt; // Written by the host: sequence of the command that must yield after the current step.
  uint32_t reserved0[30]; // Zero.
  uint32_t heartbeat; // Written by the device: changes while the poller runs.
  uint32_t reserved1[31]; // Zero.
  uint32_t head; // Written by the device: submissions consumed.
  uint32_t waiting; // Written by the device: sequence of the current command while it waits for weights (`wait_io`), else zero.
  uint32_t reserved2[30]; // Zero.
};
static_assert(sizeof(amk_ring_indices) == 384 && alignof(amk_ring_indices) == 128, "layout of amk_ring_indices");

struct alignas(64) amk_status {
  uint32_t trap; // A `Trap`.
  uint32_t worker; // Worker that reported, counted over all devices.
  uint32_t task; // Its task, by index in its queue.
  uint32_t opcode; // Opcode of the task.
  uint32_t object; // Counter, buffer, stage or device waited for.
  uint32_t have; // Value that it held.
  uint32_t need; // Value that was needed.
  uint32_t epoch; // Epoch.
  uint64_t waited_ns; // Nanoseconds waited.
  uint32_t left; // Workers that have left.
  uint32_t reserved[4]; // Zero.
  uint32_t valid; // Written last: nonzero when the block is complete.
};
static_assert(sizeof(amk_status) == 64 && alignof(amk_status) == 64, "layout of amk_status");

struct alignas(16) amk_worker_heartbeat {
  uint32_t beat; // The device's clock at the last write, in units of 1 024 ns; it wraps.
  uint32_t active; // Nonzero while a step is running.
  uint32_t progress; // Tasks done since the launch; it wraps.
  uint32_t epoch; // The current step, or the last one, counted since the launch or the load of the program.
  uint32_t position; // Position of that step.
  uint32_t task; // Tasks of its queue that the worker has done in that step.
  uint32_t issued; // Bytes that the loader has requested since the launch, in units of 512; it wraps.
  uint32_t wait; // Reason of a long wait: a `Trap` as it would be reported, or zero.
  uint32_t object; // Counter, buffer or stage waited for.
  uint32_t have; // Value that it held.
  uint32_t need; // Value that was needed.
  uint32_t reserved; // Zero.
};
static_assert(sizeof(amk_worker_heartbeat) == 48 && alignof(amk_worker_heartbeat) == 16, "layout of amk_worker_heartbeat");

struct alignas(4) amk_nop_params {
  uint32_t reserved[16]; // Zero.
};
static_assert(sizeof(amk_nop_params) == 64 && alignof(amk_nop_params) == 4, "layout of amk_nop_params");

struct alignas(4) amk_embed_params {
  uint32_t offset; // First element.
  uint32_t len; // Elements.
  float scale; // Factor of the elements; zero for none.
  uint32_t reserved[13]; // Zero.
};
static_assert(sizeof(amk_embed_params) == 64 && alignof(amk_embed_params) == 4, "layout of amk_embed_params");

struct alignas(4) amk_matvec_params {
  uint32_t matrix; // Matrix of the program; the rows come from the worker's load stream, in order.
  uint32_t tile0; // First tile of 8 rows.
  uint32_t tiles; // Tiles; even for `silu_mul`.
  uint32_t units; // Units of 64 bytes along a row.
  uint32_t k_len; // Elements of `x` that count; the rest of the last unit is zero in the matrix.
  uint32_t rows; // Rows of the matrix that count; the rest of the last tile is padding.
  uint32_t prologue; // A `Prologue`.
  uint32_t epilogue; // An `Epilogue`.
  float eps; // Epsilon of the norms, for `rms` and `post_norm`.
  uint32_t splits; // Splits of the attention partials, for `merge`.
  uint32_t head_dim; // Elements of a head, for `merge`.
  uint32_t kv_block; // Keys of a block, for `merge`.
  uint32_t window; // Sliding window or zero, for `merge`.
  uint32_t candidate; // Index of this task's entry in the candidates buffer, for `logits`.
  uint32_t activation; // An `Activation`, for `silu_mul`.
  float cap; // Soft cap `c` of the logits, which become `c tanh(logit / c)`, or zero for none. With `clamped_silu` its limit.
};
static_assert(sizeof(amk_matvec_params) == 64 && alignof(amk_matvec_params) == 4, "layout of amk_matvec_params");

struct alignas(4) amk_attention_params {
  uint32_t kv_head; // Key/value head.
  uint32_t kv_heads; // Key/value heads of the model.
  uint32_t group; // Query heads that share a key/value head.
  uint32_t head_dim; // Elements of a head.
  uint32_t split; // This task's split.
  uint32_t splits; // Splits of this head; how many are active follows from the keys at run time.
  uint32_t kv_block; // Keys of a block: splits are made of whole blocks.
  uint32_t window; // Sliding window, or zero for full attention.
  float scale; // Factor on q.k.
  float eps; // Epsilon of the q and k norms.
  float cap; // Soft cap `c` of the scores, which become `c tanh(score / c)`, or zero for none.
  uint32_t part; // This task's part of the group: `ATTENTION_GROUP` query heads, the last part those that are left.
  uint32_t reserved[4]; // Zero.
};
static_assert(sizeof(amk_attention_params) == 64 && alignof(amk_attention_params) == 4, "layout of amk_attention_params");

struct alignas(4) amk_attention_merge_params {
  uint32_t head0; // First query head.
  uint32_t heads; // Query heads.
  uint32_t heads_total; // Query heads of the model.
  uint32_t head_dim; // Elements of a head.
  uint32_t splits; // Splits of the partials.
  uint32_t kv_block; // Keys of a block.
  uint32_t window; // Sliding window or zero.
  uint32_t reserved[9]; // Zero.
};
static_assert(sizeof(amk_attention_merge_params) == 64 && alignof(amk_attention_merge_params) == 4, "layout of amk_attention_merge_params");

struct alignas(4) amk_sample_params {
  uint32_t candidates; // Candidates.
  uint32_t reserved[15]; // Zero.
};
static_assert(sizeof(amk_sample_params) == 64 && alignof(amk_sample_params) == 4, "layout of amk_sample_params");

struct alignas(4) amk_norm_params {
  uint32_t offset; // First element written.
  uint32_t len; // Elements written.
  uint32_t width; // Elements of `x`.
  uint32_t first; // Elements of the first part.
  uint32_t second; // Elements of the second part, after the first.
  float eps; // Epsilon of the norms.
  uint32_t reserved[10]; // Zero.
};
static_assert(sizeof(amk_norm_params) == 64 && alignof(amk_norm_params) == 4, "layout of amk_norm_params");

struct alignas(4) amk_route_params {
  uint32_t first; // First logit.
  uint32_t experts; // Logits: experts to choose from.
  uint32_t slots; // Experts that are chosen: slots of the route.
  uint32_t scoring; // A `Scoring`.
  uint32_t reserved[12]; // Zero.
};
static_assert(sizeof(amk_route_params) == 64 && alignof(amk_route_params) == 4, "layout of amk_route_params");
