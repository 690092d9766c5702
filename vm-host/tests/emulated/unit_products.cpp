// Products of one sequence (unit_products.cuh) as host C++: the threads of a worker are fibers, and a product of the tensor cores is computed from the
// registers of all lanes of a warp. Prints the 8 rows of each case. Compiled by vm-host/src/batch_products_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#undef AMK_WARPS
struct Parts {
  float part[2][8][64], sums[2][8];
};
#define WORKER_MEMBERS char* x; Parts* shared;
#include "codes.hpp"

constexpr uint32_t UNIT_COLS = 32, X_BYTES = 128;
constexpr float VECTOR_FACTOR = 1.f / 16;
constexpr uint32_t unit_column(uint32_t column) { return (column % UNIT_COLS & ~12u) | (column & 4) << 1 | (column & 8) >> 1; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
#include "halves_mma.hpp"
template <bool SIGNED> void mma_bytes(uint32_t (&)[4], uint4, uint2); // of integers, which have a program of their own (digits.cpp)

#include "device.hpp"

static Case const* asked;
static Parts parts;
alignas(16) static char staged[256 * X_BYTES];

template <uint32_t UNPACK> void run_thread(Worker const& w) {
  uint32_t const warp = w.thread / 32, columns = asked->columns, units = asked->units;
  float const* v = asked->vectors.data();
  for (uint32_t e = w.thread * 4; e < units * UNIT_COLS << unpacked_log2(UNPACK); e += 4 * THREADS_OF_WORKER) {
    stage_x4(w, e, e < columns ? make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]) : make_float4(0, 0, 0, 0));
  }
  consumers_sync();
  Sums<4> s[1] = {};
  uint32_t const mine = warp < units ? (units - warp + 7) / 8 : 0;
  chunk_multiply<UNPACK>(w, (char const*)asked->tile.data() + warp * unit_bytes(UNPACK), w.x + warp * group_bytes(UNPACK), mine, s[0]);
  tiles_finish<UNPACK, 1, 4>(w, s, parts.part[0][warp]);
}
template <uint32_t UNPACK = 0> void run_format(Worker const& w) {
  if constexpr (UNPACK <= AMK_UNPACK_INT8_K) {
    if constexpr (has_unpack(UNPACK) && !has_digits(UNPACK)) {
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
    run_workers([](uint32_t, uint32_t thread) {
      Worker w = {thread};
      w.x = staged, w.shared = &parts;
      run_format(w);
    });
    for (uint32_t row = 0; row < 8; ++row) {
      float sum = 0.f;
      for (uint32_t warp = 0; warp < 8; ++warp) {
        sum += parts.part[0][warp][row];
      }
      std::printf("%.9g ", sum / VECTOR_FACTOR);
    }
    std::printf("\n");
  }
  return 0;
}
