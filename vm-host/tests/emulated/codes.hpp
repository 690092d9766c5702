// What unpacking of codes takes (unpack.cuh), as host C++; and the input file of programs that multiply tiles of them. Include simt.hpp before.
#pragma once
#include "half.hpp"
#include "vectors.hpp"

using std::fmaf;
#ifndef WORKER_MEMBERS // more of them, where they are needed
#define WORKER_MEMBERS
#endif
struct Worker {
  uint32_t thread;
  WORKER_MEMBERS
};
inline uint4 stage_load(void const* p) { return *(uint4 const*)p; }
inline uint2 stage_load8(void const* p) { return *(uint2 const*)p; }
inline void store_if(bool wanted, void* at, uint32_t v) {
  if (wanted) {
    *(uint32_t*)at = v;
  }
}
inline uint32_t stage_load4(void const* p) { return *(uint32_t const*)p; }
inline uint32_t stage_load2(void const* p) { return *(uint16_t const*)p; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  uint64_t const all = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    r |= (uint32_t)(all >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return r;
}

// Floats of 16 bits, of which no test has one that is no number.
inline float half_value(uint32_t bits) {
  uint32_t const exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float const v = exponent == 0 ? std::ldexp((float)mantissa, -24) : std::ldexp((float)(1024 + mantissa), (int)exponent - 25);
  return (bits & 0x8000) != 0 ? -v : v;
}
inline uint32_t element_pair(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline float upper_half_value(uint32_t bits) { return half_value(bits >> 16); }
inline float2 pair_values(uint32_t v) { return float2{half_value(v & 0xffff), half_value(v >> 16)}; }
inline uint32_t halves_minus(uint32_t a, uint32_t b) {
  float2 const x = pair_values(a), y = pair_values(b);
  return element_pair(x.x - y.x, x.y - y.y);
}
inline uint32_t e4m3_half(uint32_t code) {
  uint32_t const exponent = code >> 3 & 15, mantissa = code & 7;
  float const v = exponent == 0 ? std::ldexp((float)mantissa, -9) : std::ldexp((float)(8 + mantissa), (int)exponent - 10);
  return half_of((code & 0x80) != 0 ? -v : v);
}
inline uint2 e4m3_halves(uint32_t v) { return uint2{e4m3_half(v & 0xff) | e4m3_half(v >> 8 & 0xff) << 16, e4m3_half(v >> 16 & 0xff) | e4m3_half(v >> 24) << 16}; }

// Cases: the format's number, columns, units of a tile and of a part of it, the vectors as bits, and the bytes of a packed tile.
struct CaseFile {
  FILE* file;
  unsigned number() {
    unsigned v = 0;
    return std::fscanf(file, "%u", &v) == 1 ? v : 0;
  }
};
struct Case {
  uint32_t unpack, columns, units, part_units;
  std::vector<float> vectors;
  std::vector<uint4> tile;
  Case(CaseFile from, uint32_t seqs) : unpack(from.number()), columns(from.number()), units(from.number()), part_units(from.number()) {
    vectors.resize(seqs * columns);
    for (float& v : vectors) {
      v = __uint_as_float(from.number());
    }
    uint32_t const bytes = from.number();
    tile.assign(bytes / 16, uint4{});
    for (uint32_t i = 0; i < bytes; ++i) {
      ((uint8_t*)tile.data())[i] = (uint8_t)from.number();
    }
  }
};
