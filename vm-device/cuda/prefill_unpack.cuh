// Prefill: a matrix of codes as one of f16, in the form of a stored 16-bit matrix, right before its products. A value is its code times the
// scales of its group and row, rounded once; or the code itself, which is exact, where the products are multiplied by the row's scale.
#pragma once

#if AMK_UNPACK != 1
// Element `at` of the eight that a thread's 16 bytes of a unit have of its unit of operands number `operand` (see unpack_operand), without scales.
// Integers are put into the mantissa of 2^23; e4m3 into the upper bits, with an exponent that is 120 too small.
template <uint32_t UNPACK> __device__ __forceinline__ float code_value(uint4 v, uint32_t operand, uint32_t at, float zero) {
  constexpr uint32_t WHOLE = 0x4b000000u;
  constexpr float BASE = 8388608.f;
  if constexpr (is_half(UNPACK)) {
    uint32_t const word = operand == 0 ? v.x : operand == 1 ? v.y : operand == 2 ? v.z : v.w;
    if constexpr (UNPACK == AMK_UNPACK_MXFP4) { // as unpack_e2m1 has it
      uint32_t const half = (at < 4 ? word : e2m1_rest(word)) << (at / 2 % 2 * 8) >> (at % 2 * 16);
      return __uint_as_float((half & 0x0e00) << 13 | (half & 0x8000) << 16) * 0x1p126f;
    }
    return __uint_as_float(word >> (at / 2 * 4 + at % 2 * 16) & 15 | WHOLE) - (BASE + zero);
  } else {
    uint32_t const word = at < 4 ? operand == 0 ? v.x : v.z : operand == 0 ? v.y : v.w, byte = word >> at % 4 * 8 & 255;
    if constexpr (is_e4m3(UNPACK)) {
      return __uint_as_float((byte & 127) << 20 | (byte & 128) << 24) * 0x1p120f;
    } else {
      return __uint_as_float(byte ^ 128 | WHOLE) - (BASE + 128.f);
    }
  }
}

__device__ __forceinline__ float stored_half(char const* at) {
  uint32_t const bits = *(uint16_t const*)at;
  return __uint_as_float((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
}

// A lane's part of a unit. `out`: the first of its units of operands, of which `count` are wanted. Returns whether all values are in range.
template <uint32_t UNPACK> __device__ __forceinline__ bool unit_unpack(char* out, char const* unit, uint32_t lane, uint32_t count, float factor) {
  constexpr uint32_t OPERANDS = 1 << unpacked_log2(UNPACK), GROUPS = has_scales(UNPACK) ? unit_groups(UNPACK) : 1;
  uint4 const v = *(uint4 const*)(unit + lane * 16);
  char const* scales = unit + AMK_UNIT_BYTES + lane / 4 * scale_stride(UNPACK);
  float const zero = has_zeros(UNPACK) ? stored_half(scales + 2) : has_factors(UNPACK) ? 0.f : 8.f;
  bool inside = true;
#pragma unroll
  for (uint32_t i = 0; i < OPERANDS; ++i) {
    float scale = factor, offset = 0.f;
    if constexpr (has_factors(UNPACK)) {
      uint32_t const group = has_pair_groups(UNPACK) ? i * 2 + lane % 4 / 2 : i;
      uint8_t const* const factors = (uint8_t const*)scales + 4 + group * 2;
      scale *= stored_half(scales) * ((float)factors[0] - 128.f), offset = factor * (stored_half(scales + 2) * (float)factors[1]);
    } else if constexpr (has_scales(UNPACK)) {
      if constexpr (UNPACK == AMK_UNPACK_MXFP4) {
        scale *= __uint_as_float((uint32_t)(uint8_t)scales[i] << 23);
      } else {
        scale *= UNPACK == AMK_UNPACK_E4M3_G64 ? *(float const*)scales : stored_half(scales + i * GROUPS / OPERANDS * 2);
      }
    }
    float x[8];
#pragma unroll
    for (uint32_t at = 0; at < 8; ++at) {
      x[at] = code_value<UNPACK>(v, i, at, zero) * scale - offset;
      inside &= fabsf(x[at]) <= 65504.f;
    }
    if (i < count) {
      *(uint4*)(out + i * AMK_UNIT_BYTES + lane * 16) = make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7]));
    }
  }
  return inside;
}

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
#define AMK_COUNTS_PARAMETERS , uint32_t const *counts, uint32_t expert_tiles
#else
#define AMK_COUNTS_PARAMETERS
#endif
// One warp per unit of codes. `units`: of a tile of the result. `beyond` is set if a value is out of the range of f16. Of experts, which have
// `expert_tiles` tiles and the same factors each, those that no token has chosen are left out.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_unpack(char* out, char const* codes, float const* factors, uint32_t* beyond, uint32_t unpack,
                                                                               uint32_t code_units, uint32_t units, uint32_t tiles, uint32_t rows AMK_COUNTS_PARAMETERS) {
  uint32_t const lane = threadIdx.x % 32, number = (blockIdx.x * PREFILL_THREADS + threadIdx.x) / 32, tile = number / code_units;
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  if (tile >= tiles || (counts != nullptr && counts[tile / expert_tiles] == 0)) {
    return;
  }
  uint32_t const row = tile % expert_tiles * AMK_UNIT_ROWS + lane / 4;
#else
  uint32_t const row = tile * AMK_UNIT_ROWS + lane / 4;
  if (tile >= tiles) {
    return;
  }
#endif
  with_unpack(unpack, [&](auto kind) {
    constexpr uint32_t UNPACK = decltype(kind)::value;
    if constexpr (UNPACK != AMK_UNPACK_NONE) {
      uint32_t const first = number % code_units << unpacked_log2(UNPACK);
      char* const to = out + ((uint64_t)tile * units + first) * AMK_UNIT_BYTES;
      if (!unit_unpack<UNPACK>(to, codes + (uint64_t)number * unit_bytes(UNPACK), lane, units - first, row >= rows ? 0.f : factors == nullptr ? 1.f : factors[row])) {
        *beyond = 1;
      }
    }
  });
}
#endif
