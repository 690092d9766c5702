// Attention of windows (op_attention.cuh) as host C++: consecutive positions of one session in one step, at places around the borders of tiles,
// splits and pages, on a cache whose rows from the first of them on are stale; alone, behind a sequence that is in no window, and behind a window. Prints the greatest error against the definition in f64, then
// how many words of partial results and bytes of the cache differ from those of the same positions one by one.
// Compiled by vm-host/src/attention_tests.rs.
#define WORKERS 1
#define SHARED_BYTES (3 << 20)
#include "simt.hpp"
#include "tensor.hpp"
#include "amk_abi.h"

#include "attention.hpp"
#include "device.hpp"
#include "attention_cache.hpp"

constexpr uint32_t OTHER = 5; // first position of the sequences of another session: their rows are stored again as they are
constexpr uint32_t OF_SEQ = SPLITS * HEADS * PARTIAL_WORDS;
static char alone_cache[sizeof cache];
static uint32_t alone[SEQS][OF_SEQ];

static void run(uint32_t, uint32_t thread) {
  Worker w = worker;
  w.thread = thread;
  Cursor c = {0};
  op_attention(w, staged, c);
}

// A step of one sequence.
static void step(uint32_t window);
static void one(uint32_t position, uint32_t window) {
  shared.seqs = amk_seqs{};
  shared.seqs.seqs = 1;
  shared.seqs.position[0] = position;
  step_words(0, position);
  std::memset(partials, 0xff, sizeof partials); // NaN
  step(window);
}

// A step of the running sequences: all tasks of its attention, whose stages are filled before any of them stores a row of the cache.
static void step(uint32_t window) {
  uint32_t const seqs = shared.seqs.seqs;
  static char stale[sizeof cache];
  std::memcpy(stale, cache, sizeof cache);
  static char stored[sizeof cache];
  std::memcpy(stored, cache, sizeof cache);
  for (uint32_t task = 0; task < KV_HEADS * SPLITS * ((GROUP + GROUP_BUF - 1) / GROUP_BUF); ++task) {
    uint32_t const kv_head = task % KV_HEADS, split = task / KV_HEADS % SPLITS, part = task / KV_HEADS / SPLITS;
    amk_attention_params const p = {kv_head, KV_HEADS, GROUP, HEAD, split, SPLITS, KV_BLOCK, window, SCALE, EPS, 0.f, part};
    std::memcpy(staged.task.params, &p, sizeof p);
    std::memcpy(cache, stale, sizeof cache);
    uint32_t seq = first_seq(split, SPLITS, seqs), stage = 0;
    for (uint32_t turn = 0; turn < seqs; ++turn) {
      uint32_t const position = shared.seqs.position[seq], keys_of = attended(position, window), active = active_splits(keys_of, KV_BLOCK, SPLITS);
      uint32_t const of = seq_split(split, SPLITS, seq);
      if (of < active) {
        uint32_t const start = split_start(keys_of, KV_BLOCK, active, of);
        stage = load(kv_head, position + 1 - keys_of + start, split_start(keys_of, KV_BLOCK, active, of + 1) - start, stage);
      }
      seq = seq + 1 == seqs ? 0 : seq + 1;
    }
    std::memcpy(cache, stored, sizeof cache);
    run_workers(run);
    std::memcpy(stored, cache, sizeof cache);
  }
}

// Positions from `first` on, one by one or in one window, behind so many sequences of another session, a window too. Returns the greatest error.
static double both_ways(uint32_t first, uint32_t count, uint32_t window, uint32_t behind) {
  for (uint32_t position = first; position < first + count; ++position) {
    char* const row = cache; // those of the step are stale
    for (uint32_t run = 0; run < 2 * KV_HEADS; ++run) {
      std::memset(row + paged_row(pages[position / PAGE_KEYS], KV_HEADS * PAGE_KEYS * ROW_BYTES, position) + run * PAGE_KEYS * ROW_BYTES, KV_CODES ? 0x60 : 0x77, ROW_BYTES);
    }
  }
  static char before[sizeof cache];
  std::memcpy(before, cache, sizeof cache);
  for (uint32_t i = 0; i < count; ++i) {
    one(first + i, window);
    std::memcpy(alone[i], partials, sizeof alone[i]);
  }
  std::memcpy(alone_cache, cache, sizeof cache);
  std::memcpy(cache, before, sizeof cache);
  shared.seqs = amk_seqs{};
  shared.seqs.seqs = behind + count;
  for (uint32_t seq = 0; seq < behind + count; ++seq) {
    uint32_t const i = seq < behind ? seq : seq - behind;
    shared.seqs.position[seq] = (seq < behind ? OTHER : first) + i;
    shared.seqs.windows |= i << 4 * seq;
    step_words(seq, shared.seqs.position[seq]);
  }
  std::memset(partials, 0xff, sizeof partials);
  step(window);
  double worst = 0;
  for (uint32_t seq = 0; seq < behind + count; ++seq) {
    double const error = error_of(seq, shared.seqs.position[seq], window);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

int main() {
  begin();
  shared.program.seq_bytes = SEQ_WORDS * 4;
  worker = Worker{&shared, prefill_memory, prefill_memory + (64 << 10), 0, 0, 1000};
  staged.buffer[0].kind = staged.buffer[AMK_READS_STAGED].kind = AMK_BUFFER_PLAIN;
  for (uint32_t position = 0; position < POSITIONS; ++position) {
    append(position);
    cached(position);
  }
  worker.stage_bytes = 8192;
  for (uint32_t i = 0; i < SEQS; ++i) {
    one(OTHER + i, 0);
  }
  double worst = 0;
  uint32_t words_off = 0, bytes_off = 0;
  // First position, positions, window of the attention, sequences of others before.
  uint32_t const cases[][4] = {{0, SEQS, 0, 0}, {1, 2, 0, 0}, {13, 4, 0, 0}, {30, 3, 0, 0}, {61, SEQS, 0, 0}, {62, 4, 50, 0}, {124, SEQS, 0, 0}, {126, 3, 50, 1}, {221, SEQS - 1, 0, 1}, {61, 5, 0, 3}, {125, 2, 50, 2}, {254, 4, 0, 0}, {POSITIONS - SEQS, SEQS, 0, 0}};
  uint32_t number = 0;
  for (auto const& of : cases) {
    worker.stage_bytes = 8192u << number++ % 3;
    uint32_t const count = of[1] + of[3] < SEQS ? of[1] : SEQS - of[3];
    double const error = both_ways(of[0], count, of[2], of[3]);
    worst = error <= worst ? worst : error;
    for (uint32_t i = 0; i < count; ++i) {
      for (uint32_t j = 0; j < OF_SEQ; ++j) {
        words_off += partials[(of[3] + i) * SEQ_WORDS + j] != alone[i][j];
      }
    }
    for (uint32_t i = 0; i < sizeof cache; ++i) {
      bytes_off += cache[i] != alone_cache[i];
    }
  }
  std::printf("%.3e %u %u\n", worst, words_off, bytes_off);
  return 0;
}
