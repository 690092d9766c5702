// Sequences: the sessions that a step runs at once (decision 022). Every task runs for each of them, on the sequence's own copy of the scratch
// buffers. A kernel of one sequence compiles to the same code as without batches.
#pragma once

static_assert(SEQS == 1 || SEQS == 2 || SEQS == 4 || SEQS == AMK_SEQS_MAX, "rows of a product's left operand");
constexpr uint32_t BATCH_TILES = AMK_BATCH_TILES;

#if AMK_SEQS > 1
constexpr uint32_t STEP_BYTES = sizeof(amk_step) + sizeof(amk_seqs);
// Sequences whose new keys and values fit in shared memory together, a power of two. Same as ir::program::smem::fresh_rows.
constexpr uint32_t FRESH_MOST = AMK_FRESH_BYTES / (4 * AMK_HEAD_DIM) >= 8 ? 8 : 4, FRESH_ROWS = FRESH_MOST < SEQS ? FRESH_MOST : SEQS;
static_assert(AMK_OFFSETOF(Shared, seqs) == AMK_OFFSETOF(Shared, step) + sizeof(amk_step), "both are copied as one");

__device__ __forceinline__ uint32_t seqs_running(Worker const& w) { return w.shared->seqs.seqs; }
// The same worker, set to another sequence.
__device__ __forceinline__ Worker in_seq(Worker const& w, uint32_t seq) {
  Worker other = w;
  other.seq = seq;
  return other;
}
__device__ __forceinline__ uint32_t seq_of(Worker const& w) { return w.seq; }
__device__ __forceinline__ uint32_t seq_token(Worker const& w) { return w.shared->seqs.token[w.seq]; }
__device__ __forceinline__ uint32_t seq_position(Worker const& w) { return w.shared->step.index + w.shared->seqs.position[w.seq]; }
__device__ __forceinline__ uint32_t seq_session(Worker const& w) { return w.shared->seqs.session[w.seq]; }
__device__ __forceinline__ uint32_t seq_forced(Worker const& w) { return w.shared->seqs.forced[w.seq]; }
__device__ __forceinline__ uint32_t seq_logits_row(Worker const& w) { return w.seq * w.shared->program.logits_rows + w.shared->step.logits_row; }
// How many sequences directly before this one run the positions before its own of the same session; and those of all sequences, zero
// without a window.
__device__ __forceinline__ uint32_t seqs_windows(Worker const& w) { return w.shared->seqs.windows; }
__device__ __forceinline__ uint32_t seqs_before(Worker const& w) { return w.shared->seqs.windows >> 4 * w.seq & 15; }
// The run of a sequence, part of its tags.
__device__ __forceinline__ uint32_t seq_run(Worker const& w) { return w.shared->seqs.runs >> 2 * w.seq & 3; }
// Address of a buffer. Each sequence has its own activations.
__device__ __forceinline__ uint64_t buffer_address(Worker const& w, ResolvedBuffer const& s) {
  bool const own = is_flag_in_data(s) || (AMK_DEVICES > 1 ? s.kind & ~REPLICATED : s.kind) == AMK_BUFFER_PLAIN;
  return s.address + (own ? (uint64_t)w.seq * w.shared->program.seq_bytes : 0);
}
// The split that a task of `split` works on in a sequence. If a program verifies, so does every rotation (ir/src/program/verify/together.rs).
__device__ __forceinline__ uint32_t seq_split(uint32_t split, uint32_t splits, uint32_t seq) { return (split + seq) % splits; }

// First sequence of an attention task. The sequences are taken in turn from the one in which the task has the first split: for short contexts
// this is the only one with keys, and nothing delays it.
__device__ __forceinline__ uint32_t first_seq(uint32_t split, uint32_t splits, uint32_t running) {
  uint32_t const seq = split == 0 ? 0 : splits - split;
  return seq < running ? seq : 0;
}

// All threads: calls `f` for each sequence in turn.
template <typename F> __device__ __forceinline__ void for_seqs(Worker& w, F const& f) {
  consumers_sync(); // scratch may hold sums of the preceding matvec
#pragma unroll 1
  for (w.seq = 0; w.seq < seqs_running(w); ++w.seq) {
    f();
  }
  w.seq = 0;
}

// One thread, when step `started` begins: records what the loader needs for it.
__device__ __forceinline__ void note_started(Shared* sh, uint32_t started) {
  uint32_t const at = started % 2 * SEQS;
#pragma unroll
  for (uint32_t i = 0; i < SEQS; ++i) {
    flag_store(&sh->started_position[at + i], sh->step.index + sh->seqs.position[i]);
    flag_store(&sh->started_session[at + i], sh->seqs.session[i]);
  }
  flag_store(&sh->started_seqs[started % 2], sh->seqs.seqs);
}
__device__ __forceinline__ uint32_t started_seqs(Shared* sh, uint32_t wrap) { return flag_load(&sh->started_seqs[wrap % 2]); }
#else
constexpr uint32_t STEP_BYTES = sizeof(amk_step);

__device__ __forceinline__ uint32_t seq_of(Worker const&) { return 0; }
__device__ __forceinline__ uint32_t seq_token(Worker const& w) { return w.shared->step.token; }
__device__ __forceinline__ uint32_t seq_position(Worker const& w) { return w.shared->step.position; }
__device__ __forceinline__ uint32_t seq_session(Worker const& w) { return w.shared->step.session; }
__device__ __forceinline__ uint32_t seq_logits_row(Worker const& w) { return w.shared->step.logits_row; }
__device__ __forceinline__ uint32_t seq_run(Worker const&) { return 0; }
__device__ __forceinline__ uint64_t buffer_address(Worker const&, ResolvedBuffer const& s) { return s.address; }
__device__ __forceinline__ uint32_t seq_split(uint32_t split, uint32_t, uint32_t) { return split; }
__device__ __forceinline__ uint32_t first_seq(uint32_t, uint32_t, uint32_t) { return 0; }
template <typename F> __device__ __forceinline__ void for_seqs(Worker&, F const& f) { f(); }
__device__ __forceinline__ void note_started(Shared* sh, uint32_t started) {
  flag_store(&sh->started_position[started % 2], sh->step.position);
  flag_store(&sh->started_session[started % 2], sh->step.session);
}
__device__ __forceinline__ uint32_t started_seqs(Shared*, uint32_t) { return 1; }
#endif
