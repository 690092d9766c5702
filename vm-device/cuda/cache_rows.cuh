// Rows of the key/value cache as attention reads and writes them: always f16 in registers. A cache of f16 holds just that. A cache of e4m3
// (KV_CODES) holds codes and, behind them, their scale: a power of two as f16, so that every product of the two is an f16 and nothing is
// rounded when it is read. Same as reference-vm/src/codes.rs.
#pragma once

// Packs two values as f16, clamped to its range.
__device__ __forceinline__ uint32_t cache_pair(float low, float high) {
  return half_pair(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
}

// The scale of a row of codes, twice; and eight codes times it.
__device__ __forceinline__ uint32_t row_scale(char const* row) { return stage_load2(row + AMK_HEAD_DIM) * 0x10001u; }
__device__ __forceinline__ uint4 codes_take(uint2 codes, uint32_t scale) {
  uint2 const a = e4m3_halves(codes.x), b = e4m3_halves(codes.y);
  return make_uint4(halves_times(a.x, scale), halves_times(a.y, scale), halves_times(b.x, scale), halves_times(b.y, scale));
}

// The scale for a head whose greatest magnitude, an f16, is `most`: the smallest power of two with which it is a code, 448 at most, as f16; and
// its inverse. The mantissa of 448 is 0x600000: what is greater carries into the exponent.
struct RowScale {
  uint32_t bits;
  float inverse;
};
__device__ __forceinline__ RowScale scale_for(float most) {
  int32_t const exponent = (int32_t)((__float_as_uint(most) + 0x1fffffu) >> 23) - 127 - 8, low = exponent < -14 ? -14 : exponent, e = low > 7 ? 7 : low;
  return RowScale{(uint32_t)(e + 15) << 10, __uint_as_float((uint32_t)(127 - e) << 23)};
}
// Four values as codes. Those beyond 448 of the greatest scale saturate.
__device__ __forceinline__ uint32_t codes_of(float2 a, float2 b, float inverse) {
  return e4m3_pair(a.x * inverse, a.y * inverse) | e4m3_pair(b.x * inverse, b.y * inverse) << 16;
}
__device__ __forceinline__ float greater(float most, float2 v) { return fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))); }

// One warp: turns a key or value in shared memory, f16, into its row of codes, in place.
__device__ __forceinline__ void row_encode(uint4* row) {
  uint32_t const lane = threadIdx.x % 32;
  bool const has = lane < HEAD_CHUNKS;
  uint4 const v = has ? row[lane] : make_uint4(0, 0, 0, 0);
  float2 const a = half_values(v.x), b = half_values(v.y), c = half_values(v.z), d = half_values(v.w);
  float most = greater(greater(greater(greater(0.f, a), b), c), d);
#pragma unroll
  for (uint32_t o = 1; o < 32; o *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  }
  RowScale const s = scale_for(most);
  __syncwarp(); // every lane has read
  if (has) {
    ((uint2*)row)[lane] = make_uint2(codes_of(a, b, s.inverse), codes_of(c, d, s.inverse));
  }
  if (lane == 0) {
    row[ROW_CHUNKS - 1] = make_uint4(s.bits, 0, 0, 0);
  }
}

// Elements 8 * chunk and on of a row in shared memory; `scale` is that of a row of codes.
__device__ __forceinline__ uint4 row_take(char const* rows, uint32_t row, uint32_t chunk, uint32_t swizzle, uint32_t scale) {
  if constexpr (KV_CODES) {
    return codes_take(stage_load8(rows + row * ROW_BYTES + chunk * 8), scale);
  } else {
    return stage_load(rows + row * ROW_BYTES + (chunk ^ swizzle) * 16);
  }
}

// Scales of values that a lane multiplies (values_take), of 16 rows: keys lane % 4 * 2 and the next, and those 8 rows further on.
__device__ __forceinline__ uint2 value_scales(char const* rows, uint32_t lane) {
  if constexpr (KV_CODES) {
    char const* at = rows + lane % 4 * 2 * ROW_BYTES + AMK_HEAD_DIM;
    uint32_t const low = stage_load2(at) | stage_load2(at + ROW_BYTES) << 16;
    return make_uint2(low, stage_load2(at + 8 * ROW_BYTES) | stage_load2(at + 9 * ROW_BYTES) << 16);
  } else {
    return make_uint2(0, 0);
  }
}
// The A operand for 16 elements, `step` counted in these, over 16 keys: elements are rows, keys are columns. Codes are transposed in pairs of a
// key's elements, so rows lane / 4 and lane / 4 + 8 are elements 2 * (lane / 4) and the next (sum_element).
__device__ __forceinline__ uint4 values_take(char const* rows, uint32_t lane, uint32_t swizzle, uint32_t step, uint2 scales) {
  if constexpr (KV_CODES) {
    uint2 const v = two_matrices_transposed(rows + lane % 16 * ROW_BYTES + step * 16);
    uint2 const a = e4m3_halves(__byte_perm(v.x, 0, 0x3120)), b = e4m3_halves(__byte_perm(v.y, 0, 0x3120));
    return make_uint4(halves_times(a.x, scales.x), halves_times(a.y, scales.x), halves_times(b.x, scales.y), halves_times(b.y, scales.y));
  } else {
    return matrices_transposed(rows + (lane % 8 + lane / 16 * 8) * ROW_BYTES + ((2 * step + lane / 8 % 2) ^ swizzle) * 16);
  }
}
// The element of a head that is row lane / 4 of the i-th eight rows of these operands.
__device__ __forceinline__ uint32_t sum_element(uint32_t lane, uint32_t i) { return KV_CODES ? i / 2 * 16 + lane / 4 * 2 + i % 2 : i * 8 + lane / 4; }
