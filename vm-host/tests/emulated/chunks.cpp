// The heads and the attention of a prompt's chunks (prefill_vectors.cuh, prefill_attention.cuh) as host C++, against the definition in f64: two
// chunks of a session, the second of which attends to the first. Prints the greatest error. Compiled by vm-host/src/attention_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#include "tensor.hpp"
#include "amk_abi.h"
#include "attention.hpp"

#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define AMK_DTYPE AMK_DTYPE_F16
struct {
  uint32_t x;
} blockIdx, gridDim;
constexpr uint32_t UNIT_COLS = 32, ELEMENT_BYTES = 2;
inline uint32_t unit_column(uint32_t e) { return e % UNIT_COLS; }
inline float2 pair_values(uint32_t v) { return half_values(v); }
inline float warp_sum(float v) { return v; }
inline void products_see_pieces() {}
// The threads of a block meet, which may be fewer than are emulated.
static uint32_t block_threads, block_waiting, block_round;
inline void __syncthreads() {
  uint32_t const round = block_round;
  if (++block_waiting == block_threads) {
    block_waiting = 0;
    ++block_round;
  }
  while (block_round == round) {
    next_fiber();
  }
}

// Products of a warpgroup: as wgmma reads a second operand whose rows have 128, 64 or 32 bytes.
template <uint32_t ROW> uint64_t operand(uint32_t at) { return (uint64_t)ROW << 32 | at; }
inline void group_fence() {}
inline void group_commit() {}
template <uint32_t LEFT> void group_wait() {}
inline float second_operand(uint64_t b, uint32_t row, uint32_t column) {
  uint32_t const of_row = (uint32_t)(b >> 32), at = (uint32_t)b + row * of_row + column * 2;
  return half_value(*(uint16_t const*)(prefill_memory + (at ^ (at >> 7 & of_row / 16 - 1) << 4)));
}
template <bool TRANSPOSED = false, uint32_t TILES> void group_multiply(float (&c)[TILES][4], uint32_t const (&a)[4], uint64_t b) {
  WarpWords const* of = warp_share(WarpWords{a[0], a[1], a[2], a[3]});
  uint32_t const lane = fibers.running % 32;
  for (uint32_t i = 0; i < TILES * 4; ++i) {
    uint32_t const row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      c[i / 4][i % 4] += first_operand(of, row, k) * (TRANSPOSED ? second_operand(b, k, column) : second_operand(b, column, k));
    }
  }
  warp_shared();
}

#include "device.hpp"

constexpr uint32_t HEAD = AMK_HEAD_DIM, GROUP = AMK_GROUP, KV_HEADS = 2, HEADS = GROUP * KV_HEADS, ROWS = HEADS + 2 * KV_HEADS, PAGES = 4;
constexpr uint32_t POSITIONS = 2 * PAGE_KEYS, PITCH = POSITIONS, STRIDE = ROWS * HEAD + 8;
alignas(16) static char cache[PAGES * 2 * KV_HEADS * PAGE_KEYS * ROW_BYTES], queries[POSITIONS * HEADS * HEAD_BYTES];
static char out[(HEADS * HEAD / X_COLS + 1) * PITCH * X_ROW_BYTES];
alignas(16) static float qkv[POSITIONS * STRIDE], angles[POSITIONS * HEAD], norms[2][HEAD];
static uint16_t pages[8] = {3, 1, 0, 0};
constexpr float EPS = 1e-5f, SCALE = 0.3f;
static struct {
  uint32_t start, count, window;
} chunk;

static void heads_kernel(uint32_t, uint32_t) {
  amk_prefill_heads(queries, cache, pages, qkv, angles, norms[0], norms[1], chunk.count, STRIDE, KV_HEADS, chunk.start, EPS, SCALE);
}
static void attention_kernel(uint32_t, uint32_t thread) {
  if (thread < ATTEND_THREADS) {
    amk_prefill_attention(out, queries, cache, pages, PITCH, chunk.count, KV_HEADS, chunk.start, chunk.window);
  }
}

