// The heads and the attention of a prompt's chunks (prefill_vectors.cuh, prefill_attention.cuh) as host C++, against the definition in f64: two
// chunks of a session, the second of which attends to the first. Prints the greatest error. Compiled by vm-host/src/attention_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#include "tensor.hpp"
#include "group.hpp"
#include "amk_abi.h"
#include "attention.hpp"
#include "block.hpp"

inline float warp_sum(float v) { return v; }
inline void products_see_pieces() {}
#include "device.hpp"

constexpr uint32_t HEAD = AMK_HEAD_DIM, GROUP = AMK_GROUP, KV_HEADS = 2, HEADS = GROUP * KV_HEADS, ROWS = HEADS + 2 * KV_HEADS, PAGES = 4;
constexpr uint32_t POSITIONS = 2 * PAGE_KEYS, PITCH = POSITIONS, STRIDE = ROWS * HEAD + 8;
alignas(16) static char cache[PAGES * 2 * KV_HEADS * PAGE_KEYS * ROW_BYTES], queries[POSITIONS * HEADS * HEAD_BYTES];
static char out[(HEADS * HEAD / X_COLS + 1) * PITCH * X_ROW_BYTES];
alignas(16) static float qkv[POSITIONS * STRIDE], angles[POSITIONS * HEAD], norms[2][HEAD];
static uint16_t pages[8] = {3, 1, 0, 0};
constexpr float EPS = 1e-5f, SCALE = 0.3f, CAP = has_feature(AMK_FEATURE_SCORE_CAP) ? 0.7f : 0.f;
#if AMK_FEATURES >> AMK_FEATURE_SINKS & 1
constexpr bool SINKS = true;
static float sinks[HEADS];
#define SINKS_ARGUMENT , sinks
#else
constexpr bool SINKS = false;
static float const* const sinks = nullptr;
#define SINKS_ARGUMENT
#endif
static struct {
  uint32_t start, count, window;
} chunk;

static void heads_kernel(uint32_t, uint32_t) {
  amk_prefill_heads(queries, cache, pages, qkv, angles, norms[0], norms[1], chunk.count, STRIDE, KV_HEADS, chunk.start, EPS, SCALE);
}
static void attention_kernel(uint32_t, uint32_t thread) {
  if (thread < ATTEND_THREADS) {
    amk_prefill_attention(out, queries, cache, pages, PITCH, chunk.count, KV_HEADS, chunk.start, chunk.window, CAP SINKS_ARGUMENT);
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
    double q[HEAD], k[HEAD], kept[HEAD], sum = SINKS ? std::exp((double)sinks[h]) : 0, weighted[HEAD] = {};
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
      double const e = std::exp(CAP != 0 ? CAP * std::tanh(score / CAP) : score);
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
#if AMK_FEATURES >> AMK_FEATURE_SINKS & 1
  for (uint32_t h = 0; h < HEADS; ++h) {
    sinks[h] = 3 + 2 * noise(h, 5);
  }
#endif
  heads_shape(angles, POSITIONS, norms);
  double const first = run(0, 100, 0), second = run(100, 130, 90);
  std::printf("%.3e\n", second <= first ? first : second);
  return 0;
}
