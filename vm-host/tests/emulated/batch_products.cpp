// Products of several sequences (batch_products.cuh) as host C++: the threads of a worker are fibers, and a product of the tensor cores is computed
// from the registers of all lanes of a warp. The input file has cases: the format's number, columns, units of a tile and of a part of it, the vectors
// as bits, and the bytes of a packed tile; prints the 8 rows of each sequence. Compiled by
// vm-host/src/batch_products_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#include "codes.hpp"
#undef AMK_WARPS

constexpr uint32_t UNIT_COLS = 32, SEQS = AMK_SEQS, SHARE = 8;
constexpr float VECTOR_FACTOR = 1.f / 16, LOW_FACTOR = 2048.f;
inline uint32_t low_pair(float low, float high) { return element_pair(low * LOW_FACTOR, high * LOW_FACTOR); }
inline float rows_sum(float high, float low) { return high + low / LOW_FACTOR; }
constexpr uint32_t unit_column(uint32_t column) { return (column % UNIT_COLS & ~12u) | (column & 4) << 1 | (column & 8) >> 1; }
inline uint32_t warp_share(Worker const& w, uint32_t units) {
  uint32_t const warp = w.thread / 32;
  return warp < units ? (units - warp + 7) / 8 : 0;
}

#include "halves_mma.hpp"
#include "device.hpp"

static Case const* asked;
static float sums[8][8 * SEQS];

template <uint32_t UNPACK> void run_thread(Worker const& w) {
  uint32_t const lane = w.thread % 32, log2 = unpacked_log2(UNPACK), columns = asked->columns, units = asked->units, part_units = asked->part_units;
  float const* vector = asked->vectors.data() + lane / 4 % SEQS * columns;
  auto const four = [&](uint32_t e) { return e < columns ? make_float4(vector[e], vector[e + 1], vector[e + 2], vector[e + 3]) : make_float4(0, 0, 0, 0); };
  for (uint32_t unit0 = 0; unit0 < units; unit0 += part_units) {
    uint32_t const n = units - unit0 < part_units ? units - unit0 : part_units, mine = operand_share(w, n, log2);
    SeqInput x;
    uint32_t const first = operand_element(w, (unit0 << log2) + warp_unit(w));
    for (uint32_t j = 0; j < SHARE; ++j) {
      uint32_t const e = j < mine ? first + unit_elements(j) : columns;
      operand_of(vec4_halves(four(e)), vec4_halves(four(j < mine ? e + SECOND : columns)), x.half[j]);
    }
    if (EXCESS_CODES) {
      operand_sums(x);
    }
    BatchShare<UNPACK> v;
    char const* const place = (char const*)asked->tile.data() + unit0 * unit_bytes(UNPACK);
    if (mine == SHARE) {
      batch_take<UNPACK, true>(w, place, mine, v);
      batch_multiply<UNPACK, true>(w, v, x, mine, sums[w.thread / 32], unit0 == 0);
    } else {
      batch_take<UNPACK, false>(w, place, mine, v);
      batch_multiply<UNPACK, false>(w, v, x, mine, sums[w.thread / 32], unit0 == 0);
    }
  }
}
template <uint32_t UNPACK = 0> void run_format(Worker const& w) {
  if constexpr (UNPACK <= AMK_UNPACK_INT8_K) {
    if constexpr (has_unpack(UNPACK)) {
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
    Case const one(file, SEQS);
    asked = &one;
    run_workers([](uint32_t, uint32_t thread) { run_format(Worker{thread}); });
    for (uint32_t at = 0; at < 8 * SEQS; ++at) {
      float sum = 0.f;
      for (uint32_t warp = 0; warp < 8; ++warp) {
        sum += sums[warp][at];
      }
      std::printf("%.9g ", sum / VECTOR_FACTOR);
    }
    std::printf("\n");
  }
  return 0;
}
