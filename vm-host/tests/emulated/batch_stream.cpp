// What the loader copies into stages for several sequences (stream.cuh), as host C++: nothing has to be waited for. The input file has loads: tiles, units of
// a tile, units of a stage or of a part, bytes of a unit, tiles of a stage; prints for each stage its bytes, then place, source and bytes of
// each copy. Compiled by vm-host/src/batch_products_tests.rs.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include "amk_abi.h"

#define __device__
#define __forceinline__ inline
struct uint4 {
  uint32_t x, y, z, w;
};
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline uint32_t __fdividef(float a, float b) { return (uint32_t)(a / b); }
constexpr uint32_t SEQS = AMK_SEQS, BATCH_TILES = AMK_BATCH_TILES;
struct PageLines {
  uint32_t wrap;
};
struct Shared {
  uint64_t full[8], empty[8];
  amk_program program;
  amk_queue queue;
  uint32_t dead, halt, near, started, started_position[2 * SEQS], started_session[2 * SEQS], issued, watermark;
  PageLines pages;
  amk_launch const* launch;
};
struct Worker {
  Shared* shared;
  char* ring;
  uint32_t stages, stage_bytes, thread;
};
struct LoaderWaits {
  uint32_t free, cap, start;
};
inline uint32_t flag_load(uint32_t const* p) { return *p; }
inline void flag_store(uint32_t* p, uint32_t v) { *p = v; }
inline bool is_dead(Shared*) { return false; }
inline uint64_t now_ns() { return 0; }
inline uint32_t trace_clock() { return 0; }
inline bool weight_stream_wait(Shared*, uint32_t, uint32_t) { return true; }
inline bool barrier_try_at(uint32_t, uint32_t) { return true; }
inline void stage_expect_at(uint32_t, uint32_t bytes) { std::printf("\n%u: ", bytes); }
inline void stage_copy_at(uint32_t stage, uint64_t from, uint32_t bytes, uint32_t, uint64_t) { std::printf("%u %llu %u, ", stage % (1u << 16), (unsigned long long)from, bytes); }
// What the rest of the file needs to be parsed, and is not called here.
bool wait_stage(Shared*, uint64_t*, uint32_t, uint32_t);
bool barrier_try(uint64_t*, uint32_t);
bool barrier_test(uint64_t*, uint32_t);
void barrier_arrive(uint64_t*);
void trace_starved(Worker const&, uint32_t);
void trace_loader(Worker const&, LoaderWaits&);
int __all_sync(unsigned, int);
void __syncwarp();
void block_fence();
void copies_see_stores();
uint32_t rows_of_page(uint32_t, uint32_t);
uint64_t paged_row(uint32_t, uint32_t, uint32_t);
uint32_t page_kept(PageLines const&, uint32_t);
uint32_t paged_key(uint32_t, uint32_t, uint32_t);
void lines_forget(PageLines&, uint32_t);
void lines_begin(PageLines&, uint64_t, uint32_t);
void lines_ahead(PageLines&, uint64_t, uint32_t);
template <int> void pieces_wait();
uint32_t seq_split(uint32_t, uint32_t, uint32_t);
uint32_t first_seq(uint32_t, uint32_t, uint32_t);
uint32_t started_seqs(Shared*, uint32_t);
uint32_t shared_address(void const*);
uint64_t evict_first_policy();
uint4 load_u32x4(void const*);
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }
#include "device.hpp"

int main(int, char** arguments) {
  FILE* const file = std::fopen(arguments[1], "r");
  uint32_t tiles, units, stage_units, unit, stage_tiles;
  while (std::fscanf(file, "%u %u %u %u %u", &tiles, &units, &stage_units, &unit, &stage_tiles) == 5) {
    Shared shared = {};
    shared.program.stage_units = 64, shared.program.in_flight = 3, shared.program.in_flight_before_wait = 1;
    Loader l = {};
    l.stages = 4, l.stage_bytes = 1u << 16; // a multiple, so that a copy's place shows
    LoaderWaits waits = {};
    uint32_t const period = stage_units > units ? stage_units : units;
    uint4 const run = {1u << 20, 0, tiles * units, (uint32_t)AMK_LOAD_WEIGHTS | stage_units << 8 | period << 16};
    if (!loader_weights(&shared, l, run, 0, unit, stage_tiles, 0, waits)) {
      return 2;
    }
    std::printf("\n");
  }
  return 0;
}
