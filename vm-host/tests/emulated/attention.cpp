// Attention of a step (op_attention.cuh) as host C++, from the words of queries, keys and values to its partial results, against the definition
// in f64: positions one after the other, each of which leaves its key and value in the cache for the next. Stages are filled as the loader
// does it (keys.cuh). Prints the greatest error, then the mask of the chunks of each of 16 rows. Compiled by vm-host/src/attention_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#include "tensor.hpp"
#include "amk_abi.h"

#include "attention.hpp"
#include "device.hpp"

#include "attention_cache.hpp"

static void run(uint32_t, uint32_t thread) {
  Worker w = worker;
  w.thread = thread;
  Cursor c = {0};
  op_attention(w, staged, c);
}

// The step of a position: all tasks of its attention, then the greatest error of their merged results.
static double step(uint32_t position, uint32_t stage_bytes, uint32_t window) {
  now = position;
  append(position);
  step_words(0, position);
  std::memset(partials, 0xff, sizeof partials); // NaN
  worker.stage_bytes = stage_bytes;
  uint32_t const count = attended(position, window), active = active_splits(count, KV_BLOCK, SPLITS), oldest = position + 1 - count;
  for (uint32_t task = 0; task < KV_HEADS * SPLITS * ((GROUP + GROUP_BUF - 1) / GROUP_BUF); ++task) {
    uint32_t const kv_head = task % KV_HEADS, split = task / KV_HEADS % SPLITS, part = task / KV_HEADS / SPLITS;
    amk_attention_params const p = {kv_head, KV_HEADS, GROUP, HEAD, split, SPLITS, KV_BLOCK, window, SCALE, EPS, 0.f, part};
    std::memcpy(staged.task.params, &p, sizeof p);
    if (split < active) {
      uint32_t const start = split_start(count, KV_BLOCK, active, split);
      load(kv_head, oldest + start, split_start(count, KV_BLOCK, active, split + 1) - start, 0);
    }
    run_workers(run);
  }
  return error_of(0, position, window);
}

int main() {
  begin();
  worker = Worker{&shared, prefill_memory, prefill_memory + (64 << 10), 0, 0, 1000};
  double worst = 0;
  uint32_t const steps[] = {0, 1, 15, 16, 31, 40, 63, 64, 129, 200, POSITIONS - 2, POSITIONS - 1};
  for (uint32_t position = 0, next = 0; position < POSITIONS; ++position) {
    if (position != steps[next]) {
      append(position);
      cached(position);
      continue;
    }
    ++next;
    uint32_t const bytes = 8192u << next % 3, window = next % 4 == 3 ? 50 : 0;
    double const error = step(position, bytes, window);
    worst = error <= worst ? worst : error;
  }
  std::printf("%.3e", worst);
  for (uint32_t i = 0; i < 16; ++i) {
    std::printf(" %u", row_swizzle(i));
  }
  std::printf("\n");
  return 0;
}
