// The products of a warp (warp_products.cuh) for emulated threads. Include simt.hpp before.
#pragma once
#include "vectors.hpp"
#include <cmath>

inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __ldg(float const* p) { return *p; }
inline void __syncwarp() { meet(fibers.running / 32); }

// Shared memory; an address in it is the distance from its beginning.
#ifndef SHARED_BYTES
#define SHARED_BYTES (256 << 10)
#endif
alignas(1024) inline char prefill_memory[SHARED_BYTES];
inline uint32_t shared_address(void const* p) { return (uint32_t)((char const*)p - prefill_memory); }
inline uint4 stage_load(void const* p) { return *(uint4 const*)p; }
inline void stage_store(void* p, uint4 v) { *(uint4*)p = v; }

inline uint32_t stage_load2(void const* p) { return *(uint16_t const*)p; }
inline uint2 stage_load8(void const* p) { return *(uint2 const*)p; }

inline float half_value(uint16_t bits) { return (float)bits_as<_Float16>(bits); }
inline float upper_half_value(uint32_t bits) { return half_value((uint16_t)(bits >> 16)); }
inline uint16_t half_bits(float v) { return bits_as<uint16_t>((_Float16)v); }
inline uint32_t half_pair(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }
inline float2 half_values(uint32_t v) { return float2{half_value((uint16_t)v), half_value((uint16_t)(v >> 16))}; }
inline uint32_t halves_times(uint32_t a, uint32_t b) {
  float2 const x = half_values(a), y = half_values(b);
  return half_pair(x.x * y.x, x.y * y.y);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  uint64_t const both = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    r |= (uint32_t)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return r;
}
// The value of an e4m3, and the nearest one, of a tie that with a zero as its last bit: found among all.
inline float e4m3_value(uint32_t code) {
  uint32_t const exponent = code >> 3 & 15, mantissa = code & 7;
  float const v = exponent == 0 ? std::ldexp((float)mantissa, -9) : std::ldexp(8.f + (float)mantissa, (int)exponent - 10);
  return code >> 7 != 0 ? -v : v;
}
inline uint32_t e4m3_code(float v) {
  uint32_t best = 0;
  for (uint32_t code = 1; code < 0x7f; ++code) {
    float const now = std::fabs(e4m3_value(code) - std::fabs(v)), before = std::fabs(e4m3_value(best) - std::fabs(v));
    best = now < before || (now == before && code % 2 == 0) ? code : best;
  }
  return best | (std::signbit(v) ? 0x80u : 0u);
}
inline uint32_t e4m3_pair(float low, float high) { return e4m3_code(low) | e4m3_code(high) << 8; }
inline uint2 e4m3_halves(uint32_t v) {
  return make_uint2(half_pair(e4m3_value(v & 0xff), e4m3_value(v >> 8 & 0xff)), half_pair(e4m3_value(v >> 16 & 0xff), e4m3_value(v >> 24)));
}
inline float exp2_fast(float x) { return std::exp2(x); }

// What each lane of a warp has, for all lanes.
struct WarpWords {
  uint32_t word[6];
};
inline WarpWords warp_words[ALL_THREADS];
inline WarpWords const* warp_share(WarpWords const& mine) {
  uint32_t const t = fibers.running;
  warp_words[t] = mine;
  meet(t / 32);
  return warp_words + t / 32 * 32;
}
inline void warp_shared() { meet(fibers.running / 32); }
// Element `i`, 0 or 1, of a word of a lane.
inline float half_of(WarpWords const& of, uint32_t word, uint32_t i) { return half_value((uint16_t)(of.word[word] >> 16 * i)); }

