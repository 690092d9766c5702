// Experts of a prompt's chunk (prefill_route.cuh, prefill_gemm.cuh) as host C++, against the definition in f64: routes, groups, products of every
// expert over its tokens, sums. The input file has the shape of the products' blocks and whether the activation is clamped. Prints the greatest
// error, or what is wrong. With AMK_PARTS the rows of every expert are dealt to two devices, one after the other in the same memory. Compiled by vm-host/src/prefill/expert_tests.rs.
#define WORKERS 2 // of 8 warps, which are a block here
#include "simt.hpp"
#include "tensor.hpp"
#include "group.hpp"
#include "amk_abi.h"
#define threadIdx thread_of_worker
#include "attention.hpp"
#undef threadIdx
#include "block.hpp"
#include <algorithm>

struct {
  struct {
    operator uint32_t() const { return fibers.running; }
  } x;
} threadIdx;
constexpr uint32_t TAG_MASK = 15;
constexpr bool MIXED = false;
inline float warp_sum(float v) {
  for (int o = 16; o > 0; o /= 2) {
    v += __shfl_xor_sync(~0u, v, o);
  }
  return v;
}
inline float tanh_fast(float);
// What the resident kernel's routes need to be parsed, and is not called here.
constexpr uint32_t SPINS_PER_LOOK = 1;
inline bool is_dead(Shared*) { return false; }
inline uint32_t flag_load(uint32_t const* p) { return *p; }
inline void flag_store(uint32_t* p, uint32_t v) { *p = v; }
inline void block_fence() {}
inline bool vec4_here(Words const&, uint4 const&) { return true; }
inline bool word_here(Words const&, uint32_t) { return true; }
inline float word_wait(Worker const&, Words const& s, uint32_t i) { return __uint_as_float(s.at[i]); }

// Barriers of stages, in shared memory: arrivals of a phase, those that are missing, and the number of the phase.
struct StageBarrier {
  uint16_t arrivals, missing;
  uint32_t phase;
};
inline StageBarrier& barrier_at(uint32_t at) { return *(StageBarrier*)(prefill_memory + at); }
inline char* shared_place(uint32_t at) { return prefill_memory + at; }
inline void barrier_init(uint64_t* b, uint32_t arrivals) { *(StageBarrier*)b = StageBarrier{(uint16_t)arrivals, (uint16_t)arrivals, 0}; }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* at) {
  StageBarrier& b = *(StageBarrier*)at;
  if (--b.missing == 0) {
    b.missing = b.arrivals, ++b.phase;
  }
}
inline bool barrier_try_at(uint32_t at, uint32_t parity) {
  if (barrier_at(at).phase % 2 != parity) {
    return true;
  }
  next_fiber();
  return false;
}
inline void stage_expect_at(uint32_t full, uint32_t) { barrier_arrive((uint64_t*)shared_place(full)); }
inline void stage_copy_at(uint32_t to, uint64_t from, uint32_t bytes, uint32_t, uint64_t) { std::memcpy(prefill_memory + to, (void const*)from, bytes); }
[[noreturn]] inline void __trap() { std::abort(); }

#include "device.hpp"

