// Rounding to f16 in emulated kernels.
#pragma once
#include <cmath>
#include <cstdint>

// Rounds to the nearest f16, ties to even; beyond its range infinity.
inline uint32_t half_of(float v) {
  uint32_t const sign = std::signbit(v) ? 0x8000 : 0;
  float const x = std::fabs(v);
  if (!(x < 65520.f)) {
    return sign | 0x7c00;
  }
  int const e = x < 0x1p-14f ? -14 : std::ilogb(x);
  return sign | (uint32_t)((e + 14) * 1024 + (int)std::nearbyint(std::ldexp(x, 10 - e)));
}