// Row r, column c of a 16x16 first operand whose lanes have these words.
inline float first_operand(WarpWords const* of, uint32_t r, uint32_t c) { return half_of(of[r % 8 * 4 + c % 8 / 2], r / 8 + c / 8 * 2, c % 2); }
inline void mma_f16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  WarpWords const* of = warp_share(WarpWords{a.x, a.y, a.z, a.w, b0, b1});
  uint32_t const lane = fibers.running % 32;
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t const row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      c[i] += first_operand(of, row, k) * half_of(of[column * 4 + k % 8 / 2], 4 + k / 8, k % 2);
    }
  }
  warp_shared();
}
inline uint32_t transposed(uint32_t v) {
  WarpWords const* of = warp_share(WarpWords{v});
  uint32_t const row = fibers.running % 32 / 4, column = fibers.running % 4 * 2;
  uint32_t const r = (of[column * 4 + row / 2].word[0] >> row % 2 * 16 & 0xffff) | (of[(column + 1) * 4 + row / 2].word[0] >> row % 2 * 16 & 0xffff) << 16;
  warp_shared();
  return r;
}
inline uint4 matrices_transposed(char const* row) {
  WarpWords const* of = warp_share(WarpWords{shared_address(row)});
  uint32_t const lane = fibers.running % 32;
  uint32_t r[4];
  for (uint32_t m = 0; m < 4; ++m) {
    uint32_t both[2];
    for (uint32_t i = 0; i < 2; ++i) {
      both[i] = ((uint16_t const*)(prefill_memory + of[m * 8 + lane % 4 * 2 + i].word[0]))[lane / 4];
    }
    r[m] = both[0] | both[1] << 16;
  }
  warp_shared();
  return make_uint4(r[0], r[1], r[2], r[3]);
}

inline uint2 two_matrices_transposed(char const* row) {
  WarpWords const* of = warp_share(WarpWords{shared_address(row)});
  uint32_t const lane = fibers.running % 32;
  uint32_t r[2];
  for (uint32_t m = 0; m < 2; ++m) {
    uint32_t both[2];
    for (uint32_t i = 0; i < 2; ++i) {
      both[i] = ((uint16_t const*)(prefill_memory + of[m * 8 + lane % 4 * 2 + i].word[0]))[lane / 4];
    }
    r[m] = both[0] | both[1] << 16;
  }
  warp_shared();
  return make_uint2(r[0], r[1]);
}

// A key or a value as the cache keeps it, by a definition that shares nothing with the device: the scale is found by trying.
inline void kept_row(double* row, uint32_t head) {
  float most = 0;
  for (uint32_t i = 0; i < head; ++i) {
    row[i] = half_value(half_bits((float)row[i]));
    most = std::fmax(most, (float)std::fabs(row[i]));
  }
  float scale = 0x1p-14f;
  while (most > 448.f * scale && scale < 128.f) {
    scale *= 2;
  }
  for (uint32_t i = 0; i < head; ++i) {
    row[i] = e4m3_value(e4m3_code((float)row[i] / scale)) * scale;
  }
}
// Numbers that look random, the same in every run, between -1 and 1.
inline float noise(uint32_t a, uint32_t b) {
  uint32_t v = a * 2654435761u + b * 40503u + 12345u;
  v ^= v >> 15, v *= 2246822519u, v ^= v >> 13, v *= 3266489917u, v ^= v >> 16;
  return (float)(v % 20001) / 10000.f - 1.f;
}

// Cosines and sines of the rotary angles of all positions, and the weights of two norms.
template <uint32_t HEAD> void heads_shape(float* angles, uint32_t positions, float (&norms)[2][HEAD]) {
  for (uint32_t i = 0; i < positions * HEAD / 2; ++i) {
    double const angle = (double)(i / (HEAD / 2)) * std::pow(1e4, -2.0 * (i % (HEAD / 2)) / HEAD);
    angles[2 * i] = (float)std::cos(angle), angles[2 * i + 1] = (float)std::sin(angle);
  }
  for (uint32_t i = 0; i < 2 * HEAD; ++i) {
    norms[i / HEAD][i % HEAD] = 1 + noise(i, 77) / 2;
  }
}