constexpr uint32_t TOKENS = 150, EXPERTS = 6, SLOTS = 2, HIDDEN = 96, STRIDE = 8, CHUNK = 152;
// Where devices' rows of an expert begin, and the last ones end: hidden layers are dealt in blocks of 64.
#ifdef AMK_PARTS
constexpr uint32_t PARTS = 2, WIDTH = 128, UP_AT[] = {0, 128, 256}, DOWN_AT[] = {0, 40, 96};
#define AMK_COLUMNS , DOWN_AT[part + 1] - DOWN_AT[part]
#else
constexpr uint32_t PARTS = 1, WIDTH = 64, UP_AT[] = {0, 128}, DOWN_AT[] = {0, 96};
#define AMK_COLUMNS
#endif
constexpr uint32_t CHOICES = TOKENS * SLOTS, ROOM = (CHOICES + EXPERTS * 7 + 7) / 8 * 8, NOBODYS = 3;
constexpr uint32_t UP_ROWS = 2 * WIDTH, UP_UNITS = HIDDEN / 32, DOWN_UNITS = WIDTH / 32;
static float logits[TOKENS * STRIDE], weights[TOKENS * (SLOTS + 1)], products[(ROOM + 1) * HIDDEN], shared[(TOKENS + 1) * HIDDEN], residual[(TOKENS + 1) * HIDDEN], before[TOKENS * HIDDEN];
static float up_bias[EXPERTS * UP_ROWS], down_bias[EXPERTS * HIDDEN], down_factors[HIDDEN];
static uint32_t chosen[CHOICES], ranks[CHOICES], places[CHOICES], counts[EXPERTS], first_place[EXPERTS], first_block[EXPERTS + 1], clamped_flag;
alignas(16) static uint4 blocks[CHOICES / 64 + EXPERTS + 1];
constexpr uint32_t vectors(uint32_t columns, uint32_t pitch) { return ((columns + 63) / 64 * pitch + 256) * X_ROW_BYTES; }
alignas(1024) static char x[vectors(HIDDEN, CHUNK)], gathered[vectors(HIDDEN, ROOM)], hidden[vectors(WIDTH, ROOM)];
alignas(16) static char up[EXPERTS * UP_ROWS / 8 * UP_UNITS * 512], down[EXPERTS * HIDDEN / 8 * DOWN_UNITS * 512];
static uint32_t shape, pass, part; // of a pass: its first expert
static float limit;

static float up_weight(uint32_t e, uint32_t row, uint32_t column) { return half_value(half_bits(noise(e * UP_ROWS + row, column) / 6)); }
static float down_weight(uint32_t e, uint32_t row, uint32_t column) { return half_value(half_bits(noise(7777 + e * HIDDEN + row, column) / 4)); }
static float vector(uint32_t token, uint32_t column) { return half_value(half_bits(noise(99 + token, column) * 1.5f)); }
static void pack(char* to, uint32_t units, uint32_t const* ends, float (*weight)(uint32_t, uint32_t, uint32_t)) {
  for (uint32_t p = 0; p < PARTS; ++p) {
    uint32_t const rows = ends[p + 1] - ends[p];
    for (uint32_t at = 0; at < EXPERTS * rows * units * 32; ++at) {
      uint32_t const row = at / (units * 32), column = at % (units * 32);
      char* const place = to + (row / 8 * units + column / 32) * 512 + row % 8 * 64 + column % 32 * 2;
      *(uint16_t*)place = half_bits(weight(row / rows, ends[p] + row % rows, column));
    }
    to += EXPERTS * rows / 8 * units * 512;
  }
}

