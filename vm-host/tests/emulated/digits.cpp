// Integer products of codes (digits.cuh) as host C++: the threads of a worker are fibers, each warp stages its groups of the vector, and a product of
// the tensor cores is computed from the registers of all lanes of a warp. Prints the 8 rows of each case. Compiled by vm-host/src/digits_tests.rs.
#define WORKERS 1
#include <algorithm>
#include "simt.hpp"
#include "codes.hpp"
#undef AMK_WARPS
constexpr float VECTOR_FACTOR = 1.f / 16;
#include "bytes_mma.hpp"

#include "device.hpp"

static Case const* asked;
static float sums[8][8];
alignas(16) static char staged[96 * 288];
constexpr uint32_t HOST_BYTES[] = {HOST_DIGIT_BYTES};
static uint32_t staged_bytes; // that the host reserves: what the device stages may not go beyond
struct TileSums {
  float c[1][4];
};

template <uint32_t UNPACK> void run_thread(Worker const& w) {
  constexpr uint32_t COLS = is_half(UNPACK) ? 128 : 64, ONCE = 128 / COLS; // units that a warp stages in a turn
  uint32_t const lane = w.thread % 32;
  for (uint32_t turn = 0; turn * ONCE * 8 < asked->units; ++turn) {
    uint32_t const unit = w.thread / 32 + (turn * ONCE + lane * 4 / COLS) * 8, e = unit * COLS + lane * 4 % COLS;
    float const* v = asked->vectors.data() + e;
    float4 const four = e < asked->columns ? make_float4(v[0], v[1], v[2], v[3]) : make_float4(0, 0, 0, 0);
    float4 const once[1] = {four};
    stage_digits(staged + unit * digit_bytes(UNPACK), 0, lane, digit_form(UNPACK), e, 0, asked->units * COLS, once);
  }
  meet(w.thread / 32);
  staged_bytes = asked->units * HOST_BYTES[UNPACK];
  TileSums s[1] = {};
  for (uint32_t unit = w.thread / 32; unit < asked->units; unit += 8) {
    char const* const place = (char const*)asked->tile.data() + unit * unit_bytes(UNPACK);
    uint4 const weights = stage_load(place + lane * 16);
    uint32_t scales[2];
    OwnScales<UNPACK>(w, place).load(0, scales);
    DigitGroup<UNPACK> const group[1] = {digits_load<UNPACK>(w, staged + unit * digit_bytes(UNPACK))};
    digits_multiply<UNPACK, 1, 1>(w, s, group, &weights, scales);
  }
  float sum = digits_sum<UNPACK>(w, s[0].c[0]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += digit_threads(UNPACK) == 4 ? __shfl_xor_sync(~0u, sum, 2) : 0.f;
  sums[w.thread / 32][lane / 4] = sum;
}
template <uint32_t UNPACK = 0> void run_format(Worker const& w) {
  if constexpr (UNPACK <= AMK_UNPACK_INT8_K) {
    if constexpr (has_unpack(UNPACK) && has_digits(UNPACK)) {
      if (asked->unpack == UNPACK) {
        return run_thread<UNPACK>(w);
      }
    }
    run_format<UNPACK + 1>(w);
  }
}

int main(int, char** arguments) {
  CaseFile file = {std::fopen(arguments[1], "r")};
  for (uint32_t left = file.number(); left > 0; --left) {
    Case const one(file, 1);
    asked = &one;
    std::fill(std::begin(staged), std::end(staged), 'x');
    run_workers([](uint32_t, uint32_t thread) { run_format(Worker{thread}); });
    if (!std::all_of(staged + staged_bytes, std::end(staged), [](char c) { return c == 'x'; })) {
      std::printf("beyond the vector");
    }
    for (uint32_t row = 0; row < 8; ++row) {
      float sum = 0.f;
      for (uint32_t warp = 0; warp < 8; ++warp) {
        sum += sums[warp][row];
      }
      std::printf("%.9g ", sum / VECTOR_FACTOR);
    }
    std::printf("\n");
  }
  return 0;
}
