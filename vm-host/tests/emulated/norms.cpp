// The norms of a prompt's chunk (prefill_vectors.cuh) as host C++, against the definition in f64: before a block and none there, of its results, and of
// all query heads and all key heads together. Prints the greatest error. Compiled by
// vm-host/src/prefill/norm_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#include "tensor.hpp"
#include "group.hpp"
#include "amk_abi.h"
#define threadIdx thread_of_worker
#include "attention.hpp"
#undef threadIdx
#include "block.hpp"

struct {
  struct {
    operator uint32_t() const { return fibers.running; }
  } x;
} threadIdx;
inline float warp_sum(float v) {
  for (int o = 16; o > 0; o /= 2) {
    v += __shfl_xor_sync(~0u, v, o);
  }
  return v;
}
#include "device.hpp"

// Columns are fewer than a row has words; the two widths of heads differ.
constexpr uint32_t TOKENS = 5, COLUMNS = 1100, STRIDE = 1104, PITCH = 8, Q_WIDTH = 1200, K_WIDTH = 240, QKV = Q_WIDTH + 2 * K_WIDTH + 8;
constexpr float EPS = 1e-3f;
alignas(16) static float residual[TOKENS * STRIDE], before[TOKENS * STRIDE], results[TOKENS * STRIDE], weights[STRIDE], qkv[TOKENS * QKV], raw[TOKENS * QKV], heads[Q_WIDTH + K_WIDTH];
alignas(1024) static char x[(COLUMNS / 64 + 1) * PITCH * X_ROW_BYTES];

template <void (*KERNEL)()> void body(uint32_t, uint32_t) {
  if (fibers.running < block_threads) {
    KERNEL();
  }
}
template <void (*KERNEL)()> void launch(uint32_t grid) {
  block_threads = PREFILL_THREADS, gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    run_workers(body<KERNEL>);
  }
}
static void norm() { amk_prefill_norm(x, residual, weights, STRIDE, PITCH, COLUMNS, EPS); }
static void plain() { amk_prefill_norm(x, residual, nullptr, STRIDE, PITCH, COLUMNS, EPS); }
static void post_norm() { amk_prefill_post_norm(residual, results, weights, STRIDE, COLUMNS, EPS); }
static void norm_heads() { amk_prefill_norm_heads(qkv, heads, QKV, Q_WIDTH, K_WIDTH, EPS); }

static double factor(float const* row, uint32_t width) {
  double square = 0;
  for (uint32_t i = 0; i < width; ++i) {
    square += (double)row[i] * row[i];
  }
  return 1 / std::sqrt(square / width + EPS);
}
static double worst;
static void compare(double got, double expected) {
  double const error = std::fabs(got - expected);
  worst = error <= worst ? worst : error; // of NaN too
}

int main() {
  for (uint32_t i = 0; i < TOKENS * STRIDE; ++i) {
    bool const there = i % STRIDE < COLUMNS;
    residual[i] = before[i] = there ? noise(i, 1) : 0.f, results[i] = there ? noise(i, 2) * 30 : 0.f;
    weights[i % STRIDE] = there ? 1 + noise(i % STRIDE, 3) / 2 : 0.f;
  }
  for (uint32_t i = 0; i < TOKENS * QKV; ++i) {
    qkv[i] = raw[i] = noise(i, 4) * (i % QKV < Q_WIDTH ? 1.f : 7.f);
    heads[i % (Q_WIDTH + K_WIDTH)] = 1 + noise(i % (Q_WIDTH + K_WIDTH), 5) / 2;
  }
  for (bool const normed : {true, false}) {
    std::memset(x, 0xff, sizeof x);
    normed ? launch<norm>(TOKENS) : launch<plain>(TOKENS);
    for (uint32_t at = 0; at < TOKENS * COLUMNS; ++at) {
      uint32_t const token = at / COLUMNS, e = at % COLUMNS;
      double const v = residual[token * STRIDE + e], expected = normed ? v * weights[e] * factor(residual + token * STRIDE, COLUMNS) : v;
      compare(half_value(*(uint16_t const*)x_place(x, PITCH, token, e)), expected);
    }
  }
  launch<post_norm>(TOKENS);
  for (uint32_t at = 0; at < TOKENS * STRIDE; ++at) {
    compare(residual[at], before[at] + (double)results[at] * weights[at % STRIDE] * factor(results + at / STRIDE * STRIDE, COLUMNS));
  }
  launch<norm_heads>(2 * TOKENS);
  for (uint32_t at = 0; at < TOKENS * QKV; ++at) {
    float const* const row = raw + at / QKV * QKV;
    uint32_t const e = at % QKV;
    double const of = e < Q_WIDTH ? factor(row, Q_WIDTH) : factor(row + Q_WIDTH, K_WIDTH);
    compare(qkv[at], e < Q_WIDTH + K_WIDTH ? raw[at] * heads[e] * of : raw[at]);
  }
  std::printf("%.3e\n", worst);
  return 0;
}