template <void (*KERNEL)()> void body(uint32_t, uint32_t) {
  if (fibers.running < block_threads) {
    KERNEL();
  }
}
template <void (*KERNEL)()> void launch(uint32_t grid, uint32_t threads) {
  block_threads = threads, gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    std::memset(prefill_memory, 0xff, sizeof prefill_memory);
    run_workers(body<KERNEL>);
  }
}
static void route() { amk_prefill_route(chosen, weights, logits, TOKENS, STRIDE, EXPERTS, SLOTS, shape == 0 ? AMK_SCORING_CHOSEN : AMK_SCORING_ALL, 1); }
static void rank() { amk_prefill_rank(ranks, counts, chosen, CHOICES); }
static void group() { amk_prefill_blocks(first_place, first_block, blocks, counts, EXPERTS, shape == 0 ? 64 : 128); }
static void gather() { amk_prefill_gather(gathered, places, x, chosen, ranks, first_place, SLOTS, 2, CHUNK, ROOM); }
static void combine() {
  uint32_t const at = DOWN_AT[part];
  amk_prefill_combine(residual + at, products + at, shared + at, places, weights, SLOTS, HIDDEN AMK_COLUMNS);
}
// Experts in two passes, as codes that do not fit at once: the weights begin with the first of a pass.
static void gate_up() {
  uint32_t const at = UP_AT[part], rows = UP_AT[part + 1] - at;
  char const* const from = up + (EXPERTS * at + pass * rows) / 8 * UP_UNITS * 512;
  char* const to = hidden + at / 2 / 64 * ROOM * X_ROW_BYTES;
  float const* const bias = PARTS == 1 ? up_bias : nullptr;
  auto const kernel = shape == 0 ? amk_prefill_silu_small : amk_prefill_silu_middle;
  uint32_t const experts = pass == 0 ? 2 : EXPERTS - 2;
  kernel(to, gathered, from, bias, &clamped_flag, UP_UNITS, rows / 8, CHOICES, ROOM, ROOM, 1.f / 64, nullptr, first_block, blocks, pass, experts, limit);
}
static void product() {
  uint32_t const at = DOWN_AT[part], rows = DOWN_AT[part + 1] - at;
  char const* const from = down + (EXPERTS * at + pass * rows) / 8 * DOWN_UNITS * 512;
  float const *const bias = PARTS == 1 ? down_bias : nullptr, *const factors = down_factors + at;
  auto const kernel = shape == 0 ? amk_prefill_store_small : amk_prefill_store_middle;
  uint32_t const experts = pass == 0 ? 2 : EXPERTS - 2;
  kernel((char*)(products + at), hidden, from, bias, &clamped_flag, DOWN_UNITS, rows / 8, CHOICES, HIDDEN, ROOM, 64.f, factors, first_block, blocks, pass, experts, 0);
}

static void fill() {
  pack(up, UP_UNITS, UP_AT, up_weight);
  pack(down, DOWN_UNITS, DOWN_AT, down_weight);
  for (uint32_t i = 0; i < TOKENS * STRIDE; ++i) {
    uint32_t const token = i / STRIDE, e = i % STRIDE;
    float const even = std::round(noise(token, 500 + e) * 4) / 4; // of few values, so that some are equal
    logits[i] = e == NOBODYS ? -9.f : e == 1 ? even + 1.5f : even; // nobody's, and a favourite
  }
  for (uint32_t i = 0; i < TOKENS * HIDDEN; ++i) {
    residual[i] = before[i] = noise(i, 1), shared[i] = noise(i, 2);
    x_write2(x, CHUNK, i / HIDDEN, i % HIDDEN / 2 * 2, vector(i / HIDDEN, i % HIDDEN / 2 * 2), vector(i / HIDDEN, i % HIDDEN / 2 * 2 + 1));
  }
  for (uint32_t i = 0; i < EXPERTS * UP_ROWS; ++i) {
    up_bias[i] = PARTS == 1 ? noise(i, 3) / 2 : 0;
  }
  for (uint32_t i = 0; i < EXPERTS * HIDDEN; ++i) {
    down_bias[i] = PARTS == 1 ? noise(i, 4) : 0;
  }
  for (uint32_t i = 0; i < HIDDEN; ++i) {
    down_factors[i] = 1 + i % 3;
  }
  std::memset(gathered, 0, sizeof gathered);
  std::memset(hidden, 0, sizeof hidden);
  std::memset(products, 0xff, sizeof products); // NaN
}

// What a token's expert adds, before its weight.
static void expert(uint32_t e, uint32_t token, double* out) {
  double h[WIDTH];
  for (uint32_t i = 0; i < WIDTH; ++i) {
    double both[2];
    for (uint32_t half = 0; half < 2; ++half) { // tiles of gate and of up alternate
      uint32_t const row = i / 8 * 16 + half * 8 + i % 8;
      both[half] = up_bias[e * UP_ROWS + row];
      for (uint32_t c = 0; c < HIDDEN; ++c) {
        both[half] += (double)up_weight(e, row, c) * vector(token, c);
      }
    }
    double const gate = limit != 0 ? std::min(both[0], (double)limit) : both[0];
    double const rise = limit != 0 ? std::clamp(both[1], -(double)limit, (double)limit) + 1 : both[1];
    h[i] = gate / (1 + std::exp(limit != 0 ? -1.702 * gate : -gate)) * rise;
  }
  for (uint32_t row = 0; row < HIDDEN; ++row) {
    out[row] = 0;
    for (uint32_t c = 0; c < WIDTH; ++c) {
      out[row] += down_weight(e, row, c) * h[c];
    }
    out[row] = out[row] * down_factors[row] + down_bias[e * HIDDEN + row];
  }
}