static float element(uint32_t position, uint32_t row, uint32_t i) { return noise(position * ROWS + row, i); }
static void shaped(uint32_t position, uint32_t row, float const* norm, double* y) {
  double square = 0;
  for (uint32_t i = 0; i < HEAD; ++i) {
    y[i] = element(position, row, i);
    square += y[i] * y[i];
  }
  for (uint32_t i = 0; i < HEAD; ++i) {
    y[i] *= AMK_QK_NORM ? norm[i] / std::sqrt(square / HEAD + EPS) : 1;
  }
  for (uint32_t i = 0; i < HEAD / 2; ++i) {
    double const c = angles[position * HEAD + 2 * i], s = angles[position * HEAD + 2 * i + 1], a = y[i], b = y[i + HEAD / 2];
    y[i] = a * c - b * s, y[i + HEAD / 2] = b * c + a * s;
  }
}

// Greatest error of a token's heads.
static double check(uint32_t token) {
  uint32_t const position = chunk.start + token, oldest = chunk.window != 0 && position >= chunk.window ? position + 1 - chunk.window : 0;
  double worst = 0;
  for (uint32_t h = 0; h < HEADS; ++h) {
    double q[HEAD], k[HEAD], kept[HEAD], sum = 0, weighted[HEAD] = {};
    shaped(position, h, norms[0], q);
    for (uint32_t at = oldest; at <= position; ++at) {
      double score = 0;
      shaped(at, HEADS + h / GROUP, norms[1], k);
      for (uint32_t i = 0; i < HEAD; ++i) {
        kept[i] = element(at, HEADS + KV_HEADS + h / GROUP, i);
      }
      if (KV_CODES) {
        kept_row(k, HEAD);
        kept_row(kept, HEAD);
      }
      for (uint32_t i = 0; i < HEAD; ++i) {
        score += SCALE * q[i] * k[i];
      }
      double const e = std::exp(score);
      sum += e;
      for (uint32_t i = 0; i < HEAD; ++i) {
        weighted[i] += e * kept[i];
      }
    }
    for (uint32_t i = 0; i < HEAD; ++i) {
      double const got = half_value(*(uint16_t const*)x_place(out, PITCH, token, h * HEAD + i)), error = std::fabs(got - weighted[i] / sum);
      worst = error <= worst ? worst : error; // of NaN too
    }
  }
  return worst;
}

static double run(uint32_t start, uint32_t count, uint32_t window) {
  chunk = {start, count, window};
  std::memset(out, 0xff, sizeof out); // NaN
  for (uint32_t i = 0; i < count * STRIDE; ++i) {
    qkv[i] = i % STRIDE < ROWS * HEAD ? element(start + i / STRIDE, i % STRIDE / HEAD, i % STRIDE % HEAD) : 0.f;
  }
  block_threads = PREFILL_THREADS;
  uint32_t const threads = count * ROWS * HEAD_LANES;
  for (blockIdx.x = 0; blockIdx.x * PREFILL_THREADS < threads; ++blockIdx.x) {
    run_workers(heads_kernel);
  }
  block_threads = ATTEND_THREADS;
  for (blockIdx.x = 0; blockIdx.x < (count + ATTEND_TOKENS - 1) / ATTEND_TOKENS * HEADS; ++blockIdx.x) {
    run_workers(attention_kernel);
  }
  double worst = 0;
  for (uint32_t token = 0; token < count; token += token < 4 ? 1 : 7) {
    double const error = check(token);
    worst = error <= worst ? worst : error;
  }
  double const last = check(count - 1);
  return last <= worst ? worst : last;
}

int main() {
  heads_shape(angles, POSITIONS, norms);
  double const first = run(0, 100, 0), second = run(100, 130, 90);
  std::printf("%.3e\n", second <= first ? first : second);
  return 0;
}
