// Floats of 16 bits: their conversions, which are instructions of their own.
#pragma once

// What vectors are multiplied with before they are staged: a power of two that keeps large elements in the range of f16.
constexpr float VECTOR_FACTOR = AMK_DTYPE == AMK_DTYPE_F16 ? 1.f / AMK_F16_VECTOR_DIVISOR : 1.f;

// What low halves are multiplied with in kernels of several sequences, where they have sums of their own: as f16 those of small elements would have
// few bits, and words of which the tag takes some (input_write) none.
constexpr float LOW_FACTOR = AMK_DTYPE == AMK_DTYPE_F16 ? 2048.f : 1.f;
// The sum of products with high halves and with low ones.
__device__ __forceinline__ float rows_sum(float high, float low) { return LOW_FACTOR != 1.f ? fmaf(low, 1.f / LOW_FACTOR, high) : high + low; }

#if AMK_DTYPE != AMK_DTYPE_F32
// Packs two floats as stored elements, the first in the low half; and unpacks them.
__device__ __forceinline__ uint32_t element_pair(float low, float high) {
  uint32_t r;
#if AMK_DTYPE == AMK_DTYPE_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
__device__ __forceinline__ float2 pair_values(uint32_t v) {
#if AMK_DTYPE == AMK_DTYPE_BF16
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
#else
  float2 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(v));
  return r;
#endif
}
// The same of low halves.
__device__ __forceinline__ uint32_t low_pair(float low, float high) { return LOW_FACTOR != 1.f ? element_pair(low * LOW_FACTOR, high * LOW_FACTOR) : element_pair(low, high); }
#endif

// The value of the f16 in the lower half of a word.
__device__ __forceinline__ float half_value(uint32_t bits) {
  float v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(v) : "r"(bits));
  return v;
}

// The same of the upper half.
__device__ __forceinline__ float upper_half_value(uint32_t bits) {
  float v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "r"(bits));
  return v;
}

// Four e4m3 as two pairs of f16.
__device__ __forceinline__ uint2 e4m3_halves(uint32_t v) {
  uint2 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(r.x), "=r"(r.y) : "r"(v));
  return r;
}
// Two floats as e4m3, the first in the low byte: to nearest, ties to even; beyond 448 that.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint32_t r;
  asm("{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, %1, %2; cvt.u32.u16 %0, p; }" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// The products of two pairs of f16.
__device__ __forceinline__ uint32_t halves_times(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#if AMK_DTYPE == AMK_DTYPE_F16
// The differences of two pairs of f16.
__device__ __forceinline__ uint32_t halves_minus(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#endif