static double check(uint32_t token) {
  float const* const row = logits + token * STRIDE;
  uint32_t order[EXPERTS];
  for (uint32_t e = 0; e < EXPERTS; ++e) {
    order[e] = e;
  }
  std::stable_sort(order, order + EXPERTS, [&](uint32_t a, uint32_t b) { return row[a] > row[b]; });
  double total = 0, sum[HIDDEN], worst = 0;
  for (uint32_t i = 0; i < (shape == 0 ? SLOTS : EXPERTS); ++i) {
    total += std::exp((double)row[order[i]] - row[order[0]]);
  }
  for (uint32_t i = 0; i < HIDDEN; ++i) {
    sum[i] = before[token * HIDDEN + i] + shared[token * HIDDEN + i] / (1 + std::exp(-(double)row[EXPERTS]));
  }
  for (uint32_t slot = 0; slot < SLOTS; ++slot) {
    double out[HIDDEN];
    expert(order[slot], token, out);
    for (uint32_t i = 0; i < HIDDEN; ++i) {
      sum[i] += out[i] * std::exp((double)row[order[slot]] - row[order[0]]) / total;
    }
    if (chosen[token * SLOTS + slot] != order[slot]) {
      return INFINITY;
    }
  }
  for (uint32_t i = 0; i < HIDDEN; ++i) {
    double const error = std::fabs(residual[token * HIDDEN + i] - sum[i]);
    worst = error <= worst ? worst : error; // of NaN too
  }
  return worst;
}

// Places are in the order of the tokens, and no two choices have the same.
static bool grouped() {
  std::vector<uint32_t> next(EXPERTS);
  uint32_t place = 0;
  for (uint32_t e = 0; e < EXPERTS; ++e) {
    next[e] = place;
    place += ((uint32_t)std::count(chosen, chosen + CHOICES, e) + 7) / 8 * 8;
  }
  bool right = std::count(chosen, chosen + CHOICES, NOBODYS) == 0 && std::count(chosen, chosen + CHOICES, 1u) > 128;
  for (uint32_t i = 0; i < CHOICES; ++i) {
    right &= places[i] == next[chosen[i]]++;
  }
  return right;
}

int main(int, char** names) {
  std::FILE* const in = std::fopen(names[1], "r");
  uint32_t is_clamped = 0;
  (void)!std::fscanf(in, "%u %u", &shape, &is_clamped);
  limit = is_clamped != 0 ? 0.75f : 0.f;
  fill();
  launch<route>((TOKENS + 7) / 8, PREFILL_THREADS);
  launch<rank>(EXPERTS, PREFILL_THREADS);
  launch<group>(1, PREFILL_THREADS);
  launch<gather>(TOKENS, PREFILL_THREADS);
  uint32_t const threads = shape == 0 ? SmallShape::THREADS : MiddleShape::THREADS;
  auto const passes = [&](auto run) {
    for (part = 0; part < PARTS; ++part) {
      for (pass = 0; pass < EXPERTS; pass += pass == 0 ? 2 : EXPERTS) {
        run();
      }
    }
  };
  passes([&] { launch<gate_up>(3, threads); });
  passes([&] { launch<product>(3, threads); });
  for (part = 0; part < PARTS; ++part) {
    launch<combine>(TOKENS, PREFILL_THREADS);
  }
  double worst = grouped() && clamped_flag == 0 ? 0 : INFINITY;
  for (uint32_t token = 0; token < TOKENS; ++token) {
    double const error = check(token);
    worst = error <= worst ? worst : error;
  }
  std::printf("%.3e\n", worst);
  return 0;
}
