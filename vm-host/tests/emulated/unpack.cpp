// The kernel that unpacks codes to f16 (prefill_unpack.cuh) as host C++, one thread after the other. The input file has its numbers, the factors of
// the rows as bits, and the bytes of the packed matrix; prints the 16-bit words of the result. Compiled by vm-host/src/prefill/unpack_tests.rs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
#include "half.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return uint2{x, y}; }
inline float __uint_as_float(uint32_t v) {
  float r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}
struct Place {
  uint32_t x;
};
inline Place threadIdx, blockIdx;
// What the resident kernel's unpacking needs to be parsed, and is not called here.
struct Worker {
  uint32_t thread;
};
uint2 stage_load8(char const*);
uint32_t stage_load4(char const*);
uint32_t stage_load2(char const*);
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);
float half_value(uint32_t), upper_half_value(uint32_t);
uint2 e4m3_halves(uint32_t);
uint32_t halves_minus(uint32_t, uint32_t);
uint4 stage_load(char const*);

inline uint32_t half_pair(float low, float high) { return half_of(low) | half_of(high) << 16; }
constexpr uint32_t PREFILL_THREADS = 256;
template <typename F> void with_unpack(uint32_t unpack, F const& f);
#include "device.hpp"

template <typename F> void with_unpack(uint32_t unpack, F const& f) {
  switch (unpack) {
    case 1: return f(Number<1>());
    case 2: return f(Number<2>());
    case 3: return f(Number<3>());
    case 4: return f(Number<4>());
    case 5: return f(Number<5>());
    case 6: return f(Number<6>());
    case 7: return f(Number<7>());
    case 8: return f(Number<8>());
    case 9: return f(Number<9>());
    case 10: return f(Number<10>());
    case 11: return f(Number<11>());
  }
}

int main(int, char** arguments) {
  FILE* const file = std::fopen(arguments[1], "r");
  auto const number = [&] {
    unsigned v = 0;
    return std::fscanf(file, "%u", &v) == 1 ? v : 0;
  };
  uint32_t const unpack = number(), code_units = number(), units = number(), tiles = number(), rows = number(), bytes = number();
  std::vector<float> factors(rows);
  for (float& factor : factors) {
    factor = __uint_as_float(number());
  }
  std::vector<uint4> codes(bytes / 16 + 1), out(tiles * units * AMK_UNIT_BYTES / 16);
  for (uint32_t i = 0; i < bytes; ++i) {
    ((uint8_t*)codes.data())[i] = (uint8_t)number();
  }
  uint32_t beyond = 0;
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  uint32_t const counts[] = {1, 0, 7}; // of experts of one tile each
#define EXPERTS , counts, 1
#else
#define EXPERTS
#endif
  for (blockIdx.x = 0; blockIdx.x * PREFILL_THREADS < tiles * code_units * 32; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < PREFILL_THREADS; ++threadIdx.x) {
      amk_prefill_unpack((char*)out.data(), (char const*)codes.data(), factors.data(), &beyond, unpack, code_units, units, tiles, rows EXPERTS);
    }
  }
  std::printf("%u\n", beyond);
  for (uint32_t i = 0; i < out.size() * 8; ++i) {
    std::printf("%u ", ((uint16_t*)out.data())[i]);
  }
  std::printf("\n");
  return 0;
}
